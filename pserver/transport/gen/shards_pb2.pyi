from pserver.transport.gen import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShardAddress(_message.Message):
    __slots__ = ("model", "epoch", "fingerprint", "shard")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    fingerprint: int
    shard: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class InitialiseRequest(_message.Message):
    __slots__ = ("shard", "push_id", "chunks", "state")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    shard: ShardAddress
    push_id: _types_pb2.PushId
    chunks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Chunk]
    state: _containers.RepeatedCompositeFieldContainer[_types_pb2.StateChunk]
    def __init__(self, shard: _Optional[_Union[ShardAddress, _Mapping]] = ..., push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[_types_pb2.Chunk, _Mapping]]] = ..., state: _Optional[_Iterable[_Union[_types_pb2.StateChunk, _Mapping]]] = ...) -> None: ...

class InitialiseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("shard", "trainer_id", "min_round", "include_all", "wait_s")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_ROUND_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_ALL_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    shard: ShardAddress
    trainer_id: int
    min_round: int
    include_all: bool
    wait_s: float
    def __init__(self, shard: _Optional[_Union[ShardAddress, _Mapping]] = ..., trainer_id: _Optional[int] = ..., min_round: _Optional[int] = ..., include_all: _Optional[bool] = ..., wait_s: _Optional[float] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("round", "chunks")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    round: int
    chunks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Chunk]
    def __init__(self, round: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[_types_pb2.Chunk, _Mapping]]] = ...) -> None: ...

class PullStateRequest(_message.Message):
    __slots__ = ("shard", "trainer_id", "min_round", "wait_s")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_ROUND_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    shard: ShardAddress
    trainer_id: int
    min_round: int
    wait_s: float
    def __init__(self, shard: _Optional[_Union[ShardAddress, _Mapping]] = ..., trainer_id: _Optional[int] = ..., min_round: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class PullStateReply(_message.Message):
    __slots__ = ("round", "state")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    round: int
    state: _containers.RepeatedCompositeFieldContainer[_types_pb2.StateChunk]
    def __init__(self, round: _Optional[int] = ..., state: _Optional[_Iterable[_Union[_types_pb2.StateChunk, _Mapping]]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("shard", "push_id", "context_id", "chunks", "absent_tensors", "commit", "wait_s", "in_memory", "without_values")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_VALUES_FIELD_NUMBER: _ClassVar[int]
    shard: ShardAddress
    push_id: _types_pb2.PushId
    context_id: int
    chunks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Chunk]
    absent_tensors: _containers.RepeatedScalarFieldContainer[int]
    commit: _types_pb2.Commit
    wait_s: float
    in_memory: bool
    without_values: bool
    def __init__(self, shard: _Optional[_Union[ShardAddress, _Mapping]] = ..., push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., context_id: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[_types_pb2.Chunk, _Mapping]]] = ..., absent_tensors: _Optional[_Iterable[int]] = ..., commit: _Optional[_Union[_types_pb2.Commit, _Mapping]] = ..., wait_s: _Optional[float] = ..., in_memory: _Optional[bool] = ..., without_values: _Optional[bool] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("outcome", "round", "chunks")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    round: int
    chunks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Chunk]
    def __init__(self, outcome: _Optional[_Union[Outcome, _Mapping]] = ..., round: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[_types_pb2.Chunk, _Mapping]]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("round", "accepted", "reason", "num_trainers", "options", "stepped", "error", "staleness", "grad_norm", "num_nonfinite", "overflow")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINERS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEPPED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    NUM_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    round: int
    accepted: bool
    reason: str
    num_trainers: int
    options: bytes
    stepped: bool
    error: str
    staleness: int
    grad_norm: float
    num_nonfinite: int
    overflow: bool
    def __init__(self, round: _Optional[int] = ..., accepted: _Optional[bool] = ..., reason: _Optional[str] = ..., num_trainers: _Optional[int] = ..., options: _Optional[bytes] = ..., stepped: _Optional[bool] = ..., error: _Optional[str] = ..., staleness: _Optional[int] = ..., grad_norm: _Optional[float] = ..., num_nonfinite: _Optional[int] = ..., overflow: _Optional[bool] = ...) -> None: ...

class DropContextRequest(_message.Message):
    __slots__ = ("shard", "push_id", "context_id")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    shard: ShardAddress
    push_id: _types_pb2.PushId
    context_id: int
    def __init__(self, shard: _Optional[_Union[ShardAddress, _Mapping]] = ..., push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., context_id: _Optional[int] = ...) -> None: ...

class DropContextReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindMemoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindMemoryReply(_message.Message):
    __slots__ = ("segment", "reason")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    segment: str
    reason: str
    def __init__(self, segment: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class OpenMemoryRequest(_message.Message):
    __slots__ = ("shard", "trainer_id", "nonce")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    shard: ShardAddress
    trainer_id: int
    nonce: bytes
    def __init__(self, shard: _Optional[_Union[ShardAddress, _Mapping]] = ..., trainer_id: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class OpenMemoryReply(_message.Message):
    __slots__ = ("values", "mailbox")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    values: str
    mailbox: str
    def __init__(self, values: _Optional[str] = ..., mailbox: _Optional[str] = ...) -> None: ...
