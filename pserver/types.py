"""Plain values that every layer shares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Version of the protocol; client and server refuse another one.
PROTOCOL_VERSION: Final = 3

#: Numeric options of one optimizer parameter group, for example {"lr": 0.1, "betas": (0.9, 0.999)}.
GroupOptions = Mapping[str, object]


@dataclass(frozen=True, slots=True, order=True)
class PushId:
    """Names one mutation of one trainer; a retry carries the same one.

    `lowest_unacknowledged` is not part of its identity: it is the lowest sequence number whose outcome the trainer
    does not know yet, and lets the receiver forget the outcomes below it.
    """

    trainer_id: int
    sequence: int
    lowest_unacknowledged: int = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What became of one trainer's step; the same on every shard.

    Attributes:
        round: the round that counted the gradient; if it was rejected, the last round decided until then.
        accepted: whether the gradient was counted.
        stepped: whether the round changed the parameters.
        overflow: whether the round stepped nothing because loss scaling overflowed on some trainer.
        reason: why the gradient was not counted, or why nothing was stepped; "" otherwise.
        error: name of the error that `step` raises with the reason; "" for none.
        num_trainers: trainers in the round; 0 if rejected.
        staleness: rounds decided between the parameters that the gradient was computed on and its own.
        grad_norm: global 2-norm of the round's mean gradient before clipping; None if nobody asked for clipping.
        num_nonfinite: NaN and infinite elements in the gradients of the round; 0 if nobody looked.
        options: the numeric options that the round used, per parameter group.
    """

    round: int
    accepted: bool
    stepped: bool
    overflow: bool
    reason: str
    error: str
    num_trainers: int
    staleness: int
    grad_norm: float | None
    num_nonfinite: int
    options: tuple[GroupOptions, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One server as the coordinator sees it; `silent_s` is the time since its last message, in seconds."""

    name: str
    address: str
    alive: bool
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """A copy of a shard: its server; "making", "catching up" or "in sync"; and log entries that it has not got yet."""

    server: str
    state: str
    lag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """One shard: the server that is its primary, its bytes of values, last applied round and number of updates applied.

    `epoch` is that of the primary. `num_missing_replicas`: how many more would have to be in sync; `electing`: the
    primary is lost, and no replica has taken its place yet.
    """

    shard: int
    server: str
    epoch: int
    num_bytes: int
    round: int
    version: int
    replicas: tuple[ReplicaStatus, ...]
    num_missing_replicas: int
    electing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model; `state` is creating, initialising, ready or failed.

    `waiting_for_ranks` are the trainers that the next round waits for, `missing_trainers` how many more have to
    attach before the first round can start. `num_accepted` and `num_rejected` count gradients, `num_skipped` rounds in
    which nothing was stepped, and `staleness` how many gradients were so many rounds old when they were applied.
    """

    name: str
    state: str
    failure: str
    sync_policy: str
    optimizer: str
    round: int
    waiting_for_ranks: tuple[int, ...]
    missing_trainers: int
    num_accepted: int
    num_rejected: int
    num_skipped: int
    staleness: Mapping[int, int]
    shards: tuple[ShardStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """One trainer; `lease_s`: time until its lease ends; `lag_rounds`: rounds since it was last told an outcome.

    `sent_bytes` and `received_bytes` count tensor data since it started; `reported` holds what the training script
    passed to `Cluster.report`.
    """

    trainer_id: int
    rank: int
    step: int
    lease_s: float
    lag_rounds: int
    sent_bytes: int
    received_bytes: int
    reported: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What the cluster looks like at one moment."""

    servers: tuple[ServerStatus, ...]
    models: tuple[ModelStatus, ...]
    trainers: tuple[TrainerStatus, ...]
