"""A call that begins before its last item is there."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pserver.client.open_step import OpenStep
from pserver.errors import DeadlineExceeded, ServerUnavailable

LIMIT_S = 10.0


def on_a_loop(program: Callable[[], Awaitable[None]]) -> None:
    """Runs a test on a loop of its own."""

    async def bounded() -> None:
        await asyncio.wait_for(program(), LIMIT_S)

    asyncio.run(bounded())


class Call:
    """Records what it is sent; its result is how many things that were, unless told to raise."""

    def __init__(self, error: Exception | None = None, *, ends: bool = True) -> None:
        self.sent: list[str] = []
        self.came = asyncio.Event()
        self.ended = asyncio.Event()
        self._error = error
        self._ends = ends

    async def __call__(self, items: AsyncIterator[str]) -> int:
        try:
            async for item in items:
                self.sent.append(item)
                self.came.set()
                if self._error is not None:
                    raise self._error
            if not self._ends:
                await asyncio.Event().wait()
            return len(self.sent)
        finally:
            self.ended.set()


def test_items_are_sent_as_they_come_and_the_last_ones_with_the_end() -> None:
    async def program() -> None:
        call = Call()
        step: OpenStep[str, int] = OpenStep(call)
        step.add("a")
        await call.came.wait()
        assert call.sent == ["a"]
        step.add("b")
        assert await step.finish(["c", "d"], LIMIT_S, "s0") == 4
        assert call.sent == ["a", "b", "c", "d"]

    on_a_loop(program)


def test_a_failure_is_raised_when_the_step_is_finished_and_not_before() -> None:
    async def program() -> None:
        unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        call = Call(ServerUnavailable("gone"))
        step: OpenStep[str, int] = OpenStep(call)
        step.add("a")
        await call.ended.wait()
        step.add("b")
        with pytest.raises(ServerUnavailable, match="gone"):
            await step.finish(["c"], LIMIT_S, "s0")
        another = Call(ServerUnavailable("gone"))
        abandoned: OpenStep[str, int] = OpenStep(another)
        abandoned.add("a")
        await another.ended.wait()
        await asyncio.sleep(0)
        abandoned.cancel()
        del abandoned, another, step
        gc.collect()
        assert not unhandled, "nobody asked for the result of one that failed, and nobody need"

    on_a_loop(program)


def test_a_step_that_is_not_answered_in_time_is_refused_by_name_and_over() -> None:
    async def program() -> None:
        call = Call(ends=False)
        step: OpenStep[str, int] = OpenStep(call)
        with pytest.raises(DeadlineExceeded, match=r"server s0: Step did not answer within 0\.01 s"):
            await step.finish(["a"], 0.01, "server s0")
        await call.ended.wait()

    on_a_loop(program)


def test_a_step_that_is_cancelled_leaves_nothing_under_way() -> None:
    async def program() -> None:
        call = Call()
        step: OpenStep[str, int] = OpenStep(call)
        step.add("a")
        await call.came.wait()
        step.cancel()
        await call.ended.wait()
        assert call.sent == ["a"]

    on_a_loop(program)


def test_whoever_waits_and_is_cancelled_takes_the_call_along() -> None:
    async def program() -> None:
        call = Call(ends=False)
        step: OpenStep[str, int] = OpenStep(call)
        waiting = asyncio.ensure_future(step.finish(["a"], LIMIT_S, "s0"))
        await call.came.wait()
        waiting.cancel()
        await call.ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    on_a_loop(program)
