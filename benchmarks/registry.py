"""Every benchmark by name."""

from collections.abc import Mapping

from benchmarks import ddp, pushpull, replication, scaling, small
from benchmarks.harness import Benchmark


def by_name(*benchmarks: Benchmark) -> Mapping[str, Benchmark]:
    """The benchmarks by name, in order.

    Raises:
        ValueError: two have the same name.
    """
    named = {benchmark.name: benchmark for benchmark in benchmarks}
    if len(named) != len(benchmarks):
        raise ValueError(f"each benchmark needs a name of its own, but these are {[b.name for b in benchmarks]}")
    return named


BENCHMARKS = by_name(pushpull.BENCHMARK, small.BENCHMARK, ddp.BENCHMARK, scaling.BENCHMARK, replication.BENCHMARK)
