"""The Shards service: decode, call the core, encode."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial

from google.protobuf.message import Message

from pserver.core.optimizer_state import StatePiece
from pserver.core.staging import Pushed, Staging
from pserver.core.state_staging import StateStaging
from pserver.errors import InvalidRequest, MixedRounds, SharedMemoryUnavailable
from pserver.server.hosted_shard import HostedShard
from pserver.server.shard_host import ShardHost
from pserver.server.shard_memory import ShardMemory
from pserver.transport.chunks import ChunkPacker
from pserver.transport.convert import (
    commit_from_proto,
    outcome_to_proto,
    push_id_from_proto,
    state_chunk_from_proto,
)
from pserver.transport.deadline import check_wait_s
from pserver.transport.gen import shards_pb2 as pb
from pserver.transport.gen.types_pb2 import StateChunk
from pserver.transport.methods import Sendable, first_of
from pserver.transport.raw_chunks import Lent, Pieces, pieces
from pserver.transport.state_chunks import state_messages
from pserver.types import PushId, StepResult
from pserver.wire.layout import Bucket
from pserver.wire.shared_buckets import tensor_over
from pserver.wire.tensors import memory_of

#: What is pushed without a commit waits so long for the replicas, in seconds.
REPLICATION_WAIT_S = 60.0


class ShardService:
    """Serves the RPCs of shards.proto."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    async def initialise(self, requests: AsyncIterator[pb.InitialiseRequest]) -> pb.InitialiseReply:
        first = await first_of(requests)
        push_id = push_id_from_proto(first.push_id)
        hosted = await self._require(first.shard, push_id.trainer_id)
        with self._host.stream(push_id.trainer_id):
            staging, states = Staging(hosted.buckets), StateStaging(hosted.trained)
            _stage(staging, first)
            _stage_state(states, first)
            async for request in requests:
                self._host.require_living(push_id.trainer_id)
                _stage(staging, request)
                _stage_state(states, request)
            self._host.require_living(push_id.trainer_id)
            state = states.complete()
            self._host.report(await hosted.work(lambda shard: shard.initialise(push_id, staging, state)))
        return pb.InitialiseReply()

    async def pull(self, request: pb.PullRequest) -> AsyncIterator[Sendable]:
        hosted = await self._require(request.shard, request.trainer_id)
        await hosted.reach(request.min_round, check_wait_s(request.wait_s))
        buckets = hosted.buckets if request.include_all else hosted.exchanged
        async for message in _read(hosted, buckets, lambda round_number: pb.PullReply(round=round_number)):
            yield message

    async def pull_state(self, request: pb.PullStateRequest) -> AsyncIterator[pb.PullStateReply]:
        hosted = await self._require(request.shard, request.trainer_id)
        await hosted.reach(request.min_round, check_wait_s(request.wait_s))
        async for round_number, chunks in _read_state(hosted):
            yield pb.PullStateReply(round=round_number, state=chunks)

    async def step(self, requests: AsyncIterator[pb.StepRequest]) -> AsyncIterator[Sendable]:
        first = await first_of(requests)
        push_id = push_id_from_proto(first.push_id)
        hosted = await self._require(first.shard, push_id.trainer_id)
        with self._host.stream(push_id.trainer_id):
            staging = Staging(hosted.exchanged, hosted.coding)
            last = first
            _stage(staging, first)
            async for request in requests:
                self._host.require_living(push_id.trainer_id)
                if last.HasField("commit"):
                    raise InvalidRequest("a message came after the one with the commit; the commit must be in the last")
                last = request
                _stage(staging, last)
            committed = await self._push(hosted, push_id, first, last, staging)
            del staging  # a commit may wait for long, and be repeated meanwhile: what waits holds nothing
        if not committed:
            return
        result = await self._host.outcome(hosted, push_id, check_wait_s(last.wait_s), early=not first.without_values)
        replies = _StepReplies(result)
        async for message in _read(hosted, () if first.without_values else hosted.exchanged, replies.head):
            yield message
        if replies.outcome is not None:
            yield replies.head(result.round)

    async def step_once(self, request: pb.StepRequest) -> Sendable:
        push_id = push_id_from_proto(request.push_id)
        hosted = await self._require(request.shard, push_id.trainer_id)
        if not await self._push(hosted, push_id, request, request, _pushed(hosted, push_id, request)):
            return pb.StepReply()
        result = await self._host.outcome(hosted, push_id, check_wait_s(request.wait_s))
        replies = _StepReplies(result)
        found: list[bytes] = []
        if not request.without_values:
            found = [message.join() async for message in _read(hosted, hosted.exchanged, replies.head)]
        # Messages put end to end are one message.
        return b"".join(found) if found else replies.head(result.round)

    async def _push(
        self, hosted: HostedShard, push_id: PushId, first: pb.StepRequest, last: pb.StepRequest, pushed: Pushed
    ) -> bool:
        """Adds a push to its context; whether it came with a commit."""
        self._host.require_living(push_id.trainer_id)
        absent = _absent(last.absent_tensors, hosted.num_tensors)
        commit = commit_from_proto(last.commit) if last.HasField("commit") else None
        check_wait_s(last.wait_s)
        report = await hosted.work(lambda shard: shard.push(push_id, first.context_id, pushed, absent, commit))
        if report is not None:
            self._host.report(report)
        if commit is None:
            await hosted.replicated(REPLICATION_WAIT_S)
        return commit is not None

    async def find_memory(self, request: pb.FindMemoryRequest) -> pb.FindMemoryReply:
        try:
            return pb.FindMemoryReply(segment=self._host.proof.segment())
        except SharedMemoryUnavailable as error:
            return pb.FindMemoryReply(reason=str(error))

    async def open_memory(self, request: pb.OpenMemoryRequest) -> pb.OpenMemoryReply:
        self._host.proof.check(request.nonce)
        hosted = await self._require(request.shard, request.trainer_id)
        async with hosted.exclusive():
            self._host.require_living(request.trainer_id)  # its lease may have ended while others had the shard
            memory = _memory_of(hosted)
            return pb.OpenMemoryReply(values=memory.name, mailbox=memory.open_mailbox(request.trainer_id))

    async def drop_context(self, request: pb.DropContextRequest) -> pb.DropContextReply:
        push_id = push_id_from_proto(request.push_id)
        hosted = await self._require(request.shard, push_id.trainer_id)
        async with hosted.exclusive() as shard:
            shard.drop_context(push_id, request.context_id)
        await hosted.replicated(REPLICATION_WAIT_S)
        return pb.DropContextReply()

    async def _require(self, address: pb.ShardAddress, trainer_id: int) -> HostedShard:
        return await self._host.require(address.model, address.shard, address.epoch, address.fingerprint, trainer_id)


