from itertools import pairwise

import pytest
import torch
from core_builders import tensor_spec
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.staging import Staging
from pserver.errors import InvalidRequest
from pserver.wire.layout import build_layout
from pserver.wire.tensors import element_type, to_bytes

FLOAT32 = element_type(torch.float32).code
FLOAT16 = element_type(torch.float16).code


@pytest.fixture
def buckets():
    """Of 64, 64 and 64 bytes: two of float32 and one of float16."""
    return build_layout([tensor_spec("w", 20), tensor_spec("h", 32, dtype=torch.float16)], 64).buckets


@pytest.fixture
def staging(buckets):
    return Staging(buckets)


@given(st.lists(st.integers(1, 63), max_size=5), st.randoms())
def test_buckets_arrive_in_chunks_of_any_size_and_interleaved(cuts, random):
    buckets = build_layout([tensor_spec("w", 20), tensor_spec("h", 32, dtype=torch.float16)], 64).buckets
    values = {each.index: torch.randn(each.num_elements, dtype=each.dtype) for each in buckets}
    borders = [0, *sorted(set(cuts)), 64]
    waiting = {
        each.index: [(start, to_bytes(values[each.index])[start:stop]) for start, stop in pairwise(borders)]
        for each in buckets
    }
    staging = Staging(buckets)
    while waiting:
        index = random.choice(list(waiting))
        offset, data = waiting[index].pop(0)
        staging.add_chunk(index, offset, element_type(buckets[index].dtype).code, data)
        if not waiting[index]:
            del waiting[index]
    staged = staging.complete()
    assert staged.keys() == values.keys()
    assert all(torch.equal(staged[index], values[index]) for index in values)


def test_an_fp16_buffer_that_is_read_as_fp32_is_refused(staging):
    with pytest.raises(InvalidRequest, match=r"bucket 2 holds torch\.float16, but the chunk holds torch\.float32"):
        staging.add_chunk(2, 0, FLOAT32, bytes(64))
    with pytest.raises(InvalidRequest, match=r"bucket 0 holds torch\.float32, but the chunk holds torch\.float16"):
        staging.add_chunk(0, 0, FLOAT16, bytes(64))


def test_a_code_that_the_protocol_does_not_have_is_refused(staging):
    with pytest.raises(InvalidRequest, match="code 0 is unknown"):
        staging.add_chunk(0, 0, 0, bytes(64))


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(8, 8), (0, 8), (20, 8), (-16, 8), (16, 0), (16, 49)],
    ids=["overlap", "repeat", "gap", "negative", "empty", "beyond the end"],
)
def test_chunks_that_do_not_continue_their_bucket_are_refused(staging, offset, num_bytes):
    staging.add_chunk(0, 0, FLOAT32, bytes(16))
    with pytest.raises(InvalidRequest, match=f"from byte 16 on, got {num_bytes} bytes from byte {offset} on"):
        staging.add_chunk(0, offset, FLOAT32, bytes(num_bytes))


def test_a_refused_chunk_leaves_what_came_before_it(staging, buckets):
    staging.add_chunk(0, 0, FLOAT32, b"\1" * 16)
    with pytest.raises(InvalidRequest):
        staging.add_chunk(0, 4, FLOAT32, b"\2" * 16)
    staging.add_chunk(0, 16, FLOAT32, b"\1" * 48)
    staging.add_chunk(1, 0, FLOAT32, bytes(64))
    staging.add_chunk(2, 0, FLOAT16, bytes(64))
    assert to_bytes(staging.complete()[0]) == b"\1" * 64


@pytest.mark.parametrize("bucket", [-1, 3, 1 << 31])
def test_a_bucket_of_somebody_else_is_refused(staging, bucket):
    with pytest.raises(InvalidRequest, match=f"bucket {bucket} is not expected here"):
        staging.add_chunk(bucket, 0, FLOAT32, bytes(64))


def test_a_stream_that_ends_early_is_refused_and_says_what_is_missing(staging):
    staging.add_chunk(0, 0, FLOAT32, bytes(64))
    staging.add_chunk(1, 0, FLOAT32, bytes(48))
    with pytest.raises(InvalidRequest, match="bucket 1 is incomplete: 48 of 64 bytes"):
        staging.complete()


def test_whether_anything_has_come_is_known(staging):
    assert staging.empty
    staging.add_chunk(0, 0, FLOAT32, bytes(4))
    assert not staging.empty


def test_a_stream_for_no_buckets_is_complete_at_once():
    assert Staging([]).complete() == {}
