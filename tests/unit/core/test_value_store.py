"""Masters, and what trainers read of them while they may be written."""

import pytest
import torch

from pserver.core.value_store import ValueStore
from pserver.wire.layout import BUFFERS, STORED, Bucket, TensorSpec, build_layout

BUCKETS = build_layout(
    [
        TensorSpec(name="w", shape=(16,), dtype=torch.float32, group=0),
        TensorSpec(name="h", shape=(32,), dtype=torch.bfloat16, group=0),
        TensorSpec(name="b", shape=(8,), dtype=torch.float64, group=BUFFERS),
        TensorSpec(name="s", shape=(8,), dtype=torch.int64, group=STORED),
    ],
    64,
).buckets
FLOAT, HALF, BUFFER, STORED_ONE = (bucket.index for bucket in BUCKETS)


class Published:
    """A `Publication` that notes what happens to it, in order."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.events: list[tuple[str, int, int | None]] = []

    def tensor_of(self, bucket: Bucket) -> torch.Tensor:
        self.tensors[bucket.index] = torch.zeros(bucket.num_elements, dtype=bucket.dtype)
        return self.tensors[bucket.index]

    def begin(self, bucket: int) -> None:
        self.events.append(("begin", bucket, None))

    def end(self, bucket: int, round_number: int) -> None:
        self.events.append(("end", bucket, round_number))


@pytest.fixture
def published() -> Published:
    return Published()


def numbers(store: ValueStore, bucket: int) -> list[float]:
    return torch.frombuffer(bytearray(store.read(bucket)), dtype=BUCKETS[bucket].dtype).tolist()


@pytest.mark.parametrize("with_publication", [False, True])
def test_values_begin_as_zeros_in_masters_at_least_as_precise(with_publication: bool, published: Published) -> None:
    store = ValueStore(BUCKETS, published if with_publication else None)
    assert {index: master.dtype for index, master in store.masters.items()} == {
        FLOAT: torch.float32,
        HALF: torch.float32,
        BUFFER: torch.float64,
        STORED_ONE: torch.int64,
    }
    assert not any(master.any() for master in store.masters.values())
    for bucket in BUCKETS:
        assert len(store.read(bucket.index)) == bucket.num_bytes
        assert not any(store.read(bucket.index))


@pytest.mark.parametrize("with_publication", [False, True])
def test_what_is_read_are_the_masters_in_the_dtype_of_the_wire(with_publication: bool, published: Published) -> None:
    store = ValueStore(BUCKETS, published if with_publication else None)
    for bucket in BUCKETS:
        with store.changing(bucket.index, 1) as master:
            master.fill_(1 + 2**-12 if master.is_floating_point() else 3)
    assert numbers(store, FLOAT) == [1 + 2**-12] * 16
    assert numbers(store, HALF) == [1.0] * 32
    assert store.masters[HALF].eq(1 + 2**-12).all(), "and the master has lost nothing"
    assert numbers(store, STORED_ONE) == [3] * 8


def test_one_memory_serves_both_where_the_dtypes_are_the_same(published: Published) -> None:
    store = ValueStore(BUCKETS, published)
    for index, master in store.masters.items():
        assert (master is published.tensors[index]) == (index != HALF)


def test_trainers_see_a_change_between_begin_and_end_and_the_rounding_too(published: Published) -> None:
    store = ValueStore(BUCKETS, published)
    for bucket in (FLOAT, HALF):
        published.events.clear()
        with store.changing(bucket, 7) as master:
            assert published.events == [("begin", bucket, None)]
            master.fill_(2.0)
        assert published.events == [("begin", bucket, None), ("end", bucket, 7)]
        assert published.tensors[bucket].eq(2).all()


def test_the_rounded_values_are_written_before_the_end(published: Published) -> None:
    store = ValueStore(BUCKETS, published)
    seen: list[bool] = []
    end = published.end

    def look_and_end(bucket: int, round_number: int) -> None:
        seen.append(bool(published.tensors[bucket].eq(2).all()))
        end(bucket, round_number)

    published.end = look_and_end  # type: ignore[method-assign]
    with store.changing(HALF, 1) as master:
        master.fill_(2.0)
    assert seen == [True]


def test_a_change_that_fails_leaves_the_bucket_to_no_round(published: Published) -> None:
    store = ValueStore(BUCKETS, published)

    def fail() -> None:
        with store.changing(FLOAT, 7) as master:
            master.fill_(2.0)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert published.events == [("begin", FLOAT, None)]


def test_values_that_a_round_left_alone_are_of_it_as_well(published: Published) -> None:
    store = ValueStore(BUCKETS, published)
    with store.changing(BUFFER, 1) as master:
        master.fill_(5.0)
    published.events.clear()
    store.unchanged(BUFFER, 2)
    assert published.events == [("end", BUFFER, 2)]
    assert numbers(store, BUFFER) == [5.0] * 8


def test_without_a_publication_changes_are_seen_by_whoever_reads() -> None:
    store = ValueStore(BUCKETS, None)
    with store.changing(HALF, 7) as master:
        master.fill_(2.0)
    store.unchanged(HALF, 8)
    assert numbers(store, HALF) == [2.0] * 32
