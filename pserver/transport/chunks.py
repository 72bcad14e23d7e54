"""Cuts buckets into chunks and packs them into messages of at most 4 MiB."""

from collections.abc import Iterator

import torch

from pserver.transport.raw_chunks import RawChunk
from pserver.wire.tensors import element_type

#: Most bytes of chunks in one message: the largest bucket fits in, and is stepped with where it came (see `Staging`).
#: Over gRPC 1 to 4 MiB are as fast; smaller ones, and much larger ones, are slower.
MESSAGE_BYTES = 4 << 20
#: A piece of so many bytes ends its message: nothing follows it there.
LARGE_BYTES = 1 << 20


class ChunkPacker:
    """Collects chunks until a message is full. They are the memory of the buckets, not copies of it."""

    def __init__(self) -> None:
        self._chunks: list[RawChunk] = []
        self._num_bytes = 0
        self._num_kept = 0  # chunks, the first ones, that are copies already

    def add(self, bucket: int, data: memoryview, dtype: torch.dtype) -> Iterator[list[RawChunk]]:
        """Adds a whole bucket's bytes, elements of this dtype; yields the messages that are full now, or have a large
        piece.
        """
        code = element_type(dtype).code
        for start in range(0, len(data), MESSAGE_BYTES):
            piece = data[start : start + MESSAGE_BYTES]
            if self._num_bytes and self._num_bytes + len(piece) > MESSAGE_BYTES:
                yield self.rest()
            self._chunks.append(RawChunk(bucket, start, code, piece))
            self._num_bytes += len(piece)
            # What waits for the next bucket may have to be copied: a large piece does not.
            if len(piece) >= LARGE_BYTES:
                yield self.rest()

    def keep(self) -> None:
        """Copies what is held, so that the buckets may change before the next message is full."""
        for number in range(self._num_kept, len(self._chunks)):
            self._chunks[number] = self._chunks[number]._replace(data=bytes(self._chunks[number].data))
        self._num_kept = len(self._chunks)

    def rest(self) -> list[RawChunk]:
        """What is left, perhaps nothing; the packer is empty afterwards."""
        rest, self._chunks, self._num_bytes, self._num_kept = self._chunks, [], 0, 0
        return rest
