from pserver.transport.gen import shards_pb2 as _shards_pb2
from pserver.transport.gen import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowRequest(_message.Message):
    __slots__ = ("shard", "segment", "nonce", "change", "chunks", "state", "complete")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    shard: _shards_pb2.ShardAddress
    segment: str
    nonce: bytes
    change: ChangeHead
    chunks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Chunk]
    state: _containers.RepeatedCompositeFieldContainer[_types_pb2.StateChunk]
    complete: bool
    def __init__(self, shard: _Optional[_Union[_shards_pb2.ShardAddress, _Mapping]] = ..., segment: _Optional[str] = ..., nonce: _Optional[bytes] = ..., change: _Optional[_Union[ChangeHead, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[_types_pb2.Chunk, _Mapping]]] = ..., state: _Optional[_Iterable[_Union[_types_pb2.StateChunk, _Mapping]]] = ..., complete: _Optional[bool] = ...) -> None: ...

class ChangeHead(_message.Message):
    __slots__ = ("index", "released", "tensors", "position", "round_prepared", "round_applied", "step_refused", "gradients_pushed", "context_dropped", "trainer_gone", "bookkeeping", "context_held", "bucket_held")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ROUND_PREPARED_FIELD_NUMBER: _ClassVar[int]
    ROUND_APPLIED_FIELD_NUMBER: _ClassVar[int]
    STEP_REFUSED_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_PUSHED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_DROPPED_FIELD_NUMBER: _ClassVar[int]
    TRAINER_GONE_FIELD_NUMBER: _ClassVar[int]
    BOOKKEEPING_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_HELD_FIELD_NUMBER: _ClassVar[int]
    BUCKET_HELD_FIELD_NUMBER: _ClassVar[int]
    index: int
    released: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHead]
    position: int
    round_prepared: RoundPrepared
    round_applied: RoundApplied
    step_refused: StepRefused
    gradients_pushed: GradientsPushed
    context_dropped: ContextDropped
    trainer_gone: TrainerGone
    bookkeeping: Bookkeeping
    context_held: ContextHeld
    bucket_held: BucketHeld
    def __init__(self, index: _Optional[int] = ..., released: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorHead, _Mapping]]] = ..., position: _Optional[int] = ..., round_prepared: _Optional[_Union[RoundPrepared, _Mapping]] = ..., round_applied: _Optional[_Union[RoundApplied, _Mapping]] = ..., step_refused: _Optional[_Union[StepRefused, _Mapping]] = ..., gradients_pushed: _Optional[_Union[GradientsPushed, _Mapping]] = ..., context_dropped: _Optional[_Union[ContextDropped, _Mapping]] = ..., trainer_gone: _Optional[_Union[TrainerGone, _Mapping]] = ..., bookkeeping: _Optional[_Union[Bookkeeping, _Mapping]] = ..., context_held: _Optional[_Union[ContextHeld, _Mapping]] = ..., bucket_held: _Optional[_Union[BucketHeld, _Mapping]] = ...) -> None: ...

class TensorHead(_message.Message):
    __slots__ = ("bucket", "dtype", "num_elements", "buffer", "segment_offset")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    dtype: _types_pb2.DType
    num_elements: int
    buffer: bool
    segment_offset: int
    def __init__(self, bucket: _Optional[int] = ..., dtype: _Optional[_Union[_types_pb2.DType, str]] = ..., num_elements: _Optional[int] = ..., buffer: _Optional[bool] = ..., segment_offset: _Optional[int] = ...) -> None: ...

