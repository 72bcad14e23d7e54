"""What the harness computes and writes, with sides that take the time they are told."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness import WARMUP_ROUNDS, Benchmark, Case, Row, Side, alternate, measure, run, timed
from benchmarks.report import print_table, write_json


def scripted(seconds: Sequence[float], *, name: str = "", turns: list[str] | None = None) -> Side:
    """A side that takes `seconds` one after the other, and writes its name into `turns` at each turn."""
    remaining = iter(seconds)

    def side() -> float:
        if turns is not None:
            turns.append(name)
        return next(remaining)

    return side


def steady(seconds: float) -> Side:
    return lambda: seconds


def make_benchmark(cases: Callable[[bool], Iterator[AbstractContextManager[Case]]]) -> Benchmark:
    return Benchmark(name="fake", summary="nothing at all", rounds=4, quick_rounds=2, cases=cases)


def make_row(**changes: object) -> Row:
    fields: dict[str, object] = {"case": "c", "ours_ms": 2.0, "peer_ms": 3.0, "peer": "other", "ratio": 1.5}
    return Row(**{**fields, **changes})


def test_sides_take_turns_in_every_round() -> None:
    turns: list[str] = []
    sides = [scripted([1.0] * 5, name=name, turns=turns) for name in "AB"]

    alternate(sides, rounds=3, warmup_rounds=2)

    assert turns == ["A", "B"] * 5


def test_median_ignores_an_outlier_and_the_warm_up() -> None:
    side = scripted([50.0, 0.001, 0.002, 9.0])

    assert alternate([side], rounds=3, warmup_rounds=1) == [pytest.approx(2.0)]


def test_medians_keep_the_order_of_the_sides() -> None:
    assert alternate([steady(0.003), steady(0.001)], rounds=1) == [pytest.approx(3.0), pytest.approx(1.0)]


def test_ratio_is_peer_over_ours() -> None:
    row = measure(Case(name="c", ours=steady(0.002), peers={"other": steady(0.005)}), rounds=1)

    assert (row.case, row.peer) == ("c", "other")
    assert (row.ours_ms, row.peer_ms, row.ratio) == pytest.approx((2.0, 5.0, 2.5))


def test_peer_is_reported_in_its_fastest_configuration() -> None:
    row = measure(Case(name="c", ours=steady(0.002), peers={"slow": steady(0.006), "fast": steady(0.003)}), rounds=1)

    assert row.peer == "fast"
    assert row.ratio == pytest.approx(1.5)


def test_timed_calls_the_action_and_reports_the_mean_of_its_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    clock = iter([10.0, 14.0])
    monkeypatch.setattr("benchmarks.harness.time.perf_counter", lambda: next(clock))

    assert timed(lambda: calls.append(None), repeats=4)() == pytest.approx(1.0)
    assert len(calls) == 4


@pytest.mark.parametrize(("quick", "rounds", "expected"), [(False, None, 4), (True, None, 2), (True, 7, 7)])
def test_number_of_rounds_is_the_users_or_else_the_benchmarks(quick: bool, rounds: int | None, expected: int) -> None:
    turns: list[str] = []

    @contextmanager
    def case() -> Iterator[Case]:
        yield Case(name="c", ours=scripted([1.0] * 99, name="ours", turns=turns), peers={"other": steady(1.0)})

    run(make_benchmark(lambda _quick: iter([case()])), quick=quick, rounds=rounds)

    assert len(turns) == WARMUP_ROUNDS + expected


def test_cases_are_opened_one_at_a_time_and_closed_after_a_failure() -> None:
    events: list[str] = []

    def fail() -> float:
        raise RuntimeError("the peer broke")

    @contextmanager
    def case(name: str, peer: Side) -> Iterator[Case]:
        events.append(f"open {name}")
        try:
            yield Case(name=name, ours=steady(1.0), peers={"other": peer})
        finally:
            events.append(f"close {name}")

    benchmark = make_benchmark(lambda _quick: iter([case("a", steady(1.0)), case("b", fail)]))

    with pytest.raises(RuntimeError, match="the peer broke"):
        run(benchmark, quick=True)
    assert events == ["open a", "close a", "open b", "close b"]


def test_json_holds_exactly_the_documented_fields(tmp_path: Path) -> None:
    write_json(tmp_path / "figures.json", name="fake", rows=[make_row()])

    record = json.loads((tmp_path / "figures.json").read_text())
    assert list(record) == ["name", "machine", "rows"]
    assert record["name"] == "fake"
    assert record["rows"] == [{"case": "c", "ours_ms": 2.0, "peer_ms": 3.0, "peer": "other", "ratio": 1.5}]


def test_machine_names_versions_but_neither_host_nor_paths(tmp_path: Path) -> None:
    write_json(tmp_path / "figures.json", name="fake", rows=[])

    text = json.loads((tmp_path / "figures.json").read_text())["machine"]
    assert all(word in text for word in ("cores", "GiB", "python", "torch", "grpcio"))
    assert str(Path.home()) not in text
    assert len(text) < 200


def test_table_shows_the_ratio_of_each_row() -> None:
    output = StringIO()

    print_table(Console(file=output, width=120), name="fake", rows=[make_row(case="first", ratio=1.234)])

    assert "first" in output.getvalue()
    assert "1.23" in output.getvalue()
