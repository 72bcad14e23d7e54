"""The implementations of the transport seam, each with a server that runs a fake service."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pserver.transport.channel import Connector
from pserver.transport.gen import coordinator_pb2, shards_pb2
from pserver.transport.grpc_channel import GrpcChannel
from pserver.transport.grpc_server import GrpcServer
from pserver.transport.inprocess import InProcessNetwork
from pserver.transport.loop import LoopThread
from pserver.transport.methods import COORDINATOR, SHARDS, Handler, Method, bind
from pserver.transport.raw_chunks import Received, encode

T = TypeVar("T")

#: One RPC of each shape, from the real method table.
UNARY = COORDINATOR["DropModel"]
CLIENT_STREAM = SHARDS["Initialise"]
SERVER_STREAM = SHARDS["Pull"]
BIDI = SHARDS["Step"]
SHAPES = {"unary": UNARY, "client stream": CLIENT_STREAM, "server stream": SERVER_STREAM, "bidi": BIDI}

#: A whole test must be over by then.
LIMIT_S = 10.0

Requests = AsyncIterator[Any]


@dataclass
class FakeService:
    """Notes what it hears and does what the test put in place of the echo that it is by default."""

    heard: list[Any] = field(default_factory=list)
    #: Called with the requests; yields replies. None: echo.
    behaviour: Callable[[Method, Requests], AsyncIterator[Any]] | None = None
    #: Calls under way.
    running: int = 0
    finished: int = 0

    async def drop_model(self, request: Any) -> Any:
        return await self._single(UNARY, _one(request))

    async def initialise(self, requests: Requests) -> Any:
        return await self._single(CLIENT_STREAM, requests)

    async def pull(self, request: Any) -> AsyncIterator[Any]:
        async with aclosing(self._serve(SERVER_STREAM, _one(request))) as replies:
            async for reply in replies:
                yield reply

    async def step(self, requests: Requests) -> AsyncIterator[Any]:
        async with aclosing(self._serve(BIDI, requests)) as replies:
            async for reply in replies:
                yield reply

    async def _single(self, method: Method, requests: Requests) -> Any:
        replies = [reply async for reply in self._serve(method, requests)]
        return replies[-1] if replies else method.reply_type()

    async def _serve(self, method: Method, requests: Requests) -> AsyncGenerator[Any, None]:
        self.running += 1
        try:
            async for reply in (self.behaviour or _echo)(method, self._noted(requests)):
                yield reply
            self.finished += 1
        finally:
            self.running -= 1

    async def _noted(self, requests: Requests) -> Requests:
        async for request in requests:
            self.heard.append(plain(request))
            yield request


async def _one(request: Any) -> Requests:
    yield request


async def _echo(method: Method, requests: Requests) -> AsyncIterator[Any]:
    """Replies to each request with one reply that carries the same chunks, if there is room for them."""
    async for request in requests:
        yield (
            method.reply_type()
            if method in (UNARY, CLIENT_STREAM)
            else method.reply_type(chunks=chunks_of(plain(request)))
        )


def plain(message: Any) -> Any:
    """A message as protobuf's own object, to be compared."""
    return (
        type(message.head).FromString(encode(message.head, message.chunks))
        if isinstance(message, Received)
        else message
    )


def chunks_of(request: Any) -> Any:
    """The chunks of a message; none if its type has no such field."""
    return getattr(request, "chunks", ())


def request_of(method: Method, number: int = 0, data: bytes = b"") -> Any:
    """A request that can be told from others by `number`."""
    if method is UNARY:
        return coordinator_pb2.DropModelRequest(model=f"number {number}")
    if method is SERVER_STREAM:
        return shards_pb2.PullRequest(min_round=number)
    message = method.request_type()
    message.chunks.add(bucket=number, data=data)  # type: ignore[attr-defined]
    return message


@dataclass(kw_only=True)
class Transport:
    """One implementation, up and running, with a `FakeService` behind `address`."""

    loop: LoopThread
    service: FakeService
    connect: Connector
    address: str
    #: An address where nobody listens.
    empty_address: str
    #: Stops the server.
    stop: Callable[[], Coroutine[Any, Any, None]]

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        """Runs a scenario on the event loop of clients and server, within `LIMIT_S`."""
        return self.loop.run(_limited(scenario))


async def _limited(scenario: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(LIMIT_S):
        return await scenario


def _handlers(service: FakeService) -> dict[str, tuple[Method, Handler]]:
    coordinator = {name: method for name, method in COORDINATOR.items() if method is UNARY}
    shards = {name: method for name, method in SHARDS.items() if method in SHAPES.values()}
    return bind(coordinator, service) | bind(shards, service)


@contextmanager
def grpc_transport(loop: LoopThread, *, sockets: bool = False) -> Iterator[Transport]:
    """With `sockets`, streams go beside gRPC."""
    service = FakeService()

    async def start() -> tuple[GrpcServer, str]:
        server = GrpcServer(_handlers(service), host="127.0.0.1", port=0)
        return server, await server.start()

    server, address = loop.run(start())
    try:
        # Port 1 (tcpmux) is privileged and unused: nobody listens there.
        yield Transport(
            loop=loop,
            service=service,
            connect=partial(GrpcChannel, sockets=sockets),
            address=address,
            empty_address="127.0.0.1:1",
            stop=server.stop,
        )
    finally:
        loop.run(server.stop())


@contextmanager
def in_process_transport(loop: LoopThread) -> Iterator[Transport]:
    service = FakeService()
    network = InProcessNetwork()
    network.serve("local:1", _handlers(service))

    async def stop() -> None:
        network.stop("local:1")

    yield Transport(
        loop=loop,
        service=service,
        connect=network.connect,
        address="local:1",
        empty_address="local:2",
        stop=stop,
    )


TRANSPORTS = {
    "grpc": grpc_transport,
    "sockets": partial(grpc_transport, sockets=True),
    "in process": in_process_transport,
}


async def until(condition: Callable[[], bool], what: str) -> None:
    """Polls until a condition holds.

    Raises:
        AssertionError: it does not within half of `LIMIT_S`.
    """
    loop = asyncio.get_running_loop()
    give_up = loop.time() + LIMIT_S / 2
    while not condition():
        assert loop.time() < give_up, f"not in time: {what}"
        await asyncio.sleep(0.005)
