"""One case for each limit: what is beyond it is refused by name, before memory is taken, and the victim trains on."""

import math
import urllib.parse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from google.protobuf.message import Message

from pserver.client.cluster import Cluster
from pserver.config import TrainerSettings
from pserver.core import dedup, membership
from pserver.core.membership import Membership
from pserver.core.messages import ModelSpec
from pserver.core.optimizers import constructor_arguments
from pserver.core.staging import Staging
from pserver.core.state_staging import MAX_BYTES_BESIDE, StateChunk, StateStaging
from pserver.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    ModelFailed,
    ProtocolMismatch,
    PserverError,
    StaleEpoch,
    StalePush,
    TrainerEnded,
    UnknownModel,
)
from pserver.server import shard_host
from pserver.server.shard_host import memory_bytes
from pserver.transport import grpc_server, methods, status
from pserver.transport.gen import coordinator_pb2, shards_pb2, types_pb2
from pserver.transport.grpc_channel import GrpcChannel
from pserver.transport.status import MAX_ENCODED_BYTES, to_wire
from pserver.types import PROTOCOL_VERSION
from pserver.wire.layout import MAX_BUCKETS, MAX_MODEL_BYTES, Bucket, build_layout
from pserver.wire.tensors import from_bytes, size_in_bytes
from pserver.wire.values import MAX_VALUE_BYTES, pack_value, unpack_value
from tests.hostile.world import (
    CALL_TIMEOUT_S,
    METHODS,
    TRANSPORTS,
    Trainer,
    WireModel,
    World,
    adam,
    model_spec,
    num_staged,
    tensor,
)
from tests.waiting import until

FLOAT = torch.float32
HUGE = (1 << 62) - 1


#: For what is refused behind the transport.
over_grpc = pytest.mark.parametrize("world", ["grpc"], indirect=True)


@pytest.fixture
def attacker(world: World) -> Trainer:
    return Trainer(world)


@pytest.fixture
def model(attacker: Trainer) -> WireModel:
    """The attacker's own, ready."""
    return attacker.model(model_spec("own"))


@pytest.fixture
def victims(attacker: Trainer, world: World) -> WireModel:
    """The victim's model, as the attacker addresses it."""
    return WireModel(attacker, world.victim_model.spec, world.victim_model.epoch)


# Who asks


def requests_of(world: World, trainer_id: int) -> dict[str, list[Message]]:
    """Every request that names a trainer, for the victim's model."""
    address = world.victim_model.address()
    push_id = types_pb2.PushId(trainer_id=trainer_id, sequence=1, lowest_unacknowledged=1)
    spec = world.victim.register_request(world.victim_model.spec).spec
    return {
        "Renew": [coordinator_pb2.RenewRequest(trainer_id=trainer_id)],
        "RegisterModel": [coordinator_pb2.RegisterModelRequest(push_id=push_id, spec=spec, wait_s=1)],
        "Attach": [coordinator_pb2.AttachRequest(push_id=push_id, model="victim")],
        "DropModel": [coordinator_pb2.DropModelRequest(push_id=push_id, model="victim")],
        "Initialise": [shards_pb2.InitialiseRequest(shard=address, push_id=push_id)],
        "Pull": [shards_pb2.PullRequest(shard=address, trainer_id=trainer_id)],
        "PullState": [shards_pb2.PullStateRequest(shard=address, trainer_id=trainer_id)],
        "Step": [shards_pb2.StepRequest(shard=address, push_id=push_id, chunks=world.victim_model.chunks({}))],
        "StepOnce": [shards_pb2.StepRequest(shard=address, push_id=push_id, chunks=world.victim_model.chunks({}))],
        "OpenMemory": [shards_pb2.OpenMemoryRequest(shard=address, trainer_id=trainer_id, nonce=world.nonce())],
        "DropContext": [shards_pb2.DropContextRequest(shard=address, push_id=push_id)],
    }


@pytest.mark.parametrize("trainer_id", [0, -1, 12345, HUGE, -(1 << 63)])
def test_a_trainer_that_never_joined_is_refused_everywhere(trainer_id: int, world: World) -> None:
    for name, requests in requests_of(world, trainer_id).items():
        expected = InvalidRequest if trainer_id != 12345 else InvalidRequest | TrainerEnded
        with pytest.raises(PserverError, match=str(trainer_id)) as raised:
            world.call(name, *requests)
        assert isinstance(raised.value, expected), (name, raised.value)


def test_a_trainer_that_has_ended_is_refused_everywhere(attacker: Trainer, world: World) -> None:
    world.call("Leave", coordinator_pb2.LeaveRequest(push_id=attacker.push_id()))
    until(lambda: world.footprint().num_living == 0, lambda: "shards hear of it")
    for name, requests in requests_of(world, attacker.trainer_id).items():
        with pytest.raises(TrainerEnded, match=str(attacker.trainer_id)):
            world.call(name, *requests)


