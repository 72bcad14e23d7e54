"""A shard's shared memory as a trainer on the same machine uses it."""

import time
from collections.abc import Callable, Mapping, Sequence, Set

import torch

from pserver.client.region import Region
from pserver.wire.layout import Bucket, Layout
from pserver.wire.shared_buckets import BucketOffsets, SharedBuckets

#: Stamp of a mailbox that is being written; pushes are numbered from 1.
NO_PUSH = 0
#: A reader that raced a writer tries again this often, then asks by RPC.
MAX_TRIES = 8
#: Before each of these tries it waits twice as long as before, from this many seconds on.
FIRST_PAUSE_S = 0.0002


class MappedShard:
    """Values to read and a mailbox to write, without messages. One thread at a time.

    Args:
        layout: of the model.
        buckets: of the shard.
        exchanged: those that travel with every step.
        device: where the model's tensors are.
        values, mailbox: the mapped segments.
        epoch: of the placement.

    Raises:
        SharedMemoryUnavailable: the memory is of something else.
    """

    def __init__(
        self,
        layout: Layout,
        buckets: Sequence[Bucket],
        exchanged: Sequence[Bucket],
        device: torch.device,
        *,
        values: memoryview,
        mailbox: memoryview,
        epoch: int,
    ) -> None:
        self._layout = layout
        self._values = SharedBuckets(values, BucketOffsets(buckets))
        self._mailbox = SharedBuckets(mailbox, BucketOffsets(exchanged))
        for each in (self._values, self._mailbox):
            each.require(layout.fingerprint, epoch)
        self.incoming = Region(layout, self._values.offsets, device, values)
        self.outgoing = Region(layout, self._mailbox.offsets, device, mailbox)

    def stamp(self, sequence: int) -> None:
        """Says that every bucket in the mailbox is of this push. Write them first, and before that stamp `NO_PUSH`."""
        for bucket in self._mailbox.offsets.buckets:
            self._mailbox.set_word(bucket.index, sequence)

    def read_(
        self,
        tensors: Mapping[int, torch.Tensor],
        *,
        mixed_rounds: bool,
        now_ns: Callable[[], int] = time.monotonic_ns,
        pause: Callable[[float], None] = time.sleep,
    ) -> int | None:
        """Copies values into tensors in place.

        Args:
            tensors: by index in the layout; those that are cut must be contiguous.
            mixed_rounds: whether buckets may be of different rounds.

        Returns:
            Their round, the oldest if they are mixed. None: the server wrote all the time or answers for them no
            longer; then the tensors hold anything. A bucket that was returned is never torn.
        """
        buckets = self._values.offsets.buckets
        torn = {bucket.index for bucket in buckets}
        rounds: dict[int, int] = {}
        for number in range(MAX_TRIES):
            if number:
                pause(FIRST_PAUSE_S * 2**number)
            again = self._tensors_in(torn) & tensors.keys() if rounds else tensors.keys()
            copied = self._buckets_with(again) | torn if rounds else torn
            before = self._values.words()
            self.incoming.scatter_({index: tensors[index] for index in again})
            self.incoming.wait_until_free()
            after = self._values.words()
            if now_ns() >= self._values.lease_ns:
                return None
            for bucket, word, later in zip(buckets, before, after, strict=True):
                if bucket.index not in copied:
                    continue
                # Of a bucket that was whole before, only the tensors it shares with a torn one were copied again.
                same = bucket.index in torn or rounds[bucket.index] == word >> 1
                if word == later and not word & 1 and same:
                    rounds[bucket.index] = word >> 1
                else:
                    rounds.pop(bucket.index, None)
            torn = {bucket.index for bucket in buckets} - rounds.keys()
            if not torn:
                if mixed_rounds or len(set(rounds.values())) <= 1:
                    return min(rounds.values(), default=0)
                torn = set(rounds)
                rounds.clear()
        return None

    def _tensors_in(self, buckets: Set[int]) -> Set[int]:
        return {segment.tensor for index in buckets for segment in self._layout.segments[index]}

    def _buckets_with(self, tensors: Set[int]) -> Set[int]:
        return {
            bucket.index
            for bucket in self._values.offsets.buckets
            if any(segment.tensor in tensors for segment in self._layout.segments[bucket.index])
        }
