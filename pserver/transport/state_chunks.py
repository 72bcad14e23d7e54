"""Cuts optimizer state into chunks and packs them into messages of about 1 MiB."""

from collections.abc import Iterable, Iterator

import torch

from pserver.core.optimizer_state import StatePiece
from pserver.core.state_staging import StateChunk
from pserver.transport.chunks import MESSAGE_BYTES
from pserver.transport.convert import state_chunk_to_proto
from pserver.transport.gen import types_pb2
from pserver.wire.tensors import element_type, to_bytes

#: What a chunk costs beside its data, roughly: many small values must not make one huge message.
HEADER_BYTES = 64


def state_messages(pieces: Iterable[tuple[int, StatePiece]]) -> Iterator[list[types_pb2.StateChunk]]:
    """Messages with the chunks of these (bucket, piece) pairs, in order."""
    chunks: list[types_pb2.StateChunk] = []
    num_bytes = 0
    for bucket, piece in pieces:
        for chunk in _chunks(bucket, piece):
            size = len(chunk.data) + HEADER_BYTES
            if chunks and num_bytes + size > MESSAGE_BYTES:
                yield chunks
                chunks, num_bytes = [], 0
            chunks.append(state_chunk_to_proto(chunk))
            num_bytes += size
    if chunks:
        yield chunks


def _chunks(bucket: int, piece: StatePiece) -> Iterator[StateChunk]:
    value = piece.value
    if not isinstance(value, torch.Tensor):
        yield _chunk(bucket, piece, None, 0, b"")
        return
    data = memoryview(to_bytes(value))
    for start in range(0, max(len(data), 1), MESSAGE_BYTES):
        yield _chunk(bucket, piece, value, start, bytes(data[start : start + MESSAGE_BYTES]))


def _chunk(bucket: int, piece: StatePiece, tensor: torch.Tensor | None, offset_bytes: int, data: bytes) -> StateChunk:
    return StateChunk(
        bucket=bucket,
        tensor=piece.tensor,
        key=piece.key,
        start=piece.start,
        shape=tuple(tensor.shape) if tensor is not None else (),
        dtype_code=element_type(tensor.dtype).code if tensor is not None else 0,
        is_plain=tensor is None,
        plain=piece.value if tensor is None else None,
        offset_bytes=offset_bytes,
        data=data,
    )
