"""Every benchmark runs from the command line, on little data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_CASES = {"pushpull": ["tcp-1", "tcp-50"], "small": ["step-2x2"]}


def run_benchmarks(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_list_names_every_benchmark() -> None:
    assert [line.split()[0] for line in run_benchmarks("--list").splitlines()] == list(_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", _CASES)
def test_quick_run_writes_every_row(name: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"

    printed = run_benchmarks(name, "--quick", "--json", str(file))

    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == _CASES[name]
    assert all(row["ratio"] == pytest.approx(row["peer_ms"] / row["ours_ms"]) for row in rows)
    assert all(case in printed for case in _CASES[name])
