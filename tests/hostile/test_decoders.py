"""Every decoder with random and spoiled input: a value or an error of ours, soon, and no memory on a promise."""

import inspect
import math
import time
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack
import pytest
import torch
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pserver.core import messages as core
from pserver.core.dedup import DedupTable
from pserver.core.models import check_spec
from pserver.core.optimizers import OPTIMIZERS, check_options, constructor_arguments
from pserver.core.rules import GradientRules, NonFinite
from pserver.core.staging import Staging
from pserver.core.state_staging import StateChunk, StateStaging
from pserver.core.sync import POLICIES, make_policy
from pserver.errors import InternalError, PserverError
from pserver.transport import convert
from pserver.transport.gen import shards_pb2, types_pb2
from pserver.transport.methods import COORDINATOR, SHARDS, decode
from pserver.types import (
    ClusterStatus,
    ModelStatus,
    PushId,
    ReplicaStatus,
    ServerStatus,
    ShardStatus,
    StepResult,
    TrainerStatus,
)
from pserver.wire.layout import TensorSpec, build_layout, first_difference
from pserver.wire.tensors import dtype_of_code, from_bytes
from pserver.wire.values import pack_value, unpack_value
from tests.hostile.mutations import INTEGERS, NUMBERS, VALUES, spoil_field, spoiled, spoiled_bytes
from tests.hostile.world import adam, model_spec, tensor

#: A decoder may take this many bytes for each byte of its input, and as many beside. An empty list is one byte on the
#: wire and 64 in memory.
BYTES_PER_BYTE = 100
BYTES_BESIDE = 2 << 20
#: No input of these tests may keep a decoder busy for longer, in seconds of this thread.
LIMIT_S = 2.0

checked = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
thorough = settings(checked, max_examples=400)
seeds = st.integers(0, 1 << 32)


def check(decoder: Callable[[], object], num_bytes: int = 0) -> object:
    """Runs a decoder; only errors of ours may come out, soon, and memory must follow from what came.

    Returns:
        What it returns; None if it refuses.
    """
    value: object = None
    refusal: PserverError | None = None
    tracemalloc.start()
    started = time.thread_time()
    try:
        value = decoder()
    except PserverError as error:
        refusal = error
    finally:
        taken_s = time.thread_time() - started
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert not isinstance(refusal, InternalError), repr(refusal)
    assert refusal is None or str(refusal)
    assert taken_s < LIMIT_S
    assert peak_bytes < BYTES_PER_BYTE * num_bytes + BYTES_BESIDE
    return value


# Values and tensors


class Odd:
    """Strategies for what no correct client sends."""

    integers = st.one_of(st.sampled_from(INTEGERS), st.integers(), st.sampled_from((1 << 64, -(1 << 70), 1 << 200)))
    numbers = st.one_of(st.sampled_from(NUMBERS), st.floats(), integers)
    plain = st.one_of(
        st.none(), st.booleans(), numbers, st.text(max_size=8), st.binary(max_size=8), st.complex_numbers()
    )
    anything = st.recursive(
        plain,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.tuples(inner), st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    )
    shapes = st.lists(st.one_of(integers, st.sampled_from((0, 1, 2, 1 << 40))), max_size=80).map(tuple)


