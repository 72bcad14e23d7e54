"""How a benchmark is timed: every side takes its turn in one run, and medians are compared."""

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

#: Does the work once and returns what it took, in seconds (in bytes, where a case counts memory).
Side = Callable[[], float]

#: Turns of each side before the first one that counts.
WARMUP_ROUNDS = 3


class Skip(Exception):
    """A case cannot run on this machine; the message says why."""


class UnknownCase(ValueError):
    """A benchmark has no case of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a row's figures are in; `size` is one of it in seconds, or in bytes."""

    name: str
    size: float


MILLISECONDS = Unit(name="ms", size=1e-3)
MEGABYTES = Unit(name="MB", size=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison, with everything it needs running.

    `peers` maps a label to one way of configuring the peer; the fastest of them is the one that is reported.
    `moved_bytes` is what one measurement of ours moves, if the row is to say how fast. `hidden` gives the share of the
    communication of ours that its computation has hidden, if the row is to say it.
    """

    ours: Side
    peers: Mapping[str, Side]
    unit: Unit = MILLISECONDS
    moved_bytes: int | None = None
    hidden: Side | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a case measured, in `unit`; `ratio` is theirs / ours, so above 1 ours is faster, or smaller."""

    case: str
    ours: float
    theirs: float
    peer: str
    ratio: float
    unit: str = MILLISECONDS.name
    mb_per_s: float | None = None
    hidden_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A case that could not run, and why."""

    case: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run of a benchmark found."""

    name: str
    rows: Sequence[Row]
    skipped: Sequence[Skipped]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A named group of cases.

    `cases(quick)` has one context manager a case, by its name: entering it starts the processes, or raises `Skip`;
    leaving it ends them. Cases are entered one after the other, never two at a time. `rounds` and `quick_rounds` are
    how many turns each side gets unless the user says otherwise.
    """

    name: str
    summary: str
    rounds: int
    quick_rounds: int
    cases: Callable[[bool], Mapping[str, AbstractContextManager[Case]]]


def timed(action: Callable[[], object], *, repeats: int = 1) -> Side:
    """A side that calls `action` `repeats` times in a row and reports the mean time of one call."""

    def side() -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            action()
        return (time.perf_counter() - started) / repeats

    return side


def alternate(sides: Sequence[Side], *, rounds: int, warmup_rounds: int = WARMUP_ROUNDS) -> list[float]:
    """Median of what each side returned, in the order of `sides`.

    A round gives each side one turn (A B A B ...), so that whatever else the machine does falls on all of them
    alike. The first `warmup_rounds` rounds are run and not counted.
    """
    for _ in range(warmup_rounds):
        for side in sides:
            side()
    turns = [[side() for side in sides] for _ in range(rounds)]
    return [statistics.median(of_one_side) for of_one_side in zip(*turns, strict=True)]


def measure(name: str, case: Case, *, rounds: int) -> Row:
    """Gives ours and every configuration of the peer their turns, and compares ours with the best of those."""
    ours, *peers = alternate([case.ours, *case.peers.values()], rounds=rounds)
    theirs, peer = min(zip(peers, case.peers, strict=True))
    return Row(
        case=name,
        ours=ours / case.unit.size,
        theirs=theirs / case.unit.size,
        peer=peer,
        ratio=theirs / ours,
        unit=case.unit.name,
        mb_per_s=None if case.moved_bytes is None else case.moved_bytes / MEGABYTES.size / ours,
        hidden_share=None if case.hidden is None else case.hidden(),
    )


def run(benchmark: Benchmark, *, quick: bool, rounds: int | None = None, only: Collection[str] = ()) -> Figures:
    """Measures the cases of a benchmark, one after the other.

    Args:
        rounds: overrides the benchmark's own number.
        only: names of the cases to measure; empty: all of them.

    Raises:
        UnknownCase: `only` has a name that no case has.
    """
    num_rounds = rounds or (benchmark.quick_rounds if quick else benchmark.rounds)
    cases = benchmark.cases(quick)
    if unknown := sorted(set(only) - set(cases)):
        raise UnknownCase(f"benchmark {benchmark.name} has the cases {', '.join(cases)}, but not {', '.join(unknown)}")
    rows, skipped = [], []
    for name, opened in cases.items():
        if only and name not in only:
            continue
        try:
            with opened as case:
                rows.append(measure(name, case, rounds=num_rounds))
        except Skip as error:
            skipped.append(Skipped(case=name, reason=str(error)))
    return Figures(name=benchmark.name, rows=rows, skipped=skipped)
