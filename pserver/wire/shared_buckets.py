"""Buckets in one piece of memory: where each lies, and words beside them that order readers and writers.

The memory begins with a header, then has a word of 8 bytes for each bucket, then the buckets: those that follow each
other in a flat end to end, the first of them at a 64-byte boundary. What a word means is the two sides' agreement:

- for values, the round of the bucket, doubled, plus 1 while it is being written: a seqlock
  (https://www.kernel.org/doc/html/latest/locking/seqlock.html), whose writer is alone and whose readers try again;
- for gradients, the sequence number of the push that wrote the bucket.

Words are written whole, and in the order of the program: only processors that keep stores in order are let in (`shm`).
"""

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import torch

from pserver.errors import SharedMemoryUnavailable
from pserver.wire.layout import ALIGNMENT_BYTES, Bucket

_WORD_BYTES = 8
_MAGIC = int.from_bytes(b"pserver1", "little")
#: Words of the header.
_MAGIC_WORD, _FINGERPRINT, _EPOCH, _LEASE_NS = range(4)
_HEADER_WORDS = 8
_PAGE_BYTES = 4096


class BucketOffsets:
    """Where each of some buckets lies in a piece of memory, after header and words.

    Args:
        buckets: ascending, as a shard owns them.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        words_bytes = (_HEADER_WORDS + len(self.buckets)) * _WORD_BYTES
        self.first_byte = position = -(-words_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._offsets: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        for number, bucket in enumerate(self.buckets):
            if not number or not _follows(self.buckets[number - 1], bucket):
                position = -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self._offsets[bucket.index] = position
            self._numbers[bucket.index] = number
            position += bucket.num_bytes
        self.num_bytes = -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def range_of(self, bucket: int) -> slice:
        """The bytes of a bucket."""
        start = self._offsets[bucket]
        return slice(start, start + self.buckets[self._numbers[bucket]].num_bytes)

    def number_of(self, bucket: int) -> int:
        """The place of a bucket's word among the words."""
        return self._numbers[bucket]

    def runs(self) -> list[tuple[Bucket, ...]]:
        """The buckets, grouped so that each group is one stretch of a flat and of the memory."""
        groups: list[list[Bucket]] = [[each] for each in self.buckets[:1]]
        for before, bucket in pairwise(self.buckets):
            if _follows(before, bucket):
                groups[-1].append(bucket)
            else:
                groups.append([bucket])
        return [tuple(each) for each in groups]


def _follows(before: Bucket, bucket: Bucket) -> bool:
    return before.flat == bucket.flat and before.stop == bucket.start


class SharedBuckets:
    """One side's view of buckets in shared memory. Thread-safe as far as words and buckets are used as agreed.

    Args:
        memory: of a segment, of at least `offsets.num_bytes`.
        offsets: of the buckets in it.

    Raises:
        SharedMemoryUnavailable: the memory is too small.
    """

    def __init__(self, memory: memoryview, offsets: BucketOffsets) -> None:
        if len(memory) < offsets.num_bytes:
            raise SharedMemoryUnavailable(
                f"expected a segment of {offsets.num_bytes} bytes, but this one has {len(memory)}; are "
                "both sides of one version?"
            )
        self.memory = memory
        self.offsets = offsets
        self._header = memory[: _HEADER_WORDS * _WORD_BYTES].cast("q")
        last = (_HEADER_WORDS + len(offsets.buckets)) * _WORD_BYTES
        self._words = memory[_HEADER_WORDS * _WORD_BYTES : last].cast("q")

    # The header

    def label(self, fingerprint: int, epoch: int) -> None:
        """Says what the buckets are of. Written by the owner, before it gives the name away."""
        self._header[_FINGERPRINT] = _signed(fingerprint)
        self._header[_EPOCH] = epoch
        self._header[_MAGIC_WORD] = _MAGIC

    def require(self, fingerprint: int, epoch: int) -> None:
        """Refuses memory that is of something else.

        Raises:
            SharedMemoryUnavailable
        """
        found = tuple(self._header[: _EPOCH + 1])
        if found != (_MAGIC, _signed(fingerprint), epoch):
            raise SharedMemoryUnavailable(
                f"the segment is of another model, epoch or version: expected {(_MAGIC, fingerprint, epoch)}, "
                f"got {found}"
            )

    @property
    def lease_ns(self) -> int:
        """Until when the owner may answer for these values, in ns of the machine's monotonic clock."""
        return self._header[_LEASE_NS]

    @lease_ns.setter
    def lease_ns(self, until_ns: int) -> None:
        self._header[_LEASE_NS] = until_ns

    # Words and buckets

    def word(self, bucket: int) -> int:
        """The word of one bucket."""
        return self._words[self.offsets.number_of(bucket)]

    def set_word(self, bucket: int, value: int) -> None:
        """Writes the word of one bucket."""
        self._words[self.offsets.number_of(bucket)] = value

    def words(self) -> list[int]:
        """All words, in the order of the buckets."""
        return self._words.tolist()

    def bytes_of(self, bucket: int) -> memoryview:
        """The bytes of one bucket."""
        return self.memory[self.offsets.range_of(bucket)]

    def tensor_of(self, bucket: Bucket) -> torch.Tensor:
        """One bucket as a 1-D tensor of its wire dtype that shares the memory and keeps it mapped."""
        return tensor_over(self.bytes_of(bucket.index), bucket.dtype)

    @cached_property
    def tensors(self) -> Mapping[int, torch.Tensor]:
        """Every bucket as `tensor_of` makes it, by index."""
        return {each.index: self.tensor_of(each) for each in self.offsets.buckets}


def tensor_over(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor that shares memory and keeps it; never write to it if the memory cannot be written."""
    if not memory.readonly:
        return torch.frombuffer(memory, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=dtype)


def _signed(value: int) -> int:
    """A fingerprint of 64 bits as the number that a word holds."""
    return value - (1 << 64) if value >= 1 << 63 else value
