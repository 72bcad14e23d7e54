"""The values of one shard: masters that are stepped, and what trainers read of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from pserver.wire.layout import Bucket
from pserver.wire.tensors import element_type, memory_of


class Publication(Protocol):
    """Memory in which trainers read buckets while they may be written."""

    def tensor_of(self, bucket: Bucket) -> torch.Tensor:
        """Where trainers read a bucket: 1-D, of its wire dtype."""
        ...

    def begin(self, bucket: int) -> None:
        """The bucket's values are no round's until `end`."""
        ...

    def end(self, bucket: int, round_number: int) -> None:
        """The bucket holds the values of this round."""
        ...


class ValueStore:
    """Masters by bucket, and their values in the wire dtype. Not thread-safe.

    Where the two dtypes are the same, they are the same memory.

    Args:
        buckets: of the shard; all values begin as zeros.
        publication: where trainers read; None: nowhere but through messages.
    """

    def __init__(self, buckets: Sequence[Bucket], publication: Publication | None) -> None:
        self._publication = publication
        self.masters: dict[int, torch.Tensor] = {}
        self._read: dict[int, torch.Tensor] = {}
        for bucket in buckets:
            master = element_type(bucket.dtype).master
            if publication is not None:
                self._read[bucket.index] = publication.tensor_of(bucket)
            if publication is not None and master == bucket.dtype:
                self.masters[bucket.index] = self._read[bucket.index]
            else:
                self.masters[bucket.index] = torch.zeros(bucket.num_elements, dtype=master)
        self._wire_dtypes = {bucket.index: bucket.dtype for bucket in buckets}

    @contextmanager
    def changing(self, bucket: int, round_number: int) -> Iterator[torch.Tensor]:
        """The master of a bucket, to be written; then it is that of a round. If that fails, it is no round's."""
        master = self.masters[bucket]
        if self._publication is None:
            yield master
            return
        self._publication.begin(bucket)
        yield master
        if self._read[bucket] is not master:
            self._read[bucket].copy_(master)
        self._publication.end(bucket, round_number)

    def unchanged(self, bucket: int, round_number: int) -> None:
        """The bucket's values are those of another round as well."""
        if self._publication is not None:
            self._publication.end(bucket, round_number)

    def read(self, bucket: int) -> memoryview:
        """A bucket's values as bytes in its wire dtype, valid until the next change."""
        found = self._read.get(bucket)
        if found is None:
            found = self.masters[bucket].to(self._wire_dtypes[bucket])
        return memory_of(found)
