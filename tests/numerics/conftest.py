from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import count

import pytest

from pserver.testing.local_cluster import LocalCluster

#: Ends a test that hangs long before the suite's own limit does.
TIMEOUT_S = 15.0


@pytest.fixture(scope="session")
def cluster_of() -> Iterator[Callable[[int], LocalCluster]]:
    """A running cluster with that many servers; tests share it, each with models of its own."""
    with ExitStack() as stack:

        @cache
        def running(servers: int) -> LocalCluster:
            return stack.enter_context(LocalCluster(servers, timeout_s=TIMEOUT_S))

        yield running


@pytest.fixture
def cluster(cluster_of: Callable[[int], LocalCluster]) -> LocalCluster:
    """A running cluster with three servers."""
    return cluster_of(3)


_numbers = count()


@pytest.fixture
def name() -> str:
    """A name that no other model of these tests has."""
    return f"model-{next(_numbers)}"
