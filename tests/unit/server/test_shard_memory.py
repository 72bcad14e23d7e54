"""The shared memory of one shard: values behind a seqlock, and a mailbox for each trainer."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pserver.errors import InvalidRequest, SharedMemoryUnavailable
from pserver.server.shard_memory import ShardMemory
from pserver.types import PushId
from pserver.wire.layout import BUFFERS, STORED, TensorSpec, build_layout
from pserver.wire.shared_buckets import BucketOffsets, SharedBuckets
from pserver.wire.shm import map_segment

LAYOUT = build_layout(
    [
        TensorSpec(name="w", shape=(32,), dtype=torch.float32, group=0),
        TensorSpec(name="b", shape=(8,), dtype=torch.float64, group=BUFFERS),
        TensorSpec(name="s", shape=(8,), dtype=torch.int64, group=STORED),
    ],
    64,
)
BUCKETS = LAYOUT.buckets
EXCHANGED = [bucket for bucket in BUCKETS if bucket.group != STORED]
EPOCH = 4
TRAINER, OTHER = 17, 18


@pytest.fixture
def memory() -> Iterator[ShardMemory]:
    made = ShardMemory(BUCKETS, EXCHANGED, fingerprint=LAYOUT.fingerprint, epoch=EPOCH)
    yield made
    made.close()


def values_of(memory: ShardMemory) -> SharedBuckets:
    """The values as a trainer sees them."""
    found = SharedBuckets(map_segment(memory.name, writable=False), BucketOffsets(BUCKETS))
    found.require(LAYOUT.fingerprint, EPOCH)
    return found


def mailbox_of(memory: ShardMemory, trainer_id: int = TRAINER) -> SharedBuckets:
    """Its mailbox as a trainer sees it."""
    found = SharedBuckets(map_segment(memory.open_mailbox(trainer_id), writable=True), BucketOffsets(EXCHANGED))
    found.require(LAYOUT.fingerprint, EPOCH)
    return found


def push_id(sequence: int, trainer_id: int = TRAINER) -> PushId:
    return PushId(trainer_id=trainer_id, sequence=sequence, lowest_unacknowledged=1)


def fill(mailbox: SharedBuckets, sequence: int, value: float) -> None:
    """Puts one push into a mailbox."""
    for bucket in EXCHANGED:
        mailbox.tensor_of(bucket).fill_(value)
        mailbox.set_word(bucket.index, sequence)


# Values


def test_values_are_nobodys_until_they_are_written_and_no_lease_runs(memory: ShardMemory) -> None:
    values = values_of(memory)
    assert values.words() == [1] * len(BUCKETS)
    assert values.lease_ns == 0


def test_trainers_see_what_the_shard_writes_and_of_which_round_it_is(memory: ShardMemory) -> None:
    values = values_of(memory)
    ours = memory.tensor_of(BUCKETS[0])
    memory.begin(0)
    assert values.word(0) & 1
    ours.fill_(3.0)
    memory.end(0, 12)
    assert values.word(0) == 24
    assert values.tensor_of(BUCKETS[0]).eq(3).all()
    memory.begin(0)
    assert values.word(0) == 25
    memory.begin(0)
    assert values.word(0) == 25, "a second begin is none"
    memory.end(0, 13)
    assert values.words() == [26, 1, 1, 1]


def test_the_lease_of_the_values_is_extended(memory: ShardMemory) -> None:
    memory.extend_lease(123)
    assert values_of(memory).lease_ns == 123


def test_a_shard_without_room_for_its_values_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(SharedMemoryUnavailable, match="No space left"):
        ShardMemory(BUCKETS, EXCHANGED, fingerprint=1, epoch=1)
    assert list(directory.iterdir()) == []


# Mailboxes


def test_a_mailbox_is_made_once_for_each_trainer(memory: ShardMemory, directory: Path) -> None:
    first, again, other = (memory.open_mailbox(each) for each in (TRAINER, TRAINER, OTHER))
    assert first == again
    assert len({memory.name, first, other}) == 3
    assert {path.name for path in directory.iterdir()} == {memory.name, first, other}


def test_a_push_is_read_where_the_trainer_wrote_it(memory: ShardMemory) -> None:
    mailbox = mailbox_of(memory)
    fill(mailbox, 5, 2.0)
    pushed = memory.pushed(push_id(5))
    assert not pushed.empty
    found = pushed.complete()
    assert found.keys() == {bucket.index for bucket in EXCHANGED}
    assert all(tensor.eq(2).all() for tensor in found.values())
    mailbox.tensor_of(EXCHANGED[0])[3] = 7.0
    assert found[0][3] == 7.0


def test_a_mailbox_that_was_never_written_holds_no_push(memory: ShardMemory) -> None:
    memory.open_mailbox(TRAINER)
    with pytest.raises(InvalidRequest, match=r"trainer 17 should hold its push 1 in every bucket, .* pushes \[0\]"):
        memory.pushed(push_id(1)).complete()


@pytest.mark.parametrize("words", [{0: 4}, {0: 6}, {0: 0}, {0: 4, 1: 4, 2: 4}, {2: -1}], ids=str)
def test_a_push_is_refused_if_any_bucket_is_of_another(words: dict[int, int], memory: ShardMemory) -> None:
    mailbox = mailbox_of(memory)
    fill(mailbox, 5, 2.0)
    for bucket, word in words.items():
        mailbox.set_word(bucket, word)
    with pytest.raises(InvalidRequest, match="should hold its push 5 in every bucket, but holds the pushes"):
        memory.pushed(push_id(5)).complete()


def test_a_push_that_is_written_over_after_it_was_taken_is_noticed(memory: ShardMemory) -> None:
    mailbox = mailbox_of(memory)
    fill(mailbox, 5, 2.0)
    pushed = memory.pushed(push_id(5))
    pushed.complete()
    assert pushed.lent()
    mailbox.set_word(EXCHANGED[-1].index, 6)
    assert not pushed.lent()


def test_trainers_have_mailboxes_of_their_own(memory: ShardMemory) -> None:
    ours, theirs = mailbox_of(memory), mailbox_of(memory, OTHER)
    fill(ours, 5, 2.0)
    fill(theirs, 5, 3.0)
    assert memory.pushed(push_id(5)).complete()[0][0] == 2.0
    assert memory.pushed(push_id(5, OTHER)).complete()[0][0] == 3.0


def test_who_has_opened_no_mailbox_has_pushed_nothing(memory: ShardMemory) -> None:
    memory.open_mailbox(OTHER)
    with pytest.raises(InvalidRequest, match="trainer 17 has no mailbox here; open one, or send messages"):
        memory.pushed(push_id(1))


def test_a_mailbox_is_freed_alone_and_what_was_taken_from_it_stays_readable(
    memory: ShardMemory, directory: Path
) -> None:
    """A decided round may need it."""
    mailbox = mailbox_of(memory)
    memory.open_mailbox(OTHER)
    fill(mailbox, 5, 2.0)
    found = memory.pushed(push_id(5)).complete()
    memory.close_mailbox(TRAINER)
    memory.close_mailbox(TRAINER)
    assert {path.name for path in directory.iterdir()} == {memory.name, memory.open_mailbox(OTHER)}
    del mailbox
    assert found[0].eq(2).all()
    with pytest.raises(InvalidRequest, match="no mailbox"):
        memory.pushed(push_id(5))


def test_a_mailbox_without_room_is_an_error_and_the_next_attempt_may_go_well(
    memory: ShardMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(SharedMemoryUnavailable, match="No space left"):
            memory.open_mailbox(TRAINER)
    mailbox_of(memory)


# The end


def test_closing_removes_every_name_and_ends_the_lease_for_good(memory: ShardMemory, directory: Path) -> None:
    values, mailbox = values_of(memory), mailbox_of(memory)
    memory.extend_lease(1 << 60)
    memory.close()
    assert list(directory.iterdir()) == []
    assert values.lease_ns == 0
    memory.extend_lease(1 << 61)
    assert values.lease_ns == 0, "a server that lives on extends the leases of what it has"
    fill(mailbox, 1, 1.0)
    memory.close()


def test_nobody_opens_a_mailbox_of_memory_that_is_closed(memory: ShardMemory, directory: Path) -> None:
    memory.close()
    with pytest.raises(SharedMemoryUnavailable, match="the model has ended"):
        memory.open_mailbox(TRAINER)
    assert list(directory.iterdir()) == []
