"""The one place that decides membership, placement and rounds.

Pure: time comes in as an argument, and what servers must hear is taken out with `take_commands`. Not thread-safe.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from pserver.core.dedup import DedupTable
from pserver.core.membership import Member, Membership
from pserver.core.messages import (
    AdmitTrainer,
    Applied,
    Command,
    Committed,
    CreateShard,
    DropShard,
    EndTrainer,
    FailModel,
    LivingTrainers,
    ModelReady,
    ModelSpec,
    Prepared,
    Report,
    ShardCreated,
    ShardFailed,
    ShardInitialised,
    ShardPlacement,
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
    """

    def __init__(
        self, *, trainer_lease_s: float, server_lease_s: float, min_servers: int, first_trainer_id: int, now_s: float
    ) -> None:
        self._min_servers = min_servers
        self._membership = Membership(lease_s=trainer_lease_s, first_id=first_trainer_id)
        self._servers = ServerTable(server_lease_s)
        self._models: dict[str, Model] = {}
        self._epoch = 0
        self._outcomes: DedupTable[_Recorded] = DedupTable()
        self._commands: list[tuple[str, Command]] = []
        self._looked_s = now_s

    def take_commands(self) -> list[tuple[str, Command]]:
        """What servers must hear, as (server, command), in order; taken once."""
        taken, self._commands = self._commands, []
        return taken

    # Trainers

    @property
    def trainer_lease_s(self) -> float:
        """Length of a trainer's lease."""
        return self._membership.lease_s

    def join(self, nonce: str, rank: int, now_s: float) -> Member:
        """See `Membership.join`."""
        member = self._membership.join(nonce, rank, now_s)
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
        self, push_id: PushId, spec: ModelSpec, *, initialised: bool = False, replaces: int = 0
    ) -> Registration | None:
        """Registers a model, or checks that it is the same as the registered one. None: ask again after a change.

        Args:
            initialised: this trainer has sent the initial values and every shard has acknowledged them. Its reports may
                be under way still; it is not asked a second time.
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
        initialise = not initialised and model.may_initialise(push_id.trainer_id)
        if not initialise and model.state is not ModelState.READY:
            return None
        registration = Registration(initialise=initialise, placement=model.placement, epoch=model.epoch)
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
            for server in model.servers:
                self._tell(server, DropShard(model=name, epoch=model.epoch))
        self._outcomes.record(push_id, True)

    def knows(self, name: str) -> bool:
        """Whether a model of that name is registered."""
        return name in self._models

    def waiting_for(self, name: str) -> str:
        """What a registration of this model waits for, as text for a user."""
        model = self._models.get(name)
        if model is None:
            return f"servers: {len(self._servers.alive)} of {self._min_servers} have joined"
        if model.not_proposed and model.state is ModelState.READY:
            return f"the ranks {model.not_proposed} to change the model in the same way"
        if model.state is ModelState.CREATING:
            return f"shards to be made on {', '.join(model.servers)}"
        return f"initial values from trainer {model.initialiser}"

    # Servers

    @property
    def server_lease_s(self) -> float:
        """Length of a server's lease."""
        return self._servers.lease_s

    def server_joined(self, name: str, address: str, incarnation: int, now_s: float) -> None:
        """A server opened its link; everything it may have missed is told again.

        Raises:
            ConfigError: another living server has the name.
        """
        before = self._servers.join(name, address, incarnation, now_s)
        if before is not None:
            self._lost(before, "it was restarted")
        for model in self._models.values():
            self._tell_again(name, model)
        # Last: what the dead have left is freed by it, and rounds that were decided before their end count it.
        self._tell(name, LivingTrainers(trainer_ids=tuple(each.trainer_id for each in self._membership.members)))

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
        if model is None or model.epoch != report.epoch or server not in model.servers:
            self._tell(server, DropShard(model=report.model, epoch=report.epoch))
            return
        if isinstance(report, ShardCreated):
            model.shard_created(server)
        elif isinstance(report, ShardInitialised):
            if model.shard_initialised(server, report.trainer_id):
                logger.info("model %s is ready, with the values of trainer %d", model.spec.name, report.trainer_id)
                for each in model.servers:
                    self._tell(each, self._ready_command(model))
        elif isinstance(report, Committed):
            model.stepped(report.trainer_id, report.commit.step)
            if model.rounds.committed(server, report, now_s):
                self._advance(model, now_s)
        elif isinstance(report, Prepared):
            model.rounds.prepared(server, report)
            self._advance(model, now_s)
        elif isinstance(report, ShardFailed):
            self._fail(model, f"server {server} could not {report.failure}")
        else:
            self._applied(model, server, report)

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
            self._lost(server, f"nothing was heard from it for {self._servers.lease_s:g} s")
        decided = [self._advance(model, now_s) for model in self._models.values() if model.rounds.undecided]
        return bool(overdue or silent or any(decided))

    def status(self, now_s: float) -> ClusterStatus:
        """What the cluster looks like now."""
        return cluster_status(self._servers, self._models.values(), self._membership.members, now_s)

    # Inside

    def _create(self, spec: ModelSpec) -> Model | None:
        if len(self._servers.alive) < self._min_servers:
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
        model = Model(spec, [(each.name, each.address) for each in self._servers.alive], self._epoch + 1, replaced)
        self._epoch += 1
        self._models[spec.name] = model
        if replaced is not None:
            for server in replaced.servers:
                self._tell(server, DropShard(model=spec.name, epoch=replaced.epoch))
        for server in model.servers:
            self._tell(server, self._create_command(model, server))
        return model

    def _create_command(self, model: Model, server: str) -> CreateShard:
        place = next(each for each in model.placement if each.server == server)
        return CreateShard(
            spec=model.spec,
            epoch=model.epoch,
            runs=place.runs,
            round=model.first_round,
            version=model.first_version,
        )

    def _ready_command(self, model: Model) -> ModelReady:
        assert model.initialiser is not None
        return ModelReady(model=model.spec.name, epoch=model.epoch, initialiser=model.initialiser)

    def _advance(self, model: Model, now_s: float) -> bool:
        """Decides what can be decided; whether that was anything."""
        commands = model.rounds.advance(now_s) if model.state is ModelState.READY else []
        for command in commands:
            for server in model.servers:
                self._tell(server, command)
        return bool(commands)

    def _applied(self, model: Model, server: str, report: Applied) -> None:
        model.rounds.applied(server, report.round)
        model.shard_rounds[server] = max(model.shard_rounds[server], report.round)
        model.versions[server] = max(model.versions[server], report.version)

    def _end_trainer(self, trainer_id: int, now_s: float) -> None:
        if not self._membership.end(trainer_id):
            return
        logger.info("trainer %d has ended", trainer_id)
        self._outcomes.forget_trainer(trainer_id)
        for server in self._servers:
            self._tell(server.name, EndTrainer(trainer_id=trainer_id))
        for model in self._models.values():
            model.trainer_ended(trainer_id)
            if model.deserted:
                self._fail(model, "every trainer ended while its description was being changed")
            self._advance(model, now_s)

    def _lost(self, server: Server, why: str) -> None:
        logger.error("server %s at %s was lost: %s", server.name, server.address, why)
        for model in self._models.values():
            if server.name in model.servers and model.state is not ModelState.FAILED:
                self._fail(model, f"server {server.name} at {server.address} was lost: {why}")

    def _fail(self, model: Model, why: str) -> None:
        model.fail(
            f"model {model.spec.name!r} has failed: {why}. Its values are gone; start the cluster again and "
            "restore the model from where you saved it"
        )
        for server in model.servers:
            self._tell(server, FailModel(model=model.spec.name, epoch=model.epoch, reason=model.failure))

    def _tell_again(self, server: str, model: Model) -> None:
        if server not in model.servers:
            return
        name, epoch = model.spec.name, model.epoch
        if model.state is ModelState.FAILED:
            self._tell(server, FailModel(model=name, epoch=epoch, reason=model.failure))
            return
        self._tell(server, self._create_command(model, server))
        if model.state is ModelState.READY:
            self._tell(server, self._ready_command(model))
        for command in model.rounds.outstanding(server):
            self._tell(server, command)

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
