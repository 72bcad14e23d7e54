"""Our trainers: processes that connect to a cluster, prepare a step and take it when told."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

import pserver
from benchmarks.harness import Side, timed
from benchmarks.models import TrainingStep
from benchmarks.network import LOOPBACK, Site
from benchmarks.parameters import LEARNING_RATE, make_parameters
from benchmarks.team import take_turns, team
from pserver.optim import RemoteOptimizer

#: Called inside `with pserver.connect()`, on every trainer; returns one step. Has to be picklable.
Prepare = Callable[[], Callable[[], object]]


@contextmanager
def our_trainers(
    address: str,
    prepare: Prepare,
    *,
    count: int = 1,
    transport: str = "auto",
    repeats: int = 1,
    site: Site = LOOPBACK.trainers,
) -> Iterator[Side]:
    """Runs `count` trainers of the cluster at `address` for as long as the block lasts.

    Yields a side: all take `repeats` steps in a row; the mean seconds of one, on the slowest trainer, count.
    """
    with our_sides(address, prepare, count=count, transport=transport, repeats=repeats, site=site) as sides:
        yield sides("ours")


@contextmanager
def our_sides(
    address: str,
    prepare: Prepare,
    *,
    count: int = 1,
    transport: str = "auto",
    repeats: int = 1,
    site: Site = LOOPBACK.trainers,
) -> Iterator[Callable[[str], Side]]:
    """The same, with two sides by name: "ours", and "hidden", the share of communication that was hidden until then."""
    with team(count, _train, address, count, transport, prepare, repeats, namespace=site.namespace) as sides:
        yield sides


def ready_gradients(
    num_tensors: int,
    num_bytes: int,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
    options: Mapping[str, Any] | None = None,
) -> Prepare:
    """A step with gradients that lie ready, on parameters as `make_parameters` makes them.

    `options` are further arguments of `RemoteOptimizer`.
    """
    return partial(_prepare_ready_gradients, num_tensors, num_bytes, optimizer_class, options or {})


def _prepare_ready_gradients(
    num_tensors: int, num_bytes: int, optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any]
) -> Callable[[], object]:
    named = [(f"p{i}", parameter) for i, parameter in enumerate(make_parameters(num_tensors, num_bytes))]
    return RemoteOptimizer(optimizer_class, named, lr=LEARNING_RATE, name="bench", **options).step


def _train(
    connection: Connection, rank: int, address: str, count: int, transport: str, prepare: Prepare, repeats: int
) -> None:
    with pserver.connect(address, rank=rank, world_size=count, transport=transport):
        step = prepare()
        sides = {"ours": timed(step, repeats=repeats)}
        if isinstance(step, TrainingStep):
            sides["hidden"] = step.hidden_share
        take_turns(connection, sides)
