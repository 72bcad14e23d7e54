"""Reading values that a server may be writing, and a mailbox: without a server, clock or pause."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.client.mapped_shard import FIRST_PAUSE_S, MAX_TRIES, MappedShard
from pserver.errors import SharedMemoryUnavailable
from pserver.wire.layout import BUFFERS, STORED, TensorSpec, build_layout
from pserver.wire.shared_buckets import BucketOffsets, SharedBuckets

CPU = torch.device("cpu")
EPOCH = 3
LEASE_NS = 1000

#: Bucket 0 is of the first tensor, 1 of the first two, 2 of the second; then a bucket for each of the others.
LAYOUT = build_layout(
    [
        TensorSpec(name="first", shape=(4, 10), dtype=torch.float32, group=0),
        TensorSpec(name="second", shape=(5, 6), dtype=torch.float32, group=0),
        TensorSpec(name="other", shape=(32,), dtype=torch.float32, group=1),
        TensorSpec(name="statistics", shape=(8,), dtype=torch.float64, group=BUFFERS),
        TensorSpec(name="constant", shape=(8,), dtype=torch.int64, group=STORED),
    ],
    128,
)
FIRST, SECOND, OTHER, STATISTICS, CONSTANT = range(5)
EVERY = {FIRST, SECOND, OTHER, STATISTICS, CONSTANT}
BUCKETS = LAYOUT.buckets
EXCHANGED = [bucket for bucket in BUCKETS if bucket.group != STORED]


class Writer:
    """The server's side: every element of a bucket is the round that it is of."""

    def __init__(self) -> None:
        offsets = BucketOffsets(BUCKETS)
        self.values = SharedBuckets(memoryview(bytearray(offsets.num_bytes)), offsets)
        mailbox = BucketOffsets(EXCHANGED)
        self.mailbox = SharedBuckets(memoryview(bytearray(mailbox.num_bytes)), mailbox)
        for each in (self.values, self.mailbox):
            each.label(LAYOUT.fingerprint, EPOCH)
        self.values.lease_ns = LEASE_NS

    def begin(self, bucket: int) -> None:
        self.values.set_word(bucket, self.values.word(bucket) | 1)

    def end(self, bucket: int, round_number: int) -> None:
        self.values.set_word(bucket, round_number << 1)

    def write(self, round_number: int, buckets: Sequence[int] | None = None) -> None:
        """Some buckets, or all, become those of a round."""
        for _ in self.steps(round_number, range(len(BUCKETS)) if buckets is None else buckets):
            pass

    def steps(self, round_number: int, buckets: Sequence[int]) -> Iterator[None]:
        """The same in small steps."""
        for index in buckets:
            self.begin(index)
            yield
            tensor = self.values.tensor_of(BUCKETS[index])
            for part in tensor.chunk(2):
                part.fill_(round_number)
                yield
            self.end(index, round_number)
            yield

    def mapped(self, **replaced: Any) -> MappedShard:
        arguments = {"values": self.values.memory, "mailbox": self.mailbox.memory, "epoch": EPOCH, **replaced}
        return MappedShard(LAYOUT, BUCKETS, EXCHANGED, CPU, **arguments)


class Reader:
    """A trainer's side: reads into tensors, and notes how long it paused and what it copied.

    Args:
        while_copying, while_pausing: called with the number of the try; the writer may do something there.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        while_copying: Callable[[int], None] = lambda number: None,
        while_pausing: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.shard = writer.mapped()
        self.tensors = {
            index: torch.full(spec.shape, -1, dtype=spec.dtype) for index, spec in enumerate(LAYOUT.tensors)
        }
        self.pauses: list[float] = []
        self.copied: list[set[int]] = []
        self.now_ns = 0
        self._while_pausing = while_pausing
        scatter_ = self.shard.incoming.scatter_

        def scatter_and_note_(tensors: dict[int, torch.Tensor]) -> None:
            self.copied.append(set(tensors))
            scatter_(tensors)
            while_copying(len(self.copied))

        self.shard.incoming.scatter_ = scatter_and_note_  # type: ignore[method-assign]

    def read(self, *, mixed_rounds: bool = False, tensors: Iterable[int] = EVERY) -> int | None:
        return self.shard.read_(
            {index: self.tensors[index] for index in tensors},
            mixed_rounds=mixed_rounds,
            now_ns=lambda: self.now_ns,
            pause=self._pause,
        )

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._while_pausing(len(self.pauses))

    def rounds(self) -> list[list[int]]:
        """The rounds that each tensor's elements are of."""
        return [[int(each) for each in self.tensors[tensor].unique()] for tensor in sorted(EVERY)]

    def rounds_of_buckets(self) -> list[set[int]]:
        """The rounds that what was read of each bucket is of."""
        found: list[set[int]] = []
        for segments in LAYOUT.segments:
            parts = [
                self.tensors[each.tensor].view(-1)[each.offset :][: each.stop - each.start].unique()
                for each in segments
            ]
            found.append({int(each) for part in parts for each in part})
        return found


