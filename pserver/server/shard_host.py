"""A server's shards: made, found for messages, and told what the coordinator commands."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    HeartbeatHeard,
    LivingTrainers,
    ModelReady,
    Prepare,
    Reject,
    Report,
    ShardCreated,
    ShardFailed,
)
from pserver.core.shard import Shard
from pserver.errors import (
    InvalidRequest,
    SharedMemoryUnavailable,
    TrainerEnded,
    UnknownModel,
    UnsupportedModel,
)
from pserver.server.changed import Changed
from pserver.server.heap import return_freed_memory
from pserver.server.hosted_shard import HostedShard, bytes_at_first
from pserver.server.memory_proof import MemoryProof
from pserver.server.shard_memory import ShardMemory
from pserver.transport.deadline import Deadline
from pserver.wire.layout import STORED, Layout

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A trainer may be here before the news of its joining; its messages wait this long, in seconds.
ADMISSION_WAIT_S = 5.0
#: Most streams of one trainer that bring values or gradients to one server at the same time; each holds what came.
MAX_STREAMS_PER_TRAINER = 64
#: Limit of a container's memory, in bytes or "max".
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class ShardHost:
    """The shards of one server.

    Args:
        name: of the server.
        shared_memory: whether trainers on this machine may read and write memory instead of messages.
    """

    def __init__(self, name: str, *, shared_memory: bool = True) -> None:
        self.name = name
        self.proof = MemoryProof(enabled=shared_memory)
        self._shared_memory = shared_memory
        self._lease_ns = self._lease_ends_ns = 0
        self._shards: dict[str, HostedShard] = {}
        self._living: set[int] = set()
        self._streams: Counter[int] = Counter()  # under way, by trainer
        self._highest_id = 0
        self._trainers_changed = Changed()
        # One thread: torch parallelises inside, and every thread that calls it would keep a pool of its own.
        self._arithmetic = ThreadPoolExecutor(1, thread_name_prefix="pserver-arithmetic")
        self._send: Callable[[Report], None] = lambda report: None

    def close(self) -> None:
        """Ends the arithmetic thread, and removes what was shared; those who have mapped it may read on for a lease."""
        for hosted in self._shards.values():
            hosted.close_memory(revoke=False)
        self.proof.close()
        self._arithmetic.shutdown(wait=False, cancel_futures=True)

    def begin_lease(self, lease_s: float, sent_ns: int) -> None:
        """The coordinator has heard what was sent then (ns of the machine's monotonic clock), and gives this lease."""
        self._lease_ns = int(lease_s * 1e9)
        self._extend_lease(sent_ns)

    def _extend_lease(self, sent_ns: int) -> None:
        self._lease_ends_ns = sent_ns + self._lease_ns
        for hosted in self._shards.values():
            hosted.extend_lease(self._lease_ends_ns)

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
        elif isinstance(command, HeartbeatHeard):
            self._extend_lease(command.sent_ns)
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
                del hosted
                return_freed_memory()
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
            shard, memory = await asyncio.get_running_loop().run_in_executor(
                self._arithmetic, self._make_shard, command
            )
        except Exception as error:
            self._report_failure(name, command.epoch, "make its shard", error)
            return
        if known is not None:  # the news that it goes was lost with a link
            await self._end(known, f"model {name!r} was placed anew")
        hosted = self._shards[name] = HostedShard(self.name, shard, self._arithmetic, memory)
        hosted.extend_lease(self._lease_ends_ns)
        logger.info("shard of model %s: %d buckets, %d bytes", name, len(shard.buckets), shard.num_bytes)
        self.report(ShardCreated(model=name, epoch=command.epoch))

    def _make_shard(self, command: CreateShard) -> tuple[Shard, ShardMemory | None]:
        layout = command.spec.layout()
        needed = bytes_at_first(layout.part(command.runs))
        held = sum(hosted.num_bytes for hosted in list(self._shards.values()))
        available = memory_bytes() - held
        if needed > available:
            raise UnsupportedModel(
                f"the values alone need {needed} bytes, but server {self.name} has {available} bytes of memory that no "
                "other model takes; use more servers, or larger ones"
            )
        memory = self._make_memory(command, layout)
        try:
            return Shard(command, layout, memory), memory
        except BaseException:
            if memory is not None:
                memory.close()
            raise

    def _make_memory(self, command: CreateShard, layout: Layout) -> ShardMemory | None:
        if not self._shared_memory:
            return None
        buckets = layout.part(command.runs)
        exchanged = [each for each in buckets if each.group != STORED]
        try:
            return ShardMemory(buckets, exchanged, fingerprint=layout.fingerprint, epoch=command.epoch)
        except SharedMemoryUnavailable as error:
            logger.warning("model %s: trainers on this machine get messages too: %s", command.spec.name, error)
            return None

    async def _make_ready(self, hosted: HostedShard, command: ModelReady) -> None:
        try:
            await hosted.work(lambda shard: shard.make_ready(command.initialiser))
        except Exception as error:
            await self._give_up(hosted, command, "take the initial values", error)
        hosted.wake()
        return_freed_memory()  # what the initial values came in

    async def _apply(self, hosted: HostedShard, command: Apply) -> None:
        try:
            report = await hosted.apply(command.decision)
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
            hosted.close_memory()
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
                if hosted.memory is not None:
                    hosted.memory.close_mailbox(trainer_id)
            hosted.wake()


def memory_bytes() -> int:
    """Memory that this process can have at most: the machine's, or its container's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return machine
