"""Processes that are forked from a trainer: a DataLoader's workers, and a child that ends like any program."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.loading_trainer import NUM_EPOCHS
from tests.cluster.processes import START_S, Child, Cluster

NUM_STEPS = NUM_EPOCHS * 8 + 1


@pytest.fixture(scope="module")
def trainer(pool) -> Iterator[Child]:
    """One that has come to its end; what the tests look at."""
    cluster: Cluster = pool.cluster()
    script = str(Path(__file__).with_name("loading_trainer.py"))
    child = Child("loading", [sys.executable, script, cluster.address, "loading"])
    try:
        child.wait(2 * START_S)
        assert not cluster.status().trainers
        yield child
    finally:
        child.close()


def test_a_loader_with_forked_workers_feeds_a_trainer(trainer: Child) -> None:
    assert trainer.stdout[-1] == f"done {NUM_STEPS} 0"
    assert trainer.wait() == 0


def test_a_forked_process_is_told_that_the_session_is_not_its_own(trainer: Child) -> None:
    """And its end does not end the session: the trainer makes a step afterwards."""
    refused, _ = trainer.stdout
    assert refused.startswith("refused this cluster session belongs to process ")


def test_nothing_is_said_about_it(trainer: Child) -> None:
    assert trainer.stderr == ""
