"""A cluster of replicated shards without processes: what it must keep when any part of it dies between any two steps.

Coordinator, shards and logs are the real ones. `Host` mirrors `CoordinatorHost`, `Server` mirrors `ShardHost`,
`Follower` the class of that name and `Stream` the replica's end of it; `Trainer` repeats calls as a client does. All
that travels waits in a queue until somebody delivers it, one message at a time.
"""

import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pserver.client.push_ids import PushIds
from pserver.core import saved
from pserver.core.changes import Bookkeeping, ContextHeld, LoggedChange, StatePart
from pserver.core.coordinator import Coordinator
from pserver.core.groups import ReplicaState
from pserver.core.messages import (
    AbandonPlan,
    AdmitTrainer,
    Applied,
    Apply,
    Command,
    CommitInfo,
    CreateShard,
    Decision,
    DropShard,
    EndTrainer,
    FailModel,
    FenceReplica,
    LivingTrainers,
    ModelReady,
    ModelSpec,
    Prepare,
    Prepared,
    Promote,
    Reject,
    ReplicaAddress,
    ReplicaCaughtUp,
    ReplicaFailed,
    ReplicaFenced,
    Report,
    SetReplicas,
    ShardCreated,
    ShardFailed,
    ShardState,
)
from pserver.core.replication import Entry
from pserver.core.rules import NO_RULES, NORM_EPSILON, GradientRules
from pserver.core.shard import Shard
from pserver.core.sync import Bsp, SyncPolicy, policy_arguments
from pserver.errors import ServerEnded, StalePush
from pserver.server.changed import Changed
from pserver.server.follower import WINDOW
from pserver.server.shard_log import Listener, ShardLog
from pserver.transport.changes import Arrived
from pserver.types import PushId, ShardStatus, StepResult
from pserver.wire.layout import Bucket, TensorSpec

MODEL = "m"
LEASE_S = 10.0
#: Short enough not to be taken for a pause of the coordinator's own.
TICK_S = 2.0
NUM_ELEMENTS = 64
OPTIONS = ({"lr": 1.0, "momentum": 1.0},)
#: More events than that without any time going by go on for ever.
MOST_EVENTS = 20_000
#: Where this model does what the real server should do, and does not yet (or did not when this was written).
FIXES = frozenset(
    {
        "abandon-bypasses",  # CoordinatorHost.changed: AbandonPlan goes out in order with Prepare and Apply
        "held-for-link",  # CoordinatorHost.changed: held commands are for the link that was there, not for a later one
        "says-again",  # ShardHost.reports: ReplicaCaughtUp and ReplicaFailed are said again on a new link
        "shown-before",  # Follower._bring_state: caught up once it has what was shown before it counted
        "one-stream",  # ReplicaService.follow: an older stream to a replica brings nothing once there is a newer one
        "followers-first",  # ShardHost._promote: replicas are admitted before the promotion appends to the log
        "prepared-with-state",  # ShardLog: a plan that came with the state counts as prepared at that entry
        "living-anew",  # ShardHost.drop_all: trainers are not known rather than ended
    }
)
#: What a healed cluster may take to come to rest: rounds of all that can happen, then a tick.
MAX_TICKS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a cluster trains with."""

    policy: SyncPolicy = field(default_factory=Bsp)
    replicas: int = 1
    num_servers: int = 3
    num_trainers: int = 2
    max_norm: float | None = None

    @property
    def rules(self) -> GradientRules:
        """Of every commit."""
        return NO_RULES if self.max_norm is None else GradientRules(max_norm=self.max_norm)

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return ModelSpec(
            name=MODEL,
            tensors=(TensorSpec(name="w", shape=(NUM_ELEMENTS,), dtype=torch.float32, group=0),),
            bucket_bytes=64,
            optimizer="SGD",
            optimizer_groups=({**OPTIONS[0], "foreach": False},),
            sync_policy=self.policy.name,
            sync_policy_arguments=policy_arguments(self.policy),
            world_size=self.num_trainers,
            buffers="lowest",
            replicas=self.replicas,
        )


class Given:
    """A push that has come whole."""

    lent = None

    def __init__(self, flat: torch.Tensor | None, buckets: Sequence[Bucket]) -> None:
        self.empty = flat is None
        self._tensors = {} if flat is None else {each.index: flat[each.start : each.stop].clone() for each in buckets}

    def complete(self) -> dict[int, torch.Tensor]:
        """Every bucket."""
        return dict(self._tensors)


def gradient_of(trainer_id: int, number: int) -> torch.Tensor:
    """Small multiples of 12, so that means over 1 to 4 trainers are exact."""
    return ((torch.arange(NUM_ELEMENTS) * (2 * number + 3) + 5 * trainer_id) % 7 - 3).float() * 12


# What must be true


class Reference:
    """What trainers computed, what was decided, and the values that follow."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}
        self.decisions: list[Decision] = []
        self.values = [torch.arange(NUM_ELEMENTS).float()]
        self.counted: dict[tuple[int, int], int] = {}
        self.refused: set[tuple[int, int]] = set()
        self._velocity = torch.zeros(NUM_ELEMENTS)

    def applied(self, shard: Shard, decision: Decision) -> None:
        """Some copy of a shard has applied a round."""
        if decision.round > len(self.decisions):
            assert decision.round == len(self.decisions) + 1, f"{decision} came before the round before it"
            self._decided(decision)
        known = self.decisions[decision.round - 1]
        # What was settled when it was decided is no part of what was decided.
        assert replace(known, settled=0) == replace(decision, settled=0), f"decided twice:\n{known}\n{decision}"

    def _decided(self, decision: Decision) -> None:
        self.decisions.append(decision)
        total = torch.zeros(NUM_ELEMENTS)
        for each in decision.contributions:
            key = each.trainer_id, each.step
            assert key not in self.counted, f"step {key} is in round {self.counted.get(key)} and in {decision.round}"
            assert key not in self.refused, f"step {key} was refused, and is in round {decision.round}"
            self.counted[key] = decision.round
            total += each.weight * self.gradients[key]
        mean = total / decision.divisor
        max_norm = self.setup.max_norm
        if max_norm is not None:
            norm = float(mean.double().norm())
            assert decision.grad_norm is not None
            assert abs(decision.grad_norm - norm) <= 1e-9 * norm
            assert abs(decision.clip_coefficient - min(1.0, max_norm / (norm + NORM_EPSILON))) < 1e-12
        self._velocity = self._velocity + mean * decision.clip_coefficient
        self.values.append(self.values[-1] - self._velocity)

    def check_values(self, shard: Shard) -> None:
        """A shard has what follows from the decisions."""
        expected = self.values[shard.round]
        for number, bucket in enumerate(shard.buckets):
            found, wanted = shard.bucket_part(number).master, expected[bucket.start : bucket.stop]
            assert torch.equal(found, wanted), (
                f"shard {shard.number}, epoch {shard.epoch}, bucket {bucket.index} at round {shard.round}:\n{found}\n"
                f"expected\n{wanted}"
            )

    def told(self, trainer_id: int, step: int, results: Sequence[StepResult]) -> None:
        """A trainer has heard of every shard what became of its step."""
        assert all(each == results[0] for each in results), f"shards disagree on step {step}: {results}"
        result = results[0]
        if result.accepted:
            assert self.counted.get((trainer_id, step)) == result.round, f"step {step} of {trainer_id}: {result}"
        else:
            assert (trainer_id, step) not in self.counted, f"step {step} of {trainer_id} counts, but: {result}"
            self.refused.add((trainer_id, step))
            # Nobody is ever late where all wait for all.
            assert not isinstance(self.setup.policy, Bsp), f"step {step} of trainer {trainer_id}: {result}"


