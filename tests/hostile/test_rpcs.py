"""Every RPC with random and spoiled requests: clean errors, a live server, and a victim that loses nothing."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pserver.core import messages as core
from pserver.core.changes import (
    Bookkeeping,
    BucketHeld,
    Change,
    Checksum,
    ContextDropped,
    ContextHeld,
    GradientsPushed,
    RoundApplied,
    RoundPrepared,
    StepRefused,
    TrainerGone,
    TrainerRecord,
)
from pserver.core.rules import NO_RULES
from pserver.errors import InvalidRequest
from pserver.transport.changes import change_messages
from pserver.transport.gen import coordinator_pb2, replicas_pb2, shards_pb2, types_pb2
from pserver.transport.methods import COORDINATOR, ENDLESS, REPLICAS, SHARDS, Method, Sendable, encode
from pserver.types import PROTOCOL_VERSION, PushId
from tests.hostile.mutations import spoiled
from tests.hostile.world import (
    CALL_TIMEOUT_S,
    METHODS,
    TRANSPORTS,
    WAIT_S,
    Trainer,
    WireModel,
    World,
    check_clean,
    model_spec,
    num_staged,
    tensor,
)
from tests.results import step_result
from tests.waiting import until

#: Spoiled calls of one example.
CALLS_PER_EXAMPLE = 20
#: Growth of this process over many refused calls that counts as none, in bytes.
FLAT_BYTES = 48 << 20


MOMENTUM = {"lr": 1.0, "momentum": 0.5, "dampening": 0, "nesterov": False, "weight_decay": 0, "maximize": False}


class Attacker:
    """A trainer with a model that is ready and one that waits for initial values, who knows the victim's address."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.trainer = Trainer(world)
        self.ready = self.trainer.model(model_spec(f"ready {number}"))
        self.raw = self.trainer.register(model_spec(f"raw {number}", optimizer_groups=(MOMENTUM,)))
        victim = world.victim_model
        self.victim = WireModel(self.trainer, victim.spec, victim.epoch)
        self.copy = WireModel(self.trainer, model_spec(f"copy {number}", replicas=1), 0)

    def some_model(self, random: Random) -> WireModel:
        return random.choice((self.ready, self.raw, self.victim))


Case = Callable[[Attacker, Random], list[Message]]


def join(attacker: Attacker, random: Random) -> list[Message]:
    nonce = f"nonce {random.random()}"
    return [coordinator_pb2.JoinRequest(nonce=nonce, rank=random.choice((-1, 7, 0)), protocol=PROTOCOL_VERSION)]


def renew(attacker: Attacker, random: Random) -> list[Message]:
    request = coordinator_pb2.RenewRequest(trainer_id=attacker.trainer.trainer_id, sent_bytes=1, received_bytes=2)
    request.reported["loss"] = 0.5
    return [request]


def leave(attacker: Attacker, random: Random) -> list[Message]:
    return [coordinator_pb2.LeaveRequest(push_id=Trainer(attacker.world).push_id())]


def register_model(attacker: Attacker, random: Random) -> list[Message]:
    spec = random.choice((model_spec("new"), attacker.ready.spec, attacker.raw.spec, attacker.victim.spec))
    replaces = random.choice((0, 0, attacker.ready.epoch))
    return [attacker.trainer.register_request(spec, wait_s=WAIT_S, replaces=replaces)]


def attach(attacker: Attacker, random: Random) -> list[Message]:
    model = attacker.some_model(random)
    push_id = attacker.trainer.push_id()
    return [coordinator_pb2.AttachRequest(push_id=push_id, model=model.spec.name, epoch=model.epoch)]


def drop_model(attacker: Attacker, random: Random) -> list[Message]:
    return [coordinator_pb2.DropModelRequest(push_id=attacker.trainer.push_id(), model="none")]


def status(attacker: Attacker, random: Random) -> list[Message]:
    return [coordinator_pb2.StatusRequest()]