class RoundPrepared(_message.Message):
    __slots__ = ("plan", "squares", "nonfinite", "absent_tensors", "push_ids", "context_ids")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    ABSENT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    PUSH_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    plan: _types_pb2.Plan
    squares: _containers.RepeatedScalarFieldContainer[float]
    nonfinite: _containers.RepeatedCompositeFieldContainer[_types_pb2.NonFinite]
    absent_tensors: _containers.RepeatedScalarFieldContainer[int]
    push_ids: _containers.RepeatedCompositeFieldContainer[_types_pb2.PushId]
    context_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, plan: _Optional[_Union[_types_pb2.Plan, _Mapping]] = ..., squares: _Optional[_Iterable[float]] = ..., nonfinite: _Optional[_Iterable[_Union[_types_pb2.NonFinite, _Mapping]]] = ..., absent_tensors: _Optional[_Iterable[int]] = ..., push_ids: _Optional[_Iterable[_Union[_types_pb2.PushId, _Mapping]]] = ..., context_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RoundApplied(_message.Message):
    __slots__ = ("decision", "version", "checked_bucket", "checksum")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BUCKET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    decision: _types_pb2.Decision
    version: int
    checked_bucket: int
    checksum: int
    def __init__(self, decision: _Optional[_Union[_types_pb2.Decision, _Mapping]] = ..., version: _Optional[int] = ..., checked_bucket: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class StepRefused(_message.Message):
    __slots__ = ("push_id", "context_id", "step", "outcome")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    push_id: _types_pb2.PushId
    context_id: int
    step: int
    outcome: _shards_pb2.Outcome
    def __init__(self, push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., context_id: _Optional[int] = ..., step: _Optional[int] = ..., outcome: _Optional[_Union[_shards_pb2.Outcome, _Mapping]] = ...) -> None: ...

class GradientsPushed(_message.Message):
    __slots__ = ("push_id", "context_id", "absent_tensors")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    ABSENT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    push_id: _types_pb2.PushId
    context_id: int
    absent_tensors: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., context_id: _Optional[int] = ..., absent_tensors: _Optional[_Iterable[int]] = ...) -> None: ...

class ContextDropped(_message.Message):
    __slots__ = ("push_id", "context_id")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    push_id: _types_pb2.PushId
    context_id: int
    def __init__(self, push_id: _Optional[_Union[_types_pb2.PushId, _Mapping]] = ..., context_id: _Optional[int] = ...) -> None: ...

class TrainerGone(_message.Message):
    __slots__ = ("trainer_id",)
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    def __init__(self, trainer_id: _Optional[int] = ...) -> None: ...

class Bookkeeping(_message.Message):
    __slots__ = ("round", "version", "trainers", "decisions")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    round: int
    version: int
    trainers: _containers.RepeatedCompositeFieldContainer[TrainerRecord]
    decisions: _containers.RepeatedCompositeFieldContainer[_types_pb2.Decision]
    def __init__(self, round: _Optional[int] = ..., version: _Optional[int] = ..., trainers: _Optional[_Iterable[_Union[TrainerRecord, _Mapping]]] = ..., decisions: _Optional[_Iterable[_Union[_types_pb2.Decision, _Mapping]]] = ...) -> None: ...

class TrainerRecord(_message.Message):
    __slots__ = ("trainer_id", "last_step", "lowest_unacknowledged", "outcomes")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    LOWEST_UNACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    last_step: int
    lowest_unacknowledged: int
    outcomes: _containers.RepeatedCompositeFieldContainer[RecordedOutcome]
    def __init__(self, trainer_id: _Optional[int] = ..., last_step: _Optional[int] = ..., lowest_unacknowledged: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[RecordedOutcome, _Mapping]]] = ...) -> None: ...

class RecordedOutcome(_message.Message):
    __slots__ = ("sequence", "outcome")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    outcome: _shards_pb2.Outcome
    def __init__(self, sequence: _Optional[int] = ..., outcome: _Optional[_Union[_shards_pb2.Outcome, _Mapping]] = ...) -> None: ...

class ContextHeld(_message.Message):
    __slots__ = ("trainer_id", "context_id", "absent_tensors", "pushed")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    ABSENT_TENSORS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    context_id: int
    absent_tensors: _containers.RepeatedScalarFieldContainer[int]
    pushed: bool
    def __init__(self, trainer_id: _Optional[int] = ..., context_id: _Optional[int] = ..., absent_tensors: _Optional[_Iterable[int]] = ..., pushed: _Optional[bool] = ...) -> None: ...

class BucketHeld(_message.Message):
    __slots__ = ("bucket", "round", "last")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    round: int
    last: bool
    def __init__(self, bucket: _Optional[int] = ..., round: _Optional[int] = ..., last: _Optional[bool] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("position", "acknowledged", "num_parts", "released")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    position: int
    acknowledged: int
    num_parts: int
    released: int
    def __init__(self, position: _Optional[int] = ..., acknowledged: _Optional[int] = ..., num_parts: _Optional[int] = ..., released: _Optional[int] = ...) -> None: ...
