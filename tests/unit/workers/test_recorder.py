"""The folder that a run leaves behind."""

import json
from pathlib import Path

import pytest
import torch
from recorder import CURVES_NAME, EVENTS_PATTERN, MODEL_NAME, SUMMARY_NAME, Point, Recorder, Summary
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

SUMMARY = Summary(accuracy=0.75, num_held_out=4, rounds=3, seconds=1.5, world_size=2)


def record(out: Path, *, model: nn.Module, first_round: int = 1) -> None:
    with Recorder(out) as recorder:
        losses = [Point(first_round, 2.0), Point(first_round + 1, 1.0)]
        recorder.record_epoch(losses, accuracy=0.5, images_per_s=100.0)
        recorder.record_epoch([Point(first_round + 2, 0.5)], accuracy=0.75, images_per_s=200.0)
        recorder.finish(model, SUMMARY)


def scalars(out: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(out))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_run_leaves_events_curves_model_and_summary(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    record(tmp_path, model=model)
    assert scalars(tmp_path, "train/loss") == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert scalars(tmp_path, "test/accuracy") == [(2, 0.5), (3, 0.75)]
    assert scalars(tmp_path, "train/images_per_s") == [(2, 100.0), (3, 200.0)]
    assert (tmp_path / CURVES_NAME).read_bytes().startswith(b"\x89PNG")
    saved = load_file(tmp_path / MODEL_NAME)
    assert saved.keys() == {"weight", "bias"}
    assert torch.equal(saved["weight"], model.weight)
    assert json.loads((tmp_path / SUMMARY_NAME).read_text()) == {
        "accuracy": 0.75,
        "num_held_out": 4,
        "rounds": 3,
        "seconds": 1.5,
        "world_size": 2,
    }


def test_second_run_replaces_the_first_and_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    record(tmp_path, model=nn.Linear(2, 3))
    record(tmp_path, model=nn.Linear(4, 1), first_round=10)
    assert len(list(tmp_path.glob(EVENTS_PATTERN))) == 1
    assert scalars(tmp_path, "train/loss") == [(10, 2.0), (11, 1.0), (12, 0.5)]
    assert load_file(tmp_path / MODEL_NAME)["weight"].shape == (1, 4)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_interrupted_run_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    record(tmp_path, model=nn.Linear(2, 3))
    with pytest.raises(KeyboardInterrupt), Recorder(tmp_path):
        raise KeyboardInterrupt
    left = [path.name for path in tmp_path.iterdir() if not path.match(EVENTS_PATTERN)]
    assert left == []


def test_parameters_that_are_views_of_one_flat_are_saved_each_on_its_own(tmp_path: Path) -> None:
    flat = torch.arange(9, dtype=torch.float32)
    model = nn.Linear(2, 3)
    model.weight.data, model.bias.data = flat[:6].view(3, 2), flat[6:]
    record(tmp_path, model=model)
    saved = load_file(tmp_path / MODEL_NAME)
    assert saved["weight"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert saved["bias"].tolist() == [6, 7, 8]


def test_finishing_without_an_epoch_is_refused(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder, pytest.raises(ValueError, match="at least one epoch"):
        recorder.finish(nn.Linear(2, 3), SUMMARY)


def test_an_epoch_without_rounds_is_refused(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder, pytest.raises(ValueError, match="at least one round"):
        recorder.record_epoch([], accuracy=0.5, images_per_s=1.0)
