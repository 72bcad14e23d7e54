"""What a shard remembers for a coordinator that does not know it: the last decisions, and each trainer's progress."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from pserver.core.messages import CommitInfo, Decision, Refusal, TrainerProgress


class History:
    """The last rounds of one shard, as far as some other shard may lack them. Not thread-safe."""

    def __init__(self, decisions: Iterable[Decision] = ()) -> None:
        self._decisions: deque[Decision] = deque()
        self._trainers: dict[int, TrainerProgress] = {}
        for decision in decisions:
            self.decided(decision)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Those that were not settled when the last one was made, and it."""
        return tuple(self._decisions)

    @property
    def trainers(self) -> tuple[TrainerProgress, ...]:
        """Everybody who has been heard of."""
        return tuple(self._trainers.values())

    def decided(self, decision: Decision) -> None:
        """A round was applied."""
        while self._decisions and self._decisions[0].round <= decision.settled:
            self._decisions.popleft()
        self._decisions.append(decision)
        for each in decision.contributions:
            self._settled(each.trainer_id, each.step, decision.round, clock=each.clock)

    def refused(self, refusal: Refusal) -> None:
        """A step was refused."""
        self._settled(refusal.trainer_id, refusal.step, refusal.round, refusal=refusal)

    def committed(self, trainer_id: int, commit: CommitInfo) -> None:
        """A trainer has committed a step."""
        known = self._trainers.get(trainer_id) or _nothing_of(trainer_id)
        self._trainers[trainer_id] = replace(known, latest=commit)

    def forget_trainer(self, trainer_id: int) -> None:
        """A trainer has ended."""
        self._trainers.pop(trainer_id, None)

    def _settled(
        self, trainer_id: int, step: int, told_round: int, *, clock: int = 0, refusal: Refusal | None = None
    ) -> None:
        known = self._trainers.get(trainer_id) or _nothing_of(trainer_id)
        if step >= known.settled_step:
            self._trainers[trainer_id] = replace(
                known, settled_step=step, told_round=told_round, clock=clock or known.clock, refusal=refusal
            )


def _nothing_of(trainer_id: int) -> TrainerProgress:
    return TrainerProgress(trainer_id=trainer_id, settled_step=0, told_round=0, clock=0, latest=None, refusal=None)