# Servers


class Copy:
    """One copy of a shard. See `HostedShard`."""

    def __init__(self, command: CreateShard, *, fixed_log: bool) -> None:
        self.fixed_log = fixed_log
        layout = command.spec.layout()
        self.log = ShardLog(layout.part(command.runs), Changed(), shared_memory=False)
        self.shard = Shard(command, layout, None, self.log.reduced)
        self.is_replica = command.replica
        self.gone = False
        self.followers: dict[int, Follower] = {}
        self.stream: Stream | None = None  # that was opened last; older ones bring nothing any more
        self.waiting: list[tuple[int, Prepared]] = []  # until the replicas have what it follows from

    def work(self, function: Callable[[Shard], Any]) -> Any:
        """A call to the shard; what has changed goes to the log."""
        try:
            return function(self.shard)
        finally:
            self.log.append(self.shard.take_changes())

    @property
    def position(self) -> int:
        """Entries that this replica has; -1: it has no state yet."""
        return self.log.entries.position if self.shard.ready else -1

    def reports(self) -> list[Report]:
        """What the coordinator may have missed, as far as replicas have what it follows from."""
        found = self.shard.reports()
        if self.is_replica:
            return found[:1]
        kept: list[Report] = [each for each in found if not isinstance(each, Applied | Prepared)]
        if self.log.last_applied is not None:
            kept.append(replace(self.log.last_applied, epoch=self.shard.epoch))
        if self.log.has(self.log.prepared):
            kept += [each for each in found if isinstance(each, Prepared)]
        return kept

    def redo(self, epoch: int, arrived: Arrived) -> None:
        """Does what the primary of this epoch has done."""
        change = arrived.change
        if isinstance(change, Bookkeeping):
            self.log.entries.begin_at(arrived.position)
            if self.fixed_log:
                self.log._prepared = arrived.position
        if arrived.index and not self.log.store(arrived):
            return
        self.shard.redo(change)


class Link:
    """Between a server and one coordinator: what is under way."""

    def __init__(self, server: "Server", term: int) -> None:
        self.name = server.name
        self.incarnation = server.incarnation
        self.down: deque[int | Command] = deque([term])  # the welcome is the term
        self.up: deque[Report] = deque()


