import pytest
import torch
from codec_buckets import bucket, received, sent

from pserver.errors import InvalidRequest
from pserver.wire.compress import Int8


def blocks(*largest, size=4):
    """A bucket whose blocks have these largest elements, and a 127th of them besides."""
    return bucket(torch.cat([torch.tensor([value, -value / 127, 0.0, 0.0])[:size] for value in largest]))


def test_each_block_has_a_scale_of_its_own():
    gradient = blocks(1e-20, 1e20, 1.0)
    decoded = received(Int8(block=4), gradient)
    torch.testing.assert_close(decoded, gradient.buffer, rtol=1e-6, atol=0)
    assert received(Int8(block=12), gradient)[:4].tolist() == [0, 0, 0, 0]


def test_the_last_block_may_be_shorter():
    gradient = bucket(torch.cat([torch.full((8,), 1e10), torch.tensor([1e-10, -1e-10])]))
    torch.testing.assert_close(received(Int8(block=8), gradient), gradient.buffer, rtol=1e-6, atol=0)
    assert sent(Int8(block=8), gradient).numel() == 2 * 4 + 10


def test_scales_lie_before_integers():
    data = sent(Int8(block=4), blocks(127.0, 254.0))
    torch.testing.assert_close(data[:8].view(torch.float32), torch.tensor([1.0, 2.0]), rtol=1e-6, atol=0)
    assert data[8:].view(torch.int8).tolist() == [127, -1, 0, 0, 127, -1, 0, 0]


def test_halves_of_a_scale_are_rounded_to_even():
    gradient = bucket(torch.tensor([127.0, 0.49, 0.51, 1.51, -0.51, -1.49]))
    assert sent(Int8(block=6), gradient)[4:].view(torch.int8).tolist() == [127, 0, 1, 2, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_finite_elements_stay_finite(dtype):
    largest = torch.finfo(dtype).max
    decoded = received(Int8(), bucket(torch.tensor([largest, -largest] * 9, dtype=dtype)))
    assert decoded.isfinite().all()
    assert (decoded.abs() >= 0.99 * largest).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_element_that_is_no_number_spoils_its_block_only(value):
    gradient = bucket(torch.ones(12))
    gradient.buffer[5] = value
    decoded = received(Int8(block=4), gradient)
    assert decoded.isfinite().tolist() == [True] * 4 + [False] * 4 + [True] * 4


def test_zeros_stay_zeros():
    assert received(Int8(), bucket(torch.zeros(300))).tolist() == [0.0] * 300


def test_a_bucket_that_would_grow_goes_as_it_is():
    values = torch.tensor([0.1, 0.2, 0.3])
    assert torch.equal(received(Int8(block=1), bucket(values)), values)
    assert sent(Int8(block=1), bucket(values)).numel() == 12


@pytest.mark.parametrize("block", [0, -1, 2.0, True, "256", None, 1 << 63])
def test_a_block_is_a_positive_integer(block):
    with pytest.raises(InvalidRequest, match="Int8: block must be an integer, 1 or more"):
        Int8(block=block)
