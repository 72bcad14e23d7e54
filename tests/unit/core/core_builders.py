"""Small models, push ids and streams for the tests of pserver.core."""

from collections.abc import Iterable, Mapping, Sequence, Set

import torch

from pserver.core.messages import CommitInfo, CreateShard, ModelSpec
from pserver.core.optimizer_state import StatePiece
from pserver.core.rules import NO_RULES, GradientRules
from pserver.core.shard import Shard
from pserver.core.staging import Staging
from pserver.types import GroupOptions, PushId
from pserver.wire.layout import Bucket, Layout, TensorSpec
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
    buffers: str = "lowest",
    codec: str = "none",
    codec_arguments: Mapping[str, object] | None = None,
    replicas: int = 0,
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
        buffers=buffers,
        codec=codec,
        codec_arguments=codec_arguments or {},
        replicas=replicas,
    )


def push_id(sequence: int, *, trainer: int = 1, acknowledged: int = 1) -> PushId:
    """Mutation number `sequence` of a trainer that has acknowledged everything below `acknowledged`."""
    return PushId(trainer, sequence, acknowledged)


def commit(
    step: int,
    *,
    base_round: int = 0,
    samples: int = 1,
    options: Sequence[GroupOptions] = OPTIONS,
    rules: GradientRules = NO_RULES,
    overflow: bool = False,
) -> CommitInfo:
    return CommitInfo(
        step=step, base_round=base_round, samples=samples, options=tuple(options), rules=rules, overflow=overflow
    )


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
    """Talks to a shard in terms of whole tensors, as its only trainers would.

    Args:
        runs: of buckets that the shard owns; None: all.
        round, version: of the placement that the shard replaces.
        number: of the shard in its model.
        replica: whether it is a copy, which hears all from its primary.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        epoch: int = 1,
        runs: Iterable[range] | None = None,
        round: int = 0,
        version: int = 0,
        number: int = 0,
        replica: bool = False,
    ) -> None:
        self.layout = spec.layout()
        runs = (range(len(self.layout.buckets)),) if runs is None else tuple(runs)
        self.shard = Shard(
            CreateShard(spec=spec, shard=number, epoch=epoch, runs=runs, round=round, version=version, replica=replica)
        )

    def initialised(self, tensors: Mapping[str, torch.Tensor] | None = None) -> "ShardUser":
        """Initialises with mutation 1 of trainer 1, and is ready."""
        self.initialise(tensors or {})
        self.shard.make_ready(1)
        return self

    def initialise(
        self,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[int, Sequence[StatePiece]] | None = None,
        *,
        trainer: int = 1,
        sequence: int = 1,
    ) -> object:
        """Offers values and optimizer state to begin with; returns what the coordinator must hear."""
        return self.shard.initialise(push_id(sequence, trainer=trainer), self.all(tensors), state or {})

    def all(self, tensors: Mapping[str, torch.Tensor]) -> Staging:
        """Initial values as they arrive."""
        return staged(self.shard.buckets, self.layout, tensors)

    def gradients(self, tensors: Mapping[str, torch.Tensor]) -> Staging:
        """Gradients and buffers as they arrive."""
        return staged(self.shard.exchanged, self.layout, tensors)

    def nothing(self) -> Staging:
        """A stream without gradients."""
        return Staging(self.shard.exchanged)

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
