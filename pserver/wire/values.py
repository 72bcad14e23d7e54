"""Open-ended values (optimizer and policy arguments) as msgpack; tensors, tuples and complex numbers are extensions.

https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from functools import partial
from typing import Any

import msgpack
import torch

from pserver.errors import InvalidRequest
from pserver.wire.tensors import dtype_of_code, element_type, from_bytes, to_bytes

#: Largest encoded value accepted, in bytes.
MAX_VALUE_BYTES = 64 << 20
#: Most tuples inside each other.
MAX_DEPTH = 32

_TENSOR = 1
_TUPLE = 2
_COMPLEX = 3


def pack_value(value: object) -> bytes:
    """Encodes None, bool, int, float, complex, str, bytes, list, tuple, dict (of such) and tensors.

    A tensor contributes its own elements only, not its storage.

    Raises:
        InvalidRequest: something of another type is inside, or it is nested too deeply.
    """
    return _pack(value, 0)


def unpack_value(data: bytes) -> Any:
    """Decodes what `pack_value` encoded.

    Raises:
        InvalidRequest: it is not such an encoding, is larger than `MAX_VALUE_BYTES`, or is nested too deeply.
    """
    if len(data) > MAX_VALUE_BYTES:
        raise InvalidRequest(f"an encoded value has {len(data)} bytes; at most {MAX_VALUE_BYTES} are accepted")
    return _unpack(data, 0)


def _pack(value: object, depth: int) -> bytes:
    try:
        encoded: bytes = msgpack.packb(value, default=partial(_encode, depth), strict_types=True, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"a value cannot travel: {error}; pass numbers, strings, lists, dicts or tensors"
        ) from error
    return encoded


def _unpack(data: bytes, depth: int) -> Any:
    try:
        return msgpack.unpackb(data, ext_hook=partial(_decode, depth), strict_map_key=False, raw=False)
    except InvalidRequest:
        raise
    except Exception as error:  # msgpack raises half a dozen classes, its own and Python's
        raise InvalidRequest(f"{len(data)} bytes are not a valid encoded value: {error}") from error


def _check_depth(depth: int) -> None:
    # Each level is a call into msgpack and back: without a bound a small message overflows the C stack.
    if depth >= MAX_DEPTH:
        raise InvalidRequest(f"a value has tuples nested more than {MAX_DEPTH} deep; use lists or a flatter value")


def _encode(depth: int, value: object) -> msgpack.ExtType:
    _check_depth(depth)
    if isinstance(value, torch.Tensor):
        header = [element_type(value.dtype).code, *value.shape]
        return msgpack.ExtType(_TENSOR, msgpack.packb(header) + to_bytes(value))
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, _pack(list(value), depth + 1))
    if isinstance(value, complex):
        return msgpack.ExtType(_COMPLEX, msgpack.packb([value.real, value.imag]))
    raise TypeError(f"{type(value).__qualname__} is not supported")


def _decode(depth: int, code: int, data: bytes) -> object:
    _check_depth(depth)
    if code == _TENSOR:
        unpacker = msgpack.Unpacker()
        unpacker.feed(data)
        header = unpacker.unpack()
        if not isinstance(header, list) or not header or not all(type(size) is int for size in header):
            raise InvalidRequest(f"a tensor's header must be a list of integers, got {header!r}")
        return from_bytes(memoryview(data)[unpacker.tell() :], dtype_of_code(header[0]), tuple(header[1:]))
    if code == _TUPLE:
        return tuple(_unpack(data, depth + 1))
    if code == _COMPLEX:
        return complex(*_unpack(data, depth + 1))
    raise InvalidRequest(f"extension type {code} is unknown; the sender speaks a newer protocol")
