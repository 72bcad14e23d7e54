"""A server's shards: made, found for messages, and told what the coordinator commands."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pserver.core.messages import (
    AbandonPlan,
    AdmitTrainer,
    Apply,
    Command,
    CreateShard,
    DropShard,
    EndTrainer,
    FailModel,
    FenceReplica,
    HeartbeatHeard,
    LivingTrainers,
    ModelReady,
    Prepare,
    Prepared,
    Promote,
    Reject,
    ReplicaAddress,
    ReplicaFenced,
    ReplicaLag,
    Report,
    SetReplicas,
    ShardCreated,
    ShardFailed,
    ShardState,
)
from pserver.core.shard import Shard
from pserver.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelFailed,
    PushLost,
    SharedMemoryUnavailable,
    StaleEpoch,
    TrainerEnded,
    UnknownModel,
    UnsupportedModel,
)
from pserver.server.changed import Changed
from pserver.server.follower import Follower
from pserver.server.heap import return_freed_memory
from pserver.server.hosted_shard import HostedShard, bytes_at_first
from pserver.server.memory_proof import MemoryProof
from pserver.server.shard_log import ShardLog
from pserver.server.shard_memory import ShardMemory
from pserver.transport.changes import Arrived
from pserver.transport.channel import Connector
from pserver.transport.deadline import LONGEST_WAIT_S, Deadline
from pserver.types import PushId, StepResult
from pserver.wire.layout import STORED, Layout

logger = logging.getLogger(__name__)

#: Commands for a shard that is here.
ShardCommand = (
    ModelReady | Prepare | Apply | Reject | AbandonPlan | FailModel | DropShard | FenceReplica | Promote | SetReplicas
)

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
        self._shards: dict[tuple[str, int], HostedShard] = {}
        self._followers: dict[HostedShard, dict[int, Follower]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connect: Connector | None = None
        self._living: set[int] = set()
        self._streams: Counter[int] = Counter()  # under way, by trainer
        self._highest_id = 0
        self._trainers_changed = Changed()
        # One thread: torch parallelises inside, and every thread that calls it would keep a pool of its own.
        self._arithmetic = ThreadPoolExecutor(1, thread_name_prefix="pserver-arithmetic")
        self._send: Callable[[Report], None] = lambda report: None

    def connect_with(self, connect: Connector) -> None:
        """Says how replicas on other servers are reached."""
        self._connect = connect

    async def close(self) -> None:
        """Ends the arithmetic thread, and removes what was shared; those who have mapped it may read on for a lease."""
        for task in self._tasks:
            task.cancel()
        for hosted in self._shards.values():
            await self._stop_followers(hosted)
            hosted.close_memory(revoke=False)
        self.proof.close()
        self._arithmetic.shutdown(wait=False, cancel_futures=True)

    async def drop_all(self) -> None:
        """Others have what was here: the coordinator counts on this server no longer."""
        shards, self._shards = self._shards, {}
        for hosted in shards.values():
            await self._leave(hosted, f"server {self.name}: its lease has ended, and others have its shards")
        for trainer_id in list(self._living):
            await self._end_trainer(trainer_id)
        self._highest_id = 0  # who lives is heard again, and nobody is refused before that
        return_freed_memory()

    def begin_lease(self, lease_s: float, sent_ns: int) -> None:
        """The coordinator has heard what was sent then (ns of the machine's monotonic clock), and gives this lease."""
        self._lease_ns = int(lease_s * 1e9)
        self._extend_lease(sent_ns)

    def _extend_lease(self, sent_ns: int) -> None:
        self._lease_ends_ns = sent_ns + self._lease_ns
        for hosted in self._shards.values():
            if not hosted.is_replica:
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
            found.extend(await hosted.reports())
        for followers in self._followers.values():
            for follower in followers.values():
                found.extend(follower.reports())
        return found

    def lags(self) -> list[Report]:
        """How far replicas are behind."""
        return [
            ReplicaLag(
                model=hosted.model,
                shard=hosted.number,
                epoch=hosted.epoch,
                number=number,
                num_entries=follower.lag,
            )
            for hosted, followers in self._followers.items()
            for number, follower in followers.items()
        ]

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

    async def require(self, model: str, shard: int, epoch: int, fingerprint: int, trainer_id: int) -> HostedShard:
        """The shard that a trainer's message is for.

        Raises:
            TrainerEnded, InvalidRequest, UnknownModel, ModelFailed, StaleEpoch, LayoutMismatch
        """
        await self._require_admitted(trainer_id)
        hosted = self._find(model, shard)
        if hosted.is_replica:
            raise StaleEpoch(f"server {self.name} has a replica of shard {shard} of model {model!r}; ask its primary")
        async with hosted.exclusive() as core:
            core.check(epoch, fingerprint)
        return hosted

    async def require_replica(self, model: str, shard: int, epoch: int, fingerprint: int) -> tuple[HostedShard, int]:
        """The replica that a primary's messages are for, and a number for their stream; earlier ones are refused.

        Raises:
            UnknownModel, StaleEpoch, ModelFailed, LayoutMismatch
        """
        hosted = self._find(model, shard)
        async with hosted.exclusive() as core:
            core.check(core.epoch, fingerprint)
        return hosted, await hosted.follow(epoch)

    def _find(self, model: str, shard: int) -> HostedShard:
        hosted = self._shards.get((model, shard))
        if hosted is None:
            raise UnknownModel(
                f"server {self.name} does not hold shard {shard} of model {model!r}; it holds {sorted(self._shards)}. "
                "Register the model first"
            )
        return hosted

    async def outcome(self, hosted: HostedShard, push_id: PushId, wait_s: float, *, early: bool = False) -> StepResult:
        """What became of a commit; raises as `HostedShard.outcome`, and TrainerEnded if nobody will ever know."""
        try:
            return await hosted.outcome(push_id, wait_s, early=early)
        except PushLost:
            self.require_living(push_id.trainer_id)
            raise

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
            await self._handle_for(self._shards.get((command.model, command.shard)), command)

    async def _handle_for(self, hosted: HostedShard | None, command: ShardCommand) -> None:
        if hosted is None or hosted.epoch > command.epoch:
            return
        if isinstance(command, DropShard):
            del self._shards[command.model, command.shard]
            logger.info("shard %d of model %s, epoch %d, is freed", command.shard, command.model, command.epoch)
            await self._leave(hosted, f"model {command.model!r} was placed anew, replaced or dropped")
            del hosted
            return_freed_memory()
        elif isinstance(command, FailModel):
            logger.error("%s", command.reason)
            await self._end(hosted, command.reason)
        elif isinstance(command, FenceReplica):
            await self._fence(hosted, command)
        elif isinstance(command, Promote):
            await self._promote(hosted, command)
        elif hosted.epoch != command.epoch:
            return
        elif isinstance(command, SetReplicas):
            await self._set_replicas(hosted, command.replicas, in_sync=False)
        elif isinstance(command, Apply):
            await self._apply(hosted, command)
        elif isinstance(command, Prepare):
            await self._prepare(hosted, command)
        elif isinstance(command, Reject):
            async with hosted.exclusive() as shard:
                shard.reject(command.refusal)
            hosted.wake()
        elif isinstance(command, AbandonPlan):
            async with hosted.exclusive() as shard:
                reports = shard.abandon_plan()
            hosted.wake()
            for report in reports:
                self.report(report)
        else:
            await self._make_ready(hosted, command)

    async def _create(self, command: CreateShard) -> None:
        name, key = command.spec.name, (command.spec.name, command.shard)
        known = self._shards.get(key)
        if known is not None and known.epoch == command.epoch:
            return
        if known is not None:  # the news that it goes was lost with a link
            del self._shards[key]
            await self._leave(known, f"model {name!r} was placed anew")
        try:
            hosted = await asyncio.get_running_loop().run_in_executor(self._arithmetic, self._make_shard, command)
        except Exception as error:
            self._report_failure(name, command.shard, command.epoch, "make its shard", error)
            return
        self._shards[key] = hosted
        if not command.replica:
            hosted.extend_lease(self._lease_ends_ns)
        logger.info(
            "%s %d of model %s: %d buckets, %d bytes",
            "replica of shard" if command.replica else "shard",
            command.shard,
            name,
            len(hosted.buckets),
            hosted.num_bytes,
        )
        self.report(ShardCreated(model=name, shard=command.shard, epoch=command.epoch))

    def _make_shard(self, command: CreateShard) -> HostedShard:
        layout = command.spec.layout()
        buckets = layout.part(command.runs)
        needed = bytes_at_first(buckets)
        held = sum(hosted.num_bytes for hosted in list(self._shards.values()))
        available = memory_bytes() - held
        if needed > available:
            raise UnsupportedModel(
                f"the values alone need {needed} bytes, but server {self.name} has {available} bytes of memory that no "
                "other model takes; use more servers, or larger ones"
            )
        changed = Changed()
        log: ShardLog | None = None
        if command.spec.replicas:
            trained = [each for each in buckets if each.group >= 0]
            log = ShardLog(trained, changed, shared_memory=self._shared_memory)
        memory = self._make_memory(command, layout)
        try:
            shard = Shard(command, layout, memory, log.reduced if log is not None else None)
        except BaseException:
            if memory is not None:
                memory.close()
            raise
        return HostedShard(self.name, shard, self._arithmetic, memory, log, changed=changed, is_replica=command.replica)

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
        if hosted.log is None:
            self.report(report)
        else:
            self._report_applied(hosted)

    def _report_applied(self, hosted: HostedShard) -> None:
        """Tells the coordinator of rounds that the replicas know of as well: it forgets their decisions then."""
        applied = hosted.log.take_applied() if hosted.log is not None else None
        if applied is not None:
            self.report(replace(applied, epoch=hosted.epoch))

    async def _prepare(self, hosted: HostedShard, command: Prepare) -> None:
        try:
            report = await hosted.work(lambda shard: shard.prepare(command.plan))
        except Exception as error:
            await self._give_up(hosted, command, f"prepare round {command.plan.plan.round}", error)
            return
        if hosted.log is None or hosted.log.has(hosted.log.prepared):
            self.report(report)
        else:
            self._spawn(self._report_prepared(hosted, report, hosted.log))

    async def _report_prepared(self, hosted: HostedShard, report: Prepared, log: ShardLog) -> None:
        """The coordinator may decide a round once it survives this server."""
        with suppress(DeadlineExceeded):
            await log.replicated(log.prepared, LONGEST_WAIT_S)
            if not hosted.gone:
                self.report(report)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give_up(
        self, hosted: HostedShard, command: Prepare | Apply | ModelReady, doing: str, error: Exception
    ) -> None:
        """Whatever torch raised: this copy of the shard can be used no more, and the coordinator hears it."""
        failure = self._report_failure(command.model, command.shard, command.epoch, doing, error)
        await self._end(hosted, f"model {command.model!r} has failed: server {self.name} could not {failure}")

    def _report_failure(self, model: str, shard: int, epoch: int, doing: str, error: Exception) -> str:
        logger.error("model %s, shard %d: could not %s", model, shard, doing, exc_info=error)
        failure = f"{doing}: {type(error).__name__}: {error}"
        self.report(ShardFailed(model=model, shard=shard, epoch=epoch, failure=failure))
        return failure

    async def _end(self, hosted: HostedShard, reason: str) -> None:
        """Nothing is applied any more; everybody who waits is told why."""
        await self._stop_followers(hosted)
        async with hosted.exclusive() as shard:
            shard.failure = shard.failure or reason
            hosted.close_memory()
        hosted.wake()

    async def _leave(self, hosted: HostedShard, reason: str) -> None:
        """The shard is not here any more; everybody who waits asks elsewhere."""
        hosted.gone = hosted.gone or reason
        await self._end(hosted, reason)

    # Replicas

    async def _set_replicas(self, hosted: HostedShard, replicas: Sequence[ReplicaAddress], *, in_sync: bool) -> None:
        """Begins to follow those that are new, and waits for those that count no more no longer."""
        if hosted.log is None or self._connect is None:
            return
        followers = self._followers.setdefault(hosted, {})
        wanted = {each.number: each for each in replicas}
        for number in followers.keys() - wanted.keys():
            await followers.pop(number).stop()
        for number in wanted.keys() - followers.keys():
            followers[number] = Follower(
                wanted[number],
                hosted,
                hosted.log,
                self._connect,
                self.report,
                lease_s=self._lease_ns / 1e9,
                in_sync=in_sync,
                acknowledged=lambda: self._report_applied(hosted),
            )
            followers[number].start()
        self._report_applied(hosted)

    async def _stop_followers(self, hosted: HostedShard) -> None:
        for follower in self._followers.pop(hosted, {}).values():
            await follower.stop()
        if hosted.log is not None:
            hosted.log.close()

    async def redo(self, replica: HostedShard, stream: int, arrived: Arrived) -> None:
        """Does on a replica what has happened on its primary; raises as `HostedShard.redo`."""
        try:
            await replica.redo(stream, arrived)
        except StaleEpoch:
            raise
        except Exception as error:
            failure = self._report_failure(
                replica.model, replica.number, replica.epoch, "do what its primary did", error
            )
            await self._end(replica, f"the replica on server {self.name} could not {failure}")
            raise

    async def _fence(self, hosted: HostedShard, command: FenceReplica) -> None:
        try:
            position = await hosted.fence(command.epoch)
        except (ModelFailed, StaleEpoch) as error:
            self._report_failure(command.model, command.shard, command.epoch, "be the primary", error)
            return
        self.report(ReplicaFenced(model=command.model, shard=command.shard, epoch=command.epoch, position=position))

    async def _promote(self, hosted: HostedShard, command: Promote) -> None:
        # They count from the first thing that this primary does.
        await self._set_replicas(hosted, command.replicas, in_sync=True)
        try:
            promoted = await hosted.promote(command.epoch, self._living)
        except Exception as error:
            await self._stop_followers(hosted)
            self._report_failure(command.model, command.shard, command.epoch, "be the primary", error)
            return
        hosted.extend_lease(self._lease_ends_ns)
        logger.warning("server %s is primary of shard %d of model %s now", self.name, hosted.number, hosted.model)
        self.report(promoted)
        async with hosted.exclusive() as shard:
            reports = [each for each in shard.reports() if isinstance(each, ShardState | Prepared)]
        for report in reports:
            if isinstance(report, Prepared) and hosted.log is not None:
                self._spawn(self._report_prepared(hosted, report, hosted.log))
            else:
                self.report(report)

    # Trainers

    def _admit(self, trainer_id: int) -> None:
        self._living.add(trainer_id)
        self._highest_id = max(self._highest_id, trainer_id)
        self._trainers_changed.notify()

    async def _end_trainer(self, trainer_id: int) -> None:
        self._living.discard(trainer_id)
        self._highest_id = max(self._highest_id, trainer_id)
        for hosted in list(self._shards.values()):
            if hosted.is_replica:  # it hears that from its primary, in order
                continue
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
