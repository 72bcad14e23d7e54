"""Codecs that the tests here train with, one of their own among them, and what a codec makes of a gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pserver.client.cluster import Cluster
from pserver.compress import BFloat16, Codec, ErrorFeedback, Float16, GradBucket, Int8, NoCompression, PowerSGD, TopK
from pserver.core.coding import Coding
from pserver.testing.local_cluster import LocalCluster
from pserver.wire.compress import BucketShape
from pserver.wire.layout import STORED, Layout
from tests.numerics.training import (
    RECIPES,
    WAYS,
    Batch,
    Recipe,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    trainable,
    values,
)

LOSSY: tuple[Codec, ...] = (
    Float16(),
    BFloat16(),
    Int8(block=64),
    TopK(ratio=0.3),
    PowerSGD(rank=2, start_iteration=1),
)
FED_BACK: tuple[ErrorFeedback, ...] = tuple(map(ErrorFeedback, LOSSY))

STEPS = 4

Rounding = Callable[[torch.Tensor], torch.Tensor]


def to_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded, in the dtype that it had."""
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Not rounded."""
    return tensor


#: By what parameters may be rounded to on their way.
HALVES: dict[torch.dtype, Rounding] = {
    torch.float16: lambda tensor: tensor.to(torch.float16).to(tensor.dtype),
    torch.bfloat16: to_bfloat16,
}


def train_compressed(
    cluster: LocalCluster,
    name: str,
    *,
    way: str = "remote optimizer",
    recipe: str = "sgd-momentum",
    trainers: int = 2,
    dtype: torch.dtype = torch.float32,
    transport: str = "grpc",
    **shared: Any,
) -> list[list[list[torch.Tensor]]]:
    """Takes a few steps; what each trainer held after each of them. `shared` is what all trainers agree on."""
    batches = make_batches([8] * trainers, steps=STEPS, dtype=dtype)

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return WAYS[way](session, make_module(dtype=dtype), RECIPES[recipe], own, {}, name=name, **shared)[1]

    return cluster.train(trainers, program, transport=transport)


# A codec of the tests' own

#: Pushes encoded, by label: for each the bucket's index and whether no tensor in it is cut.
ENCODED: dict[str, list[tuple[int, bool]]] = {}


@dataclass(frozen=True, kw_only=True)
class Signs:
    """The sign of each element as one byte. Counts under its label what it encodes."""

    label: str
    whole_tensors: bool = False

    name: ClassVar[str] = "signs"

    def make_state(self) -> None:
        """Nothing."""

    def encode(self, state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """One byte an element."""
        whole = all(each.shape is not None for each in bucket.segments)
        ENCODED.setdefault(self.label, []).append((bucket.index, whole))
        signs = GradBucket(index=bucket.index, buffer=bucket.buffer.sign().to(torch.int8), segments=bucket.segments)
        return NoCompression().encode(None, signs)

    def sizes(self, shape: BucketShape) -> frozenset[int]:
        """One byte an element."""
        return frozenset({shape.num_elements})

    def decode(self, data: torch.Tensor, shape: BucketShape) -> torch.Tensor:
        """-1, 0 or 1."""
        return data.view(torch.int8).to(shape.dtype)


# What is sent, and what is not


def sent_bytes(layout: Layout, coding: Coding) -> set[int]:
    """Every number of bytes that a push of one step may have, if all buckets use one size: the largest or smallest."""
    exchanged = [bucket for bucket in layout.buckets if bucket.group != STORED]
    sizes = [
        frozenset({coding.pushed(bucket).num_bytes}) if found is None else found.sizes
        for bucket in exchanged
        for found in (coding.of_gradients(bucket),)
    ]
    return {sum(map(min, sizes)), sum(map(max, sizes))}


def residual(state: Mapping[str, torch.Tensor], size: int) -> torch.Tensor:
    """What error feedback has of the only tensor of a model, which has that many elements."""
    buckets = sorted(int(key.removeprefix("residual.")) for key in state if key.startswith("residual."))
    found = [state[f"residual.{bucket}"] for bucket in buckets]
    return torch.cat(found)[:size] if found else torch.zeros(size)


# The same with torch alone


def train_rounded(
    module: torch.nn.Module,
    recipe: Recipe,
    batches: Sequence[Sequence[Batch]],
    *,
    gradients: Rounding = as_it_is,
    pulled: Rounding = as_it_is,
    clip: Callable[[list[torch.nn.Parameter]], Any] = as_it_is,  # type: ignore[assignment]
) -> list[list[torch.Tensor]]:
    """Torch in one process: every rank's gradient is rounded, their mean steps masters, and the module is given these
    rounded.

    Args:
        gradients: of the rounding of each rank's gradient.
        pulled: of the rounding of parameters; of the initial ones, too.
        clip: sees masters with their mean gradients before each step.
    """
    parameters = trainable(module)
    masters = [torch.nn.Parameter(each.detach().clone()) for each in parameters]
    optimizer = recipe.optimizer(recipe.dealt(masters), **recipe.options, fused=True)

    def pull() -> None:
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(pulled(master))

    pull()
    trajectory = []
    for step in batches:
        found = [list(map(gradients, torch.autograd.grad(loss_of(module, batch), parameters))) for batch in step]
        for master, *each in zip(masters, *found, strict=True):
            total = each[0].clone()
            for other in each[1:]:
                total += other
            master.grad = total.div_(len(step))
        clip(masters)
        optimizer.step()
        pull()
        trajectory.append(values(module))
    return trajectory
