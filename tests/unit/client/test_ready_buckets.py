"""Which buckets are complete after which gradient."""

from collections.abc import Iterable

import torch
from hypothesis import given
from hypothesis import strategies as st

from pserver.client.ready_buckets import ReadyBuckets
from pserver.wire.layout import BUFFERS, STORED, Layout, TensorSpec, build_layout


def layout_of(*sizes: int, groups: Iterable[int] | None = None, bucket_bytes: int = 64) -> Layout:
    """Of float32 tensors of so many elements each; 16 fill a bucket."""
    found = list(groups or [0] * len(sizes))
    specs = [
        TensorSpec(name=f"t{index}", shape=(size,), dtype=torch.float32, group=group)
        for index, (size, group) in enumerate(zip(sizes, found, strict=True))
    ]
    return build_layout(specs, bucket_bytes)


def test_a_bucket_is_complete_with_the_last_of_its_tensors() -> None:
    buckets = ReadyBuckets(layout_of(16, 16, 16, bucket_bytes=128), [0, 1, 2])
    assert buckets.mark(1) == []
    assert buckets.mark(2) == [1]
    assert buckets.mark(0) == [0]


def test_a_tensor_of_several_buckets_completes_them_all() -> None:
    assert ReadyBuckets(layout_of(48), [0]).mark(0) == [0, 1, 2]


def test_a_bucket_with_a_tensor_that_is_never_ready_never_is() -> None:
    """A frozen parameter, a buffer, or one of another optimizer's."""
    buckets = ReadyBuckets(layout_of(16, 16, 16, bucket_bytes=128), [0, 2])
    assert [buckets.mark(0), buckets.mark(2)] == [[], [1]]
    layout = layout_of(16, 16, 16, groups=[0, STORED, BUFFERS])
    assert ReadyBuckets(layout, [0]).mark(0) == [0]


def test_a_tensor_without_elements_is_in_no_bucket() -> None:
    buckets = ReadyBuckets(layout_of(16, 0), [0, 1])
    assert buckets.mark(1) == []
    assert buckets.is_ready(1)
    assert buckets.mark(0) == [0]


def test_after_a_restart_nothing_is_ready() -> None:
    buckets = ReadyBuckets(layout_of(16, 16, bucket_bytes=128), [0, 1])
    buckets.mark(0)
    buckets.restart()
    assert not buckets.is_ready(0)
    assert [buckets.mark(1), buckets.mark(0)] == [[], [0]]


@given(sizes=st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(any), data=st.data())
def test_in_whatever_order_each_bucket_is_complete_once_and_not_before_its_tensors_are(
    sizes: list[int], data: st.DataObject
) -> None:
    layout = layout_of(*sizes)
    order = data.draw(st.permutations(range(len(sizes))))
    buckets = ReadyBuckets(layout, order)
    marked: set[int] = set()
    complete: list[int] = []
    for tensor in order:
        marked.add(tensor)
        now = buckets.mark(tensor)
        assert all({each.tensor for each in layout.segments[bucket]} <= marked for bucket in now)
        complete += now
    assert sorted(complete) == [bucket for bucket, held in enumerate(layout.segments) if held]
