"""What replicas hear, as messages and back."""

import dataclasses
from typing import get_args

import pytest
import torch

from pserver.core import changes as core
from pserver.core.changes import (
    Bookkeeping,
    BucketHeld,
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
from pserver.core.messages import Contribution, Decision, Plan, Prepared
from pserver.core.optimizer_state import StatePiece
from pserver.core.rules import GradientRules, NonFinite
from pserver.errors import InvalidRequest, PserverError
from pserver.transport import chunks as chunks_module
from pserver.transport.changes import Arrived, ChangeStaging, change_messages
from pserver.transport.gen import replicas_pb2 as pb
from pserver.transport.gen import types_pb2
from pserver.transport.methods import REPLICAS, decode, encode
from pserver.types import PushId
from pserver.wire.layout import BUFFERS, TensorSpec, build_layout
from pserver.wire.tensors import element_type, to_bytes
from tests.results import step_result

HUGE = (1 << 62) - 1
LAYOUT = build_layout(
    (
        TensorSpec(name="w", shape=(40,), dtype=torch.float32, group=0),
        TensorSpec(name="h", shape=(20,), dtype=torch.bfloat16, group=0),
        TensorSpec(name="z", shape=(6,), dtype=torch.complex64, group=0),
        TensorSpec(name="count", shape=(3,), dtype=torch.int64, group=BUFFERS),
    ),
    64,
)
TRAINED = [each for each in LAYOUT.buckets if each.group >= 0]
BUFFER_BUCKETS = [each for each in LAYOUT.buckets if each.group == BUFFERS]


def odd_values(bucket, dtype):
    """Values of a bucket, NaN, infinities and negative zeros among them where there are such."""
    generator = torch.Generator().manual_seed(bucket.index)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-99, 99, (bucket.num_elements,), generator=generator).to(dtype)
    values = torch.randn(bucket.num_elements, generator=generator).to(dtype)
    values[:3] = torch.tensor([torch.nan, -torch.inf, -0.0]).to(dtype)
    return values


MEANS = {each.index: odd_values(each, element_type(each.dtype).master) for each in TRAINED}
GRADIENTS = {each.index: odd_values(each, each.dtype) for each in LAYOUT.buckets}
NEW_BUFFERS = {each.index: odd_values(each, each.dtype) for each in BUFFER_BUCKETS}
OPTIONS = ({"lr": 0.125, "betas": (0.5, 0.75)},)
DECISION = Decision(
    round=1 << 40,
    contributions=(
        Contribution(trainer_id=1 << 50, rank=0, step=1 << 41, weight=3, staleness=2, clock=1 << 40),
        Contribution(trainer_id=6, rank=1, step=8, weight=0),
    ),
    divisor=3,
    options=OPTIONS,
    buffers_from=1 << 50,
    clip_value=0.5,
    settled=1 << 39,
)
PLAN = Plan(plan=DECISION, attempt=1 << 42, rules=GradientRules(max_norm=2.0, nonfinite="skip"))
REPORT = Prepared(
    model="m",
    shard=3,
    epoch=0,
    round=1 << 40,
    attempt=1 << 42,
    squares=(0.1, float("inf"), 1e-300),
    nonfinite=(NonFinite(trainer_id=0, tensor=1, count=1 << 40),),
)
IDS = (PushId(1 << 50, 1 << 43, 1 << 42), PushId(6, 7, 5))
RESULT = step_result(1 << 40, accepted=False, stepped=False, reason="late", error="RoundFailed", options=OPTIONS)
BUCKET = TRAINED[0]
CHANGES = {
    "prepared": RoundPrepared(
        plan=PLAN,
        report=REPORT,
        means=MEANS,
        buffers=NEW_BUFFERS,
        absent=frozenset({0, 2}),
        push_ids=(IDS[0], None),
        context_ids=(1 << 45, 0),
    ),
    "prepared without gradients": RoundPrepared(
        plan=dataclasses.replace(PLAN, rules=GradientRules(), plan=dataclasses.replace(DECISION, skip="overflow")),
        report=dataclasses.replace(REPORT, squares=(), nonfinite=()),
        means={},
        buffers={},
        absent=frozenset(),
        push_ids=IDS,
        context_ids=(1, 2),
    ),
    "applied": RoundApplied(decision=DECISION, version=1 << 44, checksum=None),
    "applied, with a checksum": RoundApplied(
        decision=dataclasses.replace(DECISION, grad_norm=0.0, clip_coefficient=0.1),
        version=0,
        checksum=Checksum(bucket=0, value=0xFFFFFFFF),
    ),
    "refused": StepRefused(push_id=IDS[0], context_id=1 << 45, step=1 << 41, result=RESULT),
    "pushed": GradientsPushed(push_id=IDS[0], context_id=1 << 45, gradients=GRADIENTS, absent=frozenset({1})),
    "pushed nothing": GradientsPushed(push_id=IDS[1], context_id=1, gradients={}, absent=frozenset()),
    "dropped": ContextDropped(push_id=IDS[1], context_id=1 << 45),
    "gone": TrainerGone(trainer_id=1 << 50),
    "books": Bookkeeping(
        round=1 << 40,
        version=1 << 39,
        decisions=(DECISION, DECISION),
        trainers=[
            TrainerRecord(
                trainer_id=1 << 50,
                last_step=1 << 41,
                lowest_unacknowledged=1 << 42,
                outcomes={1 << 43: RESULT, 1 << 44: None},
            ),
            TrainerRecord(trainer_id=6, last_step=0, lowest_unacknowledged=1, outcomes={}),
        ],
    ),
    "no books": Bookkeeping(round=0, version=0, trainers=[], decisions=()),
    "context": ContextHeld(trainer_id=1 << 50, context_id=1 << 45, gradients=GRADIENTS, absent=frozenset({0, 3})),
    "context of nothing": ContextHeld(trainer_id=6, context_id=1, gradients={}, absent=None),
    "context that lacks nothing": ContextHeld(trainer_id=6, context_id=1, gradients={}, absent=frozenset()),
    "bucket": BucketHeld(
        bucket=BUCKET.index,
        round=1 << 40,
        master=MEANS[BUCKET.index],
        state=[
            StatePiece(tensor=0, key="exp_avg", start=0, value=odd_values(BUCKET, torch.float32)),
            StatePiece(tensor=0, key="step", start=None, value=torch.tensor(4.0)),
            StatePiece(tensor=0, key="plain", start=None, value=None),
            StatePiece(tensor=0, key="number", start=None, value=0.1),
        ],
        last=False,
    ),
    "bucket without state": BucketHeld(
        bucket=BUFFER_BUCKETS[0].index, round=0, master=NEW_BUFFERS[BUFFER_BUCKETS[0].index], state=(), last=True
    ),
}

