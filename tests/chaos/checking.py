"""Whether a model holds what its trainers were told: pure functions of ledgers and values."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.chaos.pushes import MAX_IN_ROUND, NUM_DENSE, PERIOD, UNIT, Update, kind_of, shares_of_kind

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trainer was told of a step; times are those of the machine's steady clock, in seconds."""

    round: int
    accepted: bool
    num_trainers: int
    began_s: float
    ended_s: float


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What a trainer has noted: steps that it began, what it was told of them, and how often its lease ended."""

    trainer: int
    begun: dict[int, float] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    num_ended: int = 0
    failure: str = ""

    @classmethod
    def read(cls, trainer: int, path: Path) -> "Ledger":
        """Reads what trainer.py wrote; the last line may be cut off by the trainer's end."""
        ledger = cls(trainer=trainer)
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):
                ledger._take(**json.loads(line))
        return ledger

    def _take(self, event: str, step: int, at_s: float, **about: object) -> None:
        if event == "begin":
            self.begun[step] = at_s
        elif event == "end":
            self.outcomes[step] = Outcome(began_s=self.begun[step], ended_s=at_s, **about)  # type: ignore[arg-type]
        elif event == "lease ended":
            self.num_ended += 1
        else:
            self.failure = str(about["error"])


def violations(ledgers: Sequence[Ledger], slots: torch.Tensor, dense: torch.Tensor) -> list[str]:
    """What is wrong with the final values; nothing if every acknowledged update is in them exactly once, every other
    one that was begun at most once, and nothing else."""
    values = {(row, column): slots[row, column].item() for row, column in slots.nonzero().tolist()}
    outcomes = {(each.trainer, step): outcome for each in ledgers for step, outcome in each.outcomes.items()}
    counted = {update: outcome for update, outcome in outcomes.items() if outcome.accepted}
    refused = outcomes.keys() - counted.keys()
    begun = {(each.trainer, step) for each in ledgers for step in each.begun}
    found: list[str] = []
    for update, outcome in counted.items():
        value, expected = values.get(update, 0.0), UNIT / outcome.num_trainers
        if value != expected:
            what = "lost" if value == 0 else "in a wrong number of times"
            found.append(f"acknowledged update {update}, {outcome}, is {what}: expected {expected}, found {value}")
    unknown = begun - outcomes.keys()
    for update, value in values.items():
        if update in refused:
            found.append(f"update {update} is in ({value}), although its trainer was told that it was refused")
        elif update in unknown and value not in {UNIT / number for number in range(1, MAX_IN_ROUND + 1)}:
            found.append(f"update {update}, of which its trainer heard nothing, is in more than once: {value}")
        elif update not in begun:
            found.append(f"foreign update: {update} is in ({value}), but nobody pushed it")
    found += _rounds_that_differ(counted, len([update for update in unknown if values.get(update)]))
    found += _differences(dense, expected_dense(values))
    return found


def expected_dense(values: Mapping[Update, float]) -> torch.Tensor:
    """What `dense` must be if just these updates are in, as their slots say."""
    by_kind: dict[int, float] = defaultdict(float)
    for update, value in values.items():
        by_kind[kind_of(update)] += value
    total = torch.zeros(NUM_DENSE, dtype=torch.float64)
    for kind in range(PERIOD):
        total += by_kind[kind] * shares_of_kind(kind).double()
    return total.float()


def _rounds_that_differ(counted: Mapping[Update, Outcome], num_unknown: int) -> list[str]:
    """Rounds in which trainers were told different things, or that count more than there were."""
    sizes: dict[int, set[int]] = defaultdict(set)
    told: Counter[int] = Counter()
    for outcome in counted.values():
        sizes[outcome.round].add(outcome.num_trainers)
        told[outcome.round] += 1
    found = [f"round {number} had {sorted(size)} trainers" for number, size in sizes.items() if len(size) > 1]
    spare = {number: max(size) - told[number] for number, size in sizes.items()}
    found += [
        f"round {number} counts {told[number]} trainers, {-rest} too many" for number, rest in spare.items() if rest < 0
    ]
    missing = sum(rest for rest in spare.values() if rest > 0)
    if missing > num_unknown:
        found.append(f"rounds count {missing} updates that nobody was told of, but only {num_unknown} such are in")
    return found


def _differences(dense: torch.Tensor, expected: torch.Tensor) -> list[str]:
    wrong = (dense != expected).nonzero().flatten().tolist()
    if not wrong:
        return []
    named = [f"[{index}] {dense[index].item()} for {expected[index].item()}" for index in wrong[:_MAX_NAMED]]
    return [f"{len(wrong)} elements of dense, {wrong[0]} to {wrong[-1]}, are not what slots say: {', '.join(named)}"]


def longest_pause_s(ledgers: Iterable[Ledger], stopped: Mapping[int, Sequence[tuple[float, float]]]) -> float:
    """The longest time that one step took, of those during which its trainer was not stopped itself.

    Args:
        stopped: when each trainer was, from and to.
    """
    return max(
        (
            outcome.ended_s - outcome.began_s
            for each in ledgers
            for outcome in each.outcomes.values()
            if not any(_overlap(outcome, *stop) for stop in stopped.get(each.trainer, ()))
        ),
        default=0.0,
    )


def _overlap(outcome: Outcome, start_s: float, end_s: float) -> bool:
    return start_s < outcome.ended_s and outcome.began_s < end_s
