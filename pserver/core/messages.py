"""What coordinator, servers and trainers tell each other, as plain values.

Commands go from the coordinator to a server, reports from a server to the coordinator; both are idempotent, and the
link between the two keeps their order. After a broken link both sides say again what the other may have missed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pserver.core.coding import Coding
from pserver.core.optimizers import optimizer_entry
from pserver.core.rules import NO_RULES, GradientRules, NonFinite
from pserver.types import GroupOptions
from pserver.wire.compress import make_codec
from pserver.wire.layout import Layout, TensorSpec, build_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that must agree between the trainers of a model.

    `optimizer_groups` holds the constructor arguments of each parameter group, complete with defaults; `buffers` names
    the policy for the buffers that travel with every step (see `BUFFER_POLICIES`). `codec` is that of the gradients,
    `pull_codec` that of the values on their way to trainers (see `coding`).
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    optimizer: str
    optimizer_groups: tuple[GroupOptions, ...]
    sync_policy: str
    sync_policy_arguments: Mapping[str, object]
    world_size: int
    buffers: str
    codec: str = "none"
    codec_arguments: Mapping[str, object] = field(default_factory=dict)
    pull_codec: str = "none"

    def layout(self) -> Layout:
        """Where each tensor lies; raises as `build_layout`, `optimizer_entry` and `make_codec` do."""
        elementwise = optimizer_entry(self.optimizer).elementwise
        codec = make_codec(self.codec, self.codec_arguments)
        return build_layout(self.tensors, self.bucket_bytes, whole_tensors=not elementwise or codec.whole_tensors)

    def coding(self, layout: Layout) -> Coding:
        """How the buckets of its layout travel; raises as `Coding` does."""
        return Coding(layout, self.codec, self.codec_arguments, self.pull_codec)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """What a trainer says with its last push of a step.

    Attributes:
        step: its own count, from 1.
        base_round: round of the parameters that the gradient was computed on.
        samples: weight of the gradient in the mean; 0: it contributes nothing.
        options: numeric optimizer options per parameter group.
        rules: what to do with the round's mean gradient.
        overflow: its gradient has infinities because of loss scaling: nobody steps in this round.
    """

    step: int
    base_round: int
    samples: int
    options: tuple[GroupOptions, ...]
    rules: GradientRules = NO_RULES
    overflow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlacement:
    """One server's part of a model: runs of buckets, each from its first to before its last."""

    server: str
    address: str
    runs: tuple[range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One trainer's part in a decided round.

    `weight` is the integer factor of its gradient in the sum, `staleness` the number of rounds between the parameters
    that it was computed on and this round.
    """

    trainer_id: int
    rank: int
    step: int
    weight: int
    staleness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A round, decided once and applied identically by every shard.

    The gradient stepped with is sum(weight * gradient) in order of rank, divided by `divisor`, multiplied by
    `clip_coefficient`, each element limited to +-`clip_value`. With divisor 0 there is none.

    Attributes:
        buffers_from: trainer whose buffers become the model's; 0: those of nobody, or their mean, as the model says.
        options: numeric optimizer options per parameter group.
        skip: why nothing is stepped; "" if it is. Buffers are taken all the same.
        overflow: loss scaling overflowed on some trainer; the reason for `skip`.
        error: name of the error that every trainer in the round raises with `skip`; "" for none.
        grad_norm, num_nonfinite: as in `StepResult`.
    """

    round: int
    contributions: tuple[Contribution, ...]
    divisor: int
    options: tuple[GroupOptions, ...]
    buffers_from: int = 0
    clip_coefficient: float = 1.0
    clip_value: float | None = None
    skip: str = ""
    overflow: bool = False
    error: str = ""
    grad_norm: float | None = None
    num_nonfinite: int = 0

    @property
    def steps(self) -> bool:
        """Whether parameters are stepped."""
        return bool(self.divisor) and not self.skip


# Commands: coordinator -> server


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateShard:
    """Make a shard of these buckets; its last round and version are those of the placement that it replaces."""

    spec: ModelSpec
    epoch: int
    runs: tuple[range, ...]
    round: int = 0
    version: int = 0


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
class Prepare:
    """Compute the mean gradient of a round and report what its decision needs to know (see `Prepared`).

    `plan` is the decision as far as it is known; `look_for_nonfinite`: count NaN and infinite elements.
    """

    model: str
    epoch: int
    plan: Decision
    look_for_nonfinite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A step enters no round: free its gradients and tell its trainer. `round` is the last decided one."""

    model: str
    epoch: int
    trainer_id: int
    step: int
    round: int
    staleness: int
    reason: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitTrainer:
    """A trainer has joined: take what it sends."""

    trainer_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingTrainers:
    """All trainers whose lease runs, for a server that may have missed joins and ends. Everybody else has ended."""

    trainer_ids: tuple[int, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatHeard:
    """A heartbeat has been heard: the server's lease runs at least from when it was sent, in ns of its own clock."""

    sent_ns: int


Command = (
    CreateShard
    | ModelReady
    | Prepare
    | Apply
    | Reject
    | AdmitTrainer
    | LivingTrainers
    | EndTrainer
    | FailModel
    | DropShard
    | HeartbeatHeard
)

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
    commit: CommitInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a shard knows about the mean gradient of a round.

    Attributes:
        squares: for each of its stepped buckets the sum of squared absolute values, computed in float64.
        nonfinite: by trainer, if it was asked to look.
    """

    model: str
    epoch: int
    round: int
    squares: tuple[float, ...]
    nonfinite: tuple[NonFinite, ...]


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


Report = ShardCreated | ShardInitialised | Committed | Prepared | Applied | ShardFailed
