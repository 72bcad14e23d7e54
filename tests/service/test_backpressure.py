"""Who is slow makes the other side wait: what is on its way is bounded, however much there is to send."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster, channels_for
from pserver.server.hosted_shard import HostedShard
from pserver.transport import methods
from pserver.transport.channel import Channel, Place
from pserver.transport.chunks import MESSAGE_BYTES
from pserver.transport.methods import Method, Sendable
from pserver.wire.layout import Bucket
from tests.service.grpc_cluster import GrpcCluster
from tests.waiting import until


def most_in_a_socket(limit: str) -> int:
    """The largest size that the kernel gives the buffer of a socket on its own."""
    return int(Path("/proc/sys/net/ipv4", limit).read_text().split()[2])


MEBI = 1 << 20
#: Of one gradient, and of the parameters that come back.
TOTAL_BYTES = 128 * MEBI
#: What may be on its way: what the kernel lets wait in sockets, and a few messages.
BOUND_BYTES = most_in_a_socket("tcp_rmem") + most_in_a_socket("tcp_wmem") + 4 * MESSAGE_BYTES
assert BOUND_BYTES < TOTAL_BYTES / 2
#: A counter that has stood still for this long, in polls, is taken to have stopped: a slow machine makes a test that
#: should fail pass, and never the other way round.
NUM_STILL = 100
LIMIT_S = 60.0


class Large:
    """One parameter of `TOTAL_BYTES`, trained by SGD with learning rate 1."""

    def __init__(self, session: Cluster, name: str) -> None:
        self.value = torch.nn.Parameter(torch.zeros(TOTAL_BYTES // 4))
        self.optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", self.value)], lr=1.0, name=name, cluster=session
        )
        self.value.grad = torch.full((1,), 2.0).expand(TOTAL_BYTES // 4)

    def step(self) -> None:
        self.optimizer.step()


@pytest.fixture
def cluster() -> Iterator[GrpcCluster]:
    """A server that shares no memory."""
    with GrpcCluster(1, shared_memory=False) as running:
        yield running


@pytest.fixture(params=["tcp", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def session(cluster: GrpcCluster, transport: str) -> Iterator[Cluster]:
    with cluster.connect(timeout_s=LIMIT_S, transport=transport) as session:
        yield session


class Hold:
    """Lets so many pass, and holds all others until it ends. For coroutines of one event loop."""

    def __init__(self, *, after: int) -> None:
        self.after = after
        self.holding = False
        self._num_passed = 0
        self._ended = asyncio.Event()

    async def pass_one(self) -> None:
        if self._num_passed >= self.after:
            self.holding = True
            await self._ended.wait()
        self._num_passed += 1

    async def end(self) -> None:
        self._ended.set()


class HeldChannel:
    """A channel whose steps' replies a hold keeps back."""

    def __init__(self, inner: Channel, hold: Hold) -> None:
        self._inner = inner
        self._hold = hold

    @property
    def address(self) -> str:
        return self._inner.address

    async def call(
        self, method: Method, requests: AsyncIterable[Sendable], *, timeout_s: float, place: Place | None = None
    ) -> AsyncGenerator[Any, None]:
        async for reply in self._inner.call(method, requests, timeout_s=timeout_s, place=place):
            if method.name == "Step":
                await self._hold.pass_one()
            yield reply

    async def close(self) -> None:
        await self._inner.close()


def bytes_when_still(counted: Any) -> int:
    """What a counter says once it has stopped; it must have begun to count."""
    last, still = counted(), 0

    def stopped() -> bool:
        nonlocal last, still
        now = counted()
        still = still + 1 if now == last else 0
        last = now
        return bool(now) and still >= NUM_STILL

    until(stopped, lambda: f"it stops; it is at {last} bytes", limit_s=LIMIT_S)
    return last


@contextmanager
def held(cluster: GrpcCluster, name: str) -> Iterator[HostedShard]:
    """Nobody gets the shard in this block, as if it were being worked on."""
    hosted = cluster.nodes[0].shards._shards[name, 0]

    async def acquire() -> None:
        await hosted._lock.acquire()

    async def release() -> None:
        hosted._lock.release()

    cluster.loop.run(acquire())
    try:
        yield hosted
    finally:
        cluster.loop.run(release())


def test_a_trainer_waits_for_a_shard_that_takes_nothing(cluster: GrpcCluster, session: Cluster) -> None:
    model = Large(session, "large")
    before = session.traffic.sent_bytes
    with ThreadPoolExecutor(1) as threads:
        with held(cluster, "large"):
            step = threads.submit(model.step)
            assert bytes_when_still(lambda: session.traffic.sent_bytes - before) < BOUND_BYTES
            assert not step.done()
        step.result(LIMIT_S)
    assert session.traffic.sent_bytes - before == TOTAL_BYTES
    assert session.statistics().num_retries == 0
    assert model.value.eq(-2.0).all()


def test_a_trainer_waits_for_a_server_that_stops_in_the_middle(
    cluster: GrpcCluster, session: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Large(session, "large")
    go_on = Hold(after=15)
    take_next = methods._next

    async def take_next_unless_held(requests: AsyncIterator[Any]) -> Any:
        found = await take_next(requests)
        await go_on.pass_one()
        return found

    monkeypatch.setattr(methods, "_next", take_next_unless_held)
    before = session.traffic.sent_bytes
    with ThreadPoolExecutor(1) as threads:
        try:
            step = threads.submit(model.step)
            until(lambda: go_on.holding, "the server stops", limit_s=LIMIT_S)
            sent_bytes = bytes_when_still(lambda: session.traffic.sent_bytes - before)
            assert 0 < sent_bytes - go_on.after * MESSAGE_BYTES < BOUND_BYTES
            assert not step.done()
        finally:
            cluster.loop.run(go_on.end())
        step.result(LIMIT_S)
    assert session.traffic.sent_bytes - before == TOTAL_BYTES
    assert model.value.eq(-2.0).all()


def test_a_server_waits_for_a_trainer_that_reads_nothing(
    cluster: GrpcCluster, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has the shard for others meanwhile."""
    read_bytes = 0
    read = HostedShard.read

    async def counted(hosted: HostedShard, bucket: Bucket, copy: Any) -> Any:
        nonlocal read_bytes
        read_bytes += bucket.num_bytes
        return await read(hosted, bucket, copy)

    monkeypatch.setattr(HostedShard, "read", counted)
    hold = Hold(after=1)

    def connect(address: str) -> HeldChannel:
        return HeldChannel(channels_for(transport)(address), hold)

    with (
        cluster.connect(timeout_s=LIMIT_S, transport=transport, connect_channel=connect) as slow,
        ThreadPoolExecutor(1) as threads,
    ):
        model = Large(slow, "slow")
        read_bytes = 0
        try:
            step = threads.submit(model.step)
            until(lambda: hold.holding, "the trainer stops", limit_s=LIMIT_S)
            assert bytes_when_still(lambda: read_bytes) < BOUND_BYTES
            cluster.loop.run(nothing_with(cluster.nodes[0].shards._shards["slow", 0]))
            assert not step.done()
        finally:
            slow.run(hold.end())
        step.result(LIMIT_S)
    assert read_bytes == TOTAL_BYTES
    assert model.value.eq(-2.0).all()


async def nothing_with(hosted: HostedShard) -> None:
    """Returns once the shard could be had."""
    async with hosted.exclusive():
        pass
