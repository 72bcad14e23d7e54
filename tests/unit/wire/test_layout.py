import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pserver.errors import InvalidRequest, UnsupportedModel
from pserver.wire import layout as layout_module
from pserver.wire.layout import (
    ALIGNMENT_BYTES,
    BUFFERS,
    MAX_BUCKET_BYTES,
    MAX_BUCKETS,
    MAX_DIMENSIONS,
    MAX_MODEL_BYTES,
    MAX_NAME_LENGTH,
    MIN_BUCKET_BYTES,
    STORED,
    TARGET_NUM_BUCKETS,
    TensorSpec,
    build_layout,
    first_difference,
)

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex128)


def spec(name, *shape, dtype=torch.float32, group=0):
    return TensorSpec(name=name, shape=shape, dtype=dtype, group=group)


@st.composite
def models(draw):
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    rows = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.integers(BUFFERS, 2)), max_size=12))
    tensors = [spec("trained", draw(st.integers(1, 200)))]
    tensors += [spec(f"t{i}", *shape, dtype=dtype, group=group) for i, (shape, dtype, group) in enumerate(rows)]
    return draw(st.permutations(tensors))


bucket_sizes = st.sampled_from([0, 64, 128, 192, 1024])
kinds = st.booleans()


@given(models(), bucket_sizes, kinds)
def test_buckets_partition_the_flats(tensors, bucket_bytes, whole):
    layout = build_layout(tensors, bucket_bytes, whole_tensors=whole)
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for number, flat in enumerate(layout.flats):
        buckets = [bucket for bucket in layout.buckets if bucket.flat == number]
        ends = [0, *(bucket.stop for bucket in buckets)]
        assert [bucket.start for bucket in buckets] == ends[:-1]
        assert ends[-1] == flat.num_elements
        assert all((bucket.dtype, bucket.group) == (flat.dtype, flat.group) for bucket in buckets)


@given(models(), bucket_sizes)
def test_buckets_are_never_empty_nor_larger_than_asked(tensors, bucket_bytes):
    layout = build_layout(tensors, bucket_bytes)
    assert all(0 < bucket.num_bytes <= layout.bucket_bytes for bucket in layout.buckets)


@given(models(), bucket_sizes, kinds)
def test_every_element_of_every_tensor_lies_in_exactly_one_segment(tensors, bucket_bytes, whole):
    layout = build_layout(tensors, bucket_bytes, whole_tensors=whole)
    found = [[] for _ in tensors]
    for bucket, segments in zip(layout.buckets, layout.segments, strict=True):
        for segment in segments:
            assert 0 <= segment.start < segment.stop <= bucket.num_elements
            assert segment.offset == len(found[segment.tensor])
            found[segment.tensor] += range(bucket.start + segment.start, bucket.start + segment.stop)
            assert bucket.flat == layout.places[segment.tensor].flat
    for tensor, place, elements in zip(tensors, layout.places, found, strict=True):
        assert elements == list(range(place.offset, place.offset + tensor.num_elements))


@given(models(), bucket_sizes, kinds)
def test_segments_of_a_bucket_are_in_order_and_do_not_overlap(tensors, bucket_bytes, whole):
    for segments in build_layout(tensors, bucket_bytes, whole_tensors=whole).segments:
        assert segments
        borders = [border for segment in segments for border in (segment.start, segment.stop)]
        assert borders == sorted(borders)


@given(models(), bucket_sizes, kinds)
def test_tensors_and_buckets_start_at_64_bytes_in_their_flat(tensors, bucket_bytes, whole):
    layout = build_layout(tensors, bucket_bytes, whole_tensors=whole)
    for tensor, place in zip(tensors, layout.places, strict=True):
        assert place.offset * tensor.dtype.itemsize % ALIGNMENT_BYTES == 0
    for bucket in layout.buckets:
        assert bucket.start * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0


@given(models(), bucket_sizes)
def test_a_bucket_that_cuts_a_tensor_starts_at_64_bytes_of_that_tensor(tensors, bucket_bytes):
    layout = build_layout(tensors, bucket_bytes)
    for bucket, segments in zip(layout.buckets, layout.segments, strict=True):
        into_tensor = bucket.start + segments[0].start - layout.places[segments[0].tensor].offset
        assert into_tensor * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0


@given(models(), bucket_sizes)
def test_whole_tensors_lie_in_one_bucket_each(tensors, bucket_bytes):
    layout = build_layout(tensors, bucket_bytes, whole_tensors=True)
    found = [segment for segments in layout.segments for segment in segments]
    assert sorted(segment.tensor for segment in found) == [i for i, each in enumerate(tensors) if each.num_elements]
    assert all(segment.stop - segment.start == tensors[segment.tensor].num_elements for segment in found)


