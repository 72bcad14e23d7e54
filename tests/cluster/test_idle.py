"""Trainers that do nothing for a long time, or wait in one call for a long time."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster as Session
from pserver.config import TrainerSettings
from pserver.testing import local_cluster
from pserver.testing.local_cluster import LocalCluster
from pserver.transport import grpc_channel
from pserver.transport.grpc_channel import GrpcChannel
from pserver.transport.loop import LoopThread
from tests.cluster.frames import FrameProxy, Frames
from tests.cluster.processes import SOON_S, Cluster
from tests.waiting import until

HOURS_S = 2 * 3600.0
LEASE_S = 10.0
#: The least that gRPC takes; it makes one second of less.
KEEPALIVE_MS = 1000
NUM_PINGS = 4


class Weight:
    """One parameter, trained by SGD with learning rate 1."""

    def __init__(self, session: Session, name: str) -> None:
        self.value = torch.nn.Parameter(torch.zeros(64))
        self._optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", self.value)], lr=1.0, name=name, cluster=session, bucket_bytes=128
        )

    def step(self) -> int:
        """A step with gradient 1; returns the number of trainers in its round."""
        self.value.grad = torch.ones(64)
        self._optimizer.step()
        assert self._optimizer.last_result is not None
        return self._optimizer.last_result.num_trainers


# Leases: hours pass within seconds, because the one event loop of a local cluster skips the time in which all sleep


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is also a clock; until `skip_until_s` it goes on to timers at once."""

    def __init__(self) -> None:
        super().__init__()
        self.skip_until_s = 0.0
        self._skipped_s = 0.0
        self._wait = self._selector.select
        self._selector.select = self._select

    def time(self) -> float:
        return super().time() + self._skipped_s

    now_s = time

    def _select(self, timeout: float | None = None) -> list:
        if timeout and self.time() < self.skip_until_s:
            events = self._wait(0)
            self._skipped_s += 0.0 if events else timeout
            return events
        return self._wait(timeout)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[SkippingLoop]:
    loop = SkippingLoop()
    monkeypatch.setattr(local_cluster, "LoopThread", lambda name: LoopThread(name, loop))
    return loop


def test_leases_go_on_for_hours_and_so_does_training(loop: SkippingLoop) -> None:
    with LocalCluster(2, trainer_lease_s=LEASE_S, clock=loop) as local, ThreadPoolExecutor(2) as threads:
        with local.connect(0, 2) as first, local.connect(1, 2) as second:
            weights = list(threads.map(lambda session: Weight(session, "idle"), (first, second)))
            assert list(threads.map(Weight.step, weights)) == [2, 2]
            ids = [trainer.trainer_id for trainer in first.status().trainers]

            begin_s = loop.time()
            loop.skip_until_s = begin_s + HOURS_S
            until(lambda: loop.time() > begin_s + HOURS_S, "hours have passed", limit_s=100.0)

            status = first.status()
            assert [trainer.trainer_id for trainer in status.trainers] == ids
            assert all(trainer.lease_s > 0 for trainer in status.trainers)
            assert all(server.alive for server in status.servers)
            assert list(threads.map(Weight.step, weights)) == [2, 2]
            assert weights[0].value.unique().item() == -2.0
            assert first.statistics().num_retries == second.statistics().num_retries == 0


# Connections: keepalive is as frequent as gRPC lets it be, and the server's limits are what they always are


class WatchedSession(Session):
    """A session whose bulk connection to the coordinator's server, the first that it opens, goes through a proxy."""

    def __init__(
        self, address: str, proxy: FrameProxy, rank: int = 0, world_size: int = 1, timeout_s: float = SOON_S
    ) -> None:
        settings = TrainerSettings.resolve(address, rank=rank, world_size=world_size, timeout_s=timeout_s)
        super().__init__(settings, connect_channel=self._connect_watched)
        self._targets = [proxy.address]

    def _connect_watched(self, address: str) -> GrpcChannel:
        return GrpcChannel(self._targets.pop() if self._targets else address)


def use_options(monkeypatch: pytest.MonkeyPatch, **replaced: int) -> None:
    """Makes later channels use these options of gRPC in place of theirs."""
    named = {f"grpc.{name.replace('__', '.')}": value for name, value in replaced.items()}
    monkeypatch.setattr(grpc_channel, "_OPTIONS", tuple({**dict(grpc_channel._OPTIONS), **named}.items()))


def test_a_server_that_is_slow_to_answer_the_connection_is_given_time(cluster: Cluster) -> None:
    """A busy machine, or one that is far away."""
    with FrameProxy(cluster.address, accepts_after_s=1.5) as proxy:
        with WatchedSession(cluster.address, proxy, timeout_s=8.0) as session:
            assert_undisturbed(proxy.frames, session)


@pytest.fixture
def frequent_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    use_options(monkeypatch, keepalive_time_ms=KEEPALIVE_MS, http2__max_pings_without_data=0)


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[FrameProxy]:
    with FrameProxy(cluster.address) as proxy:
        yield proxy


def wait_for_pings(frames: Frames, number: int, limit_s: float = SOON_S) -> None:
    """Waits until so many more pings have been answered."""
    answered = ("received", "ping answer")
    before = frames.counts[answered]
    until(lambda: frames.counts[answered] >= before + number, f"{number} more pings: {frames}", limit_s=limit_s)


def assert_undisturbed(frames: Frames, session: Session) -> None:
    """One connection throughout, no call repeated, and no GOAWAY, which is how "too many pings" comes."""
    assert frames.farewells == []
    assert frames.num_connections == 1
    assert session.statistics().num_retries == 0


@pytest.mark.usefixtures("frequent_keepalive")
def test_an_idle_connection_is_not_ended_for_its_pings(cluster: Cluster, proxy: FrameProxy) -> None:
    """The server's own limit is a ping in 5 s, but it strikes nobody out."""
    with WatchedSession(cluster.address, proxy) as session:
        session.status()
        wait_for_pings(proxy.frames, NUM_PINGS)
        session.status()
        assert_undisturbed(proxy.frames, session)


@pytest.mark.usefixtures("frequent_keepalive")
def test_a_call_may_be_longer_than_the_keepalive(cluster: Cluster, proxy: FrameProxy) -> None:
    settings = TrainerSettings.resolve(cluster.address, rank=1, world_size=2, timeout_s=SOON_S)
    with WatchedSession(cluster.address, proxy, 0, 2) as first, Session(settings) as second:
        with ThreadPoolExecutor(2) as threads:
            weights = list(threads.map(lambda session: Weight(session, "long"), (first, second)))
            waiting = threads.submit(weights[0].step)
            cluster.wait_for_round("long", 0, waiting_for=(1,))
            wait_for_pings(proxy.frames, NUM_PINGS)
            assert not waiting.done()
            assert weights[1].step() == 2
            assert waiting.result(SOON_S) == 2
        assert_undisturbed(proxy.frames, first)


def test_keepalive_goes_on_for_as_long_as_nothing_is_said(
    cluster: Cluster, proxy: FrameProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_options(monkeypatch, keepalive_time_ms=KEEPALIVE_MS)
    with WatchedSession(cluster.address, proxy) as session:
        session.status()
        wait_for_pings(proxy.frames, NUM_PINGS, limit_s=10.0)
        assert_undisturbed(proxy.frames, session)
