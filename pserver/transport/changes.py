"""What happens to a shard, as messages to its replicas and back."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

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
from pserver.core.messages import Prepared
from pserver.core.state_staging import StateStaging
from pserver.errors import InvalidRequest
from pserver.transport.chunks import ChunkPacker
from pserver.transport.convert import (
    decision_from_proto,
    decision_to_proto,
    nonfinite_from_proto,
    nonfinite_to_proto,
    outcome_from_proto,
    outcome_to_proto,
    plan_from_proto,
    plan_to_proto,
    push_id_from_proto,
    push_id_to_proto,
    state_chunk_from_proto,
)
from pserver.transport.gen import replicas_pb2 as pb
from pserver.transport.gen import types_pb2
from pserver.transport.methods import Sendable
from pserver.transport.raw_chunks import pieces
from pserver.transport.state_chunks import state_messages
from pserver.wire.layout import Bucket
from pserver.wire.shared_buckets import tensor_over
from pserver.wire.tensors import dtype_of_code, element_type, memory_of

#: Where the mean gradients of a prepared round lie in memory that the replica can read, by bucket; None: nowhere.
Offsets = Mapping[int, int] | None

_NOBODY = types_pb2.PushId(trainer_id=0)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A change that has come whole; `index` 0: a part of the state, after the log's entry `position`."""

    index: int
    released: int
    position: int
    change: Change


# On the primary


def change_messages(
    change: Change, *, index: int = 0, released: int = 0, position: int = 0, offsets: Offsets = None
) -> Iterator[Sendable]:
    """The messages of one change; they have the memory of its tensors."""
    head = pb.ChangeHead(index=index, released=released, position=position)
    tensors = list(_describe(head, change))
    state: Iterable[list[types_pb2.StateChunk]] = ()
    if isinstance(change, BucketHeld):
        state = state_messages((change.bucket, piece) for piece in change.state)
    coming: list[tuple[int, torch.Tensor]] = []
    for number, (bucket, tensor, is_buffer) in enumerate(tensors):
        found = head.tensors.add(
            bucket=bucket,
            dtype=element_type(tensor.dtype).code,
            num_elements=tensor.numel(),
            buffer=is_buffer,
        )
        if offsets is not None and not is_buffer:
            found.segment_offset = offsets[bucket]
        elif tensor.numel():
            coming.append((number, tensor))
    whole = not coming and not isinstance(change, BucketHeld)
    yield pb.FollowRequest(change=head, complete=whole)
    if whole:
        return
    for chunks in state:
        yield pb.FollowRequest(state=chunks)
    packer = ChunkPacker()
    for number, tensor in coming:
        for raw in packer.add(number, memory_of(tensor), tensor.dtype):
            yield pieces(pb.FollowRequest(), raw)
    yield pieces(pb.FollowRequest(complete=True), packer.rest())


def _describe(head: pb.ChangeHead, change: Change) -> Iterator[tuple[int, torch.Tensor, bool]]:
    """Writes a change into a head; yields its tensors: the bucket of each, and whether it is a buffer's new value."""
    if isinstance(change, RoundPrepared):
        head.round_prepared.CopyFrom(
            pb.RoundPrepared(
                plan=plan_to_proto(change.plan),
                squares=change.report.squares,
                nonfinite=nonfinite_to_proto(change.report.nonfinite),
                absent_tensors=sorted(change.absent),
                push_ids=[_NOBODY if each is None else push_id_to_proto(each) for each in change.push_ids],
                context_ids=change.context_ids,
            )
        )
        yield from ((bucket, tensor, False) for bucket, tensor in change.means.items())
        yield from ((bucket, tensor, True) for bucket, tensor in change.buffers.items())
    elif isinstance(change, RoundApplied):
        applied = pb.RoundApplied(decision=decision_to_proto(change.decision), version=change.version)
        if change.checksum is not None:
            applied.checked_bucket, applied.checksum = change.checksum.bucket, change.checksum.value
        head.round_applied.CopyFrom(applied)
    elif isinstance(change, StepRefused):
        head.step_refused.CopyFrom(
            pb.StepRefused(
                push_id=push_id_to_proto(change.push_id),
                context_id=change.context_id,
                step=change.step,
                outcome=outcome_to_proto(change.result),
            )
        )
    elif isinstance(change, GradientsPushed):
        head.gradients_pushed.CopyFrom(
            pb.GradientsPushed(
                push_id=push_id_to_proto(change.push_id),
                context_id=change.context_id,
                absent_tensors=sorted(change.absent),
            )
        )
        yield from ((bucket, tensor, False) for bucket, tensor in change.gradients.items())
    elif isinstance(change, ContextDropped):
        head.context_dropped.CopyFrom(
            pb.ContextDropped(push_id=push_id_to_proto(change.push_id), context_id=change.context_id)
        )
    elif isinstance(change, TrainerGone):
        head.trainer_gone.trainer_id = change.trainer_id
    elif isinstance(change, Bookkeeping):
        head.bookkeeping.CopyFrom(
            pb.Bookkeeping(
                round=change.round,
                version=change.version,
                trainers=[_record_to_proto(each) for each in change.trainers],
                decisions=[decision_to_proto(each) for each in change.decisions],
            )
        )
    elif isinstance(change, ContextHeld):
        head.context_held.CopyFrom(
            pb.ContextHeld(
                trainer_id=change.trainer_id,
                context_id=change.context_id,
                absent_tensors=sorted(change.absent or ()),
                pushed=change.absent is not None,
            )
        )
        yield from ((bucket, tensor, False) for bucket, tensor in change.gradients.items())
    else:
        head.bucket_held.CopyFrom(pb.BucketHeld(bucket=change.bucket, round=change.round, last=change.last))
        yield change.bucket, change.master, False


