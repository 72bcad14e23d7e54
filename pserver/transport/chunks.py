"""Cuts buckets into chunks and packs them into messages of about 1 MiB."""

from collections.abc import Iterator

from pserver.transport.gen.types_pb2 import Chunk
from pserver.wire.layout import Bucket
from pserver.wire.tensors import element_type

#: Aim for one message. Streams of 1 MiB move several times faster than one large message.
MESSAGE_BYTES = 1 << 20


class ChunkPacker:
    """Collects chunks until a message is full."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._num_bytes = 0

    def add(self, bucket: Bucket, data: memoryview) -> Iterator[list[Chunk]]:
        """Adds a whole bucket's bytes; yields the messages that are full now."""
        code = element_type(bucket.dtype).code
        for start in range(0, len(data), MESSAGE_BYTES):
            piece = bytes(data[start : start + MESSAGE_BYTES])
            if self._num_bytes and self._num_bytes + len(piece) > MESSAGE_BYTES:
                yield self.rest()
            chunk = Chunk(bucket=bucket.index, offset_bytes=start, dtype=code, data=piece)  # type: ignore[arg-type]
            self._chunks.append(chunk)
            self._num_bytes += len(piece)

    def rest(self) -> list[Chunk]:
        """What is left, perhaps nothing; the packer is empty afterwards."""
        rest, self._chunks, self._num_bytes = self._chunks, [], 0
        return rest
