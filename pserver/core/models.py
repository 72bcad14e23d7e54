"""One model as the coordinator sees it: creating -> initialising -> ready, or failed."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum

from pserver.core.groups import ShardGroup
from pserver.core.messages import (
    Apply,
    Command,
    CreateShard,
    Decision,
    FailModel,
    ModelReady,
    ModelSpec,
    Plan,
    Prepare,
    Reject,
    ShardState,
)
from pserver.core.optimizers import check_groups
from pserver.core.placement import place_buckets
from pserver.core.rounds import BUFFER_POLICIES, RoundBook, RoundNews, RoundsSaved
from pserver.core.sync import make_policy
from pserver.errors import InvalidRequest, LayoutMismatch
from pserver.wire.layout import Layout, first_difference

MAX_NAME_LENGTH = 255
MAX_WORLD_SIZE = 1 << 20
MAX_REPLICAS = 16


class ModelState(Enum):
    """Where a model is in its life."""

    CREATING = "creating"
    INITIALISING = "initialising"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    """What a trainer wants to go on with, and its last step when it said so."""

    spec: ModelSpec
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSaved:
    """What is kept of a model beside its description; the fields are those of `Model`."""

    epoch: int
    state: ModelState
    failure: str
    initialiser: int | None
    placement_version: int
    first_round: int
    first_version: int
    replicated: bool
    replaces: bool
    groups: tuple[ShardGroup, ...]
    rounds: RoundsSaved


class Model:
    """A registered model. Not thread-safe.

    Args:
        spec: as its first trainer sees it.
        servers: names of the servers to place it on.
        epoch: of this placement.
        replaced: the model in whose place it comes, with its rounds and trainers.

    Raises:
        UnsupportedModel, UnsupportedOptimizer, InvalidRequest: the model cannot be distributed.
    """

    def __init__(self, spec: ModelSpec, servers: Sequence[str], epoch: int, replaced: "Model | None" = None) -> None:
        layout = check_spec(spec)
        policy = make_policy(spec.sync_policy, spec.sync_policy_arguments)
        self.spec = spec
        self.epoch = self.placement_version = epoch
        self.state = ModelState.CREATING
        self.failure = ""
        self.initialiser: int | None = None
        placed = [each for each in zip(servers, place_buckets(layout, len(servers)), strict=True) if each[1]]
        self.groups = [
            ShardGroup(shard=shard, runs=runs, epoch=epoch, primary=server)
            for shard, (server, runs) in enumerate(placed)
        ]
        names = [each.name for each in spec.tensors]
        if replaced is None:
            self.rounds = RoundBook(
                policy,
                names=names,
                num_shards=len(self.groups),
                world_size=spec.world_size,
                buffers=spec.buffers,
                always_prepares=spec.replicas > 0,
            )
        else:
            self.rounds = replaced.rounds
            self.rounds.replace(names, len(self.groups))
        self._replaces = replaced is not None
        self.first_round = self.rounds.round
        self.first_version = self.rounds.version
        self.versions: dict[int, int] = dict.fromkeys(range(len(self.groups)), self.first_version)
        self.shard_rounds = dict.fromkeys(range(len(self.groups)), self.rounds.round)
        self.shard_bytes = [
            sum(layout.buckets[index].num_master_bytes for run in group.runs for index in run) for group in self.groups
        ]
        #: What shards say of themselves, while this coordinator does not know it; None: it does.
        self.states: dict[int, ShardState] | None = None
        self._initialised: set[int] = set()
        self._replicated = spec.replicas == 0
        self._proposals: dict[int, _Proposal] = {}

    def saved(self) -> ModelSaved:
        """What the next coordinator must know."""
        return ModelSaved(
            epoch=self.epoch,
            state=self.state,
            failure=self.failure,
            initialiser=self.initialiser,
            placement_version=self.placement_version,
            first_round=self.first_round,
            first_version=self.first_version,
            replicated=self._replicated,
            replaces=self._replaces,
            groups=tuple(self.groups),
            rounds=self.rounds.saved(),
        )

    @classmethod
    def restored(cls, spec: ModelSpec, saved: ModelSaved) -> "Model":
        """The model that an earlier coordinator had; a ready one waits for all `states`, and goes on with them."""
        model = cls(spec, [each.primary for each in saved.groups], saved.epoch)
        model.groups = list(saved.groups)
        model.state, model.failure, model.initialiser = saved.state, saved.failure, saved.initialiser
        model.placement_version = saved.placement_version
        model.first_round, model.first_version = saved.first_round, saved.first_version
        model._replicated, model._replaces = saved.replicated, saved.replaces
        model.rounds.restore(saved.rounds, saved.first_round)
        model.states = {} if saved.state is ModelState.READY else None
        return model

    def take_state(self, state: ShardState) -> bool:
        """Notes what a shard says of itself; whether all have now, so that rounds may go on."""
        if self.states is None:
            return False
        self.states[state.shard] = state
        return len(self.states) == len(self.groups)

    def group(self, shard: int) -> ShardGroup | None:
        """A shard by its number, if there is such a one."""
        return self.groups[shard] if 0 <= shard < len(self.groups) else None

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that have a part, or a copy of one."""
        return tuple(dict.fromkeys(server for group in self.groups for server in group.members))

    # What servers are told

    def create_command(self, group: ShardGroup, *, replica: bool) -> CreateShard:
        """Has a shard made, or a copy of it."""
        return CreateShard(
            spec=self.spec,
            shard=group.shard,
            epoch=group.epoch,
            runs=group.runs,
            round=self.first_round,
            version=self.first_version,
            replica=replica,
        )

    def ready_command(self, group: ShardGroup) -> ModelReady:
        """Says whose initial values count."""
        assert self.initialiser is not None
        return ModelReady(model=self.spec.name, shard=group.shard, epoch=group.epoch, initialiser=self.initialiser)

    def fail_command(self, group: ShardGroup) -> FailModel:
        """Says why the model cannot go on."""
        return FailModel(model=self.spec.name, shard=group.shard, epoch=group.epoch, reason=self.failure)

    def round_command(self, group: ShardGroup, news: RoundNews) -> Command:
        """What a shard must hear of a round."""
        name, shard, epoch = self.spec.name, group.shard, group.epoch
        if isinstance(news, Decision):
            return Apply(model=name, shard=shard, epoch=epoch, decision=news)
        if isinstance(news, Plan):
            return Prepare(model=name, shard=shard, epoch=epoch, plan=news)
        return Reject(model=name, shard=shard, epoch=epoch, refusal=news)

    def require_same(self, offered: ModelSpec) -> None:
        """Refuses a trainer whose model differs.

        Raises:
            LayoutMismatch: naming the first difference.
        """
        _require_same(self.spec, offered, "is registered with another description")

    # Replacing

    def propose(self, trainer_id: int, spec: ModelSpec) -> bool:
        """Notes that a trainer wants to go on with another description; True once every attached one does.

        Raises:
            LayoutMismatch: another trainer proposes something else; names the first difference.
            InvalidRequest: the trainer is not attached, or the policy or world size would change.
        """
        if trainer_id not in self.rounds.attached:
            raise InvalidRequest(f"trainer {trainer_id} is not attached to model {self.spec.name!r}; attach first")
        for field in ("name", "sync_policy", "sync_policy_arguments", "world_size", "buffers", "replicas"):
            if getattr(spec, field) != getattr(self.spec, field):
                raise InvalidRequest(
                    f"model {self.spec.name!r}: {field} cannot be changed from {getattr(self.spec, field)!r} to "
                    f"{getattr(spec, field)!r} while it is trained"
                )
        known = self._proposals.get(trainer_id)
        if known is not None and known.spec is spec:
            return self._proposals.keys() >= self.rounds.attached
        for proposed in self._proposals.values():
            _require_same(proposed.spec, spec, "is being changed by other trainers in another way")
        self._proposals[trainer_id] = _Proposal(spec=spec, step=self.rounds.step_of(trainer_id))
        return self._proposals.keys() >= self.rounds.attached

    def withdraw(self, trainer_id: int) -> None:
        """A trainer no longer waits for the others to propose the same."""
        self._proposals.pop(trainer_id, None)

    @property
    def proposal(self) -> tuple[ModelSpec, int]:
        """What was proposed, and the trainer whose values and optimizer state count.

        Of those with the latest values, the lowest rank: under `Bsp` all have them, else whoever stepped last.
        """
        trainer_id = min(
            self._proposals, key=lambda each: (-self.rounds.told_round_of(each), self.rounds.rank_of(each))
        )
        return self._proposals[trainer_id].spec, trainer_id

    def stepped(self, trainer_id: int, step: int) -> None:
        """A trainer has committed a step. If it is a new one, it has given up waiting for the others to propose."""
        proposal = self._proposals.get(trainer_id)
        if proposal is not None and step > proposal.step:
            del self._proposals[trainer_id]

    @property
    def not_proposed(self) -> list[int]:
        """Ranks that a change of the description waits for."""
        return sorted(self.rounds.rank_of(each) for each in self.rounds.attached - self._proposals.keys())

    # Becoming ready

    def shard_created(self, group: ShardGroup) -> None:
        """Notes that a shard exists."""
        group.created = True
        if self.state is ModelState.CREATING and all(each.created for each in self.groups):
            self.state = ModelState.INITIALISING

    def shard_initialised(self, group: ShardGroup, trainer_id: int) -> bool:
        """Notes that a shard holds the values of the present initialiser; True if the model has just become ready."""
        if self.state is not ModelState.INITIALISING or trainer_id != self.initialiser:
            return False
        self._initialised.add(group.shard)
        if len(self._initialised) < len(self.groups):
            return False
        self.state = ModelState.READY
        return True

    @property
    def has_begun(self) -> bool:
        """Whether there may be values on servers that no trainer has. Models without replicas say what they lose."""
        return self.usable or self._replicated or self._replaces

    @property
    def usable(self) -> bool:
        """Whether trainers may begin: it has its values, and the copies that it began with have them as well."""
        if self.state is ModelState.READY and not self._replicated:
            self._replicated = not any(group.settling for group in self.groups)
        return self.state is ModelState.READY and self._replicated

    def may_initialise(self, trainer_id: int) -> bool:
        """Whether this trainer is, or now becomes, the one that sends the initial values.

        In the place of another model only a trainer of that one may: a newcomer does not have what was trained.
        """
        if self.state is not ModelState.INITIALISING:
            return False
        if self.initialiser is None and (not self._replaces or trainer_id in self.rounds.attached):
            self.initialiser = trainer_id
        return self.initialiser == trainer_id

    def trainer_ended(self, trainer_id: int) -> None:
        """Lets another trainer initialise if the initialiser has gone, and expects the trainer in no round."""
        self.rounds.remove(trainer_id)
        self._proposals.pop(trainer_id, None)
        if self.initialiser == trainer_id and self.state in (ModelState.CREATING, ModelState.INITIALISING):
            self.initialiser = None
            self._initialised.clear()

    @property
    def deserted(self) -> bool:
        """Whether it is being put in the place of another, and nobody is left who has the values."""
        return (
            self._replaces and self.state in (ModelState.CREATING, ModelState.INITIALISING) and not self.rounds.attached
        )

    def fail(self, reason: str) -> None:
        """Ends the model; the first reason is kept."""
        if self.state is not ModelState.FAILED:
            self.state, self.failure = ModelState.FAILED, reason


