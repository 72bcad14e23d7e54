import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pserver.errors import InvalidRequest, UnsupportedModel
from pserver.wire.tensors import byte_view, dtype_of_code, element_type, from_bytes, memory_of, to_bytes

MASTERS = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int64: torch.int64,
    torch.int32: torch.int32,
    torch.int16: torch.int16,
    torch.int8: torch.int8,
    torch.uint8: torch.uint8,
    torch.bool: torch.bool,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}
#: The codes of types.proto, which are fixed for ever.
CODES = dict(zip(MASTERS, range(1, 13), strict=True))


def any_bits(dtype, shape):
    """A tensor of random bits: NaNs with payloads, infinities, denormals and all; only 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(7)
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def bits(tensor):
    """Its elements' bits in row-major order, found without the code under test."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain).contiguous() if plain.is_complex() else plain
    return plain.reshape(-1).view(torch.uint8).tolist()


def there_and_back(tensor):
    back = from_bytes(to_bytes(tensor), tensor.dtype, tuple(tensor.shape))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", MASTERS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5, 3), (2, 3, 4, 5)], ids=str)
def test_every_dtype_and_shape_round_trips_bit_for_bit(dtype, shape):
    there_and_back(any_bits(dtype, shape))


@pytest.mark.parametrize("dtype", MASTERS, ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(0, 3),
        lambda t: t[:, 1:, ::2],
        lambda t: t[1],
        lambda t: t[..., 0],
        lambda t: t[:1].expand(3, -1, -1, -1),
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.flatten()[3:7],
    ],
    ids=["transposed", "strided", "row", "column", "expanded", "channels_last", "slice"],
)
def test_views_round_trip_in_row_major_order(dtype, view):
    there_and_back(view(any_bits(dtype, (2, 3, 4, 5))))


def test_conjugate_and_negative_views_round_trip_as_the_values_they_show():
    tensor = torch.complex(torch.tensor([1.0, -2.0]), torch.tensor([3.0, -0.0]))
    there_and_back(tensor.conj())
    there_and_back(tensor.conj().imag)
    assert from_bytes(to_bytes(tensor.conj()), torch.complex64, (2,)).tolist() == [1 - 3j, -2 + 0j]
    assert from_bytes(to_bytes(tensor.conj().imag), torch.float32, (2,)).tolist() == [-3.0, 0.0]


def test_a_parameter_travels_without_its_graph():
    parameter = torch.nn.Parameter(torch.arange(4.0))
    there_and_back(parameter.detach())
    assert to_bytes(parameter * 2) == struct.pack("<4f", 0, 2, 4, 6)


def test_bytes_are_little_endian_and_in_row_major_order():
    assert to_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).t()) == struct.pack("<4h", 1, 3, 2, 4)


def test_a_slice_sends_its_own_bytes_only_and_not_its_storage():
    whole = torch.arange(1_000_000, dtype=torch.float32)
    assert len(to_bytes(whole[5:8])) == 12
    assert len(to_bytes(whole.view(1000, 1000)[:, 3])) == 4000
    assert bytes(memory_of(whole[5:8])) == struct.pack("<3f", 5, 6, 7)


def test_a_byte_view_shares_the_memory_of_its_tensor():
    tensor = torch.zeros(4, dtype=torch.int32)
    byte_view(tensor[1:3])[0] = 255
    memory_of(tensor)[12:16] = struct.pack("<i", -5)
    assert tensor.tolist() == [0, 255, 0, -5]


@pytest.mark.parametrize("dtype", MASTERS, ids=str)
def test_memory_has_the_bytes_of_the_tensor_also_if_there_are_none(dtype):
    for shape in ((), (3, 2), (0, 2)):
        tensor = any_bits(dtype, shape)
        memory = memory_of(tensor)
        assert memory.nbytes == tensor.numel() * dtype.itemsize
        assert not memory.readonly
        assert memory.tolist() == bits(tensor)


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:, :2]], ids=["transposed", "columns"])
def test_memory_that_is_not_contiguous_is_refused(view):
    with pytest.raises(InvalidRequest, match="contiguous"):
        memory_of(view(torch.zeros(3, 4)))


@pytest.mark.parametrize(
    "view",
    [torch.ones(2, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(2))],
    ids=["conjugate", "negative"],
)
def test_a_lazy_view_whose_memory_holds_other_values_is_refused(view):
    with pytest.raises(InvalidRequest):
        byte_view(view)


def test_a_tensor_that_is_on_no_cpu_is_refused():
    with pytest.raises(InvalidRequest, match="meta"):
        memory_of(torch.zeros(3, device="meta"))


def test_what_is_decoded_owns_its_memory():
    data = bytearray(struct.pack("<2f", 1, 2))
    tensor = from_bytes(memoryview(data), torch.float32, (2,))
    data[:] = bytes(8)
    tensor += 1
    assert tensor.tolist() == [2, 3]


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 700), st.sampled_from(list(MASTERS)))
def test_data_of_another_size_than_the_shape_is_refused(shape, num_bytes, dtype):
    if num_bytes == math.prod(shape) * dtype.itemsize:
        return
    with pytest.raises(InvalidRequest, match=f"{num_bytes} came"):
        from_bytes(bytes(num_bytes), dtype, tuple(shape))


def test_negative_dimensions_are_refused_even_if_their_product_fits():
    with pytest.raises(InvalidRequest, match="negative"):
        from_bytes(bytes(8), torch.float32, (-1, -2))


def test_codes_are_those_of_the_protocol():
    assert {dtype: element_type(dtype).code for dtype in MASTERS} == CODES
    assert {code: dtype_of_code(code) for code in CODES.values()} == {code: dtype for dtype, code in CODES.items()}


def test_masters_have_at_least_single_precision():
    assert {dtype: element_type(dtype).master for dtype in MASTERS} == MASTERS


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.complex32, torch.qint8, torch.quint4x2],
    ids=str,
)
def test_dtypes_that_cannot_travel_are_refused_by_name(dtype):
    with pytest.raises(UnsupportedModel, match=str(dtype)):
        element_type(dtype)
    with pytest.raises(UnsupportedModel, match=str(dtype)):
        from_bytes(b"", dtype, (0,))


@pytest.mark.parametrize("code", [0, -1, 13, 1 << 40])
def test_codes_that_the_protocol_does_not_have_are_refused(code):
    with pytest.raises(InvalidRequest, match=f"code {code} is unknown"):
        dtype_of_code(code)
