"""How a benchmark is timed: every side takes its turn in one run, and medians are compared."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

#: Does the work once and returns what it took, in seconds.
Side = Callable[[], float]

#: Turns of each side before the first one that counts.
WARMUP_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison, with everything it needs running.

    `peers` maps a label to one way of configuring the peer; the fastest of them is the one that is reported.
    """

    name: str
    ours: Side
    peers: Mapping[str, Side]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a case measured; `ratio` is peer_ms / ours_ms, so above 1 ours is faster."""

    case: str
    ours_ms: float
    peer_ms: float
    peer: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A named group of cases.

    `cases(quick)` yields one context manager a case: entering it starts the processes, leaving it ends them. Cases
    are entered one after the other, never two at a time. `rounds` and `quick_rounds` are how many turns each side
    gets unless the user says otherwise.
    """

    name: str
    summary: str
    rounds: int
    quick_rounds: int
    cases: Callable[[bool], Iterator[AbstractContextManager[Case]]]


def timed(action: Callable[[], object], *, repeats: int = 1) -> Side:
    """A side that calls `action` `repeats` times in a row and reports the mean time of one call."""

    def side() -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            action()
        return (time.perf_counter() - started) / repeats

    return side


def alternate(sides: Sequence[Side], *, rounds: int, warmup_rounds: int = WARMUP_ROUNDS) -> list[float]:
    """Median time of each side in milliseconds, in the order of `sides`.

    A round gives each side one turn (A B A B ...), so that whatever else the machine does falls on all of them
    alike. The first `warmup_rounds` rounds are run and not counted.
    """
    for _ in range(warmup_rounds):
        for side in sides:
            side()
    turns = [[side() for side in sides] for _ in range(rounds)]
    return [statistics.median(of_one_side) * 1e3 for of_one_side in zip(*turns, strict=True)]


def measure(case: Case, *, rounds: int) -> Row:
    """Times ours and every configuration of the peer in turn, and compares ours with the fastest of those."""
    ours_ms, *peers_ms = alternate([case.ours, *case.peers.values()], rounds=rounds)
    peer_ms, peer = min(zip(peers_ms, case.peers, strict=True))
    return Row(case=case.name, ours_ms=ours_ms, peer_ms=peer_ms, peer=peer, ratio=peer_ms / ours_ms)


def run(benchmark: Benchmark, *, quick: bool, rounds: int | None = None) -> list[Row]:
    """Measures every case of a benchmark, one after the other; `rounds` overrides the benchmark's own number."""
    num_rounds = rounds or (benchmark.quick_rounds if quick else benchmark.rounds)
    rows = []
    for opened in benchmark.cases(quick):
        with opened as case:
            rows.append(measure(case, rounds=num_rounds))
    return rows
