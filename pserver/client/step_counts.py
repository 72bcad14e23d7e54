"""What became of a trainer's steps."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pserver.client.stopwatch import Stopwatch
from pserver.types import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """What became of this trainer's steps on one model since it registered.

    Attributes:
        num_accepted: gradients counted in a round.
        num_rejected: gradients refused by the sync policy.
        num_skipped: rounds it was in that stepped nothing.
        num_nonfinite: NaN and infinite elements in the gradients of its rounds, if the policy makes servers look.
        num_mixed_pulls: replies in which shards were at different rounds; only Ssp and Async allow it.
        staleness: how many of its gradients were so many rounds old when they were applied.
        communication_s: seconds in which gradients or parameters were on their way; others' gradients, which a round
            waits for, among it.
        waited_s: seconds in which the training thread stood still for it.
    """

    num_accepted: int
    num_rejected: int
    num_skipped: int
    num_nonfinite: int
    num_mixed_pulls: int
    staleness: Mapping[int, int]
    communication_s: float
    waited_s: float

    @property
    def hidden_share(self) -> float:
        """The share of the communication time that this trainer spent computing; see `early_push` and `late_pull`."""
        return max(0.0, 1 - self.waited_s / self.communication_s) if self.communication_s else 0.0


class StepCounts:
    """Counts outcomes, and the time they take. The stopwatches are thread-safe, the rest is not."""

    def __init__(self) -> None:
        self.communicating = Stopwatch()
        self.waiting = Stopwatch()
        self.num_mixed_pulls = 0
        self._num_accepted = self._num_rejected = self._num_skipped = self._num_nonfinite = 0
        self._staleness: Counter[int] = Counter()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The training thread does nothing but communicate in the block."""
        with self.communicating.running(), self.waiting.running():
            yield

    def add(self, result: StepResult, samples: int) -> None:
        """Counts one step, to which this trainer contributed so many samples."""
        counted = result.accepted and samples > 0
        self._num_accepted += counted
        self._num_rejected += not result.accepted
        self._num_skipped += result.accepted and not result.stepped
        self._num_nonfinite += result.num_nonfinite
        if counted:
            self._staleness[result.staleness] += 1

    def statistics(self) -> ModelStatistics:
        """The counts until now."""
        return ModelStatistics(
            num_accepted=self._num_accepted,
            num_rejected=self._num_rejected,
            num_skipped=self._num_skipped,
            num_nonfinite=self._num_nonfinite,
            num_mixed_pulls=self.num_mixed_pulls,
            staleness=dict(self._staleness),
            communication_s=self.communicating.seconds,
            waited_s=self.waiting.seconds,
        )
