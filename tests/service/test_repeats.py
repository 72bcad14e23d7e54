"""Every mutation may be repeated: lost requests, lost replies and broken streams change nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.errors import StalePush, TrainerEnded
from pserver.transport.convert import spec_to_proto
from pserver.transport.faults import Fault, FaultKind, FaultPlan
from pserver.transport.gen import coordinator_pb2
from pserver.transport.methods import COORDINATOR, REPLICAS, SHARDS, Method
from tests.numerics.training import (
    BUCKET_BYTES,
    assert_same_bits,
    fill_,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    values,
)
from tests.routes import MEMORY, NETWORK_ROUTES, Route
from tests.service.grpc_cluster import GrpcCluster
from tests.service.wire_trainer import WireTrainer, everywhere, spec
from tests.waiting import set_timeout, until, until_shards

STEPPING = ("Step", "StepOnce")
MUTATING = ("Join", "RegisterModel", "Initialise", "Attach", *STEPPING, "DropContext", "DropModel", "Leave")
#: Read-only, or such that a later message says all that an earlier one said: a lease renewed twice is renewed, memory
#: opened twice is open, commands and reports of a link are told again after every break, and what a replica has by
#: its number in the log it does not do again.
NOT_MUTATING = ("Status", "Watch", "Pull", "PullState", "Renew", "Link", "Follow", "FindMemory", "OpenMemory")

ROUNDS = 2


def test_every_rpc_is_known_to_mutate_or_not() -> None:
    """A new one must be listed here; if it mutates, the tests below repeat it."""
    assert sorted([*MUTATING, *NOT_MUTATING]) == sorted([*COORDINATOR, *SHARDS, *REPLICAS])


@pytest.mark.parametrize("method", MUTATING)
def test_every_mutating_rpc_carries_what_makes_a_repeat_known(method: str) -> None:
    fields = _method(method).request_type.DESCRIPTOR.fields_by_name
    assert ("nonce" if method == "Join" else "push_id") in fields


def _method(name: str) -> Method:
    return (COORDINATOR | SHARDS | REPLICAS)[name]


# A whole run, disturbed


@pytest.fixture(scope="module", autouse=True)
def _small_messages() -> Iterator[None]:
    """Streams of a small model have several messages, so that one can break in the middle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pserver.transport.chunks.MESSAGE_BYTES", BUCKET_BYTES)
        yield


def run(cluster: GrpcCluster, name: str, route: Route, method: str | None = None, kind: FaultKind | None = None) -> Any:
    """Two trainers use every mutating RPC, those of one route for their steps; faults hit those of rank 0.

    Returns:
        Parameters of each trainer after each round, and how many faults struck.
    """
    plan = FaultPlan()
    rank_0_is_registered = Event()
    batches = make_batches([4, 4], steps=2 * ROUNDS)

    def disturb(at: str, times: int) -> None:
        if method == at and kind is not None:
            plan.faults.append(Fault(kind=kind, method=at, times=times))

    def train(session: Cluster) -> list[list[torch.Tensor]]:
        module = make_module()
        if session.rank == 1:
            assert rank_0_is_registered.wait(10)
            fill_(module, 77)
        model = pserver.distribute(module, name=name, cluster=session, bucket_bytes=BUCKET_BYTES)
        optimizer = pserver.optim.DistributedOptimizer(torch.optim.SGD, model.parameter_refs(), lr=0.1, momentum=0.9)
        rank_0_is_registered.set()
        trajectory = []
        for first, second in zip(*[iter(of_rank(batches, session.rank))] * 2, strict=True):
            with pserver.autograd.context() as context_id:
                pserver.autograd.backward(context_id, [loss_of(module, first)])
                disturb(route.method, 2)
                optimizer.push(context_id)
                pserver.autograd.backward(context_id, [loss_of(module, second)])
                disturb(route.method, 3)
                optimizer.step(context_id)
            with pserver.autograd.context() as context_id:
                pserver.autograd.backward(context_id, [loss_of(module, second)])
                optimizer.push(context_id)
            trajectory.append(values(module))
        if session.rank == 0:
            spare = torch.nn.Linear(2, 2)
            pserver.optim.RemoteOptimizer(torch.optim.SGD, spare, lr=1.0, name=f"{name}-spare", cluster=session)
            session.drop_model(f"{name}-spare")
        return trajectory

    if method != route.method:
        disturb(str(method), 2)
    with route.taken():
        return cluster.train(2, train, transport=route.transport, plan_of_rank_0=plan), plan.struck


@pytest.fixture(scope="module")
def undisturbed(cluster: GrpcCluster) -> list[list[list[torch.Tensor]]]:
    """Parameters of a run in which nothing was lost, whichever route steps take."""
    runs, others = [run(cluster, f"undisturbed by {each}", route) for each, route in NETWORK_ROUTES.items()], []
    for found, struck in runs:
        assert struck == 0
        others += found
    for other in others:
        assert_same_bits(other, others[0])
    return others[:2]


