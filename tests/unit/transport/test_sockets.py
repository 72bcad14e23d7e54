"""Streams beside gRPC: strangers, spoiled frames, and what happens where the other port cannot be reached."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from random import Random
from typing import Any

import pytest

from pserver.errors import DeadlineExceeded, InvalidRequest, ProtocolMismatch, ServerUnavailable
from pserver.transport import socket_client, socket_server
from pserver.transport.frames import MAX_PARTS, WORTH_PLACING_BYTES, ConnectionBroken, FrameSocket, Kind
from pserver.transport.gen import calls_pb2 as pb
from pserver.transport.gen.shards_pb2 import PullReply, PullRequest
from pserver.transport.methods import COORDINATOR, MAX_REQUEST_BYTES, SHARDS
from pserver.transport.raw_chunks import Lent, Pieces, RawChunk, pieces
from pserver.transport.socket_client import SocketStreams
from pserver.transport.socket_server import MAX_STRANGERS, SocketServer
from tests.waiting import run_limited

PULL = SHARDS["Pull"]
HOST = "127.0.0.1"
LIMIT_S = 20.0


class Served:
    """A server of one RPC, and raw connections to it."""

    def __init__(self, handler: Callable[[Any], Any]) -> None:
        self.server = SocketServer({PULL.path: (PULL, handler)}, lambda _: nullcontext())
        self.port = 0

    @property
    def place(self) -> pb.FindStreamsReply:
        return pb.FindStreamsReply(port=self.port, ticket=self.server.ticket)

    async def connect(self, ticket: bytes | None = None) -> FrameSocket:
        connected = socket.create_connection((HOST, self.port))
        frames = FrameSocket(connected, reuse=False)
        await frames.send(Kind.HELLO, self.server.ticket if ticket is None else ticket)
        return frames


@asynccontextmanager
async def serving(handler: Callable[[Any], Any]) -> AsyncIterator[Served]:
    served = Served(handler)
    served.port = served.server.start(HOST)
    try:
        yield served
    finally:
        await served.server.stop()


async def counting(request: PullRequest) -> AsyncIterator[PullReply]:
    for number in range(request.min_round):
        yield PullReply(round=number)


async def ask(frames: FrameSocket, rounds: int = 2) -> list[int]:
    """Makes a call by hand; kinds of the frames that come back."""
    await frames.send(Kind.CALL, PULL.path.encode())
    await frames.send(Kind.MESSAGE, PullRequest(min_round=rounds).SerializeToString())
    await frames.send(Kind.END)
    kinds: list[int] = []
    while not kinds or kinds[-1] == Kind.MESSAGE:
        kinds.append((await frames.receive(1 << 20)).kind)
    return kinds


async def is_closed(frames: FrameSocket) -> bool:
    with pytest.raises(ConnectionBroken):
        await frames.receive(1 << 20)
    frames.close()
    return True


def test_a_connection_carries_one_call_after_another() -> None:
    async def scenario() -> None:
        async with serving(counting) as served:
            frames = await served.connect()
            for rounds in (2, 0, 5):
                assert await ask(frames, rounds) == [Kind.MESSAGE] * rounds + [Kind.END]
            frames.close()

    run_limited(scenario(), LIMIT_S)


@pytest.mark.parametrize("ticket", [b"", b"x" * 32, b"x" * 33], ids=["none", "another", "longer"])
def test_who_has_no_ticket_is_sent_away(ticket: bytes) -> None:
    async def scenario() -> None:
        async with serving(counting) as served:
            assert await is_closed(await served.connect(ticket))
            assert await ask(await served.connect()) == [Kind.MESSAGE] * 2 + [Kind.END]

    run_limited(scenario(), LIMIT_S)


def test_who_says_nothing_is_sent_away_and_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with serving(counting) as served:
            silent = [socket.create_connection((HOST, served.port)) for _ in range(MAX_STRANGERS)]
            await asyncio.sleep(0.1)
            assert await is_closed(await served.connect())  # too many strangers
            await asyncio.sleep(0.5)
            assert await ask(await served.connect()) == [Kind.MESSAGE] * 2 + [Kind.END]
            for each in silent:
                each.settimeout(LIMIT_S)
                assert each.recv(1) == b""
                each.close()

    monkeypatch.setattr(socket_server, "GREETING_S", 0.4)
    run_limited(scenario(), LIMIT_S)


@pytest.mark.parametrize("path", ["/nowhere/Nothing", COORDINATOR["Status"].path, COORDINATOR["Link"].path])
def test_what_does_not_stream_tensors_is_refused_and_the_connection_goes_on(path: str) -> None:
    async def scenario() -> None:
        async with serving(counting) as served:
            frames = await served.connect()
            await frames.send(Kind.CALL, path.encode())
            await frames.send(Kind.END)
            kind, payload = await frames.receive(1 << 20)
            assert kind == Kind.ERROR
            assert pb.CarriedError.FromString(bytes(payload)).name == ProtocolMismatch.__name__
            assert await ask(frames) == [Kind.MESSAGE] * 2 + [Kind.END]
            frames.close()

    run_limited(scenario(), LIMIT_S)


def test_a_frame_that_is_too_large_is_refused_by_name_before_it_has_come() -> None:
    async def scenario() -> None:
        async with serving(counting) as served:
            connected = socket.create_connection((HOST, served.port))
            frames = FrameSocket(connected, reuse=False)
            await frames.send(Kind.HELLO, served.server.ticket)
            await frames.send(Kind.CALL, PULL.path.encode())
            connected.sendall(struct.pack("<BI", Kind.MESSAGE, MAX_REQUEST_BYTES + 1))
            kind, payload = await frames.receive(1 << 20)
            error = pb.CarriedError.FromString(bytes(payload))
            assert (kind, error.name) == (Kind.ERROR, InvalidRequest.__name__)
            assert str(MAX_REQUEST_BYTES) in error.message
            assert await is_closed(frames)

    run_limited(scenario(), LIMIT_S)


@pytest.mark.parametrize("seed", range(10))
def test_noise_leaves_a_live_server_and_nothing_running(seed: int) -> None:
    async def scenario() -> None:
        random = Random(seed)
        running = 0

        async def counted(request: PullRequest) -> AsyncIterator[PullReply]:
            nonlocal running
            running += 1
            try:
                yield PullReply()
                await asyncio.sleep(0.01)
            finally:
                running -= 1

        async with serving(counted) as served:
            for _ in range(20):
                frames = await served.connect()
                for _ in range(random.randrange(6)):
                    kind = random.choice([*Kind, 0, 77])
                    payload = random.choice([b"", PULL.path.encode(), b"\xff" * 9, PullRequest().SerializeToString()])
                    try:
                        await frames.send(kind, payload)  # type: ignore[arg-type]
                    except ConnectionBroken:
                        break
                frames.close()
            assert (await ask(await served.connect()))[-1] == Kind.END
            while running:
                await asyncio.sleep(0.01)

    run_limited(scenario(), LIMIT_S)


def test_a_message_of_many_pieces_arrives_whole() -> None:
    async def scenario() -> None:
        near, far = socket.socketpair()
        sender, receiver = (FrameSocket(_like_tcp(each), reuse=False) for each in (near, far))
        parts = [bytes([number % 251]) * (number % 700) for number in range(3 * MAX_PARTS)]
        sending = asyncio.create_task(sender.send(Kind.MESSAGE, *parts))
        kind, payload = await receiver.receive(1 << 24)
        await sending
        assert (kind, bytes(payload)) == (Kind.MESSAGE, b"".join(parts))
        sender.close()
        assert receiver.hung_up
        assert not receiver.quiet
        receiver.close()

    run_limited(scenario(), LIMIT_S)


def test_memory_that_is_taken_back_while_it_is_sent_arrives_as_it_was() -> None:
    async def scenario() -> None:
        near, far = socket.socketpair()
        sender, receiver = (FrameSocket(_like_tcp(each), reuse=False) for each in (near, far))
        memory = bytearray(Random(1).randbytes(1 << 22))
        before, lent = bytes(memory), Lent(memoryview(memory))
        sending = asyncio.create_task(sender.send(Kind.MESSAGE, b"head", lent, b"tail"))
        await asyncio.sleep(0.1)
        assert not sending.done()  # some of it has gone, and there is no room for more
        lent.take_back()
        memory[:] = bytes(len(memory))
        _, payload = await receiver.receive(1 << 24)
        await sending
        assert bytes(payload) == b"head" + before + b"tail"
        sender.close()
        receiver.close()

    run_limited(scenario(), LIMIT_S)


def _like_tcp(pair: socket.socket) -> Any:
    """A local socket that lets options of TCP pass unheard."""

    class Lenient(socket.socket):
        def setsockopt(self, *arguments: Any) -> None:
            if arguments[0] != socket.IPPROTO_TCP:
                super().setsockopt(*arguments)

    return Lenient(fileno=pair.detach())


# The client


async def pulled(streams: SocketStreams, rounds: int = 3, timeout_s: float = LIMIT_S) -> list[int] | None:
    """The rounds of a call's replies; None: it would go over gRPC."""
    frames = await streams.connect()
    if frames is None:
        return None

    async def requests() -> AsyncIterator[PullRequest]:
        yield PullRequest(min_round=rounds)

    async with aclosing(streams.call(frames, PULL, requests(), timeout_s=timeout_s)) as replies:
        return [reply.round async for reply in replies]


