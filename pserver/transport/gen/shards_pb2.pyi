from pserver.transport.gen import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShardAddress(_message.Message):
    __slots__ = ("model", "epoch", "fingerprint")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    fingerprint: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[int] = ...) -> None: ...

class InitialiseRequest(_message.Message):
    __slots__ = ("shard", "push_id", "chunks")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    shard: ShardAddress
    push_id: _types_pb2.PushId
    chunks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Chunk]
    def __init__(self, shard: _Optional[_Union[ShardAddress, _Mapping]] = ..., push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[_types_pb2.Chunk, _Mapping]]] = ...) -> None: ...

class InitialiseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("shard", "trainer_id", "min_round", "include_buffers", "wait_s")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_ROUND_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    shard: ShardAddress
    trainer_id: int
    min_round: int
    include_buffers: bool
    wait_s: float
    def __init__(self, shard: _Optional[_Union[ShardAddress, _Mapping]] = ..., trainer_id: _Optional[int] = ..., min_round: _Optional[int] = ..., include_buffers: _Optional[bool] = ..., wait_s: _Optional[float] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("round", "chunks")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    round: int
    chunks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Chunk]
    def __init__(self, round: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[_types_pb2.Chunk, _Mapping]]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("shard", "push_id", "context_id", "chunks", "absent_tensors", "commit")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    shard: ShardAddress
    push_id: _types_pb2.PushId
    context_id: int
    chunks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Chunk]
    absent_tensors: _containers.RepeatedScalarFieldContainer[int]
    commit: Commit
    def __init__(self, shard: _Optional[_Union[ShardAddress, _Mapping]] = ..., push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., context_id: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[_types_pb2.Chunk, _Mapping]]] = ..., absent_tensors: _Optional[_Iterable[int]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("step", "samples", "options", "wait_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    samples: int
    options: bytes
    wait_s: float
    def __init__(self, step: _Optional[int] = ..., samples: _Optional[int] = ..., options: _Optional[bytes] = ..., wait_s: _Optional[float] = ...) -> None: ...

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
    __slots__ = ("round", "accepted", "reason", "num_contributions", "options")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    round: int
    accepted: bool
    reason: str
    num_contributions: int
    options: bytes
    def __init__(self, round: _Optional[int] = ..., accepted: _Optional[bool] = ..., reason: _Optional[str] = ..., num_contributions: _Optional[int] = ..., options: _Optional[bytes] = ...) -> None: ...

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
