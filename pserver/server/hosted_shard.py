"""One shard on a server: a lock, arithmetic off the event loop, waiting for rounds."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar
from weakref import WeakSet

from pserver.core.coding import Coding
from pserver.core.messages import Applied, Decision
from pserver.core.optimizer_state import StatePiece
from pserver.core.shard import Progress, Shard
from pserver.errors import DeadlineExceeded, ModelFailed, TrainerEnded
from pserver.server.changed import Changed
from pserver.server.shard_memory import ShardMemory
from pserver.transport.deadline import Deadline
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
    """One shard and who waits for it. Belongs to one event loop."""

    def __init__(
        self, server: str, shard: Shard, arithmetic: ThreadPoolExecutor, memory: ShardMemory | None = None
    ) -> None:
        self._server = server
        self.memory = memory
        self._shard = shard  # guarded by _lock wherever it changes or its values are read
        self._lock = asyncio.Lock()
        self._arithmetic = arithmetic
        self._changed = Changed()
        self._applying: _Applying | None = None
        self._lent: WeakSet[Lent] = WeakSet()

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
            yield self._shard

    async def work(self, function: Callable[[Shard], T]) -> T:
        """Runs a call that may take long, alone on the shard and off the event loop if the shard is large."""
        async with self._lock:
            return await self._run(function)

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
                return await self._run(apply)
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
            DeadlineExceeded: after `wait_s`. ModelFailed: the model cannot go on. TrainerEnded: the lease has ended.
        """
        deadline = Deadline(wait_s)
        while True:
            if early and self._applying is not None and (begun := self._applying.results.get(push_id)) is not None:
                return begun
            async with self._lock:
                self._check_failed()
                outcome = self._shard.outcome(push_id)
            if isinstance(outcome, StepResult):
                return outcome
            if outcome is None:
                raise TrainerEnded(
                    f"the lease of trainer {push_id.trainer_id} has ended, and what became of its step is forgotten: "
                    "connect again"
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
        if self._shard.failure is not None:
            raise ModelFailed(self._shard.failure)


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
