"""Every benchmark runs from the command line, on little data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.command import app

_ROOT = Path(__file__).parents[2]
_DEADLINE_S = 600
_CASES = {
    "pushpull": [
        *("shm-1", "shm-50", "shm-10000", "tcp-1", "tcp-50", "tcp-50-bf16"),
        *("link10g-50", "link10g-50-bf16", "floor-copy", "floor-socket"),
    ],
    "small": ["step-2x2", "batch-2x2"],
    "ddp": ["step-comm", "mnist-cnn", "transformer", "mnist-cnn-overlap", "transformer-overlap"],
    "scaling": ["trainers-1", "trainers-2", "servers-1", "servers-2", "size-1MB", "size-4MB", "server-rss"],
    "replication": ["sync-step"],
}


def test_list_names_every_benchmark() -> None:
    listed = CliRunner().invoke(app, ["--list"]).output

    assert [line.split()[0] for line in listed.splitlines()] == list(_CASES)


@pytest.mark.parametrize("arguments", [["pushpul"], ["pushpull", "--case", "tcp-2"]])
def test_unknown_name_is_refused_with_those_that_there_are(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 2
    assert "pushpull" in result.output


@pytest.mark.slow
@pytest.mark.timeout(_DEADLINE_S + 10)
@pytest.mark.parametrize("name", _CASES)
def test_quick_run_writes_every_row(name: str, tmp_path: Path) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--json", str(file), "--png", str(picture)]

    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_DEADLINE_S)

    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    rows, skipped = record["rows"], {each["case"] for each in record["skipped"]}
    assert skipped <= {"link10g-50", "link10g-50-bf16"}  # not everybody is root
    assert [row["case"] for row in rows] == [case for case in _CASES[name] if case not in skipped]
    for row in rows:
        unit = "mb" if row["case"] == "server-rss" else "ms"
        assert row["ratio"] == pytest.approx(row[f"peer_{unit}"] / row[f"ours_{unit}"])
    assert all(case in done.stdout for case in _CASES[name])
    assert picture.read_bytes().startswith(b"\x89PNG")
