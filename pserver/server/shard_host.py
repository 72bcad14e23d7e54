"""Runs a server's shards: one lock each, arithmetic off the event loop, waiting for rounds."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pserver.core.messages import (
    AdmitTrainer,
    Apply,
    Command,
    CreateShard,
    DropShard,
    EndTrainer,
    FailModel,
    LivingTrainers,
    ModelReady,
    Prepare,
    Reject,
    Report,
    ShardCreated,
    ShardFailed,
)
from pserver.core.optimizer_state import StatePiece
from pserver.core.shard import Shard
from pserver.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelFailed,
    TrainerEnded,
    UnknownModel,
    UnsupportedModel,
)
from pserver.server.changed import Changed
from pserver.transport.deadline import Deadline
from pserver.types import PushId, StepResult
from pserver.wire.layout import Bucket

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A shard below this size is worked on where the message arrived: a thread switch would cost more.
INLINE_BYTES = 256 << 10
#: A trainer may be here before the news of its joining; its messages wait this long, in seconds.
ADMISSION_WAIT_S = 5.0
#: Most streams of one trainer that bring values or gradients to one server at the same time; each holds what came.
MAX_STREAMS_PER_TRAINER = 64
#: What a bucket costs beside its values, roughly: its optimizer's objects.
BUCKET_BYTES = 4 << 10
#: Limit of a container's memory, in bytes or "max".
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class HostedShard:
    """One shard and who waits for it. Belongs to one event loop."""

    def __init__(self, server: str, shard: Shard, arithmetic: ThreadPoolExecutor) -> None:
        self._server = server
        self._shard = shard  # guarded by _lock wherever it changes or its values are read
        self._lock = asyncio.Lock()
        self._arithmetic = arithmetic
        self._changed = Changed()

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
        return _bytes_of(self._shard.buckets)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[Shard]:
        """The shard, for as long as nobody else may touch it. Quick calls only; see `work` for others."""
        async with self._lock:
            yield self._shard

    async def work(self, function: Callable[[Shard], T]) -> T:
        """Runs a call that may take long, alone on the shard and off the event loop if the shard is large."""
        async with self._lock:
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

    def wake(self) -> None:
        """Makes everybody who waits look again."""
        self._changed.notify()

    async def outcome(self, push_id: PushId, wait_s: float) -> StepResult:
        """Waits until the round that counts a commit has been applied.

        Raises:
            DeadlineExceeded: after `wait_s`. ModelFailed: the model cannot go on. TrainerEnded: the lease has ended.
        """
        deadline = Deadline(wait_s)
        while True:
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

    async def read(self, bucket: Bucket, copy: Callable[[memoryview], T]) -> tuple[int, T]:
        """What `copy` makes of a bucket's bytes, and the round they are of. No round is applied meanwhile."""
        async with self._lock:
            return self._shard.round, copy(self._shard.read(bucket.index))

    async def read_state(self, bucket: Bucket, copy: Callable[[list[StatePiece]], T]) -> tuple[int, T]:
        """What `copy` makes of a bucket's optimizer state, and the round it is of."""
        async with self._lock:
            return self._shard.round, copy(self._shard.state_pieces(bucket.index))

    def _check_failed(self) -> None:
        if self._shard.failure is not None:
            raise ModelFailed(self._shard.failure)


