"""The Shards service: decode, call the core, encode."""

from collections.abc import AsyncIterator, Iterable
from functools import partial

from pserver.core.staging import Staging
from pserver.errors import MixedRounds
from pserver.server.shard_host import HostedShard, ShardHost
from pserver.transport.chunks import ChunkPacker
from pserver.transport.convert import commit_from_proto, outcome_to_proto, push_id_from_proto
from pserver.transport.gen import shards_pb2 as pb
from pserver.transport.gen.types_pb2 import Chunk
from pserver.transport.methods import first_of
from pserver.wire.layout import Bucket


class ShardService:
    """Serves the RPCs of shards.proto."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    async def initialise(self, requests: AsyncIterator[pb.InitialiseRequest]) -> pb.InitialiseReply:
        first = await first_of(requests)
        push_id = push_id_from_proto(first.push_id)
        hosted = await self._require(first.shard, push_id.trainer_id)
        staging = Staging(hosted.buckets)
        _stage(staging, first)
        async for request in requests:
            _stage(staging, request)
        self._host.require_living(push_id.trainer_id)
        self._host.report(await hosted.work(lambda shard: shard.initialise(push_id, staging)))
        return pb.InitialiseReply()

    async def pull(self, request: pb.PullRequest) -> AsyncIterator[pb.PullReply]:
        hosted = await self._require(request.shard, request.trainer_id)
        await hosted.reach(request.min_round, request.wait_s)
        buckets = hosted.buckets if request.include_buffers else hosted.trained
        async for round_number, chunks in _read(hosted, buckets):
            yield pb.PullReply(round=round_number, chunks=chunks)

    async def step(self, requests: AsyncIterator[pb.StepRequest]) -> AsyncIterator[pb.StepReply]:
        first = await first_of(requests)
        push_id = push_id_from_proto(first.push_id)
        hosted = await self._require(first.shard, push_id.trainer_id)
        staging = Staging(hosted.trained)
        last = first
        _stage(staging, first)
        async for last in requests:
            _stage(staging, last)
        self._host.require_living(push_id.trainer_id)
        commit = commit_from_proto(last.commit) if last.HasField("commit") else None
        absent = frozenset(first.absent_tensors)
        report = await hosted.work(lambda shard: shard.push(push_id, first.context_id, staging, absent, commit))
        if report is not None:
            self._host.report(report)
        if commit is None:
            return
        result = await hosted.outcome(push_id, last.commit.wait_s)
        # The outcome rides on the first message: a second one costs a small step a good part of its time.
        outcome: pb.Outcome | None = outcome_to_proto(result)
        async for round_number, chunks in _read(hosted, hosted.trained):
            yield pb.StepReply(outcome=outcome, round=round_number, chunks=chunks)
            outcome = None
        if outcome is not None:
            yield pb.StepReply(outcome=outcome, round=result.round)

    async def drop_context(self, request: pb.DropContextRequest) -> pb.DropContextReply:
        push_id = push_id_from_proto(request.push_id)
        hosted = await self._require(request.shard, push_id.trainer_id)
        async with hosted.exclusive() as shard:
            shard.drop_context(push_id, request.context_id)
        return pb.DropContextReply()

    async def _require(self, address: pb.ShardAddress, trainer_id: int) -> HostedShard:
        return await self._host.require(address.model, address.epoch, address.fingerprint, trainer_id)


def _stage(staging: Staging, request: pb.InitialiseRequest | pb.StepRequest) -> None:
    for chunk in request.chunks:
        staging.add_chunk(chunk.bucket, chunk.offset_bytes, chunk.dtype, chunk.data)


async def _read(hosted: HostedShard, buckets: Iterable[Bucket]) -> AsyncIterator[tuple[int, list[Chunk]]]:
    """The values of these buckets as messages, all of one round.

    Raises:
        MixedRounds: a round was applied meanwhile.
    """
    packer = ChunkPacker()
    first_round: int | None = None
    for bucket in buckets:
        round_number, messages = await hosted.read(bucket, partial(_packed, packer, bucket))
        if first_round is None:
            first_round = round_number
        if round_number != first_round:
            raise MixedRounds(f"round {round_number} was applied while values of round {first_round} were read")
        for chunks in messages:
            yield round_number, chunks
    if first_round is not None and (rest := packer.rest()):
        yield first_round, rest


def _packed(packer: ChunkPacker, bucket: Bucket, data: memoryview) -> list[list[Chunk]]:
    return list(packer.add(bucket, data))
