"""Short chaos runs with fixed seeds, and what happens within and beyond the budget of faults."""

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import pserver
from pserver.errors import ModelFailed
from pserver.optim import RemoteOptimizer
from tests.chaos.harness import LIMIT_S, Run
from tests.chaos.runs import run_schedule, why_not
from tests.chaos.schedule import SCENARIOS, SERVERS, Fault, FaultKind, make_schedule

#: Short as they are, they start many processes.
pytestmark = pytest.mark.timeout(300)

_SCENARIOS = {each.name: each for each in SCENARIOS}


@contextmanager
def running(name: str, **options: bool) -> Iterator[Run]:
    """A run whose processes say what they said if the test fails."""
    with tempfile.TemporaryDirectory() as folder, Run(_SCENARIOS[name], Path(folder), **options) as run:
        try:
            yield run
        except BaseException:
            for child in run.children:
                print(child.transcript())
            raise


#: Two short faults each: a trainer and the coordinator killed; two servers killed; the coordinator that leads and the
#: other one killed; a server killed, and another one cut off.
SEEDS = [("alone-bsp", 25), ("alone-async", 8), ("etcd-bsp", 1), ("partitioned-async", 12)]


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_acknowledged_updates_are_in_exactly_once(name: str, seed: int) -> None:
    scenario = _SCENARIOS[name]
    if reason := why_not(scenario):
        pytest.skip(reason)
    result = run_schedule(scenario, make_schedule(seed, scenario, 2), SERVERS[1:2])
    assert result.violations == ()
    assert result.num_updates > 0


def test_model_fails_by_name_once_every_copy_of_a_shard_is_gone() -> None:
    with running("alone-bsp") as run:
        run.wait_for_copies()
        shard = next(each for each in run.model().shards if {each.server, each.replicas[0].server} == set(SERVERS[1:]))
        trainers = list(run.trainers.values())
        for name in SERVERS[1:]:
            run.kill_for_good(name)
        for trainer in trainers:
            trainer.killed = True  # its end is expected
        run.until(lambda: not any(each.alive for each in trainers), "every trainer fails")
        for trainer in trainers:
            ledger = trainer.ledger()
            assert "ModelFailed" in ledger.failure
            assert f"server {shard.server}" in ledger.failure or f"server {shard.replicas[0].server}" in ledger.failure
            assert len(ledger.begun) == len(ledger.outcomes) + 1
        assert run.model().state == "failed"
        with pytest.raises(ModelFailed, match=r"server s[12]"):
            run.values()


NUM_STEPS, NUM_ELEMENTS = 10, 40_000


class FloatTrainer:
    """A session that trains with Adam, on gradients that are no integers."""

    def __init__(self, cluster: pserver.Cluster, model: str) -> None:
        self._rank = cluster.rank
        self._step = 0
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, NUM_ELEMENTS))
        self._optimizer = RemoteOptimizer(
            torch.optim.Adam,
            [("weight", self.weight)],
            lr=0.01,
            name=model,
            replicas=1,
            bucket_bytes=16 << 10,
            cluster=cluster,
        )

    def steps(self) -> None:
        for _ in range(NUM_STEPS):
            self._step += 1
            generator = torch.Generator().manual_seed(1000 * self._rank + self._step)
            self.weight.grad = torch.randn(NUM_ELEMENTS, generator=generator)
            self._optimizer.step()


def train(run: Run, model: str, disturb: Callable[[str], None]) -> torch.Tensor:
    """Two trainers and `NUM_STEPS` steps for each server, during which that is disturbed; the final weights."""
    with ExitStack() as sessions, ThreadPoolExecutor(2) as threads:
        clusters = [
            sessions.enter_context(
                pserver.connect(run.coordinators, rank=rank, world_size=2, timeout_s=LIMIT_S, transport="grpc")
            )
            for rank in range(2)
        ]
        trainers = list(threads.map(lambda cluster: FloatTrainer(cluster, model), clusters))
        for name in SERVERS:
            running = [threads.submit(each.steps) for each in trainers]
            disturb(name)
            run.until(lambda running=running: all(each.done() for each in running), f"both step while {name} is away")
            for each in running:
                each.result()
        return trainers[0].weight.detach()


def test_every_server_killed_once_changes_no_bit() -> None:
    with running("alone-bsp", trains=False) as run:
        calm = train(run, "calm", lambda _: None)

        def kill(name: str) -> None:
            run.inject(Fault(kind=FaultKind.KILL, target=name, after_s=0.0, for_s=0.2))

        assert torch.equal(train(run, "disturbed", kill).view(torch.int32), calm.view(torch.int32))