VALUES = Random(2).randbytes(3 * WORTH_PLACING_BYTES)


async def one_bucket(request: PullRequest) -> AsyncIterator[Pieces]:
    """The same values in replies of growing size, none of them where the last one was."""
    for number in range(3):
        yield pieces(PullReply(round=number), [RawChunk(number, 0, 1, VALUES[: (number + 1) * WORTH_PLACING_BYTES])])


@pytest.mark.parametrize("placed", [(), (0,), (1,), (0, 1, 2)], ids=str)
def test_data_is_received_where_it_is_placed_and_nowhere_else(placed: tuple[int, ...]) -> None:
    places = {number: memoryview(bytearray((number + 1) * WORTH_PLACING_BYTES)) for number in placed}

    async def requests() -> AsyncIterator[PullRequest]:
        yield PullRequest()

    async def scenario() -> None:
        async with serving(one_bucket) as served:

            async def find() -> pb.FindStreamsReply:
                return served.place

            streams = SocketStreams(f"{HOST}:1", find)
            frames = await streams.connect()
            assert frames is not None
            call = streams.call(
                frames, PULL, requests(), timeout_s=LIMIT_S, place=lambda bucket, _offset, _size: places.get(bucket)
            )
            async with aclosing(call) as replies:
                async for reply in replies:
                    (chunk,) = reply.chunks
                    assert chunk.bucket == reply.round
                    assert bytes(chunk.data) == VALUES[: (chunk.bucket + 1) * WORTH_PLACING_BYTES]
                    assert (chunk.data is places.get(chunk.bucket)) == (chunk.bucket in places)
            await streams.close()

    run_limited(scenario(), LIMIT_S)