class Server:
    """One server process."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.cut_off = False
        self.alive = False
        self.start()

    def start(self) -> None:
        """A new process of this name."""
        self.alive = True
        self.incarnation = self.world.next_number()
        self.term = 0
        self.link: Link | None = None
        self.outgoing: Link | None = None
        self.copies: dict[int, Copy] = {}
        self.living: set[int] = set()
        self.highest_id = 0

    def crash(self, order: random.Random) -> None:
        """Loses everything; what it has sent may arrive yet."""
        self.alive = False
        self.link = self.outgoing = None
        for copy in self.copies.values():
            for follower in copy.followers.values():
                follower.leave(order)
        self.copies = {}

    def relink(self) -> None:
        """Links to whoever leads."""
        try:
            self.link = self.world.host.open_link(self)
        except ServerEnded:
            for copy in list(self.copies.values()):
                self._leave(copy)
            self.copies = {}
            self.living = set()
            if "living-anew" in self.world.fixes:
                self.highest_id = 0
            self.incarnation = self.world.next_number()

    @property
    def linked(self) -> bool:
        """Whether its link is one to whoever leads."""
        return self.link is not None and self.world.host.links.get(self.name) is self.link

    def report(self, report: Report) -> None:
        """Tells the coordinator, if there is a link."""
        if self.outgoing is not None:
            self.outgoing.up.append(report)

    def hear(self) -> None:
        """Takes the next message of its link."""
        assert self.link is not None
        message = self.link.down.popleft()
        self.world.note(f"{self.name} hears {message}")
        if not isinstance(message, int):
            self.handle(message)
        elif message < self.term:
            self.link = None
        else:
            self.term = message
            self.outgoing = self.link
            for copy in self.copies.values():
                for report in copy.reports():
                    self.report(report)
                for follower in copy.followers.values() if "says-again" in self.world.fixes else ():
                    follower.report_again()

    def handle(self, command: Command) -> None:
        """See `ShardHost.handle`."""
        if isinstance(command, CreateShard):
            self._create(command)
        elif isinstance(command, AdmitTrainer):
            self._admit(command.trainer_id)
        elif isinstance(command, LivingTrainers):
            for trainer_id in self.living - set(command.trainer_ids):
                self._end_trainer(trainer_id)
            for trainer_id in command.trainer_ids:
                self._admit(trainer_id)
        elif isinstance(command, EndTrainer):
            self._end_trainer(command.trainer_id)
        else:
            copy = self.copies.get(command.shard)
            if copy is not None and copy.shard.epoch <= command.epoch:
                self._handle_for(copy, command)

    def _handle_for(self, copy: Copy, command: Any) -> None:
        if isinstance(command, DropShard):
            self._leave(self.copies.pop(command.shard))
        elif isinstance(command, FenceReplica):
            copy.shard.epoch = command.epoch
            position = copy.log.entries.position
            self.report(ReplicaFenced(model=MODEL, shard=command.shard, epoch=command.epoch, position=position))
        elif isinstance(command, Promote):
            self._promote(copy, command)
        elif copy.shard.epoch != command.epoch:
            return
        elif isinstance(command, SetReplicas):
            self._set_replicas(copy, command.replicas, in_sync=False)
        elif isinstance(command, Apply):
            self._apply(copy, command.decision)
        elif isinstance(command, Prepare):
            self._report_prepared(copy, copy.work(lambda shard: shard.prepare(command.plan)))
        elif isinstance(command, Reject):
            copy.work(lambda shard: shard.reject(command.refusal))
        elif isinstance(command, AbandonPlan):
            for report in copy.work(lambda shard: shard.abandon_plan()):
                self.report(report)
        else:
            assert isinstance(command, ModelReady)
            copy.work(lambda shard: shard.make_ready(command.initialiser))

    def _create(self, command: CreateShard) -> None:
        known = self.copies.get(command.shard)
        if known is not None:
            if known.shard.epoch == command.epoch:
                return
            self._leave(known)
        self.copies[command.shard] = Copy(command, fixed_log="prepared-with-state" in self.world.fixes)
        self.report(ShardCreated(model=MODEL, shard=command.shard, epoch=command.epoch))

    def _apply(self, copy: Copy, decision: Decision) -> None:
        before = copy.shard.round
        applied = copy.shard.apply(decision)
        copy.log.append(copy.shard.take_changes(), applied)
        if copy.shard.round > before:
            self.world.reference.applied(copy.shard, decision)
            self.world.reference.check_values(copy.shard)
        self.replicated(copy)

    def _report_prepared(self, copy: Copy, report: Prepared) -> None:
        copy.waiting.append((copy.log.prepared, report))
        self.replicated(copy)

    def replicated(self, copy: Copy) -> None:
        """Reports what waited for the replicas."""
        waiting, copy.waiting = copy.waiting, []
        for index, report in waiting:
            if not copy.log.has(index):
                copy.waiting.append((index, report))
            elif not copy.gone:
                self.report(report)
        applied = copy.log.take_applied()
        if applied is not None:
            self.report(replace(applied, epoch=copy.shard.epoch))

    def _promote(self, copy: Copy, command: Promote) -> None:
        if "followers-first" in self.world.fixes:  # what is appended from here on must be kept for them
            self._set_replicas(copy, command.replicas, in_sync=True)
        if copy.is_replica:
            assert copy.shard.ready, f"{self.name} goes on with shard {command.shard} without its state"
            promoted = copy.work(lambda shard: shard.promoted(command.epoch, self.living))
            copy.is_replica = False
        else:
            promoted = copy.shard.promotion()
        self._set_replicas(copy, command.replicas, in_sync=True)
        self.report(promoted)
        for report in copy.shard.reports():
            if isinstance(report, ShardState):
                self.report(report)
            elif isinstance(report, Prepared):
                self._report_prepared(copy, report)

    def _set_replicas(self, copy: Copy, replicas: Sequence[ReplicaAddress], *, in_sync: bool) -> None:
        wanted = {each.number: each for each in replicas}
        for number in copy.followers.keys() - wanted.keys():
            copy.followers.pop(number).stop()
        for number in sorted(wanted.keys() - copy.followers.keys()):
            copy.followers[number] = Follower(self, copy, wanted[number], in_sync=in_sync)
        self.replicated(copy)

    def _leave(self, copy: Copy) -> None:
        copy.gone = True
        for follower in copy.followers.values():
            follower.stop()
        copy.followers = {}

    def _admit(self, trainer_id: int) -> None:
        self.living.add(trainer_id)
        self.highest_id = max(self.highest_id, trainer_id)

    def _end_trainer(self, trainer_id: int) -> None:
        self.living.discard(trainer_id)
        self.highest_id = max(self.highest_id, trainer_id)
        for copy in self.copies.values():
            if not copy.is_replica:
                copy.work(lambda shard: shard.end_trainer(trainer_id))


# Replicas


@dataclass(frozen=True, slots=True)
class _Refused:
    """In the place of a reply; `stale`: another primary has been named."""

    stale: bool
    reason: str


class Stream:
    """From a primary to one replica; the replica's end of it."""

    def __init__(self, follower: "Follower") -> None:
        self.follower: Follower | None = follower
        self.epoch = follower.copy.shard.epoch
        self.server = follower.server.world.servers[follower.replica.server]
        self.incarnation = self.server.incarnation
        self.shard = follower.copy.shard.number
        self.requests: deque[int | StatePart | Entry[Any]] = deque()
        self.released: deque[int] = deque()
        self.replies: deque[int | tuple[int, int] | _Refused] = deque()
        self._copy: Copy | None = None
        self._num_parts = 0

    def put(self, change: StatePart | Entry[LoggedChange], released_or_position: int) -> None:
        """Sends it. Live tensors are copied."""
        self.requests.append(_copied(change))
        self.released.append(released_or_position)

    @property
    def broken(self) -> bool:
        """Whether the replica's process is not there any more."""
        return not self.server.alive or self.server.incarnation != self.incarnation

    def deliver(self) -> None:
        """The replica takes the next request."""
        if self.broken:
            self.requests.clear()
            if self.follower is not None:
                self.follower.lost("the server is gone")
            return
        if self._copy is None:
            self._greet()
            return
        change, number = self.requests.popleft(), self.released.popleft()
        if isinstance(change, Entry):
            arrived = Arrived(index=change.index, released=number, position=0, change=change.change)
        else:
            assert not isinstance(change, int)
            arrived = Arrived(index=0, released=0, position=number, change=change)
        self.server.world.note(f"replica of shard {self.shard} on {self.server.name} takes {_short(arrived)}")
        copy = self._copy
        superseded = copy.stream is not self and "one-stream" in self.server.world.fixes
        if superseded or copy.gone or not copy.is_replica or copy.shard.epoch != self.epoch:
            self._refuse(_Refused(True, "another primary has been named"))
            return
        before = copy.shard.round
        copy.redo(self.epoch, arrived)
        if copy.shard.ready and copy.shard.round > before:
            self.server.world.reference.check_values(copy.shard)
        self._num_parts += not arrived.index
        self.replies.append((copy.position, self._num_parts))

    def _greet(self) -> None:
        copy = self.server.copies.get(self.shard)
        if copy is None:
            self._refuse(_Refused(False, "it has no such shard"))
        elif not copy.is_replica or self.epoch < copy.shard.epoch:
            self._refuse(_Refused(True, f"it is of epoch {copy.shard.epoch}"))
        else:
            copy.shard.epoch = self.epoch
            self._copy = copy
            copy.stream = self
            self.replies.append(copy.position)

    def _refuse(self, refused: _Refused) -> None:
        self.requests.clear()
        self.released.clear()
        self.replies.append(refused)


