"""An event loop on a thread of its own, for programs that are not asynchronous themselves."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextvars import Context
from typing import Any, Generic, TypeVar, TypeVarTuple

from pserver.errors import InternalError, ServerUnavailable
from pserver.transport.tasks import end_tasks

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CLOSE_TIMEOUT_S = 10.0


class Running(Generic[T]):
    """A coroutine under way on a loop's thread."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def when_over(self, function: Callable[[], None]) -> None:
        """Calls a function on some thread when it has ended, in whatever way."""
        self._future.add_done_callback(lambda _: function())

    def result(self) -> T:
        """Waits for its result. Ctrl-C cancels it and raises KeyboardInterrupt.

        Raises:
            ServerUnavailable: the loop was closed. And what the coroutine raises.
        """
        try:
            return self._future.result()
        except CancelledError:
            raise ServerUnavailable("another thread closed the connection while this call was under way") from None
        except BaseException:
            self._future.cancel()
            raise


class _Loop(asyncio.SelectorEventLoop):
    """What comes for it once it is closed goes nowhere.

    gRPC's events of all loops of a process are handed out by any of them, also late ones of a loop that is gone: with
    asyncio's own, that would put a traceback on the user's screen.
    """

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed():
            return asyncio.Handle(callback, args, self, context)
        return super().call_soon_threadsafe(callback, *args, context=context)


class LoopThread:
    """Runs coroutines on a daemon thread. `run` may be called from any other thread.

    Args:
        name: of the thread.
        loop: what runs on it, owned from now on; None: an ordinary one.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = _Loop() if loop is None else loop
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
        return self.begin(coroutine).result()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> "Running[T]":
        """Runs a coroutine in the background.

        Raises:
            InternalError: the thread does not run.
        """
        if not self.running or threading.current_thread() is self._thread:
            coroutine.close()
            raise InternalError("the network thread does not run, or waits for itself; the cluster may be closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if self._loop.is_closed():  # meanwhile
            future.cancel()
        return Running(future)

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
        await end_tasks(*others)
        await self._loop.shutdown_asyncgens()
