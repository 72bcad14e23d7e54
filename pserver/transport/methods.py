"""Every RPC as a value, read from the descriptors of the generated code."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from pserver.errors import DeadlineExceeded, InvalidRequest
from pserver.transport.gen import calls_pb2, coordinator_pb2, replicas_pb2, shards_pb2
from pserver.transport.raw_chunks import Pieces
from pserver.transport.raw_chunks import decode as decode_message


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One RPC: its path on the wire, message classes, and which sides stream."""

    service: str
    name: str
    request_type: type[Message]
    reply_type: type[Message]
    client_streaming: bool
    server_streaming: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    @property
    def carried(self) -> bool:
        """Whether clients make it over a stream that carries many calls (see calls.proto)."""
        return self.unary and self.name not in _LARGE

    @property
    def bulk(self) -> bool:
        """Whether it streams tensors, and may be made beside gRPC (see `frames`)."""
        return not self.unary and self.name not in _ON_GRPC

    @property
    def unary(self) -> bool:
        """Whether it has one request and one reply."""
        return not self.client_streaming and not self.server_streaming

    @property
    def handler_name(self) -> str:
        """Name of the method of a service class that serves it."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()


def _methods(service: ServiceDescriptor) -> dict[str, Method]:
    return {each.name: _method(service, each) for each in service.methods}


def _method(service: ServiceDescriptor, method: MethodDescriptor) -> Method:
    return Method(
        service=service.full_name,
        name=method.name,
        request_type=GetMessageClass(method.input_type),
        reply_type=GetMessageClass(method.output_type),
        client_streaming=method.client_streaming,
        server_streaming=method.server_streaming,
    )


COORDINATOR: dict[str, Method] = _methods(coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"])
SHARDS: dict[str, Method] = _methods(shards_pb2.DESCRIPTOR.services_by_name["Shards"])
REPLICAS: dict[str, Method] = _methods(replicas_pb2.DESCRIPTOR.services_by_name["Replicas"])
_CALLS = _methods(calls_pb2.DESCRIPTOR.services_by_name["Calls"])
#: What carries other calls, and what tells where streams go beside gRPC.
CARRY: Method = _CALLS["Carry"]
FIND_STREAMS: Method = _CALLS["FindStreams"]

T = TypeVar("T")

#: RPCs that last as long as the server.
ENDLESS = frozenset({"Link", "Carry", "Follow"})
#: Streams that carry no tensors.
_ON_GRPC = frozenset({"Link", "Carry"})
#: Largest request, in bytes. Bulk data comes in messages of about 1 MiB.
MAX_REQUEST_BYTES = 16 << 20
#: Largest request of the RPCs that describe a whole model, or report on one.
MAX_LARGE_REQUEST_BYTES = 256 << 20
_LARGE = frozenset({"RegisterModel", "Link"})
#: A client may pause this long between two messages of a stream that has an end, in seconds.
MAX_PAUSE_S = 60.0

#: A message to be sent; the others are encoded already (see `raw_chunks`).
Sendable = Message | bytes | Pieces
#: A served RPC: takes a request, or an iterator of them; gives an awaitable of a reply, or an iterator of them.
Handler = Callable[[Any], Any]


def encode(message: Sendable) -> bytes:
    """The bytes of a message."""
    if isinstance(message, Pieces):
        return message.join()
    return message if isinstance(message, bytes) else message.SerializeToString()


def in_pieces(message: Sendable) -> Pieces:
    """The bytes of a message, not put together."""
    return message if isinstance(message, Pieces) else Pieces((encode(message),))


def decode(method: Method, data: bytes | memoryview) -> Any:
    """A request from its bytes.

    Raises:
        InvalidRequest: they are no such message, or too many: a message takes a multiple of its bytes in memory.
    """
    limit = MAX_LARGE_REQUEST_BYTES if method.name in _LARGE else MAX_REQUEST_BYTES
    if len(data) > limit:
        raise InvalidRequest(f"{method.path}: a message of {len(data)} bytes came; at most {limit} are accepted")
    try:
        return decode_message(method.request_type, data)
    except DecodeError as error:
        raise InvalidRequest(f"{method.path}: a message could not be decoded: {error}") from None


async def first_of(requests: AsyncIterator[T]) -> T:
    """The first message of a stream.

    Raises:
        InvalidRequest: there is none.
        DeadlineExceeded: it did not come within `MAX_PAUSE_S`.
    """
    try:
        return await _next(requests)
    except StopAsyncIteration:
        raise InvalidRequest("the stream ended before its first message") from None


async def decoded(method: Method, messages: AsyncIterable[bytes | memoryview]) -> AsyncIterator[Any]:
    """The requests of a stream. A client that has gone silent must not hold memory for ever.

    Raises:
        InvalidRequest: as `decode`. DeadlineExceeded: none came within `MAX_PAUSE_S`, unless the RPC is endless.
    """
    endless, coming = method.name in ENDLESS, aiter(messages)
    while True:
        try:
            data = await (anext(coming) if endless else _next(coming))
        except StopAsyncIteration:
            return
        yield decode(method, data)


async def _next(requests: AsyncIterator[T]) -> T:
    try:
        async with asyncio.timeout(MAX_PAUSE_S):
            return await anext(requests)
    except TimeoutError:
        raise DeadlineExceeded(
            f"no message came over the stream for {MAX_PAUSE_S:g} s; send without pauses, or end the call"
        ) from None


async def replies_of(
    method: Method, handler: Handler, messages: AsyncIterable[bytes | memoryview]
) -> AsyncGenerator[Sendable, None]:
    """What a handler makes of encoded requests, whatever the RPC's shape is; raises as `decoded` and the handler do."""
    requests = decoded(method, messages)
    argument = requests if method.client_streaming else await first_of(requests)
    if method.server_streaming:
        async with aclosing(handler(argument)) as replies:
            async for reply in replies:
                yield reply
    else:
        yield await handler(argument)


def bind(methods: dict[str, Method], service: object) -> dict[str, tuple[Method, Handler]]:
    """The handlers of a service object by path; each RPC is served by the method named like it in snake_case."""
    return {method.path: (method, getattr(service, method.handler_name)) for method in methods.values()}
