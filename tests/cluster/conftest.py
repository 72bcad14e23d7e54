"""Processes that tests share, and what they have said when a test fails."""

from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from tests.cluster.processes import Child, Cluster, Pool, Start

C = TypeVar("C", bound=Child)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def cluster(pool: Pool) -> Cluster:
    """Two servers; a test may end them."""
    return pool.cluster()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a child of the given class; it ends with the test."""
    started: list[Child] = []

    def start(kind: type[C], *arguments: Any, **options: Any) -> C:
        child = kind(*arguments, **options)
        started.append(child)
        return child

    yield start
    for child in started:
        child.close()


_ended_before: pytest.StashKey[list[Child]] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_ended_before] = [child for child in Child.all if not child.alive]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Shows what every child that lived during a failed test has said."""
    report = yield
    if report.failed:
        others = item.stash[_ended_before]
        said = "\n".join(child.transcript() for child in Child.all if child not in others)
        report.sections.append(("child processes", said))
    return report
