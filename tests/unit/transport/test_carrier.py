"""Calls carried over one stream: the client's side, against a stream that the test plays."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pserver.errors import DeadlineExceeded, ProtocolMismatch, ServerUnavailable, UnknownModel
from pserver.transport.carrier import Carrier
from pserver.transport.gen import calls_pb2 as pb
from pserver.transport.gen.coordinator_pb2 import DropModelReply, DropModelRequest
from pserver.transport.methods import COORDINATOR
from tests.waiting import run_limited, settle

DROP = COORDINATOR["DropModel"]
LIMIT_S = 10.0


class Stream:
    """One RPC as gRPC hands it out; what the client sends is in `sent`."""

    def __init__(self, requests: AsyncIterator[pb.CarriedRequest]) -> None:
        self.sent: list[pb.CarriedRequest] = []
        self.cancelled = False
        self._replies: asyncio.Queue[pb.CarriedReply | BaseException | None] = asyncio.Queue()
        self._sending = asyncio.create_task(self._send(requests))

    async def _send(self, requests: AsyncIterator[pb.CarriedRequest]) -> None:
        async for request in requests:
            self.sent.append(request)

    def answer(self, call_id: int, **outcome: Any) -> None:
        self._replies.put_nowait(pb.CarriedReply(id=call_id, **outcome))

    def end(self, error: BaseException | None = None) -> None:
        self._replies.put_nowait(error)

    def cancel(self) -> None:
        self.cancelled = True
        self._sending.cancel()

    async def __aiter__(self) -> AsyncIterator[pb.CarriedReply]:
        while (reply := await self._replies.get()) is not None:
            if isinstance(reply, BaseException):
                raise reply
            yield reply


class World:
    """A carrier, and the streams that it has opened."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.carrier = Carrier("here:1", self._open)

    def _open(self, requests: AsyncIterator[pb.CarriedRequest]) -> Stream:
        self.streams.append(Stream(requests))
        return self.streams[-1]

    def begin(self, timeout_s: float = LIMIT_S) -> "asyncio.Task[Any]":
        return asyncio.create_task(self.carrier.call(DROP, DropModelRequest(model="m"), timeout_s=timeout_s))


def test_calls_share_a_stream_and_each_gets_its_own_reply() -> None:
    async def scenario() -> None:
        world = World()
        first, second, third = world.begin(), world.begin(), world.begin()
        await settle()
        (stream,) = world.streams
        ids = [request.id for request in stream.sent]
        assert len(set(ids)) == 3
        assert {(request.path, request.request) for request in stream.sent} == {
            (DROP.path, DropModelRequest(model="m").SerializeToString())
        }
        stream.answer(ids[2], unknown_path=True)
        stream.answer(ids[1], error=pb.CarriedError(name="UnknownModel", message="no such model"))
        stream.answer(ids[0], reply=b"")
        assert await first == DropModelReply()
        with pytest.raises(UnknownModel, match="no such model"):
            await second
        with pytest.raises(ProtocolMismatch, match=f"server at here:1: it does not serve {DROP.path}"):
            await third
        await world.carrier.close()

    run_limited(scenario(), LIMIT_S)


@pytest.mark.parametrize(
    "error",
    [
        None,
        grpc.aio.UsageError("the channel is closed"),
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone"),
    ],
    ids=["it ends", "its channel was closed", "it breaks"],
)
def test_a_stream_that_is_over_fails_its_calls_and_the_next_one_opens_another(error: BaseException | None) -> None:
    async def scenario() -> None:
        world = World()
        calls = [world.begin(), world.begin()]
        await settle()
        world.streams[0].end(error)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in errors] == [ServerUnavailable] * 2
        assert all("here:1" in str(each) for each in errors)
        assert errors[0] is not errors[1]
        assert world.streams[0].cancelled
        again = world.begin()
        await settle()
        assert len(world.streams) == 2
        world.streams[1].answer(world.streams[1].sent[0].id, reply=b"")
        assert await again == DropModelReply()
        await world.carrier.close()

    run_limited(scenario(), LIMIT_S)


@pytest.mark.parametrize("given_up_by", ["deadline", "caller"])
def test_the_server_is_told_of_a_call_that_is_given_up_and_its_late_reply_is_nobodys(given_up_by: str) -> None:
    async def scenario() -> None:
        world = World()
        call = world.begin(timeout_s=0.05 if given_up_by == "deadline" else LIMIT_S)
        await settle()
        if given_up_by == "caller":
            call.cancel()
        with pytest.raises(DeadlineExceeded if given_up_by == "deadline" else asyncio.CancelledError):
            await call
        await settle()
        (stream,) = world.streams
        begun, given_up = stream.sent
        assert (given_up.id, given_up.path) == (begun.id, "")
        stream.answer(begun.id, reply=b"")
        other = world.begin()
        await settle()
        stream.answer(stream.sent[-1].id, reply=b"")
        assert await other == DropModelReply()
        assert len(world.streams) == 1
        await world.carrier.close()

    run_limited(scenario(), LIMIT_S)


def test_closing_breaks_what_is_under_way_and_may_come_first() -> None:
    async def scenario() -> None:
        world = World()
        await world.carrier.close()
        call = world.begin()
        await settle()
        await world.carrier.close()
        with pytest.raises(ServerUnavailable, match="here:1"):
            await call
        assert world.streams[0].cancelled

    run_limited(scenario(), LIMIT_S)
