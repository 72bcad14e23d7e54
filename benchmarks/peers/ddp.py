"""torch's DistributedDataParallel on gloo: every trainer holds and steps the whole model, gradients are all-reduced."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Side, timed
from benchmarks.models import LEARNING_RATE, MODELS, MOMENTUM, TrainingStep
from benchmarks.network import LOOPBACK
from benchmarks.parameters import LEARNING_RATE as READY_LEARNING_RATE
from benchmarks.parameters import make_parameters
from benchmarks.team import take_turns, team

#: How DDP is made; which is faster depends on the model.
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "DDP on gloo": {},
    "DDP on gloo, gradients as bucket views": {"gradient_as_bucket_view": True},
    "DDP on gloo, gradients as bucket views, static graph": {"gradient_as_bucket_view": True, "static_graph": True},
}

_TIMEOUT = timedelta(seconds=60)


@contextmanager
def ddp_communication(*, num_tensors: int, num_bytes: int, num_trainers: int) -> Iterator[Mapping[str, Side]]:
    """Trainers whose gradients lie ready, for as long as the block lasts; one side for each configuration.

    A side takes one step and returns what it costs beyond its computation: the seconds of backward and optimizer step
    under DDP, less those of the same backward without it.
    """
    with _trainers(_train_with_ready_gradients, num_trainers, num_tensors, num_bytes) as sides:
        yield sides


@contextmanager
def ddp_training(model: str, *, num_trainers: int, repeats: int) -> Iterator[Mapping[str, Side]]:
    """Trainers of one of `MODELS` for as long as the block lasts; one side for each configuration.

    A side takes `repeats` whole training steps in a row and returns the mean seconds of one.
    """
    with _trainers(_train_model, num_trainers, model, repeats) as sides:
        yield sides


class ReadyGradients(nn.Module):
    """Parameters as `make_parameters` makes them; their gradients lie ready, and backward hands them out."""

    def __init__(self, num_tensors: int, num_bytes: int) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(make_parameters(num_tensors, num_bytes))
        self._gradients: list[Tensor] = []
        for parameter in self.parameters_:
            assert parameter.grad is not None
            self._gradients.append(parameter.grad)
            parameter.grad = None

    def forward(self) -> Tensor:
        return _HandOut.apply(self._gradients, *self.parameters_)


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *_parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_outputs: Tensor) -> Any:
        return None, *ctx.gradients


@contextmanager
def _trainers(target: Any, num_trainers: int, *arguments: object) -> Iterator[Mapping[str, Side]]:
    with tempfile.TemporaryDirectory() as directory:
        with team(num_trainers, target, Path(directory, "store"), num_trainers, *arguments) as sides:
            yield {name: sides(name) for name in CONFIGURATIONS}


@contextmanager
def _process_group(store: Path, rank: int, num_trainers: int) -> Iterator[None]:
    # Without this it listens on whatever address the host name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK.trainers.interface
    init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=num_trainers, timeout=_TIMEOUT)
    yield
    destroy_process_group()


def _train_with_ready_gradients(
    connection: Connection, rank: int, store: Path, num_trainers: int, num_tensors: int, num_bytes: int
) -> None:
    with _process_group(store, rank, num_trainers):
        plain = ReadyGradients(num_tensors, num_bytes)
        sides = {}
        for name, options in CONFIGURATIONS.items():
            replica = DistributedDataParallel(ReadyGradients(num_tensors, num_bytes), **options)
            sides[name] = _beyond_computation(plain, replica)
        take_turns(connection, sides)


def _beyond_computation(plain: nn.Module, replica: nn.Module) -> Side:
    optimizer = torch.optim.SGD(replica.parameters(), lr=READY_LEARNING_RATE, fused=True)

    def step() -> None:
        replica().backward()
        optimizer.step()

    def side() -> float:
        plain.zero_grad()
        optimizer.zero_grad()
        computation_s = timed(lambda: plain().backward())()
        barrier()  # what the others' computation took longer is no communication
        return timed(step)() - computation_s

    return side


def _train_model(connection: Connection, rank: int, store: Path, num_trainers: int, model: str, repeats: int) -> None:
    with _process_group(store, rank, num_trainers):
        sides = {}
        for name, options in CONFIGURATIONS.items():
            module, inputs, targets = MODELS[model](rank)
            replica = DistributedDataParallel(module, **options)
            optimizer = torch.optim.SGD(replica.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
            sides[name] = timed(TrainingStep(replica, optimizer, inputs, targets), repeats=repeats)
        take_turns(connection, sides)
