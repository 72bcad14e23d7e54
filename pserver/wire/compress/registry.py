"""Codecs by name: the built-in ones and those that users register. A name and plain arguments travel, never code."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch

from pserver.errors import ConfigError, InvalidRequest
from pserver.wire.compress.codec import Codec
from pserver.wire.compress.error_feedback import ErrorFeedback
from pserver.wire.compress.half import BFloat16, Float16
from pserver.wire.compress.int8 import Int8
from pserver.wire.compress.none import NoCompression
from pserver.wire.compress.powersgd import PowerSGD
from pserver.wire.compress.topk import TopK

#: Longest name of a codec, in characters.
MAX_NAME_LENGTH = 64
#: Most codecs inside each other.
MAX_DEPTH = 4

_MEMBERS = ("whole_tensors", "make_state", "encode", "sizes", "decode")
_HOW_TO_REGISTER = "a class of your own must be given to register_codec on trainers and servers alike"
_NONE = NoCompression()

#: By name.
CODECS: dict[str, type[Codec]] = {}

CodecClass = TypeVar("CodecClass", bound=type[Codec])


def register_codec(cls: CodecClass) -> CodecClass:
    """Lets trainers and servers use a codec class of your own; usable as a decorator, `@register_codec`.

    It must have what `pserver.compress.Codec` lists, and be a frozen dataclass whose fields are plain values (None,
    numbers, strings, tuples, lists and dicts of these) or codecs. Only its name and fields travel: the call must be
    made on trainers and servers alike, at import of a module that both load.

    Returns:
        `cls`, unchanged. Registering the same class again does nothing.

    Raises:
        ConfigError: it is no such class, or its name is taken by another one.
    """
    if not isinstance(cls, type) or not is_dataclass(cls) or not cls.__dataclass_params__.frozen:
        raise ConfigError(f"expected a frozen dataclass to register as a codec, got {cls!r}")
    name = getattr(cls, "name", None)
    if type(name) is not str or not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise ConfigError(f"{cls!r} needs a `name` of 1 to {MAX_NAME_LENGTH} characters, but has {name!r:.80}")
    missing = [each for each in _MEMBERS if not hasattr(cls, each)]
    if missing:
        raise ConfigError(f"a codec has {', '.join(_MEMBERS)}, but {cls!r} lacks {', '.join(missing)}")
    if CODECS.setdefault(name, cls) is not cls:
        raise ConfigError(f"the name {name!r} is taken by {CODECS[name]!r}; give {cls!r} another `name`")
    return cls


def codec_for(codec: Codec, dtype: torch.dtype) -> Codec:
    """The codec that a bucket of that dtype goes through: only floating-point elements are compressed."""
    return codec if dtype.is_floating_point else _NONE


def codec_arguments(codec: Codec) -> dict[str, object]:
    """The arguments that, with its name, make an equal codec; one inside is {"name": ..., "arguments": {...}}.

    Raises:
        InvalidRequest: its class is not registered.
    """
    if type(codec) not in CODECS.values():
        raise InvalidRequest(
            f"expected a codec such as pserver.compress.Float16(), got {codec!r:.80}; {_HOW_TO_REGISTER}"
        )
    values = {each.name: getattr(codec, each.name) for each in fields(codec)}  # type: ignore[arg-type]
    return {
        name: {"name": value.name, "arguments": codec_arguments(value)} if isinstance(value, Codec) else value
        for name, value in values.items()
    }


def make_codec(name: str, arguments: Mapping[str, object]) -> Codec:
    """Builds a codec from what travelled.

    Raises:
        InvalidRequest: no such codec, or arguments that it does not take.
    """
    return _make(name, arguments, 0)


def _make(name: object, arguments: object, depth: int) -> Codec:
    cls = CODECS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise InvalidRequest(f"codec {name!r:.80} is unknown; expected one of {sorted(CODECS)}; {_HOW_TO_REGISTER}")
    if depth == MAX_DEPTH:
        raise InvalidRequest(f"codecs inside each other, more than {MAX_DEPTH} deep; use fewer")
    try:
        made: Codec = cls(**{key: _argument(value, depth) for key, value in dict(arguments).items()})  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"codec {name!r} does not take {arguments!r:.200}: {error!s:.200}") from error
    return made


def _argument(value: object, depth: int) -> object:
    if isinstance(value, Mapping) and value.keys() == {"name", "arguments"}:
        return _make(value["name"], value["arguments"], depth + 1)
    return value


for _cls in (NoCompression, Float16, BFloat16, Int8, TopK, PowerSGD, ErrorFeedback):
    register_codec(_cls)
