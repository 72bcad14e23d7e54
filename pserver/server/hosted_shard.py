"""One shard on a server: a lock, arithmetic off the event loop, waiting for rounds."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar
from weakref import WeakSet

from pserver.core.changes import Bookkeeping
from pserver.core.coding import Coding
from pserver.core.messages import Applied, Decision, Prepared, Report, ShardPromoted
from pserver.core.optimizer_state import StatePiece
from pserver.core.shard import Progress, Shard
from pserver.errors import DeadlineExceeded, ModelFailed, PushLost, StaleEpoch
from pserver.server.changed import Changed
from pserver.server.shard_log import ShardLog
from pserver.server.shard_memory import ShardMemory
from pserver.transport.changes import Arrived
from pserver.transport.deadline import Deadline
from pserver.transport.gen import shards_pb2
from pserver.transport.raw_chunks import Lent
from pserver.types import PushId, StepResult
from pserver.wire.layout import Bucket

T = TypeVar("T")

#: A shard below this size is worked on where the message arrived: a thread switch would cost more.
INLINE_BYTES = 256 << 10
#: While a round is applied, who waits for a bucket of it looks at least so often, in seconds.
LOOK_EVERY_S = 1.0
#: What a bucket costs beside its values, roughly: its optimizer's objects.
BUCKET_BYTES = 4 << 10


class HostedShard:
    """One shard and who waits for it. Belongs to one event loop.

    Args:
        server: its name.
        shard: what is hosted.
        arithmetic: a thread.
        memory: where trainers on this machine read it.
        log: what its replicas must hear; None: it has none.
        is_replica: whether it is a copy, which hears all from its primary.
    """

    def __init__(
        self,
        server: str,
        shard: Shard,
        arithmetic: ThreadPoolExecutor,
        memory: ShardMemory | None = None,
        log: ShardLog | None = None,
        *,
        changed: Changed | None = None,
        is_replica: bool = False,
    ) -> None:
        self._server = server
        self.memory = memory
        self.log = log
        self.is_replica = is_replica
        self._shard = shard  # guarded by _lock wherever it changes or its values are read
        self._lock = asyncio.Lock()
        self._arithmetic = arithmetic
        self._changed = changed or Changed()
        self._applying: _Applying | None = None
        self._lent: WeakSet[Lent] = WeakSet()
        self._released = 0
        self._stream = 0  # the one that a replica listens to
        self.gone = ""  # why this shard is not here any more, though its model lives

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Every bucket of the shard."""
        return self._shard.buckets

    @property
    def trained(self) -> Sequence[Bucket]:
        """Buckets that an optimizer steps."""
        return self._shard.trained

    @property
    def exchanged(self) -> Sequence[Bucket]:
        """Buckets that travel with every step."""
        return self._shard.exchanged

    @property
    def mixed_rounds(self) -> bool:
        """Whether a trainer may read some buckets of one round and some of another."""
        return self._shard.mixed_rounds

    @property
    def coding(self) -> Coding:
        """How its buckets travel in messages."""
        return self._shard.coding

    @property
    def epoch(self) -> int:
        """Epoch of the shard's placement."""
        return self._shard.epoch

    @property
    def model(self) -> str:
        """Name of its model."""
        return self._shard.spec.name

    @property
    def number(self) -> int:
        """Its number in the model."""
        return self._shard.number

    @property
    def address(self) -> shards_pb2.ShardAddress:
        """What messages for it begin with."""
        return shards_pb2.ShardAddress(
            model=self.model, shard=self.number, epoch=self.epoch, fingerprint=self._shard.layout.fingerprint
        )

    @property
    def num_tensors(self) -> int:
        """Tensors of the whole model."""
        return len(self._shard.layout.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes that the shard takes before its first step."""
        return bytes_at_first(self._shard.buckets)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[Shard]:
        """The shard, for as long as nobody else may touch it. Quick calls only; see `work` for others."""
        async with self._lock:
            try:
                yield self._shard
            finally:
                self._log_changes()

    async def work(self, function: Callable[[Shard], T]) -> T:
        """Runs a call that may take long, alone on the shard and off the event loop if the shard is large."""
        async with self._lock:
            try:
                return await self._run(function)
            finally:
                self._log_changes()

    def _log_changes(self) -> None:
        if self.log is not None:
            self.log.append(self._shard.take_changes())

    async def replicated(self, wait_s: float) -> None:
        """Waits until every replica has what was done until now, as far as it must not be shown before.

        Raises:
            DeadlineExceeded: after `wait_s`.
        """
        if self.log is not None:
            await self.log.replicated(self.log.required, wait_s)

    async def _run(self, function: Callable[[Shard], T]) -> T:
        if self._shard.num_bytes < INLINE_BYTES:
            return function(self._shard)
        working = asyncio.get_running_loop().run_in_executor(self._arithmetic, function, self._shard)
        try:
            return await asyncio.shield(working)
        finally:
            # Whoever waits may be cancelled; the shard is still being worked on, and nobody else may touch it.
            while not working.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((working,))
            if not working.cancelled():
                working.exception()  # nobody may be left to be told

    async def apply(self, decision: Decision) -> Applied:
        """Applies a round; `outcome` and `read` go on with what is ready of it meanwhile. Raises as `Shard.apply`."""
        applying = self._applying = _Applying(asyncio.get_running_loop(), self._changed)

        def apply(shard: Shard) -> Applied:
            try:
                return shard.apply(decision, applying)
            except Exception as error:
                # At once: nobody may read what is half a round.
                shard.failure = shard.failure or (
                    f"model {shard.spec.name!r} has failed: server {self._server} could not apply round "
                    f"{decision.round}: {type(error).__name__}: {error}"
                )
                raise

        try:
            async with self._lock:
                taken, self._lent = self._lent, WeakSet()
                for lent in taken:
                    lent.take_back()
                applied = await self._run(apply)
                if self.log is not None:
                    self.log.append(self._shard.take_changes(), applied)
                return applied
        finally:
            self._applying = None
            self._changed.notify()

    def extend_lease(self, until_ns: int) -> None:
        """Until when trainers may read the shard's memory without asking."""
        if self.memory is not None:
            self.memory.extend_lease(until_ns)

    def close_memory(self, *, revoke: bool = True) -> None:
        """Trainers ask from now on; those who have the values mapped may go on with them unless that is revoked."""
        if self.memory is not None:
            self.memory.close(revoke=revoke)

    def wake(self) -> None:
        """Makes everybody who waits look again."""
        self._changed.notify()

    async def outcome(self, push_id: PushId, wait_s: float, *, early: bool = False) -> StepResult:
        """Waits until the round that counts a commit has been applied.

        Args:
            early: for who reads the values with `read`: until the round is being applied.

        Raises:
            DeadlineExceeded: after `wait_s`. ModelFailed: the model cannot go on. StaleEpoch: another primary has been
                named. PushLost: this shard does not know of the commit any more.
        """
        deadline = Deadline(wait_s)
        while True:
            if early and self._applying is not None and (begun := self._applying.results.get(push_id)) is not None:
                return begun
            async with self._lock:
                self._check_failed()
                outcome = self._shard.outcome(push_id)
            if isinstance(outcome, StepResult):
                if not outcome.accepted:
                    await self.replicated(deadline.remaining_s())
                return outcome
            if outcome is None:
                raise PushLost(
                    f"server {self._server} does not know push {push_id.sequence} of trainer {push_id.trainer_id}: it "
                    "was lost with an earlier primary, or its trainer has ended; send it again"
                )
            if not await self._changed.wait(deadline.remaining_s()):
                raise DeadlineExceeded(
                    f"server {self._server}: the round after {self._shard.round} of model {self._shard.spec.name!r} "
                    f"was not decided within {wait_s:g} s; `pserver status` names the trainers it waits for"
                )

    async def reach(self, round_number: int, wait_s: float) -> None:
        """Waits until the shard has applied a round; raises as `outcome` does."""
        deadline = Deadline(wait_s)
        while self._shard.round < round_number or not self._shard.ready:
            self._check_failed()
            if not await self._changed.wait(deadline.remaining_s()):
                raise DeadlineExceeded(
                    f"server {self._server}: model {self._shard.spec.name!r} did not reach round {round_number} within "
                    f"{wait_s:g} s; it is at round {self._shard.round}"
                )
        self._check_failed()

    async def read(self, bucket: Bucket, copy: Callable[[int, memoryview], T]) -> T:
        """What `copy` makes of the shard's round and a bucket's bytes. Nobody changes the bucket meanwhile; see `lend`.

        Raises:
            ModelFailed: the shard can be at no round any more.
        """
        while (applying := self._applying) is not None:
            if bucket.index in applying.ready:
                return copy(applying.round, self._shard.read(bucket.index))
            await self._changed.wait(LOOK_EVERY_S)
        async with self._lock:
            self._check_failed()
            return copy(self._shard.round, self._shard.read(bucket.index))

    def lend(self, memory: memoryview) -> Lent:
        """Memory that `read` shows, for longer: it is copied if a round changes its bucket before it is let go."""
        lent = Lent(memory)
        self._lent.add(lent)
        return lent

    async def read_state(self, bucket: Bucket, copy: Callable[[list[StatePiece]], T]) -> tuple[int, T]:
        """What `copy` makes of a bucket's optimizer state, and the round it is of."""
        async with self._lock:
            return self._shard.round, copy(self._shard.state_pieces(bucket.index))

    def _check_failed(self) -> None:
        if self.gone:
            raise StaleEpoch(self.gone)
        if self._shard.failure is not None:
            raise ModelFailed(self._shard.failure)

    async def reports(self) -> list[Report]:
        """Everything that the coordinator may have missed, as far as replicas have what it follows from."""
        async with self._lock:
            found = self._shard.reports()
        log = self.log
        if self.is_replica or self.gone:
            return found[:1]  # that it exists
        if log is None:
            return found
        # Of rounds it hears when the replicas have them: soon, or from `ShardHost`, which waits for that.
        kept: list[Report] = [each for each in found if not isinstance(each, Applied | Prepared)]
        if log.last_applied is not None:
            kept.append(replace(log.last_applied, epoch=self.epoch))
        if log.has(log.prepared):
            kept += [each for each in found if isinstance(each, Prepared)]
        return kept

    # On a replica

    @property
    def position(self) -> int:
        """The last entry of the log that this replica has; -1: it has no state yet."""
        return self.log.entries.position if self.log is not None and self._shard.ready else -1

    @property
    def released(self) -> int:
        """The last entry that needs the primary's memory no more."""
        return self._released

    async def redo(self, stream: int, arrived: Arrived) -> None:
        """Does what has happened on the primary, as a stream says that `follow` has numbered.

        Raises:
            StaleEpoch: another primary has been named, or has begun anew. InternalError: this replica is not what its
                primary is.
        """
        assert self.log is not None
        async with self._lock:
            if stream != self._stream or not self.is_replica:
                raise StaleEpoch(
                    f"server {self._server}: shard {self.number} of model {self.model!r} is of epoch "
                    f"{self._shard.epoch} now, and hears of it from somebody else"
                )
            self._check_failed()
            change = arrived.change
            if isinstance(change, Bookkeeping):
                self.log.begin_at(arrived.position)
            if arrived.index and not self.log.store(arrived):
                return
            await self._run(lambda shard: shard.redo(change))
            if not self._shard.is_preparing:
                self._released = self.log.entries.position

    async def fence(self, epoch: int) -> int:
        """Takes nothing of earlier epochs any more; returns how far the log goes."""
        assert self.log is not None
        async with self._lock:
            self._check_failed()
            if epoch > self._shard.epoch:
                self._shard.epoch = epoch
                self._stream += 1
            return self.log.entries.position

    async def follow(self, epoch: int) -> int:
        """A primary of this epoch brings what happens; the number of its stream, which is the only one from now on.

        Raises:
            StaleEpoch: another one has been named.
        """
        async with self._lock:
            if not self.is_replica or epoch < self._shard.epoch:
                raise StaleEpoch(
                    f"server {self._server}: shard {self.number} of model {self.model!r} is of epoch "
                    f"{self._shard.epoch}, not {epoch}"
                )
            self._shard.epoch = epoch
            self._stream += 1
            return self._stream

    async def promote(self, epoch: int, living: Set[int]) -> ShardPromoted:
        """Is the primary from now on; again, it only says so."""
        async with self._lock:
            if self.is_replica:
                self._check_failed()
                promoted = await self._run(lambda shard: shard.promoted(epoch, living))
                if self.memory is not None:
                    self.memory.relabel(epoch)
                self.is_replica = False
                self._log_changes()
            else:
                promoted = self._shard.promotion()
        self._changed.notify()
        return promoted


class _Applying(Progress):
    """A round that is being applied: what is known of it, and which buckets can be read.

    Told by the thread of the arithmetic, asked on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, changed: Changed) -> None:
        self._loop = loop
        self._changed = changed
        self.round = 0
        self.results: Mapping[PushId, StepResult] = {}
        self.ready: set[int] = set()

    def begun(self, round_number: int, results: Mapping[PushId, StepResult]) -> None:
        self.round, self.results = round_number, results
        self._tell()

    def stepped(self, bucket: int) -> None:
        self.ready.add(bucket)
        self._tell()

    def _tell(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.notify)


def bytes_at_first(buckets: Sequence[Bucket]) -> int:
    """Bytes that a shard of these buckets takes before its first step."""
    return sum(bucket.num_master_bytes + BUCKET_BYTES for bucket in buckets)