GOOD_VALUES = (
    [{"lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False, "name": None, "z": 1 + 2j}, {"lr": torch.zeros(3, 2)}],
    {"deadline": 1.5, "absent": "fail", "deep": ((((1,),),),)},
    torch.ones(2, dtype=torch.bfloat16),
)


@checked
@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"\xdd\x00\x0f\xff\xff" * 400 + bytes(1 << 15))
@example(data=msgpack.packb(msgpack.ExtType(1, b"\xdd\x06\x40\x00\x00")))
@example(data=msgpack.packb(msgpack.ExtType(2, b"\xc0")))
@example(data=msgpack.packb(msgpack.ExtType(2, msgpack.packb("text"))))
@example(data=msgpack.packb(msgpack.ExtType(3, msgpack.packb(["1e5", "2"]))))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    check(lambda: unpack_value(data), len(data))


@pytest.mark.parametrize("data", VALUES, ids=range(len(VALUES)))
def test_bytes_that_are_meant_badly_are_a_value_or_refused(data: bytes) -> None:
    check(lambda: unpack_value(data), len(data))
    check(lambda: convert.options_from_bytes(data), len(data))
    check(lambda: convert._map_from_bytes(data), len(data))


@checked
@given(seed=seeds, value=st.sampled_from(GOOD_VALUES))
def test_spoiled_values_are_a_value_or_refused(seed: int, value: object) -> None:
    random, data = Random(seed), pack_value(value)
    for _ in range(10):
        data = spoiled_bytes(data, random)[:4096]
        check(lambda spoilt=data: unpack_value(spoilt), len(data))  # type: ignore[misc]


@checked
@given(data=st.binary(max_size=64), code=Odd.integers, shape=Odd.shapes)
@example(data=b"", code=1, shape=(0, 1 << 62, 1 << 62))
@example(data=bytes(4), code=1, shape=(1 << 62,) * 300)
@example(data=bytes(4), code=1, shape=(1,) * 1_000_000)
@example(data=bytes(4), code=10, shape=(4,))
@example(data=bytes(8), code=1, shape=(-1, -2))
def test_any_tensor_is_decoded_or_refused(data: bytes, code: int, shape: tuple[int, ...]) -> None:
    found = check(lambda: from_bytes(data, dtype_of_code(code), shape), len(data) + 8 * len(shape))
    if isinstance(found, torch.Tensor):
        assert found.shape == shape
        assert found.nbytes == len(data)


# Messages

OPTIONS = ({"lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False}, {"lr": 1})
SPEC = core.ModelSpec(
    name="m",
    tensors=(
        tensor("w", 3, 4, dtype=torch.bfloat16, group=1),
        tensor("s", dtype=torch.int64, group=-1),
        tensor("e", 0, 7),
    ),
    bucket_bytes=64,
    optimizer="AdamW",
    optimizer_groups=OPTIONS,
    sync_policy="bsp",
    sync_policy_arguments={"backup_workers": 0},
    world_size=3,
    buffers="lowest",
)
COMMIT = core.CommitInfo(
    step=3,
    base_round=2,
    samples=8,
    options=OPTIONS,
    rules=GradientRules(max_norm=1.0, clip_value=0.5, nonfinite="skip"),
)
DECISION = core.Decision(
    round=9,
    contributions=(core.Contribution(trainer_id=1 << 50, rank=0, step=7, weight=3, staleness=1),),
    divisor=3,
    options=OPTIONS,
    clip_value=0.5,
    grad_norm=2.0,
)
PLAN = core.Plan(plan=DECISION, attempt=4, rules=COMMIT.rules)
REFUSAL = core.Refusal(trainer_id=1, step=2, round=3, staleness=1, reason="late", error="")
REPLICA = core.ReplicaAddress(number=1 << 40, server="s1", address="h:2")
PLACEMENT = core.ShardPlacement(shard=1, epoch=3, server="s0", address="h:1", runs=(range(2), range(3, 5)))
RESULT = StepResult(
    round=4, accepted=True, stepped=True, overflow=False, reason="", error="", num_trainers=2, staleness=0,
    grad_norm=1.0, num_nonfinite=0, options=OPTIONS,
)  # fmt: skip
SHARD_STATUS = ShardStatus(
    shard=0,
    server="s0",
    epoch=3,
    num_bytes=1 << 40,
    round=9,
    version=8,
    replicas=(ReplicaStatus(server="s1", state="in sync", lag=3),),
    num_missing_replicas=1,
    electing=True,
)
STATUS = ClusterStatus(
    servers=(ServerStatus(name="s0", address="a:1", alive=True, silent_s=0.25),),
    models=(
        ModelStatus(
            name="m", state="ready", failure="", sync_policy="bsp()", optimizer="SGD", round=9,
            waiting_for_ranks=(0, 2), missing_trainers=1, num_accepted=3, num_rejected=1, num_skipped=0,
            staleness={0: 2, 1: 1},
            shards=(SHARD_STATUS,),
        ),
    ),
    trainers=(
        TrainerStatus(
            trainer_id=5, rank=2, step=4, lease_s=1.5, lag_rounds=1, sent_bytes=7, received_bytes=2,
            reported={"loss": 0.5},
        ),
    ),
)  # fmt: skip
STATE = types_pb2.StateChunk(
    bucket=0, tensor=0, key="exp_avg", start=0, shape=[16], dtype=types_pb2.DTYPE_FLOAT32, data=bytes(64)
)
PLAIN_STATE = types_pb2.StateChunk(bucket=0, tensor=0, key="step", plain=pack_value(3.0))
COMMANDS = (
    core.CreateShard(spec=SPEC, shard=1, epoch=3, runs=(range(2, 9),), round=2, version=1),
    core.ModelReady(model="m", shard=1, epoch=3, initialiser=1 << 41),
    core.Apply(model="m", shard=1, epoch=3, decision=DECISION),
    core.Prepare(model="m", shard=1, epoch=3, plan=PLAN),
    core.Reject(model="m", shard=1, epoch=3, refusal=REFUSAL),
    core.LivingTrainers(trainer_ids=(1, 2)),
    core.DropShard(model="m", shard=1, epoch=3),
    core.FenceReplica(model="m", shard=1, epoch=4),
    core.Promote(model="m", shard=1, epoch=4, replicas=(REPLICA,)),
    core.SetReplicas(model="m", shard=1, epoch=4, replicas=(REPLICA, REPLICA)),
)
REPORTS = (
    core.ShardCreated(model="m", shard=1, epoch=3),
    core.Committed(model="m", shard=1, epoch=3, trainer_id=1 << 50, commit=COMMIT),
    core.Prepared(
        model="m",
        shard=1,
        epoch=3,
        round=2,
        attempt=4,
        squares=(1.0, 2.0),
        nonfinite=(NonFinite(trainer_id=1, tensor=0, count=2),),
    ),
    core.Applied(model="m", shard=1, epoch=3, round=1 << 40, version=6),
    core.ShardFailed(model="m", shard=1, epoch=3, failure="no memory"),
    core.ReplicaFenced(model="m", shard=1, epoch=3, position=1 << 40),
    core.ShardPromoted(model="m", shard=1, epoch=3, round=1 << 40, version=6, attempt=4),
    core.ReplicaCaughtUp(model="m", shard=1, epoch=3, number=1 << 40),
    core.ReplicaFailed(model="m", shard=1, epoch=3, number=5, failure="no memory"),
    core.ReplicaLag(model="m", shard=1, epoch=3, number=5, num_entries=1 << 40),
)

#: Decoders of lists of messages, of which one is spoiled.
LISTS = ("placement_from_proto", "nonfinite_from_proto")
#: For each decoder of messages, valid ones.
DECODERS: dict[str, list[Message]] = {
    "push_id_from_proto": [convert.push_id_to_proto(PushId(1 << 50, 7, 5))],
    "spec_from_proto": [convert.spec_to_proto(SPEC)],
    "placement_from_proto": [*convert.placement_to_proto([PLACEMENT])],
    "commit_from_proto": [convert.commit_to_proto(COMMIT)],
    "decision_from_proto": [convert.decision_to_proto(DECISION)],
    "plan_from_proto": [convert.plan_to_proto(PLAN)],
    "nonfinite_from_proto": [*convert.nonfinite_to_proto([NonFinite(trainer_id=1, tensor=0, count=2)])],
    "outcome_from_proto": [convert.outcome_to_proto(RESULT)],
    "state_chunk_from_proto": [STATE, PLAIN_STATE],
    "command_from_proto": [convert.command_to_proto(each) for each in COMMANDS],
    "report_from_proto": [convert.report_to_proto(each) for each in REPORTS],
    "status_from_proto": [convert.status_to_proto(STATUS)],
}


def test_every_decoder_of_messages_is_tried_here() -> None:
    public = {name for name, _ in inspect.getmembers(convert, inspect.isfunction) if name.endswith("_from_proto")}
    assert {name for name in public if not name.startswith("_")} == DECODERS.keys()


def _decode(name: str, message: Message) -> object:
    decoder = getattr(convert, name)
    return decoder([message] if name in LISTS else message)


def _spoil_and_decode(name: str, seed: int, times: int) -> None:
    random = Random(seed)
    for _ in range(times):
        valid = random.choice(DECODERS[name])
        (data,) = spoiled([valid], random)[:1] or [b""]
        try:
            message = type(valid).FromString(data)
        except DecodeError:
            continue
        check(lambda spoilt=message: _decode(name, spoilt), len(data))  # type: ignore[misc]


@pytest.mark.parametrize("name", DECODERS)
@settings(checked, max_examples=8)
@given(seed=seeds)
def test_spoiled_messages_are_decoded_or_refused(name: str, seed: int) -> None:
    _spoil_and_decode(name, seed, 15)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
@thorough
@given(seed=seeds)
def test_many_spoiled_messages_are_decoded_or_refused(name: str, seed: int) -> None:
    _spoil_and_decode(name, seed, 15)


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_not_spoiled_is_decoded(name: str) -> None:
    """Else the tests above would try nothing."""
    for message in DECODERS[name]:
        assert _decode(name, message) is not None


@pytest.mark.parametrize("method", [*COORDINATOR.values(), *SHARDS.values()], ids=lambda method: method.name)
@settings(checked, max_examples=15)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(method: Any, data: bytes) -> None:
    check(lambda: decode(method, data), len(data))


# What comes after decoding


def good_buckets() -> tuple[Any, ...]:
    return build_layout([tensor("w", 40), tensor("h", 32, dtype=torch.float16)], 64).buckets


@checked
@given(
    chunks=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 4), Odd.integers),
            st.one_of(st.sampled_from((0, 4, 32, 64)), Odd.integers),
            st.one_of(st.sampled_from((1, 3)), Odd.integers),
            st.sampled_from((b"", b"1", bytes(32), bytes(64), bytes(65), bytes(5000))),
        ),
        max_size=8,
    )
)
def test_any_chunks_are_staged_or_refused(chunks: list[tuple[int, int, int, bytes]]) -> None:
    """What was taken is never more than the buckets, and what is complete has every byte."""
    staging = Staging(good_buckets())
    for chunk in chunks:
        check(lambda each=chunk: staging.add_chunk(*each), len(chunk[3]))  # type: ignore[misc]
    assert all(
        staging._received[each.index] <= each.num_bytes for each in good_buckets() if each.index in staging._received
    )
    done = check(staging.complete)
    assert done is None or sum(each.nbytes for each in done.values()) == sum(x.num_bytes for x in good_buckets())  # type: ignore[attr-defined]


