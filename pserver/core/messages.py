"""What coordinator, servers and trainers tell each other, as plain values.

Commands go from the coordinator to a server, reports from a server to the coordinator; both are idempotent, and the
link between the two keeps their order. After a broken link both sides say again what the other may have missed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pserver.types import GroupOptions
from pserver.wire.layout import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that must agree between the trainers of a model.

    `optimizer_groups` holds the constructor arguments of each parameter group, complete with defaults.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    optimizer: str
    optimizer_groups: tuple[GroupOptions, ...]
    sync_policy: str
    sync_policy_arguments: Mapping[str, object]
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlacement:
    """One server's part of a model: buckets `first_bucket` to `last_bucket` (exclusive)."""

    server: str
    address: str
    first_bucket: int
    last_bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One trainer's part in a decided round; `weight` is the integer factor of its gradient in the sum."""

    trainer_id: int
    rank: int
    step: int
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A round, decided once and applied identically by every shard.

    The gradient stepped with is sum(weight * gradient) in order of rank, divided by `divisor`; with divisor 0 nothing
    is stepped. `options` are the numeric optimizer options per parameter group.
    """

    round: int
    contributions: tuple[Contribution, ...]
    divisor: int
    options: tuple[GroupOptions, ...]


# Commands: coordinator -> server


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateShard:
    """Make a shard of these buckets."""

    spec: ModelSpec
    epoch: int
    first_bucket: int
    last_bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReady:
    """Every shard holds the initial values of `initialiser`: they become the model's, and no more may come."""

    model: str
    epoch: int
    initialiser: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Apply a decided round."""

    model: str
    epoch: int
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTrainer:
    """A trainer's lease has ended: free what it left, refuse what it sends."""

    trainer_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailModel:
    """A model cannot go on: tell everybody who waits."""

    model: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropShard:
    """Free a shard."""

    model: str
    epoch: int


Command = CreateShard | ModelReady | Apply | EndTrainer | FailModel | DropShard

# Reports: server -> coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCreated:
    """A shard exists and waits for its initial values."""

    model: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInitialised:
    """A shard holds all initial values, sent by this trainer."""

    model: str
    epoch: int
    trainer_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A shard has everything of one trainer's step."""

    model: str
    epoch: int
    trainer_id: int
    step: int
    samples: int
    options: tuple[GroupOptions, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A shard has applied every round up to this one."""

    model: str
    epoch: int
    round: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailed:
    """A shard could not do what it was told; `failure` says what and why."""

    model: str
    epoch: int
    failure: str


Report = ShardCreated | ShardInitialised | Committed | Applied | ShardFailed