class _StepReplies:
    """Heads of the replies to a step. The outcome rides on the first: a message more costs a small step a good part."""

    def __init__(self, result: StepResult) -> None:
        self.outcome: pb.Outcome | None = outcome_to_proto(result)

    def head(self, round_number: int) -> pb.StepReply:
        """The next one, for values of this round."""
        outcome, self.outcome = self.outcome, None
        return pb.StepReply(outcome=outcome, round=round_number)


def _memory_of(hosted: HostedShard) -> ShardMemory:
    if hosted.memory is None:
        raise SharedMemoryUnavailable("this shard's values are not in shared memory; the server's log says why")
    return hosted.memory


def _pushed(hosted: HostedShard, push_id: PushId, request: pb.StepRequest) -> Pushed:
    """What a step of one message brings: in it, or in the trainer's mailbox."""
    if request.in_memory:
        return _memory_of(hosted).pushed(push_id)
    staging = Staging(hosted.exchanged, hosted.coding)
    _stage(staging, request)
    return staging


def _absent(indices: Sequence[int], num_tensors: int) -> frozenset[int]:
    if len(indices) > num_tensors:
        raise InvalidRequest(f"{len(indices)} absent tensors came for a model of {num_tensors}")
    return frozenset(indices)


def _stage(staging: Staging, request: pb.InitialiseRequest | pb.StepRequest) -> None:
    for chunk in request.chunks:
        staging.add_chunk(chunk.bucket, chunk.offset_bytes, chunk.dtype, chunk.data)


def _stage_state(states: StateStaging, request: pb.InitialiseRequest) -> None:
    for chunk in request.state:
        states.add_chunk(state_chunk_from_proto(chunk))


async def _read(
    hosted: HostedShard, buckets: Iterable[Bucket], head: Callable[[int], Message]
) -> AsyncIterator[Pieces]:
    """The values of these buckets as encoded messages, each with a head for the round they are of.

    That is the oldest, if the policy allows a mix. With no buckets there is no message.

    Raises:
        MixedRounds: a round was applied meanwhile.
    """
    packer = ChunkPacker()
    last_round: int | None = None

    def packed(bucket: Bucket, round_number: int, data: memoryview) -> list[Pieces]:
        nonlocal last_round
        travelling = hosted.coding.pulled(bucket)
        lend: Callable[[memoryview], Lent] | None = hosted.lend
        if travelling.dtype != bucket.dtype:
            lend = None  # nobody changes this copy
            data = memory_of(tensor_over(data, bucket.dtype).to(travelling.dtype))
        if last_round is not None and last_round != round_number and not hosted.mixed_rounds:
            raise MixedRounds(f"round {round_number} was applied while values of round {last_round} were read")
        # A message may hold values of both; saying the older one hides no staleness.
        last_round = round_number if last_round is None else last_round
        messages = [
            pieces(head(last_round), chunks, lend) for chunks in packer.add(bucket.index, data, travelling.dtype)
        ]
        packer.keep()
        return messages

    for bucket in buckets:
        for message in await hosted.read(bucket, partial(packed, bucket)):
            yield message
    if last_round is not None and (rest := packer.rest()):
        yield pieces(head(last_round), rest)


async def _read_state(hosted: HostedShard) -> AsyncIterator[tuple[int, list[StateChunk]]]:
    """The optimizer state as messages, and the round it is of: the oldest, if the policy allows a mix.

    Raises:
        MixedRounds: a round was applied meanwhile.
    """
    first_round: int | None = None
    for bucket in hosted.trained:
        round_number, messages = await hosted.read_state(bucket, partial(_packed_state, bucket))
        first_round = round_number if first_round is None else first_round
        if round_number != first_round and not hosted.mixed_rounds:
            raise MixedRounds(f"round {round_number} was applied while state of round {first_round} was read")
        for chunks in messages:
            yield first_round, chunks


def _packed_state(bucket: Bucket, pieces: Iterable[StatePiece]) -> list[list[StateChunk]]:
    return list(state_messages((bucket.index, piece) for piece in pieces))