state_chunks = st.builds(
    StateChunk,
    bucket=st.one_of(st.integers(0, 2), Odd.integers),
    tensor=st.one_of(st.integers(0, 2), Odd.integers),
    key=st.one_of(st.sampled_from(("step", "exp_avg", "", "x" * 300)), st.text(max_size=3)),
    start=st.one_of(st.none(), st.just(0), Odd.integers),
    shape=st.one_of(st.just((16,)), Odd.shapes),
    dtype_code=st.one_of(st.just(1), Odd.integers),
    is_plain=st.booleans(),
    plain=Odd.anything,
    offset_bytes=st.one_of(st.sampled_from((0, 0, 32)), Odd.integers),
    data=st.sampled_from((b"", bytes(32), bytes(64), bytes(5000))),
)


@checked
@given(chunks=st.lists(state_chunks, max_size=8))
def test_any_chunks_of_state_are_staged_or_refused(chunks: list[StateChunk]) -> None:
    staging = StateStaging(good_buckets())
    num_bytes = 0
    for chunk in chunks:
        num_bytes += len(chunk.data) + 8 * len(chunk.shape)
        check(lambda each=chunk: staging.add_chunk(each), num_bytes)  # type: ignore[misc]
    check(staging.complete, num_bytes)


tensor_specs = st.builds(
    TensorSpec,
    name=st.one_of(st.sampled_from(("w", "b", "", "x" * 5000)), st.text(max_size=4)),
    shape=st.one_of(st.sampled_from(((3,), (4, 5), ())), Odd.shapes),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e5m2)),
    group=st.one_of(st.sampled_from((0, 0, 1, -1, -2)), Odd.integers),
)
bucket_sizes = st.one_of(st.sampled_from((0, 64, 128)), Odd.integers)


