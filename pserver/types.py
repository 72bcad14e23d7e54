"""Plain values that every layer shares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Version of the protocol; client and server refuse another one.
PROTOCOL_VERSION: Final = 1

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
    """What became of one trainer's step.

    `round` is the round that counted the gradient; `num_trainers` how many trainers were in it; `accepted` whether
    this one was, and `reason` why not. `options` are the numeric options the round used, per parameter group.
    """

    round: int
    accepted: bool
    reason: str
    num_trainers: int
    options: tuple[GroupOptions, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One server as the coordinator sees it; `silent_s` is the time since its last message, in seconds."""

    name: str
    address: str
    alive: bool
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """One shard: the server that owns it, its bytes of values, last applied round and number of updates applied."""

    server: str
    num_bytes: int
    round: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model; `state` is creating, initialising, ready or failed.

    `waiting_for_ranks` are the trainers that the next round waits for, `missing_trainers` how many more have to
    attach before the first round can start.
    """

    name: str
    state: str
    failure: str
    sync_policy: str
    optimizer: str
    round: int
    waiting_for_ranks: tuple[int, ...]
    missing_trainers: int
    shards: tuple[ShardStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """One trainer; `lease_s` is the time until its lease ends, `lag_rounds` the rounds since its last contribution.

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
