import dataclasses
from itertools import pairwise

import pytest
import torch
from core_builders import tensor_spec
from hypothesis import given
from hypothesis import strategies as st

from pserver.core import state_staging as module
from pserver.core.state_staging import MAX_KEY_LENGTH, StateChunk, StateStaging
from pserver.errors import InvalidRequest, PserverError
from pserver.wire.layout import build_layout
from pserver.wire.tensors import element_type, to_bytes

FLOAT32 = element_type(torch.float32).code
#: Two buckets of 16 float32 elements.
BUCKETS = build_layout([tensor_spec("w", 20)], 64).buckets


def chunk(data=b"", *, offset_bytes=0, bucket=0, tensor=0, key="exp_avg", start=0, shape=(4,), dtype_code=FLOAT32):
    return StateChunk(
        bucket=bucket,
        tensor=tensor,
        key=key,
        start=start,
        shape=shape,
        dtype_code=dtype_code,
        is_plain=False,
        plain=None,
        offset_bytes=offset_bytes,
        data=data,
    )


def plain(value, *, key="step", tensor=0, bucket=0):
    return dataclasses.replace(
        chunk(key=key, tensor=tensor, bucket=bucket, start=None, shape=(), dtype_code=0), is_plain=True, plain=value
    )


def staged(*chunks, buckets=BUCKETS):
    staging = StateStaging(buckets)
    for each in chunks:
        staging.add_chunk(each)
    return staging.complete()


@given(
    st.lists(
        st.tuples(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.complex64]), st.integers(0, 20)),
        max_size=5,
    ),
    st.lists(st.integers(1, 159), max_size=4),
)
def test_values_arrive_in_chunks_of_any_size(values, cuts):
    sent = {f"key {number}": (torch.arange(size) - 3).to(dtype) for number, (dtype, size) in enumerate(values)}
    staging = StateStaging(BUCKETS)
    for number, (key, value) in enumerate(sent.items()):
        data = to_bytes(value)
        borders = sorted({0, len(data), *(each for each in cuts if each < len(data))})
        for begin, end in pairwise(borders) if data else [(0, 0)]:
            code = element_type(value.dtype).code
            about = {"bucket": number % 2, "key": key, "shape": tuple(value.shape), "dtype_code": code}
            staging.add_chunk(chunk(data[begin:end], offset_bytes=begin, **about))
    found = staging.complete()
    assert all(found[bucket] for bucket in found)
    assert {piece.key: bucket for bucket, pieces in found.items() for piece in pieces} == {
        key: number % 2 for number, key in enumerate(sent)
    }
    for pieces in found.values():
        for piece in pieces:
            assert piece.value.dtype == sent[piece.key].dtype
            assert torch.equal(piece.value, sent[piece.key])


def test_a_value_keeps_its_name_its_shape_and_where_it_starts():
    (piece,) = staged(chunk(bytes(16), tensor=0, key="k", start=16, shape=(2, 2), bucket=1))[1]
    assert (piece.tensor, piece.key, piece.start, piece.value.shape) == (0, "k", 16, (2, 2))


@pytest.mark.parametrize("value", [None, False, 0, 7, 1.5, "text"], ids=repr)
def test_plain_values_arrive_as_they_are(value):
    (piece,) = staged(plain(value))[0]
    assert (piece.key, piece.start, piece.value) == ("step", None, value)
    assert type(piece.value) is type(value)


def test_plain_values_and_tensors_follow_each_other():
    pieces = staged(plain(1), chunk(bytes(8)), chunk(bytes(8), offset_bytes=8), plain(2, tensor=1))[0]
    assert [(each.tensor, each.key) for each in pieces] == [(0, "step"), (0, "exp_avg"), (1, "step")]


def test_without_chunks_there_is_no_state():
    assert staged() == {}


@pytest.mark.parametrize("key", ["", "k" * (MAX_KEY_LENGTH + 1)], ids=["none", "too long"])
def test_a_value_without_a_reasonable_name_is_refused(key):
    with pytest.raises(InvalidRequest, match=f"a name of 1 to {MAX_KEY_LENGTH} characters"):
        staged(chunk(bytes(16), key=key))


