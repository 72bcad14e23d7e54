from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.staging import Staging
from pserver.transport import chunks as chunks_module
from pserver.transport.chunks import LARGE_BYTES, MESSAGE_BYTES, ChunkPacker
from pserver.wire.layout import MAX_BUCKET_BYTES, TensorSpec, build_layout
from pserver.wire.tensors import memory_of, to_bytes

SMALL_MESSAGE_BYTES = 100


def buckets_of(bucket_bytes, *tensors):
    specs = [
        TensorSpec(name=f"t{index}", shape=(size,), dtype=dtype, group=0) for index, (size, dtype) in enumerate(tensors)
    ]
    return build_layout(specs, bucket_bytes).buckets


def packed(buckets, values):
    packer = ChunkPacker()
    messages = [
        message
        for bucket in buckets
        for message in packer.add(bucket.index, memory_of(values[bucket.index]), bucket.dtype)
    ]
    rest = packer.rest()
    return [*messages, rest] if rest else messages


@pytest.fixture
def small_messages(monkeypatch):
    monkeypatch.setattr(chunks_module, "MESSAGE_BYTES", SMALL_MESSAGE_BYTES)


small = pytest.mark.usefixtures("small_messages")
sizes = st.lists(
    st.tuples(st.integers(1, 200), st.sampled_from([torch.float32, torch.float16, torch.int8])), min_size=1, max_size=5
)


@small
@given(sizes, st.sampled_from([64, 128, 320]))
def test_buckets_round_trip_through_messages(tensors, bucket_bytes):
    buckets = buckets_of(bucket_bytes, *tensors)
    values = {bucket.index: torch.randint(-99, 99, (bucket.num_elements,)).to(bucket.dtype) for bucket in buckets}
    staging = Staging(buckets)
    for message in packed(buckets, values):
        for chunk in message:
            staging.add_chunk(chunk.bucket, chunk.offset_bytes, chunk.dtype, chunk.data)
    staged = staging.complete()
    assert all(torch.equal(staged[index], values[index]) for index in values)


@small
@given(sizes, st.sampled_from([64, 128, 320]))
def test_messages_are_full_but_never_too_full(tensors, bucket_bytes):
    buckets = buckets_of(bucket_bytes, *tensors)
    values = {bucket.index: torch.zeros(bucket.num_elements, dtype=bucket.dtype) for bucket in buckets}
    sizes = [[len(chunk.data) for chunk in message] for message in packed(buckets, values)]
    assert all(0 < sum(message) <= SMALL_MESSAGE_BYTES for message in sizes)
    for message, following in pairwise(sizes):
        assert 2 * message[-1] > SMALL_MESSAGE_BYTES or sum(message) + following[0] > SMALL_MESSAGE_BYTES


@small
def test_a_chunk_never_crosses_a_bucket():
    buckets = buckets_of(64, (16, torch.float32), (16, torch.float32))
    values = {0: torch.zeros(16), 1: torch.ones(16)}
    chunks = [chunk for message in packed(buckets, values) for chunk in message]
    assert [(chunk.bucket, chunk.offset_bytes, len(chunk.data)) for chunk in chunks] == [(0, 0, 64), (1, 0, 64)]
    assert chunks[1].data == to_bytes(values[1])


def test_a_bucket_that_is_larger_than_a_message_is_cut_into_several():
    elements = MESSAGE_BYTES  # of 4 bytes each
    buckets = buckets_of(4 * MESSAGE_BYTES, (elements, torch.float32))
    messages = packed(buckets, {0: torch.zeros(elements)})
    assert [sum(len(chunk.data) for chunk in message) for message in messages] == [MESSAGE_BYTES] * 4


def test_the_largest_bucket_that_is_made_by_default_goes_in_one_message():
    assert MAX_BUCKET_BYTES <= MESSAGE_BYTES


def test_nothing_waits_behind_a_large_piece():
    """It would be copied if its bucket could change meanwhile."""
    packer = ChunkPacker()
    for bucket in buckets_of(LARGE_BYTES, *[(LARGE_BYTES // 4, torch.float32)] * 3):
        ((chunk,),) = packer.add(bucket.index, memoryview(bytes(LARGE_BYTES)), bucket.dtype)
        assert chunk.bucket == bucket.index
    assert not packer.rest()


def test_many_small_buckets_share_a_message():
    buckets = buckets_of(64, *[(16, torch.float32)] * 10)
    (rest,) = packed(buckets, dict.fromkeys(range(10), torch.zeros(16)))
    assert [chunk.bucket for chunk in rest] == list(range(10))


def test_a_chunk_that_is_kept_keeps_its_bytes_when_the_buffer_is_used_again():
    (bucket,) = buckets_of(64, (16, torch.float32))
    buffer = torch.ones(16)
    packer = ChunkPacker()
    assert list(packer.add(bucket.index, memory_of(buffer), bucket.dtype)) == []
    packer.keep()
    buffer.zero_()
    (chunk,) = packer.rest()
    assert chunk.data == to_bytes(torch.ones(16))


def test_what_is_left_is_taken_once():
    (bucket,) = buckets_of(64, (16, torch.float32))
    packer = ChunkPacker()
    assert packer.rest() == []
    list(packer.add(bucket.index, bytes(64), bucket.dtype))
    assert len(packer.rest()) == 1
    assert packer.rest() == []


def test_what_is_kept_is_copied_once():
    buckets = buckets_of(64, *[(16, torch.float32)] * 3)
    packer = ChunkPacker()
    values = torch.ones(16)
    for bucket in buckets:
        assert not list(packer.add(bucket.index, memory_of(values), bucket.dtype))
        packer.keep()
    first, *_ = kept = packer.rest()
    values.zero_()
    assert [chunk.data for chunk in kept] == [to_bytes(torch.ones(16))] * 3

    list(packer.add(0, first.data, torch.float32))
    packer.keep()
    again = packer._chunks[0].data
    list(packer.add(1, memory_of(values), torch.float32))
    packer.keep()
    assert packer._chunks[0].data is again
