"""Shared memory for the mean gradients of a shard's rounds, where replicas on this machine read them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import ref

import torch

from pserver.core.changes import RoundPrepared
from pserver.wire.layout import ALIGNMENT_BYTES, Bucket
from pserver.wire.shared_buckets import tensor_over
from pserver.wire.shm import Segment
from pserver.wire.tensors import element_type

#: While the replicas apply one round, the next one is prepared.
NUM_SLOTS = 2


@dataclass(slots=True)
class _Slot:
    start: int
    round: "ref[RoundPrepared] | None" = None
    index: int = 0


class LogMemory:
    """A segment with room for a few rounds. Belongs to the owner of the shard's lock.

    A slot is free again when nobody here refers to its round any more (it is applied, and in no log), and no replica
    does.

    Args:
        buckets: those that are stepped.
        released: the last entry that every replica that reads the segment needs no longer.

    Raises:
        SharedMemoryUnavailable: there is no such memory, or not enough.
    """

    def __init__(self, buckets: Sequence[Bucket], released: Callable[[], int]) -> None:
        self._offsets: dict[int, int] = {}
        position = 0
        for bucket in buckets:
            self._offsets[bucket.index] = position
            position += -(-bucket.num_master_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._released = released
        self._segment = Segment(max(NUM_SLOTS * position, 1))
        self._slots = [_Slot(number * position) for number in range(NUM_SLOTS)]
        self._taken: _Slot | None = None

    @property
    def name(self) -> str:
        """Of the segment."""
        return self._segment.name

    def take(self, buckets: Sequence[Bucket]) -> dict[int, torch.Tensor] | None:
        """Memory for the mean gradients of the next round; None: there is none now."""
        free = (each for each in self._slots if self._is_free(each))
        self._taken = slot = next(free, None)
        if slot is None:
            return None
        return {bucket.index: self._tensor(slot, bucket) for bucket in buckets}

    def keep(self, change: RoundPrepared, index: int) -> None:
        """What was taken last has the mean gradients of this round, which is this entry of the log."""
        slot, self._taken = self._taken, None
        if slot is not None and change.means:
            slot.round, slot.index = ref(change), index

    def offsets_of(self, change: RoundPrepared) -> Mapping[int, int] | None:
        """Where the mean gradients of a round lie in the segment, by bucket; None: nowhere."""
        for slot in self._slots:
            if slot.round is not None and slot.round() is change:
                return {bucket: slot.start + self._offsets[bucket] for bucket in change.means}
        return None

    def close(self) -> None:
        """Removes the segment; those who have mapped it may read on."""
        self._segment.close()

    def _is_free(self, slot: _Slot) -> bool:
        return slot.round is None or (slot.round() is None and slot.index <= self._released())

    def _tensor(self, slot: _Slot, bucket: Bucket) -> torch.Tensor:
        start = slot.start + self._offsets[bucket.index]
        memory = self._segment.memory[start : start + bucket.num_master_bytes]
        return tensor_over(memory, element_type(bucket.dtype).master)