@pytest.mark.parametrize(
    "second",
    [
        chunk(bytes(8), offset_bytes=4),
        chunk(bytes(8), offset_bytes=12),
        chunk(bytes(8), offset_bytes=-8),
        chunk(bytes(8), offset_bytes=8, key="other"),
        chunk(bytes(8), offset_bytes=8, tensor=1),
        chunk(bytes(8), offset_bytes=8, bucket=1),
        chunk(bytes(8), offset_bytes=8, start=None),
    ],
    ids=["overlap", "gap", "negative", "key", "tensor", "bucket", "start"],
)
def test_a_chunk_that_does_not_follow_the_one_before_is_refused(second):
    with pytest.raises(InvalidRequest, match="does not follow the one before"):
        staged(chunk(bytes(8)), second)


def test_a_value_that_begins_in_the_middle_is_refused():
    with pytest.raises(InvalidRequest, match="from byte 8 on does not follow"):
        staged(chunk(bytes(8), offset_bytes=8))


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(bytes(12))],
        [chunk(bytes(20))],
        [chunk(bytes(12)), chunk(bytes(8), offset_bytes=12)],
        [chunk(bytes(12)), plain(1)],
        [chunk(bytes(8), shape=(1 << 40,))],
        [chunk(bytes(16), shape=(-4,))],
        [chunk(bytes(16), shape=(-2, -2))],
        [chunk(b"", shape=(0, -1))],
        [chunk(bytes(16), dtype_code=0)],
        [chunk(bytes(16), dtype_code=99)],
    ],
    ids=lambda chunks: f"{len(chunks)} {chunks[0].shape} {chunks[0].dtype_code}",
)
def test_a_value_whose_bytes_do_not_fit_its_shape_is_refused(chunks):
    with pytest.raises(InvalidRequest):
        staged(*chunks)


def test_a_value_that_comes_twice_is_refused():
    with pytest.raises(InvalidRequest, match="'exp_avg' of tensor 0 came twice"):
        staged(chunk(bytes(16)), plain(3), chunk(bytes(16)))


def test_parts_of_one_value_in_several_buckets_are_different_values():
    found = staged(chunk(bytes(16), bucket=0, start=0), chunk(bytes(16), bucket=1, start=16))
    assert {bucket: [each.start for each in pieces] for bucket, pieces in found.items()} == {0: [0], 1: [16]}


@pytest.mark.parametrize("bucket", [-1, 2, 1 << 30])
def test_state_of_a_bucket_that_is_not_expected_is_refused(bucket):
    with pytest.raises(InvalidRequest, match=f"bucket {bucket}"):
        staged(chunk(bytes(16), bucket=bucket))


def test_a_promise_of_more_state_than_any_optimizer_keeps_is_refused_before_it_comes(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES_BESIDE", 0)
    most = module.MAX_BYTES_PER_ELEMENT * sum(each.num_elements for each in BUCKETS)
    with pytest.raises(InvalidRequest, match="more state than"):
        staged(chunk(b"", shape=(most // 4 + 1,)))


def test_many_small_values_count_as_much_state_too(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES_BESIDE", 0)
    with pytest.raises(InvalidRequest, match="more state than"):
        staged(*(plain(number, key=f"key {number}") for number in range(10_000)))


def test_a_reader_that_trusts_the_sender_takes_any_bucket():
    assert staged(chunk(bytes(16), bucket=99), buckets=None).keys() == {99}


@given(
    st.lists(
        st.builds(
            chunk,
            st.binary(max_size=20),
            offset_bytes=st.integers(-1, 20),
            bucket=st.integers(-1, 2),
            tensor=st.integers(-1, 2),
            key=st.sampled_from(["", "a", "b"]),
            start=st.none() | st.integers(-1, 20),
            shape=st.lists(st.integers(-1, 5), max_size=3).map(tuple),
            dtype_code=st.integers(0, 13),
        ),
        max_size=4,
    )
)
def test_whatever_comes_is_taken_or_refused_by_name(chunks):
    try:
        found = staged(*chunks)
    except PserverError:
        return
    for pieces in found.values():
        assert all(each.key in ("a", "b") for each in pieces)
