"""Training over gRPC, and what every server answers to tools that know nothing of this package."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pserver.client.cluster import Cluster
from pserver.client.status import fetch_status
from pserver.errors import ProtocolMismatch, ServerUnavailable
from tests.numerics.training import (
    RECIPES,
    WAYS,
    assert_same_bits,
    make_batches,
    make_module,
    of_rank,
    train_locally,
    train_on_averages,
)
from tests.service.grpc_cluster import GrpcCluster
from tests.waiting import until, until_shards

CALLS = "pserver.v1.Calls"
SERVICES = ["pserver.v1.Coordinator", "pserver.v1.Shards", "pserver.v1.Replicas"]


@pytest.mark.parametrize("way", WAYS)
def test_one_trainer_on_two_servers_gets_the_bits_of_torch(way: str, cluster: GrpcCluster, name: str) -> None:
    batches = of_rank(make_batches([8]), 0)
    _, expected = train_locally(make_module(), RECIPES["adamw"], batches, {"fused": True})

    def program(session: Cluster) -> Any:
        return WAYS[way](session, make_module(), RECIPES["adamw"], batches, {}, name=name)[1]

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_three_trainers_on_two_servers_average_in_order_of_rank(cluster: GrpcCluster, name: str) -> None:
    batches = make_batches([8, 8, 8])
    expected = train_on_averages(make_module(), RECIPES["sgd-momentum"], batches, {"fused": True})

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return WAYS["contexts"](session, make_module(), RECIPES["sgd-momentum"], own, {}, name=name)[1]

    for found in cluster.train(3, program):
        assert_same_bits(found, expected)
    until(lambda: not cluster.status().trainers, "everybody has left")
    until_shards(cluster.status, name, round_number=3, version=3)


def test_the_health_service_says_serving(cluster: GrpcCluster) -> None:
    served = health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(cluster.addresses[0]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        found = [
            stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status for service in ["", *SERVICES]
        ]
        with pytest.raises(grpc.RpcError) as raised:
            stub.Check(health_pb2.HealthCheckRequest(service="pserver.v1.Nothing"), timeout=5)
    assert found == [served] * (1 + len(SERVICES))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(("server", "expected"), [(0, [CALLS, *SERVICES]), (1, [CALLS, *SERVICES[1:]])])
def test_reflection_lists_the_services_of_a_server(server: int, expected: list[str], cluster: GrpcCluster) -> None:
    with grpc.insecure_channel(cluster.addresses[server]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        found = set(database.get_services())
        file = database.FindFileContainingSymbol(SERVICES[1])
    assert {each for each in found if each.startswith("pserver")} == set(expected)
    assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= found
    assert [method.name for method in file.service[0].method] == [
        "Initialise",
        "Pull",
        "PullState",
        "Step",
        "StepOnce",
        "FindMemory",
        "OpenMemory",
        "DropContext",
    ]


def test_the_status_is_that_of_the_cluster_and_only_a_coordinator_has_it(cluster: GrpcCluster) -> None:
    status = fetch_status(cluster.addresses[0])
    assert [(server.name, server.address, server.alive) for server in status.servers] == [
        ("s0", cluster.addresses[0], True),
        ("s1", cluster.addresses[1], True),
    ]
    with pytest.raises(ProtocolMismatch, match=cluster.addresses[1]):
        fetch_status(cluster.addresses[1])
    with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
        fetch_status("127.0.0.1:1")
