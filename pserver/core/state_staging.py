"""Collects the pieces of optimizer state that arrive in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pserver.core.optimizer_state import StatePiece
from pserver.errors import InvalidRequest
from pserver.wire.tensors import dtype_of_code, from_bytes

#: Longest name of a value in an optimizer's state.
MAX_KEY_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChunk:
    """A part of one value of optimizer state, as it travels.

    Attributes:
        bucket: that the value belongs to.
        tensor, key, start: as in `StatePiece`.
        shape, dtype_code: of the whole value; ignored if it is plain.
        plain: the value, if it is no tensor.
        is_plain: whether it is.
        offset_bytes: of the first byte of `data` in the value.
        data: little-endian elements.
    """

    bucket: int
    tensor: int
    key: str
    start: int | None
    shape: tuple[int, ...]
    dtype_code: int
    is_plain: bool
    plain: object
    offset_bytes: int
    data: bytes


@dataclass(slots=True)
class _Open:
    first: StateChunk
    data: bytearray = field(default_factory=bytearray)


class StateStaging:
    """State as it arrives, chunk after chunk. Memory is taken as bytes come, never by what a header promises."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[StatePiece]] = {}
        self._open: _Open | None = None

    def add_chunk(self, chunk: StateChunk) -> None:
        """Takes the next chunk.

        Raises:
            InvalidRequest: a name that is too long, a gap, or chunks of two values mixed.
        """
        if not chunk.key or len(chunk.key) > MAX_KEY_LENGTH:
            raise InvalidRequest(
                f"a value of optimizer state needs a name of 1 to {MAX_KEY_LENGTH} characters, got {chunk.key[:32]!r}"
            )
        if chunk.offset_bytes == 0:
            self._finish()
            self._open = _Open(chunk)
        opened = self._open
        if opened is None or _name(opened.first) != _name(chunk) or chunk.offset_bytes != len(opened.data):
            raise InvalidRequest(
                f"state {chunk.key!r} of tensor {chunk.tensor}: a chunk from byte {chunk.offset_bytes} on does not "
                "follow the one before"
            )
        opened.data += chunk.data

    def complete(self) -> dict[int, Sequence[StatePiece]]:
        """Every value, by bucket.

        Raises:
            InvalidRequest: a value whose size does not fit its shape.
        """
        self._finish()
        return dict(self._pieces)

    def _finish(self) -> None:
        if self._open is None:
            return
        first, data = self._open.first, self._open.data
        self._open = None
        value = first.plain if first.is_plain else from_bytes(bytes(data), dtype_of_code(first.dtype_code), first.shape)
        piece = StatePiece(tensor=first.tensor, key=first.key, start=first.start, value=value)
        self._pieces.setdefault(first.bucket, []).append(piece)


def _name(chunk: StateChunk) -> tuple[int, int, str, int | None]:
    return chunk.bucket, chunk.tensor, chunk.key, chunk.start
