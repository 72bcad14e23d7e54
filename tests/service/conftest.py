from collections.abc import Iterator
from itertools import count

import pytest

from tests.service.grpc_cluster import GrpcCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[GrpcCluster]:
    """Two servers; tests share them, each with models of its own."""
    with GrpcCluster(2) as running:
        yield running


_numbers = count()


@pytest.fixture
def name() -> str:
    """A name that no other model of these tests has."""
    return f"model-{next(_numbers)}"
