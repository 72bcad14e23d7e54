from pserver.transport.gen import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("nonce", "rank", "protocol")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    nonce: str
    rank: int
    protocol: int
    def __init__(self, nonce: _Optional[str] = ..., rank: _Optional[int] = ..., protocol: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("trainer_id", "rank", "lease_s")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    rank: int
    lease_s: float
    def __init__(self, trainer_id: _Optional[int] = ..., rank: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("trainer_id", "sent_bytes", "received_bytes", "reported")
    class ReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    sent_bytes: int
    received_bytes: int
    reported: _containers.ScalarMap[str, float]
    def __init__(self, trainer_id: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., reported: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("push_id",)
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    push_id: _types_pb2.PushId
    def __init__(self, push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterModelRequest(_message.Message):
    __slots__ = ("push_id", "spec", "wait_s", "initialised", "replaces")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    INITIALISED_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    push_id: _types_pb2.PushId
    spec: _types_pb2.ModelSpec
    wait_s: float
    initialised: int
    replaces: int
    def __init__(self, push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., spec: _Optional[_Union[_types_pb2.ModelSpec, _Mapping]] = ..., wait_s: _Optional[float] = ..., initialised: _Optional[int] = ..., replaces: _Optional[int] = ...) -> None: ...

class RegisterModelReply(_message.Message):
    __slots__ = ("initialise", "placement", "epoch")
    INITIALISE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    initialise: bool
    placement: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardPlacement]
    epoch: int
    def __init__(self, initialise: _Optional[bool] = ..., placement: _Optional[_Iterable[_Union[_types_pb2.ShardPlacement, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("push_id", "model", "epoch")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    push_id: _types_pb2.PushId
    model: str
    epoch: int
    def __init__(self, push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., model: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("round", "step")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class DropModelRequest(_message.Message):
    __slots__ = ("push_id", "model")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    push_id: _types_pb2.PushId
    model: str
    def __init__(self, push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class DropModelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("model", "version", "wait_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    wait_s: float
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("version", "placement", "epoch")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    version: int
    placement: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardPlacement]
    epoch: int
    def __init__(self, version: _Optional[int] = ..., placement: _Optional[_Iterable[_Union[_types_pb2.ShardPlacement, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("servers", "models", "trainers")
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[ServerStatus]
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    trainers: _containers.RepeatedCompositeFieldContainer[TrainerStatus]
    def __init__(self, servers: _Optional[_Iterable[_Union[ServerStatus, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., trainers: _Optional[_Iterable[_Union[TrainerStatus, _Mapping]]] = ...) -> None: ...

class ServerStatus(_message.Message):
    __slots__ = ("name", "address", "alive", "silent_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    alive: bool
    silent_s: float
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., alive: _Optional[bool] = ..., silent_s: _Optional[float] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("name", "state", "failure", "sync_policy", "optimizer", "round", "waiting_for_ranks", "missing_trainers", "shards", "num_accepted", "num_rejected", "num_skipped", "staleness")
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SYNC_POLICY_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_RANKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_TRAINERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    failure: str
    sync_policy: str
    optimizer: str
    round: int
    waiting_for_ranks: _containers.RepeatedScalarFieldContainer[int]
    missing_trainers: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    num_accepted: int
    num_rejected: int
    num_skipped: int
    staleness: _containers.ScalarMap[int, int]
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., failure: _Optional[str] = ..., sync_policy: _Optional[str] = ..., optimizer: _Optional[str] = ..., round: _Optional[int] = ..., waiting_for_ranks: _Optional[_Iterable[int]] = ..., missing_trainers: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., num_accepted: _Optional[int] = ..., num_rejected: _Optional[int] = ..., num_skipped: _Optional[int] = ..., staleness: _Optional[_Mapping[int, int]] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("server", "num_bytes", "round", "version", "shard", "epoch", "replicas", "num_missing_replicas", "electing")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSING_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ELECTING_FIELD_NUMBER: _ClassVar[int]
    server: str
    num_bytes: int
    round: int
    version: int
    shard: int
    epoch: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    num_missing_replicas: int
    electing: bool
    def __init__(self, server: _Optional[str] = ..., num_bytes: _Optional[int] = ..., round: _Optional[int] = ..., version: _Optional[int] = ..., shard: _Optional[int] = ..., epoch: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., num_missing_replicas: _Optional[int] = ..., electing: _Optional[bool] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("server", "state", "lag")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    server: str
    state: str
    lag: int
    def __init__(self, server: _Optional[str] = ..., state: _Optional[str] = ..., lag: _Optional[int] = ...) -> None: ...

class TrainerStatus(_message.Message):
    __slots__ = ("trainer_id", "rank", "step", "lease_s", "lag_rounds", "sent_bytes", "received_bytes", "reported")
    class ReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    LAG_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    rank: int
    step: int
    lease_s: float
    lag_rounds: int
    sent_bytes: int
    received_bytes: int
    reported: _containers.ScalarMap[str, float]
    def __init__(self, trainer_id: _Optional[int] = ..., rank: _Optional[int] = ..., step: _Optional[int] = ..., lease_s: _Optional[float] = ..., lag_rounds: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., reported: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "shard_created", "shard_initialised", "committed", "applied", "shard_failed", "prepared", "replica_fenced", "shard_promoted", "replica_caught_up", "replica_failed", "replica_lag", "shard_state")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SHARD_CREATED_FIELD_NUMBER: _ClassVar[int]
    SHARD_INITIALISED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    SHARD_FAILED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FENCED_FIELD_NUMBER: _ClassVar[int]
    SHARD_PROMOTED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FAILED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_LAG_FIELD_NUMBER: _ClassVar[int]
    SHARD_STATE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    shard_created: ShardCreated
    shard_initialised: ShardInitialised
    committed: Committed
    applied: Applied
    shard_failed: ShardFailed
    prepared: Prepared
    replica_fenced: ReplicaFenced
    shard_promoted: ShardPromoted
    replica_caught_up: ReplicaCaughtUp
    replica_failed: ReplicaFailed
    replica_lag: ReplicaLag
    shard_state: ShardState
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., shard_created: _Optional[_Union[ShardCreated, _Mapping]] = ..., shard_initialised: _Optional[_Union[ShardInitialised, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ..., shard_failed: _Optional[_Union[ShardFailed, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., replica_fenced: _Optional[_Union[ReplicaFenced, _Mapping]] = ..., shard_promoted: _Optional[_Union[ShardPromoted, _Mapping]] = ..., replica_caught_up: _Optional[_Union[ReplicaCaughtUp, _Mapping]] = ..., replica_failed: _Optional[_Union[ReplicaFailed, _Mapping]] = ..., replica_lag: _Optional[_Union[ReplicaLag, _Mapping]] = ..., shard_state: _Optional[_Union[ShardState, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("name", "address", "incarnation", "protocol", "arithmetic")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    incarnation: int
    protocol: int
    arithmetic: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., protocol: _Optional[int] = ..., arithmetic: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sent_ns",)
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    sent_ns: int
    def __init__(self, sent_ns: _Optional[int] = ...) -> None: ...

class HeartbeatHeard(_message.Message):
    __slots__ = ("sent_ns",)
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    sent_ns: int
    def __init__(self, sent_ns: _Optional[int] = ...) -> None: ...

class ShardCreated(_message.Message):
    __slots__ = ("model", "epoch", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class ShardInitialised(_message.Message):
    __slots__ = ("model", "epoch", "trainer_id", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    trainer_id: int
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., trainer_id: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("model", "epoch", "trainer_id", "commit", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    trainer_id: int
    commit: _types_pb2.Commit
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., trainer_id: _Optional[int] = ..., commit: _Optional[_Union[_types_pb2.Commit, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("model", "epoch", "round", "squares", "nonfinite", "shard", "attempt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    round: int
    squares: _containers.RepeatedScalarFieldContainer[float]
    nonfinite: _containers.RepeatedCompositeFieldContainer[_types_pb2.NonFinite]
    shard: int
    attempt: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., squares: _Optional[_Iterable[float]] = ..., nonfinite: _Optional[_Iterable[_Union[_types_pb2.NonFinite, _Mapping]]] = ..., shard: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("model", "epoch", "round", "version", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    round: int
    version: int
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., version: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class ShardFailed(_message.Message):
    __slots__ = ("model", "epoch", "failure", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    failure: str
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., failure: _Optional[str] = ..., shard: _Optional[int] = ...) -> None: ...

class ReplicaFenced(_message.Message):
    __slots__ = ("model", "epoch", "shard", "position")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    position: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class ShardPromoted(_message.Message):
    __slots__ = ("model", "epoch", "shard", "round", "version", "attempt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    round: int
    version: int
    attempt: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., round: _Optional[int] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class ShardState(_message.Message):
    __slots__ = ("model", "epoch", "shard", "round", "version", "decisions", "plan", "trainers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    round: int
    version: int
    decisions: _containers.RepeatedCompositeFieldContainer[_types_pb2.Decision]
    plan: _types_pb2.Plan
    trainers: _containers.RepeatedCompositeFieldContainer[TrainerProgress]
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., round: _Optional[int] = ..., version: _Optional[int] = ..., decisions: _Optional[_Iterable[_Union[_types_pb2.Decision, _Mapping]]] = ..., plan: _Optional[_Union[_types_pb2.Plan, _Mapping]] = ..., trainers: _Optional[_Iterable[_Union[TrainerProgress, _Mapping]]] = ...) -> None: ...

class TrainerProgress(_message.Message):
    __slots__ = ("trainer_id", "settled_step", "told_round", "clock", "latest", "refusal")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    SETTLED_STEP_FIELD_NUMBER: _ClassVar[int]
    TOLD_ROUND_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    settled_step: int
    told_round: int
    clock: int
    latest: _types_pb2.Commit
    refusal: Refusal
    def __init__(self, trainer_id: _Optional[int] = ..., settled_step: _Optional[int] = ..., told_round: _Optional[int] = ..., clock: _Optional[int] = ..., latest: _Optional[_Union[_types_pb2.Commit, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class ReplicaCaughtUp(_message.Message):
    __slots__ = ("model", "epoch", "shard", "number")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    number: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ReplicaFailed(_message.Message):
    __slots__ = ("model", "epoch", "shard", "number", "failure")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    number: int
    failure: str
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., number: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class ReplicaLag(_message.Message):
    __slots__ = ("model", "epoch", "shard", "number", "num_entries")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    number: int
    num_entries: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., number: _Optional[int] = ..., num_entries: _Optional[int] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "create_shard", "model_ready", "apply", "end_trainer", "fail_model", "drop_shard", "prepare", "reject", "admit_trainer", "living_trainers", "heartbeat_heard", "fence_replica", "promote", "set_replicas", "abandon_plan")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CREATE_SHARD_FIELD_NUMBER: _ClassVar[int]
    MODEL_READY_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    END_TRAINER_FIELD_NUMBER: _ClassVar[int]
    FAIL_MODEL_FIELD_NUMBER: _ClassVar[int]
    DROP_SHARD_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    ADMIT_TRAINER_FIELD_NUMBER: _ClassVar[int]
    LIVING_TRAINERS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_HEARD_FIELD_NUMBER: _ClassVar[int]
    FENCE_REPLICA_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_FIELD_NUMBER: _ClassVar[int]
    SET_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ABANDON_PLAN_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    create_shard: CreateShard
    model_ready: ModelReady
    apply: Apply
    end_trainer: EndTrainer
    fail_model: FailModel
    drop_shard: DropShard
    prepare: Prepare
    reject: Reject
    admit_trainer: AdmitTrainer
    living_trainers: LivingTrainers
    heartbeat_heard: HeartbeatHeard
    fence_replica: FenceReplica
    promote: Promote
    set_replicas: SetReplicas
    abandon_plan: AbandonPlan
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., create_shard: _Optional[_Union[CreateShard, _Mapping]] = ..., model_ready: _Optional[_Union[ModelReady, _Mapping]] = ..., apply: _Optional[_Union[Apply, _Mapping]] = ..., end_trainer: _Optional[_Union[EndTrainer, _Mapping]] = ..., fail_model: _Optional[_Union[FailModel, _Mapping]] = ..., drop_shard: _Optional[_Union[DropShard, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., reject: _Optional[_Union[Reject, _Mapping]] = ..., admit_trainer: _Optional[_Union[AdmitTrainer, _Mapping]] = ..., living_trainers: _Optional[_Union[LivingTrainers, _Mapping]] = ..., heartbeat_heard: _Optional[_Union[HeartbeatHeard, _Mapping]] = ..., fence_replica: _Optional[_Union[FenceReplica, _Mapping]] = ..., promote: _Optional[_Union[Promote, _Mapping]] = ..., set_replicas: _Optional[_Union[SetReplicas, _Mapping]] = ..., abandon_plan: _Optional[_Union[AbandonPlan, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("lease_s", "term")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    term: int
    def __init__(self, lease_s: _Optional[float] = ..., term: _Optional[int] = ...) -> None: ...

class CreateShard(_message.Message):
    __slots__ = ("spec", "epoch", "runs", "round", "version", "shard", "replica")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.ModelSpec
    epoch: int
    runs: _containers.RepeatedCompositeFieldContainer[_types_pb2.BucketRun]
    round: int
    version: int
    shard: int
    replica: bool
    def __init__(self, spec: _Optional[_Union[_types_pb2.ModelSpec, _Mapping]] = ..., epoch: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[_types_pb2.BucketRun, _Mapping]]] = ..., round: _Optional[int] = ..., version: _Optional[int] = ..., shard: _Optional[int] = ..., replica: _Optional[bool] = ...) -> None: ...

class ModelReady(_message.Message):
    __slots__ = ("model", "epoch", "initialiser", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INITIALISER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    initialiser: int
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., initialiser: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class Apply(_message.Message):
    __slots__ = ("model", "epoch", "decision", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    decision: _types_pb2.Decision
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., decision: _Optional[_Union[_types_pb2.Decision, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("model", "epoch", "plan", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    plan: _types_pb2.Plan
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., plan: _Optional[_Union[_types_pb2.Plan, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("model", "epoch", "refusal", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    refusal: Refusal
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("trainer_id", "step", "round", "staleness", "reason", "error")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    step: int
    round: int
    staleness: int
    reason: str
    error: str
    def __init__(self, trainer_id: _Optional[int] = ..., step: _Optional[int] = ..., round: _Optional[int] = ..., staleness: _Optional[int] = ..., reason: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class ReplicaAddress(_message.Message):
    __slots__ = ("number", "server", "address")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    number: int
    server: str
    address: str
    def __init__(self, number: _Optional[int] = ..., server: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class FenceReplica(_message.Message):
    __slots__ = ("model", "epoch", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class Promote(_message.Message):
    __slots__ = ("model", "epoch", "shard", "replicas")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaAddress]
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaAddress, _Mapping]]] = ...) -> None: ...

class SetReplicas(_message.Message):
    __slots__ = ("model", "epoch", "shard", "replicas")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaAddress]
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaAddress, _Mapping]]] = ...) -> None: ...

class AbandonPlan(_message.Message):
    __slots__ = ("model", "epoch", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class AdmitTrainer(_message.Message):
    __slots__ = ("trainer_id",)
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    def __init__(self, trainer_id: _Optional[int] = ...) -> None: ...

class LivingTrainers(_message.Message):
    __slots__ = ("trainer_ids",)
    TRAINER_IDS_FIELD_NUMBER: _ClassVar[int]
    trainer_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, trainer_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class EndTrainer(_message.Message):
    __slots__ = ("trainer_id",)
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    def __init__(self, trainer_id: _Optional[int] = ...) -> None: ...

class FailModel(_message.Message):
    __slots__ = ("model", "epoch", "reason", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    reason: str
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., shard: _Optional[int] = ...) -> None: ...

class DropShard(_message.Message):
    __slots__ = ("model", "epoch", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...
