"""Small things about asyncio's tasks that many need."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

T = TypeVar("T")


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits until they have ended, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def next_or_none(iterator: AsyncIterator[T]) -> T | None:
    """The next item, as a coroutine that can be a task; None: there are no more."""
    return await anext(iterator, None)