@checked
@given(specs=st.lists(tensor_specs, max_size=6), bucket_bytes=bucket_sizes, whole=st.booleans())
@example(specs=[tensor("w", 1 << 40)], bucket_bytes=64, whole=False)
@example(specs=[tensor("w", 0, 1 << 62, 1 << 62), tensor("x", 4)], bucket_bytes=0, whole=True)
@example(specs=[tensor("w", *[1 << 62] * 80)], bucket_bytes=0, whole=False)
def test_any_layout_is_computed_or_refused(specs: list[TensorSpec], bucket_bytes: int, whole: bool) -> None:
    check(lambda: build_layout(specs, bucket_bytes, whole_tensors=whole), 1 << 16)


@checked
@given(ours=st.lists(tensor_specs, max_size=4), theirs=st.lists(tensor_specs, max_size=4))
def test_the_first_difference_of_any_models_is_told(ours: list[TensorSpec], theirs: list[TensorSpec]) -> None:
    difference = first_difference(ours, theirs)
    assert (difference is None) == (ours == theirs)


def _fields() -> dict[str, st.SearchStrategy[Any]]:
    return {
        "name": st.one_of(st.just("m"), st.text(max_size=300)),
        "tensors": st.lists(tensor_specs, max_size=4).map(tuple),
        "bucket_bytes": bucket_sizes,
        "optimizer": st.one_of(st.sampled_from((*OPTIMIZERS, "LBFGS", "SparseAdam")), st.text(max_size=8)),
        "optimizer_groups": st.lists(options(), max_size=3).map(tuple),
        "sync_policy": st.one_of(st.sampled_from(tuple(POLICIES)), st.text(max_size=8)),
        "sync_policy_arguments": arguments(),
        "world_size": Odd.integers,
        "buffers": st.one_of(st.sampled_from(("lowest", "mean", "local")), st.text(max_size=8)),
    }