def link(attacker: Attacker, random: Random) -> list[Message]:
    """Reports of a server that owns no shard, about the victim's model and trainer."""
    about = {"model": "victim", "shard": random.choice((0, 0, 1)), "epoch": attacker.victim.epoch}
    trainer_id = random.choice((attacker.trainer.trainer_id, attacker.world.victim.trainer_id))
    hello = coordinator_pb2.Hello(name="evil", address="127.0.0.1:1", incarnation=5, protocol=PROTOCOL_VERSION)
    commit = attacker.victim.commit(step=1 << 40)
    nonfinite = [types_pb2.NonFinite(trainer_id=trainer_id, tensor=99, count=-1)]
    reports: list[Any] = [
        {"heartbeat": coordinator_pb2.Heartbeat()},
        {"shard_created": coordinator_pb2.ShardCreated(**about)},
        {"shard_initialised": coordinator_pb2.ShardInitialised(**about, trainer_id=trainer_id)},
        {"committed": coordinator_pb2.Committed(**about, trainer_id=trainer_id, commit=commit)},
        {"prepared": coordinator_pb2.Prepared(**about, round=1, attempt=1, squares=[1.0], nonfinite=nonfinite)},
        {"applied": coordinator_pb2.Applied(**about, round=1 << 40, version=1 << 40)},
        {"shard_failed": coordinator_pb2.ShardFailed(**about, failure="it is a lie")},
        {"replica_fenced": coordinator_pb2.ReplicaFenced(**about, position=1 << 40)},
        {"shard_promoted": coordinator_pb2.ShardPromoted(**about, round=1 << 40, version=1 << 40, attempt=1)},
        {"replica_caught_up": coordinator_pb2.ReplicaCaughtUp(**about, number=random.choice((1, -1)))},
        {"replica_failed": coordinator_pb2.ReplicaFailed(**about, number=random.choice((1, -1)), failure="a lie")},
        {"replica_lag": coordinator_pb2.ReplicaLag(**about, number=random.choice((1, -1)), num_entries=-1)},
    ]
    random.shuffle(reports)
    messages = [{"hello": hello}, *reports[: random.randrange(len(reports) + 1)]]
    return [coordinator_pb2.ServerMessage(**each) for each in messages]


def watch(attacker: Attacker, random: Random) -> list[Message]:
    model = random.choice((attacker.ready, attacker.raw, attacker.victim)).spec.name
    return [coordinator_pb2.WatchRequest(model=model, version=random.choice((0, 1, -1, 1 << 40)), wait_s=WAIT_S)]


def _what_primaries_say(attacker: Attacker, random: Random) -> Iterator[Message]:
    """The state of the attacker's copy, and what happens then: a push, a round, a refusal, the end of a trainer."""
    buckets = attacker.copy.layout.buckets
    gradients = {bucket.index: torch.ones(bucket.num_elements) for bucket in buckets}
    ids = [PushId(attacker.trainer.trainer_id, sequence, 1) for sequence in (1, 2, 3)]
    contribution = core.Contribution(trainer_id=ids[0].trainer_id, rank=0, step=1, weight=1)
    decision = core.Decision(round=1, contributions=(contribution,), divisor=1, options=({"lr": 1.0},))
    plan = core.Plan(plan=decision, attempt=1, rules=NO_RULES)
    report = core.Prepared(model="", shard=0, epoch=0, round=1, attempt=1, squares=(), nonfinite=())
    record = TrainerRecord(trainer_id=1, last_step=0, lowest_unacknowledged=1, outcomes={1: None})
    refused = step_result(1, accepted=False, stepped=False, reason="late")
    state: list[Change] = [
        Bookkeeping(round=0, version=0, trainers=[record], decisions=()),
        ContextHeld(trainer_id=1, context_id=9, gradients=gradients, absent=frozenset()),
        *(
            BucketHeld(bucket=each.index, round=0, master=gradients[each.index], state=(), last=each is buckets[-1])
            for each in buckets
        ),
    ]
    happened: list[Change] = [
        GradientsPushed(push_id=ids[0], context_id=1, gradients=gradients, absent=frozenset()),
        RoundPrepared(
            plan=plan,
            report=report,
            means=gradients,
            buffers={},
            absent=frozenset(),
            push_ids=[ids[1]],
            context_ids=[1],
        ),
        RoundApplied(decision=decision, version=1, checksum=random.choice((None, Checksum(bucket=0, value=7)))),
        StepRefused(push_id=ids[2], context_id=2, step=2, result=refused),
        ContextDropped(push_id=ids[2], context_id=3),
        TrainerGone(trainer_id=ids[0].trainer_id),
    ]
    if random.random() < 0.3:
        random.shuffle(happened)
    for part in state if random.random() < 0.9 else ():
        yield from map(_message, change_messages(part))
    for index, change in enumerate(happened, start=1):
        yield from map(_message, change_messages(change, index=index))


def _message(sent: Sendable) -> Message:
    return replicas_pb2.FollowRequest.FromString(encode(sent))


def follow(attacker: Attacker, random: Random) -> list[Message]:
    """A stranger says to be a primary: to a server that keeps a copy, or to the victim's primary."""
    attacker.copy.epoch = attacker.world.copy(attacker.copy.spec)
    model = random.choice((attacker.copy, attacker.copy, attacker.copy, attacker.victim))
    segment = random.choice(("", "", "", "/", "../../etc/passwd", attacker.world.memory_segment()))
    hello = replicas_pb2.FollowRequest(
        shard=model.address(), segment=segment, nonce=random.choice((b"", attacker.world.nonce()))
    )
    return [hello, *_what_primaries_say(attacker, random)]


