"""The one place that decides membership, placement and rounds.

Pure: time comes in as an argument, and what servers must hear is taken out with `take_commands`. Not thread-safe.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pserver.core import saved
from pserver.core.dedup import DedupTable
from pserver.core.groups import Replica, ReplicaState, ShardGroup
from pserver.core.membership import Member, Membership
from pserver.core.messages import (
    AbandonPlan,
    AdmitTrainer,
    Applied,
    Command,
    Committed,
    DropShard,
    EndTrainer,
    FenceReplica,
    LivingTrainers,
    ModelSpec,
    Prepared,
    Promote,
    ReplicaAddress,
    ReplicaCaughtUp,
    ReplicaFailed,
    ReplicaFenced,
    ReplicaLag,
    Report,
    SetReplicas,
    ShardCreated,
    ShardFailed,
    ShardInitialised,
    ShardPlacement,
    ShardPromoted,
    ShardState,
)
from pserver.core.models import Model, ModelState
from pserver.core.server_table import Server, ServerTable
from pserver.core.status import cluster_status
from pserver.errors import ModelFailed, StaleEpoch, UnknownModel
from pserver.types import ClusterStatus, PushId

logger = logging.getLogger(__name__)

#: A coordinator that was silent itself for longer than this part of a lease extends all leases before it judges.
PAUSE_PART_OF_LEASE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Answer to a trainer that registers a model; `initialise`: it sends the initial values, then registers again."""

    initialise: bool
    placement: tuple[ShardPlacement, ...]
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model's shards are, and the epoch at which its description was placed; `version` grows with changes."""

    version: int
    epoch: int
    shards: tuple[ShardPlacement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Answer to a trainer that attaches: the last decided round, and the trainer's last step that anybody has seen."""

    round: int
    step: int


_Recorded = Registration | Attachment | bool


class Coordinator:
    """Members, servers, models and their rounds.

    Args:
        trainer_lease_s: how long a trainer counts as alive without renewing.
        server_lease_s: how long a server counts as alive without a message.
        min_servers: servers that must be there before a model is placed.
        first_trainer_id: above every id that an earlier coordinator handed out.
        now_s: the time now.
        keeps: whether there is a place for what the next coordinator must know, see `take_writes`.
    """

    def __init__(
        self,
        *,
        trainer_lease_s: float,
        server_lease_s: float,
        min_servers: int,
        first_trainer_id: int,
        now_s: float,
        keeps: bool = True,
    ) -> None:
        self._keeps = keeps
        self._min_servers = min_servers
        self._membership = Membership(lease_s=trainer_lease_s, first_id=first_trainer_id)
        self._servers = ServerTable(server_lease_s)
        self._models: dict[str, Model] = {}
        self._last_number = 0  # of epochs and replicas together
        self._outcomes: DedupTable[_Recorded] = DedupTable()
        self._commands: list[tuple[str, Command]] = []
        self._unsaved: set[str] = set()
        self._looked_s = now_s
        self._keep(saved.COUNTERS)

    def take_commands(self) -> list[tuple[str, Command]]:
        """What servers must hear, as (server, command), in order; taken once."""
        taken, self._commands = self._commands, []
        return taken

    def take_writes(self) -> dict[str, bytes | None]:
        """What must be kept for the next coordinator before anybody is told what has happened; taken once."""
        unsaved, self._unsaved = self._unsaved, set()
        return {key: self._saved(key) for key in unsaved}

    def _saved(self, key: str) -> bytes | None:
        """What is kept under a key; None: nothing any more."""
        if key == saved.COUNTERS:
            first, following = self._membership.ids
            counters = saved.Counters(last_number=self._last_number, first_trainer_id=first, next_trainer_id=following)
            return saved.pack_counters(counters)
        if key.startswith(saved.TRAINER):
            member = self._membership.find(int(key.removeprefix(saved.TRAINER)))
            return None if member is None else saved.pack_member(member)
        if key.startswith(saved.SERVER):
            server = self._servers.find(key.removeprefix(saved.SERVER))
            return None if server is None or not server.alive else saved.pack_server(server)
        model = self._models.get(key.removeprefix(saved.MODEL))
        return None if model is None else saved.pack_model(model)

    def restore(self, values: Mapping[str, bytes], now_s: float, term: int = 0) -> None:
        """Goes on for an earlier coordinator, with what that has kept. Leases begin anew.

        Args:
            term: above that of every earlier coordinator: no two number a plan alike.

        Raises:
            ConfigError: it is damaged, or of another version.
        """
        if saved.COUNTERS not in values:
            return
        counters = saved.unpack_counters(values[saved.COUNTERS])
        self._last_number = counters.last_number
        self._membership.restore(
            counters.first_trainer_id,
            counters.next_trainer_id,
            [
                saved.unpack_member(int(name), data, now_s + self.trainer_lease_s)
                for name, data in _under(saved.TRAINER, values)
            ],
        )
        for name, data in _under(saved.SERVER, values):
            self._servers.restore(saved.unpack_server(name, data, now_s))
        for name, data in _under(saved.MODEL, values):
            self._models[name] = saved.unpack_model(data)
            self._models[name].rounds.number_plans_above(term << 32)
        self._unsaved.clear()

    def _keep(self, *keys: str) -> None:
        if self._keeps:
            self._unsaved.update(keys)

    def _keep_model(self, model: Model) -> None:
        self._keep(saved.MODEL + model.spec.name, saved.COUNTERS)

    # Trainers

    @property
    def trainer_lease_s(self) -> float:
        """Length of a trainer's lease."""
        return self._membership.lease_s

    def join(self, nonce: str, rank: int, now_s: float) -> Member:
        """See `Membership.join`."""
        member = self._membership.join(nonce, rank, now_s)
        self._keep(f"{saved.TRAINER}{member.trainer_id}", saved.COUNTERS)
        for server in self._servers:
            self._tell(server.name, AdmitTrainer(trainer_id=member.trainer_id))
        logger.info("trainer %d joined as rank %d", member.trainer_id, member.rank)
        return member

    def renew(
        self, trainer_id: int, *, sent_bytes: int, received_bytes: int, reported: Mapping[str, float], now_s: float
    ) -> None:
        """Extends a trainer's lease and notes its figures; raises as `Membership.require` does."""
        member = self._membership.renew(trainer_id, now_s)
        member.sent_bytes, member.received_bytes, member.reported = sent_bytes, received_bytes, dict(reported)

    def leave(self, push_id: PushId, now_s: float) -> None:
        """Ends a trainer's lease; one that has ended already is no error."""
        self._end_trainer(push_id.trainer_id, now_s)

    # Models

    def register(
        self, push_id: PushId, spec: ModelSpec, *, initialised: int = 0, replaces: int = 0
    ) -> Registration | None:
        """Registers a model, or checks that it is the same as the registered one. None: ask again after a change.

        Args:
            initialised: epoch of the placement whose initial values this trainer has sent, acknowledged by every shard.
                The reports may be under way still; it is not asked a second time. 0: none.
            replaces: epoch of the placement that the trainer gives up; 0: none. Once every attached trainer does so,
                the model goes on with the new description, at the same round, with values and optimizer state of the
                lowest rank.

        Raises:
            TrainerEnded, LayoutMismatch, ModelFailed, UnknownModel, UnsupportedModel, UnsupportedOptimizer,
            InvalidRequest
        """
        self._membership.require(push_id.trainer_id)
        recorded = self._outcomes.find(push_id)
        if isinstance(recorded, Registration):
            return recorded
        if replaces:
            self._require_model(spec.name)
        model = self._models.get(spec.name)
        if model is None:
            model = self._create(spec)
            if model is None:
                return None
        self._require_alive(model)
        if replaces == model.epoch:
            if not model.propose(push_id.trainer_id, spec):
                return None
            model = self._replace(model)
        model.require_same(spec)
        before = model.initialiser
        initialise = initialised != model.epoch and model.may_initialise(push_id.trainer_id)
        if model.initialiser != before:
            self._keep_model(model)
        if not initialise and not model.usable:
            return None
        registration = Registration(initialise=initialise, placement=self._placement_of(model), epoch=model.epoch)
        self._outcomes.record(push_id, registration)
        return registration

    def withdraw(self, trainer_id: int, name: str) -> None:
        """A trainer has given up waiting for its registration: a change that it proposed is not its wish any more."""
        model = self._models.get(name)
        if model is not None:
            model.withdraw(trainer_id)

    def attach(self, push_id: PushId, name: str, epoch: int, now_s: float) -> Attachment:
        """Expects a trainer in every round from now on.

        Raises:
            StaleEpoch: the model has been replaced since the trainer registered.
            TrainerEnded, UnknownModel, ModelFailed
        """
        member = self._membership.require(push_id.trainer_id)
        recorded = self._outcomes.find(push_id)
        if isinstance(recorded, Attachment):
            return recorded
        model = self._require_model(name)
        self._require_alive(model)
        if epoch != model.epoch:
            raise StaleEpoch(f"model {name!r} is of epoch {model.epoch} now, not {epoch}; register it again")
        model.rounds.attach(member.trainer_id, member.rank, now_s)
        self._keep_model(model)
        attachment = Attachment(round=model.rounds.round, step=model.rounds.step_of(member.trainer_id))
        self._outcomes.record(push_id, attachment)
        self._advance(model, now_s)
        return attachment

    def drop_model(self, push_id: PushId, name: str) -> None:
        """Forgets a model and frees its shards; one that does not exist is no error."""
        self._membership.require(push_id.trainer_id)
        if self._outcomes.find(push_id) is not None:
            return
        model = self._models.pop(name, None)
        if model is not None:
            self._drop(model)
            self._keep_model(model)
        self._outcomes.record(push_id, True)

    def placement(self, name: str) -> Placement:
        """Where a model's shards are now.

        Raises:
            UnknownModel, ModelFailed
        """
        model = self._require_model(name)
        self._require_alive(model)
        return Placement(version=model.placement_version, epoch=model.epoch, shards=self._placement_of(model))

    def knows(self, name: str) -> bool:
        """Whether a model of that name is registered."""
        return name in self._models

    def waiting_for(self, name: str) -> str:
        """What a registration of this model waits for, as text for a user."""
        model = self._models.get(name)
        if model is None:
            return (
                f"servers: {len(self._servers.alive)} have joined; expected {self._min_servers} or more, and more than "
                "there are to be replicas"
            )
        if model.not_proposed and model.state is ModelState.READY:
            return f"the ranks {model.not_proposed} to change the model in the same way"
        if model.state is ModelState.CREATING:
            return f"shards to be made on {', '.join(model.servers)}"
        if model.state is ModelState.READY:
            return f"replicas to catch up on {', '.join(model.servers)}"
        return f"initial values from trainer {model.initialiser}"

    # Servers

    @property
    def server_lease_s(self) -> float:
        """Length of a server's lease."""
        return self._servers.lease_s

    def server_joined(self, name: str, address: str, incarnation: int, now_s: float, arithmetic: str = "") -> None:
        """A server opened its link; everything it may have missed is told again.

        Args:
            arithmetic: what the bits of its results depend on; replicas have the same as their primary.

        Raises:
            ConfigError: another living server has the name. ServerEnded: its own lease has ended.
        """
        before = self._servers.join(name, address, incarnation, now_s, arithmetic)
        self._keep(saved.SERVER + name)
        if before is not None:
            self._lost(before, "it was restarted")
        for model in self._models.values():
            for group in model.groups:
                self._tell_again(name, model, group)
        # Last: what the dead have left is freed by it, and rounds that were decided before their end count it.
        self._tell(name, LivingTrainers(trainer_ids=tuple(each.trainer_id for each in self._membership.members)))
        self._replicate(now_s)

    def server_unlinked(self, name: str, incarnation: int) -> None:
        """A server's link broke; the server counts as alive until its lease ends."""
        self._servers.unlinked(name, incarnation)

    def server_heard(self, name: str, now_s: float) -> bool:
        """A message came from a server; False if its lease has ended, and its link should."""
        return self._servers.heard(name, now_s)

    @property
    def lost_servers(self) -> frozenset[str]:
        """Names of servers whose lease has ended."""
        return frozenset(each.name for each in self._servers if not each.alive)

    def report(self, server: str, report: Report, now_s: float) -> None:
        """Takes a server's report. Repeats change nothing; a shard of a model or epoch that is gone is told to go."""
        model = self._models.get(report.model)
        group = model.group(report.shard) if model is not None else None
        if model is None or group is None or server not in group.members:
            self._tell(server, DropShard(model=report.model, shard=report.shard, epoch=report.epoch))
        elif report.epoch != group.epoch:
            # A replica that has not heard of the new epoch yet keeps what it has; what is of an older one goes.
            if report.epoch < model.epoch:
                self._tell(server, DropShard(model=report.model, shard=report.shard, epoch=report.epoch))
        elif server == group.primary and not group.electing:
            self._primary_reports(model, group, report, now_s)
        else:
            self._replica_reports(model, group, server, report, now_s)

    def _primary_reports(self, model: Model, group: ShardGroup, report: Report, now_s: float) -> None:
        if isinstance(report, ShardCreated):
            # One that was elected exists as a replica already; that it is the primary, it says itself.
            if not group.created and group.epoch == model.epoch:
                model.shard_created(group)
                self._keep_model(model)
        elif isinstance(report, ShardInitialised):
            if model.shard_initialised(group, report.trainer_id):
                logger.info("model %s is ready, with the values of trainer %d", model.spec.name, report.trainer_id)
                self._keep_model(model)
                for each in model.groups:
                    self._tell(each.primary, model.ready_command(each))
                    self._set_replicas(model, each)
        elif isinstance(report, Committed):
            model.stepped(report.trainer_id, report.commit.step)
            if (refusal := model.rounds.refusal_of(report)) is not None:
                self._tell(group.primary, model.round_command(group, refusal))
            elif model.rounds.committed(report, now_s):
                self._advance(model, now_s)
        elif isinstance(report, Prepared):
            model.rounds.prepared(report)
            self._advance(model, now_s)
        elif isinstance(report, Applied):
            model.rounds.applied(group.shard, report.round)
            model.shard_rounds[group.shard] = max(model.shard_rounds[group.shard], report.round)
            model.versions[group.shard] = max(model.versions[group.shard], report.version)
        elif isinstance(report, ShardState):
            if model.take_state(report):
                self._resume(model, now_s)
        elif isinstance(report, ShardPromoted):
            self._promoted(model, group, report, now_s)
        elif isinstance(report, ShardFailed):
            self._primary_lost(model, group, f"server {group.primary} could not {report.failure}")
        elif isinstance(report, ReplicaCaughtUp | ReplicaFailed | ReplicaLag):
            self._of_replica(model, group, report, now_s)

    def _replica_reports(self, model: Model, group: ShardGroup, server: str, report: Report, now_s: float) -> None:
        replica = group.replicas.get(server)
        if replica is None:
            return
        if isinstance(report, ShardCreated) and replica.state is ReplicaState.MAKING:
            replica.state = ReplicaState.CATCHING_UP
            self._keep_model(model)
            self._set_replicas(model, group)
        elif isinstance(report, ReplicaFenced):
            if group.electing:  # else it is a repeat, and there is a primary
                group.fenced(server, report.position)
                self._elect(model, group)
        elif isinstance(report, ShardFailed):
            self._remove_replica(model, group, replica, f"could not {report.failure}", now_s)

    def _of_replica(
        self, model: Model, group: ShardGroup, report: ReplicaCaughtUp | ReplicaFailed | ReplicaLag, now_s: float
    ) -> None:
        replica = group.replica(report.number)
        if replica is None:
            self._set_replicas(model, group)  # the primary has missed that it counts no more
        elif isinstance(report, ReplicaLag):
            replica.lag = report.num_entries
        elif isinstance(report, ReplicaFailed):
            self._remove_replica(model, group, replica, report.failure, now_s)
        elif replica.state is not ReplicaState.IN_SYNC:
            replica.state, replica.lag = ReplicaState.IN_SYNC, 0
            self._keep_model(model)
            logger.info("model %s: %s has a replica of shard %d in sync", model.spec.name, replica.server, group.shard)

    # Time

    def expire(self, now_s: float) -> bool:
        """Ends leases that have run out and rounds whose deadline has passed; returns whether anything changed.

        Call it often; after a pause of the caller's own, it extends leases first.
        """
        pause_s = now_s - self._looked_s
        self._looked_s = now_s
        if pause_s > PAUSE_PART_OF_LEASE * min(self._servers.lease_s, self.trainer_lease_s):
            for member in self._membership.members:
                member.lease_ends_s = min(member.lease_ends_s + pause_s, now_s + self.trainer_lease_s)
            self._servers.extend(pause_s, now_s)
            for model in self._models.values():
                model.rounds.postpone(pause_s, now_s)
        overdue = self._membership.overdue(now_s)
        silent = self._servers.silent(now_s)
        for trainer_id in overdue:
            self._end_trainer(trainer_id, now_s)
        for server in silent:
            self._servers.lose(server)
            self._keep(saved.SERVER + server.name)
            self._lost(server, f"nothing was heard from it for {self._servers.lease_s:g} s")
        self._replicate(now_s)
        decided = [self._advance(model, now_s) for model in self._models.values() if model.rounds.undecided]
        return bool(overdue or silent or any(decided))

    def status(self, now_s: float) -> ClusterStatus:
        """What the cluster looks like now."""
        return cluster_status(self._servers, self._models.values(), self._membership.members, now_s)

    # Inside

    def _create(self, spec: ModelSpec) -> Model | None:
        if len(self._servers.alive) < max(self._min_servers, spec.replicas + 1):
            return None
        model = self._place(spec)
        logger.info("model %s is placed on %s", spec.name, ", ".join(model.servers))
        return model

    def _replace(self, old: Model) -> Model:
        """Puts another description in a model's place; its rounds and trainers go on."""
        spec, initialiser = old.proposal
        model = self._place(spec, old)
        model.initialiser = initialiser
        logger.info("model %s goes on with another description from round %d on", spec.name, model.rounds.round)
        return model

    def _place(self, spec: ModelSpec, replaced: Model | None = None) -> Model:
        """Places a model on all living servers, under a new epoch; the shards of the replaced one go first."""
        model = Model(spec, [each.name for each in self._servers.alive], self._last_number + 1, replaced)
        self._last_number += 1
        self._models[spec.name] = model
        self._keep_model(model)
        if replaced is not None:
            self._drop(replaced)
        for group in model.groups:
            self._tell(group.primary, model.create_command(group, replica=False))
        for group in model.groups:
            self._add_replicas(model, group, self._looked_s)
        return model

    def _placement_of(self, model: Model) -> tuple[ShardPlacement, ...]:
        return tuple(
            ShardPlacement(
                shard=group.shard,
                epoch=group.placed_epoch,
                server=group.placed_on,
                address=self._servers.address_of(group.placed_on),
                runs=group.runs,
            )
            for group in model.groups
        )

    def _drop(self, model: Model) -> None:
        for group in model.groups:
            for server in group.members:
                self._tell(server, DropShard(model=model.spec.name, shard=group.shard, epoch=group.epoch))

    def _advance(self, model: Model, now_s: float) -> bool:
        """Decides what can be decided; whether that was anything."""
        may = model.state is ModelState.READY and model.states is None
        news = model.rounds.advance(now_s) if may else []
        for each in news:
            for group in model.groups:
                if not group.electing:
                    self._tell(group.primary, model.round_command(group, each))
        return bool(news)

    def _end_trainer(self, trainer_id: int, now_s: float) -> None:
        if not self._membership.end(trainer_id):
            return
        logger.info("trainer %d has ended", trainer_id)
        self._outcomes.forget_trainer(trainer_id)
        self._keep(f"{saved.TRAINER}{trainer_id}")
        for server in self._servers:
            self._tell(server.name, EndTrainer(trainer_id=trainer_id))
        for model in self._models.values():
            model.trainer_ended(trainer_id)
            self._keep_model(model)
            if model.deserted:
                self._fail(model, "every trainer ended while its description was being changed")
            self._advance(model, now_s)

    # Servers that are lost

    def _lost(self, server: Server, why: str) -> None:
        lost = f"server {server.name} at {server.address} was lost: {why}"
        logger.error("%s", lost)
        for model in list(self._models.values()):
            for group in model.groups if model.state is not ModelState.FAILED else ():
                electing = group.electing
                replica = group.remove(server.name)
                if replica is not None:
                    self._keep_model(model)
                if replica is not None and electing:
                    self._elect(model, group, lost)
                elif replica is not None:
                    self._set_replicas(model, group)
                if server.name == group.primary and not electing:
                    self._primary_lost(model, group, lost)

    def _primary_lost(self, model: Model, group: ShardGroup, why: str) -> None:
        """The primary's copy of a shard is gone: a replica goes on, or nobody can."""
        if model.state is ModelState.FAILED:
            return
        name, lost, epoch = model.spec.name, group.primary, group.epoch
        catching_up = [each.server for each in group.replicas.values() if each.state is not ReplicaState.IN_SYNC]
        if name in self._models and not model.has_begun:
            # Nobody has trained yet: the first trainer still has the values, and gives them to other servers.
            logger.error("model %s is placed anew, since %s", name, why)
            self._drop(self._models.pop(name))
            self._keep_model(model)
            return
        if model.state is not ModelState.READY or not group.in_sync:
            self._fail(model, why)
            return
        self._last_number += 1
        group.begin_election(self._last_number)
        self._keep_model(model)
        model.rounds.shard_lost(group.shard)
        if model.states is not None:
            model.states.pop(group.shard, None)
        logger.error("model %s: shard %d has lost its primary: %s", name, group.shard, why)
        for server in (lost, *catching_up):
            self._tell(server, DropShard(model=name, shard=group.shard, epoch=epoch))
        for replica in group.in_sync:
            self._tell(replica.server, FenceReplica(model=name, shard=group.shard, epoch=group.epoch))

    def _elect(self, model: Model, group: ShardGroup, why: str = "") -> None:
        """Promotes a replica, once all have said how far they are; `why`: one of them is none any more."""
        if not group.positions:
            self._fail(model, f"{why}; that was the last copy of shard {group.shard}")
            return
        elected = group.elect()
        if elected is None:
            return
        self._keep_model(model)
        logger.warning(
            "model %s: %s goes on with shard %d, epoch %d", model.spec.name, elected.server, group.shard, group.epoch
        )
        self._tell(group.primary, self._promote_command(model, group))

    def _promote_command(self, model: Model, group: ShardGroup) -> Promote:
        return Promote(
            model=model.spec.name, shard=group.shard, epoch=group.epoch, replicas=self._addresses(group.in_sync)
        )

    def _promoted(self, model: Model, group: ShardGroup, report: ShardPromoted, now_s: float) -> None:
        if group.created:
            return
        group.created = True
        group.place()
        self._last_number += 1
        model.placement_version = self._last_number
        self._keep_model(model)
        if model.states is None:
            give_up = model.rounds.shard_promoted(group.shard, report.round, report.attempt)
            if give_up:
                model.rounds.give_up()
            self._tell_rounds(model, group)
            if give_up:
                self._abandon_plan(model)
        self._set_replicas(model, group)
        self._replicate(now_s)
        self._advance(model, now_s)

    def _resume(self, model: Model, now_s: float) -> None:
        """All shards have said where they are: rounds go on from there."""
        assert model.states is not None
        states, model.states = model.states, None
        give_up = model.rounds.resume(states)
        logger.info("model %s goes on from round %d", model.spec.name, model.rounds.round)
        for group in model.groups:
            self._tell_rounds(model, group)
        if give_up:
            self._abandon_plan(model)
        self._advance(model, now_s)

    def _abandon_plan(self, model: Model) -> None:
        """The round that is prepared cannot be: every shard has its commits wait again, and reports them."""
        for group in model.groups:
            # Whoever is not the primary yet may have a plan that is decided, and is told of it first.
            if group.created and not group.electing:
                self._tell(group.primary, AbandonPlan(model=model.spec.name, shard=group.shard, epoch=group.epoch))

    def _tell_rounds(self, model: Model, group: ShardGroup) -> None:
        if not group.electing:
            for news in model.rounds.outstanding(group.shard):
                self._tell(group.primary, model.round_command(group, news))

    # Replicas

    def _replicate(self, now_s: float) -> None:
        """Where a shard has fewer replicas than it should, and a server could keep one, has one made."""
        for model in self._models.values():
            for group in model.groups if model.state is not ModelState.FAILED else ():
                if not group.electing:
                    self._add_replicas(model, group, now_s)

    def _add_replicas(self, model: Model, group: ShardGroup, now_s: float) -> None:
        while len(group.replicas) < model.spec.replicas:
            server = self._servers.for_replica(group.members, self._num_copies(), now_s)
            if server is None:
                return
            self._last_number += 1
            group.replicas[server] = Replica(number=self._last_number, server=server)
            self._keep_model(model)
            self._tell(server, model.create_command(group, replica=True))

    def _num_copies(self) -> Counter[str]:
        """Shards that each server has, or has a copy of."""
        return Counter(server for model in self._models.values() for group in model.groups for server in group.members)

    def _remove_replica(self, model: Model, group: ShardGroup, replica: Replica, why: str, now_s: float) -> None:
        """A replica counts no more; if its server lives, it may get another one later."""
        name = model.spec.name
        logger.error("model %s: the replica of shard %d on %s is given up: %s", name, group.shard, replica.server, why)
        electing = group.electing
        group.remove(replica.server)
        self._keep_model(model)
        self._servers.failed_replica(replica.server, now_s)
        self._tell(replica.server, DropShard(model=name, shard=group.shard, epoch=group.epoch))
        if electing:
            self._elect(model, group, f"the replica on {replica.server} {why}")
        else:
            self._set_replicas(model, group)

    def _set_replicas(self, model: Model, group: ShardGroup) -> None:
        """Tells a primary who its replicas are, as far as they have been made."""
        if model.spec.replicas and model.state is ModelState.READY and not group.electing:
            made = [each for each in group.replicas.values() if each.state is not ReplicaState.MAKING]
            self._tell(
                group.primary,
                SetReplicas(
                    model=model.spec.name, shard=group.shard, epoch=group.epoch, replicas=self._addresses(made)
                ),
            )

    def _addresses(self, replicas: Iterable[Replica]) -> tuple[ReplicaAddress, ...]:
        return tuple(
            ReplicaAddress(number=each.number, server=each.server, address=self._servers.address_of(each.server))
            for each in replicas
        )

    def _fail(self, model: Model, why: str) -> None:
        logger.error("model %s has failed: %s", model.spec.name, why)
        model.fail(
            f"model {model.spec.name!r} has failed: {why}. Its values are gone; start the cluster again and "
            "restore the model from where you saved it"
        )
        self._keep_model(model)
        for group in model.groups:
            for server in group.members:
                self._tell(server, model.fail_command(group))

    def _tell_again(self, server: str, model: Model, group: ShardGroup) -> None:
        """What a server may have missed of a shard, while its link was down."""
        if model.state is ModelState.FAILED:
            if server in group.members:
                self._tell(server, model.fail_command(group))
        elif group.electing:
            if server in group.replicas:
                self._tell(server, FenceReplica(model=model.spec.name, shard=group.shard, epoch=group.epoch))
        elif server in group.replicas:
            if group.replicas[server].state is ReplicaState.MAKING:
                self._tell(server, model.create_command(group, replica=True))
        elif server == group.primary:
            if group.epoch != model.epoch:
                self._tell(server, self._promote_command(model, group))
            else:
                self._tell(server, model.create_command(group, replica=False))
            if model.state is ModelState.READY:
                self._tell(server, model.ready_command(group))
            self._set_replicas(model, group)
            if group.created and model.states is None:
                self._tell_rounds(model, group)
                if not model.rounds.preparing:  # it may have missed that a plan was given up
                    self._tell(server, AbandonPlan(model=model.spec.name, shard=group.shard, epoch=group.epoch))

    def _tell(self, server: str, command: Command) -> None:
        if self._servers.hears(server):
            self._commands.append((server, command))

    def _require_model(self, name: str) -> Model:
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"model {name!r} is not registered here; models: {sorted(self._models)}")
        return model

    @staticmethod
    def _require_alive(model: Model) -> None:
        if model.state is ModelState.FAILED:
            raise ModelFailed(model.failure)


def _under(prefix: str, values: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    """What is kept under a prefix, by the rest of the key."""
    return [(key.removeprefix(prefix), data) for key, data in sorted(values.items()) if key.startswith(prefix)]
