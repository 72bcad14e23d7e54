"""What happens to a shard's state, as its replicas hear it: entries of its log, and pieces of the state itself.

A change says all that a replica needs to do the same, and nothing that follows from what it has. Contexts that wait for
a round are not among it, since their trainers are not told before a round has them, and push them again.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from pserver.core.messages import Decision, Plan, Prepared
from pserver.core.optimizer_state import StatePiece
from pserver.types import PushId, StepResult


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class RoundPrepared:
    """A round's gradients, reduced: whatever becomes of their trainers, it can be applied.

    Attributes:
        report: what the coordinator hears of it.
        means: the mean gradient of each bucket that is stepped, in the dtype of its master; empty if nothing is.
        buffers: the values that buffers get, by bucket.
        absent: tensors that have no gradient from anybody.
        push_ids, context_ids: of the contributions, in their order; a push id is None if its trainer has ended.
    """

    plan: Plan
    report: Prepared
    means: Mapping[int, torch.Tensor]
    buffers: Mapping[int, torch.Tensor]
    absent: Set[int]
    push_ids: Sequence[PushId | None]
    context_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """CRC-32 of a bucket's master and optimizer state."""

    bucket: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundApplied:
    """The round that was prepared is decided. `checksum`: of some bucket thereafter, now and then."""

    decision: Decision
    version: int
    checksum: Checksum | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRefused:
    """A step enters no round, and that is its outcome."""

    push_id: PushId
    context_id: int
    step: int
    result: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsPushed:
    """Gradients were added to a context that is not complete; by bucket, as they travel."""

    push_id: PushId
    context_id: int
    gradients: Mapping[int, torch.Tensor]
    absent: Set[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextDropped:
    """A context is not wanted any more."""

    push_id: PushId
    context_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerGone:
    """A trainer's lease has ended."""

    trainer_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRecord:
    """What a shard remembers of a trainer; outcomes by sequence number, None: done, without a result."""

    trainer_id: int
    last_step: int
    lowest_unacknowledged: int
    outcomes: Mapping[int, StepResult | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookkeeping:
    """Where a shard is, without its values: with that a replica begins anew. `decisions`: as in `ShardState`."""

    round: int
    version: int
    trainers: Sequence[TrainerRecord]
    decisions: Sequence[Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextHeld:
    """A context that is not complete, and what has been added to it so far."""

    trainer_id: int
    context_id: int
    gradients: Mapping[int, torch.Tensor]
    absent: Set[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHeld:
    """A bucket's master and optimizer state; `last`: no more come. The tensors may be live ones of the primary."""

    bucket: int
    round: int
    master: torch.Tensor
    state: Sequence[StatePiece]
    last: bool


#: Entries of a log.
LoggedChange = RoundPrepared | RoundApplied | StepRefused | GradientsPushed | ContextDropped | TrainerGone
#: With these, a replica without anything gets what has happened before.
StatePart = Bookkeeping | ContextHeld | BucketHeld
Change = LoggedChange | StatePart
