import dataclasses
import math
import types
from collections.abc import Mapping
from itertools import count
from typing import Union, get_args, get_origin, get_type_hints

import pytest
import torch

from pserver.core import messages as core
from pserver.core.optimizer_state import StatePiece
from pserver.core.rules import NONFINITE_POLICIES, GradientRules
from pserver.core.state_staging import StateChunk, StateStaging
from pserver.errors import InvalidRequest, UnsupportedModel
from pserver.transport import convert
from pserver.transport.gen import coordinator_pb2, types_pb2
from pserver.transport.state_chunks import state_messages
from pserver.types import ClusterStatus, PushId, StepResult
from pserver.wire.layout import STORED, TensorSpec
from pserver.wire.tensors import element_type
from pserver.wire.values import pack_value

OPTIONS = ({"lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False}, {"lr": 1})
SPEC = core.ModelSpec(
    name="m",
    tensors=(
        TensorSpec(name="w", shape=(3, 4), dtype=torch.bfloat16, group=1),
        TensorSpec(name="scalar", shape=(), dtype=torch.int64, group=STORED),
        TensorSpec(name="empty", shape=(0, 7), dtype=torch.float32, group=0),
    ),
    bucket_bytes=1 << 33,
    optimizer="AdamW",
    optimizer_groups=OPTIONS,
    sync_policy="bsp",
    sync_policy_arguments={"backup_workers": 0},
    world_size=3,
    buffers="mean",
)

#: Fields that travel in 32 bits; all other integers may need 64.
SMALL = frozenset(
    {
        "bucket",
        "group",
        "missing_trainers",
        "num_missing_replicas",
        "num_trainers",
        "rank",
        "replicas",
        "shard",
        "tensor",
        "waiting_for_ranks",
        "world_size",
    }
)
#: Fields whose values are checked on arrival.
CHOSEN = {"nonfinite": "skip", "dtype_code": element_type(torch.float16).code}


class Samples:
    """Makes values of any dataclass by the types of its fields, so that a field that is added is tried here as well.

    Args:
        full: every field has a value that is neither the field's default nor one that protobuf leaves out, and differs
            from those of other fields; else every field has as little as possible.
    """

    def __init__(self, *, full: bool) -> None:
        self._full = full
        self._numbers = count(1)

    def of(self, cls):
        hints = get_type_hints(cls)
        fields = {field.name: self._field(field, hints[field.name]) for field in dataclasses.fields(cls)}
        if cls is StateChunk:
            fields["is_plain"] = False
            fields["plain"] = None
        return cls(**fields)

    def _field(self, field, hint):
        if field.name in CHOSEN and hint in (str, int):
            return CHOSEN[field.name] if self._full or field.name == "dtype_code" else "pass"
        if hint is bool:
            return field.default is not True if self._full else False
        return self._value(field.name, hint)

    def _value(self, name, hint):
        origin, arguments = get_origin(hint), get_args(hint)
        if dataclasses.is_dataclass(hint):
            return self.of(hint)
        if origin in (Union, types.UnionType):
            return self._value(name, arguments[0]) if self._full else None
        if origin is tuple:
            return tuple(self._value(name, arguments[0]) for _ in range(2 if self._full else 0))
        if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
            keys, values = arguments
            return {self._value(name, keys): self._value(name, values) for _ in range(2 if self._full else 0)}
        return self._plain(name, hint)

    def _plain(self, name, hint):
        number = next(self._numbers) if self._full else 0
        if hint is range:
            return range(number, number + 5)
        if hint is torch.dtype:
            return torch.float64 if self._full else torch.float32
        if hint is object:
            return (number, 0.5)
        plain = {
            int: number if name in SMALL or not self._full else (1 << 40) + number,
            float: number + 0.25 if self._full else 0.0,
            str: f"{name} {number}" if self._full else "",
            bytes: bytes([number]) if self._full else b"",
        }
        return plain[hint]


def over_the_wire(message):
    """As bytes and back: what a field does not take must show."""
    return type(message).FromString(message.SerializeToString())


def by_name(value):
    return value.__name__


both = pytest.mark.parametrize("full", [True, False], ids=["full", "empty"])


def test_samples_hold_something_in_every_field():
    """Else the tests below would not see that a field is forgotten."""
    for cls in (
        *get_args(core.Command),
        *get_args(core.Report),
        core.CommitInfo,
        core.Decision,
        StepResult,
        GradientRules,
    ):
        full, empty = Samples(full=True).of(cls), Samples(full=False).of(cls)
        for field in dataclasses.fields(cls):
            value = getattr(full, field.name)
            assert value not in (None, 0, 0.0, False, "", ()), f"{cls.__name__}.{field.name}"
            assert value not in (field.default, getattr(empty, field.name)), f"{cls.__name__}.{field.name}"


# Every message, with every field


@both
@pytest.mark.parametrize("cls", get_args(core.Command), ids=by_name)
def test_commands_round_trip(cls, full):
    command = Samples(full=full).of(cls)
    assert convert.command_from_proto(over_the_wire(convert.command_to_proto(command))) == command


@both
@pytest.mark.parametrize("cls", get_args(core.Report), ids=by_name)
def test_reports_round_trip(cls, full):
    report = Samples(full=full).of(cls)
    assert convert.report_from_proto(over_the_wire(convert.report_to_proto(report))) == report


@both
def test_models_round_trip(full):
    spec = Samples(full=full).of(core.ModelSpec)
    assert convert.spec_from_proto(over_the_wire(convert.spec_to_proto(spec))) == spec


@both
def test_commits_round_trip(full):
    commit = Samples(full=full).of(core.CommitInfo)
    assert convert.commit_from_proto(over_the_wire(convert.commit_to_proto(commit))) == commit


@both
def test_outcomes_round_trip(full):
    result = Samples(full=full).of(StepResult)
    assert convert.outcome_from_proto(over_the_wire(convert.outcome_to_proto(result))) == result


@both
def test_pieces_of_state_round_trip(full):
    chunk = Samples(full=full).of(StateChunk)
    assert convert.state_chunk_from_proto(over_the_wire(convert.state_chunk_to_proto(chunk))) == chunk


@both
def test_placements_round_trip_in_order(full):
    samples = Samples(full=full)
    placement = tuple(samples.of(core.ShardPlacement) for _ in range(3))
    assert convert.placement_from_proto(map(over_the_wire, convert.placement_to_proto(placement))) == placement


@both
def test_status_round_trips(full):
    status = Samples(full=full).of(ClusterStatus)
    assert convert.status_from_proto(over_the_wire(convert.status_to_proto(status))) == status


def test_push_ids_round_trip_with_their_acknowledgement():
    push_id = PushId(1 << 50, 7, 5)
    back = convert.push_id_from_proto(over_the_wire(convert.push_id_to_proto(push_id)))
    assert dataclasses.astuple(back) == (1 << 50, 7, 5)


def test_models_round_trip_with_the_types_of_their_options():
    back = convert.spec_from_proto(over_the_wire(convert.spec_to_proto(SPEC)))
    assert back == SPEC
    assert isinstance(back.optimizer_groups[0]["betas"], tuple)
    assert type(back.optimizer_groups[0]["amsgrad"]) is bool
    assert type(back.optimizer_groups[1]["lr"]) is int


# What is absent, and what is zero


@pytest.mark.parametrize("value", [None, 0.0, 1.5, math.inf], ids=str)
def test_a_norm_that_nobody_asked_for_is_not_a_norm_of_zero(value):
    result = dataclasses.replace(Samples(full=True).of(StepResult), grad_norm=value)
    assert convert.outcome_from_proto(over_the_wire(convert.outcome_to_proto(result))).grad_norm == value
    decision = dataclasses.replace(Samples(full=True).of(core.Decision), grad_norm=value, clip_value=value)
    apply = core.Apply(model="m", shard=0, epoch=1, decision=decision)
    assert convert.command_from_proto(over_the_wire(convert.command_to_proto(apply))) == apply


def test_a_norm_that_is_no_number_travels_as_it_is():
    result = dataclasses.replace(Samples(full=True).of(StepResult), grad_norm=math.nan)
    assert math.isnan(convert.outcome_from_proto(over_the_wire(convert.outcome_to_proto(result))).grad_norm)


@pytest.mark.parametrize("nonfinite", NONFINITE_POLICIES)
@pytest.mark.parametrize(("max_norm", "clip_value"), [(None, None), (0.5, None), (None, 2.0), (1e-300, 1e300)])
def test_rules_round_trip(max_norm, clip_value, nonfinite):
    rules = GradientRules(max_norm=max_norm, clip_value=clip_value, nonfinite=nonfinite)
    commit = core.CommitInfo(step=1, base_round=0, samples=1, options=(), rules=rules)
    assert convert.commit_from_proto(over_the_wire(convert.commit_to_proto(commit))).rules == rules


@pytest.mark.parametrize("start", [None, 0, 5])
def test_a_value_that_is_whole_is_not_a_part_that_starts_at_zero(start):
    chunk = dataclasses.replace(Samples(full=True).of(StateChunk), start=start)
    assert convert.state_chunk_from_proto(over_the_wire(convert.state_chunk_to_proto(chunk))) == chunk


@pytest.mark.parametrize("plain", [None, False, True, 0, 7, 0.0, 1.5, "", "text"], ids=repr)
def test_plain_values_of_state_keep_their_type(plain):
    chunk = dataclasses.replace(
        Samples(full=False).of(StateChunk), key="step", is_plain=True, plain=plain, dtype_code=0
    )
    back = convert.state_chunk_from_proto(over_the_wire(convert.state_chunk_to_proto(chunk)))
    assert back == chunk
    assert type(back.plain) is type(plain)


@pytest.mark.parametrize("cls", [core.LivingTrainers, core.Prepared, core.DropShard], ids=by_name)
def test_a_message_without_anything_in_it_is_still_of_its_kind(cls):
    empty = Samples(full=False).of(cls)
    if cls in get_args(core.Command):
        assert isinstance(convert.command_from_proto(over_the_wire(convert.command_to_proto(empty))), cls)
    else:
        assert isinstance(convert.report_from_proto(over_the_wire(convert.report_to_proto(empty))), cls)


# State in chunks


def test_state_arrives_as_it_was_sent_however_it_is_cut(monkeypatch):
    monkeypatch.setattr("pserver.transport.state_chunks.MESSAGE_BYTES", 100)
    pieces = [
        (3, StatePiece(tensor=1, key="exp_avg", start=40, value=torch.arange(70.0))),
        (3, StatePiece(tensor=1, key="step", start=None, value=torch.tensor(4.0))),
        (3, StatePiece(tensor=2, key="exp_avg", start=None, value=torch.ones(3, 4, dtype=torch.bfloat16))),
        (5, StatePiece(tensor=2, key="nothing", start=0, value=torch.empty(0))),
        (5, StatePiece(tensor=2, key="plain", start=None, value=None)),
        (5, StatePiece(tensor=2, key="z", start=0, value=torch.full((20,), 1 + 2j))),
    ]
    staging = StateStaging()
    messages = list(state_messages(pieces))
    for message in messages:
        assert sum(len(chunk.data) for chunk in message) <= 100
        for chunk in message:
            staging.add_chunk(convert.state_chunk_from_proto(over_the_wire(chunk)))
    assert len(messages) > 5
    back = [(bucket, piece) for bucket, found in staging.complete().items() for piece in found]
    assert len(back) == len(pieces)
    for (bucket, piece), (sent_to, sent) in zip(back, pieces, strict=True):
        assert (bucket, piece.tensor, piece.key, piece.start) == (sent_to, sent.tensor, sent.key, sent.start)
        if isinstance(sent.value, torch.Tensor):
            assert (piece.value.dtype, piece.value.shape) == (sent.value.dtype, sent.value.shape)
            assert torch.equal(piece.value, sent.value)
        else:
            assert piece.value is None


def test_many_small_values_do_not_make_one_huge_message(monkeypatch):
    """A name and its like cost more than the data of a step count."""
    monkeypatch.setattr("pserver.transport.state_chunks.MESSAGE_BYTES", 1000)
    pieces = [(0, StatePiece(tensor=each, key="step", start=None, value=torch.tensor(1.0))) for each in range(100)]
    messages = list(state_messages(pieces))
    assert sum(map(len, messages)) == 100
    assert all(sum(chunk.ByteSize() for chunk in message) <= 1000 for message in messages)


def test_without_state_there_is_no_message():
    assert list(state_messages([])) == []


# What is refused


def test_options_that_were_left_out_are_none():
    assert convert.commit_from_proto(types_pb2.Commit(step=1, nonfinite="pass")).options == ()


@pytest.mark.parametrize(
    "message",
    [
        types_pb2.Commit(step=1),
        types_pb2.Commit(step=1, nonfinite="ignore"),
        types_pb2.Commit(step=1, nonfinite="pass", max_norm=0.0),
        types_pb2.Commit(step=1, nonfinite="pass", max_norm=math.nan),
        types_pb2.Commit(step=1, nonfinite="pass", clip_value=-1.0),
    ],
    ids=lambda message: str(message).replace("\n", " "),
)
def test_rules_that_make_no_sense_are_refused(message):
    with pytest.raises(InvalidRequest, match=r"nonfinite|max_norm|clip_value"):
        convert.commit_from_proto(message)


@pytest.mark.parametrize("value", [{"lr": 0.1}, [1], "lr", 3, [[]]], ids=repr)
def test_options_that_are_no_list_of_maps_are_refused(value):
    with pytest.raises(InvalidRequest, match="list of maps"):
        convert.options_from_bytes(pack_value(value))


@pytest.mark.parametrize("value", [[], "x", {1: 2}], ids=repr)
def test_policy_arguments_without_names_are_refused(value):
    message = convert.spec_to_proto(SPEC)
    message.sync_policy_arguments = pack_value(value)
    with pytest.raises(InvalidRequest, match="names as keys"):
        convert.spec_from_proto(message)


def test_bytes_that_are_no_value_are_refused():
    with pytest.raises(InvalidRequest):
        convert.options_from_bytes(b"\xc1")


def test_an_element_type_that_the_protocol_does_not_have_is_refused():
    message = convert.spec_to_proto(SPEC)
    message.tensors[0].dtype = types_pb2.DTYPE_UNSPECIFIED
    with pytest.raises(InvalidRequest, match="code 0 is unknown"):
        convert.spec_from_proto(message)


def test_an_element_type_that_cannot_travel_is_refused_before_it_is_sent():
    tensor = TensorSpec(name="w", shape=(3,), dtype=torch.float8_e5m2, group=0)
    with pytest.raises(UnsupportedModel, match="float8_e5m2"):
        convert.spec_to_proto(dataclasses.replace(SPEC, tensors=(tensor,)))


def test_codes_of_element_types_are_those_of_the_protocol():
    """A dtype's row and its entry in types.proto have the same name: torch.float32 and DTYPE_FLOAT32."""
    codes = {name: code for name, code in types_pb2.DType.items() if code}
    assert {
        f"DTYPE_{str(dtype).removeprefix('torch.').upper()}": element_type(dtype).code
        for dtype in (getattr(torch, name.removeprefix("DTYPE_").lower()) for name in codes)
    } == codes


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (convert.command_from_proto, coordinator_pb2.CoordinatorMessage()),
        (convert.command_from_proto, coordinator_pb2.CoordinatorMessage(welcome=coordinator_pb2.Welcome(lease_s=1))),
        (convert.report_from_proto, coordinator_pb2.ServerMessage()),
        (convert.report_from_proto, coordinator_pb2.ServerMessage(heartbeat=coordinator_pb2.Heartbeat())),
        (convert.report_from_proto, coordinator_pb2.ServerMessage(hello=coordinator_pb2.Hello(name="s0"))),
    ],
    ids=["no command", "welcome", "no report", "heartbeat", "hello"],
)
def test_messages_that_are_no_command_or_report_are_refused(read, message):
    with pytest.raises(InvalidRequest, match="came over a link"):
        read(message)
