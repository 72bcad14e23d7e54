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
    __slots__ = ("name", "tensors", "bucket_bytes", "optimizer", "optimizer_groups", "sync_policy", "sync_policy_arguments", "world_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SYNC_POLICY_FIELD_NUMBER: _ClassVar[int]
    SYNC_POLICY_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    bucket_bytes: int
    optimizer: str
    optimizer_groups: bytes
    sync_policy: str
    sync_policy_arguments: bytes
    world_size: int
    def __init__(self, name: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., bucket_bytes: _Optional[int] = ..., optimizer: _Optional[str] = ..., optimizer_groups: _Optional[bytes] = ..., sync_policy: _Optional[str] = ..., sync_policy_arguments: _Optional[bytes] = ..., world_size: _Optional[int] = ...) -> None: ...

class ShardPlacement(_message.Message):
    __slots__ = ("server", "address", "first_bucket", "last_bucket")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BUCKET_FIELD_NUMBER: _ClassVar[int]
    LAST_BUCKET_FIELD_NUMBER: _ClassVar[int]
    server: str
    address: str
    first_bucket: int
    last_bucket: int
    def __init__(self, server: _Optional[str] = ..., address: _Optional[str] = ..., first_bucket: _Optional[int] = ..., last_bucket: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("trainer_id", "rank", "step", "weight")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    rank: int
    step: int
    weight: int
    def __init__(self, trainer_id: _Optional[int] = ..., rank: _Optional[int] = ..., step: _Optional[int] = ..., weight: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("round", "contributions", "divisor", "options")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    DIVISOR_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    round: int
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    divisor: int
    options: bytes
    def __init__(self, round: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., divisor: _Optional[int] = ..., options: _Optional[bytes] = ...) -> None: ...