def _record_to_proto(record: TrainerRecord) -> pb.TrainerRecord:
    return pb.TrainerRecord(
        trainer_id=record.trainer_id,
        last_step=record.last_step,
        lowest_unacknowledged=record.lowest_unacknowledged,
        outcomes=[
            pb.RecordedOutcome(sequence=sequence, outcome=None if found is None else outcome_to_proto(found))
            for sequence, found in record.outcomes.items()
        ],
    )


# On a replica


class ChangeStaging:
    """Puts changes together from messages, one after the other.

    Args:
        buckets: of the shard; a tensor has as many elements as its bucket.
        segment: the primary's memory of mean gradients; None: they come in chunks.
        model, shard: of the shard, for reports.
    """

    def __init__(self, buckets: Iterable[Bucket], segment: memoryview | None, *, model: str, shard: int) -> None:
        self._num_elements = {each.index: each.num_elements for each in buckets}
        self._segment = segment
        self._model, self._shard = model, shard
        self._head: pb.ChangeHead | None = None
        self._tensors: list[torch.Tensor] = []
        self._missing: list[int] = []  # bytes of each tensor that have not come
        self._states = StateStaging()

    def add(self, message: pb.FollowRequest) -> Arrived | None:
        """Takes the next message; returns the change that is whole with it, if any.

        Raises:
            InvalidRequest: it does not follow the one before, or has what no correct primary sends.
        """
        if message.HasField("change"):
            self._begin(message.change)
        if self._head is None:
            raise InvalidRequest("a change's first message must have its head")
        for chunk in message.chunks:
            self._take(chunk.bucket, chunk.offset_bytes, chunk.dtype, chunk.data)
        for state in message.state:
            self._states.add_chunk(state_chunk_from_proto(state))
        if not message.complete:
            return None
        if any(self._missing):
            raise InvalidRequest(f"a change is complete, but {sum(self._missing)} bytes of its tensors have not come")
        head, self._head = self._head, None
        return Arrived(head.index, head.released, head.position, self._change(head))

    def _begin(self, head: pb.ChangeHead) -> None:
        if self._head is not None:
            raise InvalidRequest("a change began before the one before it was complete")
        self._head, self._tensors, self._missing, self._states = head, [], [], StateStaging()
        for each in head.tensors:
            if self._num_elements.get(each.bucket) != each.num_elements:
                raise InvalidRequest(
                    f"a tensor of {each.num_elements} elements came for bucket {each.bucket}, which has "
                    f"{self._num_elements.get(each.bucket)} here"
                )
            dtype = dtype_of_code(each.dtype)
            num_bytes = each.num_elements * dtype.itemsize
            if each.HasField("segment_offset"):
                self._tensors.append(tensor_over(self._in_segment(each.segment_offset, num_bytes), dtype))
                self._missing.append(0)
            else:
                self._tensors.append(torch.empty(0, dtype=dtype))
                self._missing.append(num_bytes)

    def _in_segment(self, offset: int, num_bytes: int) -> memoryview:
        if self._segment is None or not 0 <= offset <= len(self._segment) - num_bytes:
            raise InvalidRequest(f"{num_bytes} bytes at {offset} of a segment were announced, which it does not have")
        return self._segment[offset : offset + num_bytes]

    def _take(self, number: int, offset_bytes: int, dtype_code: int, data: bytes | memoryview) -> None:
        if not 0 <= number < len(self._tensors) or dtype_of_code(dtype_code) != self._tensors[number].dtype:
            raise InvalidRequest(
                f"a chunk of tensor {number} came; the change has {len(self._tensors)}, or other elements"
            )
        tensor, missing = self._tensors[number], self._missing[number]
        if offset_bytes == 0 and len(data) == missing and not tensor.numel():
            self._tensors[number] = tensor_over(memoryview(data), tensor.dtype)
            self._missing[number] = 0
            return
        if offset_bytes == 0 and not tensor.numel():
            tensor = self._tensors[number] = torch.empty(missing // tensor.dtype.itemsize, dtype=tensor.dtype)
        memory = memory_of(tensor)
        if not 0 <= offset_bytes == len(memory) - missing or len(data) > missing:
            raise InvalidRequest(f"a chunk from byte {offset_bytes} on does not follow what came of tensor {number}")
        memory[offset_bytes : offset_bytes + len(data)] = data
        self._missing[number] -= len(data)

    def _change(self, head: pb.ChangeHead) -> Change:
        kind = head.WhichOneof("kind")
        tensors = {
            each.bucket: tensor for each, tensor in zip(head.tensors, self._tensors, strict=True) if not each.buffer
        }
        if kind == "round_prepared":
            buffers = {
                each.bucket: tensor for each, tensor in zip(head.tensors, self._tensors, strict=True) if each.buffer
            }
            return self._round_prepared(head.round_prepared, tensors, buffers)
        if kind == "round_applied":
            applied = head.round_applied
            checksum = None
            if applied.HasField("checked_bucket"):
                checksum = Checksum(bucket=applied.checked_bucket, value=applied.checksum)
            return RoundApplied(
                decision=decision_from_proto(applied.decision), version=applied.version, checksum=checksum
            )
        if kind == "step_refused":
            refused = head.step_refused
            return StepRefused(
                push_id=push_id_from_proto(refused.push_id),
                context_id=refused.context_id,
                step=refused.step,
                result=outcome_from_proto(refused.outcome),
            )
        if kind == "gradients_pushed":
            pushed = head.gradients_pushed
            return GradientsPushed(
                push_id=push_id_from_proto(pushed.push_id),
                context_id=pushed.context_id,
                gradients=tensors,
                absent=frozenset(pushed.absent_tensors),
            )
        if kind == "context_dropped":
            dropped = head.context_dropped
            return ContextDropped(push_id=push_id_from_proto(dropped.push_id), context_id=dropped.context_id)
        if kind == "trainer_gone":
            return TrainerGone(trainer_id=head.trainer_gone.trainer_id)
        if kind == "bookkeeping":
            books = head.bookkeeping
            return Bookkeeping(
                round=books.round,
                version=books.version,
                trainers=[_record_from_proto(each) for each in books.trainers],
                decisions=[decision_from_proto(each) for each in books.decisions],
            )
        if kind == "context_held":
            held = head.context_held
            return ContextHeld(
                trainer_id=held.trainer_id,
                context_id=held.context_id,
                gradients=tensors,
                absent=frozenset(held.absent_tensors) if held.pushed else None,
            )
        if kind == "bucket_held":
            bucket = head.bucket_held
            if set(tensors) != {bucket.bucket}:
                raise InvalidRequest(f"expected the master of bucket {bucket.bucket}, got {sorted(tensors)}")
            return BucketHeld(
                bucket=bucket.bucket,
                round=bucket.round,
                master=tensors[bucket.bucket],
                state=self._states.complete().get(bucket.bucket, ()),
                last=bucket.last,
            )
        raise InvalidRequest(f"a change of the unknown kind {kind!r} came")

    def _round_prepared(
        self, message: pb.RoundPrepared, means: Mapping[int, torch.Tensor], buffers: Mapping[int, torch.Tensor]
    ) -> RoundPrepared:
        plan = plan_from_proto(message.plan)
        return RoundPrepared(
            plan=plan,
            report=Prepared(
                model=self._model,
                shard=self._shard,
                epoch=0,
                round=plan.plan.round,
                attempt=plan.attempt,
                squares=tuple(message.squares),
                nonfinite=nonfinite_from_proto(message.nonfinite),
            ),
            means=means,
            buffers=buffers,
            absent=frozenset(message.absent_tensors),
            push_ids=tuple(push_id_from_proto(each) if each.trainer_id else None for each in message.push_ids),
            context_ids=tuple(message.context_ids),
        )


def _record_from_proto(message: pb.TrainerRecord) -> TrainerRecord:
    return TrainerRecord(
        trainer_id=message.trainer_id,
        last_step=message.last_step,
        lowest_unacknowledged=message.lowest_unacknowledged,
        outcomes={
            each.sequence: outcome_from_proto(each.outcome) if each.HasField("outcome") else None
            for each in message.outcomes
        },
    )
