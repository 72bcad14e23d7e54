"""64 trainers on one server: all are served, and those who wait keep nothing else waiting."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

import pserver
from pserver.client.cluster import Cluster
from pserver.client.status import fetch_status
from pserver.config import TrainerSettings
from pserver.transport.gen import coordinator_pb2
from pserver.transport.loop import LoopThread
from tests.cluster.counted import CountedServer
from tests.cluster.processes import Child, Start

NUM_TRAINERS = 64
NUM_ROUNDS = 3
NUM_ELEMENTS = 1024
#: Every event of gRPC wakes every event loop of a process, so 64 sessions of one process share a few.
NUM_LOOPS = 4
#: Each of them may wait for all others on a machine that is busy with something else.
TIMEOUT_S = 100.0
#: No lease shall end here because the machine is busy.
LEASE_S = 60.0
#: Health, status, renewal and another model's step are to be answered within this time, whoever waits.
ANSWER_S = 1.0
NUM_TRIES = 10
#: Of the ids of contexts that tests push by hand; those of steps count from 1.
FIRST_CONTEXT = 10_000


class Trainer:
    """A session and its part of a model of one parameter, trained by SGD with learning rate 1."""

    def __init__(self, address: str, loop: LoopThread, *, rank: int, world_size: int = NUM_TRAINERS) -> None:
        settings = TrainerSettings.resolve(address, rank=rank, world_size=world_size, timeout_s=TIMEOUT_S)
        self.session = Cluster(settings, shared_loop=loop)
        self.session.start()
        self._world_size = world_size

    def register(self, name: str) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS))
        self._optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", self.weight)], lr=1.0, name=name, cluster=self.session
        )

    def step(self) -> int:
        """One step with this rank as gradient; returns the number of trainers in its round."""
        self.weight.grad = torch.full((NUM_ELEMENTS,), float(self.session.rank))
        self._optimizer.step()
        assert self._optimizer.last_result is not None
        return self._optimizer.last_result.num_trainers

    def push_contexts(self, number: int) -> None:
        """Leaves so many contexts open on the server."""
        for context_id in range(FIRST_CONTEXT, FIRST_CONTEXT + number):
            self._optimizer._model.push(context_id, [torch.ones(NUM_ELEMENTS)])

    def drop_contexts(self, number: int) -> None:
        for context_id in range(FIRST_CONTEXT, FIRST_CONTEXT + number):
            self._optimizer._model.drop_context(context_id)


SERVE = ("s0", "--coordinator", "--trainer-lease-s", str(LEASE_S), "--server-lease-s", str(LEASE_S))


@pytest.fixture(scope="module")
def server() -> Iterator[CountedServer]:
    server = CountedServer(*SERVE)
    yield server
    server.close()


@pytest.fixture(scope="module")
def trainers(server: CountedServer) -> Iterator[list[Trainer]]:
    address = server.address()
    loops = [LoopThread(f"load-{number}") for number in range(NUM_LOOPS)]
    for loop in loops:
        loop.start()
    joined = in_threads(lambda rank: Trainer(address, loops[rank % NUM_LOOPS], rank=rank), range(NUM_TRAINERS))
    yield joined
    in_threads(lambda trainer: trainer.session.close(), joined)
    for loop in loops:
        loop.close()


def in_threads(function: Callable, each: Sequence) -> list:
    """Calls the function with every element, each on a thread of its own."""
    with ThreadPoolExecutor(len(each)) as threads:
        return list(threads.map(function, each))


def register(trainers: Sequence[Trainer], name: str) -> None:
    in_threads(lambda trainer: trainer.register(name), trainers)


@pytest.mark.timeout(300)
def test_64_trainers_take_part_in_every_round(trainers: list[Trainer]) -> None:
    register(trainers, "crowd")
    assert (
        in_threads(lambda trainer: [trainer.step() for _ in range(NUM_ROUNDS)], trainers)
        == [[NUM_TRAINERS] * NUM_ROUNDS] * NUM_TRAINERS
    )
    mean = sum(range(NUM_TRAINERS)) / NUM_TRAINERS
    for trainer in trainers:
        assert torch.equal(trainer.weight, torch.full((NUM_ELEMENTS,), -mean * NUM_ROUNDS))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_64_trainers_have_many_contexts_open_at_once(
    trainers: list[Trainer], server: CountedServer, number: int
) -> None:
    register(trainers, f"contexts-{number}")
    in_threads(lambda trainer: trainer.push_contexts(number), trainers)
    assert server.counts()["GradientContext"] == NUM_TRAINERS * number
    in_threads(lambda trainer: trainer.drop_contexts(number), trainers)
    assert server.counts()["GradientContext"] == 0
    assert in_threads(Trainer.step, trainers) == [NUM_TRAINERS] * NUM_TRAINERS


@pytest.mark.timeout(300)
def test_63_waiting_trainers_keep_nothing_else_waiting(
    trainers: list[Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    """The best of several tries counts, so that a busy machine decides nothing."""
    address = trainers[0].session.settings.address
    register(trainers, "waits")
    *waiting, last = trainers
    loop = LoopThread("load-other")
    loop.start()
    other = Trainer(address, loop, rank=NUM_TRAINERS, world_size=1)
    other.register("other")
    other.step()
    renewal = coordinator_pb2.RenewRequest(trainer_id=last.session.trainer_id)
    with ThreadPoolExecutor(NUM_TRAINERS) as threads, grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        steps = [threads.submit(trainer.step) for trainer in waiting]
        until_waiting_for(address, "waits", (NUM_TRAINERS - 1,))
        questions: dict[str, Callable[[], object]] = {
            "health": lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S),
            "status": lambda: fetch_status(address, TIMEOUT_S),
            "renewal": lambda: last.session.call_coordinator(
                "Renew", renewal, coordinator_pb2.RenewReply, what="renewing"
            ),
            "another model's step": other.step,
        }
        took_s = {name: [seconds(question) for _ in range(NUM_TRIES)] for name, question in questions.items()}
        assert not any(step.done() for step in steps)
        took_s["the round itself"] = [seconds(lambda: steps.append(threads.submit(last.step)) or steps[-1].result())]
        assert [step.result(TIMEOUT_S) for step in steps] == [NUM_TRAINERS] * NUM_TRAINERS
    other.session.close()
    loop.close()
    with capsys.disabled():
        for name, each in took_s.items():
            print(f"\n  {name}: best {min(each):.4f} s, median {median(each):.4f} s, worst {max(each):.4f} s", end="")
    assert {name: min(each) for name, each in took_s.items() if min(each) > ANSWER_S} == {}


def until_waiting_for(address: str, model: str, ranks: tuple[int, ...]) -> None:
    """Polls until the next round of a model waits for just these ranks."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while True:
        found = next(each for each in fetch_status(address, TIMEOUT_S).models if each.name == model)
        if found.waiting_for_ranks == ranks:
            return
        assert time.monotonic() < give_up_s, found
        time.sleep(0.05)


def seconds(call: Callable[[], object]) -> float:
    begin_s = time.monotonic()
    call()
    return time.monotonic() - begin_s


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_64_trainers_in_processes_of_their_own_have_200_contexts_open_each(start: Start) -> None:
    server = start(CountedServer, *SERVE)
    script = str(Path(__file__).with_name("trainer_processes.py"))
    child = start(
        Child,
        "trainers",
        [sys.executable, script, server.address(), "processes", str(NUM_TRAINERS), "200"],
        PSERVER_TIMEOUT_S="300",
    )
    assert child.wait(500.0) == 0
    mean = sum(range(NUM_TRAINERS)) / NUM_TRAINERS
    assert child.stdout == [f"{-mean * NUM_ROUNDS} [{NUM_TRAINERS}]"] * NUM_TRAINERS
    server.counts_with(Member=0, GradientContext=0)
