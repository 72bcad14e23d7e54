"""A Step call that begins while the gradients of its buckets are still being computed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from pserver.errors import DeadlineExceeded

T = TypeVar("T")
Item = TypeVar("Item")


class OpenStep(Generic[Item, T]):
    """A call whose requests are made of items that come one by one. Belongs to the network loop, and begins at once.

    Args:
        call: makes the call, given what is to be sent; its result is that of the step.
    """

    def __init__(self, call: Callable[[AsyncIterator[Item]], Coroutine[Any, Any, T]]) -> None:
        self._items: asyncio.Queue[Item | None] = asyncio.Queue()
        self._task = asyncio.ensure_future(call(self._coming()))
        # It may fail long before anybody asks.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def over(self) -> bool:
        """Whether the call has ended, too early."""
        return self._task.done()

    def add(self, item: Item) -> None:
        """Sends one thing more."""
        self._items.put_nowait(item)

    async def finish(self, items: Sequence[Item], timeout_s: float, where: str) -> T:
        """Sends the last items, and waits for the result.

        Raises:
            DeadlineExceeded: it took longer. And what the call raises, now or earlier.
        """
        for item in (*items, None):
            self._items.put_nowait(item)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._task
        except TimeoutError:
            raise DeadlineExceeded(f"{where}: Step did not answer within {timeout_s:g} s") from None

    def cancel(self) -> None:
        """Breaks the call; nothing of it is left on the server."""
        self._task.cancel()

    async def _coming(self) -> AsyncIterator[Item]:
        while (item := await self._items.get()) is not None:
            yield item
