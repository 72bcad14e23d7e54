"""Steps by shared memory, in one message, or as a stream: the same bits, and never a torn bucket."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    RECIPES,
    assert_same_bits,
    fill_,
    in_parallel,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    remote_optimizer,
    step_on,
    values,
)
from tests.routes import ROUTES

Trajectory = list[list[torch.Tensor]]
Program = Callable[[Cluster, str], Trajectory]

STEPS = 4


def with_buffers() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(13, 37), torch.nn.BatchNorm1d(37), torch.nn.Linear(37, 1))
    fill_(module, 0)
    return module


def half_frozen() -> torch.nn.Module:
    module = make_module()
    module[0].requires_grad_(False)  # type: ignore[index]
    return module


def plain_steps(
    make: Callable[[], torch.nn.Module], recipe: str, *, dtype: torch.dtype = torch.float32, **more: Any
) -> Program:
    """A program that makes a step of every batch."""

    def program(session: Cluster, name: str) -> Trajectory:
        module = make()
        optimizer = remote_optimizer(session, module, RECIPES[recipe], name, **more)
        trajectory = []
        for batch in of_rank(make_batches([8, 6], steps=STEPS, dtype=dtype), session.rank):
            step_on(module, optimizer, batch, samples=len(batch[0]))
            trajectory.append(values(module))
        return trajectory

    return program


def accumulating(session: Cluster, name: str) -> Trajectory:
    """Two pushes into a context before each commit, whose buckets are added up on the servers."""
    module = make_module()
    model = pserver.distribute(module, name=name, cluster=session, bucket_bytes=1024)
    optimizer = pserver.optim.DistributedOptimizer(torch.optim.AdamW, model.parameter_refs(), lr=0.01)
    trajectory = []
    for batch in of_rank(make_batches([8, 6], steps=STEPS), session.rank):
        with pserver.autograd.context() as context_id:
            for part in zip(*(each.split(3) for each in batch), strict=True):
                pserver.autograd.backward(context_id, [loss_of(module, part)])
                optimizer.push(context_id)
            optimizer.step(context_id)
        trajectory.append(values(module))
    return trajectory


PROGRAMS: dict[str, Program] = {
    "float32": plain_steps(make_module, "adamw"),
    "bfloat16": plain_steps(lambda: make_module(dtype=torch.bfloat16), "adamw", dtype=torch.bfloat16),
    "float16": plain_steps(lambda: make_module(dtype=torch.float16), "sgd-momentum", dtype=torch.float16),
    "groups": plain_steps(make_module, "sgd-groups"),
    "buffers of the lowest rank": plain_steps(with_buffers, "sgd-momentum"),
    "buffers averaged": plain_steps(with_buffers, "sgd-momentum", buffers="mean"),
    "clipped by norm": plain_steps(make_module, "adam", max_norm=0.1),
    "clipped by value": plain_steps(with_buffers, "sgd", clip_value=0.01, nonfinite="skip"),
    "a frozen layer": plain_steps(half_frozen, "adamw"),
    "accumulated on servers": accumulating,
}


def run(cluster: LocalCluster, program: Program, name: str, transports: list[str]) -> list[Trajectory]:
    """A trainer for each transport."""

    def one(rank: int) -> Trajectory:
        with cluster.connect(rank, len(transports), transport=transports[rank]) as session:
            return program(session, name)

    return in_parallel(*(partial(one, rank) for rank in range(len(transports))))


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_run_ends_with_the_same_bits_whatever_route_its_steps_take(
    program: Program, cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    """Also if the trainers of a round take different ones."""
    cluster = cluster_of(2)
    runs = []
    for number, route in enumerate(ROUTES.values()):
        with route.taken():
            runs += run(cluster, program, f"{name}-{number}", [route.transport] * 2)
    runs += run(cluster, program, f"{name}-mixed", ["shm", "grpc"])
    for found in runs:
        assert_same_bits(found, runs[0])
    assert not all(torch.equal(before, after) for before, after in zip(runs[0][0], runs[0][-1], strict=True))


def test_sessions_take_the_route_they_are_told_to(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster, name: str) -> Trajectory:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        assert optimizer._model is not None
        shards = optimizer._model._shards._clients
        wanted = session.settings.transport
        assert [each.readable is not None for each in shards] == [wanted != "grpc"] * len(shards)
        return []

    for number, transport in enumerate(("auto", "shm", "grpc")):
        run(cluster, program, f"{name}-{number}", [transport])


# Torn buckets

#: Of float32; large enough that steps leave the event loop, and that a copy takes longer than a switch of threads.
NUM_ELEMENTS = 1 << 20
BUCKET_BYTES = 1 << 20


@pytest.mark.parametrize("sync", [pserver.Async(), pserver.Ssp(max_lag=4)], ids=lambda sync: sync.name)
@pytest.mark.parametrize("transports", [["shm"] * 2, ["shm", "grpc"]], ids=["both by memory", "one by memory"])
def test_two_who_write_at_any_time_never_read_a_torn_bucket(
    transports: list[str], sync: Any, cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    """Every gradient is the same in every element, so every bucket must be at any time."""

    def program(session: Cluster, name: str) -> Trajectory:
        weight = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=0.5, name=name, sync=sync, cluster=session, bucket_bytes=BUCKET_BYTES
        )
        for number in range(25):
            weight.grad = torch.full((NUM_ELEMENTS,), float(1 + number + session.rank))
            optimizer.step()
            for bucket in weight.detach().view(-1, BUCKET_BYTES // 4):
                assert bucket.min() == bucket.max(), "a torn bucket"
        return [[weight.detach().clone()]]

    runs = run(cluster_of(2), program, name, transports)
    total = -0.5 * sum(1 + number + rank for number in range(25) for rank in range(2))
    assert min(found[-1][0].min() for found in runs) == total, "whoever stepped last has everything"
