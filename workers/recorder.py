"""What a training run leaves behind: TensorBoard events, curves, the model and a summary, all in one folder."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from safetensors.torch import save_file
from torch import nn

EVENTS_PATTERN = "events.out.tfevents.*"
CURVES_NAME = "curves.png"
MODEL_NAME = "model.safetensors"
SUMMARY_NAME = "summary.json"

_SMOOTHING_ROUNDS = 20
_LOSS_COLOUR = "#1f77b4"
_ACCURACY_COLOUR = "#2a7f3f"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended; `accuracy` is the fraction of `num_held_out` images, `seconds` the training's wall time."""

    accuracy: float
    num_held_out: int
    rounds: int
    seconds: float
    world_size: int


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a curve."""

    round: int
    value: float


class Recorder:
    """Records one run into the folder `out`; for one thread, used as a context manager.

    Entering creates the folder and removes what an earlier run recorded there (and nothing else). Scalars reach
    TensorBoard while training runs; `finish` writes the rest.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._losses: list[Point] = []
        self._accuracies: list[Point] = []

    def __enter__(self) -> Self:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only a recording trainer needs it

        self._out.mkdir(parents=True, exist_ok=True)
        for pattern in (EVENTS_PATTERN, CURVES_NAME, MODEL_NAME, SUMMARY_NAME):
            for stale in self._out.glob(pattern):
                stale.unlink()
        self._events = SummaryWriter(str(self._out))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._events.close()

    def record_epoch(self, losses: Sequence[Point], *, accuracy: float, images_per_s: float) -> None:
        """Add the loss of each round of an epoch, and the held-out accuracy (a fraction) and speed at its end.

        Raises ValueError if `losses` is empty.
        """
        if not losses:
            raise ValueError("an epoch needs the loss of at least one round")
        for point in losses:
            self._events.add_scalar("train/loss", point.value, point.round)
        end = losses[-1].round
        self._events.add_scalar("train/images_per_s", images_per_s, end)
        self._events.add_scalar("test/accuracy", accuracy, end)
        self._events.flush()
        self._losses.extend(losses)
        self._accuracies.append(Point(end, accuracy))

    def finish(self, model: nn.Module, summary: Summary) -> None:
        """Write `model`'s state under its own names (safetensors), `summary` (JSON) and the curves (PNG).

        Raises ValueError if no epoch was recorded.
        """
        if not self._accuracies:
            raise ValueError("nothing to draw: record at least one epoch before finish()")
        # Parameters may be views into one flat tensor; copies keep each one's own bytes only.
        state = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
        save_file(state, self._out / MODEL_NAME)
        (self._out / SUMMARY_NAME).write_text(json.dumps(asdict(summary), indent=2) + "\n")
        _draw_curves(self._losses, self._accuracies, self._out / CURVES_NAME)


def _draw_curves(losses: Sequence[Point], accuracies: Sequence[Point], path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import, and needed once, at the end

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)

    rounds = [point.round for point in losses]
    values = np.array([point.value for point in losses])
    above.plot(rounds, values, color=_LOSS_COLOUR, alpha=0.3, linewidth=0.8, label="each round")
    above.plot(rounds, _trailing_mean(values), color=_LOSS_COLOUR, label=f"mean of {_SMOOTHING_ROUNDS} rounds")
    above.set(title="Training loss (rank 0)", ylabel="cross-entropy", yscale="log")
    above.yaxis.set_major_formatter("{x:g}")
    above.legend(frameon=False)

    percent = [100 * point.value for point in accuracies]
    below.plot([point.round for point in accuracies], percent, color=_ACCURACY_COLOUR, marker="o", markersize=4)
    below.set(title=f"Held-out accuracy, {percent[-1]:.2f} % at the end", xlabel="round", ylabel="accuracy (%)")

    for panel in (above, below):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _trailing_mean(values: np.ndarray) -> np.ndarray:
    """The mean of each value and up to `_SMOOTHING_ROUNDS - 1` before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - _SMOOTHING_ROUNDS, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
