"""Collects the chunks of one stream before anything of it becomes visible."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from pserver.errors import InvalidRequest
from pserver.wire.layout import Bucket
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
        """Every expected bucket as a 1-D tensor of its wire dtype.

        Raises:
            InvalidRequest: something is missing.
        """
        ...


class Staging:
    """Buckets as they arrive. A stream that breaks leaves only this object behind.

    Args:
        buckets: those that may come; each must come whole, its chunks in order.
    """

    lent: Callable[[], bool] | None = None

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._expected = {bucket.index: bucket for bucket in buckets}
        self._received: dict[int, int] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def add_chunk(self, bucket: int, offset_bytes: int, dtype_code: int, data: bytes | memoryview) -> None:
        """Copies one chunk into place. Memory for a bucket is taken when its first valid chunk comes.

        Raises:
            InvalidRequest: an unknown bucket, another dtype, a gap, an overlap, or data beyond the bucket's end.
        """
        expected = self._expected.get(bucket)
        if expected is None:
            raise InvalidRequest(
                f"bucket {bucket} is not expected here; this shard takes buckets {sorted(self._expected)[:8]}..."
            )
        dtype = dtype_of_code(dtype_code)
        if dtype != expected.dtype:
            raise InvalidRequest(f"bucket {bucket} holds {expected.dtype}, but the chunk holds {dtype}")
        received = self._received.get(bucket, 0)
        if offset_bytes != received or not data or received + len(data) > expected.num_bytes:
            raise InvalidRequest(
                f"bucket {bucket} of {expected.num_bytes} bytes: expected a chunk from byte {received} on, got "
                f"{len(data)} bytes from byte {offset_bytes} on"
            )
        if received == 0:
            self._tensors[bucket] = torch.empty(expected.num_elements, dtype=expected.dtype)
        memory_of(self._tensors[bucket])[received : received + len(data)] = data
        self._received[bucket] = received + len(data)

    @property
    def empty(self) -> bool:
        """Whether nothing has come."""
        return not self._received

    def complete(self) -> dict[int, torch.Tensor]:
        """Every expected bucket as a 1-D tensor of its wire dtype; the caller owns them.

        Raises:
            InvalidRequest: something is missing.
        """
        for index, bucket in self._expected.items():
            received = self._received.get(index, 0)
            if received != bucket.num_bytes:
                raise InvalidRequest(
                    f"bucket {index} is incomplete: {received} of {bucket.num_bytes} bytes came before the stream ended"
                )
        return self._tensors
