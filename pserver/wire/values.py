"""Open-ended values (optimizer and policy arguments) as msgpack; tensors, tuples and complex numbers are extensions.

https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from functools import partial
from typing import Any

import msgpack
import torch

from pserver.errors import InvalidRequest
from pserver.wire.tensors import MAX_DIMENSIONS, dtype_of_code, element_type, from_bytes, to_bytes

#: Largest encoded value accepted, in bytes. Decoding takes up to 70 times as much: an empty list is one byte here.
MAX_VALUE_BYTES = 1 << 20
#: Most items of one list or map.
MAX_ITEMS = 1 << 16
#: Most tuples inside each other.
MAX_DEPTH = 32

_TENSOR = 1
_TUPLE = 2
_COMPLEX = 3


def pack_value(value: object) -> bytes:
    """Encodes None, bool, int, float, complex, str, bytes, list, tuple, dict (of such) and tensors.

    A tensor contributes its own elements only, not its storage.

    Raises:
        InvalidRequest: something of another type is inside, it is nested too deeply, or larger than `MAX_VALUE_BYTES`.
    """
    encoded = _pack(value, 0)
    _check_size(encoded)
    return encoded


def unpack_value(data: bytes) -> Any:
    """Decodes what `pack_value` encoded.

    Raises:
        InvalidRequest: it is not such an encoding, is larger than `MAX_VALUE_BYTES`, or is nested too deeply.
    """
    _check_size(data)
    return _unpack(data, 0)


def _check_size(data: bytes) -> None:
    if len(data) > MAX_VALUE_BYTES:
        raise InvalidRequest(f"an encoded value has {len(data)} bytes; at most {MAX_VALUE_BYTES} are accepted")


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
        return msgpack.unpackb(
            data,
            ext_hook=partial(_decode, depth),
            strict_map_key=False,
            raw=False,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
        )
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
        # A list's length is believed before its items are seen: bound it.
        unpacker = msgpack.Unpacker(max_array_len=1 + MAX_DIMENSIONS, max_map_len=0, max_buffer_size=len(data))
        unpacker.feed(data)
        header = unpacker.unpack()
        if not isinstance(header, list) or not header or not all(type(size) is int for size in header):
            raise InvalidRequest(f"a tensor's header must be a list of integers, got {header!r:.200}")
        return from_bytes(memoryview(data)[unpacker.tell() :], dtype_of_code(header[0]), tuple(header[1:]))
    if code in (_TUPLE, _COMPLEX):
        parts = _unpack(data, depth + 1)
        if code == _TUPLE and isinstance(parts, list):
            return tuple(parts)
        if code == _COMPLEX and isinstance(parts, list) and [type(each) for each in parts] == [float, float]:
            return complex(*parts)
        raise InvalidRequest(
            f"extension {code} must hold a list (of two floats in a complex number), got {parts!r:.200}"
        )
    raise InvalidRequest(f"extension type {code} is unknown; the sender speaks a newer protocol")
