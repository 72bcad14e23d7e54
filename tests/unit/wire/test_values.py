import math
import subprocess
import sys
from contextlib import suppress

import msgpack
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pserver.errors import InvalidRequest, PserverError, UnsupportedModel
from pserver.wire import values
from pserver.wire.values import pack_value, unpack_value

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
keys = st.text() | st.integers(-(1 << 63), (1 << 64) - 1) | st.booleans() | st.tuples(st.text(), st.integers(0, 9))
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(left, right):
    """Equal in type as well, all the way down: 1 is not True, and a tuple is no list."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return [(key, type(key)) for key in left] == [(key, type(key)) for key in right] and all(
            same(left[key], right[key]) for key in left
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return left == right


@given(trees)
@example({"lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False, "weight_decay": 0})
@example([-0.0, math.inf, (), {}, [], b"", "", (((),),)])
def test_values_round_trip_with_their_types(value):
    assert same(unpack_value(pack_value(value)), value)


def test_a_value_that_is_not_a_number_stays_one():
    real, imaginary = unpack_value(pack_value((math.nan, complex(1, math.nan))))
    assert math.isnan(real)
    assert (imaginary.real, math.isnan(imaginary.imag)) == (1, True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(3, dtype=torch.int64),
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["non-contiguous", "0-dim", "zero-size", "bool", "conjugate", "parameter"],
)
def test_tensors_round_trip_inside_of_values(tensor):
    _, (back,) = unpack_value(pack_value({"inside": ("of", [tensor])}))["inside"]
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert torch.equal(back, tensor)


def test_a_slice_sends_its_own_elements_only_and_not_its_storage():
    whole = torch.zeros(1_000_000)
    assert len(pack_value(whole[7:9])) < 32
    assert len(pack_value([whole.view(1000, 1000)[:, 0]])) < 4100


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), range(3), 1 << 64, "\ud800", torch.float32, {"deep": [(object(),)]}],
    ids=["set", "object", "range", "too large an integer", "half a surrogate pair", "dtype", "object inside"],
)
def test_what_cannot_travel_is_refused(value):
    with pytest.raises(InvalidRequest, match="cannot travel"):
        pack_value(value)


def test_the_refused_type_is_named():
    with pytest.raises(InvalidRequest, match="set is not supported"):
        pack_value({"options": {1, 2}})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.zeros(2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (lambda: torch.zeros(2, dtype=torch.uint16), "uint16"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "qint8"),
    ],
    ids=["float8", "uint16", "quantized"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_of_a_dtype_that_cannot_travel_are_refused_by_name(make, name):
    with pytest.raises(UnsupportedModel, match=name):
        pack_value([make()])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.zeros(3, device="meta"), "meta"),
    ],
    ids=["sparse", "sparse_csr", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_without_dense_elements_are_refused_by_name(make, name):
    with pytest.raises(PserverError, match=name):
        pack_value(make())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack_value("cut off")[:-1],
        pack_value(1) + b"\x00",
        msgpack.packb(msgpack.ExtType(99, b"")),
        msgpack.packb(msgpack.ExtType(1, b"")),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb("no list"))),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb([]))),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb([1, 2.5]))),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb([99, 0]))),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb([1, 2]) + bytes(4))),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb([1, -1, -1]) + bytes(4))),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb([1, 0, 1 << 62, 1 << 62]))),
        msgpack.packb(msgpack.ExtType(2, msgpack.packb(3))),
        msgpack.packb(msgpack.ExtType(3, msgpack.packb([1.0, 2.0, 3.0]))),
        msgpack.packb({}).replace(b"\x80", b"\x81\x90\x01"),
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_what_is_no_encoded_value_is_refused(data):
    with pytest.raises(InvalidRequest):
        unpack_value(data)


@given(st.binary(max_size=64))
def test_any_bytes_are_decoded_or_refused(data):
    with suppress(InvalidRequest):
        unpack_value(data)


def test_an_encoding_beyond_the_limit_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(values, "MAX_VALUE_BYTES", 8)
    assert unpack_value(pack_value("1234567")) == "1234567"
    with pytest.raises(InvalidRequest, match="9 bytes; at most 8"):
        unpack_value(pack_value("12345678"))


def nested(kind, depth):
    value = kind()
    for _ in range(depth):
        value = kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple])
def test_values_nested_without_end_are_refused(kind):
    with pytest.raises(InvalidRequest):
        pack_value(nested(kind, 3000))


@pytest.mark.parametrize("depth", [200, 2000])
def test_a_small_message_of_deeply_nested_extensions_does_not_bring_the_process_down(depth):
    program = f"""
import msgpack
from pserver.errors import InvalidRequest
from pserver.wire.values import unpack_value

data = msgpack.packb([])
for _ in range({depth}):
    data = msgpack.packb([msgpack.ExtType(2, data)])
try:
    unpack_value(data)
except InvalidRequest:
    pass
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
