"""The comparison of codecs: what one run measures, and what is made of several."""

from pathlib import Path
from typing import Any

import compare_codecs
import compression
import pytest
import torch
from compare_codecs import row
from comparing import table
from compression import CANDIDATES
from mnist_data import Digits

from pserver.client.cluster import Cluster
from pserver.testing.local_cluster import LocalCluster

#: Bytes of the network's parameters, each tensor padded to 64 bytes.
WHOLE = 423_488


def left(accuracy: float, *, sent_bytes: int = 1_000_000, seconds: float = 7.0) -> dict[str, Any]:
    """What a run of 100 rounds leaves."""
    end = {"seconds": seconds, "round": 100, "sent_bytes": sent_bytes, "accuracy": accuracy}
    start = {"seconds": 0.1, "round": 1, "sent_bytes": 10_000, "accuracy": 0.1}
    return {"curve": [start, end], "received_bytes": 4_000_000}


@pytest.mark.parametrize(("codec", "sent", "received"), [("none", WHOLE, WHOLE), ("bf16-pull", WHOLE // 2, WHOLE // 2)])
def test_a_run_counts_the_bytes_of_its_steps_only(codec: str, sent: int, received: int) -> None:
    digits = Digits(torch.randn(40, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10)
    arguments = compression.parse(["--codec", codec, "--rounds", "2", "--batch-size", "4"])

    def program(session: Cluster) -> Any:
        return compression.run(session, arguments, digits)

    with LocalCluster(2) as cluster:
        ((snapshots, received_bytes),) = cluster.train(1, program, transport="grpc")
    assert [(each.round, each.sent_bytes) for each in snapshots] == [(1, sent), (2, 2 * sent)]
    assert received_bytes == 2 * received
    assert snapshots[0].values.keys() == snapshots[1].values.keys()


def test_a_row_has_means_over_the_seeds_bytes_a_round_and_the_time_of_the_fastest_run() -> None:
    runs = [left(0.96), left(0.98, sent_bytes=3_000_000, seconds=70.0)]
    assert row("bf16", runs) == ["`BFloat16()`", "97.0 % (96.0 to 98.0)", "20", "40", "7.0"]


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["1", "2"], ["3", "4"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n"


def test_every_codec_runs_once_with_each_seed_and_a_table_and_a_picture_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(codec: str, seed: int, out: Path, passed_on: list[str]) -> dict[str, Any]:
        asked.append((codec, seed, passed_on))
        return left(0.9)

    monkeypatch.setattr(compare_codecs, "run", run)
    monkeypatch.setattr("sys.argv", ["compare_codecs.py", "--out", str(tmp_path), "--seeds", "2", "--rounds", "5"])
    compare_codecs.main()
    assert asked == [(codec, seed, ["--rounds", "5"]) for seed in range(2) for codec in CANDIDATES]
    shown = (tmp_path / compare_codecs.TABLE).read_text()
    assert len(shown.splitlines()) == 2 + len(CANDIDATES)
    assert all(f"| `{each.label}` |" in shown for each in CANDIDATES.values())
    assert shown in capsys.readouterr().out
    assert (tmp_path / compare_codecs.PICTURE).read_bytes().startswith(b"\x89PNG")