class Follower(Listener):
    """The primary's side of one replica."""

    def __init__(self, server: Server, copy: Copy, replica: ReplicaAddress, *, in_sync: bool) -> None:
        self.server = server
        self.copy = copy
        self.replica = replica
        self.stream: Stream | None = None
        self.ended = False
        self.failed = ""
        self.pauses_until_s = 0.0
        self.caught_up = in_sync
        self._counts = in_sync
        self._listening = False
        self._started = False
        self._bringing: int | None = None
        self._catches_up_at: int | None = None
        self._acknowledged = 0
        self._num_parts = self._num_parts_taken = 0
        if in_sync:
            copy.log.entries.admit(replica.number, 0)
        copy.log.listen(replica.number, self)

    @property
    def may_connect(self) -> bool:
        """Whether it may open a stream now."""
        world = self.server.world
        there = world.servers[self.replica.server].alive and self.pauses_until_s <= world.now_s
        return self.stream is None and not self.ended and there

    def connect(self) -> None:
        """Opens a stream; the greeting is under way."""
        self._started = False
        self.stream = Stream(self)
        self.server.world.streams.append(self.stream)

    def leave(self, order: random.Random) -> None:
        """The stream breaks; what was sent may arrive yet."""
        stream, self.stream, self._listening = self.stream, None, False
        self.pauses_until_s = self.server.world.now_s + (TICK_S if self.failed else 0.0)
        if stream is not None:
            stream.follower = None
            if stream._copy is None or order.random() < 0.5:
                stream.requests.clear()

    def stop(self) -> None:
        """The log waits for this replica no longer."""
        self.copy.log.forget(self.replica.number)
        self.ended = True
        self.leave(random.Random(0))

    def lost(self, why: str) -> None:
        """The replica cannot be reached."""
        self.leave(random.Random(0))

    def give_up(self, why: str) -> None:
        """Tells the coordinator, once."""
        if not self.failed:
            self.failed = why
            self.report_again()

    def report_again(self) -> None:
        """What the coordinator may have missed."""
        name = {"model": MODEL, "shard": self.copy.shard.number, "epoch": self.copy.shard.epoch}
        if self.failed:
            self.server.report(ReplicaFailed(**name, number=self.replica.number, failure=self.failed))
        elif self.caught_up and not self.copy.gone:
            self.server.report(ReplicaCaughtUp(**name, number=self.replica.number))

    def tell(self, entry: Entry[LoggedChange]) -> None:
        if self._listening and self.stream is not None:
            self.stream.put(entry, self.copy.log.entries.replicated)

    def take(self) -> None:
        """Takes the next reply."""
        assert self.stream is not None
        reply = self.stream.replies.popleft()
        if isinstance(reply, _Refused):
            self.ended = self.ended or reply.stale
            if not reply.stale:
                self.give_up(reply.reason)
            self.leave(random.Random(0))
            return
        if isinstance(reply, int):
            self._started = True
            self._begin_or_resume(reply)
        else:
            self._acknowledged, self._num_parts_taken = reply
            self.copy.log.acknowledge(self.replica.number, self._acknowledged)
            self._go_on()
        self.server.replicated(self.copy)

    def _begin_or_resume(self, position: int) -> None:
        log = self.copy.log.entries
        entries = log.since(position) if position >= 0 else None
        if self._counts and entries is not None:
            self._begin(position)
            for entry in entries:
                self.tell(entry)
            self.copy.log.acknowledge(self.replica.number, position)
            self._go_on()
        elif self._counts:
            self.give_up(f"it is at entry {position}, and the log at {log.position}")
            self.leave(random.Random(0))
        else:
            self._begin(log.position)
            for part in self.copy.shard.state_parts():
                self._put(part, log.position if isinstance(part, Bookkeeping) else 0)
            self._bringing = 0
            self._go_on()

    def _begin(self, position: int) -> None:
        self._acknowledged = position
        self._num_parts = self._num_parts_taken = 0
        self._listening = True
        self._bringing = None

    def _put(self, part: Any, position: int = 0) -> None:
        assert self.stream is not None
        self._num_parts += 1
        self.stream.put(part, position)

    def _go_on(self) -> None:
        buckets = self.copy.shard.buckets
        while self._bringing is not None and self._bringing < len(buckets):
            if self._num_parts_taken < self._num_parts - WINDOW + 1:
                return
            self._put(self.copy.shard.bucket_part(self._bringing))
            self._bringing += 1
        if self._bringing is not None and self._num_parts_taken >= self._num_parts:
            self._bringing = None
            self._counts = True
            self.copy.log.entries.admit(self.replica.number, self._acknowledged)
            self._catches_up_at = self.catches_up_at
        if not self.caught_up and self._catches_up_at is not None and self._acknowledged >= self._catches_up_at:
            self.caught_up = True
            self.report_again()

    @property
    def catches_up_at(self) -> int:
        """The entry that a replica must have before it is in sync, when it begins to count."""
        # What was shown before it counted, it must have as well.
        return self.copy.log.entries.position if "shown-before" in self.server.world.fixes else 0


