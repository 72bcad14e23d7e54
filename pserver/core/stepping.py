"""Steps one bucket with torch's own optimizer, with step counts and skipped gradients per parameter, as in torch."""

from collections.abc import Callable, Iterable, Sequence, Set

import torch

from pserver.core.optimizer_state import (
    StatePiece,
    StateReader,
    join_states,
    may_join,
    slice_state,
    state_of_segment,
    whole_state,
)
from pserver.core.optimizers import make_optimizer, optimizer_entry
from pserver.errors import InternalError
from pserver.types import GroupOptions
from pserver.wire.layout import Segment

Unit = tuple[Segment, ...]


class BucketStepper:
    """The optimizer of one bucket.

    An element-wise optimizer sees *units*: runs of neighbouring tensors without padding between them, so that a run's
    vectors and its tail are those of its tensors. When a step leaves out some tensors of a unit, the unit is split for
    good, and each part keeps its own state from then on. Any other optimizer sees each tensor in its shape.

    Args:
        name: optimizer, as in `OPTIMIZERS`.
        group: its arguments.
        values: 1-D master values of the bucket; stepped in place.
        segments: the pieces of tensors in the bucket.
        shapes: None for an element-wise optimizer; else the shape of each segment's tensor, of which no part lies
            elsewhere.

    Raises:
        UnsupportedOptimizer: unknown optimizer, or arguments that it refuses.
        InternalError: tensors are cut that must not be.
    """

    def __init__(
        self,
        name: str,
        group: GroupOptions,
        values: torch.Tensor,
        segments: Sequence[Segment],
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        if shapes is None and not optimizer_entry(name).elementwise:
            raise InternalError(f"{name} works on whole tensors; expected the shapes of {len(segments)} segments")
        self._name = name
        self._group = group
        self._values = values
        self._segments = tuple(segments)
        self._shapes = None if shapes is None else tuple(shapes)
        self._shape_of = dict(zip((each.tensor for each in segments), shapes or (), strict=shapes is not None))
        self._units = self._runs(lambda before, after: True)
        self._optimizer = make_optimizer(name, group, [self._piece(values, unit) for unit in self._units])
        step: Callable[..., object] = type(self._optimizer).step
        # Torch wraps `step` for hooks and its profiler, which nobody uses here: that doubles the price of a small step.
        self._plain_step = getattr(step, "__wrapped__", step) if optimizer_entry(name).from_torch else step

    def _step(self) -> None:
        self._plain_step(self._optimizer)

    def step_(self, gradient: torch.Tensor, absent: Set[int], options: GroupOptions) -> None:
        """Steps the bucket in place.

        Args:
            gradient: 1-D, the bucket's size and master dtype.
            absent: tensors that have no gradient this time; they are not stepped.
            options: options of the parameter group for this step.

        Raises:
            UnsupportedOptimizer: the optimizer keeps a state that its kind does not allow.
        """
        if absent:
            self._split(absent)
        (param_group,) = self._optimizer.param_groups
        param_group.update(options)
        # Torch's fused SGD refuses to step parameters with and without a momentum buffer in one call.
        passes: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {False: [], True: []}
        for unit, param in zip(self._units, param_group["params"], strict=True):
            if unit[0].tensor not in absent:
                passes[self._is_fresh(param)].append((param, self._piece(gradient, unit)))
        for present in passes.values():
            if present:
                for param, piece in present:
                    param.grad = piece
                self._step()
                for param, _ in present:
                    param.grad = None

    def state_pieces(self) -> list[StatePiece]:
        """The optimizer state of the bucket's tensors, one piece for each key of each tensor.

        Of an element-wise optimizer, values of the parameter's size are cut: the piece is the 1-D part that lies in
        this bucket. All others are whole; those of a tensor that lies in several buckets are equal in all of them. A
        tensor without state has no pieces. The tensors may be the live ones: copy them before the next step.

        Raises:
            UnsupportedOptimizer: a state that its kind of optimizer must not have, or that cannot travel.
        """
        (param_group,) = self._optimizer.param_groups
        pieces: list[StatePiece] = []
        for unit, param in zip(self._units, param_group["params"], strict=True):
            state = self._optimizer.state.get(param, {})
            if self._shapes is not None:
                pieces += whole_state(state, unit[0].tensor)
            else:
                for segment in unit:
                    pieces += state_of_segment(state, segment, unit[0].start, param.numel())
        return pieces

    def load_state_(self, pieces: Iterable[StatePiece]) -> None:
        """Replaces the state of all tensors in the bucket by copies of the given values; changes nothing if it raises.

        A tensor without pieces gets the state of a new optimizer.

        Args:
            pieces: what `state_pieces` of the same bucket gives, in any order. Floating-point and complex values of the
                parameter's size are converted to the master dtype; others keep theirs.

        Raises:
            InvalidRequest: naming tensor and key: a piece of a tensor that is not in the bucket, a part that is
                missing, comes twice or does not cover its segment exactly, or a value of the wrong kind.
        """
        reader = StateReader(self._name, self._group, self._values.dtype, self._segments, self._shapes)
        states = reader.read(pieces)
        units = self._runs(lambda before, after: may_join(states.get(before.tensor), states.get(after.tensor)))
        params = [self._piece(self._values, unit) for unit in units]
        optimizer = make_optimizer(self._name, self._group, params)
        (param_group,), (before,) = optimizer.param_groups, self._optimizer.param_groups
        param_group.update({key: value for key, value in before.items() if key != "params"})
        for unit, param in zip(units, params, strict=True):
            if unit[0].tensor in states:
                optimizer.state[param] = join_states([states[segment.tensor] for segment in unit])
        self._units, self._optimizer = units, optimizer

    def _is_fresh(self, param: torch.Tensor) -> bool:
        return not any(isinstance(each, torch.Tensor) for each in self._optimizer.state.get(param, {}).values())

    def _piece(self, flat: torch.Tensor, unit: Unit) -> torch.Tensor:
        piece = flat[unit[0].start : unit[-1].stop]
        return piece if self._shapes is None else piece.view(self._shape_of[unit[0].tensor])

    def _runs(self, may_follow: Callable[[Segment, Segment], bool]) -> list[Unit]:
        """Neighbouring segments in units, as few as possible."""
        runs: list[list[Segment]] = []
        for segment in self._segments:
            before = runs[-1][-1] if runs and self._shapes is None else None
            if before is not None and before.stop == segment.start and may_follow(before, segment):
                runs[-1].append(segment)
            else:
                runs.append([segment])
        return [tuple(run) for run in runs]

    def _split(self, absent: Set[int]) -> None:
        (param_group,) = self._optimizer.param_groups
        units: list[Unit] = []
        params: list[torch.Tensor] = []
        for unit, param in zip(self._units, param_group["params"], strict=True):
            parts = _parts(unit, absent)
            if len(parts) == 1:
                units.append(unit)
                params.append(param)
                continue
            state = self._optimizer.state.pop(param, None)
            for part in parts:
                piece = self._piece(self._values, part)
                if state:
                    start, stop = part[0].start - unit[0].start, part[-1].stop - unit[0].start
                    self._optimizer.state[piece] = slice_state(state, start, stop, param.numel())
                units.append(part)
                params.append(piece)
        self._units = units
        param_group["params"] = params


def _parts(unit: Unit, absent: Set[int]) -> list[Unit]:
    parts: list[list[Segment]] = []
    for segment in unit:
        if parts and (parts[-1][-1].tensor in absent) == (segment.tensor in absent):
            parts[-1].append(segment)
        else:
            parts.append([segment])
    return [tuple(part) for part in parts]
