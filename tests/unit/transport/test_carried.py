"""Calls carried over one stream: the server's side, without a network."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, nullcontext
from typing import Any

import pytest

from pserver.errors import InvalidRequest, UnknownModel
from pserver.transport.carried import MAX_CALLS, CarriedCalls
from pserver.transport.gen import calls_pb2 as pb
from pserver.transport.gen.coordinator_pb2 import DropModelReply, DropModelRequest
from pserver.transport.methods import COORDINATOR, SHARDS
from tests.waiting import run_limited, settle

DROP = COORDINATOR["DropModel"]
LIMIT_S = 10.0


class Client:
    """The other end of a stream."""

    def __init__(self, handler: Callable[[Any], Any]) -> None:
        self._requests: asyncio.Queue[pb.CarriedRequest | None] = asyncio.Queue()
        handlers = {DROP.path: (DROP, handler), SHARDS["Pull"].path: (SHARDS["Pull"], handler)}
        self.replies = CarriedCalls(handlers, lambda _: nullcontext()).serve(self._sent())

    async def _sent(self) -> AsyncIterator[pb.CarriedRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def call(self, call_id: int, model: str = "m", path: str = DROP.path) -> None:
        request = DropModelRequest(model=model).SerializeToString()
        self._requests.put_nowait(pb.CarriedRequest(id=call_id, path=path, request=request))

    def cancel(self, call_id: int) -> None:
        self._requests.put_nowait(pb.CarriedRequest(id=call_id))

    def garble(self, call_id: int) -> None:
        self._requests.put_nowait(pb.CarriedRequest(id=call_id, path=DROP.path, request=b"\xff"))

    def end(self) -> None:
        self._requests.put_nowait(None)

    async def reply(self) -> pb.CarriedReply:
        return pb.CarriedReply.FromString(await anext(self.replies))


class Held:
    """A handler that answers once it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.running = self.cancelled = 0

    async def __call__(self, request: DropModelRequest) -> DropModelReply:
        self.running += 1
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return DropModelReply()


def test_replies_come_in_the_order_in_which_calls_end() -> None:
    async def scenario() -> None:
        slow = asyncio.Event()

        async def handler(request: DropModelRequest) -> DropModelReply:
            if request.model == "slow":
                await slow.wait()
            return DropModelReply()

        client = Client(handler)
        client.call(1, "slow")
        client.call(2, "quick")
        assert (await client.reply()).id == 2
        slow.set()
        last = await client.reply()
        assert (last.id, last.WhichOneof("outcome")) == (1, "reply")
        await client.replies.aclose()

    run_limited(scenario(), LIMIT_S)


def test_an_error_is_that_of_its_call_alone() -> None:
    async def scenario() -> None:
        async def handler(request: DropModelRequest) -> DropModelReply:
            if request.model == "ours":
                raise UnknownModel("no model of this name")
            if request.model == "bug":
                raise ZeroDivisionError("a bug")
            return DropModelReply()

        client = Client(handler)
        client.call(1, "ours")
        client.call(2, "bug")
        client.garble(3)
        client.call(4, "fine")
        found = {reply.id: reply for reply in [await client.reply() for _ in range(4)]}
        assert (found[1].error.name, found[1].error.message) == ("UnknownModel", "no model of this name")
        assert found[2].error.name == "InternalError"
        assert "ZeroDivisionError" in found[2].error.message
        assert found[3].error.name == "InvalidRequest"
        assert DROP.path in found[3].error.message
        assert found[4].WhichOneof("outcome") == "reply"
        await client.replies.aclose()

    run_limited(scenario(), LIMIT_S)


@pytest.mark.parametrize("path", ["/nowhere/Nothing", SHARDS["Pull"].path, SHARDS["StepOnce"].path])
def test_what_is_not_served_or_streams_is_an_unknown_path(path: str) -> None:
    async def scenario() -> None:
        client = Client(Held())
        client.call(1, path=path)
        assert (await client.reply()).unknown_path
        await client.replies.aclose()

    run_limited(scenario(), LIMIT_S)


def test_an_id_that_is_under_way_ends_the_stream_and_may_come_again_once_it_is_not() -> None:
    async def scenario() -> None:
        held = Held()
        client = Client(held)
        held.let_go.set()
        for _ in range(2):
            client.call(1)
            assert (await client.reply()).id == 1
        held.let_go.clear()
        client.call(1)
        client.call(1)
        with pytest.raises(InvalidRequest, match="call 1 is under way already"):
            await client.reply()
        await settle()
        assert (held.running, held.cancelled) == (0, 1)

    run_limited(scenario(), LIMIT_S)


def test_a_call_that_nobody_waits_for_is_cancelled_and_others_go_on() -> None:
    async def scenario() -> None:
        held = Held()
        client = Client(held)
        client.call(1)
        client.call(2)
        replies = asyncio.create_task(client.reply())
        await settle()
        client.cancel(1)
        client.cancel(99)  # has been answered, or never was
        await settle()
        assert (held.running, held.cancelled) == (1, 1)
        held.let_go.set()
        assert (await replies).id == 2
        await client.replies.aclose()

    run_limited(scenario(), LIMIT_S)


@pytest.mark.parametrize("ended_by", ["client", "server"])
def test_a_stream_that_ends_leaves_no_call_running(ended_by: str) -> None:
    async def scenario() -> None:
        held = Held()
        client = Client(held)
        for call_id in range(5):
            client.call(call_id)
        async with aclosing(client.replies):
            reply = asyncio.create_task(client.reply())
            await settle()
            assert held.running == 5
            if ended_by == "client":
                client.end()
                with pytest.raises(StopAsyncIteration):
                    await reply
            else:
                reply.cancel()
                await settle()
        await settle()
        assert (held.running, held.cancelled) == (0, 5)

    run_limited(scenario(), LIMIT_S)


def test_further_calls_wait_until_there_is_room() -> None:
    async def scenario() -> None:
        held = Held()
        client = Client(held)
        for call_id in range(MAX_CALLS + 3):
            client.call(call_id)
        first = asyncio.create_task(client.reply())
        await asyncio.sleep(0.05)
        assert held.running == MAX_CALLS
        held.let_go.set()
        found = {(await first).id} | {(await client.reply()).id for _ in range(MAX_CALLS + 2)}
        assert found == set(range(MAX_CALLS + 3))
        await client.replies.aclose()

    run_limited(scenario(), LIMIT_S)
