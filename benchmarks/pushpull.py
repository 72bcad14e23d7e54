"""Push, SGD step and pull of a large model: one trainer, one server, against torch RPC on TCP."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

import pserver
from benchmarks.cluster import running_cluster
from benchmarks.harness import Benchmark, Case, timed
from benchmarks.parameters import LEARNING_RATE, make_parameters
from benchmarks.peers.torch_rpc import torch_rpc_peer
from pserver.optim import RemoteOptimizer

_NUM_BYTES = 100_000_000
_QUICK_NUM_BYTES = 4_000_000


@contextmanager
def _tcp(num_tensors: int, num_bytes: int) -> Iterator[Case]:
    named = [(f"p{i}", parameter) for i, parameter in enumerate(make_parameters(num_tensors, num_bytes))]
    with (
        running_cluster(1) as address,
        torch_rpc_peer(num_tensors=num_tensors, num_bytes=num_bytes) as peers,
        pserver.connect(address),
    ):
        optimizer = RemoteOptimizer(torch.optim.SGD, named, lr=LEARNING_RATE, name="bench")
        yield Case(name=f"tcp-{num_tensors}", ours=timed(optimizer.step), peers=peers)


def _cases(quick: bool) -> Iterator[AbstractContextManager[Case]]:
    num_bytes = _QUICK_NUM_BYTES if quick else _NUM_BYTES
    for num_tensors in (1, 50):
        yield _tcp(num_tensors, num_bytes)


BENCHMARK = Benchmark(
    name="pushpull",
    summary="push + SGD + pull of 100 MB fp32, as 1 and as 50 tensors, against torch RPC",
    rounds=15,
    quick_rounds=5,
    cases=_cases,
)
