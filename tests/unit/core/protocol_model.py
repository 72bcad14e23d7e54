"""A whole cluster without processes, and a reference model of what it must do.

The coordinator and the shards are the real state machines of `pserver.core`. Servers, trainers and the network between
them are simulated here, one event at a time: `SimServer` mirrors `ShardHost` and its service, `SimTrainer` mirrors
`SharedModel`, `Cluster` mirrors `CoordinatorHost`. Every event checks what it can against the `Reference`.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from pserver.client.push_ids import PushIds
from pserver.client.region import Region
from pserver.core.coordinator import Attachment, Coordinator
from pserver.core.messages import (
    AbandonPlan,
    AdmitTrainer,
    Apply,
    Command,
    CommitInfo,
    Committed,
    Contribution,
    CreateShard,
    Decision,
    DropShard,
    EndTrainer,
    FailModel,
    LivingTrainers,
    ModelReady,
    ModelSpec,
    Plan,
    Prepare,
    Refusal,
    Reject,
    Report,
    ShardCreated,
    ShardFailed,
)
from pserver.core.rules import NO_RULES, NORM_EPSILON, GradientRules
from pserver.core.shard import Shard
from pserver.core.staging import Pushed, Staging
from pserver.core.sync import Async, Bsp, Ssp, SyncPolicy, policy_arguments
from pserver.errors import ModelFailed, PserverError, RoundFailed, ServerEnded, StaleEpoch, TrainerEnded, UnknownModel
from pserver.server.shard_memory import MailboxPush
from pserver.types import ClusterStatus, GroupOptions, ModelStatus, PushId, StepResult
from pserver.wire.layout import BUFFERS, STORED, Bucket, TensorSpec, build_layout
from pserver.wire.shared_buckets import BucketOffsets, SharedBuckets
from pserver.wire.tensors import element_type

TRAINER_LEASE_S = 10.0
SERVER_LEASE_S = 1000.0
#: Between two looks of the coordinator at its leases; short enough not to count as a pause.
TICK_S = 1.0
COORDINATOR = "coordinator"
MODEL = "model"
#: After this many rounds of retries in a healed cluster, whatever still waits waits for ever.
MAX_ROUNDS_OF_RETRIES = 40

#: Three parameters in two groups, a buffer that travels with every step, and one that does not.
TENSORS = (
    TensorSpec(name="a", shape=(20,), dtype=torch.float32, group=0),
    TensorSpec(name="b", shape=(3, 5), dtype=torch.float32, group=1),
    TensorSpec(name="c", shape=(7,), dtype=torch.float32, group=0),
    TensorSpec(name="statistics", shape=(5,), dtype=torch.float32, group=BUFFERS),
    TensorSpec(name="constant", shape=(3,), dtype=torch.int64, group=STORED),
)
STEPPED = [index for index, spec in enumerate(TENSORS) if spec.group >= 0]
BUFFER = next(index for index, spec in enumerate(TENSORS) if spec.group == BUFFERS)
EXCHANGED = [*STEPPED, BUFFER]

Tensors = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a cluster trains with; every trainer asks for the same rules."""

    policy: SyncPolicy = field(default_factory=Bsp)
    rules: GradientRules = NO_RULES
    buffers: str = "lowest"


class Form:
    """One way to cut the model into buckets; each change of its description cuts it in the other one."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.layout = build_layout(TENSORS, bucket_bytes)
        self._region = Region(self.layout, BucketOffsets(self.layout.buckets), torch.device("cpu"))

    def pack(self, tensors: Tensors) -> dict[int, bytes]:
        """Tensors by index in `TENSORS` -> bytes by bucket. Buckets of tensors that are not given hold anything."""
        self._region.gather(tensors)
        return {bucket.index: bytes(self._region.bucket_bytes(bucket)) for bucket in self.layout.buckets}

    def mailbox(self, runs: Sequence[range]) -> SharedBuckets:
        """Memory that a trainer and the shard that owns these runs can both see."""
        offsets = BucketOffsets([each for each in self.layout.part(runs) if each.group != STORED])
        return SharedBuckets(memoryview(bytearray(offsets.num_bytes)), offsets)


_FORMS = (Form(64), Form(128))


def form_of(version: int) -> Form:
    """How the model is cut after so many changes of its description."""
    return _FORMS[version % len(_FORMS)]


def make_spec(setup: Setup, world_size: int, version: int) -> ModelSpec:
    """The model of every test here: SGD, whose arithmetic the reference repeats."""
    return ModelSpec(
        name=MODEL,
        tensors=TENSORS,
        bucket_bytes=form_of(version).bucket_bytes,
        optimizer="SGD",
        optimizer_groups=({"lr": 1.0, "foreach": False},) * 2,
        sync_policy=setup.policy.name,
        sync_policy_arguments=policy_arguments(setup.policy),
        world_size=world_size,
        buffers=setup.buffers,
    )


def options_of(lr: float) -> tuple[GroupOptions, ...]:
    """Options of both groups; powers of two, so that products are exact."""
    return ({"lr": lr}, {"lr": 2 * lr})


def integers(index: int, seed: int) -> torch.Tensor:
    """A tensor of small integers that differ from seed to seed; sums of them are exact."""
    spec = TENSORS[index]
    numbers = (torch.arange(spec.num_elements) * (2 * seed + 7) + 5 * seed) % 17 - 8
    return numbers.to(spec.dtype).reshape(spec.shape)


def initial_values(number: int, version: int) -> Tensors:
    """What a trainer has to begin with, or in its hands when the description is changed."""
    return {index: integers(index, 100 + number + 37 * version) for index in range(len(TENSORS))}


# What trainers ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    push_id: PushId
    initialised: int
    replaces: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    push_id: PushId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    push_id: PushId


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialise:
    push_id: PushId
    values: Mapping[int, bytes] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    min_round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """`gradients` None: earlier pushes into the context brought everything, or they are in mailboxes (by server)."""

    push_id: PushId
    context_id: int
    gradients: Mapping[int, bytes] | None = field(repr=False)
    mailboxes: Mapping[str, SharedBuckets] = field(repr=False, default_factory=dict)
    commit: CommitInfo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DropContext:
    push_id: PushId
    context_id: int


CoordinatorCall = Join | Register | Attach | Leave
ShardCall = Initialise | Pull | Push | DropContext


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One call to one or several targets; repeats of it are equal messages. `epoch` and `version` are the model's."""

    trainer: "SimTrainer"
    targets: tuple[str, ...]
    call: CoordinatorCall | ShardCall
    epoch: int
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A call on its way to one target."""

    ask: Ask
    target: str


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An answer, or the error in its place, on its way back."""

    request: Request
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """A shard's values by bucket, all of one round; with what became of the step if they answer a commit."""

    round: int
    buckets: Mapping[int, bytes]
    result: StepResult | None = None


# What an idle trainer may do next


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStep:
    """Commit; `all_pushed` commits what earlier pushes brought, if there were any.

    `odd` puts a NaN into the gradient, if the setup has a rule for that; `overflow` says that loss scaling overflowed.
    """

    samples: int = 1
    lr: float = 1.0
    all_pushed: bool = False
    odd: bool = False
    overflow: bool = False


@dataclass(frozen=True, slots=True)
class PushEarly:
    """Add a gradient to the context of the next step."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Drop the context of the next step."""


@dataclass(frozen=True, slots=True)
class Quit:
    """Leave the cluster."""


@dataclass(frozen=True, slots=True)
class Change:
    """Go on with another description of the model."""


Action = TakeStep | PushEarly | Abandon | Quit | Change


