"""Small models, push ids and streams for the tests of pserver.core."""

from collections.abc import Iterable, Mapping, Sequence, Set

import torch

from pserver.core.contexts import CommitInfo
from pserver.core.messages import CreateShard, ModelSpec
from pserver.core.shard import Shard
from pserver.core.staging import Staging
from pserver.types import GroupOptions, PushId
from pserver.wire.layout import Bucket, Layout, TensorSpec, build_layout
from pserver.wire.tensors import element_type, from_bytes, to_bytes

OPTIONS: tuple[GroupOptions, ...] = ({"lr": 0.5},)


def tensor_spec(name: str, *shape: int, dtype: torch.dtype = torch.float32, group: int = 0) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, group=group)


def model_spec(
    *,
    name: str = "m",
    tensors: Sequence[TensorSpec] = (tensor_spec("w", 24), tensor_spec("b", 4)),
    bucket_bytes: int = 64,
    optimizer: str = "SGD",
    optimizer_groups: Sequence[GroupOptions] = OPTIONS,
    sync_policy: str = "bsp",
    sync_policy_arguments: Mapping[str, object] | None = None,
    world_size: int = 1,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        tensors=tuple(tensors),
        bucket_bytes=bucket_bytes,
        optimizer=optimizer,
        optimizer_groups=tuple(optimizer_groups),
        sync_policy=sync_policy,
        sync_policy_arguments=sync_policy_arguments or {},
        world_size=world_size,
    )


def push_id(sequence: int, *, trainer: int = 1, acknowledged: int = 1) -> PushId:
    """Mutation number `sequence` of a trainer that has acknowledged everything below `acknowledged`."""
    return PushId(trainer, sequence, acknowledged)


def commit(step: int, *, samples: int = 1, options: Sequence[GroupOptions] = OPTIONS) -> CommitInfo:
    return CommitInfo(step=step, samples=samples, options=tuple(options))


def empty_flats(layout: Layout) -> list[torch.Tensor]:
    return [torch.zeros(flat.num_elements, dtype=flat.dtype) for flat in layout.flats]


def view_of(flats: Sequence[torch.Tensor], layout: Layout, tensor: int) -> torch.Tensor:
    """The part of the flats that belongs to one tensor, in its shape; shares their memory."""
    spec, place = layout.tensors[tensor], layout.places[tensor]
    return flats[place.flat][place.offset : place.offset + spec.num_elements].view(spec.shape)


def staged(buckets: Iterable[Bucket], layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Staging:
    """A stream of these buckets that has arrived whole; tensors not given are zeros."""
    flats = empty_flats(layout)
    for index, spec in enumerate(layout.tensors):
        if spec.name in tensors:
            view_of(flats, layout, index).copy_(tensors[spec.name])
    buckets = list(buckets)
    staging = Staging(buckets)
    for bucket in buckets:
        data = to_bytes(flats[bucket.flat][bucket.start : bucket.stop])
        staging.add_chunk(bucket.index, 0, element_type(bucket.dtype).code, data)
    return staging


class ShardUser:
    """Talks to a shard in terms of whole tensors, as its only trainers would."""

    def __init__(self, spec: ModelSpec, *, epoch: int = 1, buckets: range | None = None) -> None:
        self.layout = build_layout(spec.tensors, spec.bucket_bytes)
        buckets = range(len(self.layout.buckets)) if buckets is None else buckets
        self.shard = Shard(CreateShard(spec=spec, epoch=epoch, first_bucket=buckets.start, last_bucket=buckets.stop))

    def initialised(self, tensors: Mapping[str, torch.Tensor] | None = None) -> "ShardUser":
        """Initialises with mutation 1 of trainer 1, and is ready."""
        self.shard.initialise(push_id(1), self.all(tensors or {}))
        self.shard.make_ready(1)
        return self

    def all(self, tensors: Mapping[str, torch.Tensor]) -> Staging:
        """Initial values as they arrive."""
        return staged(self.shard.buckets, self.layout, tensors)

    def gradients(self, tensors: Mapping[str, torch.Tensor]) -> Staging:
        """Gradients as they arrive."""
        return staged(self.shard.trained, self.layout, tensors)

    def nothing(self) -> Staging:
        """A stream without gradients."""
        return Staging(self.shard.trained)

    def push(
        self,
        sequence: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        trainer: int = 1,
        context: int = 1,
        absent: Set[int] = frozenset(),
        commit: CommitInfo | None = None,
    ) -> object:
        """Pushes gradients; returns what the coordinator must hear."""
        staging = self.gradients(tensors)
        return self.shard.push(push_id(sequence, trainer=trainer), context, staging, absent, commit)

    def values(self) -> dict[str, torch.Tensor]:
        """Every tensor as a trainer would pull it; buckets of other shards read as zeros."""
        flats = empty_flats(self.layout)
        for bucket in self.shard.buckets:
            data = self.shard.read(bucket.index)
            flats[bucket.flat][bucket.start : bucket.stop] = from_bytes(data, bucket.dtype, (bucket.num_elements,))
        return {spec.name: view_of(flats, self.layout, index) for index, spec in enumerate(self.layout.tensors)}
