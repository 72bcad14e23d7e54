"""A whole cluster without processes, and a reference model of what it must do.

The coordinator and the shards are the real state machines of `pserver.core`. Servers, trainers and the network between
them are simulated here, one event at a time: `SimServer` mirrors `ShardHost` and its service, `SimTrainer` mirrors
`SharedModel`, `Cluster` mirrors `CoordinatorHost`. Every event checks what it can against the `Reference`.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pserver.client.flattening import FlatBuffers
from pserver.client.push_ids import PushIds
from pserver.core.contexts import CommitInfo
from pserver.core.coordinator import Coordinator
from pserver.core.messages import (
    Apply,
    Command,
    Contribution,
    CreateShard,
    Decision,
    EndTrainer,
    FailModel,
    ModelReady,
    ModelSpec,
    Report,
    ShardCreated,
    ShardFailed,
)
from pserver.core.shard import Shard
from pserver.core.staging import Staging
from pserver.errors import ConfigError, ModelFailed, PserverError, TrainerEnded, UnknownModel
from pserver.types import ClusterStatus, GroupOptions, ModelStatus, PushId, StepResult
from pserver.wire.layout import STORED, Bucket, TensorSpec, build_layout
from pserver.wire.tensors import element_type

TRAINER_LEASE_S = 10.0
SERVER_LEASE_S = 1000.0
#: Between two looks of the coordinator at its leases; short enough not to count as a pause.
TICK_S = 1.0
COORDINATOR = "coordinator"
MODEL = "model"
BUCKET_BYTES = 64
#: After this many rounds of retries in a healed cluster, whatever still waits waits for ever.
MAX_ROUNDS_OF_RETRIES = 40

#: Three parameters in two groups, and a buffer: five buckets.
TENSORS = (
    TensorSpec(name="a", shape=(20,), dtype=torch.float32, group=0),
    TensorSpec(name="b", shape=(3, 5), dtype=torch.float32, group=1),
    TensorSpec(name="c", shape=(7,), dtype=torch.float32, group=0),
    TensorSpec(name="buffer", shape=(3,), dtype=torch.int64, group=STORED),
)
STEPPED = [index for index, spec in enumerate(TENSORS) if spec.group != STORED]
LAYOUT = build_layout(TENSORS, BUCKET_BYTES)
_FLATS = FlatBuffers(LAYOUT, torch.device("cpu"))


def make_spec(world_size: int) -> ModelSpec:
    """The model of every test here: SGD, whose arithmetic the reference repeats."""
    return ModelSpec(
        name=MODEL,
        tensors=TENSORS,
        bucket_bytes=BUCKET_BYTES,
        optimizer="SGD",
        optimizer_groups=({"lr": 1.0, "foreach": False},) * 2,
        sync_policy="bsp",
        sync_policy_arguments={},
        world_size=world_size,
    )


def options_of(lr: float) -> tuple[GroupOptions, ...]:
    """Options of both groups; powers of two, so that products are exact."""
    return ({"lr": lr}, {"lr": 2 * lr})


def pack(tensors: Sequence[torch.Tensor | None]) -> dict[int, bytes]:
    """One tensor for each of `TENSORS` -> bytes by bucket."""
    _FLATS.gather(tensors)
    return {bucket.index: bytes(_FLATS.bucket_bytes(bucket)) for bucket in LAYOUT.buckets}


def integers(spec: TensorSpec, seed: int) -> torch.Tensor:
    """A tensor of small integers that differ from seed to seed; sums of them are exact."""
    numbers = (torch.arange(spec.num_elements) * (2 * seed + 7) + 5 * seed) % 17 - 8
    return numbers.to(spec.dtype).reshape(spec.shape)


# What trainers ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    push_id: PushId
    initialised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    push_id: PushId


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
    """`gradients` None: earlier pushes into the context brought everything."""

    push_id: PushId
    context_id: int
    gradients: Mapping[int, bytes] | None = field(repr=False)
    commit: CommitInfo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DropContext:
    push_id: PushId
    context_id: int


CoordinatorCall = Join | Register | Attach | Leave
ShardCall = Initialise | Pull | Push | DropContext


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One call to one or several targets; repeats of it are equal messages."""

    trainer: "SimTrainer"
    targets: tuple[str, ...]
    call: CoordinatorCall | ShardCall


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
    """Commit; `all_pushed` commits what earlier pushes brought, if there were any."""

    samples: int = 1
    lr: float = 1.0
    all_pushed: bool = False


