"""Rounds of one model: who is expected, what has arrived, what was decided."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pserver.core.messages import Committed, Contribution, Decision
from pserver.core.reduce import weights_and_divisor
from pserver.core.sync import RoundView, SyncPolicy, Verdict
from pserver.types import GroupOptions


@dataclass(slots=True, kw_only=True)
class _Commit:
    samples: int
    options: tuple[GroupOptions, ...]
    servers: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class _Expected:
    rank: int
    counted_step: int = 0
    counted_round: int = 0
    seen_step: int = 0
    commits: dict[int, _Commit] = field(default_factory=dict)


class RoundBook:
    """Decides rounds. A commit counts only once every shard has reported it, so a round is whole or absent everywhere.

    Args:
        policy: says when a round closes.
        servers: owners of the model's shards.
        world_size: trainers that must have attached before the first round.
    """

    def __init__(self, policy: SyncPolicy, servers: Iterable[str], world_size: int) -> None:
        self.policy = policy
        self.round = 0
        self._world_size = world_size
        self._started = False
        self._expected: dict[int, _Expected] = {}
        self._applied: dict[str, int] = dict.fromkeys(servers, 0)
        self._outstanding: deque[Decision] = deque()

    def attach(self, trainer_id: int, rank: int) -> int:
        """Expects a trainer from the next round on; returns the last decided round. Repeating it changes nothing."""
        if trainer_id not in self._expected:
            self._expected[trainer_id] = _Expected(rank=rank, counted_round=self.round)
            self._started = self._started or len(self._expected) >= self._world_size
        return self.round

    def remove(self, trainer_id: int) -> None:
        """Expects a trainer no more; what it has committed enters no round that is not decided yet."""
        self._expected.pop(trainer_id, None)

    def committed(self, server: str, report: Committed) -> None:
        """Notes that one shard has everything of a trainer's step. Repeats and reports of the past change nothing."""
        trainer = self._expected.get(report.trainer_id)
        if trainer is None or server not in self._applied:
            return
        trainer.seen_step = max(trainer.seen_step, report.step)
        if report.step > trainer.counted_step:
            commit = trainer.commits.setdefault(report.step, _Commit(samples=report.samples, options=report.options))
            commit.servers.add(server)

    def applied(self, server: str, round_number: int) -> None:
        """Notes that a shard has applied every round up to this one."""
        if server in self._applied:
            self._applied[server] = max(self._applied[server], round_number)
        slowest = min(self._applied.values(), default=self.round)
        while self._outstanding and self._outstanding[0].round <= slowest:
            self._outstanding.popleft()

    def decide(self) -> Decision | None:
        """Closes the next round if the policy allows it. The decision is kept until every shard has applied it."""
        if self.missing_trainers:
            return None
        ready = {trainer_id: step for trainer_id in self._expected if (step := self._complete_step(trainer_id))}
        view = RoundView(
            expected=frozenset(each.rank for each in self._expected.values()),
            complete=frozenset(self._expected[trainer_id].rank for trainer_id in ready),
        )
        if self.policy.verdict(view) is not Verdict.CLOSE:
            return None
        order = sorted(ready, key=lambda trainer_id: self._expected[trainer_id].rank)
        commits = [self._expected[trainer_id].commits[ready[trainer_id]] for trainer_id in order]
        weights, divisor = weights_and_divisor([commit.samples for commit in commits])
        self.round += 1
        decision = Decision(
            round=self.round,
            contributions=tuple(
                Contribution(
                    trainer_id=trainer_id, rank=self._expected[trainer_id].rank, step=ready[trainer_id], weight=weight
                )
                for trainer_id, weight in zip(order, weights, strict=True)
            ),
            divisor=divisor,
            options=commits[0].options,
        )
        for trainer_id in order:
            trainer = self._expected[trainer_id]
            trainer.counted_step, trainer.counted_round = ready[trainer_id], self.round
            trainer.commits = {step: each for step, each in trainer.commits.items() if step > trainer.counted_step}
        self._outstanding.append(decision)
        return decision

    def outstanding(self, server: str) -> list[Decision]:
        """Decisions that a shard has not reported as applied, in order."""
        return [decision for decision in self._outstanding if decision.round > self._applied.get(server, 0)]

    @property
    def missing_trainers(self) -> int:
        """Trainers that must still attach before the first round; 0 once all were there together."""
        return 0 if self._started else self._world_size - len(self._expected)

    def waiting_for(self) -> list[int]:
        """Ranks whose commit the next round still lacks."""
        return sorted(each.rank for key, each in self._expected.items() if not self._complete_step(key))

    def step_of(self, trainer_id: int) -> int:
        """A trainer's last step that any shard reported; 0 if none."""
        trainer = self._expected.get(trainer_id)
        return trainer.seen_step if trainer else 0

    def lag_of(self, trainer_id: int) -> int:
        """Rounds decided since a trainer's last contribution; 0 for one that is not expected."""
        trainer = self._expected.get(trainer_id)
        return self.round - trainer.counted_round if trainer else 0

    def _complete_step(self, trainer_id: int) -> int:
        commits = self._expected[trainer_id].commits
        whole = (step for step in sorted(commits) if commits[step].servers >= self._applied.keys())
        return next(whole, 0)