def _copied(change: Any) -> Any:
    if isinstance(change, torch.Tensor):
        return change.clone()
    if isinstance(change, Entry):
        return Entry(change.index, _copied(change.change))
    if isinstance(change, dict):
        return {key: _copied(value) for key, value in change.items()}
    names = [name for name in ("means", "buffers", "gradients", "master") if hasattr(change, name)]
    copied = {name: _copied(getattr(change, name)) for name in names}
    if hasattr(change, "state"):
        copied["state"] = [replace(each, value=_copied(each.value)) for each in change.state]
    return replace(change, **copied) if copied else change


def _short(arrived: Arrived) -> str:
    return f"{arrived.index or arrived.position} {type(arrived.change).__name__}"


# The coordinator


class Host:
    """Whoever leads."""

    def __init__(self, world: "World", term: int) -> None:
        self._world = world
        self.term = term
        self.core = Coordinator(
            trainer_lease_s=LEASE_S,
            server_lease_s=LEASE_S,
            min_servers=world.setup.num_servers,
            first_trainer_id=1,
            now_s=world.now_s,
        )
        self.core.restore(world.kept, world.now_s, term)
        self.links: dict[str, Link] = {}
        self.outbox: deque[tuple[dict[str, bytes | None], list[tuple[str, Link | None, Command]]]] = deque()
        self.num_enqueued = self.num_kept = 0

    def changed(self) -> None:
        """Sends what may be sent."""
        writes, commands = self.core.take_writes(), self.core.take_commands()
        waits = bool(writes or self.outbox)
        held: list[tuple[str, Link | None, Command]] = []
        for server, command in commands:
            assert not isinstance(command, FailModel), command.reason
            bypass: tuple[type, ...] = (Prepare, Apply, Reject)
            if "abandon-bypasses" in self._world.fixes:
                bypass = (*bypass, AbandonPlan)
            if waits and not isinstance(command, bypass):
                held.append((server, self.links.get(server), command))
            else:
                self._send(server, command)
        if writes or held:
            self.num_enqueued += 1
            self.outbox.append((writes, held))

    def keep(self) -> None:
        """What has changed first is kept."""
        writes, commands = self.outbox.popleft()
        self._world.kept = {key: data for key, data in {**self._world.kept, **writes}.items() if data is not None}
        self._world.note(f"kept {sorted(writes)}")
        self.num_kept += 1
        for server, link, command in commands:
            if link is self.links.get(server) or "held-for-link" not in self._world.fixes:
                self._send(server, command)

    def _send(self, server: str, command: Command) -> None:
        if (link := self.links.get(server)) is not None:
            link.down.append(command)

    def open_link(self, server: Server) -> Link:
        """A server links."""
        if server.name in self.links and self.links[server.name].incarnation != server.incarnation:
            self.close(server.name)
        self.core.server_joined(server.name, server.name, server.incarnation, self._world.now_s, "")
        link = self.links[server.name] = Link(server, self.term)
        self._world.note(f"{server.name} links, term {self.term}")
        self.changed()
        return link

    def close(self, name: str) -> None:
        """A link is gone."""
        link = self.links.pop(name)
        self.core.server_unlinked(name, link.incarnation)
        self.changed()

    def hear(self, name: str) -> None:
        """Takes the next report of a link."""
        report = self.links[name].up.popleft()
        self._world.note(f"coordinator hears {report} of {name}")
        if self.core.server_heard(name, self._world.now_s):
            assert not isinstance(report, ShardFailed), report
            self.core.report(name, report, self._world.now_s)
            self.changed()


# Trainers


@dataclass(slots=True)
class _Call:
    """One mutation, and where it stands."""

    push_id: PushId
    context_id: int
    flat: torch.Tensor
    commit: CommitInfo | None
    done: dict[int, StepResult | None] = field(default_factory=dict)
    waits: dict[int, tuple[Server, int, Copy, int]] = field(default_factory=dict)  # incarnation; until which entry