@over_grpc
@pytest.mark.parametrize(
    "replaced",
    [{"sequence": 0}, {"sequence": -1}, {"sequence": -(1 << 63)}, {"lowest_unacknowledged": 0},
     {"lowest_unacknowledged": -1}, {"lowest_unacknowledged": HUGE}],
    ids=str,
)  # fmt: skip
def test_mutations_that_no_trainer_counts_like_this_are_refused(
    replaced: dict[str, int], world: World, attacker: Trainer
) -> None:
    for name, (first, *others) in requests_of(world, attacker.trainer_id).items():
        if "push_id" not in first.DESCRIPTOR.fields_by_name:
            continue
        first.push_id.CopyFrom(attacker.push_id(**replaced))  # type: ignore[attr-defined]
        if name == "Initialise":
            others = [shards_pb2.InitialiseRequest(chunks=world.victim_model.chunks({}))]
        with pytest.raises(InvalidRequest, match="is not valid: expected a sequence from 1"):
            world.call(name, first, *others)


def test_every_request_that_names_a_trainer_is_tried_above(world: World) -> None:
    fields = {name: method.request_type.DESCRIPTOR.fields_by_name for name, method in METHODS.items()}
    naming = {name for name in fields if "push_id" in fields[name] or "trainer_id" in fields[name]}
    assert naming - {"Leave"} == requests_of(world, 1).keys()


def test_a_context_under_the_id_of_another_trainers_is_ones_own(world: World, victims: WireModel) -> None:
    """Pushing into it and dropping it leave the other trainer's context as it is."""
    world.check_victim()
    model, mirror = world.victim_model, world._mirror
    expected = mirror.step_()
    halves = {name: values / 2 for name, values in mirror.gradients.items()}
    world.call("Step", model.push_request(halves, context_id=77))
    ones = {"w": torch.ones(5, 8), "d": torch.ones(9, dtype=torch.float64)}
    world.call("Step", victims.push_request(ones, context_id=77))
    drop = shards_pb2.DropContextRequest(shard=victims.address(), push_id=victims.trainer.push_id(), context_id=77)
    world.call("DropContext", drop)
    first, last = model.step_requests(halves, context_id=77)
    last.commit.base_round = last.commit.step - 1
    world.call("Step", first, last)
    assert all(torch.equal(values, expected[name]) for name, values in model.values().items())


def test_a_commit_for_a_context_that_is_unknown_or_dropped_is_refused(world: World, model: WireModel) -> None:
    world.call("Step", model.push_request({}, context_id=5))
    drop = shards_pb2.DropContextRequest(shard=model.address(), push_id=model.trainer.push_id(), context_id=5)
    world.call("DropContext", drop)
    for context in (5, 999, -1, HUGE):
        first = shards_pb2.StepRequest(
            shard=model.address(), push_id=model.trainer.push_id(), context_id=context, commit=model.commit()
        )
        with pytest.raises(InvalidRequest, match="incomplete"):
            world.call("Step", first)


def test_contexts_without_end_are_refused(world: World, victims: WireModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pserver.core.contexts.MAX_CONTEXTS_PER_TRAINER", 20)
    for _ in range(20):
        world.call("Step", victims.push_request({}))
    with pytest.raises(InvalidRequest, match="20 contexts"):
        world.call("Step", victims.push_request({}))
    assert world.footprint().num_contexts == 20


def test_mutations_that_are_never_acknowledged_are_refused_in_the_end(
    world: World, victims: WireModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup, "MAX_UNACKNOWLEDGED", 30)
    trainer = victims.trainer

    def drop(**replaced: int) -> None:
        push_id = trainer.push_id(**replaced)
        world.call("DropContext", shards_pb2.DropContextRequest(shard=victims.address(), push_id=push_id))

    for _ in range(30):
        drop(lowest_unacknowledged=1)
    with pytest.raises(InvalidRequest, match="30 mutations whose outcome it has not acknowledged"):
        drop(lowest_unacknowledged=1)
    drop(lowest_unacknowledged=1, sequence=30)  # a repeat
    drop()
    with pytest.raises(StalePush):
        drop(lowest_unacknowledged=1, sequence=3)


def test_joining_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_TRAINERS", 5)
    members = Membership(lease_s=1.0, first_id=1)
    for number in range(5):
        members.join(f"{number}", -1, 0.0)
    with pytest.raises(InvalidRequest, match="5 trainers have joined"):
        members.join("one more", -1, 0.0)
    assert members.join("3", -1, 0.0).trainer_id == 4


def test_nonces_of_those_who_left_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_ENDED_NONCES", 10)
    members = Membership(lease_s=1.0, first_id=1)
    stays = members.join("stays", -1, 0.0)
    for number in range(500):
        members.end(members.join(f"{number}", -1, 0.0).trainer_id)
        assert len(members._by_nonce) <= 22
    assert members.join("stays", -1, 0.0) is stays
    with pytest.raises(TrainerEnded):
        members.join("499", -1, 0.0)


# Names and figures

LONG = 100_000 * "x"


def test_long_names_are_refused_and_not_echoed_whole(world: World, attacker: Trainer) -> None:
    join = coordinator_pb2.JoinRequest(nonce=LONG, rank=-1, protocol=PROTOCOL_VERSION)
    register = [
        attacker.register_request(replace(model_spec("m"), **replaced))
        for replaced in (
            {"name": LONG},
            {"tensors": (tensor(LONG, 4),)},
            {"optimizer": LONG},
            {"sync_policy": LONG},
            {"buffers": LONG},
            {"optimizer_groups": ({LONG: 1.0},)},
            {"optimizer_groups": ({"lr": LONG},)},
            {"sync_policy_arguments": {LONG: LONG}},
        )
    ]
    attach = coordinator_pb2.AttachRequest(push_id=attacker.push_id(), model=LONG)
    pull = shards_pb2.PullRequest(shard=shards_pb2.ShardAddress(model=LONG), trainer_id=attacker.trainer_id)
    calls = [("Join", join), *(("RegisterModel", each) for each in register), ("Attach", attach), ("Pull", pull)]
    for name, request in calls:
        with pytest.raises(PserverError) as raised:
            world.call(name, request)
        assert len(str(raised.value)) <= MAX_ENCODED_BYTES, name


@over_grpc
@pytest.mark.parametrize(
    ("reported", "message"),
    [
        ({str(number): 1.0 for number in range(65)}, "64 figures, but 65 came"),
        ({65 * "x": 1.0}, "1 to 64 characters, but one has 65"),
        ({"": 1.0}, "has 0"),
    ],
    ids=["too many", "a long name", "no name"],
)
def test_figures_are_bounded(reported: dict[str, float], message: str, world: World, attacker: Trainer) -> None:
    good = {str(number): 1.0 for number in range(61)} | {64 * "x": math.nan, "y": math.inf, "z": -1e308}
    world.call("Renew", coordinator_pb2.RenewRequest(trainer_id=attacker.trainer_id, reported=good))
    with pytest.raises(InvalidRequest, match=message):
        world.call("Renew", coordinator_pb2.RenewRequest(trainer_id=attacker.trainer_id, reported=reported))
    (kept,) = (each for each in world.status().trainers if each.trainer_id == attacker.trainer_id)
    assert dict(kept.reported).keys() == good.keys()


@over_grpc
@pytest.mark.parametrize("field", ["sent_bytes", "received_bytes"])
def test_counts_of_bytes_are_not_negative(field: str, world: World, attacker: Trainer) -> None:
    request = coordinator_pb2.RenewRequest(trainer_id=attacker.trainer_id, **{field: -1})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="must not be negative"):
        world.call("Renew", request)


