"""Synchronous steps of two trainers against DistributedDataParallel on gloo."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from benchmarks.cluster import running_cluster
from benchmarks.harness import Benchmark, Case
from benchmarks.models import LEARNING_RATE, MODELS, MOMENTUM, TrainingStep
from benchmarks.peers.ddp import ddp_communication, ddp_training
from benchmarks.trainers import our_sides, our_trainers, ready_gradients
from pserver.client.cluster import current_cluster
from pserver.optim import RemoteOptimizer

_NUM_SERVERS = 2
_NUM_TRAINERS = 2
_NUM_TENSORS = 50
_NUM_BYTES = 100_000_000
_QUICK_NUM_BYTES = 4_000_000

#: Training steps in one turn: many, so that both trainers run freely.
_PER_TURN = 10


@contextmanager
def _communication(num_bytes: int) -> Iterator[Case]:
    with (
        running_cluster(_NUM_SERVERS) as cluster,
        ddp_communication(num_tensors=_NUM_TENSORS, num_bytes=num_bytes, num_trainers=_NUM_TRAINERS) as peers,
        our_trainers(cluster.address, ready_gradients(_NUM_TENSORS, num_bytes), count=_NUM_TRAINERS) as ours,
    ):
        yield Case(ours=ours, peers=peers)


@contextmanager
def _training(model: str, *, overlap: bool = False) -> Iterator[Case]:
    prepare = partial(_prepare_training, model, overlap)
    with (
        running_cluster(_NUM_SERVERS) as cluster,
        ddp_training(model, num_trainers=_NUM_TRAINERS, repeats=_PER_TURN) as peers,
        our_sides(cluster.address, prepare, count=_NUM_TRAINERS, repeats=_PER_TURN) as sides,
    ):
        yield Case(ours=sides("ours"), peers=peers, hidden=sides("hidden") if overlap else None)


def _prepare_training(name: str, overlap: bool) -> TrainingStep:
    model, inputs, targets = MODELS[name](current_cluster().rank)
    options = {"name": name, "early_push": overlap, "late_pull": overlap}
    optimizer = RemoteOptimizer(torch.optim.SGD, model, lr=LEARNING_RATE, momentum=MOMENTUM, **options)
    return TrainingStep(model, optimizer, inputs, targets)


def _cases(quick: bool) -> Mapping[str, AbstractContextManager[Case]]:
    num_bytes = _QUICK_NUM_BYTES if quick else _NUM_BYTES
    plain = {name: _training(name) for name in MODELS}
    overlapping = {f"{name}-overlap": _training(name, overlap=True) for name in MODELS}
    return {"step-comm": _communication(num_bytes)} | plain | overlapping


BENCHMARK = Benchmark(
    name="ddp",
    summary="synchronous steps of 2 trainers, communication alone and whole, against DDP on gloo",
    rounds=15,
    quick_rounds=3,
    cases=_cases,
)
