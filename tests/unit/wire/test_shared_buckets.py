"""Where buckets and their words lie in a piece of memory, and what of it is refused."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pserver.errors import SharedMemoryUnavailable
from pserver.wire.layout import BUFFERS, STORED, Layout, TensorSpec, build_layout
from pserver.wire.shared_buckets import BucketOffsets, SharedBuckets, tensor_over

FINGERPRINTS = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def layout_of(*sizes: int, bucket_bytes: int = 64) -> Layout:
    """Tensors of so many elements, by turns float32 in two groups, float16, a buffer and a stored integer."""
    kinds = [
        (torch.float32, 0),
        (torch.float32, 1),
        (torch.float16, 0),
        (torch.float64, BUFFERS),
        (torch.int64, STORED),
    ]
    specs = [
        TensorSpec(name=f"t{number}", shape=(size,), dtype=kinds[number % 5][0], group=kinds[number % 5][1])
        for number, size in enumerate(sizes)
    ]
    return build_layout(specs, bucket_bytes)


def shared(layout: Layout, more_bytes: int = 0) -> SharedBuckets:
    """Every bucket of a model, in memory of this process."""
    offsets = BucketOffsets(layout.buckets)
    return SharedBuckets(memoryview(bytearray(offsets.num_bytes + more_bytes)), offsets)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.sampled_from([64, 128, 1024]), st.data())
def test_buckets_lie_behind_the_words_aligned_and_apart(
    sizes: list[int], bucket_bytes: int, data: st.DataObject
) -> None:
    layout = layout_of(*sizes, bucket_bytes=bucket_bytes)
    owned = [bucket for bucket in layout.buckets if data.draw(st.booleans())]
    offsets = BucketOffsets(owned)
    places = [offsets.range_of(bucket.index) for bucket in owned]
    assert [place.stop - place.start for place in places] == [bucket.num_bytes for bucket in owned]
    assert all(place.start % 64 == 0 for place in places)
    assert all(before.stop <= after.start for before, after in pairwise(places))
    assert offsets.first_byte % 4096 == 0
    assert offsets.first_byte >= 8 * (8 + len(owned))
    assert all(offsets.first_byte <= place.start and place.stop <= offsets.num_bytes for place in places)
    assert [offsets.number_of(bucket.index) for bucket in owned] == list(range(len(owned)))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.data())
def test_a_run_is_one_stretch_of_its_flat_and_of_the_memory(sizes: list[int], data: st.DataObject) -> None:
    layout = layout_of(*sizes)
    owned = [bucket for bucket in layout.buckets if data.draw(st.booleans())]
    offsets = BucketOffsets(owned)
    runs = offsets.runs()
    assert [bucket for run in runs for bucket in run] == owned
    for run in runs:
        for before, after in pairwise(run):
            assert (before.flat, before.stop) == (after.flat, after.start)
            assert offsets.range_of(before.index).stop == offsets.range_of(after.index).start
    for before, after in pairwise(runs):
        assert (before[-1].flat, before[-1].stop) != (after[0].flat, after[0].start), "they could be one"


def test_everything_of_a_model_is_a_run_for_each_flat() -> None:
    layout = layout_of(100, 40, 33, 9, 5)
    assert [run[0].flat for run in BucketOffsets(layout.buckets).runs()] == [0, 1, 2, 3, 4]


def test_more_words_than_fit_a_page_push_the_buckets_back() -> None:
    layout = layout_of(16 * 600)
    assert len(layout.buckets) == 600
    offsets = BucketOffsets(layout.buckets)
    assert offsets.first_byte == 8192
    shared(layout).set_word(599, 7)


def test_nothing_owned_is_a_header_alone() -> None:
    offsets = BucketOffsets(())
    assert (offsets.num_bytes, offsets.runs()) == (4096, [])
    empty = SharedBuckets(memoryview(bytearray(4096)), offsets)
    empty.label(1, 2)
    empty.require(1, 2)
    assert empty.words() == []


# Words and buckets


def test_words_are_of_their_bucket_alone_and_touch_no_values() -> None:
    layout = layout_of(100)
    buckets = shared(layout)
    numbers = [bucket.index for bucket in layout.buckets]
    for number in numbers:
        buckets.set_word(number, 1000 + number)
    assert buckets.words() == [1000 + number for number in numbers]
    assert [buckets.word(number) for number in numbers] == buckets.words()
    assert not any(any(buckets.bytes_of(number)) for number in numbers)
    for value in (0, (1 << 62) + 1, -1):
        buckets.set_word(3, value)
        assert buckets.word(3) == value


def test_values_are_of_their_bucket_alone_and_touch_no_words() -> None:
    layout = layout_of(100, 40, 33)
    buckets = shared(layout)
    buckets.label(5, 6)
    for bucket in layout.buckets:
        buckets.tensor_of(bucket).fill_(bucket.index + 1)
    for bucket in layout.buckets:
        assert buckets.tensor_of(bucket).dtype == bucket.dtype
        assert buckets.tensor_of(bucket).eq(bucket.index + 1).all()
        assert bytes(buckets.bytes_of(bucket.index)) == buckets.tensor_of(bucket).numpy().tobytes()
    assert set(buckets.words()) == {0}
    buckets.require(5, 6)


def test_a_tensor_over_memory_shares_it_and_keeps_it() -> None:
    memory = bytearray(16)
    tensor = tensor_over(memoryview(memory), torch.float32)
    tensor.fill_(1.0)
    assert bytes(memory) == b"\x00\x00\x80\x3f" * 4
    with pytest.raises(BufferError):
        memory.clear()


def test_a_tensor_over_memory_that_cannot_be_written_is_made_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    assert tensor_over(memoryview(bytes(8)), torch.float32).tolist() == [0.0, 0.0]
    assert len(recwarn) == 0


# The header


@pytest.mark.parametrize("fingerprint", FINGERPRINTS)
@pytest.mark.parametrize("epoch", [0, 1, 1 << 40])
def test_memory_with_the_right_label_is_accepted(fingerprint: int, epoch: int) -> None:
    buckets = shared(layout_of(20))
    buckets.label(fingerprint, epoch)
    buckets.require(fingerprint, epoch)


@pytest.mark.parametrize(
    "label", [(7, 2), (8, 1), ((1 << 64) - 7, 1), (7 | 1 << 63, 1)], ids=["epoch", "model", "sign", "highest bit"]
)
def test_memory_of_something_else_is_refused(label: tuple[int, int]) -> None:
    buckets = shared(layout_of(20))
    buckets.label(*label)
    with pytest.raises(SharedMemoryUnavailable, match="of another model, epoch or version"):
        buckets.require(7, 1)


def test_memory_that_nobody_has_labelled_or_of_another_format_is_refused() -> None:
    buckets = shared(layout_of(20))
    with pytest.raises(SharedMemoryUnavailable, match="of another model, epoch or version"):
        buckets.require(0, 0)
    buckets.label(0, 0)
    buckets.memory[0] ^= 1
    with pytest.raises(SharedMemoryUnavailable, match="of another model, epoch or version"):
        buckets.require(0, 0)


def test_memory_that_is_too_small_is_refused_and_larger_is_not() -> None:
    offsets = BucketOffsets(layout_of(100).buckets)
    with pytest.raises(SharedMemoryUnavailable, match=f"expected a segment of {offsets.num_bytes} bytes, but this one"):
        SharedBuckets(memoryview(bytearray(offsets.num_bytes - 1)), offsets)
    shared(layout_of(100), more_bytes=4096)


def test_the_lease_is_kept_in_the_header_and_touches_neither_label_nor_words() -> None:
    layout = layout_of(100)
    buckets = shared(layout)
    buckets.label(7, 1)
    assert buckets.lease_ns == 0
    buckets.lease_ns = (1 << 62) + 5
    assert buckets.lease_ns == (1 << 62) + 5
    buckets.require(7, 1)
    assert set(buckets.words()) == {0}
