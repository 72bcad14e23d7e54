"""Channels over gRPC."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from pserver.errors import ServerUnavailable
from pserver.transport.carrier import Carrier
from pserver.transport.channel import Place
from pserver.transport.gen import calls_pb2 as pb
from pserver.transport.methods import CARRY, FIND_STREAMS, Method, Sendable, encode
from pserver.transport.raw_chunks import decode as decode_message
from pserver.transport.socket_client import SocketStreams
from pserver.transport.status import from_rpc_error

_OPTIONS = (
    # Sizes are checked message by message; no limit on a message is ever the user's problem.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A peer that vanished without closing is noticed; the server allows these pings (see grpc_server).
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # However long nothing is said: gRPC's default stops asking after two pings.
    ("grpc.http2.max_pings_without_data", 0),
    # Our own retry decides when to dial again; gRPC's default backs off up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A channel of its own is a connection of its own: lease renewal must not share one with bulk data.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

#: A server must say within this time where its streams go, in seconds.
FIND_STREAMS_S = 10.0


class GrpcChannel:
    """A `Channel` over one gRPC connection, and connections beside it for streams of tensors.

    May be made anywhere; belongs to the event loop of its first call.

    Args:
        address: "host:port" of the server.
        sockets: whether streams may go beside gRPC where the server offers it.
    """

    def __init__(self, address: str, *, sockets: bool = True) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None
        self._closed = False
        self._stubs: dict[str, Any] = {}
        self._carrier = Carrier(address, lambda requests: self._stub(CARRY)(requests))
        self._sockets = SocketStreams(address, self._find_streams) if sockets else None

    @property
    def address(self) -> str:
        return self._address

    async def call(
        self, method: Method, requests: AsyncIterable[Sendable], *, timeout_s: float, place: Place | None = None
    ) -> AsyncGenerator[Any, None]:
        if self._closed:
            raise ServerUnavailable(f"server at {self._address}: the channel was closed")
        if method.carried:
            yield await self._carrier.call(method, await anext(aiter(requests)), timeout_s=timeout_s)
            return
        if method.bulk and self._sockets is not None and (frames := await self._sockets.connect()) is not None:
            call = self._sockets.call(frames, method, requests, timeout_s=timeout_s, place=place)
            async with aclosing(call) as replies:
                async for reply in replies:
                    yield reply
            return
        stub = self._stub(method)
        source = _Requests(requests)
        argument: Any = aiter(source) if method.client_streaming else await anext(aiter(requests))
        made = stub(argument, timeout=timeout_s)
        try:
            if method.server_streaming:
                async for reply in made:
                    yield reply
            else:
                yield await made
        except grpc.aio.AioRpcError as error:
            raise source.failure or from_rpc_error(error, self._address) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if _is_being_cancelled():
                raise
            # gRPC cancels a call itself when its channel closes or its requests fail.
            closed = ServerUnavailable(f"server at {self._address}: the channel was closed during a call")
            raise source.failure or closed from None
        finally:
            made.cancel()
            source.end()

    async def close(self) -> None:
        self._closed = True
        await self._carrier.close()
        if self._sockets is not None:
            await self._sockets.close()
        if self._channel is not None:
            await self._channel.close()

    async def _find_streams(self) -> pb.FindStreamsReply:
        reply: pb.FindStreamsReply = await self._carrier.call(
            FIND_STREAMS, pb.FindStreamsRequest(), timeout_s=FIND_STREAMS_S
        )
        return reply

    def _stub(self, method: Method) -> Any:
        stub = self._stubs.get(method.path)
        if stub is None:
            stub = self._stubs[method.path] = self._make_stub(method)
        return stub

    def _make_stub(self, method: Method) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        sides = ("stream" if each else "unary" for each in (method.client_streaming, method.server_streaming))
        make = getattr(self._channel, "_".join(sides))
        return make(
            method.path,
            request_serializer=encode,
            response_deserializer=partial(decode_message, method.reply_type),
        )


class _Requests:
    """Requests of a call, and the error that making one raised: gRPC only logs it."""

    def __init__(self, requests: AsyncIterable[Sendable]) -> None:
        self._requests = requests
        self._reader: asyncio.Task[Any] | None = None
        self.failure: Exception | None = None

    def end(self) -> None:
        """The call is over: gRPC goes on waiting for requests of one that has broken."""
        if self._reader is not None:
            self._reader.cancel()

    async def __aiter__(self) -> AsyncIterator[Sendable]:
        self._reader = asyncio.current_task()
        try:
            async for request in self._requests:
                yield request
        except Exception as error:
            self.failure = error
            raise


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
