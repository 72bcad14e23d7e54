"""The element types that travel, and tensors as raw bytes without a copy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pserver.errors import InvalidRequest, UnsupportedModel

#: Most dimensions of a tensor that is decoded.
MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementType:
    """One row of the table: torch's dtype, its code on the wire (`DType` in types.proto) and the dtype of its master.

    The master is what a server stores and steps: at least float32 for floating point.
    """

    dtype: torch.dtype
    code: int
    master: torch.dtype


_ROWS = (
    ElementType(dtype=torch.float32, code=1, master=torch.float32),
    ElementType(dtype=torch.float64, code=2, master=torch.float64),
    ElementType(dtype=torch.float16, code=3, master=torch.float32),
    ElementType(dtype=torch.bfloat16, code=4, master=torch.float32),
    ElementType(dtype=torch.int64, code=5, master=torch.int64),
    ElementType(dtype=torch.int32, code=6, master=torch.int32),
    ElementType(dtype=torch.int16, code=7, master=torch.int16),
    ElementType(dtype=torch.int8, code=8, master=torch.int8),
    ElementType(dtype=torch.uint8, code=9, master=torch.uint8),
    ElementType(dtype=torch.bool, code=10, master=torch.bool),
    ElementType(dtype=torch.complex64, code=11, master=torch.complex64),
    ElementType(dtype=torch.complex128, code=12, master=torch.complex128),
)
_BY_DTYPE = {row.dtype: row for row in _ROWS}
_BY_CODE = {row.code: row for row in _ROWS}


def element_type(dtype: torch.dtype) -> ElementType:
    """The row of a torch dtype.

    Raises:
        UnsupportedModel: tensors of that dtype cannot travel.
    """
    row = _BY_DTYPE.get(dtype)
    if row is None:
        known = ", ".join(str(each.dtype).removeprefix("torch.") for each in _ROWS)
        raise UnsupportedModel(f"tensors of {dtype} cannot travel; expected one of {known}; convert it first")
    return row


def dtype_of_code(code: int) -> torch.dtype:
    """The torch dtype of a wire code.

    Raises:
        InvalidRequest: no such code.
    """
    row = _BY_CODE.get(code)
    if row is None:
        raise InvalidRequest(f"element type code {code} is unknown; expected one of {sorted(_BY_CODE)}")
    return row.dtype


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous CPU tensor as a 1-D uint8 tensor that shares its memory.

    A view or slice yields its own elements only, never the rest of its storage.

    Raises:
        InvalidRequest: the tensor is not contiguous, not on the CPU, or a lazy conjugate or negative view.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise InvalidRequest(
            f"expected a contiguous CPU tensor that is no lazy view, got one on {tensor.device} with strides "
            f"{tensor.stride()}; copy it with .cpu().contiguous().resolve_conj().resolve_neg() first"
        )
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor as writable memory that it shares; raises as `byte_view` does."""
    return memoryview(byte_view(tensor).numpy())  # type: ignore[arg-type]


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's own elements in row-major order, little-endian; one copy. Any strides, any device.

    Raises:
        InvalidRequest: the tensor has no dense elements (sparse, meta).
    """
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise InvalidRequest(
            f"expected a dense tensor, got a {tensor.layout} one on {tensor.device}; use .to_dense() first"
        )
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memory_of(plain).tobytes()


def size_in_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor that a message describes; takes no memory.

    Raises:
        InvalidRequest: more than `MAX_DIMENSIONS` dimensions, a negative one, or more bytes than torch can count.
        UnsupportedModel: tensors of that dtype cannot travel.
    """
    element_type(dtype)
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(f"a tensor may have {MAX_DIMENSIONS} dimensions, but {len(shape)} came")
    if any(size < 0 for size in shape):
        raise InvalidRequest(f"a tensor's dimensions must not be negative, got shape {tuple(shape)}")
    # Torch computes strides of empty tensors too, and refuses those that overflow.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 63:
        raise InvalidRequest(f"a tensor of shape {tuple(shape)} and {dtype} has more bytes than can be counted")
    return math.prod(shape) * dtype.itemsize


def from_bytes(data: bytes | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A new CPU tensor that owns a copy of `data`.

    Raises:
        InvalidRequest: a shape that no tensor has (see `size_in_bytes`), or a size that does not fit the data.
    """
    num_bytes = size_in_bytes(dtype, shape)
    if num_bytes != len(data):
        raise InvalidRequest(f"a tensor of shape {shape} and {dtype} has {num_bytes} bytes, but {len(data)} came")
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
