"""A trainer that dies by SIGKILL at every point of a step: its gradient is in the round on all shards or on none."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.core.sync import Async, Bsp, Ssp, SyncPolicy, policy_arguments
from pserver.errors import RoundFailed
from pserver.server.node import ServerNode
from pserver.types import StepResult
from tests.cluster.held_trainer import NUM_ELEMENTS, gradient
from tests.cluster.processes import SOON_S, START_S, Child
from tests.service.grpc_cluster import GrpcCluster
from tests.waiting import until

LEASE_S = 4.0
SURVIVORS = (0, 1)
NUM_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model with a trainer that is killed, and what must come of it.

    Attributes:
        point: where the trainer is when it dies; see held_trainer.py.
        transport: of the trainer that is killed; the survivors share memory.
        policy: of the model.
        contexts: on both shards just before the kill, those of the survivors included.
        counted: whether the killed trainer's second gradient is in a round.
        steps_before: steps of the survivors that are done, or under way, when the trainer dies.
    """

    point: str
    transport: str = "grpc"
    policy: SyncPolicy = field(default_factory=Bsp)
    contexts: tuple[int, int]
    counted: bool = False
    steps_before: int = NUM_STEPS


#: By the name of the model. Under Bsp the survivors' second step is under way when the trainer dies, unless it says so.
CASES = {
    "nothing-sent": Case(point="asked", contexts=(2, 2)),
    "first-message-to-one-shard": Case(point="first_message", contexts=(2, 2)),
    "everything-to-one-shard": Case(point="one_shard", contexts=(3, 2)),
    "and-the-first-message-to-the-other": Case(point="one_and_a_bit", contexts=(3, 2)),
    "decided-before-it-heard-so": Case(point="both", contexts=(0, 0), counted=True, steps_before=2),
    "after-its-step": Case(point="replied", contexts=(0, 0), counted=True, steps_before=2),
    "committed-but-not-decided": Case(point="both", contexts=(1, 1), steps_before=1),
    "pushed-but-not-committed": Case(point="pushed", contexts=(3, 3), steps_before=1),
    "ssp": Case(point="one_shard", policy=Ssp(0), contexts=(3, 2)),
    "async": Case(point="one_shard", policy=Async(), contexts=(1, 0)),
    "initial-values-half-sent": Case(point="initialising", contexts=(0, 0), steps_before=0),
    "memory-half-written": Case(point="half_written", transport="shm", contexts=(2, 2)),
    "memory-written": Case(point="written", transport="shm", contexts=(2, 2)),
    "memory-half-stamped": Case(point="half_stamped", transport="shm", contexts=(2, 2)),
    "memory-stamped": Case(point="asked", transport="shm", contexts=(2, 2)),
    "memory-announced-to-one-shard": Case(point="one_shard", transport="shm", contexts=(3, 2)),
    "memory-decided-before-it-heard-so": Case(
        point="both", transport="shm", contexts=(0, 0), counted=True, steps_before=2
    ),
    "memory-committed-but-not-decided": Case(point="both", transport="shm", contexts=(1, 1), steps_before=1),
    "memory-pushed-but-not-committed": Case(point="pushed", transport="shm", contexts=(3, 3), steps_before=1),
    "memory-ssp": Case(point="one_shard", transport="shm", policy=Ssp(0), contexts=(3, 2)),
}
BEREAVED = {name: case for name, case in CASES.items() if case.point != "initialising"}


