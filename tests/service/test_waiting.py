"""Deadlines, retries, leases and draining."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pserver.errors import DeadlineExceeded, PserverError, RankTaken, ServerUnavailable, TrainerEnded
from pserver.transport.faults import Fault, FaultKind, FaultPlan
from pserver.transport.gen import coordinator_pb2
from tests.routes import MEMORY, NETWORK_ROUTES, Route
from tests.service.grpc_cluster import GrpcCluster
from tests.service.weight import Weight
from tests.service.wire_trainer import WireTrainer, spec
from tests.waiting import set_timeout, until

#: Of trainers' leases in tests that wait for their end.
LEASE_S = 2.0
ALWAYS = 1_000_000


@pytest.fixture(scope="module")
def lone_server() -> Iterator[GrpcCluster]:
    """One server: what it fails with is not joined by what others fail with."""
    with GrpcCluster(1) as running:
        yield running


def waits_for(cluster: GrpcCluster, name: str, ranks: list[int]) -> bool:
    """Whether a model's next round waits for exactly these ranks."""
    return list(cluster.model_status(name).waiting_for_ranks) == ranks


# Deadlines


@pytest.mark.parametrize("servers", [1, 2])
def test_a_step_that_waits_for_a_trainer_in_vain_ends_in_time_and_names_its_rank(servers: int, name: str) -> None:
    with GrpcCluster(servers) as own:
        with own.connect(0, 2) as first, own.connect(1, 2) as second:
            weight = Weight(first, name)
            Weight(second, name)
            set_timeout(first, 0.5)
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"waits for the ranks \[1\]") as raised:
                weight.step(1.0)
            assert time.monotonic() - began < 5.0
            assert isinstance(raised.value, TimeoutError)
            assert name in str(raised.value)


def test_a_step_before_everybody_has_attached_says_how_many_are_missing(cluster: GrpcCluster, name: str) -> None:
    with cluster.connect(0, 3) as session:
        weight = Weight(session, name)
        set_timeout(session, 0.5)
        with pytest.raises(DeadlineExceeded, match="2 trainers to attach"):
            weight.step(1.0)


# Retries


@pytest.mark.parametrize(
    ("method", "route"),
    [
        *(
            pytest.param(each, MEMORY, id=each)
            for each in ("Join", "RegisterModel", "Initialise", "Attach", "FindMemory", "OpenMemory", "Pull")
        ),
        *(pytest.param(route.method, route, id=f"{route.method} by {each}") for each, route in NETWORK_ROUTES.items()),
    ],
)
def test_a_server_that_cannot_be_reached_is_tried_again_with_backoff_and_not_for_ever(
    method: str, route: Route, lone_server: GrpcCluster, name: str
) -> None:
    """Full jitter from 50 ms, doubled each time: about six attempts in the first second, never a storm."""
    plan = FaultPlan([Fault(kind=FaultKind.LOSE_REQUEST, method=method, times=ALWAYS)])
    began = time.monotonic()
    with route.taken(), pytest.raises(ServerUnavailable, match=lone_server.addresses[0]):
        with lone_server.connect(timeout_s=1.0, transport=route.transport, plan=plan) as session:
            Weight(session, name).step(1.0)
    assert time.monotonic() - began < 4.0
    assert 3 <= plan.struck <= 40


def test_a_coordinator_that_is_not_there_is_named_in_time() -> None:
    with GrpcCluster(1) as own:
        gone = own.connect(timeout_s=0.7)
    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match=own.addresses[0]):
        gone.start()
    assert time.monotonic() - began < 5.0


def test_retries_are_counted(cluster: GrpcCluster, name: str, route: Route) -> None:
    plan = FaultPlan()
    with cluster.connect(transport=route.transport, plan=plan) as session:
        weight = Weight(session, name)
        assert session.statistics().num_retries == 0
        plan.faults.append(Fault(kind=FaultKind.LOSE_REPLY, method=route.method, times=3))
        weight.step(2.0)
        assert weight.number == -2.0
        assert session.statistics().num_retries == 3


def test_an_error_that_repeating_cannot_mend_is_raised_at_the_first_attempt(cluster: GrpcCluster, name: str) -> None:
    with cluster.connect(timeout_s=30.0) as session:
        weight = Weight(session, name)
        session.drop_model(name)
        until(lambda: cluster.num_contexts(name) == [-1, -1], "the shards are gone")
        with pytest.raises(PserverError) as raised:
            weight.step(1.0)
        assert name in str(raised.value)
        assert session.statistics().num_retries == 0


# Leases


def test_a_trainer_that_stops_renewing_is_ended_and_the_round_goes_on_without_it(name: str, route: Route) -> None:
    with GrpcCluster(2, trainer_lease_s=LEASE_S) as own:
        silent = WireTrainer(own, rank=1)
        with own.connect(0, 2, transport=route.transport) as session:
            held = silent.model(name, world_size=2)
            weight = Weight(session, name)
            silent.renew()
            for server in (0, 1):
                held.push(held.step_request(server, 100.0, context_id=1), route, server=server)
            # Only one shard has its commit: it must count on none.
            request = held.step_request(0, 100.0, context_id=2, commit=held.commit(1), wait_s=0.0)
            with pytest.raises(DeadlineExceeded):
                held.push(request, route)
            assert own.num_contexts(name) == [2, 1]

            result = weight.step(3.0)

            assert result.num_trainers == 1
            assert weight.number == -3.0
            until(lambda: own.num_contexts(name) == [0, 0], "the contexts of the dead trainer are freed")
            assert [trainer.rank for trainer in own.status().trainers] == [0]
            assert weight.step(1.0).num_trainers == 1

            for server in (0, 1):
                with pytest.raises(TrainerEnded, match=str(silent.trainer_id)):
                    held.push(held.step_request(server, 1.0), route, server=server)
                with pytest.raises(TrainerEnded, match=str(silent.trainer_id)):
                    held.call("Pull", held.pull_request(), server=server)
            for refused in (
                silent.renew,
                silent.join,
                lambda: silent.attach(name),
                lambda: silent.register(spec(name)),
            ):
                with pytest.raises(TrainerEnded, match=str(silent.trainer_id)):
                    refused()
            drop = coordinator_pb2.DropModelRequest(push_id=silent.push_id(), model=name)
            with pytest.raises(TrainerEnded, match=str(silent.trainer_id)):
                silent.coordinator("DropModel", drop)
            silent.leave()
            assert weight.number == -4.0


