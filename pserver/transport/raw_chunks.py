"""Messages with chunks, encoded and decoded with at most one copy of the chunks' bytes going out and none coming in.

Protobuf's own objects copy each chunk several times on both sides. The bytes on the wire are the same as theirs: every
field is preceded by its number and kind, fields may come in any order, and messages may be put end to end.
https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, Message

from pserver.transport.gen.types_pb2 import Chunk

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_BUCKET, _OFFSET, _DTYPE, _DATA = (
    Chunk.DESCRIPTOR.fields_by_name[name].number for name in ("bucket", "offset_bytes", "dtype", "data")
)


class RawChunk(NamedTuple):
    """A `Chunk` whose data is memory of somebody else: a bucket to be sent, or a message that came."""

    bucket: int
    offset_bytes: int
    dtype: int
    data: bytes | memoryview


class Received:
    """A message that came: the fields of its type, and chunks that refer to the bytes received."""

    def __init__(self, head: Message, chunks: Sequence[RawChunk]) -> None:
        self.head = head
        self.chunks = chunks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)


def chunks_field(message_type: type[Message]) -> int:
    """Number of a message's field of chunks; 0 if it has none."""
    field = message_type.DESCRIPTOR.fields_by_name.get("chunks")
    return field.number if field is not None and field.message_type is Chunk.DESCRIPTOR else 0


class Lent:
    """Memory whose owner may take it back before it is sent: `memory` is a copy from then on. Of one event loop."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    def take_back(self) -> None:
        """The owner's memory may change after this."""
        self.memory = memoryview(bytes(self.memory))

    def __len__(self) -> int:
        return len(self.memory)


Piece = bytes | memoryview | Lent


class Pieces(tuple[Piece, ...]):
    """An encoded message that is not put together; some is memory of others, which may not change until it is sent."""

    __slots__ = ()

    def join(self) -> bytes:
        """The message."""
        return b"".join(map(memory_of_piece, self))


def memory_of_piece(piece: Piece) -> bytes | memoryview:
    """A piece's bytes, where they are now."""
    return piece.memory if isinstance(piece, Lent) else piece


def encode(head: Message, chunks: Sequence[RawChunk]) -> bytes:
    """A message with chunks besides those that it has itself."""
    return pieces(head, chunks).join()


def pieces(head: Message, chunks: Sequence[RawChunk], lend: Callable[[memoryview], Lent] | None = None) -> Pieces:
    """The same without a copy of the chunks' bytes.

    Args:
        lend: how memory is lent that may be taken back; None: it stays as it is.
    """
    tag = _varint(chunks_field(type(head)) << 3 | _LENGTH)
    parts: list[Piece] = [head.SerializeToString()]
    for chunk in chunks:
        start = b"".join(
            (
                _field(_BUCKET, chunk.bucket),
                _field(_OFFSET, chunk.offset_bytes),
                _field(_DTYPE, chunk.dtype),
                _varint(_DATA << 3 | _LENGTH),
                _varint(len(chunk.data)),
            )
        )
        data = chunk.data if lend is None or isinstance(chunk.data, bytes) else lend(chunk.data)
        parts += (b"".join((tag, _varint(len(start) + len(chunk.data)), start)), data)
    return Pieces(parts)


def decode(message_type: type[Message], data: bytes | memoryview) -> Any:
    """A message from its bytes: a `Received` if its type has chunks, else a plain one.

    Raises:
        DecodeError: they are no such message.
    """
    field = chunks_field(message_type)
    if not field:
        return message_type.FromString(bytes(data))
    memory = memoryview(data)
    rest: list[memoryview] = []
    chunks: list[RawChunk] = []
    for number, kind, start, value, stop in _fields(memory, len(memory)):
        if number != field:
            rest.append(memory[start:stop])
        elif kind != _LENGTH:
            raise DecodeError(f"field {field} is not a message")
        else:
            chunks.append(_chunk(value))
    return Received(message_type.FromString(b"".join(rest)), chunks)


def _chunk(memory: memoryview) -> RawChunk:
    found: dict[int, int] = {}
    data = memory[:0]
    for number, kind, _, value, _ in _fields(memory, len(memory)):
        expected = _LENGTH if number == _DATA else _VARINT
        if number in (_BUCKET, _OFFSET, _DTYPE, _DATA) and kind != expected:
            raise DecodeError(f"field {number} of a chunk has the wrong kind {kind}")
        if number == _DATA:
            data = value
        elif kind == _VARINT:
            found[number] = value
    return _raw_chunk(found, data)


def _raw_chunk(found: Mapping[int, int], data: memoryview) -> RawChunk:
    return RawChunk(_signed(found.get(_BUCKET, 0), 32), _signed(found.get(_OFFSET, 0), 64), found.get(_DTYPE, 0), data)


class Beginning(NamedTuple):
    """A message that ends with the data of its only chunk: all else of it, and at which byte the data begins."""

    head: Message
    chunk: RawChunk
    start: int

    def with_data(self, data: memoryview) -> Received:
        """The message."""
        return Received(self.head, [self.chunk._replace(data=data)])


def beginning(message_type: type[Message], memory: memoryview, num_bytes: int) -> Beginning | None:
    """The first bytes of a message of `num_bytes`, if it is such a one and its data begins in them."""
    try:
        start, position = _last(memory, chunks_field(message_type), num_bytes, {})
        found: dict[int, int] = {}
        _, offset = _last(memory[position:], _DATA, num_bytes - position, found)
        return Beginning(
            message_type.FromString(bytes(memory[:start])), _raw_chunk(found, memory[:0]), position + offset
        )
    except DecodeError:
        return None


def _last(memory: memoryview, wanted: int, num_bytes: int, numbers: dict[int, int]) -> tuple[int, int]:
    """Where the last field of a message begins, and where its bytes do; notes the numbers before it.

    Raises:
        DecodeError: it is not the wanted one, that comes before as well, or it does not begin in this memory.
    """
    for number, kind, start, value, stop in _fields(memory, num_bytes):
        if number == wanted and kind == _LENGTH and stop == num_bytes:
            return start, min(stop, len(memory)) - len(value)
        if number == wanted:
            break
        if kind == _VARINT:
            numbers[number] = value
    raise DecodeError(f"field {wanted} is not the last one of {num_bytes} bytes, or does not begin here")


def _fields(memory: memoryview, num_bytes: int) -> Iterator[tuple[int, int, int, Any, int]]:
    """Each field of a message as number, kind, start, value (an integer, or memory) and stop.

    Args:
        memory: the first bytes of the message.
        num_bytes: of all of it.
    """
    position = 0
    while position < len(memory):
        start = position
        tag, position = _read_varint(memory, position)
        number, kind = tag >> 3, tag & 7
        value: Any = None
        if kind == _VARINT:
            value, position = _read_varint(memory, position)
        elif kind == _LENGTH:
            length, position = _read_varint(memory, position)
            value, position = memory[position : position + length], position + length
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise DecodeError(f"field {number} has the unknown kind {kind}")
        if not number or position > num_bytes:
            raise DecodeError("a field ends beyond its message")
        yield number, kind, start, value, position


def _read_varint(memory: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70 and position < len(memory):
        byte = memory[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
        shift += 7
    raise DecodeError("a number does not end")


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _field(number: int, value: int) -> bytes:
    """A number that is not negative; as protobuf does, 0 is left out."""
    return _varint(number << 3 | _VARINT) + _varint(value) if value else b""


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
