"""Spoils valid messages: one field, one message of a stream, or the bytes."""

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import msgpack
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (
    0,
    1,
    -1,
    2,
    31,
    64,
    255,
    1 << 20,
    (1 << 31) - 1,
    -(1 << 31),
    1 << 40,
    (1 << 62) - 1,
    (1 << 63) - 1,
    -(1 << 63),
)
NUMBERS = (0.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324)
TEXTS = ("", "x", "victim", "s0", "\0", "\N{SNOWMAN}" * 3, "'\n%s{0}", "../../etc/passwd", "SGD", "Adafactor", "bsp",
         "x" * 70, "x" * 300, "x" * 2000, "x" * 100_000)  # fmt: skip


def nested_tuples(depth: int) -> bytes:
    """A list with a tuple in a tuple in a tuple."""
    data = msgpack.packb([])
    for _ in range(depth):
        data = msgpack.packb([msgpack.ExtType(2, data)])
    return data


def tensor_value(header: Sequence[object], data: bytes = b"") -> bytes:
    """Options with a tensor in them."""
    return msgpack.packb([{"lr": msgpack.ExtType(1, msgpack.packb(list(header)) + data)}])


#: Encoded values: what no correct client packs, and a few that are packed well but belong elsewhere.
VALUES = (
    b"",
    b"\xc1\xff\xff",
    msgpack.packb(None),
    msgpack.packb(3),
    msgpack.packb("text"),
    msgpack.packb([3]),
    msgpack.packb({}),
    msgpack.packb([{}]),
    msgpack.packb([{}] * 3),
    msgpack.packb([{}] * 5000),
    msgpack.packb([{1: 2}]),
    msgpack.packb([{"lr": "fast"}]),
    msgpack.packb([{"lr": math.nan}]),
    msgpack.packb([{"lr": -1}]),
    msgpack.packb([{"lr": None}]),
    msgpack.packb([{"params": 1}]),
    msgpack.packb({"deadline": "x", "backup_workers": []}),
    msgpack.packb({"backup_workers": -1}),
    msgpack.packb({"x" * 5000: "y" * 5000}),
    msgpack.packb([{"lr": msgpack.Timestamp(1, 2)}]),
    msgpack.packb([{"lr": msgpack.ExtType(3, msgpack.packb(["1e5", "2"]))}]),
    msgpack.packb([{"lr": msgpack.ExtType(77, b"x")}]),
    tensor_value([1, 1 << 40]),
    tensor_value([1, -1], bytes(4)),
    tensor_value([1] + 300 * [1 << 62]),
    tensor_value([1, 0, 1 << 62, 1 << 62]),
    tensor_value([99], bytes(4)),
    tensor_value([]),
    msgpack.packb([{"lr": msgpack.ExtType(1, b"\xdd\x06\x00\x00\x00")}]),
    b"\x91" * 5000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\x00\x10\x00\x00",
    b"\xdd\x00\x00\x40\x00" + b"\x90" * (1 << 14),
    nested_tuples(100),
)


def spoiled(requests: Sequence[Message], random: Random) -> list[bytes]:
    """A call's messages with one thing wrong with them (or nothing that matters), as bytes."""
    requests = [_copy(each) for each in requests]
    kind = random.choice(("field", "field", "field", "field", "bytes", "messages", "noise"))
    if kind == "field":
        spoil_field(random.choice(requests), random)
    payloads = [each.SerializeToString() for each in requests]
    if kind == "bytes":
        index = random.randrange(len(payloads))
        payloads[index] = spoiled_bytes(payloads[index], random)
    elif kind == "messages":
        payloads = _shuffled(payloads, random)
    elif kind == "noise":
        payloads[random.randrange(len(payloads))] = random.randbytes(random.choice((0, 1, 7, 100, 5000)))
    return payloads


