import pytest
import torch
from codec_buckets import bucket, received, sent

from pserver.wire.compress import BFloat16, Float16

CODECS = ((Float16(), torch.float16), (BFloat16(), torch.bfloat16))


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_it_is_torchs_cast(codec, dtype, wide):
    values = torch.randn(1000, dtype=wide, generator=torch.Generator().manual_seed(0)) * 1e3
    assert torch.equal(sent(codec, bucket(values)).view(dtype), values.to(dtype))
    assert torch.equal(received(codec, bucket(values)), values.to(dtype).to(wide))


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
def test_halves_are_rounded_to_even(codec, dtype):
    step = torch.finfo(dtype).eps
    values = torch.tensor([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2])
    assert received(codec, bucket(values)).tolist() == [1, 1 + 2 * step, -1]


@pytest.mark.parametrize(("codec", "beyond"), [(Float16(), 65520.0), (BFloat16(), 3.4e38)])
def test_overflow_is_infinite_and_keeps_its_sign(codec, beyond):
    assert received(codec, bucket(torch.tensor([beyond, -beyond, 1]))).tolist() == [torch.inf, -torch.inf, 1]


@pytest.mark.parametrize("codec", [Float16(), BFloat16()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_elements_of_16_bits_go_as_they_are(codec, dtype):
    values = torch.tensor([1e-7, 3.0e4, -1.001, torch.inf]).to(dtype)
    assert torch.equal(sent(codec, bucket(values)).view(dtype), values)