#: Every RPC that a trainer makes; those that step on every route that there is.
DISTURBED = [
    *(pytest.param(each, MEMORY, id=each) for each in MUTATING if each not in STEPPING),
    *(pytest.param(each, MEMORY, id=each) for each in ("FindMemory", "OpenMemory")),
    *(pytest.param(route.method, route, id=f"{route.method} by {each}") for each, route in NETWORK_ROUTES.items()),
]


def test_every_mutation_is_disturbed_below() -> None:
    assert {*MUTATING} <= {method for each in DISTURBED for method in each.values if isinstance(method, str)}


@pytest.mark.parametrize("kind", FaultKind, ids=lambda kind: kind.value)
@pytest.mark.parametrize(("method", "route"), DISTURBED)
def test_a_disturbed_run_ends_with_the_bits_of_an_undisturbed_one(
    method: str,
    route: Route,
    kind: FaultKind,
    undisturbed: list[list[list[torch.Tensor]]],
    cluster: GrpcCluster,
    name: str,
) -> None:
    runs, struck = run(cluster, name, route, method, kind)

    assert struck >= 2
    for found, expected in zip(runs, undisturbed, strict=True):
        assert_same_bits(found, expected)
    until(lambda: not cluster.status().trainers, "everybody has left")
    model = cluster.model_status(name)
    assert model.state == "ready"
    assert model.round == ROUNDS
    until_shards(cluster.status, name, round_number=ROUNDS, version=ROUNDS)
    assert f"{name}-spare" not in {each.name for each in cluster.status().models}
    assert cluster.num_contexts(name) == [0, 0]
    assert cluster.num_contexts(f"{name}-spare") == [-1, -1]


@pytest.mark.parametrize("kind", FaultKind, ids=lambda kind: kind.value)
@pytest.mark.parametrize(
    ("method", "route"),
    [
        *(pytest.param(each, MEMORY, id=each) for each in ("RegisterModel", "Initialise")),
        *(pytest.param(route.method, route, id=f"{route.method} by {each}") for each, route in NETWORK_ROUTES.items()),
        *(
            pytest.param(each, MEMORY, id=each, marks=pytest.mark.slow)
            for each in ("Attach", "Pull", "PullState", "OpenMemory")
        ),
    ],
)
def test_a_checkpoint_loaded_and_clipped_steps_survive_losses_with_the_same_bits(
    method: str, route: Route, kind: FaultKind, cluster: GrpcCluster, name: str
) -> None:
    """What a change of the model and a round of two phases add: state that travels, and preparing before deciding."""
    batches = make_batches([4, 4], steps=4)
    plan = FaultPlan()

    def train(session: Cluster, model: str) -> list[torch.Tensor]:
        module = make_module()
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.Adam, module, lr=0.1, name=model, cluster=session, bucket_bytes=BUCKET_BYTES, max_norm=0.1
        )
        for number, batch in enumerate(of_rank(batches, session.rank)):
            if number == 2:
                state = optimizer.state_dict()
                state["param_groups"][0]["lr"] = 0.02
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
        return values(module)

    undisturbed = cluster.train(2, lambda session: train(session, f"{name}-undisturbed"))
    plan.faults.append(Fault(kind=kind, method=method, times=3))
    with route.taken():
        disturbed = cluster.train(
            2, lambda session: train(session, name), transport=route.transport, plan_of_rank_0=plan
        )

    assert plan.struck == 3
    assert_same_bits(disturbed, undisturbed)
    until(lambda: not cluster.status().trainers, "everybody has left")
    until_shards(cluster.status, name, round_number=4, version=4)
    assert cluster.num_contexts(name) == [0, 0]


@contextmanager
def timed_out_step(
    cluster: GrpcCluster, name: str, route: Route
) -> Iterator[tuple[list[torch.nn.Parameter], Any, Any]]:
    """Weights and optimizers of two trainers; the first one's step timed out, and is in round 1 with the second's."""
    weights = [torch.nn.Parameter(torch.zeros(10)) for _ in range(2)]
    sessions = [cluster.connect(rank, 2, transport=route.transport) for rank in range(2)]
    with sessions[0], sessions[1]:
        impatient, patient = (
            pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session)
            for weight, session in zip(weights, sessions, strict=True)
        )
        set_timeout(sessions[0], 1.0)
        weights[0].grad = torch.full((10,), 2.0)
        with pytest.raises(TimeoutError):
            impatient.step()
        weights[1].grad = torch.full((10,), 4.0)
        patient.step()
        yield weights, impatient, patient


def test_a_step_that_timed_out_is_settled_and_counted_once(cluster: GrpcCluster, name: str, route: Route) -> None:
    """The reply comes too late, the gradient is in the round all the same.

    The next gradient was computed on the parameters of before, and is refused; the one after that counts.
    """
    with timed_out_step(cluster, name, route) as (weights, impatient, patient):
        assert weights[1][0] == -3.0
        assert weights[0][0] == 0.0

        weights[0].grad = torch.full((10,), 100.0)
        impatient.step()
        assert not impatient.last_result.accepted
        assert "computed on the parameters of round 0" in impatient.last_result.reason
        assert weights[0][0] == -3.0
        with pytest.raises(TimeoutError):
            impatient.step()
        weights[1].grad = torch.full((10,), 0.0)
        patient.step()
        assert weights[1][0] == -53.0
        assert cluster.model_status(name).round == 2


