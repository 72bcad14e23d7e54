"""The seam between this package and a network: one primitive, implemented over gRPC and in process."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from pserver.errors import InternalError
from pserver.transport.methods import Method, Sendable

M = TypeVar("M", bound=Message)


#: Given a bucket, an offset in it and a number of bytes: the memory they belong in; None: nowhere yet.
Place = Callable[[int, int, int], memoryview | None]


class Channel(Protocol):
    """A way to one server. Used from one event loop."""

    @property
    def address(self) -> str:
        """Where the server is, for messages to users."""
        ...

    def call(
        self, method: Method, requests: AsyncIterable[Sendable], *, timeout_s: float, place: Place | None = None
    ) -> AsyncGenerator[Any, None]:
        """Calls an RPC of any shape; replies come as they arrive: messages of its type, or `Received` ones with chunks.

        A reply's chunks are good until the next reply is asked for; requests in pieces, until the call has ended.

        Args:
            method: the RPC.
            requests: one, or as many as it takes.
            timeout_s: for all of it.
            place: where the channel may put a reply's data itself; the reply's chunk then has that very memory.

        Raises (while iterating):
            PserverError: what the server raised, `ServerUnavailable` if it could not be reached or the connection
                broke, or `DeadlineExceeded` after `timeout_s`.
        """
        ...

    async def close(self) -> None:
        """Closes the connection; calls in flight end with `ServerUnavailable`."""
        ...


class Connector(Protocol):
    """Opens channels."""

    def __call__(self, address: str) -> Channel:
        """A channel to "host:port"; connects on first use."""
        ...


async def unary(channel: Channel, method: Method, request: Sendable, reply_type: type[M], *, timeout_s: float) -> M:
    """Calls an RPC that has one request and one reply."""
    assert method.reply_type is reply_type
    found: M | None = None
    async for reply in channel.call(method, one(request), timeout_s=timeout_s):
        found = reply
    if found is None:
        raise InternalError(f"{method.path} at {channel.address} ended without a {reply_type.__name__}")
    return found


async def one(message: Sendable) -> AsyncIterator[Sendable]:
    """A stream of one message."""
    yield message