class Survivor:
    """One trainer's part of one model."""

    def __init__(self, session: Cluster, name: str) -> None:
        self._session = session
        self._name = name
        self.results: list[StepResult] = []

    def register(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS))
        self._optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            [("weight", self.weight)],
            lr=1.0,
            name=self._name,
            sync=CASES[self._name].policy,
            cluster=self._session,
        )

    def step_until(self, number: int) -> None:
        while len(self.results) < number:
            self.weight.grad = gradient(self._session.rank, len(self.results) + 1)
            self._optimizer.step()
            assert self._optimizer.last_result is not None
            self.results.append(self._optimizer.last_result)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one model came to; `values` are each survivor's, then what a newcomer reads.

    Contexts and mailboxes: how many there are, by server.
    """

    contexts_after: list[int]
    mailboxes_after: list[int]
    results: list[list[StepResult]]
    values: list[torch.Tensor]
    round: int


@dataclass(slots=True, kw_only=True)
class Story:
    """Everything that the tests look at."""

    outcomes: dict[str, Outcome]
    ids: list[int]
    calls_under_way: list[int]


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    """One process with a trainer for every case is killed once, when each of them is where it should be."""
    with GrpcCluster(2, trainer_lease_s=LEASE_S) as servers, ThreadPoolExecutor(2 * len(CASES)) as threads:
        with servers.connect(0, timeout_s=60.0) as first, servers.connect(1, timeout_s=60.0) as second:
            survivors = {name: [Survivor(session, name) for session in (first, second)] for name in CASES}

            def together(method: str, names: object, *arguments: object) -> list[Future[None]]:
                chosen = [each for name in names for each in survivors[name]]
                return [threads.submit(getattr(each, method), *arguments) for each in chosen]

            def wait(futures: list[Future[None]]) -> None:
                for future in futures:
                    future.result(SOON_S)

            wait(together("register", BEREAVED))
            child = Child("held", held_trainer(servers))
            try:
                for name, case in CASES.items():
                    child.wait_for(f"^{'held' if case.point == 'initialising' else 'ready'} {name}$", START_S)
                ids_before = [each.trainer_id for each in servers.status().trainers]
                wait(together("step_until", BEREAVED, 1))
                under_way = [
                    future
                    for name, case in BEREAVED.items()
                    for future in together("step_until", [name], case.steps_before)
                ]
                child.say("go on")
                for name, case in CASES.items():
                    if case.point != "both" or case.counted:
                        child.wait_for(f"^held {name}$")
                    # Not looked at again: what survivors send comes and goes, where nobody waits for the others.
                    until(lambda case=case, name=name: contexts_of(servers, name) == list(case.contexts), name)
                child.send(SIGKILL)
                child.wait()
            finally:
                child.close()
            registering = together("register", CASES.keys() - BEREAVED.keys())
            until(lambda: len(servers.status().trainers) == len(SURVIVORS), "the lease has ended", limit_s=SOON_S)
            wait(under_way + registering)
            wait(together("step_until", CASES, NUM_STEPS))
            until(lambda: sum(server._calls.number for server in servers.servers) == 0, "no call is under way")
            with servers.connect(2, timeout_s=60.0) as newcomer:
                ids = [*ids_before, newcomer.trainer_id]
                outcomes = {name: outcome(servers, name, survivors[name], newcomer) for name in CASES}
        yield Story(outcomes=outcomes, ids=ids, calls_under_way=[server._calls.number for server in servers.servers])


def held_trainer(servers: GrpcCluster) -> list[str]:
    """The command of the process that is to be killed."""
    trainers = [
        {
            "rank": rank,
            "model": name,
            "policy": (case.policy.name, policy_arguments(case.policy)),
            "transport": case.transport,
            "point": case.point,
        }
        for rank, (name, case) in enumerate(CASES.items(), len(SURVIVORS))
    ]
    script = str(Path(__file__).with_name("held_trainer.py"))
    return [sys.executable, script, servers.addresses[0], json.dumps(servers.addresses), json.dumps(trainers)]


def contexts_of(servers: GrpcCluster, name: str) -> list[int]:
    return [max(0, each) for each in servers.num_contexts(name)]


def mailboxes_of(node: ServerNode, shard: int, name: str) -> int:
    memory = node.shards._shards[name, shard].memory
    assert memory is not None
    return len(memory._mailboxes)


def outcome(servers: GrpcCluster, name: str, survivors: list[Survivor], newcomer: Cluster) -> Outcome:
    reader = Survivor(newcomer, name)
    reader.register()
    round_number = servers.model_status(name).round
    until(
        lambda: {shard.round for shard in servers.model_status(name).shards} == {round_number},
        f"the coordinator hears that both shards are at round {round_number}",
    )
    return Outcome(
        contexts_after=contexts_of(servers, name),
        mailboxes_after=[mailboxes_of(node, number, name) for number, node in enumerate(servers.nodes)],
        results=[each.results for each in survivors],
        values=[each.weight.detach().clone() for each in (*survivors, reader)],
        round=round_number,
    )


def expected(case: Case) -> torch.Tensor:
    """The values that a run with exactly the right trainers in each round has."""
    everybody = (*SURVIVORS, 2)
    if case.point == "initialising":
        members = [SURVIVORS, SURVIVORS, SURVIVORS]
    else:
        members = [everybody, everybody if case.counted else SURVIVORS, SURVIVORS]
    weight = torch.zeros(NUM_ELEMENTS)
    for step, ranks in enumerate(members, 1):
        gradients = [gradient(rank, step) for rank in ranks]
        weight -= sum(gradients) / (len(ranks) if isinstance(case.policy, Bsp) else 1)
    return weight


@pytest.mark.parametrize("name", CASES)
def test_a_killed_trainer_is_in_a_round_on_all_shards_or_on_none(story: Story, name: str) -> None:
    found = story.outcomes[name]
    # Under the other policies a survivor's last step need not be the last round.
    for values in found.values[0 if isinstance(CASES[name].policy, Bsp) else -1 :]:
        assert torch.equal(values, expected(CASES[name]))


@pytest.mark.parametrize("name", [name for name, case in BEREAVED.items() if isinstance(case.policy, Bsp)])
def test_the_survivors_are_told_who_was_in_a_round(story: Story, name: str) -> None:
    for results in story.outcomes[name].results:
        assert [each.round for each in results] == [1, 2, 3]
        assert [each.num_trainers for each in results] == [3, 3 if CASES[name].counted else 2, 2]


@pytest.mark.parametrize("name", CASES)
def test_its_contexts_are_freed_when_its_lease_ends(story: Story, name: str) -> None:
    assert story.outcomes[name].contexts_after == [0, 0]


@pytest.mark.parametrize("name", CASES)
def test_its_mailboxes_are_freed_when_its_lease_ends(story: Story, name: str) -> None:
    """Only the survivors and the newcomer have any."""
    assert story.outcomes[name].mailboxes_after == [len(SURVIVORS) + 1] * 2


def test_no_call_of_it_goes_on(story: Story) -> None:
    assert story.calls_under_way == [0, 0]


def test_ids_are_never_reused(story: Story) -> None:
    """Neither by whoever takes the rank, nor by those who join a coordinator that was started again."""
    assert len(set(story.ids)) == len(story.ids) == len(CASES) + len(SURVIVORS) + 1
    assert story.ids[-1] > max(story.ids[:-1])


# Alive, but stuck


@pytest.mark.parametrize("absent", ["exclude", "fail"])
def test_a_trainer_that_renews_but_never_commits_meets_the_deadline_of_the_round(absent: str) -> None:
    """It evaluates, or is stuck: its lease does not end, so only the deadline helps the others."""
    policy = Bsp(deadline=1.5, absent=absent)
    with GrpcCluster(2, trainer_lease_s=1.0) as servers, ThreadPoolExecutor(3) as threads:
        sessions = [servers.connect(rank, 3, timeout_s=60.0) for rank in range(3)]
        try:
            for session in sessions:
                session.start()
            trainers = list(threads.map(lambda session: Counter(session, policy), sessions))
            *others, stuck = trainers
            for number in (1, 2):
                for future in [threads.submit(each.step, 6.0 * 10**rank) for rank, each in enumerate(others)]:
                    if absent == "exclude":
                        assert future.result(SOON_S).num_trainers == 2
                    else:
                        with pytest.raises(RoundFailed, match=r"ranks \[2\] had not committed 1.5 s after"):
                            future.result(SOON_S)
                if absent == "exclude":
                    assert others[0].value == others[1].value == -33.0 * number
            assert len(servers.status().trainers) == 3

            if absent == "exclude":
                refused = stuck.step(600.0)
                assert not refused.accepted
                assert "round 2 has been decided without it" in refused.reason
                assert stuck.value == -66.0
            together = [threads.submit(each.step, 6.0 * 10**rank) for rank, each in enumerate(trainers)]
            assert [future.result(SOON_S).num_trainers for future in together] == [3, 3, 3]
            assert {each.value for each in trainers} == {-288.0 if absent == "exclude" else -222.0}
            assert servers.num_contexts("stuck") == [0, 0]
        finally:
            for session in sessions:
                session.close()


class Counter:
    """A trainer whose one parameter holds a single number."""

    def __init__(self, session: Cluster, policy: SyncPolicy) -> None:
        self._weight = torch.nn.Parameter(torch.zeros(64))
        self._optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            [("weight", self._weight)],
            lr=1.0,
            name="stuck",
            sync=policy,
            cluster=session,
            bucket_bytes=128,
        )

    def step(self, gradient: float) -> StepResult:
        self._weight.grad = torch.full((64,), gradient)
        self._optimizer.step()
        assert self._optimizer.last_result is not None
        return self._optimizer.last_result

    @property
    def value(self) -> float:
        assert self._weight.min() == self._weight.max()
        return self._weight[0].item()
