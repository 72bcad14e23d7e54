"""The in-process twin of gRPC: the same handlers, the same bytes, no sockets. For tests and for a server's own link."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pserver.errors import DeadlineExceeded, InternalError, PserverError, ServerUnavailable
from pserver.transport.channel import Place
from pserver.transport.deadline import Deadline
from pserver.transport.methods import Handler, Method, Sendable, encode, replies_of
from pserver.transport.raw_chunks import decode as decode_message
from pserver.transport.status import from_wire, to_wire
from pserver.transport.tasks import end_tasks, next_or_none


class InProcessNetwork:
    """Servers by address, all on one event loop, and used from it."""

    def __init__(self) -> None:
        self._servers: dict[str, _Served] = {}

    def serve(self, address: str, handlers: Mapping[str, tuple[Method, Handler]]) -> None:
        """Makes a server reachable."""
        self._servers[address] = _Served(handlers)

    def stop(self, address: str) -> None:
        """Makes a server unreachable and breaks the calls under way."""
        if (served := self._servers.pop(address, None)) is not None:
            served.calls.break_all()

    def connect(self, address: str) -> "InProcessChannel":
        """A channel; see `Connector`."""
        return InProcessChannel(self, address)

    def find(self, address: str) -> "_Served":
        """The server at an address.

        Raises:
            ServerUnavailable: nobody serves it.
        """
        served = self._servers.get(address)
        if served is None:
            raise ServerUnavailable(f"server at {address}: nobody serves this address in this process; start it first")
        return served


class InProcessChannel:
    """A `Channel` to a server in this process."""

    def __init__(self, network: InProcessNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._closed = False
        self._calls = _Calls()

    @property
    def address(self) -> str:
        return self._address

    async def call(
        self, method: Method, requests: AsyncIterable[Sendable], *, timeout_s: float, place: Place | None = None
    ) -> AsyncGenerator[Any, None]:
        if self._closed:
            raise ServerUnavailable(f"server at {self._address}: the channel was closed")
        served = self._network.find(self._address)
        replies = replies_of(*served.handlers[method.path], _encoded(requests))
        deadline = Deadline(timeout_s)
        with self._calls.one() as closed, served.calls.one() as stopped:
            try:
                while (reply := await self._next(replies, deadline, (closed, stopped), method)) is not None:
                    yield decode_message(method.reply_type, encode(reply))
            finally:
                await replies.aclose()

    async def close(self) -> None:
        self._closed = True
        self._calls.break_all()

    async def _next(
        self,
        replies: AsyncGenerator[Sendable, None],
        deadline: Deadline,
        broken: tuple[asyncio.Future[None], ...],
        method: Method,
    ) -> Sendable | None:
        coming = asyncio.ensure_future(next_or_none(replies))
        try:
            waiting: list[asyncio.Future[Any]] = [coming, *broken]
            await asyncio.wait(waiting, timeout=deadline.remaining_s(), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
        except PserverError as error:
            raise from_wire(*to_wire(error)) from None
        except Exception as error:
            raise InternalError(f"{method.path} failed with {type(error).__name__}: {error}") from error
        finally:
            if not coming.done():
                await end_tasks(coming)
        if any(each.done() for each in broken):
            raise ServerUnavailable(f"server at {self._address}: the connection was closed during a call")
        raise DeadlineExceeded(
            f"server at {self._address}: {method.path} did not answer within {deadline.timeout_s:g} s"
        )


class _Calls:
    """Calls under way, each with a future that breaks it."""

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[None]] = set()

    @contextmanager
    def one(self) -> Iterator[asyncio.Future[None]]:
        future = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        try:
            yield future
        finally:
            self._futures.discard(future)

    def break_all(self) -> None:
        for future in self._futures:
            if not future.done():
                future.set_result(None)


@dataclass(slots=True)
class _Served:
    handlers: Mapping[str, tuple[Method, Handler]]
    calls: _Calls = field(default_factory=_Calls)


async def _encoded(requests: AsyncIterable[Sendable]) -> AsyncIterator[bytes]:
    async for request in requests:
        yield encode(request)
