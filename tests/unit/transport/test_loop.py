"""An event loop on a thread of its own."""

import asyncio
import logging
import threading

import pytest

from pserver.errors import InternalError
from pserver.transport.loop import LoopThread


def loop_of(thread: LoopThread) -> asyncio.AbstractEventLoop:
    async def running() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    return thread.run(running())


def test_a_late_event_of_a_loop_that_is_gone_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC hands it out on another loop of the process; asyncio would log a traceback."""
    gone, here = LoopThread("gone"), LoopThread("here")
    gone.start()
    closed = loop_of(gone)
    gone.close()
    here.start()
    happened, called = threading.Event(), threading.Event()

    def hand_out() -> None:
        try:
            closed.call_soon_threadsafe(called.set)
        finally:
            happened.set()

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        here.post(hand_out)
        assert happened.wait(5.0)
        here.close()
    assert not called.is_set()
    assert not caplog.records


def test_nothing_runs_on_a_thread_that_has_ended() -> None:
    thread = LoopThread("ended")
    thread.start()
    thread.close()
    with pytest.raises(InternalError, match="does not run"):
        loop_of(thread)
