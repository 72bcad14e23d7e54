"""Ctrl-C in the middle of a step, and going on."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster as Session
from pserver.config import TrainerSettings
from pserver.errors import PserverError
from pserver.testing.local_cluster import LocalCluster
from pserver.transport.faults import Fault, FaultKind
from tests.cluster.interrupted_trainer import make, train
from tests.cluster.processes import SOON_S, START_S, Child, Cluster, Start
from tests.routes import Route

NUM_ROUNDS = 4
ALWAYS = 1_000_000


@pytest.fixture
def other(cluster: Cluster) -> Iterator[Session]:
    """Rank 1, in this process."""
    settings = TrainerSettings.resolve(cluster.address, rank=1, world_size=2, timeout_s=SOON_S)
    with Session(settings) as session:
        yield session


def uninterrupted() -> str:
    """The value that two trainers come to if nothing happens."""

    def program(session: Session) -> str:
        weight, optimizer = make(session, "uninterrupted")
        train(session, weight, optimizer, NUM_ROUNDS)
        return weight.unique().item().hex()

    with LocalCluster(2) as local:
        first, second = local.train(2, program)
    assert first == second
    return first


@pytest.mark.parametrize("times", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_that_was_interrupted_counts_once_and_training_goes_on(
    start: Start, cluster: Cluster, other: Session, times: int
) -> None:
    """What is done again after Ctrl-C has the same bits: it is the step that was interrupted."""
    name = f"interrupted-{times}"
    script = str(Path(__file__).with_name("interrupted_trainer.py"))
    child = start(Child, "interrupted", [sys.executable, script, cluster.address, name, str(NUM_ROUNDS)])
    weight, optimizer = make(other, name)
    child.wait_for("^ready$", START_S)
    cluster.wait_for_round(name, 0, waiting_for=(1,))
    for number in range(times):
        child.wait_for("^stepping$", skip=number)
        child.send(signal.SIGINT)
        child.wait_for("^interrupted$", skip=number)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(train, other, weight, optimizer, NUM_ROUNDS).result(START_S)
    assert child.wait_for("^done ", START_S).split()[1] == weight.unique().item().hex() == uninterrupted()
    assert child.wait() == 0
    assert cluster.model(name).round == NUM_ROUNDS
    assert cluster.model(name).num_accepted == 2 * NUM_ROUNDS


def test_a_push_that_was_interrupted_is_in_its_context_on_all_shards_or_on_none(route: Route) -> None:
    with LocalCluster(2, timeout_s=1.0) as local, local.connect(transport=route.transport) as session:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.zeros(64))
        refs = pserver.distribute(module, cluster=session, bucket_bytes=128).parameter_refs()
        optimizer = pserver.optim.DistributedOptimizer(torch.optim.SGD, refs, lr=1.0)
        opened = session.contexts.open()
        opened.accumulate(module.weight, torch.ones(64))
        optimizer.push(opened.context_id)

        fault = Fault(kind=FaultKind.LOSE_REQUEST, method=route.method, times=ALWAYS, address=local.address(1))
        local.faults.faults.append(fault)
        opened.accumulate(module.weight, torch.full((64,), 10.0))
        with pytest.raises(PserverError):
            optimizer.push(opened.context_id)
        local.faults.faults.clear()
        with contextlib.suppress(PserverError):
            optimizer.step(opened.context_id)
        assert len(module.weight.unique()) == 1
