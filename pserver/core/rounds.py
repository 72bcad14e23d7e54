"""Rounds of one model: who is expected, what has arrived, what was decided."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from pserver.core.messages import (
    CommitInfo,
    Committed,
    Contribution,
    Decision,
    Plan,
    Prepared,
    Refusal,
    ShardState,
    TrainerProgress,
)
from pserver.core.reduce import weights_and_divisor
from pserver.core.rules import treat
from pserver.core.sync import MemberView, Offer, RoundView, SyncPolicy, Verdict

#: Buffers that travel with every step: of the lowest rank, their mean, or not at all.
BUFFER_POLICIES = ("lowest", "mean", "local")


#: Everything older is counted as this old: the histogram stays small.
MAX_STALENESS_SHOWN = 1024


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A commit; `offer` once every shard has it. `again`: a plan with it was given up, and later ones wait for it."""

    commit: CommitInfo
    shards: set[int] = field(default_factory=set)
    offer: Offer | None = None
    since_s: float = 0.0
    again: bool = False


@dataclass(slots=True, kw_only=True)
class _Expected:
    rank: int
    since_round: int  # the last decided round when it attached
    told_round: int  # the last round when this trainer was last told what became of its step
    clock: int
    clock_before: int  # when it attached
    settled_step: int = 0  # the last step that has been decided or refused
    seen_step: int = 0
    commits: dict[int, _Waiting] = field(default_factory=dict)
    latest: CommitInfo | None = None
    rejection: Refusal | None = None

    @property
    def waiting(self) -> _Waiting | None:
        """The first commit that every shard has."""
        for step in sorted(self.commits):
            if self.commits[step].offer is not None:
                return self.commits[step]
            if self.commits[step].again:
                break
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """What a trainer was before a plan took its commit."""

    trainer_id: int
    settled_step: int
    told_round: int
    commit: CommitInfo | None


@dataclass(slots=True, kw_only=True)
class _Preparing:
    """A round whose members are decided, while shards look at its mean gradient, or make sure that it survives them."""

    plan: Plan
    before: list[_Before]
    reports: dict[int, Prepared] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsSaved:
    """What is kept of a book: whether rounds have begun, and of each trainer rank, round and clock at its attaching."""

    started: bool
    trainers: Mapping[int, tuple[int, int, int]]


#: What shards are told of a round: all about it, who is in it, or of a step that is in none.
RoundNews = Decision | Plan | Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStatistics:
    """Counts of gradients accepted and rejected, of rounds in which nothing was stepped, and gradients by staleness."""

    num_accepted: int
    num_rejected: int
    num_skipped: int
    staleness: Mapping[int, int]


