"""Hundreds of megabytes in messages: nobody's lease ends meanwhile, neither that of who pushes nor of who is idle."""

import time

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster as Session
from pserver.config import TrainerSettings
from tests.cluster.processes import START_S, Cluster, Server, Start, Trainer

MEGA = 10**6
#: Of trainers and of servers: a push takes a good part of it, or longer.
LEASE_S = 2.0
#: Steps are made until so many leases would have ended.
NUM_LEASES = 2
TIMEOUT_S = 120.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_bytes", [200 * MEGA, pytest.param(1000 * MEGA, marks=pytest.mark.slow)])
def test_a_large_push_costs_nobody_a_lease(start: Start, num_bytes: int) -> None:
    leases = ("--trainer-lease-s", str(LEASE_S), "--server-lease-s", str(LEASE_S))
    idle = start(Trainer, "idle")
    first = start(Server, "s0", "--coordinator", "--min-servers", "2", "--no-shared-memory", *leases)
    second = start(Server, "s1", "--join", first.address(), "--no-shared-memory", *leases)
    second.address()
    cluster = Cluster([first, second])
    idle.wait_for("^idle$", START_S)
    idle.join(cluster.address, rank=1, timeout_s=START_S)

    settings = TrainerSettings.resolve(cluster.address, rank=0, world_size=1, timeout_s=TIMEOUT_S, transport="grpc")
    with Session(settings) as session:
        weight = torch.nn.Parameter(torch.zeros(num_bytes // 4))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", weight)], lr=1.0, name="large", cluster=session
        )
        weight.grad = torch.ones(1).expand_as(weight)
        ids = {trainer.trainer_id for trainer in cluster.status().trainers}
        assert len(ids) == 2
        sent_bytes = session.traffic.sent_bytes
        begin_s, num_steps = time.monotonic(), 0
        while not num_steps or time.monotonic() < begin_s + NUM_LEASES * LEASE_S:
            optimizer.step()
            num_steps += 1
        assert session.traffic.sent_bytes - sent_bytes == num_steps * num_bytes
        assert session.statistics().num_retries == 0
        assert weight.eq(-num_steps).all()
        status = cluster.status()
        assert {trainer.trainer_id for trainer in status.trainers} == ids
        assert all(server.alive for server in status.servers)
        idle.ask("model", "of-the-idle", timeout_s=START_S)
        assert idle.ask("steps", 1)["round"] == 1
        idle.ask("leave")
    for server in cluster.servers:
        assert "lease" not in server.stderr