def test_a_long_message_is_cut_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding takes seconds for a message of some megabytes, on the event loop."""
    lengths: list[int] = []

    def quote(text: str, safe: str) -> str:
        lengths.append(len(text))
        return urllib.parse.quote(text, safe=safe)

    monkeypatch.setattr(status, "quote", quote)
    name, message = to_wire(InvalidRequest("\N{SNOWMAN}" * 1_000_000))
    assert name == "InvalidRequest"
    assert max(lengths) <= MAX_ENCODED_BYTES
    assert len(message) * 9 <= MAX_ENCODED_BYTES


# Links of servers


def hello(**replaced: Any) -> coordinator_pb2.ServerMessage:
    fields = {"name": "evil", "address": "127.0.0.1:1", "incarnation": 5, "protocol": PROTOCOL_VERSION, **replaced}
    return coordinator_pb2.ServerMessage(hello=coordinator_pb2.Hello(**fields))


@over_grpc
@pytest.mark.parametrize(
    ("replaced", "error", "message"),
    [
        ({"name": ""}, ConfigError, "1 to 255 characters, but this one has 0"),
        ({"name": LONG}, ConfigError, "but this one has 100000"),
        ({"address": ""}, ConfigError, "host:port"),
        ({"address": LONG + ":1"}, ConfigError, "512 characters, but this one has 100002"),
        ({"address": "127.0.0.1:99999"}, ConfigError, "host:port"),
        ({"name": "s0"}, ConfigError, "'s0' is linked already"),
        (
            {"protocol": PROTOCOL_VERSION + 1},
            ProtocolMismatch,
            f"{PROTOCOL_VERSION}, the server {PROTOCOL_VERSION + 1}",
        ),
        ({"protocol": -1}, ProtocolMismatch, "the server -1"),
    ],
    ids=["no name", "a long name", "no address", "a long address", "no port", "a living server", "newer", "negative"],
)
def test_a_server_that_cannot_be_one_is_not_linked(
    replaced: dict[str, Any], error: type[PserverError], message: str, world: World
) -> None:
    with pytest.raises(error, match=message):
        world.call("Link", hello(**replaced))
    assert [each.name for each in world.status().servers] == ["s0"]


def test_what_a_stranger_reports_about_a_model_changes_nothing(own_world: World) -> None:
    """It linked well, but no shard was ever given to it."""
    world = own_world
    about = {"model": "victim", "shard": 0, "epoch": world.victim_model.epoch}
    failed = coordinator_pb2.ServerMessage(shard_failed=coordinator_pb2.ShardFailed(**about, failure="a lie"))
    applied = coordinator_pb2.ServerMessage(applied=coordinator_pb2.Applied(**about, round=HUGE, version=HUGE))
    of_replicas = [
        coordinator_pb2.ServerMessage(**each)
        for each in (
            {"replica_fenced": coordinator_pb2.ReplicaFenced(**about, position=HUGE)},
            {"shard_promoted": coordinator_pb2.ShardPromoted(**about, round=HUGE, version=HUGE, attempt=HUGE)},
            {"replica_caught_up": coordinator_pb2.ReplicaCaughtUp(**about, number=1)},
            {"replica_failed": coordinator_pb2.ReplicaFailed(**about, number=1, failure="a lie")},
            {"replica_lag": coordinator_pb2.ReplicaLag(**about, number=1, num_entries=HUGE)},
        )
    ]
    replies = world.call("Link", hello(), failed, applied, *of_replicas)
    assert [reply.WhichOneof("kind") for reply in replies][2:] == ["drop_shard"] * 7
    (status,) = world.status().models
    assert (status.state, status.round) == ("ready", 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_link_of_a_server_whose_lease_has_ended_is_ended(transport: str) -> None:
    """It need not say anything any more for that; whoever goes silent would keep its link for ever."""
    with World(transport, server_lease_s=1.5) as world:
        silent = world.hold("Link", hello())
        assert silent.outcome().error is None
        assert {each.name: each.alive for each in world.status().servers} == {"s0": True, "evil": False}
        world.check_victim()


# Streams


def first_of_step(victims: WireModel) -> Message:
    """A header and one bucket of the victim's five."""
    return shards_pb2.StepRequest(
        shard=victims.address(), push_id=victims.trainer.push_id(), context_id=1, chunks=victims.chunks({})[:1]
    )


