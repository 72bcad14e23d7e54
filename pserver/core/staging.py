"""Collects the chunks of one stream before anything of it becomes visible."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from pserver.core.coding import BucketCoding, Coding
from pserver.errors import InvalidRequest
from pserver.wire.layout import Bucket
from pserver.wire.shared_buckets import tensor_over
from pserver.wire.tensors import dtype_of_code, memory_of


class Pushed(Protocol):
    """What one push brought to a shard."""

    @property
    def lent(self) -> Callable[[], bool] | None:
        """If its tensors are memory that the trainer writes: tells whether they still hold this push. None: ours."""
        ...

    @property
    def empty(self) -> bool:
        """Whether nothing has come."""
        ...

    def complete(self) -> dict[int, torch.Tensor]:
        """Every expected bucket as a 1-D tensor, of its dtype or as it travels; nobody may write to them.

        Raises:
            InvalidRequest: something is missing.
        """
        ...


class Staging:
    """Buckets as they arrive. A stream that breaks leaves only this object behind.

    Args:
        buckets: those that may come; each must come whole, its chunks in order. A chunk from the first byte on begins
            the bucket anew: what was sent early may have changed since.
        coding: how they travel; None: as they are.
    """

    lent: Callable[[], bool] | None = None

    def __init__(self, buckets: Iterable[Bucket], coding: Coding | None = None) -> None:
        self._expected = {each.index: each if coding is None else coding.pushed(each) for each in buckets}
        self._coding = coding
        self._received: dict[int, int] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def add_chunk(self, bucket: int, offset_bytes: int, dtype_code: int, data: bytes | memoryview) -> None:
        """Copies one chunk into place; a bucket that comes in one piece stays in the message, which is kept for it.

        Memory for any other bucket is taken when its first valid chunk comes.

        Raises:
            InvalidRequest: an unknown bucket, another dtype, a gap, an overlap, or data beyond the bucket's end.
        """
        expected = self._expected.get(bucket)
        if expected is None:
            raise InvalidRequest(
                f"bucket {bucket} is not expected here; this shard takes buckets {sorted(self._expected)[:8]}..."
            )
        coding = self._coding_of(expected)
        dtype, wanted = dtype_of_code(dtype_code), expected.dtype if coding is None else torch.uint8
        if dtype != wanted:
            raise InvalidRequest(f"bucket {bucket} comes as {wanted}, but the chunk holds {dtype}")
        most_bytes = expected.num_bytes if coding is None else max(coding.sizes)
        received = self._received.get(bucket, 0) if offset_bytes else 0
        if offset_bytes != received or not data or received + len(data) > most_bytes:
            raise InvalidRequest(
                f"bucket {bucket} of at most {most_bytes} bytes: expected a chunk from byte {received} on, got "
                f"{len(data)} bytes from byte {offset_bytes} on"
            )
        self._received[bucket] = received + len(data)
        if len(data) == most_bytes and _is_most_of_its_message(data):
            self._tensors[bucket] = tensor_over(memoryview(data), dtype)
            return
        if received == 0:
            self._tensors[bucket] = torch.empty(most_bytes // dtype.itemsize, dtype=dtype)
        memory_of(self._tensors[bucket])[received : received + len(data)] = data

    @property
    def empty(self) -> bool:
        """Whether nothing has come."""
        return not self._received

    def complete(self) -> dict[int, torch.Tensor]:
        """See `Pushed.complete`.

        Raises:
            InvalidRequest: something is missing, or cannot be decoded.
        """
        codings = {index: self._coding_of(bucket) for index, bucket in self._expected.items()}
        for index, bucket in self._expected.items():
            coding, received = codings[index], self._received.get(index, 0)
            sizes = frozenset((bucket.num_bytes,)) if coding is None else coding.sizes
            if received not in sizes:
                raise InvalidRequest(
                    f"bucket {index} is incomplete: {received} of {' or '.join(map(str, sorted(sizes)))} bytes came "
                    "before the stream ended"
                )
        complete = dict(self._tensors)
        for index, coding in codings.items():
            if coding is not None:
                complete[index] = coding.decode(complete[index][: self._received[index]])
        return complete

    def _coding_of(self, bucket: Bucket) -> BucketCoding | None:
        return None if self._coding is None else self._coding.of_gradients(bucket)


def _is_most_of_its_message(data: bytes | memoryview) -> bool:
    """Whether keeping the message costs no more than copying these bytes out of it."""
    message = data.obj if isinstance(data, memoryview) else data
    return memoryview(message).nbytes < 2 * len(data)
