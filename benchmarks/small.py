"""A synchronous step of a small model: two trainers, two servers, against one bare grpcio call."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection

import torch

import pserver
from benchmarks.children import Child, child, messages
from benchmarks.cluster import running_cluster
from benchmarks.harness import Benchmark, Case, timed
from benchmarks.parameters import LEARNING_RATE, make_parameters
from benchmarks.peers.grpc_call import grpc_call
from pserver.optim import RemoteOptimizer

_NUM_BYTES = 10_000
_NUM_TENSORS = 4
_NUM_SERVERS = 2
_NUM_TRAINERS = 2

#: Steps, or calls, in one turn: many, so that both trainers run freely, as in training.
_PER_TURN = 20


def _make_optimizer() -> RemoteOptimizer:
    named = [(f"p{i}", parameter) for i, parameter in enumerate(make_parameters(_NUM_TENSORS, _NUM_BYTES))]
    return RemoteOptimizer(torch.optim.SGD, named, lr=LEARNING_RATE, name="bench")


def _train_along(connection: Connection, address: str) -> None:
    with pserver.connect(address, rank=1, world_size=_NUM_TRAINERS):
        optimizer = _make_optimizer()
        connection.send("ready")
        for num_steps in messages(connection):
            for _ in range(num_steps):
                optimizer.step()
            connection.send("done")


def _step_both(optimizer: RemoteOptimizer, other: Child) -> float:
    """Both trainers take `_PER_TURN` steps; returns the mean seconds of one of this trainer's.

    The other one works only during our turn: it takes nothing from the peer's, and is not ahead of us in ours.
    """
    other.send(_PER_TURN)
    started = time.perf_counter()
    for _ in range(_PER_TURN):
        optimizer.step()
    elapsed_s = time.perf_counter() - started
    other.receive()
    return elapsed_s / _PER_TURN


@contextmanager
def _step() -> Iterator[Case]:
    with (
        running_cluster(_NUM_SERVERS) as address,
        grpc_call() as call,
        child(_train_along, address) as other,
        pserver.connect(address, rank=0, world_size=_NUM_TRAINERS),
    ):
        optimizer = _make_optimizer()
        other.receive()
        yield Case(
            name=f"step-{_NUM_SERVERS}x{_NUM_TRAINERS}",
            ours=lambda: _step_both(optimizer, other),
            peers={"one grpcio call": timed(call, repeats=_PER_TURN)},
        )


def _cases(_quick: bool) -> Iterator[AbstractContextManager[Case]]:
    yield _step()


BENCHMARK = Benchmark(
    name="small",
    summary="synchronous step of 10 kB on 2 shards with 2 trainers, against one grpcio call",
    rounds=30,
    quick_rounds=5,
    cases=_cases,
)
