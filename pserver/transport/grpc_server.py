"""Serves handlers over gRPC, with the standard health and reflection services."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from pserver.errors import ConfigError, DeadlineExceeded, PserverError
from pserver.transport.carried import CarriedCalls, own_error
from pserver.transport.gen import calls_pb2 as pb
from pserver.transport.methods import (
    CARRY,
    ENDLESS,
    FIND_STREAMS,
    MAX_LARGE_REQUEST_BYTES,
    Handler,
    Method,
    Sendable,
    decode,
    decoded,
    encode,
)
from pserver.transport.socket_server import SocketServer
from pserver.transport.status import ERROR_KEY, status_code, to_wire

logger = logging.getLogger(__name__)

_OPTIONS = (
    # What is larger is refused before memory is taken for it; `decode` has a limit for each RPC.
    ("grpc.max_receive_message_length", MAX_LARGE_REQUEST_BYTES),
    ("grpc.max_send_message_length", -1),
    # Of one connection; further calls wait in the client.
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.so_reuseport", 0),
    # A client that vanished without closing is noticed, and its calls end.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)

#: How long a client that is refused may go on sending before its call is ended, in seconds.
READ_TO_END_S = 5.0
#: How long streams may take to end when they are told to, in seconds.
GRACE_S = 0.1
#: How long calls that are cut may take to end, in seconds.
STOP_S = 1.0


class GrpcServer:
    """A gRPC server on one address. Make, start and stop it on one event loop.

    Args:
        handlers: RPCs by path, as `bind` makes them.
        host, port: where to listen; port 0 takes any free one.
        stream_port: where streams of tensors may come beside gRPC; port 0 takes any free one.
    """

    def __init__(
        self, handlers: Mapping[str, tuple[Method, Handler]], *, host: str, port: int, stream_port: int = 0
    ) -> None:
        self._host = host
        self._handlers: dict[str, tuple[Method, Handler]] = {
            **handlers,
            CARRY.path: (CARRY, self._carry),
            FIND_STREAMS.path: (FIND_STREAMS, self._find_streams),
        }
        self._calls = _CallsUnderWay()
        self._streams = SocketServer(handlers, self._calls.counted)
        self._stream_port = stream_port
        self._carried: set[CarriedCalls] = set()
        self._streams_at = pb.FindStreamsReply()
        self._server = grpc.aio.server(options=_OPTIONS)
        self._health = health_aio.HealthServicer()
        self._requested_port = port
        self._services = sorted({method.service for method, _ in self._handlers.values()})

    async def start(self) -> str:
        """Listens and returns the address as host:port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        wanted = f"{self._host}:{self._requested_port}"
        try:
            port = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {wanted}: {error}; the port may be taken (use --port 0 for any free one), or the "
                "address may not be this machine's"
            ) from None
        for service in self._services:
            chosen = {
                m.name: _rpc_handler(m, h, self._calls) for m, h in self._handlers.values() if m.service == service
            }
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, chosen),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*self._services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            self._server,
        )
        await self._server.start()
        self._streams_at = pb.FindStreamsReply(
            port=self._streams.start(self._host, self._stream_port), ticket=self._streams.ticket
        )
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return f"{self._host}:{port}"

    async def _find_streams(self, _request: pb.FindStreamsRequest) -> pb.FindStreamsReply:
        return self._streams_at

    async def _carry(self, requests: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        carried = CarriedCalls(self._handlers, self._calls.counted)
        self._carried.add(carried)
        try:
            async with aclosing(carried.serve(requests)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            self._carried.discard(carried)

    async def drain(self, grace_s: float) -> None:
        """Says NOT_SERVING, and returns at the first moment without a call under way, or after `grace_s`.

        Calls go on being answered meanwhile, since the ones under way may wait for them (a round waits for every
        trainer). Calls without an end of their own, the links of servers, do not count.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            async with asyncio.timeout(grace_s):
                await self._calls.idle.wait()
        except TimeoutError:
            logger.warning("%d calls were still under way after %g s and are cut", self._calls.number, grace_s)

    async def stop(self) -> None:
        """Stops answering; calls under way are cut."""
        await self._streams.stop()
        # Streams that carry calls are ended, not cut: gRPC's core complains of that on the stderr of every client.
        for carried in self._carried:
            carried.end()
        await self._server.stop(GRACE_S if self._carried else None)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._calls.idle.wait()

    async def _set_health(self, status: Any) -> None:
        for service in ("", *self._services):
            await self._health.set(service, status)


class _CallsUnderWay:
    def __init__(self) -> None:
        self.number = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @contextmanager
    def counted(self, method: Method) -> Iterator[None]:
        if method.name in ENDLESS:
            yield
            return
        self.number += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.number -= 1
            if not self.number:
                self.idle.set()


def _rpc_handler(method: Method, handler: Handler, calls: _CallsUnderWay) -> Any:
    sides = ("stream" if each else "unary" for each in (method.client_streaming, method.server_streaming))
    make = getattr(grpc, "_".join(sides) + "_rpc_method_handler")
    # Requests are decoded inside the handler, so that a malformed one is refused by name.
    return make(_served(method, handler, calls), response_serializer=encode)


def _served(method: Method, handler: Handler, calls: _CallsUnderWay) -> Any:
    def argument(received: Any) -> Any:
        return decoded(method, received) if method.client_streaming else decode(method, received)

    async def stream(received: Any, context: Any) -> AsyncIterator[Sendable]:
        try:
            with calls.counted(method):
                async with aclosing(handler(argument(received))) as replies:
                    async for reply in replies:
                        yield reply
        except Exception as error:
            await _refuse(method, received, context, error)

    async def single(received: Any, context: Any) -> Sendable | None:
        try:
            with calls.counted(method):
                return await handler(argument(received))  # type: ignore[no-any-return]
        except Exception as error:
            await _refuse(method, received, context, error)
        return None

    return stream if method.server_streaming else single


async def _refuse(method: Method, received: Any, context: Any, error: Exception) -> None:
    await _read_to_end(method, received, error)
    await _abort(context, own_error(method.path, error))


async def _read_to_end(method: Method, requests: Any, error: Exception) -> None:
    """Lets the client finish sending: a write that meets the end of a call hides why it ended.

    https://github.com/grpc/grpc/issues/36066
    """
    # A client that went silent does not finish, and a read that was given up cannot be repeated.
    if not method.client_streaming or method.name in ENDLESS or isinstance(error, DeadlineExceeded):
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(READ_TO_END_S):
            async for _ in requests:
                pass


async def _abort(context: Any, error: PserverError) -> None:
    name, message = to_wire(error)
    await context.abort(status_code(error), message, trailing_metadata=((ERROR_KEY, name),))
