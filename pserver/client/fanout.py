"""Talks to several servers at once and reports every failure."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from pserver.errors import PserverError, ServerErrors
from pserver.transport.tasks import end_tasks

T = TypeVar("T")

#: After the first failure the other servers get this long to fail on their own, in seconds.
GRACE_S = 0.5


async def fan_out(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs calls side by side and returns their results in order.

    After the first failure the rest is cancelled, shortly later.

    Raises:
        PserverError: the one failure, or `ServerErrors` with all of them.
    """
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            await asyncio.wait(waiting, timeout=GRACE_S)
    finally:
        await end_tasks(*tasks)
    failures: list[PserverError] = []
    for task in tasks:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, PserverError):
            failures.append(error)
        elif error is not None:
            raise error
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ServerErrors(f"{len(failures)} of {len(tasks)} servers failed", failures)
    return [task.result() for task in tasks]