def initialise(attacker: Attacker, random: Random) -> list[Message]:
    model = attacker.some_model(random)
    first, last = model.initialise_requests({"w": torch.ones(32)} if model is not attacker.victim else {})
    state = [
        types_pb2.StateChunk(
            bucket=bucket.index,
            tensor=0,
            key="momentum_buffer",
            start=16 * bucket.index,
            shape=[16],
            dtype=types_pb2.DTYPE_FLOAT32,
            data=bytes(64),
        )
        for bucket in model.layout.buckets[:2]
    ]
    plain = types_pb2.StateChunk(bucket=0, tensor=0, key="momentum_buffer", plain=b"\xc0")
    middle = shards_pb2.InitialiseRequest(state=random.choice((state, state[:1], [plain], [])))
    return [first, middle, last]


def pull(attacker: Attacker, random: Random) -> list[Message]:
    address = attacker.some_model(random).address()
    trainer_id = attacker.trainer.trainer_id
    return [shards_pb2.PullRequest(shard=address, trainer_id=trainer_id, wait_s=WAIT_S, include_all=True)]


def pull_state(attacker: Attacker, random: Random) -> list[Message]:
    address = attacker.some_model(random).address()
    return [shards_pb2.PullStateRequest(shard=address, trainer_id=attacker.trainer.trainer_id, wait_s=WAIT_S)]


def step(attacker: Attacker, random: Random) -> list[Message]:
    model = attacker.some_model(random)
    context = random.choice((1, 2, random.randrange(1 << 30)))
    first, last = model.step_requests({}, wait_s=WAIT_S, context_id=context, absent_tensors=[0])
    how = random.choice(("commit", "push", "commit only"))
    if how == "push":
        return [first]
    if how == "commit only":
        del first.chunks[:]
    return [first, last]


def step_once(attacker: Attacker, random: Random) -> list[Message]:
    model = random.choice((attacker.ready, attacker.victim))
    request = model.push_request({}, context_id=random.randrange(1 << 30), absent_tensors=[0])
    request.without_values = random.choice((True, False))
    if random.random() < 0.5:
        sequence = request.push_id.sequence
        for bucket in model.mailbox().offsets.buckets:
            model.mailbox().set_word(bucket.index, random.choice((sequence, sequence, sequence, sequence - 1, -1)))
        del request.chunks[:]
        request.in_memory = True
    if random.random() < 0.5:
        request.commit.CopyFrom(model.commit())
        request.wait_s = WAIT_S
    return [request]


def find_memory(attacker: Attacker, random: Random) -> list[Message]:
    return [shards_pb2.FindMemoryRequest()]


def open_memory(attacker: Attacker, random: Random) -> list[Message]:
    return [attacker.some_model(random).open_memory_request()]


def drop_context(attacker: Attacker, random: Random) -> list[Message]:
    model = attacker.some_model(random)
    push_id = attacker.trainer.push_id()
    return [shards_pb2.DropContextRequest(shard=model.address(), push_id=push_id, context_id=random.randrange(3))]


CASES: dict[str, Case] = {
    "Join": join,
    "Renew": renew,
    "Leave": leave,
    "RegisterModel": register_model,
    "Attach": attach,
    "DropModel": drop_model,
    "Watch": watch,
    "Follow": follow,
    "Status": status,
    "Link": link,
    "Initialise": initialise,
    "Pull": pull,
    "PullState": pull_state,
    "Step": step,
    "StepOnce": step_once,
    "FindMemory": find_memory,
    "OpenMemory": open_memory,
    "DropContext": drop_context,
}


def test_every_rpc_has_a_case_here() -> None:
    assert CASES.keys() == COORDINATOR.keys() | SHARDS.keys() | REPLICAS.keys()
    assert len(CASES) == len(COORDINATOR) + len(SHARDS) + len(REPLICAS)


