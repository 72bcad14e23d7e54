"""Steps one bucket with torch's own optimizer, with step counts and skipped gradients per parameter, as in torch."""

from collections.abc import Sequence, Set

import torch

from pserver.core.optimizers import make_optimizer
from pserver.types import GroupOptions
from pserver.wire.layout import Segment


class BucketStepper:
    """The optimizer of one bucket.

    Torch's optimizer sees *units*: runs of neighbouring tensors without padding between them, so that a run's vectors
    and its tail are those of its tensors. When a step leaves out some tensors of a unit, the unit is split for good,
    and each part keeps its own state from then on.

    Args:
        name: optimizer, as in `OPTIMIZERS`.
        group: its arguments.
        values: 1-D master values of the bucket; stepped in place.
        segments: the pieces of tensors in the bucket.
    """

    def __init__(self, name: str, group: GroupOptions, values: torch.Tensor, segments: Sequence[Segment]) -> None:
        self._values = values
        self._units = _runs(segments)
        self._uneven = False  # whether units may differ in how often they were stepped
        self._optimizer = make_optimizer(name, group, [self._piece(unit) for unit in self._units])

    def step_(self, gradient: torch.Tensor, absent: Set[int], options: GroupOptions) -> None:
        """Steps the bucket in place.

        Args:
            gradient: 1-D, the bucket's size and master dtype.
            absent: tensors that have no gradient this time; they are not stepped.
            options: numeric options of the parameter group for this step.
        """
        if absent:
            self._split(absent)
            self._uneven = True
        (param_group,) = self._optimizer.param_groups
        param_group.update(options)
        present = [
            (param, gradient[unit[0].start : unit[-1].stop])
            for unit, param in zip(self._units, param_group["params"], strict=True)
            if unit[0].tensor not in absent
        ]
        # Torch's fused SGD refuses to step parameters with and without a momentum buffer in one call.
        for fresh in (False, True) if self._uneven else (None,):
            for param, piece in present:
                if fresh is None or fresh == self._is_fresh(param):
                    param.grad = piece
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[tuple[tuple[Segment, ...], dict[str, torch.Tensor]]]:
        """For each unit its segments and its optimizer state; the tensors are the live ones."""
        (param_group,) = self._optimizer.param_groups
        return [
            (unit, self._optimizer.state.get(param, {}))
            for unit, param in zip(self._units, param_group["params"], strict=True)
        ]

    def _is_fresh(self, param: torch.Tensor) -> bool:
        return not any(isinstance(each, torch.Tensor) for each in self._optimizer.state.get(param, {}).values())

    def _piece(self, unit: tuple[Segment, ...]) -> torch.Tensor:
        return self._values[unit[0].start : unit[-1].stop]

    def _split(self, absent: Set[int]) -> None:
        (param_group,) = self._optimizer.param_groups
        units: list[tuple[Segment, ...]] = []
        params: list[torch.Tensor] = []
        for unit, param in zip(self._units, param_group["params"], strict=True):
            parts = _parts(unit, absent)
            if len(parts) == 1:
                units.append(unit)
                params.append(param)
                continue
            state = self._optimizer.state.pop(param, None)
            for part in parts:
                piece = self._piece(part)
                if state:
                    origin = unit[0].start
                    self._optimizer.state[piece] = _slice_state(state, part[0].start - origin, part[-1].stop - origin)
                units.append(part)
                params.append(piece)
        self._units = units
        param_group["params"] = params


def _runs(segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and runs[-1][-1].stop == segment.start:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return [tuple(run) for run in runs]


def _parts(unit: tuple[Segment, ...], absent: Set[int]) -> list[tuple[Segment, ...]]:
    parts: list[list[Segment]] = []
    for segment in unit:
        if parts and (parts[-1][-1].tensor in absent) == (segment.tensor in absent):
            parts[-1].append(segment)
        else:
            parts.append([segment])
    return [tuple(part) for part in parts]


def _slice_state(state: dict[str, object], start: int, stop: int) -> dict[str, object]:
    """Tensors of the unit's size are cut; step counts and the like (0-dim) are copied."""
    return {
        key: (value.clone() if value.dim() == 0 else value[start:stop]) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
