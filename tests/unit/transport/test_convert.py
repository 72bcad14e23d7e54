import dataclasses
from typing import get_args

import pytest
import torch

from pserver.core import messages as core
from pserver.core.contexts import CommitInfo
from pserver.errors import InvalidRequest, UnsupportedModel
from pserver.transport import convert
from pserver.transport.gen import coordinator_pb2, shards_pb2, types_pb2
from pserver.types import (
    ClusterStatus,
    ModelStatus,
    PushId,
    ServerStatus,
    ShardStatus,
    StepResult,
    TrainerStatus,
)
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
)
DECISION = core.Decision(
    round=1 << 40,
    contributions=(
        core.Contribution(trainer_id=1 << 50, rank=0, step=7, weight=3),
        core.Contribution(trainer_id=2, rank=5, step=1 << 35, weight=0),
    ),
    divisor=3,
    options=OPTIONS,
)
COMMANDS = (
    core.CreateShard(spec=SPEC, epoch=3, first_bucket=2, last_bucket=9),
    core.ModelReady(model="m", epoch=3, initialiser=1 << 41),
    core.Apply(model="m", epoch=3, decision=DECISION),
    core.Apply(model="m", epoch=3, decision=core.Decision(round=1, contributions=(), divisor=0, options=())),
    core.EndTrainer(trainer_id=1 << 50),
    core.FailModel(model="m", epoch=3, reason="disk"),
    core.DropShard(model="m", epoch=3),
    core.DropShard(model="", epoch=0),
)
REPORTS = (
    core.ShardCreated(model="m", epoch=3),
    core.ShardFailed(model="m", epoch=3, failure="no memory"),
    core.ShardInitialised(model="m", epoch=3, trainer_id=1 << 50),
    core.Committed(model="m", epoch=3, trainer_id=1 << 50, step=8, samples=1 << 39, options=OPTIONS),
    core.Applied(model="m", epoch=3, round=1 << 40, version=6),
    core.Applied(model="", epoch=0, round=0, version=0),
)


def over_the_wire(message):
    """As bytes and back: what a field does not take must show."""
    return type(message).FromString(message.SerializeToString())


def by_name(value):
    return type(value).__name__


@pytest.mark.parametrize("command", COMMANDS, ids=by_name)
def test_commands_round_trip(command):
    assert convert.command_from_proto(over_the_wire(convert.command_to_proto(command))) == command


@pytest.mark.parametrize("report", REPORTS, ids=by_name)
def test_reports_round_trip(report):
    assert convert.report_from_proto(over_the_wire(convert.report_to_proto(report))) == report


def test_every_command_and_report_is_among_those_tried_here():
    assert {type(command) for command in COMMANDS} == set(get_args(core.Command))
    assert {type(report) for report in REPORTS} == set(get_args(core.Report))


def test_models_round_trip_with_the_types_of_their_options():
    back = convert.spec_from_proto(over_the_wire(convert.spec_to_proto(SPEC)))
    assert back == SPEC
    assert isinstance(back.optimizer_groups[0]["betas"], tuple)
    assert type(back.optimizer_groups[0]["amsgrad"]) is bool
    assert type(back.optimizer_groups[1]["lr"]) is int


def test_push_ids_round_trip_with_their_acknowledgement():
    push_id = PushId(1 << 50, 7, 5)
    back = convert.push_id_from_proto(over_the_wire(convert.push_id_to_proto(push_id)))
    assert dataclasses.astuple(back) == (1 << 50, 7, 5)


def test_placements_round_trip_in_order():
    placement = tuple(
        core.ShardPlacement(server=f"s{i}", address=f"host{i}:1", first_bucket=i, last_bucket=i + 1) for i in range(3)
    )
    assert convert.placement_from_proto(map(over_the_wire, convert.placement_to_proto(placement))) == placement


def test_commits_round_trip():
    commit = CommitInfo(step=1 << 40, samples=0, options=OPTIONS)
    sent = over_the_wire(convert.commit_to_proto(commit, 2.5))
    assert (convert.commit_from_proto(sent), sent.wait_s) == (commit, 2.5)


def test_outcomes_round_trip():
    result = StepResult(round=1 << 40, accepted=False, reason="too late", num_trainers=3, options=OPTIONS)
    assert convert.outcome_from_proto(over_the_wire(convert.outcome_to_proto(result))) == result


def test_status_round_trips():
    model = ModelStatus(
        name="m",
        state="failed",
        failure="disk",
        sync_policy="bsp()",
        optimizer="SGD",
        round=9,
        waiting_for_ranks=(0, 2),
        missing_trainers=1,
        shards=(
            ShardStatus(server="s0", num_bytes=1 << 40, round=9, version=8),
            ShardStatus(server="s1", num_bytes=0, round=8, version=8),
        ),
    )
    trainer = TrainerStatus(
        trainer_id=1 << 50,
        rank=2,
        step=4,
        lease_s=1.5,
        lag_rounds=1,
        sent_bytes=1 << 40,
        received_bytes=2,
        reported={"loss": 0.5, "accuracy": 1.0},
    )
    status = ClusterStatus(
        servers=(ServerStatus(name="s0", address="a:1", alive=True, silent_s=0.25),),
        models=(model, dataclasses.replace(model, name="n", waiting_for_ranks=(), shards=(), failure="")),
        trainers=(trainer, dataclasses.replace(trainer, reported={})),
    )
    assert convert.status_from_proto(over_the_wire(convert.status_to_proto(status))) == status
    empty = ClusterStatus(servers=(), models=(), trainers=())
    assert convert.status_from_proto(over_the_wire(convert.status_to_proto(empty))) == empty


def test_options_that_were_left_out_are_none():
    assert convert.commit_from_proto(shards_pb2.Commit(step=1)).options == ()


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
