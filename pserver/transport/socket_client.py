"""The client's side of streams beside gRPC; see `frames`."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Any

from pserver.config import parse_address
from pserver.errors import ProtocolMismatch, ServerUnavailable
from pserver.transport.channel import Place
from pserver.transport.deadline import Deadline
from pserver.transport.frames import ConnectionBroken, FrameSocket, Kind
from pserver.transport.gen import calls_pb2 as pb
from pserver.transport.methods import MAX_LARGE_REQUEST_BYTES, Method, Sendable, in_pieces
from pserver.transport.raw_chunks import Received, beginning
from pserver.transport.raw_chunks import decode as decode_message
from pserver.transport.status import from_wire, unanswered

logger = logging.getLogger(__name__)

#: A connection must be there within this time, in seconds; else streams go over gRPC.
CONNECT_S = 3.0
#: After that it is tried again so much later, in seconds.
TRY_AGAIN_S = 60.0


class SocketStreams:
    """Connections to one server, each for one call at a time. Belongs to one event loop.

    Args:
        address: of the server's gRPC port.
        find: asks the server over gRPC where its streams go.
    """

    def __init__(self, address: str, find: Callable[[], Awaitable[pb.FindStreamsReply]]) -> None:
        self._address = address
        self._find = find
        self._idle: list[FrameSocket] = []
        self._busy: set[FrameSocket] = set()
        self._not_before_s = 0.0
        self._closed = False

    async def connect(self) -> FrameSocket | None:
        """A connection for one call; None: the server has none, or cannot be reached this way.

        Raises:
            PserverError: it cannot be reached over gRPC either.
        """
        while self._idle:
            frames = self._idle.pop()
            if frames.quiet:
                self._busy.add(frames)
                return frames
            frames.close()
        if time.monotonic() < self._not_before_s:
            return None
        found = await self._find()
        if found.port:
            try:
                async with asyncio.timeout(CONNECT_S):
                    frames = await self._open(found)
            except (OSError, ConnectionBroken) as error:  # TimeoutError is an OSError
                logger.info(
                    "streams to the server at %s go over gRPC: its port %d cannot be reached: %s",
                    self._address,
                    found.port,
                    str(error) or f"no answer within {CONNECT_S:g} s",
                )
            else:
                if self._closed:
                    frames.close()
                    raise ServerUnavailable(f"server at {self._address}: the channel was closed")
                self._busy.add(frames)
                return frames
        self._not_before_s = time.monotonic() + TRY_AGAIN_S
        return None

    async def _open(self, found: pb.FindStreamsReply) -> FrameSocket:
        loop = asyncio.get_running_loop()
        host = parse_address(self._address)[0].strip("[]")
        ((family, kind, protocol, _, place), *_) = await loop.getaddrinfo(host, found.port, type=socket.SOCK_STREAM)
        connecting = socket.socket(family, kind, protocol)
        try:
            connecting.setblocking(False)
            await loop.sock_connect(connecting, place)
            frames = FrameSocket(connecting, reuse=True)
            await frames.send(Kind.HELLO, found.ticket)
        except BaseException:
            connecting.close()
            raise
        return frames

    async def call(
        self,
        frames: FrameSocket,
        method: Method,
        requests: AsyncIterable[Sendable],
        *,
        timeout_s: float,
        place: Place | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Makes a call over a connection, which is of no further use to the caller; raises as `Channel.call` does."""
        deadline = Deadline(timeout_s)
        sending = asyncio.create_task(_send(frames, method, requests))
        placing = None if place is None else _Placing(method, place)
        clean = False
        try:
            while True:
                kind, payload = await self._next(frames, method, deadline, placing)
                if kind != Kind.MESSAGE:
                    break
                placed = None if placing is None else placing.take()
                yield decode_message(method.reply_type, payload) if placed is None else placed
            clean = sending.done()
            if kind == Kind.ERROR:
                error = pb.CarriedError.FromString(bytes(payload))
                raise from_wire(error.name, error.message)
            if kind != Kind.END:
                raise ProtocolMismatch(
                    f"server at {self._address}: a frame of the unknown kind {kind} came; install the same pserver on "
                    "both sides"
                )
        except ConnectionBroken as broken:
            failure = sending.exception() if sending.done() else None  # of making a request
            raise failure or ServerUnavailable(
                f"server at {self._address}: the connection broke during a call: {broken}"
            ) from None
        finally:
            if not clean:
                frames.break_off()
                sending.cancel()
            await asyncio.wait((sending,))
            self._give_back(frames, reusable=clean and sending.exception() is None)

    async def _next(
        self, frames: FrameSocket, method: Method, deadline: Deadline, placing: "_Placing | None"
    ) -> tuple[int, memoryview]:
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                return await frames.receive(MAX_LARGE_REQUEST_BYTES, placing)
        except TimeoutError:
            raise unanswered(self._address, method.path, deadline.timeout_s) from None

    def _give_back(self, frames: FrameSocket, *, reusable: bool) -> None:
        self._busy.discard(frames)
        if reusable and not self._closed:
            self._idle.append(frames)
        else:
            frames.close()

    async def close(self) -> None:
        """Breaks the calls under way."""
        self._closed = True
        for frames in self._busy:
            frames.break_off()
        for frames in self._idle:
            frames.close()
        self._idle.clear()


class _Placing:
    """Has the data of replies received where it belongs."""

    def __init__(self, method: Method, place: Place) -> None:
        self._reply_type = method.reply_type
        self._place = place
        self._reply: Received | None = None

    def __call__(self, memory: memoryview, num_bytes: int) -> tuple[int, memoryview] | None:
        """See `frames.Divert`."""
        begun = beginning(self._reply_type, memory, num_bytes)
        if begun is None:
            return None
        target = self._place(begun.chunk.bucket, begun.chunk.offset_bytes, num_bytes - begun.start)
        if target is None:
            return None
        self._reply = begun.with_data(target)
        return begun.start, target

    def take(self) -> Received | None:
        """The reply received last, if its data was placed."""
        reply, self._reply = self._reply, None
        return reply


async def _send(frames: FrameSocket, method: Method, requests: AsyncIterable[Sendable]) -> None:
    """Sends a call and its requests. If one cannot be made, the call ends on both sides."""
    try:
        await frames.send(Kind.CALL, method.path.encode())
        async for request in requests:
            await frames.send(Kind.MESSAGE, *in_pieces(request))
            if not method.client_streaming:
                break
        await frames.send(Kind.END)
    except ConnectionBroken:
        pass  # the server's last word may be on its way, and says why
    except Exception:
        frames.break_off()
        raise