class RoundBook:
    """Decides rounds. A commit counts only once every shard has reported it, so a round is whole or absent everywhere.

    Not thread-safe. Times are those of the caller's clock, in seconds.

    Args:
        policy: says who is in a round.
        names: of the model's tensors.
        num_shards: how many shards the model has.
        world_size: trainers that must have attached before the first round, if the policy wants them gathered.
        buffers: one of `BUFFER_POLICIES`.
        always_prepares: whether shards must have every round before it is decided, since they may be lost.

    Attributes:
        round: the last decided one.
        version: the rounds among them that step; that of a shard that has applied them all.
    """

    def __init__(
        self,
        policy: SyncPolicy,
        *,
        names: Sequence[str],
        num_shards: int,
        world_size: int,
        buffers: str,
        always_prepares: bool = False,
    ) -> None:
        self.policy = policy
        self.round = self.version = 0
        self._always_prepares = always_prepares
        self._num_attempts = 0
        self._world_size = world_size
        self._buffers = buffers
        self._started = not policy.gathers
        self._expected: dict[int, _Expected] = {}
        self._num_arrived = 0
        self._num_accepted = self._num_rejected = self._num_skipped = 0
        self._staleness: Counter[int] = Counter()
        self.replace(names, num_shards)

    def replace(self, names: Sequence[str], num_shards: int) -> None:
        """Goes on with the shards of another placement, which start at the last round. No commit may be waiting."""
        self._names = tuple(names)
        self._applied: dict[int, int] = dict.fromkeys(range(num_shards), self.round)
        self._outstanding: deque[Decision] = deque()
        self._preparing: _Preparing | None = None
        for trainer in self._expected.values():
            trainer.commits.clear()
            trainer.latest = trainer.rejection = None
            trainer.told_round = self.round  # all read the new placement's values before they go on

    # Who is expected

    def saved(self) -> RoundsSaved:
        """What the next coordinator must know beside what shards do."""
        trainers = {key: (each.rank, each.since_round, each.clock_before) for key, each in self._expected.items()}
        return RoundsSaved(started=self._started, trainers=trainers)

    def restore(self, saved: RoundsSaved, first_round: int) -> None:
        """Expects whom an earlier coordinator did; `resume` says the rest."""
        self.round = first_round
        self._started = self._started or saved.started
        for trainer_id, (rank, since_round, clock) in saved.trainers.items():
            self._expected[trainer_id] = _Expected(
                rank=rank, since_round=since_round, told_round=since_round, clock=clock, clock_before=clock
            )

    def number_plans_above(self, attempt: int) -> None:
        """Replicas may have plans of earlier coordinators, with numbers up to this one, that were given up since."""
        self._num_attempts = max(self._num_attempts, attempt)

    def attach(self, trainer_id: int, rank: int, now_s: float) -> None:
        """Expects a trainer from the next round on. Repeating it changes nothing."""
        if trainer_id in self._expected:
            return
        clock = min((each.clock for each in self._expected.values()), default=0)
        self._expected[trainer_id] = _Expected(
            rank=rank, since_round=self.round, told_round=self.round, clock=clock, clock_before=clock
        )
        if not self._started and len(self._expected) >= self._world_size:
            self._started = True
            # Nobody was late for a round that could not begin.
            for waiting in self._commits():
                waiting.since_s = now_s

    def remove(self, trainer_id: int) -> None:
        """Expects a trainer no more; what it has committed enters no round that is not decided yet."""
        self._expected.pop(trainer_id, None)

    @property
    def attached(self) -> frozenset[int]:
        """Ids of the trainers that are expected."""
        return frozenset(self._expected)

    def rank_of(self, trainer_id: int) -> int:
        """Rank of a trainer that is expected."""
        return self._expected[trainer_id].rank

    def told_round_of(self, trainer_id: int) -> int:
        """The last round when a trainer that is expected was told an outcome, and got current values."""
        return self._expected[trainer_id].told_round

    # What shards report

    def committed(self, report: Committed, now_s: float) -> bool:
        """Notes that one shard has everything of a trainer's step; whether every shard has now.

        Repeats and reports of the past change nothing.
        """
        trainer = self._expected.get(report.trainer_id)
        if trainer is None or report.shard not in self._applied:
            return False
        step = report.commit.step
        trainer.seen_step = max(trainer.seen_step, step)
        if step <= trainer.settled_step:
            return False
        waiting = trainer.commits.setdefault(step, _Waiting(commit=report.commit))
        waiting.shards.add(report.shard)
        if waiting.offer is not None or not waiting.shards >= self._applied.keys():
            return False
        self._num_arrived += 1
        waiting.offer = self._offer(waiting.commit, self._num_arrived)
        waiting.since_s = now_s
        trainer.latest = waiting.commit
        return True

    def _offer(self, commit: CommitInfo, arrival: int) -> Offer:
        # A round of the future is what no trainer can have seen.
        return Offer(base_round=max(0, min(commit.base_round, self.round)), arrival=arrival)

    def refusal_of(self, report: Committed) -> Refusal | None:
        """What a shard must hear again: it has everything of a step that was refused when others had it."""
        trainer = self._expected.get(report.trainer_id)
        refusal = trainer.rejection if trainer is not None else None
        return refusal if refusal is not None and refusal.step == report.commit.step else None

    def prepared(self, report: Prepared) -> None:
        """Notes what a shard found in the gradient of the round that is being prepared."""
        preparing = self._preparing
        if preparing is None or report.shard not in self._applied:
            return
        if (report.round, report.attempt) == (preparing.plan.plan.round, preparing.plan.attempt):
            preparing.reports[report.shard] = report

    def applied(self, shard: int, round_number: int) -> None:
        """Notes that a shard, and every replica of it, has every round up to this one."""
        if shard in self._applied:
            self._applied[shard] = max(self._applied[shard], round_number)
        slowest = min(self._applied.values(), default=self.round)
        while self._outstanding and self._outstanding[0].round <= slowest:
            self._outstanding.popleft()

    # Shards that are lost, and go on elsewhere

    def shard_lost(self, shard: int) -> None:
        """A shard's primary is gone, and with it every commit that was in no round; trainers push these again."""
        for waiting in self._commits():
            if shard in waiting.shards:
                waiting.shards.discard(shard)
                waiting.offer = None
        if self._preparing is not None:
            self._preparing.reports.pop(shard, None)

    def shard_promoted(self, shard: int, round_number: int, attempt: int) -> bool:
        """A replica goes on in a shard's place; whether the plan that is prepared must be given up, see `give_up`.

        Args:
            round_number: the last that it has applied.
            attempt: of the plan of the next round that it has; 0: none.
        """
        # Other replicas may lack its last rounds: what every copy has is what the lost primary reported.
        self._applied[shard] = min(self._applied[shard], round_number)
        preparing = self._preparing
        held = (round_number + 1, attempt) if attempt else None
        if preparing is None:
            return held is not None and round_number == self.round
        return held != (preparing.plan.plan.round, preparing.plan.attempt)

    def give_up(self) -> None:
        """A plan that a shard has lost gradients of: every shard must abandon it, and report what waits there again."""
        preparing, self._preparing = self._preparing, None
        if preparing is None:
            return
        self.round -= 1
        for before in preparing.before:
            trainer = self._expected.get(before.trainer_id)
            if trainer is not None:
                trainer.settled_step, trainer.told_round = before.settled_step, before.told_round
                trainer.clock -= 1
                if before.commit is not None:
                    trainer.commits[before.commit.step] = _Waiting(commit=before.commit, again=True)

    # A coordinator that goes on for another one

    def resume(self, states: Mapping[int, ShardState]) -> bool:
        """Goes on where the shards are; whether the plan that some have prepared must be given up, see `give_up`.

        What some shard has applied is decided, and so is what all can prepare. Trainers are attached before, and what
        shards have committed is reported before as well.

        Args:
            states: of every shard.
        """
        self.round = max(state.round for state in states.values())
        self.version = max(state.version for state in states.values() if state.round == self.round)
        known = {decision.round: decision for state in states.values() for decision in state.decisions}
        # Not what they have applied: their replicas may lack that.
        settled = max((each.settled for each in known.values()), default=self.round)
        self._applied = dict.fromkeys(states, settled)
        self._outstanding = deque(known[each] for each in sorted(known) if each > settled)
        for state in states.values():
            for progress in state.trainers:
                self._resume_trainer(progress)
        for trainer in self._expected.values():
            trainer.commits = {step: each for step, each in trainer.commits.items() if step > trainer.settled_step}
        for waiting in self._commits():
            # They were reported before the round was known.
            if waiting.offer is not None:
                waiting.offer = self._offer(waiting.commit, waiting.offer.arrival)
        plans = [
            state.plan
            for state in states.values()
            if state.plan is not None and state.plan.plan.round == self.round + 1
        ]
        if not plans:
            return False
        plan = max(plans, key=lambda each: each.attempt)
        self._num_attempts = max(self._num_attempts, plan.attempt)
        lacking = [shard for shard, state in states.items() if state.plan is None or state.plan.attempt != plan.attempt]
        if not all(self._has_committed(shard, each) for shard in lacking for each in plan.plan.contributions):
            return True
        self._prepare(plan)
        return False

    def _resume_trainer(self, progress: TrainerProgress) -> None:
        trainer = self._expected.get(progress.trainer_id)
        if trainer is None:
            return
        if progress.latest is not None and (trainer.latest is None or trainer.latest.step < progress.latest.step):
            trainer.latest = progress.latest
        trainer.clock = max(trainer.clock, progress.clock)
        if progress.settled_step >= trainer.settled_step:
            trainer.settled_step = progress.settled_step
            trainer.told_round = max(trainer.told_round, progress.told_round)
            trainer.rejection = progress.refusal
        trainer.seen_step = max(trainer.seen_step, trainer.settled_step, trainer.latest.step if trainer.latest else 0)

    def _has_committed(self, shard: int, contribution: Contribution) -> bool:
        trainer = self._expected.get(contribution.trainer_id)
        waiting = trainer.commits.get(contribution.step) if trainer is not None else None
        return waiting is not None and shard in waiting.shards

    # Deciding

    @property
    def preparing(self) -> bool:
        """Whether there is a plan that is not decided."""
        return self._preparing is not None

    @property
    def undecided(self) -> bool:
        """Whether a gradient waits for its round, so that time alone may decide it."""
        return any(each.waiting is not None for each in self._expected.values())

    def advance(self, now_s: float) -> list[RoundNews]:
        """Decides what can be decided, and returns what every shard must hear of it, in order."""
        news: list[RoundNews] = []
        while not self.missing_trainers:
            if self._preparing is not None:
                if not self._preparing.reports.keys() >= self._applied.keys():
                    break
                news.append(self._finish(self._preparing))
                continue
            verdict = self.policy.verdict(self._view(now_s))
            if verdict.reject:
                news += self._reject(verdict)
            elif verdict.take:
                news.append(self._close(verdict.take))
            else:
                break
        return news

    def postpone(self, pause_s: float, now_s: float) -> None:
        """Moves the deadline of the next round by a time, just over, in which nobody could report."""
        for waiting in self._commits():
            # What has come since the pause is not dated into the future.
            waiting.since_s = min(waiting.since_s + pause_s, now_s)

    def outstanding(self, shard: int) -> list[RoundNews]:
        """What a shard may have missed, in order."""
        missed: list[RoundNews] = [each for each in self._outstanding if each.round > self._applied.get(shard, 0)]
        if self._preparing is not None and shard not in self._preparing.reports:
            missed.append(self._preparing.plan)
        missed += [each.rejection for each in self._expected.values() if each.rejection is not None]
        return missed

    # For whoever looks

    @property
    def missing_trainers(self) -> int:
        """Trainers that must still attach before the first round; 0 once all were there together."""
        return 0 if self._started else self._world_size - len(self._expected)

    def waiting_for(self, now_s: float) -> list[int]:
        """Ranks whose commit the next round still lacks."""
        return sorted(self.policy.waiting_for(self._view(now_s)))

    def step_of(self, trainer_id: int) -> int:
        """A trainer's last step that any shard reported; 0 if none."""
        trainer = self._expected.get(trainer_id)
        return trainer.seen_step if trainer else 0

    def lag_of(self, trainer_id: int) -> int:
        """Rounds decided since a trainer was last told what became of a step; 0 for one that is not expected."""
        trainer = self._expected.get(trainer_id)
        return max(0, self.round - trainer.told_round) if trainer else 0

    def statistics(self) -> RoundStatistics:
        """Counts since the model was registered."""
        return RoundStatistics(
            num_accepted=self._num_accepted,
            num_rejected=self._num_rejected,
            num_skipped=self._num_skipped,
            staleness=dict(self._staleness),
        )

    # Inside

    def _commits(self) -> Iterable[_Waiting]:
        return (waiting for trainer in self._expected.values() for waiting in trainer.commits.values())

    def _view(self, now_s: float) -> RoundView:
        members: list[MemberView] = []
        since_s = now_s
        for trainer in self._expected.values():
            waiting = trainer.waiting
            offer = waiting.offer if waiting is not None else None
            fresh = offer is not None and offer.base_round == self.round
            in_step = trainer.told_round == self.round or fresh
            members.append(MemberView(rank=trainer.rank, clock=trainer.clock, in_step=in_step, offer=offer))
            since_s = min(since_s, waiting.since_s) if waiting is not None else since_s
        return RoundView(round=self.round, members=tuple(members), waited_s=now_s - since_s)

    def _reject(self, verdict: Verdict) -> list[Refusal]:
        rejections: list[Refusal] = []
        for trainer_id, trainer in self._expected.items():
            if trainer.rank not in verdict.reject:
                continue
            waiting = trainer.waiting
            assert waiting is not None
            self._settle(trainer, waiting.commit.step)
            trainer.rejection = Refusal(
                trainer_id=trainer_id,
                step=waiting.commit.step,
                round=self.round,
                staleness=self.round - waiting.offer.base_round if waiting.offer is not None else 0,
                reason=verdict.reject[trainer.rank],
                error=verdict.error,
            )
            trainer.told_round = self.round
            rejections.append(trainer.rejection)
        self._num_rejected += len(rejections)
        return rejections

    def _close(self, ranks: frozenset[int]) -> Decision | Plan:
        """Makes the next round of these trainers' gradients: decided at once, or prepared if shards must look first."""
        members = sorted((each.rank, key) for key, each in self._expected.items() if each.rank in ranks)
        taken: list[tuple[int, int, _Waiting]] = []
        for rank, key in members:
            waiting = self._expected[key].waiting
            assert waiting is not None
            taken.append((key, rank, waiting))
        weights, divisor = weights_and_divisor([waiting.commit.samples for _, _, waiting in taken])
        contributions = tuple(
            Contribution(
                trainer_id=key,
                rank=rank,
                step=waiting.commit.step,
                weight=weight,
                staleness=self.round - waiting.offer.base_round if waiting.offer is not None else 0,
                clock=self._expected[key].clock + 1,
            )
            for (key, rank, waiting), weight in zip(taken, weights, strict=True)
        )
        overflowed = [rank for _, rank, waiting in taken if waiting.commit.overflow]
        leading = self._leading(taken[0][2].commit)
        skip = ""
        if overflowed:
            skip = f"loss scaling overflowed on the ranks {overflowed}; nobody stepped"
        elif not divisor:
            skip = "no trainer in the round contributed samples"
        decision = Decision(
            round=self.round + 1,
            contributions=contributions,
            divisor=divisor,
            options=leading.options,
            buffers_from=self._buffers_from(contributions),
            skip=skip,
            overflow=bool(overflowed),
            clip_value=leading.rules.clip_value,
            settled=min(self._applied.values(), default=self.round),
        )
        if not self._always_prepares and (skip or not leading.rules.need_look):
            self._take(decision)
            return self._decide(decision)
        self._num_attempts += 1
        plan = Plan(plan=decision, attempt=self._num_attempts, rules=leading.rules)
        self._prepare(plan)
        return plan

    def _prepare(self, plan: Plan) -> None:
        self._preparing = _Preparing(plan=plan, before=self._take(plan.plan))

    def _take(self, decision: Decision) -> list[_Before]:
        """Takes the commits of a round off the book; returns what their trainers were before."""
        before: list[_Before] = []
        self.round = decision.round
        for contribution in decision.contributions:
            trainer = self._expected.get(contribution.trainer_id)
            if trainer is not None:
                waiting = trainer.commits.get(contribution.step)
                before.append(
                    _Before(
                        trainer_id=contribution.trainer_id,
                        settled_step=trainer.settled_step,
                        told_round=trainer.told_round,
                        commit=waiting.commit if waiting is not None else None,
                    )
                )
                self._settle(trainer, contribution.step)
                trainer.told_round = self.round
                trainer.clock = contribution.clock
        return before

    def _finish(self, preparing: _Preparing) -> Decision:
        """Decides the round that was prepared."""
        self._preparing = None
        return self._decide(decided(preparing.plan, preparing.reports.values(), self._names))

    def _decide(self, decision: Decision) -> Decision:
        self._outstanding.append(decision)
        self.version += decision.steps
        counted = [each.staleness for each in decision.contributions if each.weight]
        self._num_accepted += len(counted)
        self._num_skipped += bool(decision.skip)
        self._staleness.update(min(each, MAX_STALENESS_SHOWN) for each in counted)
        return decision

    @staticmethod
    def _settle(trainer: _Expected, settled_step: int) -> None:
        """Takes a trainer's commit, and what is older, off the book."""
        trainer.settled_step = settled_step
        trainer.commits = {step: each for step, each in trainer.commits.items() if step > settled_step}
        trainer.rejection = None

    def _leading(self, otherwise: CommitInfo) -> CommitInfo:
        """The last commit of the lowest rank: its options and rules count for everybody, so that schedules agree.

        Of those who have been there longest: a trainer that joins late begins its schedule.
        """
        known = [
            (each.since_round, each.rank, each.latest) for each in self._expected.values() if each.latest is not None
        ]
        return min(known, key=lambda each: each[:2])[2] if known else otherwise

    def _buffers_from(self, contributions: Sequence[Contribution]) -> int:
        """The trainer whose buffers count: the lowest rank in the round; 0: those of nobody.

        Where every gradient is a round of its own, they are those of the lowest rank that contributes.
        """
        present = [each for each in contributions if each.weight]
        if self._buffers != "lowest" or not present:
            return 0
        if self.policy.mixed_rounds:
            contributing = [x.rank for x in self._expected.values() if x.latest is not None and x.latest.samples]
            # A client that commits ahead may have said already that it contributes nothing next time.
            if present[0].rank > min(contributing, default=present[0].rank):
                return 0
        return present[0].trainer_id


def decided(plan: Plan, reports: Iterable[Prepared], names: Sequence[str]) -> Decision:
    """The decision that follows from a plan and what all shards have found: the same, whoever draws it."""
    if plan.plan.skip:
        return plan.plan
    reports = list(reports)
    treatment = treat(
        plan.rules,
        [square for report in reports for square in report.squares],
        [each for report in reports for each in report.nonfinite],
        names,
    )
    return replace(plan.plan, **asdict(treatment))
