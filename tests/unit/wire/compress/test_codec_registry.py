import dataclasses
from typing import ClassVar

import pytest
import torch
from codec_buckets import bucket, received

from pserver.errors import ConfigError, InvalidRequest
from pserver.wire.compress import (
    CODECS,
    BFloat16,
    ErrorFeedback,
    Float16,
    Int8,
    NoCompression,
    PowerSGD,
    TopK,
    codec_arguments,
    make_codec,
    register_codec,
)


@pytest.fixture(autouse=True)
def codecs_as_before():
    """What a test registers is gone after it."""
    before = dict(CODECS)
    yield
    CODECS.clear()
    CODECS.update(before)


def make_class(**members):
    """A codec like Int8; members that are None are left out."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Signs:
        factor: float = 1.0

        name: ClassVar[str] = "signs"
        whole_tensors: ClassVar[bool] = False

        def make_state(self):
            return None

        def encode(self, state, bucket):
            return NoCompression().encode(None, dataclasses.replace(bucket, buffer=bucket.buffer.sign() * self.factor))

        def sizes(self, shape):
            return NoCompression().sizes(shape)

        def decode(self, data, shape):
            return NoCompression().decode(data, shape)

    for name, value in members.items():
        if value is None:
            delattr(Signs, name)
        else:
            setattr(Signs, name, value)
    return Signs


def test_the_names_on_the_wire():
    assert {name: cls.__name__ for name, cls in CODECS.items()} == {
        "none": "NoCompression",
        "float16": "Float16",
        "bfloat16": "BFloat16",
        "int8": "Int8",
        "topk": "TopK",
        "powersgd": "PowerSGD",
        "error_feedback": "ErrorFeedback",
    }


def test_arguments_are_plain_values():
    assert codec_arguments(Float16()) == {}
    assert codec_arguments(Int8(block=64)) == {"block": 64}
    assert codec_arguments(ErrorFeedback(TopK(ratio=0.01))) == {"codec": {"name": "topk", "arguments": {"ratio": 0.01}}}


@pytest.mark.parametrize("codec", [BFloat16(), Int8(), TopK(ratio=0.5), PowerSGD(), ErrorFeedback(PowerSGD(rank=2))])
def test_codecs_are_values(codec):
    same = make_codec(codec.name, codec_arguments(codec))
    assert same == codec
    assert hash(same) == hash(codec)


def test_a_codec_of_ones_own_travels_and_takes_feedback():
    cls = make_class()
    assert register_codec(cls) is register_codec(cls) is cls
    codec = ErrorFeedback(cls(factor=2.0))
    assert make_codec(codec.name, codec_arguments(codec)) == codec
    assert received(codec, bucket(torch.tensor([3.0, -0.5]))).tolist() == [2, -2]


def test_a_codec_that_was_not_registered_does_not_travel():
    with pytest.raises(InvalidRequest, match=r"got .*Signs.*; a class of your own must be given to register_codec"):
        codec_arguments(make_class()())
    with pytest.raises(InvalidRequest, match=r"got .*Signs"):
        codec_arguments(ErrorFeedback(make_class()()))


@pytest.mark.parametrize("thing", [None, "topk", TopK(ratio=0.1), int, dataclasses.dataclass(type("Mutable", (), {}))])
def test_only_frozen_dataclasses_are_registered(thing):
    with pytest.raises(ConfigError, match="expected a frozen dataclass to register as a codec, got"):
        register_codec(thing)


@pytest.mark.parametrize("name", ["", "x" * 65, 3, b"signs"])
def test_a_codec_needs_a_name(name):
    with pytest.raises(ConfigError, match="needs a `name` of 1 to 64 characters"):
        register_codec(make_class(name=name))


@pytest.mark.parametrize("missing", ["whole_tensors", "make_state", "encode", "sizes", "decode"])
def test_a_codec_needs_every_member(missing):
    with pytest.raises(ConfigError, match=f"lacks {missing}"):
        register_codec(make_class(**{missing: None}))


def test_a_name_is_taken_once():
    with pytest.raises(ConfigError, match=r"the name 'topk' is taken by .*TopK"):
        register_codec(make_class(name="topk"))
    assert CODECS["topk"] is TopK


@pytest.mark.parametrize("name", ["", "zip", "TopK", "x" * 100_000, None, 3, ["topk"], b"topk"])
def test_an_unknown_codec_is_refused(name):
    with pytest.raises(InvalidRequest, match=r"is unknown; expected one of \['bfloat16'") as refusal:
        make_codec(name, {})
    assert len(str(refusal.value)) < 500


def nested(depth):
    return {"codec": {"name": "error_feedback", "arguments": nested(depth - 1)}} if depth else {"codec": None}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("topk", {}),
        ("topk", {"ratio": 2}),
        ("topk", {"ratio": 0.1, "block": 3}),
        ("topk", {1: 0.1}),
        ("topk", [0.1]),
        ("topk", None),
        ("topk", {"ratio": torch.tensor([1.0, 2.0])}),
        ("float16", {"x" * 5000: "y" * 5000}),
        ("error_feedback", {}),
        ("error_feedback", {"codec": "topk"}),
        ("error_feedback", {"codec": {"name": "topk"}}),
        ("error_feedback", {"codec": {"name": "zip", "arguments": {}}}),
        ("error_feedback", {"codec": {"name": ["topk"], "arguments": {}}}),
        ("error_feedback", {"codec": {"name": "topk", "arguments": {"ratio": 0}}}),
        ("error_feedback", {"codec": {"name": "topk", "arguments": 3}}),
        ("error_feedback", nested(1)),
        ("error_feedback", nested(3)),
        ("error_feedback", nested(500)),
    ],
)
def test_arguments_that_a_codec_does_not_take_are_refused(name, arguments):
    with pytest.raises(InvalidRequest) as refusal:
        make_codec(name, arguments)
    assert len(str(refusal.value)) < 1000