class Trainer:
    """One trainer: idle, or with a call under way to every shard."""

    def __init__(self, world: "World", trainer_id: int, rank: int) -> None:
        self._world = world
        self.trainer_id = trainer_id
        self.rank = rank
        self.attached = False
        self.base_round = 0
        self.step = 0
        self.num_told = 0
        self.call: _Call | None = None
        self.sent: list[tuple[Server, int, int, _Call]] = []
        self._push_ids = PushIds(trainer_id)
        self._context: int | None = None
        self._pushed = 0
        self.places: dict[int, tuple[str, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether it may begin something."""
        return self.attached and self.call is None

    def begin(self, *, commit: bool) -> None:
        """Begins a push: into the context of the next step, or the last one of it."""
        if self._context is None:
            self.step += 1
            self._context = self.step
        self._pushed += 1
        flat = gradient_of(self.trainer_id, self._pushed)
        key = self.trainer_id, self.step
        gradients = self._world.reference.gradients
        gradients[key] = gradients.get(key, torch.zeros(NUM_ELEMENTS)) + flat
        info = None
        if commit:
            rules = self._world.setup.rules
            info = CommitInfo(step=self.step, base_round=self.base_round, samples=1, options=OPTIONS, rules=rules)
        self.call = _Call(self._push_ids.issue(), self._context, flat, info)

    def look(self) -> None:
        """Asks where the shards are."""
        found = self._world.host.core.placement(MODEL).shards
        self.places = {each.shard: (each.server, each.epoch) for each in found}

    def send(self, shard: int) -> None:
        """Makes, or repeats, its call to one shard; looks for it if it is not there."""
        assert self.call is not None
        name, epoch = self.places[shard]
        server = self._world.servers[name]
        self.sent = [*self.sent[-20:], (server, shard, epoch, self.call)]
        copy = self._reach(server, shard, epoch)
        if copy is None:
            self.look()
            return
        self._world.note(f"trainer {self.trainer_id} calls shard {shard} on {name}: {self.call.push_id}")
        push(server, copy, self.call)
        self.call.waits[shard] = server, server.incarnation, copy, copy.log.required
        self.poll(shard)

    def reaches(self, shard: int) -> bool:
        """Whether a call to a shard would get there."""
        name, epoch = self.places[shard]
        return self._reach(self._world.servers[name], shard, epoch) is not None

    def _reach(self, server: Server, shard: int, epoch: int) -> Copy | None:
        copy = server.copies.get(shard)
        if not server.alive or copy is None or copy.gone or copy.is_replica or copy.shard.epoch != epoch:
            return None
        if self.trainer_id > server.highest_id:
            return None
        assert self.trainer_id in server.living, f"{server.name} says that trainer {self.trainer_id} has ended"
        return copy

    def poll(self, shard: int) -> None:
        """Whether a shard answers by now."""
        assert self.call is not None
        server, incarnation, copy, required = self.call.waits[shard]
        if not server.alive or server.incarnation != incarnation or copy.gone:
            del self.call.waits[shard]
            return
        if self.call.commit is None:
            if copy.log.has(required):
                self._done(shard, None)
            return
        outcome = copy.shard.outcome(self.call.push_id)
        if outcome is None:
            del self.call.waits[shard]  # the push was lost
        elif isinstance(outcome, StepResult) and (outcome.accepted or copy.log.has(copy.log.required)):
            self._done(shard, outcome)

    def _done(self, shard: int, outcome: StepResult | None) -> None:
        call = self.call
        assert call is not None
        call.done[shard] = outcome
        if len(call.done) < len(self.places):
            return
        self.call = None
        self._push_ids.settle(call.push_id)
        if call.commit is not None:
            results = [each for each in call.done.values() if each is not None]
            self._world.note(f"trainer {self.trainer_id} is told {results[0]}")
            self._world.reference.told(self.trainer_id, self.step, results)
            self._context = None
            self.base_round = results[0].round
            self.num_told += 1


def push(server: Server, copy: Copy, call: _Call) -> None:
    """A server takes a push. See `ShardService`."""
    pushed = Given(call.flat, copy.shard.exchanged)
    report = copy.work(lambda shard: shard.push(call.push_id, call.context_id, pushed, frozenset(), call.commit))
    if report is not None:
        server.report(report)


# All of it


class World:
    """The cluster; begins with a model that is ready, and trainers that are attached.

    Args:
        setup: what it trains.
        fixes: see `FIXES`.
    """

    def __init__(self, setup: Setup, *, fixes: Set[str] = FIXES) -> None:
        self.setup = setup
        self.fixes = fixes
        self.holds: Callable[[str, object], bool] = lambda name, message: False
        self.now_s = 0.0
        self.kept: dict[str, bytes] = {}
        self.trace: list[str] = []
        self.streams: list[Stream] = []
        self.reference = Reference(setup)
        self._number = 0
        self.host = Host(self, 1)
        self.trainers: list[Trainer] = []
        self._num_joined = 0
        self.servers: dict[str, Server] = {}
        for number in range(setup.num_servers):
            self.servers[f"s{number}"] = Server(self, f"s{number}")
        self.run()
        for _ in range(setup.num_trainers):
            self._join()
        self.run()
        self._register()

    def next_number(self) -> int:
        """One that was never given before."""
        self._number += 1
        return self._number

    def note(self, text: str) -> None:
        """For whoever looks for what went wrong."""
        self.trace.append(text)

    # Beginning

    def _join(self) -> Trainer:
        self._num_joined += 1
        member = self.host.core.join(f"nonce{self._num_joined}", -1, self.now_s)
        self.host.changed()
        trainer = Trainer(self, member.trainer_id, member.rank)
        self.trainers.append(trainer)
        return trainer

    def _register(self) -> None:
        core, spec, first = self.host.core, self.setup.spec, self.trainers[0]
        assert core.register(first._push_ids.issue(), spec) is None
        self.host.changed()
        self.run()
        registration = core.register(first._push_ids.issue(), spec)
        assert registration is not None
        assert registration.initialise
        self.host.changed()
        push_id = first._push_ids.issue()
        for place in registration.placement:
            server = self.servers[place.server]
            copy = server.copies[place.shard]
            values = Given(self.reference.values[0], copy.shard.buckets)
            server.report(copy.shard.initialise(push_id, values, {}))
        self.run()
        assert core.register(first._push_ids.issue(), spec, initialised=registration.epoch) is not None
        for trainer in self.trainers:
            self.attach(trainer)
        self.run()

    def attach(self, trainer: Trainer) -> None:
        """A trainer takes part from now on."""
        core = self.host.core
        epoch = core.placement(MODEL).epoch
        attachment = core.attach(trainer._push_ids.issue(), MODEL, epoch, self.now_s)
        self.host.changed()
        trainer.base_round, trainer.attached = attachment.round, True
        trainer.look()

    # What can happen

    def events(self) -> list[Callable[[], Any]]:
        """All messages that can be delivered, and calls that can be repeated, in a fixed order."""
        found: list[Callable[[], Any]] = []
        if self.host.outbox:
            found.append(self.host.keep)
        for name, server in self.servers.items():
            link = self.host.links.get(name)
            if link is not None and link.up and not self.holds(name, link.up[0]):
                found.append(lambda name=name: self.host.hear(name))
            if link is not None and (not server.alive or server.link is not link):
                found.append(lambda name=name: self.host.close(name))
            if not server.alive:
                continue
            if server.link is not None and server.link.down and not self.holds(name, server.link.down[0]):
                found.append(server.hear)
            if not server.linked and not server.cut_off:
                found.append(server.relink)
            for copy in server.copies.values():
                for follower in copy.followers.values():
                    if follower.may_connect:
                        found.append(follower.connect)
        found += self.traffic()
        found += self.calls()
        return found

    def traffic(self) -> list[Callable[[], Any]]:
        """What is under way between primaries and replicas."""
        self.streams = [each for each in self.streams if each.follower is not None or each.requests]
        found: list[Callable[[], Any]] = []
        for stream in self.streams:
            first = stream.requests[0] if stream.requests else None
            held = self.holds(stream.server.name, first.change if isinstance(first, Entry) else first)
            if not held and (stream.requests or (stream._copy is None and not stream.replies) or stream.broken):
                found.append(stream.deliver)
            if stream.replies and stream.follower is not None:
                found.append(stream.follower.take)
        return found

    def calls(self) -> list[Callable[[], Any]]:
        """What trainers wait for, or should repeat."""
        found: list[Callable[[], Any]] = []
        for trainer in self.trainers:
            for shard in trainer.places if trainer.call is not None else ():
                assert trainer.call is not None
                if shard in trainer.call.done:
                    continue
                if shard not in trainer.call.waits:
                    if trainer.reaches(shard) or self._has_moved(trainer, shard):
                        found.append(lambda trainer=trainer, shard=shard: trainer.send(shard))
                elif self._answers(trainer.call.waits[shard], trainer.call):
                    found.append(lambda trainer=trainer, shard=shard: trainer.poll(shard))
                elif self._has_moved(trainer, shard):
                    found.append(lambda trainer=trainer, shard=shard: self._moved(trainer, shard))
        return found

    @staticmethod
    def _answers(wait: tuple[Server, int, Copy, int], call: _Call) -> bool:
        server, incarnation, copy, required = wait
        if not server.alive or server.incarnation != incarnation or copy.gone:
            return True
        if call.commit is None:
            return copy.log.has(required)
        outcome = copy.shard.outcome(call.push_id)
        if isinstance(outcome, StepResult):
            return outcome.accepted or copy.log.has(copy.log.required)
        return outcome is None

    def _has_moved(self, trainer: Trainer, shard: int) -> bool:
        return self.host.core.placement(MODEL).shards[shard].epoch != trainer.places[shard][1]

    @staticmethod
    def _moved(trainer: Trainer, shard: int) -> None:
        assert trainer.call is not None
        trainer.call.waits.pop(shard, None)
        trainer.look()

    def run(self, order: random.Random | None = None, most: int = 1 << 30) -> None:
        """Delivers messages, in this order, until there are no more."""
        for number in range(most):
            assert number < MOST_EVENTS, "messages are sent without end"
            events = self.events()
            if not events:
                return
            (events[0] if order is None else order.choice(events))()

    def tick(self) -> None:
        """Time goes by; whoever lives and can, says so."""
        self.now_s += TICK_S
        core = self.host.core
        for name, link in self.host.links.items():
            if self.servers[name].alive and self.servers[name].link is link:
                core.server_heard(name, self.now_s)
        for trainer in self.trainers:
            core.renew(trainer.trainer_id, sent_bytes=0, received_bytes=0, reported={}, now_s=self.now_s)
        core.expire(self.now_s)
        self.host.changed()
        for name in core.lost_servers & self.host.links.keys():
            self.host.links.pop(name)

    # What may go wrong

    def shards(self) -> tuple[ShardStatus, ...]:
        """The shards as the coordinator sees them."""
        (model,) = self.host.core.status(self.now_s).models
        assert model.state == "ready", model.failure
        return model.shards

    def may_lose(self, name: str) -> bool:
        """Whether every shard survives the loss of a server: another copy counts now, and for the next leader."""
        kept = {each.shard: each for each in saved.unpack_model(self.kept[saved.MODEL + MODEL]).groups}
        for shard in self.shards():
            holders = {each.server for each in shard.replicas if each.state == ReplicaState.IN_SYNC.value}
            holders |= set() if shard.electing else {shard.server}
            group = kept[shard.shard]
            holders &= {each.server for each in group.in_sync} | (set() if group.electing else {group.primary})
            whole = {each for each in holders if each != name and self._holds(each, shard)}
            if not whole:
                return False
        return True

    def _holds(self, name: str, shard: ShardStatus) -> bool:
        server = self.servers[name]
        copy = server.copies.get(shard.shard)
        if not server.alive or server.cut_off or copy is None or copy.gone or not copy.shard.ready:
            return False
        known = self.host.core._servers.find(name)
        if known is None or not known.alive or known.incarnation != server.incarnation:
            return False
        primary = self.servers[shard.server].copies.get(shard.shard)
        followers = primary.followers.values() if primary is not None else ()
        return not any(each.failed and each.replica.server == name for each in followers)

    def crash(self, name: str, order: random.Random) -> None:
        """A server dies."""
        self.note(f"-- {name} dies")
        self.servers[name].crash(order)

    def restart(self, name: str) -> None:
        """It is there again, with nothing."""
        self.note(f"-- {name} starts")
        self.servers[name].start()

    def break_link(self, name: str) -> None:
        """A server's link is lost with all that is under way."""
        self.note(f"-- the link of {name} breaks")
        self.servers[name].link = self.servers[name].outgoing = None
        if name in self.host.links:
            self.host.close(name)

    def cut_off(self, name: str) -> None:
        """A server lives on, and can reach all but the coordinator, until its lease has ended."""
        self.note(f"-- {name} is cut off")
        server = self.servers[name]
        server.cut_off = True
        if name in self.host.links:
            self.host.close(name)
        for other in self.servers.values():
            if other.alive and not other.linked and not other.cut_off:
                other.relink()
        for _ in range(7):
            self.tick()

    def change_leader(self) -> None:
        """The coordinator dies; another one goes on with what was kept."""
        self.note("-- the coordinator dies")
        self.host = Host(self, self.host.term + 1)

    def end_trainer(self, trainer: Trainer) -> None:
        """A trainer dies, and its lease ends."""
        self.note(f"-- trainer {trainer.trainer_id} dies")
        self.trainers.remove(trainer)
        self.host.core.leave(trainer._push_ids.issue(), self.now_s)
        self.host.changed()

    # The end

    def heal(self) -> None:
        """Nothing goes wrong any more: all must come to rest, and be whole."""
        self.note("-- healed")
        for name, server in self.servers.items():
            server.cut_off = False
            if not server.alive:
                self.restart(name)
        for _ in range(MAX_TICKS):
            self.run()
            waiting = [each for each in self.trainers if each.call is not None]
            if not waiting and self._whole():
                self.check_at_rest()
                return
            commits = any(each.call is not None and each.call.commit is not None for each in waiting)
            for trainer in self.trainers if commits and isinstance(self.setup.policy, Bsp) else ():
                if trainer.idle:
                    trainer.begin(commit=True)
            self.tick()
        raise AssertionError(
            f"no rest: {[(each.trainer_id, each.call and each.call.done.keys()) for each in self.trainers]}, "
            f"{self.shards()}"
        )

    def _whole(self) -> bool:
        return all(not each.electing and not each.num_missing_replicas for each in self.shards())

    def check_at_rest(self) -> None:
        """All copies are the same, and at the same round."""
        for shard in self.shards():
            primary = self.servers[shard.server].copies[shard.shard]
            assert primary.shard.epoch == shard.epoch
            assert not primary.is_replica
            assert primary.shard.round == len(self.reference.decisions)
            self.reference.check_values(primary.shard)
            for each in shard.replicas:
                replica = self.servers[each.server].copies[shard.shard]
                assert replica.is_replica
                assert replica.shard.round == primary.shard.round
                assert replica.log.entries.position == primary.log.entries.position
                _check_same(primary.shard, replica.shard)


def _check_same(ours: Shard, theirs: Shard) -> None:
    mine, copied = _books(ours), _books(theirs)
    assert mine == copied, f"primary:\n{mine}\nreplica:\n{copied}"
    for number in range(len(ours.buckets)):
        one, other = ours.bucket_part(number), theirs.bucket_part(number)
        assert torch.equal(one.master, other.master)
        assert [(each.key, each.value.tolist()) for each in one.state if isinstance(each.value, torch.Tensor)] == [
            (each.key, each.value.tolist()) for each in other.state if isinstance(each.value, torch.Tensor)
        ]
    assert contexts_of(ours).keys() == contexts_of(theirs).keys()
    for key, held in contexts_of(ours).items():
        for bucket, tensor in held.gradients.items():
            assert torch.equal(tensor, contexts_of(theirs)[key].gradients[bucket])


def _books(shard: Shard) -> Any:
    (books,) = [each for each in shard.state_parts() if isinstance(each, Bookkeeping)]
    trainers = {each.trainer_id: (each.last_step, each.outcomes) for each in books.trainers if each.outcomes}
    return books.round, books.version, trainers


def contexts_of(shard: Shard) -> dict[tuple[int, int], ContextHeld]:
    """What was acknowledged of steps that are in no round yet."""
    held = [each for each in shard.state_parts() if isinstance(each, ContextHeld)]
    return {(each.trainer_id, each.context_id): each for each in held}


def stale_push(server: Server, shard: int, epoch: int, call: _Call) -> None:
    """A request that was delayed arrives after all; nobody hears the answer."""
    copy = server.copies.get(shard)
    if not server.alive or copy is None or copy.gone or copy.is_replica or copy.shard.epoch != epoch:
        return
    if call.push_id.trainer_id not in server.living:
        return
    with contextlib.suppress(StalePush):
        push(server, copy, call)
