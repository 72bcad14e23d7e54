"""The RPCs of one shard, as a trainer makes them."""

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch

from pserver.client.arrivals import Arrivals
from pserver.client.mapped_shard import MappedShard
from pserver.client.open_step import OpenStep
from pserver.client.receiver import Receiver
from pserver.client.region import Region
from pserver.client.stopwatch import Stopwatch
from pserver.core.coding import Coding
from pserver.core.messages import CommitInfo, ShardPlacement
from pserver.core.optimizer_state import StatePiece
from pserver.core.state_staging import StateStaging
from pserver.errors import InternalError
from pserver.transport.channel import Channel, one, unary
from pserver.transport.chunks import ChunkPacker
from pserver.transport.convert import (
    commit_to_proto,
    outcome_from_proto,
    push_id_to_proto,
    state_chunk_from_proto,
)
from pserver.transport.gen import shards_pb2 as pb
from pserver.transport.methods import SHARDS, Sendable
from pserver.transport.raw_chunks import RawChunk, encode, pieces
from pserver.transport.same_machine import read_nonce
from pserver.transport.state_chunks import state_messages
from pserver.types import PushId, StepResult
from pserver.wire.layout import STORED, Bucket, Layout
from pserver.wire.shared_buckets import BucketOffsets, tensor_over
from pserver.wire.shm import map_segment
from pserver.wire.tensors import memory_of

#: The server gives up first, because it knows more; the transport follows after this time.
TRANSPORT_SLACK_S = 1.0
#: A push of up to so many bytes goes, and its parameters come, in one message: a stream costs more than two of them.
SMALL_BYTES = 64 << 10
#: Initial values are gathered in batches of so many bytes: what the network's thread does in a few milliseconds.
BATCH_BYTES = 16 << 20
#: A push may begin so long before it is complete, in seconds; if not, it is sent again.
LONGEST_BACKWARD_S = 3600.0