@pytest.fixture
def writer() -> Writer:
    """Every bucket is of round 5."""
    made = Writer()
    made.write(5)
    return made


def test_the_layout_is_as_the_tests_here_assume() -> None:
    assert [{each.tensor for each in segments} for segments in LAYOUT.segments] == [{0}, {0, 1}, {1}, {2}, {3}, {4}]
    assert len(EXCHANGED) == 5


def test_values_that_nobody_writes_are_read_at_once(writer: Writer) -> None:
    reader = Reader(writer)
    assert reader.read() == 5
    assert reader.rounds() == [[5]] * 5
    assert reader.pauses == []
    assert reader.copied == [EVERY]


def test_only_the_tensors_asked_for_are_written(writer: Writer) -> None:
    reader = Reader(writer)
    assert reader.read(tensors=[OTHER, STATISTICS]) == 5
    assert reader.rounds() == [[-1], [-1], [5], [5], [-1]]


def test_a_bucket_that_is_being_written_is_read_again_alone_once_it_is_whole(writer: Writer) -> None:
    """And only the tensors in it."""
    writer.begin(3)
    reader = Reader(writer, while_pausing=lambda number: writer.write(5, [3]))
    assert reader.read() == 5
    assert reader.pauses == [2 * FIRST_PAUSE_S]
    assert reader.copied == [EVERY, {OTHER}]


def test_a_bucket_that_was_written_while_it_was_copied_is_read_again(writer: Writer) -> None:
    """Its word was even both times."""

    def rewrite(number: int) -> None:
        if number == 1:
            writer.write(6, [3])

    reader = Reader(writer, while_copying=rewrite)
    assert reader.read(mixed_rounds=True) == 5
    assert reader.rounds()[OTHER] == [6]
    assert reader.copied == [EVERY, {OTHER}]


def test_a_writer_who_never_stops_is_given_up_on_after_so_many_tries_with_longer_and_longer_pauses(
    writer: Writer,
) -> None:
    writer.begin(0)
    reader = Reader(writer)
    assert reader.read() is None
    assert reader.pauses == [FIRST_PAUSE_S * 2**number for number in range(1, MAX_TRIES)]
    assert reader.copied == [EVERY] + [{FIRST}] * (MAX_TRIES - 1)
    assert sum(reader.pauses) < 0.1, "all of it takes a moment"


def test_values_that_nobody_answers_for_any_longer_are_not_used(writer: Writer) -> None:
    reader = Reader(writer)
    reader.now_ns = LEASE_NS - 1
    assert reader.read() == 5
    reader.now_ns = LEASE_NS
    assert reader.read() is None
    writer.values.lease_ns = LEASE_NS + 1
    assert reader.read() == 5
    writer.values.lease_ns = 0
    assert reader.read() is None
    assert reader.pauses == []


def test_a_lease_that_ends_while_values_are_copied_is_noticed(writer: Writer) -> None:
    def end_lease(number: int) -> None:
        writer.values.lease_ns = 0

    assert Reader(writer, while_copying=end_lease).read() is None


def test_values_of_a_shard_that_is_not_ready_are_not_used() -> None:
    """Its server has set every word to 1."""
    writer = Writer()
    for bucket in BUCKETS:
        writer.begin(bucket.index)
    assert Reader(writer).read() is None


# Rounds


def test_buckets_of_two_rounds_are_a_mix_of_which_the_oldest_counts_if_that_is_allowed(writer: Writer) -> None:
    writer.write(7, [3])
    writer.write(6, [4])
    reader = Reader(writer)
    assert reader.read(mixed_rounds=True) == 5
    assert reader.rounds() == [[5], [5], [7], [6], [5]]
    assert reader.pauses == []


def test_buckets_of_two_rounds_are_read_again_until_they_are_of_one_if_not(writer: Writer) -> None:
    writer.write(6, [0, 1, 2])
    reader = Reader(writer, while_pausing=lambda number: writer.write(6) if number == 3 else None)
    assert reader.read() == 6
    assert reader.rounds() == [[6]] * 5
    assert len(reader.pauses) == 3
    assert reader.copied == [EVERY] * 4


