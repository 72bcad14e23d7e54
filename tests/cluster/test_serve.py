"""`pserver serve`: how a server says that it is ready, what it answers, and how it ends."""

import signal
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.cluster.processes import PSERVER, START_S, Child, Cluster, Pool, Start

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(address: str, service: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5.0).status


def test_ready_is_the_only_line_on_stdout(cluster: Cluster) -> None:
    (line,) = cluster.coordinator.stdout
    assert line == f"pserver ready name=s0 address={cluster.address} coordinator={cluster.address}"
    (line,) = cluster.other.stdout
    assert line == f"pserver ready name=s1 address={cluster.other.address()} coordinator={cluster.address}"


def test_server_answers_health_and_reflection(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.address) as channel:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (reply,) = stub.ServerReflectionInfo(iter([ask]), timeout=5.0)
    services = {service.name for service in reply.list_services_response.service}
    assert services >= {"pserver.v1.Coordinator", "pserver.v1.Shards", "grpc.health.v1.Health"}
    for service in ("", "pserver.v1.Coordinator", "pserver.v1.Shards"):
        assert health(cluster.address, service) == SERVING


def test_server_listens_on_loopback_only(cluster: Cluster) -> None:
    host, port = cluster.address.split(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), timeout=5.0):
        pass
    # Another address of this machine: whoever listened on all of them would answer here too.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)), timeout=5.0)


def test_port_that_is_taken_is_named(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "127.0.0.1:{1}".format(*taken.getsockname())
        child = start(Child, "server", [*PSERVER, "serve", "--coordinator", "--port", address.split(":")[1]])
        assert child.wait(START_S) == 1
    assert child.stdout == []
    assert f"pserver: error: cannot listen on {address}" in child.stderr
    assert "Traceback" not in child.stderr


def test_sigterm_lets_a_round_under_way_complete(pool: Pool, cluster: Cluster) -> None:
    with pool.trainers(2) as trainers:
        for rank, trainer in enumerate(trainers):
            trainer.join(cluster.address, rank=rank, world_size=2)
            trainer.tell("model", "drained")
        for trainer in trainers:
            assert not trainer.reply().error
        first, second = trainers
        first.tell("steps", 1)
        cluster.wait_for_round("drained", 0, waiting_for=(1,))

        for server in cluster.servers:
            server.send(signal.SIGTERM)
        for server in cluster.servers:
            server.wait_for("draining", stream="stderr")
        assert health(cluster.address) == NOT_SERVING
        second.tell("steps", 1)

        for trainer in trainers:
            reply = trainer.reply()
            assert not reply.error
            assert reply.result["round"] == 1
        for server in cluster.servers:
            assert server.wait() == 0
            assert "were still under way" not in server.stderr