def check_spec(spec: ModelSpec) -> Layout:
    """The layout of a described model; takes no memory for its values.

    Raises:
        UnsupportedModel, UnsupportedOptimizer, InvalidRequest: the model cannot be distributed.
    """
    if not spec.name or len(spec.name) > MAX_NAME_LENGTH:
        raise InvalidRequest(f"a model's name must have 1 to {MAX_NAME_LENGTH} characters, got {spec.name[:64]!r}")
    if not 1 <= spec.world_size <= MAX_WORLD_SIZE:
        raise InvalidRequest(f"world_size must be in 1..{MAX_WORLD_SIZE}, but is {spec.world_size}")
    if not 0 <= spec.replicas <= MAX_REPLICAS:
        raise InvalidRequest(f"replicas must be in 0..{MAX_REPLICAS}, but is {spec.replicas}")
    if spec.buffers not in BUFFER_POLICIES:
        raise InvalidRequest(f"buffers must be one of {list(BUFFER_POLICIES)}, but is {spec.buffers!r}")
    layout = spec.layout()
    spec.coding(layout)
    check_groups(spec.optimizer, spec.optimizer_groups, spec.tensors)
    return layout


def _require_same(ours: ModelSpec, theirs: ModelSpec, what: str) -> None:
    difference = first_difference(ours.tensors, theirs.tensors)
    for field in fields(ModelSpec):
        if difference is None and getattr(ours, field.name) != getattr(theirs, field.name):
            difference = f"{field.name}: expected {getattr(ours, field.name)}, got {getattr(theirs, field.name)}"
    if difference is not None:
        raise LayoutMismatch(
            f"model {ours.name!r} {what}; {difference}. Build the model and its optimizer in the same way and order on "
            "every trainer, or register it under another name"
        )