def test_a_trainer_whose_renewals_are_lost_hears_it_while_it_waits(name: str) -> None:
    plan = FaultPlan()
    with GrpcCluster(1, trainer_lease_s=LEASE_S) as own:
        with own.connect(0, 2, plan=plan) as cut_off, own.connect(1, 2) as other:
            weight, others = Weight(cut_off, name), Weight(other, name)
            plan.faults.append(Fault(kind=FaultKind.LOSE_REQUEST, method="Renew", times=ALWAYS))
            began = time.monotonic()
            with pytest.raises((ServerUnavailable, TrainerEnded), match="lease of trainer"):
                weight.step(1.0)
            assert time.monotonic() - began < 6 * LEASE_S
            until(lambda: len(own.status().trainers) == 1, "the coordinator has ended it")
            assert others.step(5.0).num_trainers == 1
            with pytest.raises(PserverError, match="lease of trainer"):
                weight.step(1.0)


def test_a_very_short_lease_ends_as_well() -> None:
    with GrpcCluster(1, trainer_lease_s=0.3) as own:
        WireTrainer(own)
        until(lambda: not own.status().trainers, "the lease has ended", limit_s=3.0)


def test_a_rank_is_free_again_once_its_trainer_has_ended(cluster: GrpcCluster) -> None:
    holder = WireTrainer(cluster, rank=0)
    with pytest.raises(RankTaken, match=str(holder.trainer_id)):
        WireTrainer(cluster, rank=0)
    waiting = cluster.connect(0, 1)
    starting = Thread(target=waiting.start)
    starting.start()
    holder.leave()
    starting.join(10)
    assert waiting.rank == 0
    waiting.close()


def test_a_trainer_that_leaves_is_not_waited_for(cluster: GrpcCluster, name: str) -> None:
    with cluster.connect(0, 2) as stays:
        weight = Weight(stays, name)
        leaves = cluster.connect(1, 2)
        with leaves:
            others = Weight(leaves, name)
            with ThreadPoolExecutor(1) as pool:
                together = pool.submit(others.step, 4.0)
                assert weight.step(2.0).num_trainers == 2
                assert together.result(10).num_trainers == 2
            with ThreadPoolExecutor(1) as pool:
                alone = pool.submit(weight.step, 2.0)
                until(lambda: waits_for(cluster, name, [1]), "the round waits for rank 1")
                leaves.close()
                assert alone.result(10).num_trainers == 1
        assert weight.number == -5.0


def test_a_newcomer_joins_a_running_model_with_its_present_values(cluster: GrpcCluster, name: str) -> None:
    first = WireTrainer(cluster, rank=0)
    model = first.model(name)
    model.step(1, 3.0)
    with cluster.connect(1, 1) as session:
        assert Weight(session, name).number == -3.0
    first.leave()


# Draining


def health(cluster: GrpcCluster, service: str = "") -> int:
    with grpc.insecure_channel(cluster.addresses[0]) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        found: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
        return found


def drain(cluster: GrpcCluster, pool: ThreadPoolExecutor, grace_s: float) -> Future[Any]:
    return pool.submit(lambda: cluster.loop.run(cluster.servers[0].drain(grace_s)))


def test_draining_says_not_serving_and_ends_when_the_round_in_flight_does(name: str) -> None:
    with GrpcCluster(1) as own, ThreadPoolExecutor(2) as pool:
        with own.connect(0, 2) as first, own.connect(1, 2) as second:
            weight, others = Weight(first, name), Weight(second, name)
            stepping = pool.submit(weight.step, 2.0)
            until(lambda: waits_for(own, name, [1]), "the round waits for rank 1")
            draining = drain(own, pool, grace_s=20.0)
            not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
            until(lambda: health(own) == not_serving, "the server says that it drains")
            assert health(own, "pserver.v1.Shards") == not_serving
            assert not draining.done()
            assert not stepping.done()

            began = time.monotonic()
            assert others.step(4.0).num_trainers == 2
            assert stepping.result(10).num_trainers == 2
            draining.result(10)
            assert time.monotonic() - began < 5.0
            assert weight.number == -3.0


def test_draining_an_idle_server_ends_at_once() -> None:
    with GrpcCluster(1) as own:
        began = time.monotonic()
        own.loop.run(own.servers[0].drain(20.0))
        assert time.monotonic() - began < 5.0


def test_draining_gives_up_on_a_round_that_does_not_end(name: str) -> None:
    with GrpcCluster(1) as own, ThreadPoolExecutor(2) as pool:
        with own.connect(0, 2) as first, own.connect(1, 2) as second:
            weight, others = Weight(first, name), Weight(second, name)
            stepping = pool.submit(weight.step, 2.0)
            until(lambda: waits_for(own, name, [1]), "the round waits for rank 1")
            began = time.monotonic()
            drain(own, pool, grace_s=0.3).result(10)
            assert time.monotonic() - began >= 0.3
            assert not stepping.done()
            others.step(4.0)
            stepping.result(10)