def test_buckets_that_stay_of_two_rounds_are_given_up_on(writer: Writer) -> None:
    writer.write(6, [0, 1, 2])
    assert Reader(writer).read() is None


# Buckets that share tensors with torn ones


def test_what_shares_a_tensor_with_a_torn_bucket_is_never_a_mix_of_two_rounds(writer: Writer) -> None:
    """Bucket 0 is torn, so the first tensor is copied again; meanwhile bucket 1, which has a part of it, is written."""
    writer.begin(0)

    def write_both(number: int) -> None:
        if number == 1:
            writer.write(7, [0, 1])

    reader = Reader(writer, while_pausing=write_both)
    assert reader.read(mixed_rounds=True) == 5
    assert reader.rounds_of_buckets() == [{7}, {7}, {5}, {5}, {5}, {5}]
    assert reader.copied == [EVERY, {FIRST}, {FIRST, SECOND}]


def test_what_shares_a_tensor_with_a_torn_bucket_may_be_torn_by_then(writer: Writer) -> None:
    writer.begin(0)

    def tear_the_neighbour(number: int) -> None:
        if number == 1:
            writer.begin(1)
            writer.write(5, [0])
        if number == 2:
            writer.write(5, [1])

    reader = Reader(writer, while_pausing=tear_the_neighbour)
    assert reader.read() == 5
    assert len(reader.pauses) == 2
    assert reader.rounds() == [[5]] * 5


@settings(max_examples=300)
@given(seed=st.integers(0, 1 << 32), mixed_rounds=st.booleans())
def test_whenever_a_writer_comes_between_each_bucket_is_read_as_of_one_round(seed: int, mixed_rounds: bool) -> None:
    """It comes between words, tensors and halves of tensors, and writes bucket after bucket, in any order."""
    random = Random(seed)
    how_often = random.choice([(0, 0, 0, 1), (0, 0, 1, 3), (0, 0, 0, 0, 0, 24), (0, 0, 0, 4)])
    writer = Writer()
    writer.write(1)
    stepping = (step for number in range(2, 1000) for step in writer.steps(number, random.sample(range(6), 6)))

    def let_the_writer_step(_: object = None) -> None:
        for _ in range(random.choice(how_often)):
            next(stepping)

    def copy_in_halves_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            for into, part in zip(target.chunk(2), source.chunk(2), strict=True):
                let_the_writer_step()
                into.copy_(part)

    reader = Reader(writer, while_copying=let_the_writer_step, while_pausing=let_the_writer_step)
    values = reader.shard._values
    values.words = lambda: [  # type: ignore[method-assign]
        (let_the_writer_step(), values.word(bucket.index))[1] for bucket in BUCKETS
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", copy_in_halves_)
        found = reader.read(mixed_rounds=mixed_rounds)
    if found is not None:
        rounds = reader.rounds_of_buckets()
        assert all(len(each) == 1 for each in rounds), f"torn: {rounds}"
        assert min(min(each) for each in rounds) == found
        assert mixed_rounds or rounds == [{found}] * len(BUCKETS)


# The mailbox, and what is refused


def test_a_stamp_says_of_every_bucket_which_push_it_is_of(writer: Writer) -> None:
    shard = writer.mapped()
    shard.outgoing.gather({FIRST: torch.ones(4, 10), SECOND: None, OTHER: None, STATISTICS: None})
    assert writer.mailbox.words() == [0] * 5
    shard.stamp(77)
    assert writer.mailbox.words() == [77] * 5
    assert writer.mailbox.tensor_of(BUCKETS[0]).eq(1).all()
    assert set(writer.values.words()) == {10}


@pytest.mark.parametrize("which", ["values", "mailbox"])
@pytest.mark.parametrize(
    "label", [(LAYOUT.fingerprint, EPOCH + 1), (LAYOUT.fingerprint ^ 1, EPOCH)], ids=["epoch", "model"]
)
def test_memory_of_something_else_is_refused(which: str, label: tuple[int, int], writer: Writer) -> None:
    getattr(writer, which).label(*label)
    with pytest.raises(SharedMemoryUnavailable, match="of another model, epoch or version"):
        writer.mapped()


@pytest.mark.parametrize("which", ["values", "mailbox"])
def test_memory_that_is_too_small_is_refused(which: str, writer: Writer) -> None:
    memory = getattr(writer, which).memory
    with pytest.raises(SharedMemoryUnavailable, match="expected a segment of"):
        writer.mapped(**{which: memory[:-64]})
