"""Collects the pieces of optimizer state that arrive in chunks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pserver.core.optimizer_state import StatePiece
from pserver.errors import InvalidRequest
from pserver.wire.layout import Bucket
from pserver.wire.tensors import dtype_of_code, from_bytes, size_in_bytes

#: Longest name of a value in an optimizer's state.
MAX_KEY_LENGTH = 256
#: Most bytes of state for each element of the buckets, and beyond that for all together. Adam keeps 8 for float32.
MAX_BYTES_PER_ELEMENT = 256
MAX_BYTES_BESIDE = 1 << 20
#: What a value costs beside its data, roughly.
_PIECE_BYTES = 256


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
    num_bytes: int
    data: bytearray = field(default_factory=bytearray)


_Name = tuple[int, int, str, int | None]


class StateStaging:
    """State as it arrives, chunk after chunk. Memory is taken as bytes come, never by what a header promises.

    Args:
        buckets: those whose state may come, which also bounds how much of it; None trusts the sender.
    """

    def __init__(self, buckets: Iterable[Bucket] | None = None) -> None:
        self._elements = None if buckets is None else {each.index: each.num_elements for each in buckets}
        self._bytes_left = MAX_BYTES_BESIDE + MAX_BYTES_PER_ELEMENT * sum((self._elements or {}).values())
        self._names: set[_Name] = set()
        self._pieces: dict[int, list[StatePiece]] = {}
        self._open: _Open | None = None

    def add_chunk(self, chunk: StateChunk) -> None:
        """Takes the next chunk.

        Raises:
            InvalidRequest: a bucket that is not expected, a name that is too long or comes twice, a gap, chunks of two
                values mixed, more data than the shape says, or more state than any optimizer keeps.
        """
        if not chunk.key or len(chunk.key) > MAX_KEY_LENGTH:
            raise InvalidRequest(
                f"a value of optimizer state needs a name of 1 to {MAX_KEY_LENGTH} characters, got {chunk.key[:32]!r}"
            )
        if chunk.offset_bytes == 0:
            self._finish()
            self._open = self._opened(chunk)
        opened = self._open
        if opened is None or _name(opened.first) != _name(chunk) or chunk.offset_bytes != len(opened.data):
            raise InvalidRequest(
                f"{_shown(chunk)}: a chunk from byte {chunk.offset_bytes} on does not follow the one before"
            )
        if len(opened.data) + len(chunk.data) > opened.num_bytes:
            raise InvalidRequest(
                f"{_shown(chunk)} has {opened.num_bytes} bytes, but {len(opened.data) + len(chunk.data)} came"
            )
        opened.data += chunk.data

    def complete(self) -> dict[int, Sequence[StatePiece]]:
        """Every value, by bucket.

        Raises:
            InvalidRequest: a value whose size does not fit its shape.
        """
        self._finish()
        return dict(self._pieces)

    def _opened(self, chunk: StateChunk) -> _Open:
        if self._elements is not None and chunk.bucket not in self._elements:
            raise InvalidRequest(f"{_shown(chunk)} came for bucket {chunk.bucket}, which is not stepped here")
        if _name(chunk) in self._names:
            raise InvalidRequest(f"{_shown(chunk)} came twice; expected each value once")
        num_bytes = 0 if chunk.is_plain else size_in_bytes(dtype_of_code(chunk.dtype_code), chunk.shape)
        if self._elements is not None:
            self._bytes_left -= num_bytes + _PIECE_BYTES
            if self._bytes_left < 0:
                raise InvalidRequest(
                    f"{_shown(chunk)}: with its {num_bytes} bytes there is more state than {MAX_BYTES_PER_ELEMENT} "
                    f"bytes for each of the {sum(self._elements.values())} elements here"
                )
        self._names.add(_name(chunk))
        return _Open(chunk, num_bytes)

    def _finish(self) -> None:
        if self._open is None:
            return
        first, data = self._open.first, self._open.data
        self._open = None
        value = first.plain if first.is_plain else from_bytes(bytes(data), dtype_of_code(first.dtype_code), first.shape)
        piece = StatePiece(tensor=first.tensor, key=first.key, start=first.start, value=value)
        self._pieces.setdefault(first.bucket, []).append(piece)


def _name(chunk: StateChunk) -> _Name:
    return chunk.bucket, chunk.tensor, chunk.key, chunk.start


def _shown(chunk: StateChunk) -> str:
    return f"state {chunk.key!r} of tensor {chunk.tensor}"
