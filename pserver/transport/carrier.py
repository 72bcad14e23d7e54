"""The client's side of calls that are carried over one stream; see calls.proto."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from pserver.errors import ProtocolMismatch, PserverError, ServerUnavailable
from pserver.transport.gen import calls_pb2 as pb
from pserver.transport.methods import Method, Sendable, encode
from pserver.transport.raw_chunks import decode as decode_message
from pserver.transport.status import from_rpc_error, from_wire, unanswered

#: A server may take so long to end a stream, in seconds; then it is cut.
CLOSE_S = 0.2


class Carrier:
    """Carries calls of one request and one reply over one stream, opened when it is first needed and after every break.

    Belongs to one event loop.

    Args:
        address: of the server, for messages to users.
        open_stream: begins the RPC, given its requests.
    """

    def __init__(self, address: str, open_stream: Callable[[AsyncIterator[pb.CarriedRequest]], Any]) -> None:
        self._address = address
        self._open_stream = open_stream
        self._stream: _Stream | None = None
        self._last_id = 0

    async def call(self, method: Method, request: Sendable, *, timeout_s: float) -> Any:
        """The reply; raises as `Channel.call` does."""
        if self._stream is None or self._stream.over:
            self._stream = _Stream(self._address, self._open_stream)
        self._last_id += 1
        message = pb.CarriedRequest(id=self._last_id, path=method.path, request=encode(request))
        reply = await self._stream.exchange(message, timeout_s)
        outcome = reply.WhichOneof("outcome")
        if outcome == "error":
            raise from_wire(reply.error.name, reply.error.message)
        if outcome != "reply":
            raise ProtocolMismatch(
                f"server at {self._address}: it does not serve {method.path}; ask another server (the coordinator has "
                "RPCs of its own), or install the same pserver on both sides"
            )
        return decode_message(method.reply_type, reply.reply)

    async def close(self) -> None:
        """Breaks the calls under way."""
        if self._stream is not None:
            await self._stream.close()


class _Stream:
    """One stream. `over`: it has broken."""

    def __init__(self, address: str, open_stream: Callable[[AsyncIterator[pb.CarriedRequest]], Any]) -> None:
        self._address = address
        self._outgoing: asyncio.Queue[pb.CarriedRequest | None] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[pb.CarriedReply]] = {}
        self._reading = asyncio.create_task(self._read(open_stream(self._requests())))
        self.over = False

    async def exchange(self, request: pb.CarriedRequest, timeout_s: float) -> pb.CarriedReply:
        """Sends a request and waits for its reply."""
        future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        self._outgoing.put_nowait(request)
        try:
            async with asyncio.timeout(timeout_s):
                reply: pb.CarriedReply = await future
                return reply
        except TimeoutError:
            raise unanswered(self._address, request.path, timeout_s) from None
        finally:
            if self._waiting.pop(request.id, None) is not None:
                self._outgoing.put_nowait(pb.CarriedRequest(id=request.id))  # nobody waits any longer

    async def close(self) -> None:
        """Breaks its calls, and ends it in order: what gRPC has left of a cancelled one may outlive its event loop."""
        self._fail(ServerUnavailable(f"server at {self._address}: the channel was closed during a call"))
        self._outgoing.put_nowait(None)
        await asyncio.wait((self._reading,), timeout=CLOSE_S)
        self._reading.cancel()
        await asyncio.wait((self._reading,))

    def _fail(self, failure: PserverError) -> None:
        self.over = True
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(type(failure)(*failure.args))

    async def _requests(self) -> AsyncIterator[pb.CarriedRequest]:
        while (request := await self._outgoing.get()) is not None:
            yield request

    async def _read(self, call: Any) -> None:
        failure: PserverError = ServerUnavailable(f"server at {self._address}: the connection was closed during a call")
        try:
            async for reply in call:
                if (future := self._waiting.pop(reply.id, None)) is not None and not future.done():
                    future.set_result(reply)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, self._address)
        except grpc.aio.UsageError:
            pass  # the channel was closed
        finally:
            call.cancel()
            self._fail(failure)
            self._outgoing.put_nowait(None)  # gRPC goes on waiting for requests of a call that has broken
