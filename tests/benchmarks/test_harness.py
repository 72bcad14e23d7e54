"""What the harness computes and writes, with sides that take the time they are told."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.chart import draw_chart
from benchmarks.harness import (
    MEGABYTES,
    WARMUP_ROUNDS,
    Benchmark,
    Case,
    Figures,
    Row,
    Side,
    Skip,
    Skipped,
    UnknownCase,
    alternate,
    measure,
    run,
    timed,
)
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


def make_benchmark(cases: Callable[[bool], Mapping[str, AbstractContextManager[Case]]]) -> Benchmark:
    return Benchmark(name="fake", summary="nothing at all", rounds=4, quick_rounds=2, cases=cases)


@contextmanager
def steady_case() -> Iterator[Case]:
    yield Case(ours=steady(1.0), peers={"other": steady(1.0)})


@contextmanager
def skipping_case() -> Iterator[Case]:
    raise Skip("there is no such cable here")
    yield


def make_row(**changes: object) -> Row:
    fields: dict[str, object] = {"case": "c", "ours": 2.0, "theirs": 3.0, "peer": "other", "ratio": 1.5}
    return Row(**{**fields, **changes})


def make_figures(*rows: Row, skipped: Sequence[Skipped] = ()) -> Figures:
    return Figures(name="fake", rows=rows, skipped=skipped)


def test_sides_take_turns_in_every_round() -> None:
    turns: list[str] = []
    sides = [scripted([1.0] * 5, name=name, turns=turns) for name in "AB"]

    alternate(sides, rounds=3, warmup_rounds=2)

    assert turns == ["A", "B"] * 5


def test_median_ignores_an_outlier_and_the_warm_up() -> None:
    side = scripted([50.0, 0.001, 0.002, 9.0])

    assert alternate([side], rounds=3, warmup_rounds=1) == [pytest.approx(0.002)]


def test_medians_keep_the_order_of_the_sides() -> None:
    assert alternate([steady(0.003), steady(0.001)], rounds=1) == [pytest.approx(0.003), pytest.approx(0.001)]


def test_ratio_is_peer_over_ours_and_times_are_in_milliseconds() -> None:
    row = measure("c", Case(ours=steady(0.002), peers={"other": steady(0.005)}), rounds=1)

    assert (row.case, row.peer, row.unit) == ("c", "other", "ms")
    assert (row.ours, row.theirs, row.ratio) == pytest.approx((2.0, 5.0, 2.5))
    assert row.mb_per_s is None


def test_memory_is_in_megabytes() -> None:
    row = measure("c", Case(ours=steady(2e6), peers={"allowed": steady(6e6)}, unit=MEGABYTES), rounds=1)

    assert (row.ours, row.theirs, row.ratio, row.unit) == (2.0, 6.0, 3.0, "MB")


def test_speed_is_what_ours_moves_in_its_time() -> None:
    row = measure("c", Case(ours=steady(0.5), peers={"other": steady(1.0)}, moved_bytes=10_000_000), rounds=1)

    assert row.mb_per_s == pytest.approx(20.0)


def test_a_row_says_how_much_was_hidden_if_that_was_asked() -> None:
    case = Case(ours=steady(0.5), peers={"other": steady(1.0)}, hidden=lambda: 0.25)

    assert measure("c", case, rounds=1).hidden_share == 0.25
    assert measure("c", Case(ours=steady(0.5), peers={"other": steady(1.0)}), rounds=1).hidden_share is None


def test_peer_is_reported_in_its_fastest_configuration() -> None:
    row = measure("c", Case(ours=steady(0.002), peers={"slow": steady(0.006), "fast": steady(0.003)}), rounds=1)

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
        yield Case(ours=scripted([1.0] * 99, name="ours", turns=turns), peers={"other": steady(1.0)})

    run(make_benchmark(lambda _quick: {"c": case()}), quick=quick, rounds=rounds)

    assert len(turns) == WARMUP_ROUNDS + expected


def test_cases_are_opened_one_at_a_time_and_closed_after_a_failure() -> None:
    events: list[str] = []

    def fail() -> float:
        raise RuntimeError("the peer broke")

    @contextmanager
    def case(name: str, peer: Side) -> Iterator[Case]:
        events.append(f"open {name}")
        try:
            yield Case(ours=steady(1.0), peers={"other": peer})
        finally:
            events.append(f"close {name}")

    benchmark = make_benchmark(lambda _quick: {"a": case("a", steady(1.0)), "b": case("b", fail)})

    with pytest.raises(RuntimeError, match="the peer broke"):
        run(benchmark, quick=True)
    assert events == ["open a", "close a", "open b", "close b"]


def test_case_that_cannot_run_here_is_skipped_by_name_with_the_reason() -> None:
    figures = run(make_benchmark(lambda _quick: {"a": skipping_case(), "b": steady_case()}), quick=True)

    assert [row.case for row in figures.rows] == ["b"]
    assert figures.skipped == [Skipped(case="a", reason="there is no such cable here")]


def test_only_the_cases_asked_for_are_measured() -> None:
    benchmark = make_benchmark(lambda _quick: {name: steady_case() for name in "abc"})

    assert [row.case for row in run(benchmark, quick=True, only=["b"]).rows] == ["b"]
    with pytest.raises(UnknownCase, match="has the cases a, b, c, but not d"):
        run(benchmark, quick=True, only=["d"])


def test_json_holds_exactly_the_documented_fields(tmp_path: Path) -> None:
    rows = (make_row(), make_row(mb_per_s=20.0), make_row(unit="MB"))
    write_json(tmp_path / "figures.json", make_figures(*rows, skipped=[Skipped(case="s", reason="no root")]))

    record = json.loads((tmp_path / "figures.json").read_text())
    assert list(record) == ["name", "machine", "rows", "skipped"]
    assert record["name"] == "fake"
    timed_row = {"case": "c", "ours_ms": 2.0, "peer_ms": 3.0, "peer": "other", "ratio": 1.5}
    assert record["rows"] == [
        timed_row,
        timed_row | {"mb_per_s": 20.0},
        {"case": "c", "ours_mb": 2.0, "peer_mb": 3.0, "peer": "other", "ratio": 1.5},
    ]
    assert record["skipped"] == [{"case": "s", "reason": "no root"}]


def test_machine_names_versions_but_neither_host_nor_paths(tmp_path: Path) -> None:
    write_json(tmp_path / "figures.json", make_figures())

    text = json.loads((tmp_path / "figures.json").read_text())["machine"]
    assert all(word in text for word in ("cores", "GiB", "python", "torch", "grpcio"))
    assert str(Path.home()) not in text
    assert len(text) < 200


def test_table_shows_the_ratio_of_each_row_and_what_was_skipped() -> None:
    output = StringIO()
    figures = make_figures(make_row(case="first", ratio=1.234), skipped=[Skipped(case="s", reason="no root")])

    print_table(Console(file=output, width=120), figures)

    assert "first" in output.getvalue()
    assert "1.23" in output.getvalue()
    assert "skipped: s: no root" in output.getvalue()


@pytest.mark.parametrize("rows", [[], [make_row()], [make_row(ratio=0.01), make_row(case="d", ratio=30.0)]])
def test_chart_is_a_png(rows: list[Row], tmp_path: Path) -> None:
    draw_chart(tmp_path / "chart.png", make_figures(*rows, skipped=[Skipped(case="s", reason="no root")]))

    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
