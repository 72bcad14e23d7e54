"""How a model comes to be: who initialises it, and what happens while news of it are under way."""

import asyncio
from collections.abc import Iterator

import pytest
import torch

import pserver
from pserver.core.messages import Report, ShardInitialised
from pserver.errors import DeadlineExceeded
from tests.service.grpc_cluster import GrpcCluster
from tests.service.wire_trainer import WireModel, WireTrainer, everywhere, spec

#: Long against the time between a trainer's initial values and its next registration.
LATE_S = 0.05


@pytest.fixture
def late_news(cluster: GrpcCluster) -> Iterator[None]:
    """The coordinator hears late that the second server has its initial values."""
    host = cluster.nodes[1].shards
    send = host._send

    def late(report: Report) -> None:
        if isinstance(report, ShardInitialised):
            asyncio.get_running_loop().call_later(LATE_S, send, report)
        else:
            send(report)

    host.send_reports_to(late)
    yield
    host.send_reports_to(send)


@pytest.mark.usefixtures("late_news")
def test_a_trainer_that_registers_again_before_the_coordinator_heard_of_its_values_trains(
    cluster: GrpcCluster, name: str
) -> None:
    with cluster.connect() as session:
        for number in range(6):
            weight = torch.nn.Parameter(torch.full((64,), 2.0))
            optimizer = pserver.optim.RemoteOptimizer(
                torch.optim.SGD, [weight], lr=1.0, name=f"{name}-{number}", cluster=session, bucket_bytes=128
            )
            weight.grad = torch.ones(64)
            optimizer.step()
            assert weight.tolist() == [1.0] * 64


def test_a_model_waits_for_servers_and_says_so(name: str) -> None:
    with GrpcCluster(1, min_servers=2) as own, own.connect(timeout_s=0.5) as session:
        weight = torch.nn.Parameter(torch.zeros(4))
        with pytest.raises(DeadlineExceeded, match="1 have joined; expected 2 or more"):
            pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session)


def test_if_the_initialiser_leaves_half_way_the_next_trainer_starts_over(cluster: GrpcCluster, name: str) -> None:
    first, second = WireTrainer(cluster), WireTrainer(cluster)
    reply = first.register(spec(name))
    assert reply.initialise
    half = WireModel(first, name, reply)
    half.call("Initialise", *half.initialise_requests(0, 7.0))
    with pytest.raises(DeadlineExceeded, match=f"initial values from trainer {first.trainer_id}"):
        second.register(spec(name), wait_s=0.2)

    first.leave()

    model = second.model(name, value=3.0)
    assert [model.values(0), model.values(1)] == [everywhere(3.0)] * 2
    model.step(1, 1.0)
    assert [model.values(0), model.values(1)] == [everywhere(2.0)] * 2
    second.leave()


def test_a_dropped_model_can_be_registered_anew_with_another_description(cluster: GrpcCluster, name: str) -> None:
    with cluster.connect() as session:
        for size in (8, 1000):
            weight = torch.nn.Parameter(torch.ones(size))
            optimizer = pserver.optim.RemoteOptimizer(torch.optim.Adam, [weight], name=name, cluster=session)
            weight.grad = torch.ones(size)
            optimizer.step()
            assert optimizer.last_result is not None
            assert optimizer.last_result.round == 1
            session.drop_model(name)
        session.drop_model(name)


def test_a_description_larger_than_grpcs_default_limit_on_messages_registers(cluster: GrpcCluster, name: str) -> None:
    """gRPC refuses messages above 4 MiB unless it is told otherwise; others hand that limit on to their users."""
    named = [(f"{index:0>1000}", torch.nn.Parameter(torch.zeros(1))) for index in range(5000)]
    with cluster.connect(0, 1) as session:
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, named, lr=1.0, name=name, cluster=session)
        for _, parameter in named:
            parameter.grad = torch.ones(1)
        optimizer.step()
    assert all(parameter.item() == -1.0 for _, parameter in named)