def first_of_initialise(victims: WireModel) -> Message:
    """A header and one bucket of the victim's five."""
    return shards_pb2.InitialiseRequest(
        shard=victims.address(), push_id=victims.trainer.push_id(), chunks=victims.chunks({})[:1]
    )


STREAMS: dict[str, Callable[[WireModel], Message]] = {"Step": first_of_step, "Initialise": first_of_initialise}
every_stream = pytest.mark.parametrize("name", STREAMS)


def test_every_rpc_that_streams_requests_is_tried_here() -> None:
    assert {name for name, method in METHODS.items() if method.client_streaming} == {*STREAMS, "Link", "Follow"}


@every_stream
def test_a_stream_that_goes_silent_is_ended(
    name: str, world: World, victims: WireModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "MAX_PAUSE_S", 0.2)
    for call in (world.hold(name), world.hold(name, STREAMS[name](victims)), world.hold("Link"), world.hold("Follow")):
        error = call.outcome().error
        assert isinstance(error, DeadlineExceeded), error
        assert "no message came" in str(error)
    assert world.footprint().num_streams == 0
    until(lambda: num_staged() == 0, lambda: f"{num_staged()} streams are still held")


@every_stream
def test_a_stream_that_is_broken_off_leaves_nothing(name: str, world: World, victims: WireModel) -> None:
    call = world.hold(name, STREAMS[name](victims))
    until(lambda: world.footprint().num_streams == 1, lambda: "the stream arrives")
    assert num_staged() > 0
    call.break_off()
    del call  # it holds a traceback
    until(lambda: world.footprint().num_streams == 0, lambda: "the stream ends")
    until(lambda: num_staged() == 0, lambda: f"{num_staged()} streams are still held")
    assert world.footprint().num_contexts == 0


@every_stream
def test_the_stream_of_a_trainer_that_ends_is_ended(name: str, world: World, victims: WireModel) -> None:
    call = world.hold(name, STREAMS[name](victims))
    until(lambda: world.footprint().num_streams == 1, lambda: "the stream arrives")
    world.call("Leave", coordinator_pb2.LeaveRequest(push_id=victims.trainer.push_id()))
    until(lambda: world.footprint().num_living == 0, lambda: "the shard hears of it")
    call.go_on(METHODS[name].request_type(chunks=victims.chunks({})[1:2]))
    until(lambda: world.footprint().num_streams == 0, lambda: "the stream ends")
    assert isinstance(call.finish().error, TrainerEnded)
    del call  # in process, its traceback is the server's
    until(lambda: num_staged() == 0, lambda: f"{num_staged()} streams are still held")


def test_streams_without_end_are_refused(world: World, victims: WireModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_host, "MAX_STREAMS_PER_TRAINER", 3)
    calls = [world.hold("Step", first_of_step(victims)) for _ in range(3)]
    until(lambda: world.footprint().num_streams == 3, lambda: "the streams arrive")
    with pytest.raises(InvalidRequest, match="3 streams under way"):
        world.call("Step", first_of_step(victims))
    world.check_victim()
    assert all(isinstance(call.finish().error, InvalidRequest) for call in calls)


def test_nothing_comes_after_the_commit(world: World, model: WireModel) -> None:
    first, last = model.step_requests({"w": torch.ones(32)})
    with pytest.raises(InvalidRequest, match="commit must be in the last"):
        world.call("Step", first, last, shards_pb2.StepRequest())
    assert model.values()["w"].eq(0).all()


@over_grpc
@pytest.mark.parametrize(
    "options",
    [
        b"",
        b"\xc1",
        pack_value(3),
        pack_value([3]),
        pack_value({}),
        pack_value([{}, {}]),
        pack_value([{"lr": "fast"}]),
        pack_value([{"lr": [1.0]}]),
        pack_value([{"lr": None}]),
        pack_value([{"speed": 1.0}]),
        pack_value([{1: 1.0}]),
        pack_value([{"lr": b"1"}]),
    ],
    ids=bytes.hex,
)
def test_options_that_the_optimizer_does_not_take_are_refused_and_training_goes_on(
    options: bytes, world: World, model: WireModel
) -> None:
    first, last = model.step_requests({"w": torch.ones(32)})
    last.commit.options = options
    with pytest.raises(InvalidRequest):
        world.call("Step", first, last)
    assert model.step({"w": torch.ones(32)})["w"].eq(-1).all()


@over_grpc
@pytest.mark.parametrize("wait_s", [math.nan, math.inf, -1.0, 1e308])
def test_waits_without_end_are_refused(wait_s: float, world: World, victims: WireModel) -> None:
    trainer_id = victims.trainer.trainer_id
    requests: dict[str, list[Message]] = {
        "Pull": [shards_pb2.PullRequest(shard=victims.address(), trainer_id=trainer_id, wait_s=wait_s)],
        "PullState": [shards_pb2.PullStateRequest(shard=victims.address(), trainer_id=trainer_id, wait_s=wait_s)],
        "Step": [*victims.step_requests({}, wait_s=wait_s)],
        "StepOnce": [victims.push_request({}, wait_s=wait_s, commit=victims.commit())],
        "RegisterModel": [victims.trainer.register_request(model_spec("m"), wait_s=wait_s)],
        "Watch": [coordinator_pb2.WatchRequest(model="victim", wait_s=wait_s)],
    }
    waiting = {name for name, each in METHODS.items() if "wait_s" in each.request_type.DESCRIPTOR.fields_by_name}
    assert waiting == requests.keys()
    for name, messages in requests.items():
        with pytest.raises(InvalidRequest, match="wait_s must be in"):
            world.call(name, *messages)
    assert world.footprint().num_contexts == 0


@over_grpc
@pytest.mark.parametrize("indices", [[-1], [2], [(1 << 31) - 1], [0] * 3, [0] * 1_000_000], ids=lambda x: str(x)[:9])
def test_absent_tensors_that_the_model_does_not_have_are_refused(
    indices: list[int], world: World, victims: WireModel
) -> None:
    first, last = victims.step_requests({})
    last.absent_tensors.extend(indices)
    with pytest.raises(InvalidRequest, match="absent tensors"):
        world.call("Step", first, last)


def test_large_messages_are_refused(world: World, attacker: Trainer) -> None:
    pull = shards_pb2.PullRequest(shard=shards_pb2.ShardAddress(model="x" * (17 << 20)), trainer_id=1)
    with pytest.raises(InvalidRequest, match="at most 16777216 are accepted"):
        world.call("Pull", pull)
    spec = model_spec("m")
    register = attacker.register_request(spec)
    register.spec.optimizer_groups = bytes(17 << 20)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_VALUE_BYTES} are accepted"):
        world.call("RegisterModel", register)


def test_messages_beyond_all_limits_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(grpc_server._OPTIONS)["grpc.max_receive_message_length"] == methods.MAX_LARGE_REQUEST_BYTES
    options = {**dict(grpc_server._OPTIONS), "grpc.max_receive_message_length": 1 << 20}
    monkeypatch.setattr(grpc_server, "_OPTIONS", tuple(options.items()))
    with World("grpc") as world:
        request = coordinator_pb2.AttachRequest(push_id=world.victim.push_id(), model="x" * (2 << 20))
        with pytest.raises(InvalidRequest, match="larger than max"):
            world.call("Attach", request)
        world.check_victim()


# Chunks: nothing is taken for one that does not fit

TIB = 1 << 40


def huge_bucket() -> Bucket:
    """A bucket that no machine of ours can hold."""
    return Bucket(index=0, flat=0, start=0, stop=TIB // 4, dtype=FLOAT, group=0)


@pytest.mark.parametrize(
    ("bucket", "offset", "code", "data"),
    [
        (0, -4, 1, b"1234"),
        (0, 4, 1, b"1234"),
        (0, HUGE, 1, b"1234"),
        (0, 1 << 80, 1, b"1234"),
        (0, 0, 1, b""),
        (0, 0, 2, b"1234"),
        (0, 0, 0, b"1234"),
        (0, 0, 99, b"1234"),
        (1, 0, 1, b"1234"),
        (-1, 0, 1, b"1234"),
        (1 << 80, 0, 1, b"1234"),
    ],
    ids=str,
)
def test_a_chunk_that_does_not_fit_takes_no_memory(bucket: int, offset: int, code: int, data: bytes) -> None:
    staging = Staging([huge_bucket()])
    with pytest.raises(InvalidRequest):
        staging.add_chunk(bucket, offset, code, data)
    assert staging.empty
    assert not staging._tensors


@over_grpc
@pytest.mark.parametrize(
    ("offset", "size"), [(32, 64), (63, 1), (-64, 64), (64, 65), (65, 1), (64, 0)],
    ids=["overlapping", "the last byte again", "negative", "beyond the end", "a gap", "empty"],
)  # fmt: skip
def test_chunks_follow_each_other(offset: int, size: int, world: World, victims: WireModel) -> None:
    chunks = victims.chunks({})
    (whole, *others) = chunks
    assert len(whole.data) == 64
    pieces = [
        types_pb2.Chunk(bucket=0, offset_bytes=0, dtype=whole.dtype, data=whole.data[:64]),
        types_pb2.Chunk(bucket=0, offset_bytes=offset, dtype=whole.dtype, data=bytes(size)),
    ]
    chunks = [*pieces, *others]
    message = f"expected a chunk from byte 64 on, got {size} bytes from byte {offset} on"
    with pytest.raises(InvalidRequest, match=message):
        world.call("Step", *victims.step_requests({}, chunks=chunks))
    with pytest.raises(InvalidRequest, match=message):
        world.call("StepOnce", victims.push_request({}, chunks=chunks, commit=victims.commit()))
    assert world.footprint().num_contexts == 0


# Optimizer state


def state(**replaced: Any) -> StateChunk:
    fields: dict[str, Any] = {
        "bucket": 0, "tensor": 0, "key": "momentum_buffer", "start": 0, "shape": (16,), "dtype_code": 1,
        "is_plain": False, "plain": None, "offset_bytes": 0, "data": bytes(64),
    }  # fmt: skip
    return StateChunk(**{**fields, **replaced})


BUCKETS = build_layout([tensor("w", 32)], 64).buckets


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (state(shape=(1 << 40,)), "more state than"),
        (state(shape=(HUGE, HUGE)), "more bytes than can be counted"),
        (state(shape=(0, HUGE, HUGE)), "more bytes than can be counted"),
        (state(shape=(-1,)), "negative"),
        (state(shape=(1,) * 1_000_000), "64 dimensions, but 1000000 came"),
        (state(shape=(HUGE,) * 300), "64 dimensions"),
        (state(data=bytes(65)), "has 64 bytes, but 65 came"),
        (state(is_plain=True, plain=1.0), "has 0 bytes, but 64 came"),
        (state(bucket=2), "bucket 2, which is not stepped here"),
        (state(bucket=-1), "bucket -1"),
        (state(offset_bytes=64), "does not follow"),
        (state(offset_bytes=-64), "does not follow"),
        (state(key=""), "1 to 256 characters"),
        (state(key="x" * 257), "1 to 256 characters"),
        (state(dtype_code=99), "code 99 is unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_state_that_lies_about_its_size_is_refused_before_memory_is_taken(chunk: StateChunk, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StateStaging(BUCKETS).add_chunk(chunk)


def test_state_comes_once() -> None:
    staging = StateStaging(BUCKETS)
    staging.add_chunk(state())
    staging.add_chunk(state(bucket=1, start=16))
    with pytest.raises(InvalidRequest, match="came twice"):
        staging.add_chunk(state())


def test_state_that_never_ends_is_refused() -> None:
    """Many names, many small values: what is kept is bounded by the size of the buckets."""
    staging = StateStaging(BUCKETS)

    def flood() -> None:
        for number in range(MAX_BYTES_BESIDE):
            staging.add_chunk(state(key=f"{number}"))

    with pytest.raises(InvalidRequest, match="more state than"):
        flood()
    assert len(staging._names) < 4096


def test_state_that_ends_early_is_refused() -> None:
    staging = StateStaging(BUCKETS)
    staging.add_chunk(state(data=bytes(60)))
    with pytest.raises(InvalidRequest, match="64 bytes, but 60 came"):
        staging.complete()


# Values


@pytest.mark.parametrize("shape", [(HUGE,) * 300, (0, HUGE, HUGE), (1,) * 65, (-1,), (HUGE,), (1 << 61,)], ids=len)
def test_shapes_that_no_tensor_has_are_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest):
        from_bytes(bytes(4), FLOAT, shape)


def test_sizes_are_counted_exactly() -> None:
    assert size_in_bytes(FLOAT, (3, 5)) == 60
    assert size_in_bytes(FLOAT, ()) == 4
    assert size_in_bytes(torch.float64, (7, 0)) == 0


def test_a_value_that_is_too_large_is_refused_on_both_sides() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_VALUE_BYTES}"):
        pack_value("x" * MAX_VALUE_BYTES)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_VALUE_BYTES}"):
        unpack_value(bytes(MAX_VALUE_BYTES + 1))


@pytest.mark.parametrize(
    ("code", "parts"),
    [(2, "text"), (2, {}), (2, 3), (3, ["1e5", "2"]), (3, [1.0]), (3, [1, 2]), (3, {}), (4, []), (127, []), (-2, [])],
    ids=str,
)
def test_extensions_hold_what_they_must(code: int, parts: object) -> None:
    with pytest.raises(InvalidRequest):
        unpack_value(msgpack.packb(msgpack.ExtType(code, msgpack.packb(parts))) if code >= 0 else b"\xd4\xfe\x90")