class Usual(Random):
    """Chooses what comes first, and never what is rare."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def random(self) -> float:
        return 0.5


def test_a_copy_takes_what_its_primary_says(world: World) -> None:
    """Else the spoiled streams would not come far."""
    attacker = Attacker(world, 0)
    hello, *said = follow(attacker, Usual())
    first, *others = world.call("Follow", hello, *said)
    assert first.position == -1
    assert [each.num_parts for each in others[:4]] == [1, 2, 3, 4]
    assert [each.acknowledged for each in others[4:]] == [1, 2, 3, 4, 5, 6]


def _parsed(method: Method, payload: bytes) -> Any:
    try:
        return method.request_type.FromString(payload)
    except DecodeError:
        return method.request_type()


def _may_be_sent(world: World, method: Method, payloads: list[bytes]) -> bool:
    """Nothing proves who a message is from: what the victim may do, whoever says to be the victim may do as well."""
    victim = world.victim.trainer_id
    for message in (_parsed(method, each) for each in payloads):
        if victim in (getattr(message, "trainer_id", 0), getattr(message, "push_id", types_pb2.PushId()).trainer_id):
            return False
        if method.name == "DropModel" and message.model == world.victim_model.spec.name:
            return False
    return True


def _longest_wait_s(method: Method, payloads: list[bytes]) -> float:
    return max((getattr(_parsed(method, each), "wait_s", 0.0) for each in payloads), default=0.0)


def attack(world: World, name: str, random: Random, calls: int) -> None:
    """Sends spoiled requests of one RPC; each gets a clean answer, soon."""
    method = METHODS[name]
    attacker = Attacker(world, random.randrange(1 << 30))
    for _ in range(calls):
        payloads = spoiled(CASES[name](attacker, random), random)
        if not _may_be_sent(world, method, payloads):
            continue
        waits = _longest_wait_s(method, payloads) > 10 * WAIT_S
        outcome = world.send(method, payloads, 10 * WAIT_S if waits else CALL_TIMEOUT_S)
        # A replica fails if it cannot do what its primary says to have done.
        may_break, may_fail = name in ENDLESS and world.transport == "grpc", name == "Follow"
        check_clean(outcome, may_wait=waits, may_break=may_break, may_fail=may_fail)


def _attack_and_check(world: World, name: str, seed: int) -> None:
    attack(world, name, Random(seed), CALLS_PER_EXAMPLE)
    world.check_alive()
    world.clean_up()
    world.check_victim()


some_calls = settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
many_calls = settings(some_calls, max_examples=60)
every_rpc = pytest.mark.parametrize("name", [name for name in CASES if name != "Link"])


@every_rpc
@some_calls
@given(seed=st.integers(0, 1 << 32))
def test_spoiled_requests_are_refused_and_nothing_is_lost(name: str, world: World, seed: int) -> None:
    _attack_and_check(world, name, seed)


@pytest.mark.slow
@every_rpc
@many_calls
@given(seed=st.integers(0, 1 << 32))
def test_many_spoiled_requests_are_refused_and_nothing_is_lost(name: str, world: World, seed: int) -> None:
    _attack_and_check(world, name, seed)


# Links of servers: in a world of their own, since a server that nobody knows may be given a part of the next model.


def _link_and_check(transport: str, seed: int) -> None:
    with World(transport) as world:
        attack(world, "Link", Random(seed), CALLS_PER_EXAMPLE)
        world.check_alive()
        assert all(1 <= len(server.name) <= 255 and len(server.address) <= 512 for server in world.status().servers)
        world.clean_up()
        world.check_victim()


@pytest.mark.parametrize("transport", TRANSPORTS)
@some_calls
@given(seed=st.integers(0, 1 << 32))
def test_spoiled_links_are_refused_and_nothing_is_lost(transport: str, seed: int) -> None:
    _link_and_check(transport, seed)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@many_calls
@given(seed=st.integers(0, 1 << 32))
def test_many_spoiled_links_are_refused_and_nothing_is_lost(transport: str, seed: int) -> None:
    _link_and_check(transport, seed)


# Memory


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("rounds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_spoiled_requests(rounds: int, world: World) -> None:
    """Large ones among them: what a refused stream had staged is freed with it."""
    large = Trainer(world).register(model_spec("large", tensors=(tensor("w", 1 << 20),), bucket_bytes=0))
    pieces = [
        types_pb2.Chunk(bucket=chunk.bucket, offset_bytes=0, dtype=chunk.dtype, data=chunk.data[:-4])
        for chunk in large.chunks({})
    ]

    def one_round(seed: int) -> None:
        random = Random(seed)
        for name in ("Join", "Renew", "RegisterModel", "Initialise", "Step", "StepOnce", "OpenMemory", "Pull"):
            attack(world, name, random, 4)
        for _ in range(4):
            first = shards_pb2.InitialiseRequest(shard=large.address(), push_id=large.trainer.push_id())
            with pytest.raises(InvalidRequest, match="incomplete"):
                world.call("Initialise", first, *(shards_pb2.InitialiseRequest(chunks=[each]) for each in pieces))
        for trainer in world.status().trainers:
            if trainer.trainer_id not in (world.victim.trainer_id, large.trainer.trainer_id):
                push_id = types_pb2.PushId(trainer_id=trainer.trainer_id, sequence=1, lowest_unacknowledged=1)
                world.call("Leave", coordinator_pb2.LeaveRequest(push_id=push_id))

    one_round(0)
    before = _resident_bytes()
    for seed in range(1, 1 + rounds):
        one_round(seed)
    world.clean_up()
    until(lambda: num_staged() == 0, lambda: f"{num_staged()} streams are still held")
    assert _resident_bytes() - before < FLAT_BYTES
