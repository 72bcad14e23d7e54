"""The MNIST script's own decisions, with a cluster of one process and an optimizer that steps locally."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mnist
import pytest
import torch
from mnist import DigitsNet, accuracy_on, parse_settings
from mnist_data import Digits

from tests.results import step_result


class LocalOptimizer(torch.optim.SGD):
    """Steps the model in this process; refuses each round in `refused`."""

    refused: frozenset[int] = frozenset()

    def __init__(self, cls: type, model: torch.nn.Module, *, name: str, sync: object, **options: float) -> None:
        super().__init__(model.parameters(), **options)
        self._round = 0

    def step(self, closure: Callable[[], float] | None = None, *, samples: int = 1) -> None:
        super().step(closure)
        self._round += 1
        accepted = self._round not in self.refused
        self.last_result = step_result(
            self._round, accepted=accepted, stepped=accepted, reason="" if accepted else "too late"
        )


class FakeCluster:
    """What the script sees of a cluster; keeps the figures it reported."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.reported: list[dict[str, float]] = []

    def __enter__(self) -> "FakeCluster":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def report(self, **figures: float) -> None:
        self.reported.append(figures)


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeCluster]:
    """Runs the script on 40 digits to train on, as the given trainer, with results in `tmp_path / "out"`."""
    generator = torch.Generator().manual_seed(0)
    digits = Digits(torch.randn(1040, 1, 28, 28, generator=generator), torch.arange(1040) % 10)

    def run(rank: int = 0, world_size: int = 1, *, optimizer: type = LocalOptimizer) -> FakeCluster:
        cluster = FakeCluster(rank, world_size)
        api = SimpleNamespace(
            connect=lambda: cluster, optim=SimpleNamespace(RemoteOptimizer=optimizer), Bsp=lambda: object()
        )
        monkeypatch.setattr(mnist, "pserver", api)
        monkeypatch.setattr(mnist, "load_digits", lambda cache_dir: digits)
        arguments = ["mnist.py", "--out", str(tmp_path / "out"), "--epochs", "2", "--batch-size", "8"]
        monkeypatch.setattr("sys.argv", arguments)
        mnist.main()
        return cluster

    return run


def test_rank_zero_records_the_run_and_ends_with_the_result(
    run_script: Callable[..., FakeCluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = run_script()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names > {"curves.png", "model.safetensors", "summary.json"}
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.startswith("held-out accuracy ")
    assert " % on 1000 images (training took " in last_line
    assert last_line.endswith(" s, 10 rounds)")
    assert cluster.reported[-1].keys() == {"epoch", "loss", "accuracy"}


def test_other_ranks_train_silently_and_leave_no_files(
    run_script: Callable[..., FakeCluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = run_script(rank=1, world_size=2)
    assert len(cluster.reported) == 6
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().out == ""


def test_a_step_that_was_not_counted_is_said(
    run_script: Callable[..., FakeCluster], capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(LocalOptimizer):
        refused = frozenset({3})

    run_script(optimizer=Refusing)
    assert "rank 0: not counted in round 3: too late" in capsys.readouterr().out


def test_same_seed_gives_the_same_model(run_script: Callable[..., FakeCluster], tmp_path: Path) -> None:
    run_script()
    first = (tmp_path / "out" / "model.safetensors").read_bytes()
    run_script()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == first


def test_network_has_the_stated_number_of_parameters() -> None:
    assert sum(parameter.numel() for parameter in DigitsNet().parameters()) == 105_866


def test_accuracy_is_the_fraction_classified_correctly() -> None:
    images = torch.eye(10)[torch.arange(1000) % 10]
    labels = (torch.arange(1000) % 10 + (torch.arange(1000) < 250)) % 10
    assert accuracy_on(torch.nn.Identity(), Digits(images, labels)) == 0.75


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["--batch-size", "-1"], ["--seed", "-1"], ["--epochs", "x"]])
def test_impossible_settings_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(arguments)
    assert arguments[0] in capsys.readouterr().err