def _shuffled(payloads: list[bytes], random: Random) -> list[bytes]:
    index = random.randrange(len(payloads))
    how = random.choice(("drop", "repeat", "swap", "many", "empty"))
    if how == "drop" and len(payloads) > 1:
        return payloads[:index] + payloads[index + 1 :]
    if how == "repeat":
        return [*payloads[: index + 1], *payloads[index:]]
    if how == "swap":
        return payloads[::-1]
    if how == "many":
        return payloads + payloads[-1:] * 50
    return [*payloads, b""]


def spoiled_bytes(data: bytes, random: Random) -> bytes:
    """The same bytes with a few flipped, cut off, doubled or put in."""
    spoilt = bytearray(data)
    how = random.choice(("flip", "flip", "cut", "insert", "double"))
    if how == "flip":
        for _ in range(random.randint(1, 4) if spoilt else 0):
            spoilt[random.randrange(len(spoilt))] ^= 1 << random.randrange(8)
    elif how == "cut":
        del spoilt[random.randrange(len(spoilt) + 1) :]
    elif how == "insert":
        at = random.randrange(len(spoilt) + 1)
        spoilt[at:at] = random.randbytes(random.randint(1, 8))
    else:
        spoilt += data
    return bytes(spoilt)


def spoil_field(message: Message, random: Random) -> None:
    """Changes one field somewhere in a message, set or not."""
    places = list(_places(message))
    if not places:
        return
    owner, field = random.choice(places)
    if field.is_repeated:
        _spoil_repeated(owner, field, random)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        if random.random() < 0.5:
            owner.ClearField(field.name)
        else:
            getattr(owner, field.name).SetInParent()
    else:
        setattr(owner, field.name, _scalar(field, getattr(owner, field.name), random))


def _places(message: Message) -> Iterator[tuple[Any, FieldDescriptor]]:
    for field in message.DESCRIPTOR.fields:
        yield message, field
        if field.type != FieldDescriptor.TYPE_MESSAGE or _is_map(field):
            continue
        value: Any = getattr(message, field.name)
        if field.is_repeated:
            for each in value[:4]:
                yield from _places(each)
        elif message.HasField(field.name):
            yield from _places(value)


def _spoil_repeated(owner: Any, field: FieldDescriptor, random: Random) -> None:
    values: Any = getattr(owner, field.name)
    how = random.choice(("clear", "double", "reverse", "many", "one more"))
    if _is_map(field):
        size = random.choice((0, 1, 65, 1000))
        values.clear()
        key, value = (field.message_type.fields_by_name[each] for each in ("key", "value"))
        for number in range(size):
            text = key.cpp_type == FieldDescriptor.CPPTYPE_STRING
            name: Any = random.choice(("", "x", "x" * 65)) + str(number) if text else number
            values[name] = _scalar(value, 0, random)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        kept = [_copy(each) for each in values]
        del values[:]
        values.extend({"clear": [], "double": kept * 2, "reverse": kept[::-1]}.get(how, kept[:1] * 500))
        if how == "one more":
            values.add()
    else:
        kept = list(values)
        if how in ("many", "one more"):
            kept += [_scalar(field, 0, random)] * (5000 if how == "many" else 1)
        del values[:]
        values.extend({"clear": [], "double": kept * 2}.get(how, kept[::-1]))


def _scalar(field: FieldDescriptor, present: Any, random: Random) -> Any:
    kind = field.cpp_type
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random.choice(NUMBERS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not present
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return random.choice((0, 1, 2, 3, 10, 12, 13, 99, -1))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.choice(
            (*VALUES, present[: len(present) // 2], present + b"\0", present * 2, random.randbytes(64))
        )
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return random.choice((*TEXTS, present + "x"))
    low, high = {
        FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    }.get(kind, (-(1 << 63), (1 << 63) - 1))
    return min(max(random.choice((*INTEGERS, present + 1, present - 1, present * 2)), low), high)


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def _copy(message: Message) -> Message:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied
