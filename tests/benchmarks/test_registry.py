"""The registry refuses what it could not tell apart."""

import pytest

from benchmarks.pushpull import BENCHMARK
from benchmarks.registry import BENCHMARKS, by_name


def test_two_benchmarks_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="pushpull"):
        by_name(BENCHMARK, BENCHMARK)


def test_benchmarks_are_found_by_their_name() -> None:
    assert all(benchmark.name == name for name, benchmark in BENCHMARKS.items())
