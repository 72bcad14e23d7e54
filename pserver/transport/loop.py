"""An event loop on a thread of its own, for programs that are not asynchronous themselves."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from pserver.errors import InternalError, ServerUnavailable

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


class LoopThread:
    """Runs coroutines on a daemon thread. `run` may be called from any other thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether coroutines can be run."""
        return self._thread.is_alive() and not self._loop.is_closed()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and returns its result. Ctrl-C cancels the coroutine and raises KeyboardInterrupt.

        The coroutine has a deadline of its own.

        Raises:
            ServerUnavailable: `close` ended the coroutine. InternalError: the thread does not run. And what it raises.
        """
        if not self.running or threading.current_thread() is self._thread:
            coroutine.close()
            raise InternalError("the network thread does not run, or waits for itself; the cluster may be closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ServerUnavailable("another thread closed the connection while this call was under way") from None
        except BaseException:
            future.cancel()
            raise

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine in the background, until it ends or `close`."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function on the thread, soon; calls keep their order."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancels what still runs and ends the thread."""
        if not self.running:
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