@dataclass(slots=True)
class Traffic:
    """Bytes of tensor data since the trainer started, and attempts that had to be repeated."""

    sent_bytes: int = 0
    received_bytes: int = 0
    num_retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One push, the same bytes for every shard and every retry. `early`: buckets that were sent when it had begun."""

    push_id: PushId
    context_id: int
    absent: Set[int]
    with_gradients: bool
    commit: CommitInfo | None
    early: Set[int] = frozenset()


class ShardClient:
    """Talks to one shard. Every call is one attempt; retries are the caller's.

    Args:
        channel: to the shard's server.
        placement: what the shard owns.
        model, layout, coding: what the messages are for, and how buckets travel in them.
        device: where the model's tensors are.
        traffic: counts bytes.
        communicating: runs while a push is sent.
    """

    def __init__(
        self,
        channel: Channel,
        placement: ShardPlacement,
        *,
        model: str,
        layout: Layout,
        coding: Coding,
        device: torch.device,
        traffic: Traffic,
        communicating: Stopwatch,
    ) -> None:
        self.number = placement.shard
        self._channel = channel
        self._server = placement.server
        self._address = pb.ShardAddress(
            model=model, shard=placement.shard, epoch=placement.epoch, fingerprint=layout.fingerprint
        )
        self._layout = layout
        self._coding = coding
        self._encoded: dict[int, memoryview] = {}
        self._device = device
        self._buckets = layout.part(placement.runs)
        self._exchanged = [bucket for bucket in self._buckets if bucket.group != STORED]
        self._pushed = [coding.pushed(bucket) for bucket in self._exchanged]
        self._exchanged_bytes = sum(bucket.num_bytes for bucket in self._exchanged)
        self._owned = frozenset(bucket.index for bucket in self._buckets)
        self._traffic = traffic
        self._communicating = communicating
        self._mapped: MappedShard | None = None
        self._left: MappedShard | None = None  # memory of a primary that is none any more
        self._open: _OpenPush | None = None

    @property
    def where(self) -> str:
        """The server, for messages."""
        return f"server {self._server} at {self._channel.address}"

    @property
    def epoch(self) -> int:
        """Of the primary that is called."""
        return self._address.epoch

    def move(self, channel: Channel, placement: ShardPlacement) -> None:
        """Another server is primary. What lies in the memory of the one before is read there, while it is needed."""
        self.abandon()
        self._channel = channel
        self._server = placement.server
        self._address.epoch = placement.epoch
        if self._mapped is not None:
            self._left = self._mapped
            if self.writable is not None:
                self.__dict__["outgoing"] = self._mapped.outgoing
            self._mapped = None

    @property
    def has_left_memory(self) -> bool:
        """Whether it read the memory of a primary that is none any more, and has not looked for another one's yet."""
        return self._left is not None

    def leave_memory(self) -> None:
        """Nothing in that memory is needed any more."""
        self._left = None
        self.__dict__.pop("outgoing", None)

    # Memory

    @property
    def readable(self) -> MappedShard | None:
        """Shared memory in which the values lie as trainers want them; None: they come in messages."""
        return self._mapped if self._coding.values_are_plain else None

    @property
    def writable(self) -> MappedShard | None:
        """Shared memory that gradients are written to; None: they go in messages."""
        return self._mapped if self._coding.gradients_are_plain else None

    @cached_property
    def outgoing(self) -> Region:
        """What pushes are sent from: the mailbox, or memory of this process."""
        if self.writable is not None:
            return self.writable.outgoing
        return Region(self._layout, BucketOffsets(self._pushed), self._device)

    @cached_property
    def incoming(self) -> Region:
        """Memory of this process that messages are written into; made when it is first needed."""
        return Region(
            self._layout, BucketOffsets([self._coding.pulled(bucket) for bucket in self._buckets]), self._device
        )

    @property
    def streams(self) -> bool:
        """Whether pushes go in several messages."""
        return self.writable is None and self._exchanged_bytes > SMALL_BYTES

    def forget_incoming(self) -> None:
        """Frees `incoming`, which is needed seldom where values are read from shared memory."""
        self.__dict__.pop("incoming", None)

    def holds(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether the values here of a tensor are its own: those read last, or those of the server now."""
        return self._values.holds(index, tensor)

    def cuts(self, index: int) -> bool:
        """Whether some of a tensor lies here, but not all."""
        return self._values.cuts(index)

    @property
    def _values(self) -> Region:
        if self.readable is not None:
            return self.readable.incoming
        return self.incoming if self._left is None or "incoming" in self.__dict__ else self._left.incoming

    def read_(self, tensors: Mapping[int, torch.Tensor], *, mixed_rounds: bool) -> int | None:
        """Copies values from shared memory into tensors; see `MappedShard.read_`."""
        assert self.readable is not None
        found = self.readable.read_(tensors, mixed_rounds=mixed_rounds)
        if found is not None:
            self._traffic.received_bytes += self._exchanged_bytes
        return found

    def encode(self, buckets: Collection[int], codec_state: Any) -> None:
        """Makes the bytes of what `outgoing` holds of these buckets, once a push: a retry sends the same."""
        futures = {
            bucket.index: coding.encode(codec_state, tensor_over(self.outgoing.bucket_bytes(bucket), bucket.dtype))
            for bucket in self._pushed
            if bucket.index in buckets and (coding := self._coding.of_gradients(bucket)) is not None
        }
        self._encoded |= {index: memory_of(future.wait().cpu()) for index, future in futures.items()}

    async def open_memory(self, trainer_id: int, timeout_s: float) -> None:
        """Maps the shard's values and this trainer's mailbox, to be used from now on.

        Raises:
            SharedMemoryUnavailable: the server is not on this machine, shares nothing, or it or this process lacks
                memory for it; says why.
        """
        nonce = await read_nonce(self._channel, timeout_s=timeout_s)
        request = pb.OpenMemoryRequest(shard=self._address, trainer_id=trainer_id, nonce=nonce)
        reply = await unary(self._channel, SHARDS["OpenMemory"], request, pb.OpenMemoryReply, timeout_s=timeout_s)
        self._mapped = MappedShard(
            self._layout,
            self._buckets,
            self._exchanged,
            self._device,
            values=map_segment(reply.values, writable=False),
            mailbox=map_segment(reply.mailbox, writable=True),
            epoch=self._address.epoch,
        )

    # Calls

    async def initialise(
        self,
        push_id: PushId,
        tensors: Mapping[int, torch.Tensor],
        state: Sequence[tuple[int, StatePiece]],
        timeout_s: float,
    ) -> None:
        """Sends every value of the shard, and what there is of its optimizer state."""

        async def requests() -> AsyncIterator[Sendable]:
            yield pb.InitialiseRequest(shard=self._address, push_id=push_id_to_proto(push_id))
            for state_chunks in state_messages((bucket, piece) for bucket, piece in state if bucket in self._owned):
                yield pb.InitialiseRequest(state=state_chunks)
            for some in _batches(self._buckets):  # never a second copy of the whole model
                values = Region(self._layout, BucketOffsets(some), self._device)
                values.gather(tensors)
                for chunks in self._pack(some, values):
                    yield pieces(pb.InitialiseRequest(), chunks)

        async for _ in self._channel.call(SHARDS["Initialise"], requests(), timeout_s=timeout_s):
            pass

    async def pull(self, trainer_id: int, min_round: int, *, include_all: bool, timeout_s: float) -> int | None:
        """Reads the shard's values into `incoming`, once it has reached `min_round`.

        Returns:
            Their round; None: there are none.
        """
        request = pb.PullRequest(
            shard=self._address,
            trainer_id=trainer_id,
            min_round=min_round,
            include_all=include_all,
            wait_s=timeout_s,
        )
        buckets = self._buckets if include_all else self._exchanged
        receiver = self._receiver(buckets, None)
        call = self._channel.call(
            SHARDS["Pull"], one(request), timeout_s=timeout_s + TRANSPORT_SLACK_S, place=receiver.place
        )
        async with aclosing(call) as replies:
            async for reply in replies:
                self._traffic.received_bytes += receiver.take(reply.round, reply.chunks)
        return receiver.finish()

    async def pull_state(
        self, trainer_id: int, min_round: int, timeout_s: float
    ) -> tuple[int | None, list[StatePiece]]:
        """Reads the shard's optimizer state once it has reached `min_round`; also its round (None: there is none)."""
        request = pb.PullStateRequest(shard=self._address, trainer_id=trainer_id, min_round=min_round, wait_s=timeout_s)
        staging = StateStaging()
        round_number: int | None = None
        call = self._channel.call(SHARDS["PullState"], one(request), timeout_s=timeout_s + TRANSPORT_SLACK_S)
        async with aclosing(call) as replies:
            async for reply in replies:
                round_number = reply.round
                for chunk in reply.state:
                    staging.add_chunk(state_chunk_from_proto(chunk))
                    self._traffic.received_bytes += len(chunk.data)
        return round_number, [piece for pieces in staging.complete().values() for piece in pieces]

    async def push(
        self, push: Push, timeout_s: float, arrivals: Arrivals | None = None
    ) -> tuple[StepResult, int | None] | None:
        """Sends what `outgoing` holds; with a commit, waits for the round, and reads new parameters into `incoming`.

        Shards whose memory is shared send and read nothing: the parameters lie in it.

        Args:
            arrivals: told of each bucket that is in `incoming`.

        Returns:
            What became of the step, and the round of the values read (None: none were); None without a commit.
        """
        self.outgoing.wait_until_free()
        begun, self._open = self._open, None
        if begun is not None:
            if begun.push_id == push.push_id and not begun.call.over:
                late = [bucket for bucket in self._pushed if bucket.index not in push.early]
                last = _Complete(push, timeout_s, arrivals)
                return await begun.call.finish([late, last], timeout_s + TRANSPORT_SLACK_S, self.where)
            begun.call.cancel()
        if self.writable is not None and self.readable is not None:
            return await self._push_once(push, timeout_s, arrivals, in_memory=push.with_gradients)
        if self._exchanged_bytes <= SMALL_BYTES:
            return await self._push_once(push, timeout_s, arrivals, in_memory=False)
        return await self._push_stream(push, timeout_s, arrivals)

    async def _push_once(
        self, push: Push, timeout_s: float, arrivals: Arrivals | None, *, in_memory: bool
    ) -> tuple[StepResult, int | None] | None:
        request = self._step_request(push.push_id, push.context_id)
        request.in_memory = in_memory
        _complete(request, push, timeout_s)
        chunks: list[RawChunk] = []
        if in_memory:
            self._traffic.sent_bytes += self._exchanged_bytes
        elif push.with_gradients:
            chunks = [each for some in self._pack(self._pushed, self.outgoing) for each in some]
        reply = await unary(
            self._channel,
            SHARDS["StepOnce"],
            encode(request, chunks),
            pb.StepReply,
            timeout_s=timeout_s + TRANSPORT_SLACK_S,
        )
        if push.commit is None:
            return None
        if self.readable is not None:
            return self._result(reply), None
        receiver = self._receiver(self._exchanged, arrivals)
        self._traffic.received_bytes += receiver.take(reply.round, reply.chunks)  # type: ignore[arg-type]
        return self._result(reply), receiver.finish()

    async def _push_stream(
        self, push: Push, timeout_s: float, arrivals: Arrivals | None
    ) -> tuple[StepResult, int | None] | None:
        async def requests() -> AsyncIterator[Sendable]:
            packer = self._pack(self._pushed, self.outgoing) if push.with_gradients else iter(())
            head, held = self._step_request(push.push_id, push.context_id), next(packer, [])
            for chunks in packer:
                yield pieces(head, held)
                head, held = pb.StepRequest(), chunks
            _complete(head, push, timeout_s)
            yield pieces(head, held)

        found = await self._step(requests(), timeout_s + TRANSPORT_SLACK_S, lambda: arrivals)
        if push.commit is not None and found is None:
            raise InternalError(f"{self.where} ended a step without an outcome")
        return found

    async def _step(
        self, requests: AsyncIterator[Sendable], timeout_s: float, arrivals: Callable[[], Arrivals | None]
    ) -> tuple[StepResult, int | None] | None:
        """Makes the call and takes what comes; None if nothing does. `arrivals` is asked when the first reply comes."""
        result: StepResult | None = None

        @cache
        def receiver() -> Receiver:
            return self._receiver(() if self.readable is not None else self._exchanged, arrivals())

        def place(bucket: int, offset_bytes: int, num_bytes: int) -> memoryview | None:
            return receiver().place(bucket, offset_bytes, num_bytes)

        call = self._channel.call(SHARDS["Step"], requests, timeout_s=timeout_s, place=place)
        async with aclosing(call) as replies:
            async for reply in replies:
                result = result or self._result(reply)
                self._traffic.received_bytes += receiver().take(reply.round, reply.chunks)
        return None if result is None else (result, receiver().finish())

    # A push that begins before its last gradient is there

    def begin(self, push_id: PushId, context_id: int) -> None:
        """Begins a push. On shards that take pushes from memory, or in one message, it only seems so."""
        self.abandon()
        if self.streams:
            self._open = _OpenPush(push_id, OpenStep(partial(self._step_as_it_comes, push_id, context_id)))

    def send(self, buckets: Collection[int]) -> None:
        """Sends what `outgoing` holds of these buckets."""
        if self._open is not None:
            self._open.call.add([bucket for bucket in self._pushed if bucket.index in buckets])

    def abandon(self) -> None:
        """Breaks the push that has begun, if any."""
        begun, self._open = self._open, None
        if begun is not None:
            begun.call.cancel()

    async def _step_as_it_comes(
        self, push_id: PushId, context_id: int, coming: AsyncIterator["Sequence[Bucket] | _Complete"]
    ) -> tuple[StepResult, int | None] | None:
        arrivals: Arrivals | None = None

        async def requests() -> AsyncIterator[Sendable]:
            nonlocal arrivals
            head = self._step_request(push_id, context_id)
            async for item in coming:
                if isinstance(item, _Complete):
                    arrivals = item.arrivals
                    _complete(head, item.push, item.timeout_s)
                    yield head
                    return
                with self._communicating.running():
                    for chunks in self._pack(item, self.outgoing):
                        yield pieces(head, chunks)
                        head = pb.StepRequest()

        return await self._step(requests(), LONGEST_BACKWARD_S, lambda: arrivals)

    def _receiver(self, buckets: Sequence[Bucket], arrivals: Arrivals | None) -> Receiver:
        return Receiver(self.where, buckets, self.incoming if buckets else None, arrivals)

    def _step_request(self, push_id: PushId, context_id: int) -> pb.StepRequest:
        return pb.StepRequest(
            shard=self._address,
            push_id=push_id_to_proto(push_id),
            context_id=context_id,
            without_values=self.readable is not None,
        )

    def _result(self, reply: pb.StepReply) -> StepResult:
        if not reply.HasField("outcome"):
            raise InternalError(f"{self.where} answered a step without an outcome")
        return outcome_from_proto(reply.outcome)

    async def drop_context(self, push_id: PushId, context_id: int, timeout_s: float) -> None:
        """Frees a context that will not be committed."""
        request = pb.DropContextRequest(shard=self._address, push_id=push_id_to_proto(push_id), context_id=context_id)
        async for _ in self._channel.call(SHARDS["DropContext"], one(request), timeout_s=timeout_s):
            pass

    def _pack(self, buckets: Iterable[Bucket], source: Region) -> Iterator[list[RawChunk]]:
        """Chunks of what lies in a region; of `outgoing`, of what has been encoded."""
        packer = ChunkPacker()
        for bucket in buckets:
            encoded = self._encoded.get(bucket.index) if source is self.outgoing else None
            data = source.bucket_bytes(bucket) if encoded is None else encoded
            self._traffic.sent_bytes += len(data)
            yield from packer.add(bucket.index, data, bucket.dtype if encoded is None else torch.uint8)
        if rest := packer.rest():
            yield rest


def _batches(buckets: Sequence[Bucket]) -> Iterator[Sequence[Bucket]]:
    """Runs of buckets of about `BATCH_BYTES`."""
    start = num_bytes = 0
    for number, bucket in enumerate(buckets):
        num_bytes += bucket.num_bytes
        if num_bytes >= BATCH_BYTES or number + 1 == len(buckets):
            yield buckets[start : number + 1]
            start, num_bytes = number + 1, 0


@dataclass(frozen=True, slots=True)
class _Complete:
    """A push has no more buckets."""

    push: Push
    timeout_s: float
    arrivals: Arrivals | None


@dataclass(frozen=True, slots=True)
class _OpenPush:
    """A push that has begun, and the call that carries it."""

    push_id: PushId
    call: OpenStep[Sequence[Bucket] | _Complete, tuple[StepResult, int | None] | None]


def _complete(request: pb.StepRequest, push: Push, timeout_s: float) -> None:
    """Makes it the last message of a push."""
    request.absent_tensors.extend(sorted(push.absent))
    if push.commit is not None:
        request.commit.CopyFrom(commit_to_proto(push.commit))
        request.wait_s = timeout_s