def options() -> st.SearchStrategy[dict[str, object]]:
    names = st.one_of(
        st.sampled_from(("lr", "momentum", "betas", "eps", "weight_decay", "fused", "foreach", "amsgrad", "params")),
        st.text(max_size=6),
    )
    return st.dictionaries(names, Odd.anything, max_size=4)


def arguments() -> st.SearchStrategy[dict[str, object]]:
    names = st.one_of(
        st.sampled_from(("backup_workers", "deadline", "absent", "max_lag", "max_staleness", "self")),
        st.text(max_size=6),
    )
    return st.dictionaries(names, Odd.anything, max_size=3)


@checked
@given(data=st.data())
def test_any_description_of_a_model_is_accepted_or_refused(data: st.DataObject) -> None:
    """One or two fields of a good one are odd."""
    fields = _fields()
    spec = model_spec("m", optimizer=data.draw(st.sampled_from(tuple(OPTIMIZERS))), tensors=(tensor("w", 4, 5),))
    spec = core.ModelSpec(**{**_plain(spec), "optimizer_groups": ({"lr": 0.5},)})
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=2)):
        spec = core.ModelSpec(**{**_plain(spec), name: data.draw(fields[name])})
    check(lambda: check_spec(spec), 1 << 16)


def _plain(spec: core.ModelSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in core.ModelSpec.__dataclass_fields__}


