"""The server's side of streams beside gRPC; see `frames`."""

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, suppress

from pserver.errors import ConfigError, InvalidRequest, ProtocolMismatch
from pserver.transport.carried import error_message
from pserver.transport.frames import ConnectionBroken, FrameSocket, Kind
from pserver.transport.methods import (
    MAX_PAUSE_S,
    MAX_REQUEST_BYTES,
    Handler,
    Method,
    in_pieces,
    replies_of,
)
from pserver.transport.raw_chunks import Piece

logger = logging.getLogger(__name__)

TICKET_BYTES = 32
#: A connection must show its ticket within this time, in seconds.
GREETING_S = 5.0
#: Most connections that have not shown a ticket yet; further ones are closed at once.
MAX_STRANGERS = 64
#: While a call does not take what came for it, its client is looked after so often, in seconds.
LOOK_EVERY_S = 0.25
#: Longest path of an RPC, in bytes.
MAX_PATH_BYTES = 256


class SocketServer:
    """Serves the streaming RPCs of some handlers over plain TCP connections. Belongs to one event loop.

    Args:
        handlers: RPCs by path.
        counted: a block around each call.

    Attributes:
        ticket: what a connection must begin with; given away over gRPC only.
    """

    def __init__(
        self,
        handlers: Mapping[str, tuple[Method, Handler]],
        counted: Callable[[Method], AbstractContextManager[None]],
    ) -> None:
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self._handlers = handlers
        self._counted = counted
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._num_strangers = 0

    def start(self, host: str, port: int = 0) -> int:
        """Listens and returns the port; port 0 takes any free one.

        Raises:
            ConfigError: the address cannot be bound.
        """
        host = host.strip("[]")
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} for streams: {error}; the port may be taken (use --stream-port 0 for "
                "any free one)"
            ) from None
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        taken: int = self._listener.getsockname()[1]
        return taken

    async def stop(self) -> None:
        """Stops listening; calls under way are cut."""
        tasks = [*self._connections, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many files, or a client that has gone
                logger.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            if self._num_strangers >= MAX_STRANGERS:
                connected.close()
                continue
            task = asyncio.create_task(self._serve(connected))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connected: socket.socket) -> None:
        frames = FrameSocket(connected, reuse=False)
        try:
            if await self._greeted(frames):
                await _Connection(frames, self._handlers, self._counted).serve()
        finally:
            frames.close()

    async def _greeted(self, frames: FrameSocket) -> bool:
        self._num_strangers += 1
        try:
            async with asyncio.timeout(GREETING_S):
                hello = await frames.receive(TICKET_BYTES)
        except (ConnectionBroken, InvalidRequest, TimeoutError):
            return False
        finally:
            self._num_strangers -= 1
        return hello.kind == Kind.HELLO and hmac.compare_digest(hello.payload, self.ticket)


class _Connection:
    """One connection that has shown its ticket: a task reads, another one answers the call under way."""

    def __init__(
        self,
        frames: FrameSocket,
        handlers: Mapping[str, tuple[Method, Handler]],
        counted: Callable[[Method], AbstractContextManager[None]],
    ) -> None:
        self._frames = frames
        self._handlers = handlers
        self._counted = counted
        self._requests: _Requests | None = None
        self._answering: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Serves calls until the connection ends."""
        try:
            while True:
                if self._requests is not None:
                    await self._requests.taken()
                await self._take(*await self._frames.receive(MAX_REQUEST_BYTES))
        except ConnectionBroken:
            pass
        except InvalidRequest as error:
            if self._requests is not None:
                self._requests.fail(error)
                await self._over()
        finally:
            if self._answering is not None:
                self._answering.cancel()
                await self._over()

    async def _over(self) -> None:
        assert self._answering is not None
        await asyncio.wait((self._answering,))

    async def _take(self, kind: int, payload: memoryview) -> None:
        if kind == Kind.CALL:
            if self._answering is not None:
                # Its last frame has gone, and the client may be quicker than the rest of it.
                done, _ = await asyncio.wait((self._answering,), timeout=LOOK_EVERY_S)
                if not done:
                    raise InvalidRequest("a call came before the one under way had ended")
            self._requests = _Requests(self._frames)
            self._answering = asyncio.create_task(self._answer(bytes(payload[:MAX_PATH_BYTES]), self._requests))
        elif self._requests is None:
            raise InvalidRequest("a message came before any call")
        elif kind == Kind.MESSAGE:
            self._requests.put(payload)
        elif kind == Kind.END:
            self._requests.put(None)
        else:
            raise InvalidRequest(f"a frame of the unknown kind {kind} came")

    async def _answer(self, path: bytes, requests: "_Requests") -> None:
        name = path.decode(errors="replace")
        try:
            method, handler = self._handlers.get(name, (None, None))
            if method is None or handler is None or not method.bulk:
                raise ProtocolMismatch(
                    f"{name!r:.200} is no stream that goes beside gRPC here; install the same pserver on both sides"
                )
            with self._counted(method):
                async with aclosing(replies_of(method, handler, requests)) as replies:
                    async for reply in replies:
                        await self._send(Kind.MESSAGE, *in_pieces(reply))
                await self._send(Kind.END)
        except ConnectionBroken:
            self._frames.break_off()
        except Exception as error:
            with suppress(ConnectionBroken):
                await self._send(Kind.ERROR, error_message(name, error).SerializeToString())
        finally:
            requests.abandon()

    async def _send(self, kind: Kind, *payload: Piece) -> None:
        """A client that takes nothing any more must not hold memory for ever: it counts as gone."""
        try:
            async with asyncio.timeout(MAX_PAUSE_S):
                await self._frames.send(kind, *payload)
        except TimeoutError:
            raise ConnectionBroken(f"nothing was taken for {MAX_PAUSE_S:g} s") from None


class _Requests:
    """The requests of one call: one is held, and the next is received once that has been taken."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._held: list[memoryview | None] = []
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._abandoned = False

    async def taken(self) -> None:
        """Waits until none is held.

        Raises:
            ConnectionBroken: meanwhile.
        """
        while self._held:
            self._changed.clear()
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                if self._frames.hung_up:
                    raise ConnectionBroken("the other side closed it") from None

    def put(self, data: memoryview | None) -> None:
        """Adds a request, None: there is no more; once nobody takes any, they go nowhere."""
        if not self._abandoned:
            self._held.append(data)
            self._changed.set()

    def abandon(self) -> None:
        """Nobody takes another one."""
        self._abandoned = True
        self._held.clear()
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """The next one is this error."""
        self._failure = error
        self._held[:] = [None]
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        while True:
            while not self._held:
                self._changed.clear()
                await self._changed.wait()
            data = self._held.pop()
            self._changed.set()
            if data is None:
                break
            yield data
            del data  # while the next is waited for, this one may be freed
        if self._failure is not None:
            raise self._failure