@dataclass(frozen=True, slots=True)
class PushEarly:
    """Add a gradient to the context of the next step."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Drop the context of the next step."""


@dataclass(frozen=True, slots=True)
class Quit:
    """Leave the cluster."""


Action = TakeStep | PushEarly | Abandon | Quit


# The reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What one trainer really computed for one step, on the parameters of `base_round`."""

    tensors: list[torch.Tensor]
    samples: int
    options: tuple[GroupOptions, ...]
    base_round: int


@dataclass(slots=True, kw_only=True)
class _Electorate:
    """Trainers that were expected before and after the call in which a round was decided."""

    before: frozenset[int]
    after: frozenset[int]


class Reference:
    """What must be true, kept from what trainers computed and what left the coordinator."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.initialiser: int | None = None
        self.ready = False
        self.failed = False
        self.server_lost = False
        self.round = 0
        self.decisions: list[Decision] = []
        self.gradients: dict[tuple[int, int], Gradient] = {}
        self.living: frozenset[int] = frozenset()
        self.attached: set[int] = set()
        self.complete = False
        self._counted: set[tuple[int, int]] = set()
        self._reached: dict[tuple[int, int], set[str]] = {}
        self._electorates: list[_Electorate] = []
        self._tensors: list[list[torch.Tensor]] = []
        self._packed: list[dict[int, bytes]] = []

    @property
    def expected(self) -> frozenset[int]:
        """Trainers that the next round must count."""
        return frozenset(self.attached) & self.living

    def observe(self, status: ClusterStatus, initial: Callable[[int], list[torch.Tensor]]) -> None:
        """Follows the coordinator after each call to it; `initial` gives the initial values of a trainer."""
        before = self.expected
        self.complete = self.complete or len(before) >= self.world_size
        self.living = frozenset(each.trainer_id for each in status.trainers)
        for model in status.models:
            self._observe(model, before, initial)

    def _observe(
        self, model: ModelStatus, before: frozenset[int], initial: Callable[[int], list[torch.Tensor]]
    ) -> None:
        assert model.round >= self.round, f"the coordinator went back from round {self.round} to {model.round}"
        assert model.round == self.round or not self.failed, "a round was decided after the model had failed"
        self._electorates += [_Electorate(before=before, after=self.expected)] * (model.round - self.round)
        self.round = model.round
        self.failed = model.state == "failed"
        assert not self.failed or self.server_lost, f"the model failed without a reason: {model.failure}"
        if model.state == "ready" and not self.ready:
            self.ready = True
            assert self.initialiser is not None, "the model is ready, but nobody was asked to initialise it"
            self._tensors.append(initial(self.initialiser))
            self._packed.append(pack(self._tensors[0]))

    def computed(self, trainer_id: int, step: int, gradient: Gradient) -> None:
        """A trainer has computed a gradient and is about to commit it."""
        self.gradients[trainer_id, step] = gradient

    def reached(self, server: str, trainer_id: int, step: int) -> None:
        """A shard has taken everything of a step."""
        self._reached.setdefault((trainer_id, step), set()).add(server)

    def decided(self, decision: Decision, owners: frozenset[str]) -> None:
        """A decision leaves the coordinator, for the first time or again."""
        if decision.round <= len(self.decisions):
            assert decision == self.decisions[decision.round - 1], f"round {decision.round} was decided twice"
            return
        assert decision.round == len(self.decisions) + 1 <= self.round, f"round {decision.round} came out of turn"
        assert self.complete, "a round was decided before all trainers were there together"
        self._check_members(decision, owners)
        self._check_arithmetic(decision)
        self._counted.update((each.trainer_id, each.step) for each in decision.contributions)
        self.decisions.append(decision)
        self._apply(decision)

    def values(self, round_number: int) -> dict[int, bytes]:
        """Every bucket as it must be after a round."""
        return self._packed[round_number]

    def acknowledged(self, trainer_id: int, step: int, result: StepResult) -> None:
        """A trainer has heard what became of its step."""
        assert result.accepted, f"step {step} of trainer {trainer_id} was refused: {result.reason}"
        assert result.round <= len(self.decisions), f"round {result.round} was acknowledged, but never decided"
        decision = self.decisions[result.round - 1]
        counted = [(each.trainer_id, each.step) for each in decision.contributions]
        assert (trainer_id, step) in counted, f"step {step} of trainer {trainer_id} is not in round {result.round}"
        assert result.num_trainers == len(counted)
        assert result.options == decision.options

    def _check_members(self, decision: Decision, owners: frozenset[str]) -> None:
        members = frozenset(each.trainer_id for each in decision.contributions)
        electorate = self._electorates[decision.round - 1]
        assert electorate.after <= members <= electorate.before, f"{decision} must count every expected trainer"
        for each in decision.contributions:
            step = (each.trainer_id, each.step)
            assert step not in self._counted, f"step {step} is counted again by {decision}"
            lacking = owners - self._reached.get(step, set())
            assert not lacking, f"{decision} counts step {step}, which {sorted(lacking)} never had"
            base_round = self.gradients[step].base_round
            assert base_round == decision.round - 1, f"{decision} counts a gradient of round {base_round}"

    def _check_arithmetic(self, decision: Decision) -> None:
        ranks = [each.rank for each in decision.contributions]
        assert ranks == sorted(set(ranks)), f"{decision} is not in order of rank"
        gradients = [self._gradient(each) for each in decision.contributions]
        common = math.gcd(*(each.samples for each in gradients)) or 1
        assert [each.weight for each in decision.contributions] == [each.samples // common for each in gradients]
        assert decision.divisor == sum(each.samples // common for each in gradients)
        assert decision.options == gradients[0].options, f"{decision} must take the options of its lowest rank"

    def _apply(self, decision: Decision) -> None:
        values = list(self._tensors[-1])
        if decision.divisor:
            for index in STEPPED:
                total = torch.zeros(TENSORS[index].shape)
                for each in decision.contributions:
                    total = total + self._gradient(each).tensors[index] * each.weight
                lr = decision.options[TENSORS[index].group]["lr"]
                values[index] = values[index] - lr * (total / decision.divisor)
        self._tensors.append(values)
        self._packed.append(pack(values))

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

    def applied(self, decision: Decision) -> None:
        """A round has used up the contexts that it counts."""
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
    ended: set[int] = field(default_factory=set)
    broken: bool = False

    def tell(self, command: Command) -> None:
        """The coordinator says something. What it says of a trainer before and after its end must be in that order."""
        if isinstance(command, EndTrainer):
            self.ended.add(command.trainer_id)
        elif isinstance(command, Apply):
            late = self.ended & {each.trainer_id for each in command.decision.contributions}
            assert not late, f"{command} follows the end of trainers {late}"
        if not self.broken:
            self.down.append(command)


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
        self.ended: set[int] = set()
        self._welcomed = False
        self._ledger = Ledger()
        self._waiting: dict[Ask, tuple[Request, Poll]] = {}
        self._last_round = 0

    def stop(self) -> None:
        """The process dies; what waited there gets no answer."""
        self.running = False
        self.shard = None
        self.link = None
        self._waiting.clear()

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
        return self._waiting.keys()

    # Commands and reports

    def handle(self, command: Command | None) -> None:
        """Carries out a command; None is the welcome."""
        if command is None:
            self._welcomed = True
            for report in self.shard.reports() if self.shard is not None else ():
                self._report(report)
        elif isinstance(command, CreateShard):
            self._create(command)
        elif isinstance(command, EndTrainer):
            self._end_trainer(command.trainer_id)
        elif self.shard is not None and self.shard.epoch == command.epoch:
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
            expected = self._reference.values(shard.round)
            for bucket in shard.buckets:
                where = f"{self.name}, bucket {bucket.index}, round {shard.round}"
                assert shard.read(bucket.index).tobytes() == expected[bucket.index], f"{where}: other values"
        self._ledger.check(shard, self.ended)

    def _handle_for(self, shard: Shard, command: Command) -> None:
        if isinstance(command, FailModel):
            shard.failure = shard.failure or command.reason
            return
        assert isinstance(command, ModelReady | Apply), f"{self.name} was told {command}"
        try:
            self._compute(shard, command)
        except (MemoryError, ModelFailed) as error:
            shard.failure = shard.failure or str(error)
            self._report(ShardFailed(model=MODEL, epoch=shard.epoch, failure=str(error)))

    def _compute(self, shard: Shard, command: ModelReady | Apply) -> None:
        new = not shard.ready if isinstance(command, ModelReady) else command.decision.round > shard.round
        if self.breaks_down and new:
            self.breaks_down = False
            raise MemoryError("out of memory")
        if isinstance(command, ModelReady):
            shard.make_ready(command.initialiser)
            self._ledger.made_ready()
        else:
            self._report(shard.apply(command.decision))
            self._ledger.applied(command.decision)

    def _create(self, command: CreateShard) -> None:
        if self.shard is None:
            self.shard = Shard(command)
            self._report(ShardCreated(model=MODEL, epoch=command.epoch))
        assert self.shard.epoch == command.epoch

    def _end_trainer(self, trainer_id: int) -> None:
        self.ended.add(trainer_id)
        if self.shard is not None:
            self.shard.end_trainer(trainer_id)
        self._ledger.ended(trainer_id)

    def _report(self, report: Report) -> None:
        if self.link is not None and self._welcomed:
            self.link.up.append(report)

    # Calls of trainers

    def serve(self, request: Request) -> None:
        """Carries out a trainer's call, and answers it now or later."""
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
        if trainer_id in self.ended:
            raise TrainerEnded(f"{self.name} refuses trainer {trainer_id}")
        if self.shard is None:
            raise UnknownModel(f"{self.name} holds no shard")
        self.shard.check(ask.trainer.epoch, LAYOUT.fingerprint)
        if isinstance(call, Pull):
            return partial(self._pulled, self.shard, call.min_round)
        assert isinstance(call, Initialise | Push | DropContext)
        self._ledger.arrived(call.push_id)
        if isinstance(call, Initialise):
            self._report(self.shard.initialise(call.push_id, _staged(self.shard.buckets, call.values)))
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
        staging = _staged(shard.trained, call.gradients or {})
        report = shard.push(call.push_id, call.context_id, staging, frozenset(), call.commit)
        if report is not None:
            self._report(report)
        if not self._ledger.carried_out(call.push_id):
            return
        step = call.commit.step if call.commit is not None else None
        self._ledger.pushed(call.push_id.trainer_id, call.context_id, step)
        if step is not None:
            self._reference.reached(self.name, call.push_id.trainer_id, step)

    def _pulled(self, shard: Shard, min_round: int) -> Values | None:
        if shard.failure is not None:
            raise ModelFailed(shard.failure)
        if shard.round < min_round or not shard.ready:
            return None
        return self._read(shard)

    def _stepped(self, shard: Shard, push_id: PushId) -> Values | None:
        if shard.failure is not None:
            raise ModelFailed(shard.failure)
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
        number: makes its initial values and its gradients differ from everybody else's.
        post: sends a request.
    """

    def __init__(self, number: int, reference: Reference, post: Callable[[Request], None]) -> None:
        self.number = number
        self.trainer_id: int | None = None
        self.epoch = 0
        self.running = True
        self.renews = True
        self.has_renewed = False
        self.initial = [integers(spec, 100 + number) for spec in TENSORS]
        self.ask: Ask | None = None
        self._reference = reference
        self._post = post
        self._answers: dict[str, Any] = {}
        self._push_ids = PushIds(0)
        self._shards: tuple[str, ...] = ()
        self._base_round = 0
        self._step = 0
        self._context_id = 1
        self._early: list[list[torch.Tensor]] = []
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
        """Tells an idle trainer what to do next."""
        assert self.idle
        self._go_on(action)

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
        if isinstance(error, TrainerEnded):
            assert not (self.renews and self.trainer_id in self._reference.living), f"{self.ask}: {error}"
        else:
            assert isinstance(error, ModelFailed | UnknownModel), f"{self.ask}: {error!r}"
            assert self._reference.server_lost, f"{self.ask}: {error!r}"

    # What it does, in order

    def _live(self) -> Generator[Ask | None, Any, None]:
        self.trainer_id = yield from self._coordinator(Join(nonce=f"nonce {self.number}"))
        self._push_ids = PushIds(self.trainer_id)
        initialised = False
        while (yield from self._register(initialised)):
            with self._push_ids.one() as push_id:
                yield from self._every_shard(Initialise(push_id=push_id, values=pack(self.initial)))
            initialised = True
        with self._push_ids.one() as push_id:
            attached = yield from self._coordinator(Attach(push_id=push_id))
        self._receive((yield from self._every_shard(Pull(min_round=attached))))
        assert self._base_round == attached
        while not isinstance(action := (yield None), Quit):
            if isinstance(action, TakeStep):
                yield from self._take_step(action)
            elif isinstance(action, PushEarly):
                yield from self._push_early()
            else:
                yield from self._abandon()
        self.renews = False
        with self._push_ids.one() as push_id:
            yield from self._coordinator(Leave(push_id=push_id))

    def _register(self, initialised: bool) -> Generator[Ask, Any, bool]:
        with self._push_ids.one() as push_id:
            registration = yield from self._coordinator(Register(push_id=push_id, initialised=initialised))
        self.epoch = registration.epoch
        self._shards = tuple(each.server for each in registration.placement)
        return registration.initialise

    def _take_step(self, action: TakeStep) -> Generator[Ask, Any, None]:
        all_pushed = action.all_pushed and bool(self._early)
        if not all_pushed:
            self._early.append(self._gradient())
        last = None if all_pushed else pack([*self._early[-1], None])
        self._step += 1
        options = options_of(action.lr)
        gradient = Gradient(
            tensors=[torch.stack(pushes).sum(0) for pushes in zip(*self._early, strict=True)],
            samples=action.samples,
            options=options,
            base_round=self._base_round,
        )
        self._reference.computed(self.trainer_id, self._step, gradient)
        commit = CommitInfo(step=self._step, samples=action.samples, options=options)
        with self._push_ids.one() as push_id:
            push = Push(push_id=push_id, context_id=self._context_id, gradients=last, commit=commit)
            answers = yield from self._every_shard(push)
        self._new_context()
        self._receive(answers)
        for each in answers.values():
            assert each.result.round == self._base_round
            self._reference.acknowledged(self.trainer_id, self._step, each.result)

    def _push_early(self) -> Generator[Ask, Any, None]:
        self._early.append(self._gradient())
        gradients = pack([*self._early[-1], None])
        with self._push_ids.one() as push_id:
            push = Push(push_id=push_id, context_id=self._context_id, gradients=gradients, commit=None)
            yield from self._every_shard(push)

    def _abandon(self) -> Generator[Ask, Any, None]:
        with self._push_ids.one() as push_id:
            yield from self._every_shard(DropContext(push_id=push_id, context_id=self._context_id))
        self._new_context()

    def _coordinator(self, call: CoordinatorCall) -> Generator[Ask, Any, Any]:
        answers = yield Ask(self, (COORDINATOR,), call)
        return answers[COORDINATOR]

    def _every_shard(self, call: ShardCall) -> Generator[Ask, Any, dict[str, Any]]:
        return (yield Ask(self, self._shards, call))

    def _receive(self, answers: Mapping[str, Values]) -> None:
        """Takes the parameters of one round from every shard."""
        rounds = {each.round for each in answers.values()}
        assert len(rounds) == 1, f"trainer {self.trainer_id} was sent a mix of the rounds {rounds}"
        (self._base_round,) = rounds
        found = {index: data for each in answers.values() for index, data in each.buckets.items()}
        assert found == self._reference.values(self._base_round), f"other parameters after round {self._base_round}"

    def _gradient(self) -> list[torch.Tensor]:
        self._num_gradients += 1
        return [integers(TENSORS[index], 31 * self.number + self._num_gradients) for index in STEPPED]

    def _new_context(self) -> None:
        self._context_id += 1
        self._early = []


# The whole


class Cluster:
    """Coordinator, servers, trainers, and every message between them. Nothing moves unless it is told to."""

    def __init__(self, *, num_servers: int, world_size: int) -> None:
        self.now_s = 0.0
        self.reference = Reference(world_size)
        self.requests: list[Request] = []
        self.replies: list[Reply] = []
        self._messages: list[tuple[object, object, object]] = []
        self.trainers: list[SimTrainer] = []
        self._spec = make_spec(world_size)
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
            self._core.report(link.server, report)
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
        """Calls that wait look again; all but registrations are answered at once."""
        for request in list(self._waiting.values()):
            try:
                value = self._call(request.ask.call)
            except PserverError as error:
                value = error
            if value is not None:
                del self._waiting[request.ask]
                self._answer(request, value)
                self._follow()
        self._follow()

    def _call(self, call: CoordinatorCall | ShardCall) -> Any:
        if isinstance(call, Join):
            trainer_id = self._core.join(call.nonce, -1, self.now_s).trainer_id
            assert self._ids.setdefault(call.nonce, trainer_id) == trainer_id, f"{call} made two trainers"
            return trainer_id
        if isinstance(call, Register):
            registration = self._core.register(call.push_id, self._spec, initialised=call.initialised)
            if registration is not None and registration.initialise and not self.reference.ready:
                self.reference.initialiser = call.push_id.trainer_id
            return registration
        if isinstance(call, Attach):
            attached = self._core.attach(call.push_id, MODEL)
            self.reference.attached.add(call.push_id.trainer_id)
            return attached
        assert isinstance(call, Leave)
        self._core.leave(call.push_id)
        return True

    def _changed(self) -> None:
        """To be called after every other call to the coordinator."""
        self._follow()
        self._look_again()

    def _follow(self) -> None:
        self.reference.observe(self._core.status(self.now_s), self._initial_values)
        for name, command in self._core.take_commands():
            if isinstance(command, Apply):
                self.reference.decided(command.decision, frozenset(each.name for each in self.servers))
            if name in self._links:
                self._links[name].tell(command)

    def _initial_values(self, trainer_id: int) -> list[torch.Tensor]:
        return next(each.initial for each in self.trainers if each.trainer_id == trainer_id)

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
        """A server opens a new link; one that the coordinator refuses ends."""
        try:
            self._core.server_joined(server.name, "address", server.incarnation, self.now_s)
        except ConfigError:
            assert self.reference.server_lost, f"{server.name} was refused"
            server.stop()
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
        """Those that the coordinator refuses, and those that died, are started again."""
        for server in self.servers:
            self.notice_break(server)
            if server.running and server.link is None:
                self.relink(server)
            if not server.running:
                server.start()
                self.relink(server)

    def _help(self) -> None:
        """Everybody takes part in a round that somebody waits for; what was lost, and only that, is sent again."""
        if any(each.steps for each in self.waiting_trainers):
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
        assert len(reference.decisions) == reference.round or reference.failed, "decisions were never told"
        status = self._core.status(self.now_s)
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