@over_grpc
def test_too_many_tensors_are_refused_before_they_are_read(
    world: World, attacker: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.transport.convert.MAX_TENSORS", 3)
    spec = model_spec("m", tensors=tuple(tensor(f"w{n}", 1) for n in range(4)))
    with pytest.raises(InvalidRequest, match="3 tensors, but 4 came"):
        world.call("RegisterModel", attacker.register_request(spec))


def test_a_model_of_many_tensors_is_registered(world: World, attacker: Trainer) -> None:
    """It is decoded apart from what must be quick."""
    attacker.register(model_spec("many", tensors=tuple(tensor(f"w{n}", 1) for n in range(2000)), bucket_bytes=0))


def test_optimizer_state_that_a_stranger_offered_is_never_used(world: World, attacker: Trainer) -> None:
    """Whether it was refused, or its sender has ended."""
    initialiser = Trainer(world)
    momentum = constructor_arguments("SGD", torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.5).param_groups[0])
    model = initialiser.register(model_spec("own", optimizer_groups=(momentum,)))
    strange = WireModel(attacker, model.spec, model.epoch)

    def offer(**replaced: Any) -> None:
        first, last = strange.initialise_requests({"w": torch.full((32,), 7.0)})
        for bucket in (0, 1):
            chunk = first.state.add(bucket=bucket, tensor=0, key="momentum_buffer", start=16 * bucket, dtype=1)
            chunk.shape.append(16)
            chunk.data = torch.full((16,), 100.0).numpy().tobytes()
        for field, value in replaced.items():
            setattr(first.state[1], field, value)
        world.call("Initialise", first, last)

    with pytest.raises(InvalidRequest):
        offer(key="nonsense", start=3)
    offer()
    world.call("Leave", coordinator_pb2.LeaveRequest(push_id=attacker.push_id()))
    until(lambda: world.footprint().num_living == 1, lambda: "the shard hears of it")
    world.call("Initialise", *model.initialise_requests({}))
    world.call("RegisterModel", initialiser.register_request(model.spec, initialised=model.epoch))
    world.call("Attach", coordinator_pb2.AttachRequest(push_id=initialiser.push_id(), model="own", epoch=model.epoch))
    assert model.step({"w": torch.ones(32)})["w"].eq(-1).all()
    assert model.step({"w": torch.ones(32)})["w"].eq(-2.5).all()


def test_too_many_parameter_groups_are_refused_before_one_is_tried(world: World, attacker: Trainer) -> None:
    request = attacker.register_request(model_spec("m", optimizer_groups=({},) * 5000))
    with pytest.raises(InvalidRequest, match="4096 parameter groups, but 5000 came"):
        world.call("RegisterModel", request)


# Models


