"""The server's side of calls that are carried over one stream; see calls.proto."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from pserver.errors import InternalError, InvalidRequest, PserverError
from pserver.transport.gen import calls_pb2 as pb
from pserver.transport.methods import CARRY, Handler, Method, decode, encode
from pserver.transport.status import to_wire

logger = logging.getLogger(__name__)

#: Most calls under way on one stream; further ones wait in the client.
MAX_CALLS = 256


@dataclass(slots=True)
class _Reply:
    """A reply, and whether gRPC has taken it: the call is under way until then."""

    message: pb.CarriedReply
    sent: asyncio.Event = field(default_factory=asyncio.Event)


class CarriedCalls:
    """Serves one stream.

    Args:
        handlers: RPCs by path.
        counted: a block around each call.
    """

    def __init__(
        self,
        handlers: Mapping[str, tuple[Method, Handler]],
        counted: Callable[[Method], AbstractContextManager[None]],
    ) -> None:
        self._handlers = handlers
        self._counted = counted
        self._replies: asyncio.Queue[_Reply | None] = asyncio.Queue()
        self._under_way: dict[int, asyncio.Task[None]] = {}  # until they have a reply
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_CALLS)

    async def serve(self, requests: AsyncIterator[pb.CarriedRequest]) -> AsyncGenerator[bytes, None]:
        """Replies, until the client ends the stream, or `end`.

        Raises:
            InvalidRequest: a request has the id of another one that is under way.
        """
        reader = asyncio.create_task(self._read(requests))
        try:
            while (reply := await self._replies.get()) is not None:
                yield reply.message.SerializeToString()
                reply.sent.set()
            if reader.done():
                reader.result()  # raises what was wrong with a request
        finally:
            reader.cancel()
            for task in self._tasks:
                task.cancel()

    def end(self) -> None:
        """Ends the stream after the replies that are ready; what is still under way is cancelled."""
        self._replies.put_nowait(None)

    async def _read(self, requests: AsyncIterator[pb.CarriedRequest]) -> None:
        try:
            async for request in requests:
                if not request.path:
                    if (task := self._under_way.get(request.id)) is not None:
                        task.cancel()
                    continue
                if request.id in self._under_way:
                    raise InvalidRequest(f"{CARRY.path}: call {request.id} is under way already; expected another id")
                await self._room.acquire()
                task = self._under_way[request.id] = asyncio.create_task(self._answer(request))
                self._tasks.add(task)
                task.add_done_callback(partial(self._ended, request.id))
        finally:
            self._replies.put_nowait(None)

    async def _answer(self, request: pb.CarriedRequest) -> None:
        method, handler = self._handlers.get(request.path, (None, None))
        if method is None or handler is None or not method.unary:
            await self._reply(pb.CarriedReply(id=request.id, unknown_path=True))
            return
        with self._counted(method):
            reply = pb.CarriedReply(id=request.id)
            try:
                reply.reply = encode(await handler(decode(method, request.request)))
            except Exception as error:
                reply.error.CopyFrom(error_message(request.path, error))
            await self._reply(reply)

    async def _reply(self, message: pb.CarriedReply) -> None:
        reply = _Reply(message)
        self._under_way.pop(message.id, None)
        self._replies.put_nowait(reply)
        await reply.sent.wait()

    def _ended(self, call_id: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._under_way.get(call_id) is task:  # it was cancelled, and has no reply
            del self._under_way[call_id]
        self._room.release()


def error_message(path: str, error: Exception) -> pb.CarriedError:
    """The same as a message; see `own_error`."""
    name, message = to_wire(own_error(path, error))
    return pb.CarriedError(name=name, message=message)


def own_error(path: str, error: Exception) -> PserverError:
    """The error that a client is told; one that is not ours is logged."""
    if isinstance(error, PserverError):
        return error
    logger.error("%s failed", path, exc_info=error)
    return InternalError(f"{path} failed with {type(error).__name__}: {error}")
