"""What the tests here train, and the ways to train it: on a cluster, and with torch alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.testing.local_cluster import LocalCluster
from pserver.types import ModelStatus
from pserver.wire.tensors import to_bytes

T = TypeVar("T")

#: Inputs and targets.
Batch = tuple[torch.Tensor, torch.Tensor]
#: Losses by step, and values of all parameters by step.
Run = tuple[list[torch.Tensor], list[list[torch.Tensor]]]

#: Small enough that a model of these tests has several buckets, which cut tensors at odd places.
BUCKET_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An optimizer and its options; parameter i is in group i modulo the number of groups."""

    optimizer: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...] = ({},)

    def dealt(self, parameters: Iterable[Any]) -> list[dict[str, Any]]:
        """Parameters (or references) as group dicts."""
        every = list(parameters)
        step = len(self.groups)
        return [{"params": every[number::step], **options} for number, options in enumerate(self.groups)]

    def make(self, module: torch.nn.Module, implementation: Mapping[str, bool]) -> torch.optim.Optimizer:
        """Torch's own optimizer, in this process."""
        return self.optimizer(self.dealt(trainable(module)), **self.options, **implementation)


SGD = torch.optim.SGD
Adam = torch.optim.Adam
AdamW = torch.optim.AdamW

RECIPES = {
    "sgd": Recipe(optimizer=SGD, options={"lr": 0.1}),
    "sgd-momentum": Recipe(optimizer=SGD, options={"lr": 0.1, "momentum": 0.9}),
    "sgd-nesterov": Recipe(optimizer=SGD, options={"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "sgd-weight-decay": Recipe(optimizer=SGD, options={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}),
    "sgd-dampening": Recipe(optimizer=SGD, options={"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "sgd-maximize": Recipe(optimizer=SGD, options={"lr": 0.01, "momentum": 0.5, "maximize": True}),
    "adam": Recipe(optimizer=Adam, options={"lr": 0.01}),
    "adam-weight-decay": Recipe(optimizer=Adam, options={"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "adamw": Recipe(optimizer=AdamW, options={"lr": 0.01, "weight_decay": 0.1}),
    "adamw-amsgrad": Recipe(optimizer=AdamW, options={"lr": 0.01, "amsgrad": True, "eps": 1e-6}),
    "sgd-groups": Recipe(
        optimizer=SGD,
        options={"lr": 0.1},
        groups=({"momentum": 0.9}, {"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.0}),
    ),
    "adamw-groups": Recipe(
        optimizer=AdamW, options={"lr": 0.01}, groups=({"betas": (0.5, 0.9)}, {"lr": 0.1, "weight_decay": 0.0})
    ),
}

#: Implementation asked for on the cluster, and the one that torch must be told to use for the same bits.
IMPLEMENTATIONS: dict[str, tuple[Mapping[str, bool], Mapping[str, bool]]] = {
    "default": ({}, {"fused": True}),
    "single": ({"foreach": False}, {"foreach": False}),
    "foreach": ({"foreach": True}, {"foreach": True}),
}


def trainable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that require a gradient."""
    return [each for each in module.parameters() if each.requires_grad]


def fill_(module: torch.nn.Module, seed: int) -> None:
    """Overwrites all parameters; the global generator is left alone, since trainers are threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn.mul_(0.3))


def make_module(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A network whose tensors have odd sizes: they end inside buckets and inside vectors."""
    module = torch.nn.Sequential(
        torch.nn.Linear(13, 37), torch.nn.Tanh(), torch.nn.Linear(37, 11), torch.nn.Tanh(), torch.nn.Linear(11, 1)
    ).to(dtype)
    fill_(module, seed)
    return module


def make_batches(rows: Sequence[int], *, steps: int = 3, dtype: torch.dtype = torch.float32) -> list[list[Batch]]:
    """For each step one batch for each trainer, of that many rows."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [[(drawn(count, 13), drawn(count, 1)) for count in rows] for _ in range(steps)]


def of_rank(batches: Sequence[Sequence[Batch]], rank: int) -> list[Batch]:
    """One trainer's batches."""
    return [step[rank] for step in batches]


def joined(batches: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Batches of one process that sees what all trainers see."""
    return [
        (torch.cat([inputs for inputs, _ in step]), torch.cat([targets for _, targets in step])) for step in batches
    ]


def loss_of(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared error."""
    inputs, targets = batch
    return (module(inputs) - targets).square().mean()


def values(module: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters and buffers."""
    return [each.detach().clone() for each in (*module.parameters(), *module.buffers())]


# Ways to train


def train_locally(
    module: torch.nn.Module, recipe: Recipe, batches: Sequence[Batch], implementation: Mapping[str, bool]
) -> Run:
    """Torch in one process."""
    optimizer = recipe.make(module, implementation)
    losses, trajectory = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        trajectory.append(values(module))
    return losses, trajectory


def train_on_averages(
    module: torch.nn.Module,
    recipe: Recipe,
    batches: Sequence[Sequence[Batch]],
    implementation: Mapping[str, bool],
    weights: Sequence[int] | None = None,
) -> list[list[torch.Tensor]]:
    """Torch in one process with sum(weight * gradient of a rank's batch) / sum(weight), added up in order of rank."""
    optimizer = recipe.make(module, implementation)
    parameters = trainable(module)
    trajectory = []
    for step in batches:
        each = weights or [1] * len(step)
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        for rank, (weight, batch) in enumerate(zip(each, step, strict=True)):
            gradients = torch.autograd.grad(loss_of(module, batch), parameters)
            for total, gradient in zip(totals, gradients, strict=True):
                weighted = gradient if weight == 1 else gradient * weight
                total.copy_(weighted) if rank == 0 else total.add_(weighted)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total.div_(sum(each))
        optimizer.step()
        trajectory.append(values(module))
    return trajectory


def remote_optimizer(
    cluster: Cluster, module: torch.nn.Module, recipe: Recipe, name: str, **more: Any
) -> pserver.optim.RemoteOptimizer:
    """The drop-in optimizer of a recipe; `more` are further arguments, for instance of `RemoteOptimizer` itself."""
    return pserver.optim.RemoteOptimizer(
        recipe.optimizer,
        recipe.dealt(trainable(module)),
        **{"module": module, "name": name, "cluster": cluster, "bucket_bytes": BUCKET_BYTES, **recipe.options, **more},
    )


def train_with_remote_optimizer(
    cluster: Cluster,
    module: torch.nn.Module,
    recipe: Recipe,
    batches: Sequence[Batch],
    implementation: Mapping[str, bool],
    *,
    name: str,
    weighted: bool = False,
    **shared: Any,
) -> Run:
    """`loss.backward(); optimizer.step()` with the optimizer on servers; `shared` is what all trainers agree on."""
    optimizer = remote_optimizer(cluster, module, recipe, name, **implementation, **shared)
    losses, trajectory = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        optimizer.step(samples=len(batch[0]) if weighted else 1)
        losses.append(loss.detach())
        trajectory.append(values(module))
    return losses, trajectory


def train_with_contexts(
    cluster: Cluster,
    module: torch.nn.Module,
    recipe: Recipe,
    batches: Sequence[Batch],
    implementation: Mapping[str, bool],
    *,
    name: str,
    weighted: bool = False,
    **shared: Any,
) -> Run:
    """Distributed autograd contexts and `DistributedOptimizer`; `shared` is what all trainers agree on."""
    model = pserver.distribute(module, name=name, cluster=cluster, bucket_bytes=BUCKET_BYTES, **shared)
    optimizer = pserver.optim.DistributedOptimizer(
        recipe.optimizer, recipe.dealt(model.parameter_refs()), **recipe.options, **implementation
    )
    losses, trajectory = [], []
    for batch in batches:
        with pserver.autograd.context() as context_id:
            loss = loss_of(module, batch)
            pserver.autograd.backward(context_id, [loss])
            optimizer.step(context_id, samples=len(batch[0]) if weighted else 1)
        losses.append(loss.detach())
        trajectory.append(values(module))
    return losses, trajectory


WAYS: dict[str, Callable[..., Run]] = {
    "remote optimizer": train_with_remote_optimizer,
    "contexts": train_with_contexts,
}


def step_on(module: torch.nn.Module, optimizer: Any, batch: Batch, **step: Any) -> torch.Tensor:
    """One step of any optimizer with a batch's gradient; returns the loss."""
    optimizer.zero_grad()
    loss = loss_of(module, batch)
    loss.backward()
    optimizer.step(**step)
    return loss.detach()


# Several trainers in one test, step by step


def model_status(cluster: Cluster, name: str) -> ModelStatus:
    """What the coordinator says about one model."""
    return next(model for model in cluster.status().models if model.name == name)


def contexts_held(cluster: LocalCluster, name: str) -> list[int]:
    """How many contexts the shards of a model hold, by server."""
    return [node.shards._shards[name, number]._shard.num_contexts for number, node in enumerate(cluster.nodes)]


def in_parallel(*calls: Callable[[], T]) -> list[T]:
    """Results of calls that wait for each other, each made in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


# Comparing


def assert_same_bits(found: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[torch.Tensor]]) -> None:
    """Two trajectories agree in every bit of every tensor after every step."""
    assert len(found) == len(expected)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            if to_bytes(one) != to_bytes(other):
                raise AssertionError(f"step {step}, tensor {index}: off by {(one - other).abs().max().item():g}")


def assert_close(
    found: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[torch.Tensor]], tolerance: float
) -> None:
    """No element of two trajectories differs by more than `tolerance`, absolutely."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
