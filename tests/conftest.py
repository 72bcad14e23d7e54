from collections.abc import Iterator

import pytest

from tests.routes import ROUTES, Route


@pytest.fixture(params=ROUTES.values(), ids=ROUTES)
def route(request: pytest.FixtureRequest) -> Iterator[Route]:
    """The steps of a test take each route in turn, in sessions with `transport=route.transport`."""
    with request.param.taken():
        yield request.param