def test_connections_are_used_again_and_a_dead_one_is_replaced() -> None:
    async def scenario() -> None:
        asked = 0
        async with serving(counting) as served:

            async def find() -> pb.FindStreamsReply:
                nonlocal asked
                asked += 1
                return served.place

            streams = SocketStreams(f"{HOST}:1", find)
            for _ in range(3):
                assert await pulled(streams) == [0, 1, 2]
            assert asked == 1
            assert await asyncio.gather(pulled(streams), pulled(streams)) == [[0, 1, 2]] * 2
            assert asked == 2
            await served.server.stop()
            served.server = SocketServer({PULL.path: (PULL, counting)}, lambda _: nullcontext())
            served.port = served.server.start(HOST)
            assert await pulled(streams) == [0, 1, 2]
            assert asked == 3
            await streams.close()

    run_limited(scenario(), LIMIT_S)


@pytest.mark.parametrize("reason", ["the server has none", "nobody listens", "nobody answers"])
def test_where_it_cannot_be_reached_streams_go_over_grpc_until_it_is_tried_again(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(counting) as served:
            with socket.socket() as unused, socket.create_server((HOST, 0), backlog=0) as full:
                unused.bind((HOST, 0))
                waiting = [socket.create_connection((HOST, full.getsockname()[1])) for _ in range(1)]
                ports = {
                    "the server has none": 0,
                    "nobody listens": unused.getsockname()[1],
                    "nobody answers": full.getsockname()[1],
                }
                found = pb.FindStreamsReply(port=ports[reason], ticket=served.server.ticket)

                async def find() -> pb.FindStreamsReply:
                    return found

                streams = SocketStreams(f"{HOST}:1", find)
                for _ in range(3):
                    assert await pulled(streams) is None
                found = served.place
                assert await pulled(streams) is None
                streams._not_before_s = 0.0
                assert await pulled(streams) == [0, 1, 2]
                await streams.close()
                for each in waiting:
                    each.close()

    monkeypatch.setattr(socket_client, "CONNECT_S", 0.3)
    with caplog.at_level(logging.INFO, logger=socket_client.__name__):
        run_limited(scenario(), LIMIT_S)
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == (reason != "the server has none")
    assert all("go over gRPC" in each and f"{HOST}:1" in each for each in said)


def test_a_call_that_is_late_or_broken_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        running = 0

        async def stuck(request: PullRequest) -> AsyncIterator[PullReply]:
            nonlocal running
            running += 1
            try:
                yield PullReply(round=7)
                await asyncio.Event().wait()
            finally:
                running -= 1

        async with serving(stuck) as served:

            async def find() -> pb.FindStreamsReply:
                return served.place

            streams = SocketStreams(f"{HOST}:1", find)
            with pytest.raises(DeadlineExceeded, match=f"{HOST}:1"):
                await pulled(streams, timeout_s=0.1)
            while running:
                await asyncio.sleep(0.01)
            calling = asyncio.create_task(pulled(streams))
            while running != 1:
                await asyncio.sleep(0.01)
            await streams.close()
            with pytest.raises(ServerUnavailable, match=f"{HOST}:1"):
                await calling
            while running:
                await asyncio.sleep(0.01)
            with pytest.raises(ServerUnavailable, match="closed"):
                await pulled(streams)
            assert not streams._idle
            assert not streams._busy

    run_limited(scenario(), LIMIT_S)
