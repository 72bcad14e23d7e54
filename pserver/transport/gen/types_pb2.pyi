from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT16: _ClassVar[DType]
    DTYPE_INT8: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]
    DTYPE_COMPLEX64: _ClassVar[DType]
    DTYPE_COMPLEX128: _ClassVar[DType]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType
DTYPE_INT64: DType
DTYPE_INT32: DType
DTYPE_INT16: DType
DTYPE_INT8: DType
DTYPE_UINT8: DType
DTYPE_BOOL: DType
DTYPE_COMPLEX64: DType
DTYPE_COMPLEX128: DType

class PushId(_message.Message):
    __slots__ = ("trainer_id", "sequence", "lowest_unacknowledged")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOWEST_UNACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    sequence: int
    lowest_unacknowledged: int
    def __init__(self, trainer_id: _Optional[int] = ..., sequence: _Optional[int] = ..., lowest_unacknowledged: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype", "group")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: DType
    group: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DType, str]] = ..., group: _Optional[int] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("name", "tensors", "bucket_bytes", "optimizer", "optimizer_groups", "sync_policy", "sync_policy_arguments", "world_size", "buffers", "codec", "codec_arguments", "pull_codec", "replicas")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SYNC_POLICY_FIELD_NUMBER: _ClassVar[int]
    SYNC_POLICY_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    PULL_CODEC_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    bucket_bytes: int
    optimizer: str
    optimizer_groups: bytes
    sync_policy: str
    sync_policy_arguments: bytes
    world_size: int
    buffers: str
    codec: str
    codec_arguments: bytes
    pull_codec: str
    replicas: int
    def __init__(self, name: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., bucket_bytes: _Optional[int] = ..., optimizer: _Optional[str] = ..., optimizer_groups: _Optional[bytes] = ..., sync_policy: _Optional[str] = ..., sync_policy_arguments: _Optional[bytes] = ..., world_size: _Optional[int] = ..., buffers: _Optional[str] = ..., codec: _Optional[str] = ..., codec_arguments: _Optional[bytes] = ..., pull_codec: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class BucketRun(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class ShardPlacement(_message.Message):
    __slots__ = ("server", "address", "runs", "shard", "epoch")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    server: str
    address: str
    runs: _containers.RepeatedCompositeFieldContainer[BucketRun]
    shard: int
    epoch: int
    def __init__(self, server: _Optional[str] = ..., address: _Optional[str] = ..., runs: _Optional[_Iterable[_Union[BucketRun, _Mapping]]] = ..., shard: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("bucket", "offset_bytes", "dtype", "data")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    offset_bytes: int
    dtype: DType
    data: bytes
    def __init__(self, bucket: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("trainer_id", "rank", "step", "weight", "staleness", "clock")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    rank: int
    step: int
    weight: int
    staleness: int
    clock: int
    def __init__(self, trainer_id: _Optional[int] = ..., rank: _Optional[int] = ..., step: _Optional[int] = ..., weight: _Optional[int] = ..., staleness: _Optional[int] = ..., clock: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("round", "contributions", "divisor", "options", "buffers_from", "clip_coefficient", "clip_value", "skip", "error", "grad_norm", "num_nonfinite", "overflow", "settled")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    DIVISOR_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FROM_FIELD_NUMBER: _ClassVar[int]
    CLIP_COEFFICIENT_FIELD_NUMBER: _ClassVar[int]
    CLIP_VALUE_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    NUM_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    round: int
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    divisor: int
    options: bytes
    buffers_from: int
    clip_coefficient: float
    clip_value: float
    skip: str
    error: str
    grad_norm: float
    num_nonfinite: int
    overflow: bool
    settled: int
    def __init__(self, round: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., divisor: _Optional[int] = ..., options: _Optional[bytes] = ..., buffers_from: _Optional[int] = ..., clip_coefficient: _Optional[float] = ..., clip_value: _Optional[float] = ..., skip: _Optional[str] = ..., error: _Optional[str] = ..., grad_norm: _Optional[float] = ..., num_nonfinite: _Optional[int] = ..., overflow: _Optional[bool] = ..., settled: _Optional[int] = ...) -> None: ...

class GradientRules(_message.Message):
    __slots__ = ("max_norm", "clip_value", "nonfinite")
    MAX_NORM_FIELD_NUMBER: _ClassVar[int]
    CLIP_VALUE_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    max_norm: float
    clip_value: float
    nonfinite: str
    def __init__(self, max_norm: _Optional[float] = ..., clip_value: _Optional[float] = ..., nonfinite: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("plan", "attempt", "rules")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    plan: Decision
    attempt: int
    rules: GradientRules
    def __init__(self, plan: _Optional[_Union[Decision, _Mapping]] = ..., attempt: _Optional[int] = ..., rules: _Optional[_Union[GradientRules, _Mapping]] = ...) -> None: ...

class NonFinite(_message.Message):
    __slots__ = ("trainer_id", "tensor", "count")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    tensor: int
    count: int
    def __init__(self, trainer_id: _Optional[int] = ..., tensor: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("step", "samples", "options", "base_round", "max_norm", "clip_value", "nonfinite", "overflow")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BASE_ROUND_FIELD_NUMBER: _ClassVar[int]
    MAX_NORM_FIELD_NUMBER: _ClassVar[int]
    CLIP_VALUE_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    step: int
    samples: int
    options: bytes
    base_round: int
    max_norm: float
    clip_value: float
    nonfinite: str
    overflow: bool
    def __init__(self, step: _Optional[int] = ..., samples: _Optional[int] = ..., options: _Optional[bytes] = ..., base_round: _Optional[int] = ..., max_norm: _Optional[float] = ..., clip_value: _Optional[float] = ..., nonfinite: _Optional[str] = ..., overflow: _Optional[bool] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("bucket", "tensor", "key", "start", "shape", "dtype", "plain", "offset_bytes", "data")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    tensor: int
    key: str
    start: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: DType
    plain: bytes
    offset_bytes: int
    data: bytes
    def __init__(self, bucket: _Optional[int] = ..., tensor: _Optional[int] = ..., key: _Optional[str] = ..., start: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DType, str]] = ..., plain: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