@checked
@given(name=st.one_of(st.sampled_from(tuple(POLICIES)), st.text(max_size=8)), given_=arguments())
@example(name="bsp", given_={"deadline": "soon"})
@example(name="bsp", given_={"deadline": math.nan})
@example(name="bsp", given_={"absent": []})
@example(name="ssp", given_={})
def test_any_policy_is_made_or_refused(name: str, given_: dict[str, object]) -> None:
    check(lambda: make_policy(name, given_))


@checked
@given(max_norm=Odd.anything, clip_value=Odd.anything, nonfinite=Odd.anything)
@example(max_norm=None, clip_value=None, nonfinite=[])
@example(max_norm=math.nan, clip_value=None, nonfinite="pass")
@example(max_norm=10**400, clip_value=None, nonfinite="pass")
def test_any_rules_are_taken_or_refused(max_norm: Any, clip_value: Any, nonfinite: Any) -> None:
    check(lambda: GradientRules(max_norm=max_norm, clip_value=clip_value, nonfinite=nonfinite))


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(checked, max_examples=15)
@given(came=options())
@example(came={"lr": 10**400})
@example(came={"betas": (0.9, 0.9, 0.9)})
@example(came={"lr": [0.1]})
@example(came={"lr": torch.zeros(0)})
def test_any_options_of_a_step_are_taken_or_refused(name: str, came: dict[str, object]) -> None:
    optimizer = OPTIMIZERS[name].cls([torch.zeros(2, 2)])
    check(lambda: check_options(name, came, constructor_arguments(name, optimizer.param_groups[0])))


@checked
@given(
    runs=st.lists(
        st.tuples(st.one_of(st.integers(-1, 4), Odd.integers), st.one_of(st.integers(-1, 4), Odd.integers)), max_size=5
    )
)
def test_any_runs_of_buckets_are_a_part_or_refused(runs: list[tuple[int, int]]) -> None:
    layout = build_layout([tensor("w", 40)], 64)
    found = check(lambda: layout.part([range(*each) for each in runs]))
    if isinstance(found, tuple):
        indices = [each.index for each in found]
        assert indices == sorted(set(indices))


@checked
@given(
    ids=st.lists(
        st.tuples(
            st.sampled_from((1, 2, -1, 1 << 70)), Odd.integers | st.integers(1, 5), Odd.integers | st.integers(1, 5)
        ),
        max_size=20,
    )
)
def test_any_push_ids_are_found_or_refused(ids: list[tuple[int, int, int]]) -> None:
    table: DedupTable[str] = DedupTable()
    for each in ids:
        push_id = PushId(*each)

        def once(push_id: PushId = push_id) -> None:
            if table.find(push_id) is None:
                table.record(push_id, "done")

        check(once)
    assert len(table) <= len(ids)


def test_a_field_is_really_spoiled() -> None:
    """Else every test above would pass."""
    random, changed = Random(0), 0
    for _ in range(200):
        message = shards_pb2.StepRequest(context_id=7, commit=convert.commit_to_proto(COMMIT))
        before = message.SerializeToString()
        spoil_field(message, random)
        changed += message.SerializeToString() != before
    assert changed > 120


def test_adam_is_complete() -> None:
    """The world's description of Adam is one that servers accept."""
    assert check_spec(model_spec("m", optimizer="Adam", optimizer_groups=(adam(),)))