def test_a_step_that_timed_out_and_is_called_again_is_counted_once(
    cluster: GrpcCluster, name: str, route: Route
) -> None:
    with timed_out_step(cluster, name, route) as (weights, impatient, _):
        impatient.step()
        assert impatient.last_result.accepted
        assert [weight[0].item() for weight in weights] == [-3.0, -3.0]
        assert impatient.statistics().num_accepted == 1
        assert cluster.model_status(name).round == 1


# Message by message


def test_a_push_sent_three_times_is_added_once(cluster: GrpcCluster, name: str, route: Route) -> None:
    trainer = WireTrainer(cluster)
    model = trainer.model(name)
    for server in (0, 1):
        push = model.step_request(server, 3.0, context_id=1001)
        for _ in range(3):
            assert model.push(push, route, server=server) == []
    assert cluster.num_contexts(name) == [1, 1]
    model.step(1, 4.0)
    assert [model.values(0), model.values(1)] == [everywhere(-7.0)] * 2
    trainer.leave()


def test_a_commit_sent_again_after_its_round_gets_the_same_outcome(
    cluster: GrpcCluster, name: str, route: Route
) -> None:
    trainer = WireTrainer(cluster)
    model = trainer.model(name)
    model.step(1, 1.0)
    request = model.step_request(0, 1.0, commit=model.commit(2), wait_s=0.0)
    with pytest.raises(TimeoutError):
        model.push(request, route)
    model_on_1 = model.step_request(1, 1.0, commit=model.commit(2))
    (first, *_) = model.push(model_on_1, route, server=1)
    for server, repeat in ((0, request), (1, model_on_1), (0, request)):
        (reply, *_) = model.push(repeat, route, server=server)
        assert reply.outcome == first.outcome
    assert first.outcome.round == 2
    assert [model.values(0), model.values(1)] == [everywhere(-2.0)] * 2
    trainer.leave()


def test_a_repeat_below_what_was_acknowledged_is_refused_and_changes_nothing(
    cluster: GrpcCluster, name: str, route: Route
) -> None:
    trainer = WireTrainer(cluster)
    model = trainer.model(name)
    late_push = model.step_request(0, 50.0, context_id=5)
    late_drop = model.drop_context_request(6)
    late_attach = coordinator_pb2.AttachRequest(push_id=trainer.push_id(), model=name)
    late_registration = coordinator_pb2.RegisterModelRequest(
        push_id=trainer.push_id(), spec=spec_to_proto(spec(f"{name}-late")), wait_s=0.1
    )
    late_drop_model = coordinator_pb2.DropModelRequest(push_id=trainer.push_id(), model=name)

    newer = trainer.push_id()
    newer.lowest_unacknowledged = newer.sequence
    model.push(model.step_request(0, 1.0, context_id=7, push_id=newer), route)
    trainer.coordinator("Attach", coordinator_pb2.AttachRequest(push_id=newer, model=name, epoch=model.epoch))

    with pytest.raises(StalePush, match=str(trainer.trainer_id)):
        model.push(late_push, route)
    with pytest.raises(StalePush, match=str(trainer.trainer_id)):
        model.call("DropContext", late_drop)
    for method, request in (
        ("Attach", late_attach),
        ("RegisterModel", late_registration),
        ("DropModel", late_drop_model),
    ):
        with pytest.raises(StalePush, match=str(trainer.trainer_id)):
            trainer.coordinator(method, request)
    assert cluster.num_contexts(name) == [1, 0]
    assert model.values(0) == everywhere(0.0)
    assert f"{name}-late" not in {each.name for each in cluster.status().models}
    trainer.leave()


def test_a_repeated_drop_does_not_drop_a_model_registered_since(cluster: GrpcCluster, name: str) -> None:
    first, second = WireTrainer(cluster), WireTrainer(cluster)
    first.model(name)
    drop = coordinator_pb2.DropModelRequest(push_id=first.push_id(), model=name)
    first.coordinator("DropModel", drop)
    again = second.model(name)
    first.coordinator("DropModel", drop)
    again.step(1, 1.0)
    assert again.values(0) == everywhere(-1.0)
    first.leave()
    second.leave()


def test_joining_again_with_the_same_nonce_is_the_same_trainer_until_it_has_left(cluster: GrpcCluster) -> None:
    trainer = WireTrainer(cluster)
    again = trainer.join()
    assert again.trainer_id == trainer.trainer_id
    trainer.leave()
    trainer.leave()
    with pytest.raises(TrainerEnded, match=str(trainer.trainer_id)):
        trainer.join()
    other = WireTrainer(cluster)
    assert other.trainer_id > trainer.trainer_id
    other.leave()
