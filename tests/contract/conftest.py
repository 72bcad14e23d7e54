from collections.abc import Iterator

import pytest

from pserver.transport.loop import LoopThread
from tests.contract.transports import TRANSPORTS, Transport


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    """The event loop of clients and servers."""
    thread = LoopThread("contract-tests")
    thread.start()
    yield thread
    thread.close()


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, loop: LoopThread) -> Iterator[Transport]:
    """Each implementation of the transport seam, with a server of its own."""
    with TRANSPORTS[request.param](loop) as running:
        yield running
