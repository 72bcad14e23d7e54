from collections.abc import Iterator
from itertools import count

import pytest

from tests.routes import NETWORK_ROUTES, Route
from tests.service.grpc_cluster import GrpcCluster


@pytest.fixture(params=NETWORK_ROUTES.values(), ids=NETWORK_ROUTES)
def route(request: pytest.FixtureRequest) -> Iterator[Route]:
    """The steps of a test take each route in turn, in sessions with `transport=route.transport`."""
    with request.param.taken():
        yield request.param


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
