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
    `pull_codec` that of the values on their way to trainers (see `coding`). `replicas`: how many other servers keep a
    copy of each shard.
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
    replicas: int = 0

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
    """One shard of a model: runs of buckets, each from its first to before its last, and the server that is primary."""

    shard: int
    epoch: int
    server: str
    address: str
    runs: tuple[range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One trainer's part in a decided round.

    `weight` is the integer factor of its gradient in the sum, `staleness` the number of rounds between the parameters
    that it was computed on and this round, `clock` the number of its gradients in rounds, with this one.
    """

    trainer_id: int
    rank: int
    step: int
    weight: int
    staleness: int = 0
    clock: int = 0


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
        settled: every shard, with its replicas, had applied the rounds up to this one: nobody will ask for them.
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
    settled: int = 0

    @property
    def steps(self) -> bool:
        """Whether parameters are stepped."""
        return bool(self.divisor) and not self.skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A round before its decision: who is in it, and the rules that its decision follows from. See `Prepare`."""

    plan: Decision
    attempt: int
    rules: GradientRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A step that enters no round. `round` is the last decided one; `error` names what its trainer raises, if any."""

    trainer_id: int
    step: int
    round: int
    staleness: int
    reason: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """One copy of a shard: its server, and a number that no other copy ever has."""

    number: int
    server: str
    address: str


# Commands: coordinator -> server


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateShard:
    """Make a shard of these buckets; its last round and version are those of the placement that it replaces.

    `replica`: the server is to keep a copy of it, and hears all else of it from its primary.
    """

    spec: ModelSpec
    shard: int
    epoch: int
    runs: tuple[range, ...]
    round: int = 0
    version: int = 0
    replica: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReady:
    """Every shard holds the initial values of `initialiser`: they become the model's, and no more may come."""

    model: str
    shard: int
    epoch: int
    initialiser: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Apply a decided round."""

    model: str
    shard: int
    epoch: int
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Compute the mean gradient of a round and report what its decision needs to know (see `Prepared`).

    The plan's decision is as far as it is known; of two plans of a round, the later attempt counts.
    """

    model: str
    shard: int
    epoch: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A step enters no round: free its gradients and tell its trainer."""

    model: str
    shard: int
    epoch: int
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonPlan:
    """The plan that is prepared is none: its commits wait again. Report those that are here."""

    model: str
    shard: int
    epoch: int


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
    shard: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropShard:
    """Free a shard."""

    model: str
    shard: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceReplica:
    """The shard's primary is lost: take nothing from it any more, and say how far this replica's log goes."""

    model: str
    shard: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """Be the primary of a shard, under a new epoch; these replicas have all that was ever shown to anybody."""

    model: str
    shard: int
    epoch: int
    replicas: tuple[ReplicaAddress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReplicas:
    """Those are a shard's replicas, and no others count.

    Bring those that are new up to date while rounds go on, and report when nothing is shown any more that they lack.
    """

    model: str
    shard: int
    epoch: int
    replicas: tuple[ReplicaAddress, ...]


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
    | AbandonPlan
    | AdmitTrainer
    | LivingTrainers
    | EndTrainer
    | FailModel
    | DropShard
    | FenceReplica
    | Promote
    | SetReplicas
    | HeartbeatHeard
)

# Reports: server -> coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCreated:
    """A shard exists and waits for its initial values."""

    model: str
    shard: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInitialised:
    """A shard holds all initial values, sent by this trainer."""

    model: str
    shard: int
    epoch: int
    trainer_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A shard has everything of one trainer's step."""

    model: str
    shard: int
    epoch: int
    trainer_id: int
    commit: CommitInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a shard knows about the mean gradient of a round.

    Attributes:
        attempt: of the plan.
        squares: for each of its stepped buckets the sum of squared absolute values, computed in float64.
        nonfinite: by trainer, if it was asked to look.
    """

    model: str
    shard: int
    epoch: int
    round: int
    attempt: int
    squares: tuple[float, ...]
    nonfinite: tuple[NonFinite, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A shard has applied every round up to this one."""

    model: str
    shard: int
    epoch: int
    round: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailed:
    """A shard could not do what it was told; `failure` says what and why."""

    model: str
    shard: int
    epoch: int
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFenced:
    """A replica takes nothing of earlier epochs any more; `position` is the last entry of its log."""

    model: str
    shard: int
    epoch: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPromoted:
    """A replica is the primary now: its last applied round, and the attempt that it has of the next one (0: none)."""

    model: str
    shard: int
    epoch: int
    round: int
    version: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgress:
    """What a shard knows of a trainer's steps.

    Attributes:
        settled_step: its last one that was decided or refused; 0: none.
        told_round: the round that its outcome named.
        clock: as in `Contribution`; 0: it was in no round.
        latest: what it said with its last commit, if that is known.
        refusal: of the last step, if it was refused.
    """

    trainer_id: int
    settled_step: int
    told_round: int
    clock: int
    latest: CommitInfo | None
    refusal: Refusal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """All that a coordinator needs to go on with this shard if it does not know it.

    Attributes:
        round, version: the last applied round, and how many have stepped.
        decisions: of the last rounds, as far as some shard may lack them.
        plan: of the next round, if it is prepared here.
        trainers: those that it has heard of.
    """

    model: str
    shard: int
    epoch: int
    round: int
    version: int
    decisions: tuple[Decision, ...]
    plan: Plan | None
    trainers: tuple[TrainerProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCaughtUp:
    """The primary shows nothing any more that this replica lacks."""

    model: str
    shard: int
    epoch: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFailed:
    """A replica cannot be reached, or is not what its primary is; `failure` says why."""

    model: str
    shard: int
    epoch: int
    number: int
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLag:
    """Entries of the primary's log that a replica has not acknowledged yet."""

    model: str
    shard: int
    epoch: int
    number: int
    num_entries: int


Report = (
    ShardCreated
    | ShardInitialised
    | Committed
    | Prepared
    | Applied
    | ShardFailed
    | ReplicaFenced
    | ShardPromoted
    | ShardState
    | ReplicaCaughtUp
    | ReplicaFailed
    | ReplicaLag
)