def test_a_model_beyond_the_servers_memory_is_refused_by_name(world: World, attacker: Trainer) -> None:
    num_bytes = memory_bytes() + (1 << 20)
    assert num_bytes < MAX_MODEL_BYTES
    request = attacker.register_request(model_spec("big", tensors=(tensor("w", num_bytes // 4),), bucket_bytes=1 << 30))
    with pytest.raises(ModelFailed, match=r"values alone need \d+ bytes, but server s0 has \d+ bytes") as raised:
        world.call("RegisterModel", request)
    assert "make its shard" in str(raised.value)
    world.check_victim()


def test_models_that_fit_one_by_one_but_not_together_are_refused(
    world: World, attacker: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = model_spec("first", tensors=(tensor("w", 1 << 20),), bucket_bytes=1 << 20)
    held = sum(hosted.num_bytes for hosted in world.node.shards._shards.values())
    monkeypatch.setattr(shard_host, "memory_bytes", lambda: held + (6 << 20))
    attacker.register(spec)
    with pytest.raises(ModelFailed, match="that no other model takes"):
        attacker.register(replace(spec, name="second"))
    drop = coordinator_pb2.DropModelRequest(push_id=attacker.push_id(), model="first")
    world.call("DropModel", drop)
    attacker.register(replace(spec, name="third"))


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    machine = memory_bytes()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(shard_host, "_CGROUP_LIMIT", limit)
    assert memory_bytes() >= machine
    for text, expected in (("max\n", None), ("1048576\n", 1 << 20), ("", None)):
        limit.write_text(text)
        assert memory_bytes() == (expected or memory_bytes())
    assert memory_bytes() > 1 << 20


@over_grpc
@pytest.mark.parametrize(
    "spec",
    [
        model_spec("m", tensors=(tensor("w", 1 << 50),)),
        model_spec("m", tensors=(tensor("w", HUGE, HUGE, HUGE),)),
        model_spec("m", tensors=(tensor("w", 0, HUGE, HUGE), tensor("x", 4))),
        model_spec("m", tensors=(tensor("w", *[1] * 1000),)),
        model_spec("m", tensors=(tensor("w", 64 * MAX_BUCKETS),), bucket_bytes=64),
        model_spec("m", tensors=(tensor("w", -4),)),
        model_spec("m", tensors=(tensor("w", 4), tensor("w", 4))),
        model_spec("m", tensors=(tensor("w", 4, group=7),)),
        model_spec("m", tensors=(tensor("w", 4, group=-3),)),
        model_spec("m", tensors=(tensor("w", 4, group=(1 << 31) - 1),)),
        model_spec("m", tensors=()),
        model_spec("m", bucket_bytes=-64),
        model_spec("m", bucket_bytes=HUGE),
        model_spec("m", world_size=-1),
        model_spec("m", replicas=-1),
        model_spec("m", replicas=(1 << 31) - 1),
        model_spec("m", world_size=(1 << 31) - 1),
        model_spec("m", sync_policy_arguments={"deadline": math.nan}),
        model_spec("m", sync_policy_arguments={"deadline": "soon"}),
        model_spec("m", sync_policy_arguments={"backup_workers": -1}),
        model_spec("m", sync_policy="ssp", sync_policy_arguments={"max_lag": True}),
        model_spec("m", optimizer="LBFGS"),
        model_spec("m", optimizer_groups=({"lr": -1.0},)),
        model_spec("m", optimizer_groups=({"lr": "fast"},)),
        model_spec("m", optimizer_groups=({"params": []},)),
        model_spec("m", optimizer_groups=()),
    ],
    ids=lambda spec: f"{spec.optimizer}",
)
def test_models_that_make_no_sense_are_refused_and_take_nothing(
    spec: ModelSpec, world: World, attacker: Trainer
) -> None:
    with pytest.raises(PserverError) as raised:
        world.call("RegisterModel", attacker.register_request(spec))
    assert not isinstance(raised.value, DeadlineExceeded | ModelFailed | InternalError), raised.value
    assert world.footprint().models == []


W, D = tensor("w", 5, 8), tensor("d", 9, dtype=torch.float64)
OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"tensors": (tensor("v", 5, 8), D)}, r"tensor 0: expected 'w' \[5, 8\] float32 group 0, got 'v'"),
    "a shape": ({"tensors": (tensor("w", 8, 5), D)}, r"tensor 0: .*got 'w' \[8, 5\] float32"),
    "a dtype": (
        {"tensors": (W, tensor("d", 9))},
        r"tensor 1: expected 'd' \[9\] float64 group 0, got 'd' \[9\] float32",
    ),
    "one more": ({"tensors": (W, D, tensor("e", 1))}, "tensor 2: expected none, got 'e'"),
    "one less": ({"tensors": (W,)}, "tensor 1: expected 'd' .*, got none"),
    "the order": ({"tensors": (D, W)}, "tensor 0: expected 'w'"),
    "frozen": ({"tensors": (W, replace(D, group=-1))}, "tensor 1: expected .* group 0, got 'd' .* stored"),
    "the bucket size": ({"bucket_bytes": 128}, "bucket_bytes: expected 64, got 128"),
    "the optimizer": ({"optimizer": "AdamW"}, "optimizer: expected Adam, got AdamW"),
    "an argument": ({"optimizer_groups": (adam(0.25),)}, "optimizer_groups: expected .*0.125.*, got .*0.25"),
    "the policy": ({"sync_policy": "async"}, "sync_policy: expected bsp, got async"),
    "its arguments": ({"sync_policy_arguments": {"backup_workers": 1}}, "sync_policy_arguments: expected {}, got"),
    "the world": ({"world_size": 2}, "world_size: expected 1, got 2"),
    "the buffers": ({"buffers": "mean"}, "buffers: expected lowest, got mean"),
    "the replicas": ({"replicas": 1}, "replicas: expected 0, got 1"),
}


@over_grpc
@pytest.mark.parametrize(("replaced", "difference"), OTHER.values(), ids=OTHER)
def test_a_second_model_under_a_taken_name_names_the_first_difference(
    replaced: dict[str, Any], difference: str, world: World, attacker: Trainer
) -> None:
    other = replace(world.victim_model.spec, **replaced)
    with pytest.raises(LayoutMismatch, match=difference):
        world.call("RegisterModel", attacker.register_request(other))


def test_messages_for_another_layout_or_epoch_or_model_are_refused(world: World, victims: WireModel) -> None:
    for replaced, error in (
        ({"fingerprint": (1 << 64) - 1}, LayoutMismatch),
        ({"epoch": -(1 << 63)}, StaleEpoch),
        ({"epoch": HUGE}, StaleEpoch),
        ({"model": "none"}, UnknownModel),
        ({"shard": 1}, UnknownModel),
        ({"shard": -(1 << 31)}, UnknownModel),
    ):
        address = victims.address(**replaced)
        for name, *requests in (
            ("Step", *victims.step_requests({}, shard=address)),
            ("StepOnce", victims.push_request({}, shard=address)),
            ("OpenMemory", victims.open_memory_request(shard=address)),
        ):
            with pytest.raises(error):
                world.call(name, *requests)


# Versions


@over_grpc
@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, -1, (1 << 31) - 1])
def test_a_trainer_of_another_version_is_refused_and_told_both(version: int, world: World) -> None:
    request = coordinator_pb2.JoinRequest(nonce="n", rank=-1, protocol=version)
    with pytest.raises(ProtocolMismatch, match=f"speaks protocol {PROTOCOL_VERSION}, the trainer {version}"):
        world.call("Join", request)


def test_connecting_with_another_version_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pserver.client.cluster.PROTOCOL_VERSION", 77)
    with World("in process") as world:
        # The world's own trainers are of the server's version.
        settings = TrainerSettings.resolve(world.address, timeout_s=CALL_TIMEOUT_S, environ={})
        with pytest.raises(ProtocolMismatch, match="the trainer 77; install the same pserver"):
            Cluster(settings, connect_channel=GrpcChannel).__enter__()


@over_grpc
def test_an_rpc_that_the_server_does_not_have_is_another_version(world: World) -> None:
    unknown = replace(METHODS["Status"], name="Checkpoint")
    outcome = world.send(unknown, [b""])
    assert isinstance(outcome.error, ProtocolMismatch), outcome
    assert "install the same pserver on both" in str(outcome.error)
