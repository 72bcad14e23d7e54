import math

import pytest
import torch
from codec_buckets import bucket, received, sent

from pserver.errors import InvalidRequest
from pserver.wire.compress import TopK

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def indices_in(data, count):
    return data[: 4 * count].view(torch.int32).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [10, 100, 1001])
def test_the_largest_by_absolute_value_are_sent_exactly(dtype, size):
    values = torch.randperm(size, generator=torch.Generator().manual_seed(size)).sub(size // 2).to(dtype)
    count = math.ceil(0.1 * size)
    decoded = received(TopK(ratio=0.1), bucket(values))
    order = values.double().abs().sort(descending=True).values
    kept = decoded != 0
    assert int(kept.sum()) == count
    assert torch.equal(decoded[kept], values[kept])
    assert values[kept].double().abs().min() >= order[count - 1]


def test_indices_are_ascending_and_come_first():
    data = sent(TopK(ratio=0.3), bucket(torch.tensor([0, 9, 1, -8, 0, 0, 0, 0, 7.5, 0])))
    assert indices_in(data, 3) == [1, 3, 8]
    assert data[12:].view(torch.float32).tolist() == [9, -8, 7.5]


@pytest.mark.parametrize(("ratio", "count"), [(0.001, 1), (0.1, 1), (0.11, 2), (0.2, 2), (0.21, 3), (0.4, 4)])
def test_the_count_is_rounded_up(ratio, count):
    gradient = bucket(torch.arange(10.0))
    assert sent(TopK(ratio=ratio), gradient).numel() == 8 * count
    assert TopK(ratio=ratio).sizes(gradient.shape) == {8 * count}


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_elements_the_first_are_sent(dtype):
    values = torch.ones(20, dtype=dtype)
    values[1::2] = -1
    values[17] = 2
    assert indices_in(sent(TopK(ratio=0.2), bucket(values)), 4) == [0, 1, 2, 17]
    assert indices_in(sent(TopK(ratio=0.2), bucket(torch.zeros(20, dtype=dtype))), 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_counts_as_the_largest(dtype):
    values = torch.arange(20).to(dtype)
    values[[3, 5, 8]] = torch.tensor([math.nan, -math.inf, -math.nan]).to(dtype)
    assert indices_in(sent(TopK(ratio=0.2), bucket(values)), 4) == [3, 5, 8, 19]
    assert indices_in(sent(TopK(ratio=0.1), bucket(values)), 2) == [3, 8]


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1, 1.0])
def test_a_bucket_that_would_not_shrink_goes_as_it_is(ratio):
    values = torch.arange(10.0)
    assert torch.equal(sent(TopK(ratio=ratio), bucket(values)).view(torch.float32), values)


@pytest.mark.parametrize(
    "indices", [[1, 1, 2], [2, 1, 3], [-1, 1, 2], [7, 8, 10], [0, 1, 2**31 - 1], [-(2**31), 0, 1], [5, 5, 5]]
)
def test_indices_that_are_beyond_or_not_ascending_are_refused(indices):
    data = sent(TopK(ratio=0.3), bucket(torch.arange(10.0)))
    data[:12] = torch.tensor(indices, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(InvalidRequest, match=r"bucket 0: expected 3 different ascending indices below 10"):
        TopK(ratio=0.3).decode(data, bucket(torch.arange(10.0)).shape)


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, math.nan, math.inf, True, "0.1", None, [0.1]])
def test_a_ratio_is_above_0_and_at_most_1(ratio):
    with pytest.raises(InvalidRequest, match="TopK: ratio must be a number above 0 and at most 1"):
        TopK(ratio=ratio)