class ShardHost:
    """The shards of one server.

    Args:
        name: of the server.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._shards: dict[str, HostedShard] = {}
        self._living: set[int] = set()
        self._streams: Counter[int] = Counter()  # under way, by trainer
        self._highest_id = 0
        self._trainers_changed = Changed()
        # One thread: torch parallelises inside, and every thread that calls it would keep a pool of its own.
        self._arithmetic = ThreadPoolExecutor(1, thread_name_prefix="pserver-arithmetic")
        self._send: Callable[[Report], None] = lambda report: None

    def close(self) -> None:
        """Ends the arithmetic thread."""
        self._arithmetic.shutdown(wait=False, cancel_futures=True)

    def send_reports_to(self, send: Callable[[Report], None]) -> None:
        """Says where reports go while a link is up."""
        self._send = send

    def report(self, report: Report) -> None:
        """Tells the coordinator; if the link is down, it hears at the next one (see `reports`)."""
        self._send(report)

    async def reports(self) -> list[Report]:
        """Everything that the coordinator may have missed."""
        found: list[Report] = []
        for hosted in list(self._shards.values()):
            async with hosted.exclusive() as shard:
                found.extend(shard.reports())
        return found

    def require_living(self, trainer_id: int) -> None:
        """Refuses a trainer whose lease has ended.

        Raises:
            TrainerEnded
        """
        if trainer_id not in self._living:
            raise TrainerEnded(
                f"server {self.name}: the lease of trainer {trainer_id} has ended; its id is refused for ever: connect "
                "again to join as a new trainer"
            )

    @contextmanager
    def stream(self, trainer_id: int) -> Iterator[None]:
        """Counts a stream of this trainer for as long as what it brings is held apart.

        Raises:
            InvalidRequest: the trainer has too many.
        """
        if self._streams[trainer_id] >= MAX_STREAMS_PER_TRAINER:
            raise InvalidRequest(
                f"server {self.name}: trainer {trainer_id} has {MAX_STREAMS_PER_TRAINER} streams under way; end some "
                "first"
            )
        self._streams[trainer_id] += 1
        try:
            yield
        finally:
            self._streams[trainer_id] -= 1
            if not self._streams[trainer_id]:
                del self._streams[trainer_id]

    async def _require_admitted(self, trainer_id: int) -> None:
        deadline = Deadline(ADMISSION_WAIT_S if trainer_id > 0 else 0.0)
        while trainer_id > self._highest_id or trainer_id <= 0:
            if not await self._trainers_changed.wait(deadline.remaining_s()):
                raise InvalidRequest(
                    f"server {self.name}: trainer {trainer_id} has not joined this cluster; join the coordinator first"
                )
        self.require_living(trainer_id)

    async def require(self, model: str, epoch: int, fingerprint: int, trainer_id: int) -> HostedShard:
        """The shard that a trainer's message is for.

        Raises:
            TrainerEnded, InvalidRequest, UnknownModel, ModelFailed, StaleEpoch, LayoutMismatch
        """
        await self._require_admitted(trainer_id)
        hosted = self._shards.get(model)
        if hosted is None:
            raise UnknownModel(
                f"server {self.name} holds no shard of model {model!r}; it holds {sorted(self._shards)}. "
                "Register the model first"
            )
        async with hosted.exclusive() as shard:
            shard.check(epoch, fingerprint)
        return hosted

    async def handle(self, command: Command) -> None:
        """Carries out one command of the coordinator; commands come one after the other."""
        if isinstance(command, CreateShard):
            await self._create(command)
        elif isinstance(command, AdmitTrainer):
            self._admit(command.trainer_id)
        elif isinstance(command, LivingTrainers):
            for trainer_id in self._living - set(command.trainer_ids):
                await self._end_trainer(trainer_id)
            for trainer_id in command.trainer_ids:
                self._admit(trainer_id)
        elif isinstance(command, EndTrainer):
            await self._end_trainer(command.trainer_id)
        else:
            hosted = self._shards.get(command.model)
            if hosted is None or hosted.epoch != command.epoch:
                return
            if isinstance(command, Apply):
                await self._apply(hosted, command)
            elif isinstance(command, Prepare):
                await self._prepare(hosted, command)
            elif isinstance(command, Reject):
                async with hosted.exclusive() as shard:
                    shard.reject(command)
                hosted.wake()
            elif isinstance(command, DropShard):
                del self._shards[command.model]
                logger.info("shard of model %s, epoch %d, is freed", command.model, command.epoch)
                await self._end(hosted, f"model {command.model!r} was dropped, or replaced by another description")
            elif isinstance(command, FailModel):
                logger.error("%s", command.reason)
                await self._end(hosted, command.reason)
            else:
                await self._make_ready(hosted, command)

    async def _create(self, command: CreateShard) -> None:
        name = command.spec.name
        known = self._shards.get(name)
        if known is not None and known.epoch == command.epoch:
            return
        try:
            shard = await asyncio.get_running_loop().run_in_executor(self._arithmetic, self._make_shard, command)
        except Exception as error:
            self._report_failure(name, command.epoch, "make its shard", error)
            return
        if known is not None:  # the news that it goes was lost with a link
            await self._end(known, f"model {name!r} was placed anew")
        self._shards[name] = HostedShard(self.name, shard, self._arithmetic)
        logger.info("shard of model %s: %d buckets, %d bytes", name, len(shard.buckets), shard.num_bytes)
        self.report(ShardCreated(model=name, epoch=command.epoch))

    def _make_shard(self, command: CreateShard) -> Shard:
        layout = command.spec.layout()
        needed = _bytes_of(layout.part(command.runs))
        held = sum(hosted.num_bytes for hosted in list(self._shards.values()))
        available = memory_bytes() - held
        if needed > available:
            raise UnsupportedModel(
                f"the values alone need {needed} bytes, but server {self.name} has {available} bytes of memory that no "
                "other model takes; use more servers, or larger ones"
            )
        return Shard(command, layout)

    async def _make_ready(self, hosted: HostedShard, command: ModelReady) -> None:
        try:
            await hosted.work(lambda shard: shard.make_ready(command.initialiser))
        except Exception as error:
            await self._give_up(hosted, command, "take the initial values", error)
        hosted.wake()

    async def _apply(self, hosted: HostedShard, command: Apply) -> None:
        try:
            report = await hosted.work(lambda shard: shard.apply(command.decision))
        except Exception as error:
            await self._give_up(hosted, command, f"apply round {command.decision.round}", error)
            return
        hosted.wake()
        self.report(report)

    async def _prepare(self, hosted: HostedShard, command: Prepare) -> None:
        try:
            report = await hosted.work(lambda shard: shard.prepare(command))
        except Exception as error:
            await self._give_up(hosted, command, f"prepare round {command.plan.round}", error)
            return
        self.report(report)

    async def _give_up(
        self, hosted: HostedShard, command: Prepare | Apply | ModelReady, doing: str, error: Exception
    ) -> None:
        """Whatever torch raised: the model has failed on this shard, and everybody hears it."""
        failure = self._report_failure(command.model, command.epoch, doing, error)
        await self._end(hosted, f"model {command.model!r} has failed: server {self.name} could not {failure}")

    def _report_failure(self, model: str, epoch: int, doing: str, error: Exception) -> str:
        logger.error("model %s: could not %s", model, doing, exc_info=error)
        failure = f"{doing}: {type(error).__name__}: {error}"
        self.report(ShardFailed(model=model, epoch=epoch, failure=failure))
        return failure

    async def _end(self, hosted: HostedShard, reason: str) -> None:
        """Nothing is applied any more; everybody who waits is told why."""
        async with hosted.exclusive() as shard:
            shard.failure = shard.failure or reason
        hosted.wake()

    def _admit(self, trainer_id: int) -> None:
        self._living.add(trainer_id)
        self._highest_id = max(self._highest_id, trainer_id)
        self._trainers_changed.notify()

    async def _end_trainer(self, trainer_id: int) -> None:
        self._living.discard(trainer_id)
        self._highest_id = max(self._highest_id, trainer_id)
        for hosted in self._shards.values():
            async with hosted.exclusive() as shard:
                shard.end_trainer(trainer_id)
            hosted.wake()


def memory_bytes() -> int:
    """Memory that this process can have at most: the machine's, or its container's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return machine


def _bytes_of(buckets: Sequence[Bucket]) -> int:
    return sum(bucket.num_master_bytes + BUCKET_BYTES for bucket in buckets)