# The reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What one trainer really computed for one step, on the parameters of `base_round`; with its buffer."""

    tensors: Tensors
    samples: int
    options: tuple[GroupOptions, ...]
    base_round: int
    overflow: bool

    def num_nonfinite(self) -> int:
        """NaN and infinite elements."""
        return sum(int((~self.tensors[index].isfinite()).sum()) for index in STEPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Closing:
    """What was known in the call in which a round was closed: members before and after it, and their last commits."""

    before: frozenset[int]
    after: frozenset[int]
    latest: Mapping[int, Gradient]
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """A trainer that attached after `round`, when these others were expected already."""

    round: int
    trainer_id: int
    others: frozenset[int]


class _Epoch:
    """One placement of the model, and its values after each round."""

    def __init__(self, version: int, first_round: int) -> None:
        self.version = version
        self.first_round = first_round
        self.initialiser: int | None = None
        self.tensors: list[Tensors] = []
        self.packed: list[dict[int, bytes]] = []

    @property
    def last_round(self) -> int:
        """The last one of which the decision is known."""
        return self.first_round + len(self.tensors) - 1

    def add(self, tensors: Tensors) -> None:
        """Values after one more round."""
        self.tensors.append(tensors)
        self.packed.append(form_of(self.version).pack(tensors))


class Reference:
    """What must be true, kept from what trainers computed and what left the coordinator."""

    def __init__(self, setup: Setup, world_size: int) -> None:
        self.setup = setup
        self.world_size = world_size
        self.failed = False
        self.server_lost = False
        self.round = 0
        self.epoch = 0
        self.epochs: dict[int, _Epoch] = {}
        self.decisions: dict[int, Decision] = {}
        self.plans: dict[int, Plan] = {}
        self.rejections: dict[tuple[int, int], Refusal] = {}
        self.gradients: dict[tuple[int, int], Gradient] = {}
        self.living: frozenset[int] = frozenset()
        self.ranks: dict[int, int] = {}
        self.since: dict[int, int] = {}
        self.attached: set[int] = set()
        self.complete = not setup.policy.gathers
        self.now_s = 0.0
        #: A change of description that every trainer asks for from a round on.
        self.wanted_version = 0
        self.wanted_from_round = 0
        self._counted: set[tuple[int, int]] = set()
        self._acknowledged: set[tuple[int, int]] = set()
        self._reached: dict[tuple[int, int], set[str]] = {}
        self._heard: dict[tuple[int, int], set[str]] = {}
        self._whole_s: dict[tuple[int, int], float] = {}
        self._latest: dict[int, Gradient] = {}
        self._closings: list[_Closing] = []
        self._told: set[tuple[int, int]] = set()
        self._arrivals: list[_Arrival] = []
        self._clocks: dict[int, int] = {}

    @property
    def expected(self) -> frozenset[int]:
        """Trainers that take part."""
        return frozenset(self.attached) & self.living

    @property
    def version(self) -> int:
        """Of the description that is registered now."""
        return self.epochs[self.epoch].version if self.epochs else 0

    @property
    def ready(self) -> bool:
        """Whether the present placement has its initial values."""
        return bool(self.epochs) and bool(self.epochs[self.epoch].tensors)

    # What is seen of the coordinator

    def observe(self, status: ClusterStatus, now_s: float) -> None:
        """Follows the coordinator after each call to it."""
        before = self.expected
        self.now_s = now_s
        self.complete = self.complete or len(before) >= self.world_size
        self.living = frozenset(each.trainer_id for each in status.trainers)
        self.ranks |= {each.trainer_id: each.rank for each in status.trainers}
        for model in status.models:
            self._observe(model, before)

    def _observe(self, model: ModelStatus, before: frozenset[int]) -> None:
        assert model.round >= self.round, f"the coordinator went back from round {self.round} to {model.round}"
        assert model.round == self.round or not self.failed, "a round was decided after the model had failed"
        closing = _Closing(before=before, after=self.expected, latest=dict(self._latest), now_s=self.now_s)
        self._closings += [closing] * (model.round - self.round)
        self.round = model.round
        self.failed = model.state == "failed"
        deserted = not self.expected and self.wanted_version > 0
        assert not self.failed or self.server_lost or deserted, f"the model failed without a reason: {model.failure}"

    def created(self, command: CreateShard) -> None:
        """A placement of the model is made, or made known again."""
        if command.epoch in self.epochs:
            return
        assert command.epoch > self.epoch, f"{command} follows epoch {self.epoch}"
        assert command.round == self.round, f"the shards of {command} must begin at round {self.round}"
        version = self.version + 1 if self.epochs else 0
        assert command.spec.bucket_bytes == form_of(version).bucket_bytes
        self.epoch = command.epoch
        self.epochs[command.epoch] = _Epoch(version, command.round)
        self._heard.clear()
        self._latest.clear()
        self._told |= {(trainer_id, self.round) for trainer_id in self.expected}

    def asked_to_initialise(self, epoch: int, trainer_id: int) -> None:
        """A trainer is told that it sends the initial values."""
        assert self.version == 0 or trainer_id in self.attached, f"{trainer_id} does not have what was trained"
        self.epochs[epoch].initialiser = trainer_id

    def made_ready(self, command: ModelReady, initial: Tensors) -> None:
        """The values of one trainer become the model's."""
        epoch = self.epochs[command.epoch]
        assert command.initialiser == epoch.initialiser, f"{command}, but {epoch.initialiser} was asked for its values"
        if not epoch.tensors:
            epoch.add(initial)

    def has_attached(self, trainer_id: int, attachment: Attachment) -> None:
        """A trainer takes part from now on."""
        if trainer_id not in self.attached:
            arrival = _Arrival(round=attachment.round, trainer_id=trainer_id, others=self.expected)
            self._arrivals.append(arrival)
            self._told.add((trainer_id, attachment.round))
            self.since[trainer_id] = attachment.round
            self.attached.add(trainer_id)

    # What is seen of gradients

    def computed(self, trainer_id: int, step: int, gradient: Gradient) -> None:
        """A trainer has computed a gradient and is about to commit it."""
        self.gradients[trainer_id, step] = gradient

    def reached(self, server: str, trainer_id: int, step: int) -> None:
        """A shard has taken everything of a step."""
        self._reached.setdefault((trainer_id, step), set()).add(server)

    def heard(self, server: str, report: Committed, owners: frozenset[str], now_s: float) -> None:
        """The coordinator is about to hear that a shard has everything of a step."""
        step = (report.trainer_id, report.commit.step)
        if report.epoch != self.epoch or report.trainer_id not in self.expected or self._is_settled(step):
            return
        servers = self._heard.setdefault(step, set())
        servers.add(server)
        if step not in self._whole_s and servers >= owners:
            self._whole_s[step] = now_s
            self._latest[report.trainer_id] = self.gradients[step]

    def _is_settled(self, step: tuple[int, int]) -> bool:
        return step in self._counted or step in self.rejections

    # What leaves the coordinator

    def prepared(self, command: Prepare, owners: frozenset[str]) -> None:
        """The members of a round leave the coordinator, before its decision."""
        plan = command.plan.plan
        if plan.round in self.plans:
            assert command.plan == self.plans[plan.round], f"round {plan.round} was planned twice"
            return
        assert not plan.skip, f"{command} has nothing to look at"
        assert command.plan.rules == self.setup.rules
        assert self.setup.rules.need_look
        self._close(plan, owners)
        self.plans[plan.round] = command.plan

    def decided(self, command: Apply, owners: frozenset[str]) -> None:
        """A decision leaves the coordinator, for the first time or again."""
        decision = command.decision
        known = self.decisions.get(decision.round)
        if known is not None:
            assert decision == known, f"round {decision.round} was decided twice"
            return
        epoch = self.epochs[command.epoch]
        assert command.epoch == self.epoch
        assert decision.round == epoch.last_round + 1 <= self.round, f"round {decision.round} came out of turn"
        plan = self.plans.get(decision.round)
        if plan is None:
            self._close(decision, owners)
            assert decision.skip or not self.setup.rules.need_look, f"{decision} was not prepared"
            assert (decision.grad_norm, decision.num_nonfinite, decision.error) == (None, 0, "")
            assert (decision.clip_coefficient, decision.clip_value) == (1.0, self.setup.rules.clip_value)
        else:
            self._check_treatment(plan.plan, decision)
        self.decisions[decision.round] = decision
        epoch.add(self._after(epoch.tensors[-1], decision))

    def rejected(self, command: Reject) -> None:
        """A refusal leaves the coordinator, for the first time or again."""
        refusal = command.refusal
        step = (refusal.trainer_id, refusal.step)
        known = self.rejections.get(step)
        if known is not None:
            assert refusal == known, f"step {step} was refused twice"
            return
        assert step not in self._counted, f"step {step} is in a round, and refused"
        assert step in self._whole_s, f"step {step} was refused before every shard had it"
        self._check_reason(refusal, self.gradients[step])
        self.rejections[step] = refusal
        self._told.add((refusal.trainer_id, refusal.round))

    def values(self, epoch: int, round_number: int) -> dict[int, bytes]:
        """Every bucket as it must be after a round."""
        known = self.epochs[epoch]
        return known.packed[round_number - known.first_round]

    def acknowledged(self, trainer_id: int, step: int, result: StepResult) -> None:
        """A trainer has heard what became of its step."""
        key = (trainer_id, step)
        assert key not in self._acknowledged, f"step {key} was acknowledged twice"
        self._acknowledged.add(key)
        if not result.accepted:
            refused = self.rejections[key]
            assert (result.round, result.reason, result.error) == (refused.round, refused.reason, refused.error)
            assert (result.stepped, result.num_trainers, result.staleness) == (False, 0, refused.staleness)
            return
        assert result.round in self.decisions, f"round {result.round} was acknowledged, but never decided"
        decision = self.decisions[result.round]
        counted = {(each.trainer_id, each.step): each for each in decision.contributions}
        assert key in counted, f"step {step} of trainer {trainer_id} is not in round {result.round}"
        assert (result.num_trainers, result.staleness) == (len(counted), counted[key].staleness)
        assert (result.stepped, result.reason, result.error) == (not decision.skip, decision.skip, decision.error)
        assert (result.overflow, result.num_nonfinite) == (decision.overflow, decision.num_nonfinite)
        assert result.grad_norm is decision.grad_norm
        assert result.options == decision.options

    # Whether a round may be what it is

    def _close(self, plan: Decision, owners: frozenset[str]) -> None:
        assert self.complete, "a round was decided before all trainers were there together"
        closing = self._closings[plan.round - 1]
        self._check_members(plan, owners, closing)
        self._check_policy(plan, closing)
        self._check_weights(plan)
        self._check_leading(plan, closing)
        for each in plan.contributions:
            self._counted.add((each.trainer_id, each.step))
            self._told.add((each.trainer_id, plan.round))
            self._clocks[each.trainer_id] += 1

    def _check_members(self, plan: Decision, owners: frozenset[str], closing: _Closing) -> None:
        members = {each.trainer_id for each in plan.contributions}
        assert members, f"{plan} has no members"
        assert members <= closing.before, f"{plan} counts trainers that were not expected"
        ranks = [each.rank for each in plan.contributions]
        assert ranks == sorted(set(ranks)), f"{plan} is not in order of rank"
        assert ranks == [self.ranks[each.trainer_id] for each in plan.contributions]
        for each in plan.contributions:
            step = (each.trainer_id, each.step)
            assert not self._is_settled(step), f"step {step} is counted again by {plan}, or was refused"
            lacking = owners - self._reached.get(step, set())
            assert not lacking, f"{plan} counts step {step}, which {sorted(lacking)} never had"
            age = plan.round - 1 - self.gradients[step].base_round
            assert each.staleness == age, f"{plan}: step {step} is {age} rounds old"

    def _check_policy(self, plan: Decision, closing: _Closing) -> None:
        self._follow_arrivals(plan.round)
        policy = self.setup.policy
        if isinstance(policy, Bsp):
            self._check_bsp(policy, plan, closing)
            return
        (only,) = plan.contributions
        if isinstance(policy, Async):
            bound = policy.max_staleness
            assert bound is None or only.staleness <= bound, f"{plan} is beyond the bound of {policy}"
            return
        assert isinstance(policy, Ssp)
        slowest = min(self._clocks[each] for each in closing.after | {only.trainer_id})
        lag = self._clocks[only.trainer_id] - slowest
        assert lag <= policy.max_lag, f"{plan}: {lag} steps ahead of the slowest, under {policy}"

    def _check_bsp(self, policy: Bsp, plan: Decision, closing: _Closing) -> None:
        members = {each.trainer_id for each in plan.contributions}
        assert all(each.staleness == 0 for each in plan.contributions), f"{plan} counts gradients of other rounds"
        if policy == Bsp():
            assert closing.after <= members, f"{plan} must count every expected trainer"
        in_step = {each for each in closing.after if (each, plan.round - 1) in self._told}
        if in_step <= members or len(members) >= len(closing.after) - policy.backup_workers:
            return
        assert policy.deadline is not None, f"{plan} leaves out {in_step - members}"
        assert policy.absent == "exclude", f"{plan} leaves out {in_step - members}"
        first_s = min(self._whole_s[each.trainer_id, each.step] for each in plan.contributions)
        assert closing.now_s - first_s >= policy.deadline, f"{plan} leaves out {in_step - members} too early"

    def _check_reason(self, refusal: Refusal, gradient: Gradient) -> None:
        policy = self.setup.policy
        age = refusal.round - gradient.base_round
        assert refusal.staleness == age, f"{refusal} is {age} rounds old"
        if isinstance(policy, Bsp) and refusal.error == RoundFailed.__name__:
            assert policy.absent == "fail"
            assert age == 0
            waited_s = self.now_s - self._whole_s[refusal.trainer_id, refusal.step]
            assert waited_s >= 0
        elif isinstance(policy, Bsp):
            assert age > 0, f"{refusal} is not late"
            assert policy != Bsp(), f"{refusal}, but every round takes every trainer"
        else:
            assert isinstance(policy, Async), f"{refusal}, but {policy} refuses nothing"
            assert policy.max_staleness is not None
            assert age > policy.max_staleness

    def _follow_arrivals(self, round_number: int) -> None:
        """Trainers that attached before this round begin where the slowest of the others was."""
        while self._arrivals and self._arrivals[0].round < round_number:
            arrival = self._arrivals.pop(0)
            others = [self._clocks[each] for each in arrival.others]
            self._clocks[arrival.trainer_id] = min(others, default=0)

    def _check_weights(self, plan: Decision) -> None:
        gradients = [self._gradient(each) for each in plan.contributions]
        common = math.gcd(*(each.samples for each in gradients)) or 1
        assert [each.weight for each in plan.contributions] == [each.samples // common for each in gradients]
        assert plan.divisor == sum(each.samples // common for each in gradients)
        assert plan.overflow == any(each.overflow for each in gradients)
        assert bool(plan.skip) == (plan.overflow or not plan.divisor)

    def _check_leading(self, plan: Decision, closing: _Closing) -> None:
        """Options and buffers are the leader's: of those at the end of the call, or before others had ended."""
        members = {each.trainer_id for each in plan.contributions}
        electorates = [closing.after | members, closing.before]
        ranked = [sorted(each & closing.latest.keys(), key=self._seniority) for each in electorates]
        between = [each for each in ranked[1] if self._seniority(each) <= self._seniority(ranked[0][0])]
        leaders = [closing.latest[each].options for each in (ranked[0][0], *between)]
        assert plan.options in leaders, f"{plan} must take the options of whoever leads, {leaders}"
        present = [each for each in plan.contributions if each.weight]
        if self.setup.buffers != "lowest" or not present:
            assert plan.buffers_from == 0
        elif not self.setup.policy.mixed_rounds:
            assert plan.buffers_from == present[0].trainer_id
        else:
            contributing = [{each for each in some if closing.latest[each].samples} for some in ranked]
            lowest = {min(self.ranks[each] for each in some) for some in contributing}
            allowed = {present[0].trainer_id if present[0].rank == rank else 0 for rank in lowest}
            assert plan.buffers_from in allowed, f"{plan} must take the buffers of the lowest rank of all, or none"

    def _seniority(self, trainer_id: int) -> tuple[int, int]:
        """Those who have been there longest lead, and of them the lowest rank."""
        return self.since[trainer_id], self.ranks[trainer_id]

    # Arithmetic

    def _check_treatment(self, plan: Decision, decision: Decision) -> None:
        rules = self.setup.rules
        counted = [self._gradient(each) for each in plan.contributions if each.weight]
        num_nonfinite = sum(each.num_nonfinite() for each in counted) if rules.look_for_nonfinite else 0
        assert decision.num_nonfinite == num_nonfinite
        assert bool(decision.skip) == bool(num_nonfinite)
        coefficient = 1.0
        if rules.max_norm is None:
            assert decision.grad_norm is None
        elif not num_nonfinite:
            norm = math.sqrt(sum(self._mean(plan, index).double().square().sum().item() for index in STEPPED))
            assert decision.grad_norm is not None
            assert math.isclose(decision.grad_norm, norm, rel_tol=1e-9), f"{decision} has the norm {norm}"
            coefficient = min(1.0, rules.max_norm / (decision.grad_norm + NORM_EPSILON))
        assert num_nonfinite or decision.clip_coefficient == coefficient
        expected = replace(
            plan,
            clip_coefficient=decision.clip_coefficient,
            clip_value=rules.clip_value,
            skip=decision.skip,
            error=decision.error,
            grad_norm=decision.grad_norm,
            num_nonfinite=num_nonfinite,
        )
        assert decision == expected, f"{decision} is not what was planned: {plan}"

    def _after(self, before: Tensors, decision: Decision) -> Tensors:
        after = dict(before)
        for index in STEPPED if decision.divisor and not decision.skip else ():
            mean = self._mean(decision, index)
            if decision.clip_coefficient != 1.0:
                mean = mean * decision.clip_coefficient
            if decision.clip_value is not None:
                mean = mean.clamp(-decision.clip_value, decision.clip_value)
            after[index] = before[index] - decision.options[TENSORS[index].group]["lr"] * mean
        if decision.divisor and self.setup.buffers == "mean":
            after[BUFFER] = self._mean(decision, BUFFER)
        for each in decision.contributions:
            if each.trainer_id == decision.buffers_from:
                after[BUFFER] = self._gradient(each).tensors[BUFFER]
        return after

    def _mean(self, decision: Decision, index: int) -> torch.Tensor:
        total = torch.zeros(TENSORS[index].shape)
        for each in decision.contributions:
            if each.weight:
                total = total + self._gradient(each).tensors[index] * each.weight
        return total / decision.divisor

    def _gradient(self, contribution: Contribution) -> Gradient:
        return self.gradients[contribution.trainer_id, contribution.step]


class Ledger:
    """What one shard may remember of trainers, kept from outside of it."""

    def __init__(self) -> None:
        self._initial: set[int] = set()
        self._contexts: dict[tuple[int, int], int | None] = {}
        self._unacknowledged: dict[int, set[int]] = {}
        self._lowest: dict[int, int] = {}

    def arrived(self, push_id: PushId) -> None:
        """A mutation has come, with the acknowledgement it carries."""
        lowest = max(push_id.lowest_unacknowledged, self._lowest.get(push_id.trainer_id, 1))
        self._lowest[push_id.trainer_id] = lowest
        known = self._unacknowledged.get(push_id.trainer_id, set())
        self._unacknowledged[push_id.trainer_id] = {each for each in known if each >= lowest}

    def carried_out(self, push_id: PushId) -> bool:
        """Notes that a mutation was carried out, or was a repeat; True if it was new."""
        known = self._unacknowledged[push_id.trainer_id]
        new = push_id.sequence not in known
        known.add(push_id.sequence)
        return new

    def initialised(self, trainer_id: int) -> None:
        """Initial values came from a trainer."""
        self._initial.add(trainer_id)

    def made_ready(self) -> None:
        """The initial values of one trainer were taken, all others are of no use."""
        self._initial.clear()

    def pushed(self, trainer_id: int, context_id: int, step: int | None) -> None:
        """A gradient went into a context; with a step, the context is committed."""
        self._contexts[trainer_id, context_id] = step

    def dropped(self, trainer_id: int, context_id: int) -> None:
        """A context was dropped."""
        self._contexts.pop((trainer_id, context_id), None)

    def refused(self, trainer_id: int, step: int) -> None:
        """A step enters no round; its context is freed."""
        known = [key for key, committed in self._contexts.items() if key[0] == trainer_id and committed == step]
        for key in known:
            del self._contexts[key]

    def taken(self, decision: Decision) -> None:
        """A round has taken the contexts that it counts."""
        counted = {(each.trainer_id, each.step) for each in decision.contributions}
        self._contexts = {key: step for key, step in self._contexts.items() if (key[0], step) not in counted}

    def ended(self, trainer_id: int) -> None:
        """Everything of a trainer must go."""
        self._initial.discard(trainer_id)
        self._contexts = {key: step for key, step in self._contexts.items() if key[0] != trainer_id}
        self._unacknowledged.pop(trainer_id, None)
        self._lowest.pop(trainer_id, None)

    @property
    def trainers(self) -> set[int]:
        """Trainers of whom something is remembered."""
        return {trainer_id for trainer_id, _ in self._contexts} | self._unacknowledged.keys() | self._lowest.keys()

    def check(self, shard: Shard, ended: set[int]) -> None:
        """Compares with the shard; looks inside it, since memory that leaks shows nowhere else."""
        contexts, outcomes = set(shard._contexts._contexts), shard._outcomes
        assert contexts == set(self._contexts), f"contexts {contexts} are held, expected {set(self._contexts)}"
        assert shard._initial.keys() == self._initial, f"initial values of {shard._initial.keys()} are held"
        expected = sum(len(each) for each in self._unacknowledged.values())
        assert len(outcomes) == expected, f"{len(outcomes)} outcomes are remembered, expected {expected}"
        remembered = outcomes._outcomes.keys() | outcomes._lowest.keys() | shard._last_step.keys()
        assert not remembered & ended, f"ended trainers {remembered & ended} are still remembered"


# Servers


@dataclass(slots=True, eq=False)
class Link:
    """One connection of a server to the coordinator. Keeps the order of messages both ways, until it breaks."""

    server: str
    incarnation: int
    up: deque[Report] = field(default_factory=deque)
    down: deque[Command | None] = field(default_factory=lambda: deque([None]))
    admitted: set[int] | None = None
    broken: bool = False

    def tell(self, command: Command, *, planned: Collection[int]) -> None:
        """The coordinator says something. What it says of a trainer before and after its end must be in that order.

        Args:
            planned: rounds whose members every shard has been told already.
        """
        if isinstance(command, LivingTrainers):
            assert self.admitted is None, "who lives is told once"
            self.admitted = set(command.trainer_ids)
        elif isinstance(command, AdmitTrainer):
            assert self.admitted is not None
            self.admitted.add(command.trainer_id)
        elif isinstance(command, EndTrainer):
            assert self.admitted is not None
            self.admitted.discard(command.trainer_id)
        elif isinstance(command, Prepare):
            self._check_order(command, command.plan.plan)
        elif isinstance(command, Apply) and command.decision.round not in planned:
            self._check_order(command, command.decision)
        if not self.broken:
            self.down.append(command)

    def _check_order(self, command: Command, decision: Decision) -> None:
        members = {each.trainer_id for each in decision.contributions}
        assert self.admitted is None or members <= self.admitted, f"{command} follows the end of {members}"


#: Answers one call that waits; None as long as it must wait.
Poll = Callable[[], Any]


class SimServer:
    """Mirrors `ShardHost`, `ShardService` and `CoordinatorLink` for one process at a time."""

    def __init__(self, name: str, reference: Reference, answer: Callable[[Request, Any], None]) -> None:
        self.name = name
        self.incarnation = 0
        self.running = False
        self._reference = reference
        self._answer = answer
        self.start()

    def start(self) -> None:
        """A new process with nothing in memory."""
        self.incarnation += 1
        self.running = True
        self.breaks_down = False
        self.link: Link | None = None
        self.shard: Shard | None = None
        self.living: set[int] = set()
        self.ended: set[int] = set()
        self._highest_id = 0
        self._welcomed = False
        self._too_early: dict[Ask, Request] = {}
        self._ledger = Ledger()
        self._waiting: dict[Ask, tuple[Request, Poll]] = {}
        self._last_round = 0

    def stop(self) -> None:
        """The process dies; what waited there gets no answer."""
        self.running = False
        self.shard = None
        self.link = None
        self._waiting.clear()
        self._too_early.clear()

    def begin_anew(self) -> None:
        """The coordinator counts on this server no longer: it drops what it has, and is as good as a new process."""
        self.shard = None
        self._look_again()
        too_early = self._too_early
        self.start()
        self._too_early = too_early

    def __repr__(self) -> str:
        return self.name

    def connect(self) -> Link:
        """Opens a new link; reports go out once the coordinator's welcome has come."""
        self.link = Link(self.name, self.incarnation)
        self._welcomed = False
        return self.link

    def disconnect(self) -> None:
        """The link is gone."""
        self.link = None
        self._welcomed = False

    @property
    def remembers(self) -> set[int]:
        """Trainers of whom the shard should hold something."""
        return self._ledger.trainers

    @property
    def holds(self) -> Set[Ask]:
        """Calls that wait here."""
        return self._waiting.keys() | self._too_early.keys()

    # Commands and reports

    def handle(self, command: Command | None) -> None:
        """Carries out a command; None is the welcome."""
        if command is None:
            self._welcomed = True
            for report in self.shard.reports() if self.shard is not None else ():
                self._report(report)
        elif isinstance(command, CreateShard):
            self._create(command)
        elif isinstance(command, AdmitTrainer):
            self._admit([command.trainer_id])
        elif isinstance(command, LivingTrainers):
            for trainer_id in self.living - set(command.trainer_ids):
                self._end_trainer(trainer_id)
            self._admit(command.trainer_ids)
        elif isinstance(command, EndTrainer):
            self._end_trainer(command.trainer_id)
        elif self.shard is not None and self.shard.epoch <= command.epoch:
            assert self.shard.number == command.shard, f"{self.name} was told {command}"
            self._handle_for(self.shard, command)
        self._look_again()

    def check(self) -> None:
        """Whether the shard is where the reference says it must be."""
        shard = self.shard
        if shard is None:
            return
        assert self._last_round <= shard.round <= self._reference.round, f"{self.name} is at round {shard.round}"
        assert shard.failure is None or shard.round == self._last_round, f"{self.name} has failed, but goes on"
        self._last_round = shard.round
        if shard.ready:
            expected = self._reference.values(shard.epoch, shard.round)
            for bucket in shard.buckets:
                where = f"{self.name}, bucket {bucket.index}, round {shard.round}"
                assert shard.read(bucket.index).tobytes() == expected[bucket.index], f"{where}: other values"
        self._ledger.check(shard, self.ended)

    def _handle_for(self, shard: Shard, command: Command) -> None:
        if isinstance(command, FailModel):
            shard.failure = shard.failure or command.reason
        elif isinstance(command, DropShard):
            self.shard = None
        elif shard.epoch != command.epoch:
            return
        elif isinstance(command, Reject):
            shard.reject(command.refusal)
            self._ledger.refused(command.refusal.trainer_id, command.refusal.step)
        elif isinstance(command, AbandonPlan):
            for report in shard.abandon_plan():
                self._report(report)
        else:
            assert isinstance(command, ModelReady | Prepare | Apply), f"{self.name} was told {command}"
            try:
                self._compute(shard, command)
            except (MemoryError, ModelFailed) as error:
                shard.failure = shard.failure or str(error)
                self._report(ShardFailed(model=MODEL, shard=shard.number, epoch=shard.epoch, failure=str(error)))

    def _compute(self, shard: Shard, command: ModelReady | Prepare | Apply) -> None:
        if self.breaks_down and self._is_new(shard, command):
            self.breaks_down = False
            raise MemoryError("out of memory")
        if isinstance(command, ModelReady):
            shard.make_ready(command.initialiser)
            self._ledger.made_ready()
        elif isinstance(command, Prepare):
            self._report(shard.prepare(command.plan))
            self._ledger.taken(command.plan.plan)
        else:
            self._report(shard.apply(command.decision))
            self._ledger.taken(command.decision)

    @staticmethod
    def _is_new(shard: Shard, command: ModelReady | Prepare | Apply) -> bool:
        if isinstance(command, ModelReady):
            return not shard.ready
        return isinstance(command, Prepare) or command.decision.round > shard.round

    def _create(self, command: CreateShard) -> None:
        if self.shard is None or self.shard.epoch != command.epoch:
            self.shard = Shard(command)
            self._ledger = Ledger()
            self._last_round = command.round
            self._report(ShardCreated(model=MODEL, shard=command.shard, epoch=command.epoch))

    def _admit(self, trainer_ids: Collection[int]) -> None:
        self.living.update(trainer_ids)
        self._highest_id = max([self._highest_id, *trainer_ids])
        for ask, request in list(self._too_early.items()):
            if ask.trainer.trainer_id <= self._highest_id:
                del self._too_early[ask]
                self.serve(request)

    def _end_trainer(self, trainer_id: int) -> None:
        self.living.discard(trainer_id)
        self.ended.add(trainer_id)
        self._highest_id = max(self._highest_id, trainer_id)
        if self.shard is not None:
            self.shard.end_trainer(trainer_id)
        self._ledger.ended(trainer_id)

    def _report(self, report: Report) -> None:
        if self.link is not None and self._welcomed:
            self.link.up.append(report)

    # Calls of trainers

    def serve(self, request: Request) -> None:
        """Carries out a trainer's call, and answers it now or later."""
        if request.ask.trainer.trainer_id > self._highest_id:
            self._too_early[request.ask] = request
            return
        try:
            poll = self._carry_out(request.ask)
        except PserverError as error:
            self._answer(request, error)
            return
        self._waiting[request.ask] = (request, poll)
        self._look_again()

    def _look_again(self) -> None:
        for ask, (request, poll) in list(self._waiting.items()):
            try:
                value = poll()
            except PserverError as error:
                value = error
            if value is not None:
                del self._waiting[ask]
                self._answer(request, value)

    def _carry_out(self, ask: Ask) -> Poll:
        call, trainer_id = ask.call, ask.trainer.trainer_id
        if trainer_id not in self.living:
            raise TrainerEnded(f"{self.name} refuses trainer {trainer_id}")
        if self.shard is None:
            raise UnknownModel(f"{self.name} holds no shard")
        self.shard.check(ask.epoch, form_of(ask.version).layout.fingerprint)
        if isinstance(call, Pull):
            return partial(self._pulled, self.shard, call.min_round)
        assert isinstance(call, Initialise | Push | DropContext)
        self._ledger.arrived(call.push_id)
        if isinstance(call, Initialise):
            self._report(self.shard.initialise(call.push_id, _staged(self.shard.buckets, call.values), {}))
            if self._ledger.carried_out(call.push_id):
                self._ledger.initialised(call.push_id.trainer_id)
        elif isinstance(call, DropContext):
            self.shard.drop_context(call.push_id, call.context_id)
            if self._ledger.carried_out(call.push_id):
                self._ledger.dropped(call.push_id.trainer_id, call.context_id)
        else:
            self._push(self.shard, call)
            if call.commit is not None:
                return partial(self._stepped, self.shard, call.push_id)
        return lambda: True

    def _push(self, shard: Shard, call: Push) -> None:
        pushed: Pushed = _staged(shard.exchanged, call.gradients or {})
        if call.mailboxes:
            pushed = MailboxPush(call.mailboxes[self.name], call.push_id)
        report = shard.push(call.push_id, call.context_id, pushed, frozenset(), call.commit)
        if report is not None:
            self._report(report)
        if not self._ledger.carried_out(call.push_id):
            return
        step = call.commit.step if call.commit is not None else None
        self._ledger.pushed(call.push_id.trainer_id, call.context_id, step)
        if step is not None:
            self._reference.reached(self.name, call.push_id.trainer_id, step)

    def _check_usable(self, shard: Shard) -> None:
        if shard is not self.shard:
            raise StaleEpoch(f"{self.name} has another shard now, or none")
        if shard.failure is not None:
            raise ModelFailed(shard.failure)

    def _pulled(self, shard: Shard, min_round: int) -> Values | None:
        self._check_usable(shard)
        if shard.round < min_round or not shard.ready:
            return None
        return self._read(shard)

    def _stepped(self, shard: Shard, push_id: PushId) -> Values | None:
        self._check_usable(shard)
        outcome = shard.outcome(push_id)
        if outcome is None:
            raise TrainerEnded(f"{self.name} has ended trainer {push_id.trainer_id}")
        return self._read(shard, outcome) if isinstance(outcome, StepResult) else None

    @staticmethod
    def _read(shard: Shard, result: StepResult | None = None) -> Values:
        buckets = {each.index: shard.read(each.index).tobytes() for each in shard.buckets}
        return Values(round=shard.round, buckets=buckets, result=result)


def _staged(buckets: Sequence[Bucket], content: Mapping[int, bytes]) -> Staging:
    staging = Staging(buckets)
    for bucket in buckets:
        if bucket.index in content:
            staging.add_chunk(bucket.index, 0, element_type(bucket.dtype).code, content[bucket.index])
    return staging


# Trainers


class SimTrainer:
    """Mirrors `SharedModel` and its optimizer: one call at a time, each repeated until it is answered.

    Args:
        number: makes its initial values and its gradients differ from everybody else's. Those with an even one are on
            the servers' machine: their gradients lie in memory, and are written over as soon as the next are there.
        post: sends a request.
    """

    def __init__(self, number: int, reference: Reference, post: Callable[[Request], None]) -> None:
        self.number = number
        self.trainer_id: int | None = None
        self.epoch = 0
        self.version = 0
        self.attached = False
        self.running = True
        self.renews = True
        self.has_renewed = False
        self.ask: Ask | None = None
        self._reference = reference
        self._setup = reference.setup
        self._post = post
        self._answers: dict[str, Any] = {}
        self._push_ids = PushIds(0)
        self._shards: tuple[str, ...] = ()
        self._mailboxes: dict[str, SharedBuckets] = {}
        self._base_round = 0
        self._step = 0
        self._context_id = 1
        self._early: list[Tensors] = []
        self._num_gradients = 0
        self._life = self._live()
        self._go_on(None)

    def __repr__(self) -> str:
        return f"trainer {self.trainer_id}"

    @property
    def idle(self) -> bool:
        """Whether it could take a step now."""
        return self.running and self.ask is None

    @property
    def steps(self) -> bool:
        """Whether it waits for a round."""
        return self.ask is not None and isinstance(self.ask.call, Push) and self.ask.call.commit is not None

    def act(self, action: Action) -> None:
        """Tells an idle trainer what to do next; a change of description that all take part in comes first."""
        assert self.idle
        self._go_on(Change() if self.must_change else action)

    @property
    def must_change(self) -> bool:
        """Whether it has come to where everybody asks for another description."""
        reference = self._reference
        return self.version < reference.wanted_version and self._base_round >= reference.wanted_from_round

    @property
    def changes(self) -> bool:
        """Whether it waits for the others to change the description."""
        return self.ask is not None and isinstance(self.ask.call, Register) and self.ask.call.replaces > 0

    def send(self) -> None:
        """Sends its call to everybody who has not answered; again, if it was sent before."""
        for request in self.unanswered:
            self._post(request)

    @property
    def unanswered(self) -> list[Request]:
        """Requests that it lacks an answer to."""
        targets = self.ask.targets if self.ask is not None else ()
        return [Request(self.ask, target) for target in targets if target not in self._answers]

    def crash(self) -> None:
        """The process dies."""
        self.running = self.renews = False
        self.ask = None
        self._life.close()

    def take(self, reply: Reply) -> None:
        """An answer comes. Those to earlier calls, and repeated ones, mean nothing."""
        target = reply.request.target
        if reply.request.ask is not self.ask or target in self._answers:
            return
        if isinstance(reply.value, PserverError):
            self._check_refusal(reply.value)
            self.crash()
            return
        self._answers[target] = reply.value
        if len(self._answers) == len(self.ask.targets):
            self._go_on(self._answers)

    def _go_on(self, value: Any) -> None:
        try:
            self.ask = self._life.send(value)
        except StopIteration:
            self.crash()
            return
        self._answers = {}
        self.send()

    def _check_refusal(self, error: PserverError) -> None:
        """A trainer that does nothing wrong is refused only if its lease has ended or the model has lost a server."""
        reference = self._reference
        if isinstance(error, TrainerEnded):
            assert not (self.renews and self.trainer_id in reference.living), f"{self.ask}: {error}"
        elif isinstance(error, StaleEpoch | UnknownModel) and self.epoch != reference.epoch:
            assert not self.attached, f"{self.ask}: {error!r}"  # the model was changed before it took part
        else:
            # For a shard that is not where it was it looks elsewhere, and learns that the model has failed.
            assert isinstance(error, ModelFailed | UnknownModel | StaleEpoch), f"{self.ask}: {error!r}"
            assert reference.server_lost or reference.failed, f"{self.ask}: {error!r}"

    # What it does, in order

    def _live(self) -> Generator[Ask | None, Any, None]:
        self.trainer_id = yield from self._coordinator(Join(nonce=f"nonce {self.number}"))
        self._push_ids = PushIds(self.trainer_id)
        yield from self._take_part(replaces=0)
        while not isinstance(action := (yield None), Quit):
            if isinstance(action, TakeStep):
                yield from self._take_step(action)
            elif isinstance(action, PushEarly):
                yield from self._push_early()
            elif isinstance(action, Change):
                self.version += 1
                self._new_context()
                yield from self._take_part(replaces=self.epoch)
            else:
                yield from self._abandon()
        self.renews = False
        with self._push_ids.one() as push_id:
            yield from self._coordinator(Leave(push_id=push_id))

    def _take_part(self, replaces: int) -> Generator[Ask, Any, None]:
        initialised = 0
        while (yield from self._register(initialised, replaces)):
            values = form_of(self.version).pack(initial_values(self.number, self.version))
            with self._push_ids.one() as push_id:
                yield from self._every_shard(Initialise(push_id=push_id, values=values))
            initialised = self.epoch
        with self._push_ids.one() as push_id:
            attachment = yield from self._coordinator(Attach(push_id=push_id, epoch=self.epoch))
        yield from self._receive((yield from self._every_shard(Pull(min_round=attachment.round))))
        self.attached = True
        assert self._base_round >= attachment.round
        assert self._base_round == attachment.round or self._setup.policy != Bsp()

    def _register(self, initialised: int, replaces: int) -> Generator[Ask, Any, bool]:
        with self._push_ids.one() as push_id:
            call = Register(push_id=push_id, initialised=initialised, replaces=replaces)
            registration = yield from self._coordinator(call)
        self.epoch = registration.epoch
        self.version = self._reference.epochs[self.epoch].version
        self._shards = tuple(each.server for each in registration.placement)
        if self.number % 2 == 0:
            form = form_of(self.version)
            self._mailboxes = {each.server: form.mailbox(each.runs) for each in registration.placement}
        return registration.initialise

    def _take_step(self, action: TakeStep) -> Generator[Ask, Any, None]:
        all_pushed = action.all_pushed and bool(self._early)
        if not all_pushed:
            self._early.append(self._gradient(odd=action.odd and self._setup.rules.look_for_nonfinite))
        self._step += 1
        options = options_of(action.lr)
        gradient = Gradient(
            tensors={index: torch.stack([each[index] for each in self._early]).sum(0) for index in STEPPED}
            | {BUFFER: self._early[-1][BUFFER]},
            samples=action.samples,
            options=options,
            base_round=self._base_round,
            overflow=action.overflow,
        )
        self._reference.computed(self.trainer_id, self._step, gradient)
        commit = CommitInfo(
            step=self._step,
            base_round=self._base_round,
            samples=action.samples,
            options=options,
            rules=self._setup.rules,
            overflow=action.overflow,
        )
        with self._push_ids.one() as push_id:
            push = self._pushing(push_id, None if all_pushed else self._early[-1], commit)
            answers = yield from self._every_shard(push)
        self._new_context()
        result, *others = [each.result for each in answers.values()]
        assert all(other == result for other in others), f"shards disagree about step {self._step}: {result}, {others}"
        self._reference.acknowledged(self.trainer_id, self._step, result)
        yield from self._receive(answers)
        assert self._base_round >= result.round or self._setup.policy.mixed_rounds
        assert self._base_round == result.round or self._setup.policy != Bsp()

    def _push_early(self) -> Generator[Ask, Any, None]:
        self._early.append(self._gradient())
        with self._push_ids.one() as push_id:
            yield from self._every_shard(self._pushing(push_id, self._early[-1], None))

    def _pushing(self, push_id: PushId, tensors: Tensors | None, commit: CommitInfo | None) -> Push:
        """Gradients on their way: in the message, or written into the mailboxes now."""
        content = None if tensors is None else form_of(self.version).pack(tensors)
        if content is None or not self._mailboxes:
            return Push(push_id=push_id, context_id=self._context_id, gradients=content, commit=commit)
        for mailbox in self._mailboxes.values():
            for bucket in mailbox.offsets.buckets:
                mailbox.bytes_of(bucket.index)[:] = content[bucket.index]
                mailbox.set_word(bucket.index, push_id.sequence)
        return Push(
            push_id=push_id,
            context_id=self._context_id,
            gradients=None,
            mailboxes=self._mailboxes,
            commit=commit,
        )

    def _abandon(self) -> Generator[Ask, Any, None]:
        with self._push_ids.one() as push_id:
            yield from self._every_shard(DropContext(push_id=push_id, context_id=self._context_id))
        self._new_context()

    def _coordinator(self, call: CoordinatorCall) -> Generator[Ask, Any, Any]:
        answers = yield self._asking((COORDINATOR,), call)
        return answers[COORDINATOR]

    def _every_shard(self, call: ShardCall) -> Generator[Ask, Any, dict[str, Any]]:
        return (yield self._asking(self._shards, call))

    def _asking(self, targets: tuple[str, ...], call: CoordinatorCall | ShardCall) -> Ask:
        return Ask(self, targets, call, self.epoch, self.version)

    def _receive(self, answers: Mapping[str, Values]) -> Generator[Ask, Any, None]:
        """Takes the parameters of every shard: of one round, unless the policy allows a mix."""
        while not self._setup.policy.mixed_rounds and len(rounds := {each.round for each in answers.values()}) > 1:
            assert self._setup.policy != Bsp(), f"{self} was sent a mix of the rounds {rounds}"
            answers = yield from self._every_shard(Pull(min_round=max(rounds)))
        self._base_round = min(each.round for each in answers.values())
        for server, each in answers.items():
            expected = self._reference.values(self.epoch, each.round)
            for bucket, data in each.buckets.items():
                assert data == expected[bucket], f"{server} sent other values of bucket {bucket} after {each.round}"

    def _gradient(self, *, odd: bool = False) -> Tensors:
        self._num_gradients += 1
        gradient = {index: integers(index, 31 * self.number + self._num_gradients) for index in EXCHANGED}
        if odd:
            gradient[STEPPED[self._num_gradients % len(STEPPED)]].view(-1)[-1] = math.nan
        return gradient

    def _new_context(self) -> None:
        self._context_id += 1
        self._early = []


# The whole


class Cluster:
    """Coordinator, servers, trainers, and every message between them. Nothing moves unless it is told to."""

    def __init__(self, setup: Setup, *, num_servers: int, world_size: int) -> None:
        self.now_s = 0.0
        self.reference = Reference(setup, world_size)
        self.requests: list[Request] = []
        self.replies: list[Reply] = []
        self._messages: list[tuple[object, object, object]] = []
        self.trainers: list[SimTrainer] = []
        self._core = Coordinator(
            trainer_lease_s=TRAINER_LEASE_S,
            server_lease_s=SERVER_LEASE_S,
            min_servers=num_servers,
            first_trainer_id=1,
            now_s=self.now_s,
        )
        self._ids: dict[str, int] = {}
        self._links: dict[str, Link] = {}
        self._old_links: list[Link] = []
        self._waiting: dict[Ask, Request] = {}
        names = [f"s{number}" for number in range(num_servers)]
        self.servers = [SimServer(name, self.reference, self._answer) for name in names]
        for server in self.servers:
            self.relink(server)

    # Trainers

    def join(self) -> SimTrainer:
        """Starts a trainer."""
        trainer = SimTrainer(len(self.trainers) + 1, self.reference, self.requests.append)
        self.trainers.append(trainer)
        return trainer

    @property
    def running_trainers(self) -> list[SimTrainer]:
        """Trainers whose process runs."""
        return [each for each in self.trainers if each.running]

    @property
    def idle_trainers(self) -> list[SimTrainer]:
        """Trainers that could take a step."""
        return [each for each in self.trainers if each.idle]

    @property
    def waiting_trainers(self) -> list[SimTrainer]:
        """Trainers that wait for an answer."""
        return [each for each in self.running_trainers if not each.idle]

    @property
    def running_servers(self) -> list[SimServer]:
        """Servers whose process runs."""
        return [each for each in self.servers if each.running]

    # Messages

    def events(self, *, to_shards: bool = True) -> list[Callable[[], None]]:
        """Every message that may arrive next; calling one delivers it.

        Args:
            to_shards: whether to count those from trainers to shards.
        """
        requests = [each for each in self.requests if to_shards or each.target == COORDINATOR]
        return [
            *self._link_events(),
            *(partial(self.deliver_request, each) for each in requests),
            *(partial(self._deliver_reply, each) for each in self.replies),
        ]

    def _link_events(self) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        for server in self.servers:
            if server.link is not None and server.link.down:
                events.append(partial(self._deliver_command, server, server.link))
        for link in [*self._links.values(), *self._old_links]:
            if link.up:
                events.append(partial(self._deliver_report, link))
        return events

    def deliver_all(self, *, to_shards: bool = True) -> None:
        """Delivers `events` until there are none, those of links first."""
        while events := self.events(to_shards=to_shards):
            events[0]()

    def deliver_request(self, request: Request, *, keep: bool = False) -> None:
        """A request arrives; with `keep` it will arrive once more, some time."""
        if not keep:
            self.requests.remove(request)
        self._trace(request.ask.trainer, request.target, request.ask.call)
        if request.target == COORDINATOR:
            self._serve(request)
            return
        server = next(each for each in self.servers if each.name == request.target)
        if server.running:
            server.serve(request)
            server.check()

    def lose(self, message: Request | Reply) -> None:
        """A message of a trainer, or to one, is lost."""
        if isinstance(message, Request):
            self.requests.remove(message)
        else:
            self.replies.remove(message)

    def _deliver_reply(self, reply: Reply) -> None:
        self.replies.remove(reply)
        self._trace(reply.request.target, reply.request.ask.trainer, reply.value)
        reply.request.ask.trainer.take(reply)

    def _deliver_command(self, server: SimServer, link: Link) -> None:
        command = link.down.popleft()
        self._trace(COORDINATOR, server, command)
        server.handle(command)
        server.check()

    def _deliver_report(self, link: Link) -> None:
        report = link.up.popleft()
        self._trace(link.server, COORDINATOR, report)
        if self._core.server_heard(link.server, self.now_s):
            if isinstance(report, Committed):
                self.reference.heard(link.server, report, self._owners, self.now_s)
            self._core.report(link.server, report, self.now_s)
            self._changed()
        else:
            self._end_link(link)

    def _trace(self, sender: object, receiver: object, message: object) -> None:
        self._messages.append((sender, receiver, message))

    @property
    def trace(self) -> list[str]:
        """Every message that has arrived, for whoever looks into a failure."""
        return [f"{sender} -> {receiver}: {str(message)[:200]}" for sender, receiver, message in self._messages]

    def _answer(self, request: Request, value: Any) -> None:
        self.replies.append(Reply(request, value))

    # The coordinator

    def _serve(self, request: Request) -> None:
        self._waiting[request.ask] = request
        self._look_again()

    def _look_again(self) -> None:
        """Calls that wait look again; all but registrations are answered at once.

        The last to ask looks first: it is the one with the least right to be asked for initial values.
        """
        for request in reversed(list(self._waiting.values())):
            try:
                value = self._call(request.ask)
            except PserverError as error:
                value = error
            if value is not None:
                del self._waiting[request.ask]
                self._answer(request, value)
                self._follow()
        self._follow()

    def _call(self, ask: Ask) -> Any:
        call = ask.call
        if isinstance(call, Join):
            trainer_id = self._core.join(call.nonce, -1, self.now_s).trainer_id
            assert self._ids.setdefault(call.nonce, trainer_id) == trainer_id, f"{call} made two trainers"
            return trainer_id
        if isinstance(call, Register):
            return self._register(ask, call)
        if isinstance(call, Attach):
            attachment = self._core.attach(call.push_id, MODEL, call.epoch, self.now_s)
            self.reference.has_attached(call.push_id.trainer_id, attachment)
            return attachment
        assert isinstance(call, Leave)
        self._core.leave(call.push_id, self.now_s)
        return True

    def _register(self, ask: Ask, call: Register) -> Any:
        # A newcomer describes the model as it is by then.
        version = ask.version if call.replaces else self.reference.version
        spec = make_spec(self.reference.setup, self.reference.world_size, version)
        registration = self._core.register(call.push_id, spec, initialised=call.initialised, replaces=call.replaces)
        if registration is not None and registration.initialise:
            assert registration.epoch == self.reference.epoch or self.reference.ready
            if registration.epoch == self.reference.epoch and not self.reference.ready:
                self.reference.asked_to_initialise(registration.epoch, call.push_id.trainer_id)
        return registration

    def _changed(self) -> None:
        """To be called after every other call to the coordinator."""
        self._follow()
        self._look_again()

    @property
    def _owners(self) -> frozenset[str]:
        return frozenset(each.name for each in self.servers)

    def _follow(self) -> None:
        reference = self.reference
        reference.observe(self._core.status(self.now_s), self.now_s)
        for name, command in self._core.take_commands():
            if isinstance(command, CreateShard):
                reference.created(command)
            elif isinstance(command, ModelReady):
                reference.made_ready(command, self._initial_values(command))
            elif isinstance(command, Prepare):
                reference.prepared(command, self._owners)
            elif isinstance(command, Apply):
                reference.decided(command, self._owners)
            elif isinstance(command, Reject):
                reference.rejected(command)
            if name in self._links:
                self._links[name].tell(command, planned=reference.plans.keys())

    def _initial_values(self, command: ModelReady) -> Tensors:
        (initialiser,) = (each for each in self.trainers if each.trainer_id == command.initialiser)
        return initial_values(initialiser.number, self.reference.epochs[command.epoch].version)

    def change_description(self, after_rounds: int) -> None:
        """From some round on every trainer asks for another description, unless such a change is under way.

        That round must be a later one: somebody may be at work for the next already, and wait for the others.
        """
        reference = self.reference
        if reference.version == reference.wanted_version and reference.ready:
            reference.wanted_version += 1
            reference.wanted_from_round = reference.round + after_rounds

    # Links

    def break_link(self, server: SimServer, *, noticed: bool, num_late_reports: int) -> None:
        """A link breaks. What is under way is lost, but for the first reports: the coordinator may have those already.

        Args:
            noticed: whether the coordinator knows at once.
        """
        link = server.link
        assert link is not None
        server.disconnect()
        link.broken = True
        link.down.clear()
        while len(link.up) > num_late_reports:
            link.up.pop()
        if noticed:
            self.notice_break(server)

    def _end_link(self, link: Link) -> None:
        """The coordinator ends a link, to a server whose lease has ended."""
        for server in self.servers:
            if server.link is link:
                self.break_link(server, noticed=True, num_late_reports=0)

    def notice_break(self, server: SimServer) -> None:
        """The coordinator learns that a link is broken, if it did not know."""
        link = self._links.get(server.name)
        if link is not None and link.broken:
            self._old_links.append(self._links.pop(server.name))
            self._core.server_unlinked(server.name, link.incarnation)
            self._changed()

    def relink(self, server: SimServer) -> None:
        """A server opens a new link; one whose lease has ended begins anew."""
        try:
            self._core.server_joined(server.name, "address", server.incarnation, self.now_s)
        except ServerEnded:
            assert self.reference.server_lost, f"{server.name} was refused"
            server.begin_anew()
            self.relink(server)
            return
        if server.name in self._links:
            self._old_links.append(self._links[server.name])
        self._links[server.name] = server.connect()
        self._changed()

    # Failures of servers

    def crash_server(self, server: SimServer) -> None:
        """A server dies, and with it all that it knew. The coordinator does not know yet."""
        self.reference.server_lost = True
        if server.link is not None:
            self.break_link(server, noticed=False, num_late_reports=0)
        server.stop()

    def silence_server(self, server: SimServer) -> None:
        """A server is not heard of for longer than its lease, as if it were suspended; its link stays."""
        self.reference.server_lost = True
        until_s = self.now_s + SERVER_LEASE_S + 2 * TICK_S
        while self.now_s < until_s:
            self._tick(2 * TICK_S, silent=server)

    def break_down(self, server: SimServer) -> None:
        """The next time that a server has to compute something, it cannot."""
        self.reference.server_lost = server.breaks_down = True

    # Time

    def advance(self, ticks: int) -> None:
        """Time passes, with a coordinator that looks at leases often. Trainers and servers that can, renew theirs."""
        for _ in range(ticks):
            self._tick(TICK_S)

    def _tick(self, tick_s: float, silent: SimServer | None = None) -> None:
        self.now_s += tick_s
        for trainer in self.trainers:
            if trainer.renews and trainer.trainer_id is not None:
                self._renew(trainer)
        for server in self.servers:
            heard = server.link is not None and server is not silent
            if heard and not self._core.server_heard(server.name, self.now_s):
                self._end_link(server.link)
        if self._core.expire(self.now_s):
            self._changed()

    def _renew(self, trainer: SimTrainer) -> None:
        try:
            self._core.renew(trainer.trainer_id, sent_bytes=0, received_bytes=0, reported={}, now_s=self.now_s)
        except TrainerEnded:
            assert not trainer.has_renewed, f"the lease of trainer {trainer.trainer_id} has ended, but it renews"
            trainer.crash()  # it learnt too late that it had joined
        else:
            trainer.has_renewed = True

    def pause(self, seconds: float) -> None:
        """Time passes, but not for the coordinator: nobody's lease may end for that."""
        living = self.reference.living
        self.now_s += seconds
        if self._core.expire(self.now_s):
            self._changed()
        assert self.reference.living == living, f"a pause of {seconds:g} s ended {living - self.reference.living}"

    # What must hold

    def check(self) -> None:
        """What must hold at any moment."""
        for server in self.servers:
            server.check()

    def heal(self) -> None:
        """No more faults: all is linked, repeated and delivered, the dead expire. Everything must come to an end."""
        for trainer in self.running_trainers:
            if not trainer.renews:
                trainer.crash()
        self.advance(1)
        self._relink_all()
        self._settle()
        for trainer in self.idle_trainers:
            trainer.act(TakeStep())
        self._settle()
        self._check_at_rest()

    def _settle(self) -> None:
        """Whoever waits repeats its call until all have what they asked for; time passes."""
        for _ in range(MAX_ROUNDS_OF_RETRIES):
            self.deliver_all()
            self.advance(math.ceil(TRAINER_LEASE_S / TICK_S) + 1)
            self.deliver_all()
            if not self.waiting_trainers:
                return
            self._help()
        raise AssertionError(f"these wait for ever: {[each.ask for each in self.waiting_trainers]}")

    def _relink_all(self) -> None:
        """Those that died are started again."""
        for server in self.servers:
            self.notice_break(server)
            if server.running and server.link is None:
                self.relink(server)
            if not server.running:
                server.start()
                self.relink(server)

    def _help(self) -> None:
        """Everybody takes part in a round that somebody waits for; what was lost, and only that, is sent again."""
        if any(each.steps or each.changes for each in self.waiting_trainers):
            for trainer in self.idle_trainers:
                trainer.act(TakeStep())
            if not self.reference.complete:
                self.join()
        arrived = {COORDINATOR: self._waiting.keys()} | {each.name: each.holds for each in self.servers}
        for trainer in self.waiting_trainers:
            self.requests += [each for each in trainer.unanswered if each.ask not in arrived[each.target]]

    def _check_at_rest(self) -> None:
        """What must hold once nothing is under way."""
        reference = self.reference
        running = {each.trainer_id for each in self.running_trainers}
        assert reference.living == running, f"trainers {reference.living - running} are dead, but still members"
        status = self._core.status(self.now_s)
        if reference.ready and not reference.failed:
            assert reference.epochs[reference.epoch].last_round == reference.round, "decisions were never told"
            self._check_counts(status)
        known_rounds = {shard.server: shard.round for model in status.models for shard in model.shards}
        for server in self.servers:
            if server.shard is None:
                assert reference.failed or not reference.attached
            elif reference.failed:
                assert server.shard.failure, f"{server.name} was not told of the failure"
            else:
                assert not server.shard.failure, f"the coordinator does not know that {server.name} has failed"
                assert server.shard.round == reference.round, f"{server.name} is behind"
                assert known_rounds[server.name] == reference.round, f"the coordinator has not heard of {server.name}"
                assert server.remembers <= running, f"{server.name} remembers the dead"

    def _check_counts(self, status: ClusterStatus) -> None:
        """What the coordinator counts, as long as no placement was given up with decisions that nobody heard."""
        reference = self.reference
        (model,) = status.models
        if reference.version == 0:
            ages = [
                each.staleness
                for decision in reference.decisions.values()
                for each in decision.contributions
                if each.weight
            ]
            assert model.num_accepted == len(ages)
            assert model.staleness == {age: ages.count(age) for age in ages}
            assert model.num_skipped == sum(bool(each.skip) for each in reference.decisions.values())
            assert model.num_rejected >= len(reference.rejections)
