"""How a training script's process ends that never closes its session: see also test_exit.py."""

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster as Session
from pserver.config import TrainerSettings
from pserver.errors import ServerUnavailable, TrainerEnded
from tests.cluster.processes import SOON_S, START_S, TRAINER_LEASE_S, Child, Cluster, Start

EXIT_S = 10.0


def ending(start: Start, cluster: Cluster, how: str) -> Child:
    """A trainer that is about to end."""
    script = str(Path(__file__).with_name("ending_trainer.py"))
    name = f"ends-{how.replace(' ', '-')}"
    child: Child = start(Child, name, [sys.executable, script, cluster.address, name, how])
    child.wait_for("^steps$", START_S)
    return child


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("raise in with", 1),
        ("while a thread steps", 0),
        pytest.param("raise", 1, marks=pytest.mark.slow),
        pytest.param("exit", 3, marks=pytest.mark.slow),
        pytest.param("return", 0, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_ends_gives_its_lease_up_at_once(start: Start, cluster: Cluster, how: str, code: int) -> None:
    child = ending(start, cluster, how)
    begin_s = time.monotonic()
    assert child.wait() == code
    assert time.monotonic() - begin_s < EXIT_S
    assert not cluster.status().trainers
    if how.startswith("raise"):
        assert child.stderr.rstrip().endswith("ValueError: boom")
        assert child.stderr.count("Traceback") == 1
    else:
        assert child.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("vanish", 4), ("terminated", -signal.SIGTERM)])
def test_a_script_that_cannot_say_goodbye_loses_its_lease(start: Start, cluster: Cluster, how: str, code: int) -> None:
    child = ending(start, cluster, how)
    if how == "terminated":
        child.send(signal.SIGTERM)
    assert child.wait() == code
    assert child.stderr == ""
    cluster.wait_until(lambda status: not status.trainers, TRAINER_LEASE_S + EXIT_S)


def test_a_session_that_another_thread_closes_ends_what_waits_by_name(cluster: Cluster) -> None:
    settings = TrainerSettings.resolve(cluster.address, rank=0, world_size=2, timeout_s=SOON_S)
    with Session(settings) as session, ThreadPoolExecutor(1) as threads:
        weight = torch.nn.Parameter(torch.zeros(64))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", weight)], lr=1.0, name="closed", cluster=session
        )
        step = threads.submit(optimizer.step)
        cluster.wait_until(lambda status: bool(status.trainers) and status.trainers[0].step == 1)
        session.close()
        with pytest.raises((ServerUnavailable, TrainerEnded), match=r"closed|has ended"):
            step.result(SOON_S)
