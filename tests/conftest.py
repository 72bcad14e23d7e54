import os
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.routes import ROUTES, Route

# What a shell starts in the background ignores Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """No test leaves torch with another number of threads: sums would have other bits in the tests that follow."""
    threads, environment = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    yield
    torch.set_num_threads(threads)
    if environment is None:
        os.environ.pop("OMP_NUM_THREADS", None)
    else:
        os.environ["OMP_NUM_THREADS"] = environment


@pytest.fixture(params=ROUTES.values(), ids=ROUTES)
def route(request: pytest.FixtureRequest) -> Iterator[Route]:
    """The steps of a test take each route in turn, in sessions with `transport=route.transport`."""
    with request.param.taken():
        yield request.param