@given(models(), bucket_sizes)
def test_whole_tensors_share_a_bucket_as_long_as_they_fit_in(tensors, bucket_bytes):
    layout = build_layout(tensors, bucket_bytes, whole_tensors=True)
    assert all(segments for segments in layout.segments)
    for bucket, segments in zip(layout.buckets, layout.segments, strict=True):
        assert bucket.num_bytes <= layout.bucket_bytes or len(segments) == 1
    for bucket, following, segments in zip(layout.buckets, layout.buckets[1:], layout.segments[1:], strict=False):
        if following.flat == bucket.flat:
            first = tensors[segments[0].tensor]
            padded = -(-first.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            assert bucket.num_bytes + padded > layout.bucket_bytes


def test_a_tensor_larger_than_a_bucket_has_one_of_its_own():
    layout = build_layout([spec("a", 16), spec("big", 100, 10), spec("b", 3), spec("c", 4)], 128, whole_tensors=True)
    assert [[segment.tensor for segment in segments] for segments in layout.segments] == [[0], [1], [2, 3]]


@given(models())
def test_a_flat_holds_one_dtype_and_one_group(tensors):
    layout = build_layout(tensors)
    keys = [(flat.dtype, flat.group) for flat in layout.flats]
    assert len(set(keys)) == len(keys)
    for tensor, place in zip(tensors, layout.places, strict=True):
        assert keys[place.flat] == (tensor.dtype, tensor.group)


@given(models(), bucket_sizes, kinds)
def test_equal_models_have_equal_layouts(tensors, bucket_bytes, whole):
    again = [dataclasses.replace(tensor) for tensor in tensors]
    assert build_layout(tensors, bucket_bytes, whole_tensors=whole) == build_layout(
        again, bucket_bytes, whole_tensors=whole
    )


def test_the_fingerprint_is_the_same_in_every_process():
    layout = build_layout([spec("w", 3, 4), spec("running", 4, dtype=torch.float64, group=STORED)], 64)
    assert layout.fingerprint == 705604083909184541  # another number means another PROTOCOL_VERSION


@pytest.mark.parametrize(
    "other",
    [
        [spec("x", 3, 4), spec("b", 4)],
        [spec("w", 4, 3), spec("b", 4)],
        [spec("w", 3, 4, dtype=torch.float64), spec("b", 4)],
        [spec("w", 3, 4, group=1), spec("b", 4)],
        [spec("b", 4), spec("w", 3, 4)],
        [spec("w", 3, 4)],
        [spec("w' (3, 4) 1 0\n'b", 3, 4), spec("b", 4)],
    ],
)
def test_the_fingerprint_tells_models_apart(other):
    assert build_layout(other, 64).fingerprint != build_layout([spec("w", 3, 4), spec("b", 4)], 64).fingerprint


def test_the_fingerprint_tells_bucket_sizes_apart():
    assert build_layout([spec("w", 9)], 64).fingerprint != build_layout([spec("w", 9)], 128).fingerprint


def test_the_fingerprint_tells_layouts_of_whole_tensors_apart():
    cut, whole = (build_layout([spec("w", 9)], 64, whole_tensors=each) for each in (False, True))
    assert (cut.whole_tensors, whole.whole_tensors) == (False, True)
    assert cut.fingerprint != whole.fingerprint


@pytest.mark.parametrize(("num_bytes", "bucket_bytes"), [(64, MIN_BUCKET_BYTES), (1 << 30, MAX_BUCKET_BYTES)])
def test_bucket_sizes_chosen_for_very_small_and_very_large_models_are_bounded(num_bytes, bucket_bytes):
    assert build_layout([spec("w", num_bytes // 4)]).bucket_bytes == bucket_bytes


def test_a_model_of_middle_size_is_cut_into_about_sixteen_buckets():
    layout = build_layout([spec("w", 1000, 1000), spec("b", 1003)])
    assert len(layout.buckets) == TARGET_NUM_BUCKETS


def test_zero_size_tensors_have_a_place_and_no_segment():
    layout = build_layout([spec("empty", 0, 7), spec("w", 5), spec("none", 5, 0)])
    assert {segment.tensor for segments in layout.segments for segment in segments} == {1}
    assert len(layout.places) == 3


@pytest.mark.parametrize(
    "tensors", [[], [spec("w", 0)], [spec("w", 3, group=STORED)], [spec("w", 3, group=BUFFERS), spec("v", 0)]]
)
def test_a_model_with_nothing_to_train_is_refused(tensors):
    with pytest.raises(UnsupportedModel, match="no parameter to train"):
        build_layout(tensors)


def test_an_element_type_that_cannot_travel_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="float8_e4m3fn"):
        build_layout([spec("w", 3), spec("scale", 3, dtype=torch.float8_e4m3fn, group=STORED)])


@pytest.mark.parametrize("bucket_bytes", [-64, 1, 63, 100])
def test_bucket_sizes_that_would_cut_a_vector_are_refused(bucket_bytes):
    with pytest.raises(InvalidRequest, match="multiple of 64"):
        build_layout([spec("w", 3)], bucket_bytes)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([spec("w", 3), spec("v", 2, -1)], "'v'"),
        ([spec("w", 3), spec("v", 2, group=BUFFERS - 1)], "'v'.*must be 0 or more"),
        ([spec("w", 3), spec("", 2)], "tensor 1: a name must have 1 to 1024 characters, but this one has 0"),
        ([spec("w", 3), spec("n" * (MAX_NAME_LENGTH + 1), 2)], "but this one has 1025: 'n{40}'$"),
        ([spec("w", 3), spec("v", *[1] * (MAX_DIMENSIONS + 1))], "'v': at most 64 dimensions"),
        ([spec("w", 3), spec("v", *[1 << 62] * MAX_DIMENSIONS)], "'v'"),
        ([spec("w", 3), spec("v", 0, 1 << 40, 1 << 40)], "'v'"),
        ([spec("w", 3), spec("w", 3)], "two tensors are named 'w'"),
        ([spec("w", MAX_MODEL_BYTES // 4), spec("v", 1)], "'v'"),
    ],
)
def test_descriptions_that_no_client_sends_are_refused_by_tensor(tensors, message):
    with pytest.raises(InvalidRequest, match=message):
        build_layout(tensors)


def test_names_and_dimensions_at_the_limit_are_accepted():
    build_layout([spec("n" * MAX_NAME_LENGTH, *[1] * MAX_DIMENSIONS)])


def test_a_model_with_too_many_tensors_is_refused(monkeypatch):
    monkeypatch.setattr(layout_module, "MAX_TENSORS", 2)
    with pytest.raises(InvalidRequest, match="2 tensors, but this one has 3"):
        build_layout([spec(name, 1) for name in "abc"])


def test_parameter_order_that_differs_between_workers_is_named():
    ours = [spec("a", 2), spec("b", 3), spec("c", 4)]
    difference = first_difference(ours, [ours[0], ours[2], ours[1]])
    assert difference == "tensor 1: expected 'b' [3] float32 group 0, got 'c' [4] float32 group 0"


def test_a_missing_or_additional_tensor_is_named():
    ours = [spec("a", 2), spec("b", 3, group=STORED)]
    assert first_difference(ours, [ours[0], spec("b", 3, group=BUFFERS)]) == (
        "tensor 1: expected 'b' [3] float32 stored, got 'b' [3] float32 buffer"
    )
    assert first_difference(ours, ours[:1]) == "tensor 1: expected 'b' [3] float32 stored, got none"
    assert first_difference(ours[:1], ours) == "tensor 1: expected none, got 'b' [3] float32 stored"


@given(models())
def test_equal_models_have_no_difference(tensors):
    assert first_difference(tensors, [dataclasses.replace(tensor) for tensor in tensors]) is None


def test_sizes_count_elements_and_bytes():
    tensor = spec("w", 3, 5, dtype=torch.float16)
    assert (tensor.num_elements, tensor.num_bytes) == (15, 30)
    assert spec("scalar").num_elements == math.prod(()) == 1


def test_a_bucket_size_that_would_make_absurdly_many_buckets_is_refused_before_they_are_made():
    tensors = [layout_module.TensorSpec(name="w", shape=(1 << 40,), dtype=torch.float32, group=0)]
    with pytest.raises(InvalidRequest, match="choose a larger bucket_bytes"):
        build_layout(tensors, 64)


def test_so_many_groups_that_there_are_too_many_buckets_are_refused(monkeypatch):
    monkeypatch.setattr(layout_module, "MAX_BUCKETS", 2)
    tensors = [spec(f"t{group}", 1, group=group) for group in range(3)]
    with pytest.raises(InvalidRequest, match="3 of them, in 3 flats"):
        build_layout(tensors)


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
def test_the_size_chosen_grows_until_there_are_not_too_many_buckets(monkeypatch, whole):
    monkeypatch.setattr(layout_module, "MAX_BUCKETS", 5)
    layout = build_layout([spec(f"t{i}", 1000) for i in range(40)], whole_tensors=whole)
    assert 1 < len(layout.buckets) <= 5


def test_the_largest_model_has_a_layout():
    layout = build_layout([spec("w", MAX_MODEL_BYTES // 4)])
    assert len(layout.buckets) == MAX_BUCKETS