every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def comparable(value):
    """Bit for bit, and by type."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, to_bytes(value)
    if dataclasses.is_dataclass(value):
        return type(value), {field.name: comparable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(each) for each in value]
    if isinstance(value, set | frozenset):
        return set(value)
    return type(value), value


def over_the_wire(messages):
    return [decode(REPLICAS["Follow"], encode(each)) for each in messages]


def staging(segment=None):
    return ChangeStaging(LAYOUT.buckets, segment, model="m", shard=3)


def arriving(messages, segment=None):
    """What becomes of the messages of one change; only the last one makes it whole."""
    staged = staging(segment)
    *before, last = [staged.add(each) for each in over_the_wire(messages)]
    assert before == [None] * len(before)
    assert isinstance(last, Arrived)
    return last


def test_every_kind_of_change_is_tried_here():
    assert {type(each) for each in CHANGES.values()} == set(get_args(core.Change))


@every_change
def test_changes_round_trip_bit_for_bit(change):
    arrived = arriving(change_messages(change, index=1 << 40, released=1 << 39))
    assert (arrived.index, arrived.released, arrived.position) == (1 << 40, 1 << 39, 0)
    assert comparable(arrived.change) == comparable(change)


@every_change
def test_changes_round_trip_however_they_are_cut(change, monkeypatch):
    monkeypatch.setattr(chunks_module, "MESSAGE_BYTES", 24)
    monkeypatch.setattr("pserver.transport.state_chunks.MESSAGE_BYTES", 100)
    arrived = arriving(change_messages(change, position=77))
    assert (arrived.index, arrived.position) == (0, 77)
    assert comparable(arrived.change) == comparable(change)


def test_one_staging_takes_one_change_after_the_other():
    staged = staging()
    found = []
    for change in CHANGES.values():
        for message in over_the_wire(change_messages(change)):
            arrived = staged.add(message)
            if arrived is not None:
                found.append(arrived.change)
    assert comparable(found) == comparable(list(CHANGES.values()))


# Where both see the same memory


def in_segment(tensors, gap=64):
    """A segment with these tensors, and where each lies."""
    offsets, memory = {}, bytearray(gap)
    for bucket, tensor in tensors.items():
        offsets[bucket] = len(memory)
        memory += to_bytes(tensor) + bytes(-len(to_bytes(tensor)) % gap)
    return memory, offsets


def test_mean_gradients_in_shared_memory_are_read_there_and_buffers_travel():
    change = CHANGES["prepared"]
    memory, offsets = in_segment(MEANS)
    messages = over_the_wire(change_messages(change, index=4, offsets=offsets))
    travelled = [chunk for message in messages for chunk in message.chunks]
    assert sum(len(each.data) for each in travelled) == sum(each.nbytes for each in NEW_BUFFERS.values())
    arrived = arriving(change_messages(change, index=4, offsets=offsets), memoryview(memory))
    assert comparable(arrived.change) == comparable(change)
    bucket = TRAINED[0].index
    memory[offsets[bucket] : offsets[bucket] + 4] = to_bytes(torch.tensor([7.0]))
    assert arrived.change.means[bucket][0] == 7.0


def test_a_change_without_buffers_whose_gradients_are_in_memory_is_one_message():
    change = dataclasses.replace(CHANGES["prepared"], buffers={})
    memory, offsets = in_segment(MEANS)
    (message,) = over_the_wire(change_messages(change, offsets=offsets))
    assert message.complete
    assert comparable(staging(memoryview(memory)).add(message).change) == comparable(change)


@pytest.mark.parametrize("offset", [-1, -(1 << 63), HUGE, 4096 - 60], ids=str)
def test_memory_that_the_segment_does_not_have_is_refused(offset):
    (message,) = over_the_wire(
        change_messages(dataclasses.replace(CHANGES["prepared"], buffers={}), offsets=dict.fromkeys(MEANS, 0))
    )
    message.change.tensors[0].segment_offset = offset
    with pytest.raises(InvalidRequest, match=r"bytes at .* of a segment were announced, which it does not have"):
        staging(memoryview(bytes(4096))).add(message)


def test_memory_is_refused_where_no_segment_was_named():
    (message,) = over_the_wire(
        change_messages(dataclasses.replace(CHANGES["prepared"], buffers={}), offsets=dict.fromkeys(MEANS, 0))
    )
    with pytest.raises(InvalidRequest, match="which it does not have"):
        staging().add(message)


# What no correct primary sends


def head(*tensors, **about):
    about = about or {"trainer_gone": pb.TrainerGone(trainer_id=1)}
    return pb.ChangeHead(tensors=tensors, **about)


def tensor_head(**replaced):
    code = element_type(torch.float32).code
    return pb.TensorHead(**{"bucket": BUCKET.index, "dtype": code, "num_elements": BUCKET.num_elements, **replaced})


def chunk(**replaced):
    data = bytes(4 * BUCKET.num_elements)
    return types_pb2.Chunk(**{"bucket": 0, "offset_bytes": 0, "dtype": 1, "data": data, **replaced})


def test_a_change_must_begin_with_its_head():
    with pytest.raises(InvalidRequest, match="first message must have its head"):
        staging().add(pb.FollowRequest(complete=True))
    staged = staging()
    assert staged.add(pb.FollowRequest(change=head(), complete=True)) is not None
    with pytest.raises(InvalidRequest, match="first message must have its head"):
        staged.add(pb.FollowRequest(chunks=[chunk()]))


def test_a_change_must_be_complete_before_the_next_one():
    staged = staging()
    staged.add(pb.FollowRequest(change=head(tensor_head())))
    with pytest.raises(InvalidRequest, match="began before the one before it was complete"):
        staged.add(pb.FollowRequest(change=head()))


def test_a_change_is_not_complete_without_its_tensors():
    staged = staging()
    staged.add(pb.FollowRequest(change=head(tensor_head())))
    staged.add(pb.FollowRequest(chunks=[chunk(data=bytes(8))]))
    missing = 4 * BUCKET.num_elements - 8
    with pytest.raises(InvalidRequest, match=f"{missing} bytes of its tensors have not come"):
        staged.add(pb.FollowRequest(complete=True))


@pytest.mark.parametrize(
    "replaced",
    [{"num_elements": BUCKET.num_elements + 1}, {"num_elements": -1}, {"num_elements": HUGE}, {"bucket": 999},
     {"bucket": -1}, {"dtype": 0}, {"dtype": 99}],
    ids=str,
)  # fmt: skip
def test_tensors_that_the_shard_does_not_have_are_refused_before_they_come(replaced):
    with pytest.raises(PserverError, match=r"came for bucket|is unknown"):
        staging().add(pb.FollowRequest(change=head(tensor_head(**replaced))))


@pytest.mark.parametrize(
    "replaced",
    [{"bucket": 1}, {"bucket": -1}, {"dtype": 2}, {"offset_bytes": 4}, {"offset_bytes": -4}, {"offset_bytes": HUGE},
     {"offset_bytes": -4 * BUCKET.num_elements}, {"data": bytes(4 * BUCKET.num_elements + 4)}],
    ids=lambda replaced: str(replaced)[:60],
)  # fmt: skip
@pytest.mark.parametrize("begun", [False, True], ids=["first", "second"])
def test_chunks_that_do_not_follow_are_refused(replaced, begun):
    staged = staging()
    staged.add(pb.FollowRequest(change=head(tensor_head())))
    if begun:
        staged.add(pb.FollowRequest(chunks=[chunk(data=bytes(8))]))
    with pytest.raises(InvalidRequest, match=r"a chunk"):
        staged.add(pb.FollowRequest(chunks=[chunk(**replaced)]))


def test_a_chunk_that_comes_twice_is_refused():
    staged = staging()
    staged.add(pb.FollowRequest(change=head(tensor_head()), chunks=[chunk()]))
    with pytest.raises(InvalidRequest, match="does not follow what came of tensor 0"):
        staged.add(pb.FollowRequest(chunks=[chunk()]))


@pytest.mark.parametrize("num_bytes", [0, 8, 4 * BUCKET.num_elements - 8], ids=["nothing", "as much", "the rest"])
def test_a_tensor_that_has_begun_does_not_begin_again(num_bytes):
    """It would be of another size."""
    staged = staging()
    staged.add(pb.FollowRequest(change=head(tensor_head()), chunks=[chunk(data=bytes(8))]))
    with pytest.raises(InvalidRequest, match="does not follow what came of tensor 0"):
        staged.add(pb.FollowRequest(chunks=[chunk(data=bytes(num_bytes))]))


def test_nothing_follows_a_tensor_that_is_whole():
    staged = staging()
    staged.add(pb.FollowRequest(change=head(tensor_head()), chunks=[chunk()]))
    with pytest.raises(InvalidRequest, match="does not follow what came of tensor 0"):
        staged.add(pb.FollowRequest(chunks=[chunk(data=b"")]))


def test_a_chunk_for_memory_of_the_segment_is_refused():
    staged = staging(memoryview(bytes(4096)))
    staged.add(pb.FollowRequest(change=head(tensor_head(segment_offset=64))))
    with pytest.raises(InvalidRequest, match="does not follow what came of tensor 0"):
        staged.add(pb.FollowRequest(chunks=[chunk()]))


def test_a_change_of_no_kind_is_refused():
    with pytest.raises(InvalidRequest, match="unknown kind None"):
        staging().add(pb.FollowRequest(change=pb.ChangeHead(index=1), complete=True))


def test_a_bucket_without_its_master_or_with_another_one_is_refused():
    bucket = pb.BucketHeld(bucket=BUCKET.index, round=1)
    with pytest.raises(InvalidRequest, match=f"expected the master of bucket {BUCKET.index}, got"):
        staging().add(pb.FollowRequest(change=head(bucket_held=bucket), complete=True))
    other = TRAINED[1]
    message = pb.FollowRequest(
        change=head(tensor_head(bucket=other.index, num_elements=other.num_elements), bucket_held=bucket),
        chunks=[chunk(data=bytes(4 * other.num_elements))],
        complete=True,
    )
    with pytest.raises(InvalidRequest, match=f"expected the master of bucket {BUCKET.index}, got"):
        staging().add(message)


def test_a_plan_without_rules_is_refused():
    message = pb.FollowRequest(change=head(round_prepared=pb.RoundPrepared()), complete=True)
    with pytest.raises(InvalidRequest, match="nonfinite must be one of"):
        staging().add(message)


def test_messages_have_the_memory_of_the_tensors():
    """Nothing is copied before it is sent."""
    tensors = {index: values.clone() for index, values in GRADIENTS.items()}
    change = GradientsPushed(push_id=IDS[0], context_id=1, gradients=tensors, absent=frozenset())
    messages = list(change_messages(change))
    for values in tensors.values():
        values.fill_(7)
    assert comparable(arriving(messages).change) == comparable(change)
