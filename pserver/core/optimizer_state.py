"""A parameter's optimizer state as values that can be moved, stored and put together again.

A *state* here is what torch keeps in `optimizer.state[parameter]`: values by name.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pserver.core.optimizers import make_optimizer, optimizer_entry
from pserver.errors import InvalidRequest, UnsupportedOptimizer
from pserver.types import GroupOptions
from pserver.wire.layout import Segment

State = dict[str, Any]

#: Key under which the float32 master of a parameter in half precision travels with its optimizer state.
MASTER_KEY = "master_param"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """One value of a parameter's optimizer state, or a part of it.

    `tensor` is the parameter's index in the model, `key` torch's name of the value ("exp_avg"). `start` is where the
    part starts in the parameter, in elements of the parameter flattened in row-major order; the value is then a 1-D
    tensor. `start` None says that `value` is whole: a tensor of any shape, or a plain number, None, boolean or string.
    """

    tensor: int
    key: str
    start: int | None
    value: object


def slice_state(state: State, start: int, stop: int, size: int) -> State:
    """The state of elements `start` to `stop` of a 1-D unit of `size` elements.

    Tensors of the unit's size are cut and share memory; step counts and the like (0-dim) are copied.

    Raises:
        UnsupportedOptimizer: a value that is neither: the optimizer is not element-wise.
    """
    return {
        key: value[start:stop] if _is_cut(key, value, size) else value.clone() if _is_tensor(value) else value
        for key, value in state.items()
    }


def state_of_segment(state: State, segment: Segment, origin: int, size: int) -> list[StatePiece]:
    """The pieces of one segment of a 1-D unit that starts at `origin` in the bucket; the tensors share memory.

    Raises:
        UnsupportedOptimizer: a value that is neither of the unit's size nor 0-dim nor plain.
    """
    return [
        StatePiece(
            tensor=segment.tensor,
            key=key,
            start=segment.offset,
            value=value[segment.start - origin : segment.stop - origin],
        )
        if _is_cut(key, value, size)
        else StatePiece(tensor=segment.tensor, key=key, start=None, value=value)
        for key, value in state.items()
    ]


def whole_state(state: State, tensor: int) -> list[StatePiece]:
    """The pieces of a parameter that is not cut; the tensors are the live ones.

    Raises:
        UnsupportedOptimizer: a value that is neither a tensor nor plain.
    """
    for key, value in state.items():
        if not _is_tensor(value) and not _is_plain(value):
            raise UnsupportedOptimizer(_not_storable(key, value))
    return [StatePiece(tensor=tensor, key=key, start=None, value=value) for key, value in state.items()]


class StateReader:
    """Puts the states of a bucket's tensors together from pieces, and refuses pieces that do not fit.

    Args:
        name: optimizer, as in `OPTIMIZERS`.
        group: its arguments.
        dtype: master dtype of the bucket.
        segments: the pieces of tensors in the bucket.
        shapes: None for an element-wise optimizer; else the shape of each segment's tensor.
    """

    def __init__(
        self,
        name: str,
        group: GroupOptions,
        dtype: torch.dtype,
        segments: Sequence[Segment],
        shapes: Sequence[tuple[int, ...]] | None,
    ) -> None:
        self._name = name
        self._group = group
        self._dtype = dtype
        self._segments = {segment.tensor: segment for segment in segments}
        self._shapes = None if shapes is None else dict(zip(self._segments, shapes, strict=True))
        self._models: dict[tuple[int, ...], State] = {}

    def read(self, pieces: Iterable[StatePiece]) -> dict[int, State]:
        """The state of each tensor that has pieces; the values are copies.

        Floating-point and complex tensors of the parameter's size get the bucket's master dtype, others keep theirs.

        Raises:
            InvalidRequest: naming tensor and key: a piece of another bucket, a part that is missing, comes twice or
                does not cover its segment exactly, or a value that is not of the kind that the optimizer keeps there.
        """
        states: dict[int, State] = {}
        for piece in pieces:
            if piece.tensor not in self._segments:
                raise InvalidRequest(f"{_named(piece)} came for a bucket that holds tensors {sorted(self._segments)}")
            state = states.setdefault(piece.tensor, {})
            if piece.key in state:
                raise InvalidRequest(f"{_named(piece)} came twice; expected one value for each key")
            state[piece.key] = self._value(piece)
        for tensor, state in states.items():
            expected = self._expected(tensor)
            # Older torch keeps None where SGD has no momentum yet: the same as nothing.
            for key in [key for key, value in state.items() if value is None and key in expected]:
                del state[key]
            missing = sorted(expected.keys() - state.keys())
            if state and missing:
                raise InvalidRequest(
                    f"optimizer state of tensor {tensor} lacks {missing[0]!r}; {self._name} needs all of "
                    f"{sorted(expected)}, or nothing"
                )
        return {tensor: state for tensor, state in states.items() if state}

    def _value(self, piece: StatePiece) -> object:
        expected = self._expected(piece.tensor).get(piece.key)
        if self._shapes is None and piece.start is not None:
            return self._part(piece, piece.start)
        if piece.start is not None:
            raise InvalidRequest(
                f"{_named(piece)} starts at {piece.start}; {self._name} keeps whole tensors: start None"
            )
        if not isinstance(piece.value, torch.Tensor):
            return _plain_value(piece, expected)
        if self._shapes is not None:
            return self._whole_tensor(piece, piece.value, expected, self._shapes[piece.tensor])
        if piece.value.dim() or (isinstance(expected, torch.Tensor) and expected.dim()):
            raise InvalidRequest(
                f"{_named(piece)} has the shape {list(piece.value.shape)} and no start; expected a 1-D part with its "
                "start, or a single number"
            )
        # As torch does on loading: the fused kernels take no other step count.
        fused = piece.key == "step" and isinstance(expected, torch.Tensor)
        return _copy(piece, piece.value, torch.float32 if fused and self._is_fused() else piece.value.dtype)

    def _part(self, piece: StatePiece, start: int) -> torch.Tensor:
        segment = self._segments[piece.tensor]
        size = segment.stop - segment.start
        if not isinstance(piece.value, torch.Tensor):
            raise InvalidRequest(f"{_named(piece)} is {piece.value!r}; expected a tensor of {size} elements")
        if start != segment.offset or piece.value.shape != (size,):
            raise InvalidRequest(
                f"{_named(piece)} has the shape {list(piece.value.shape)} and starts at {start}; expected a part of "
                f"{size} elements that starts at {segment.offset}"
            )
        expected = self._expected(piece.tensor).get(piece.key)
        if isinstance(expected, torch.Tensor) and not expected.dim():
            raise InvalidRequest(f"{_named(piece)} is a part of {size} elements; expected a single number")
        return self._of_master_dtype(piece, piece.value, expected)

    def _whole_tensor(
        self, piece: StatePiece, value: torch.Tensor, expected: object, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if isinstance(expected, torch.Tensor):
            if value.shape != expected.shape:
                raise InvalidRequest(
                    f"{_named(piece)} has the shape {list(value.shape)}; expected {list(expected.shape)}"
                )
            if not expected.dim():
                return _copy(piece, value, expected.dtype)
        elif value.shape != shape or not shape:
            return _copy(piece, value, value.dtype)
        return self._of_master_dtype(piece, value, expected)

    def _of_master_dtype(self, piece: StatePiece, value: torch.Tensor, expected: object) -> torch.Tensor:
        numeric = value.is_floating_point() or value.is_complex()
        if isinstance(expected, torch.Tensor) and not numeric and expected.dtype != value.dtype:
            raise InvalidRequest(f"{_named(piece)} is of {value.dtype}; expected {expected.dtype}")
        return _copy(piece, value, self._dtype if numeric else value.dtype)

    def _is_fused(self) -> bool:
        (param_group,) = make_optimizer(self._name, self._group, [torch.zeros(1, dtype=self._dtype)]).param_groups
        return bool(param_group.get("fused"))

    def _expected(self, tensor: int) -> State:
        """What the optimizer keeps for a tensor: found by stepping one, since torch tells it in no other way.

        Nothing is known of a registered class: what it keeps may depend on what it has seen.
        """
        shape = (1,) if self._shapes is None else self._shapes[tensor]
        if shape not in self._models:
            self._models[shape] = self._step_one(shape)
        return self._models[shape]

    def _step_one(self, shape: tuple[int, ...]) -> State:
        if optimizer_entry(self._name).cls.__module__.partition(".")[0] != "torch":
            return {}
        param = torch.zeros(shape, dtype=self._dtype)
        param.grad = torch.zeros_like(param)
        optimizer = make_optimizer(self._name, self._group, [param])
        optimizer.step()
        return dict(optimizer.state.get(param, {}))


def may_join(state: State | None, other: State | None) -> bool:
    """Whether neighbouring 1-D tensors of these states can be stepped as one: equal but for values that are cut."""
    return _signature(state) == _signature(other)


def join_states(states: Sequence[State]) -> State:
    """The state of neighbouring 1-D tensors as one unit; `may_join` holds for them. May share memory with them."""
    first = states[0]
    if len(states) == 1:
        return first
    return {
        key: torch.cat([state[key] for state in states]) if _is_tensor(value) and value.dim() else value
        for key, value in first.items()
    }


def _signature(state: State | None) -> object:
    if state is None:
        return None
    return {
        key: (value.dtype, None if value.dim() else repr(value.item()))
        if _is_tensor(value)
        else (type(value), repr(value))
        for key, value in state.items()
    }


def _plain_value(piece: StatePiece, expected: object) -> object:
    value = piece.value
    if not _is_plain(value):
        raise InvalidRequest(f"{_named(piece)} is a {type(value).__qualname__}; expected a tensor or a plain value")
    if value is None or not isinstance(expected, torch.Tensor):
        return value
    if not isinstance(value, int | float) or expected.dim():
        raise InvalidRequest(f"{_named(piece)} is {value!r}; expected a tensor")
    return torch.tensor(value, dtype=expected.dtype)  # older torch keeps step counts as plain numbers


def _copy(piece: StatePiece, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if value.layout is not torch.strided or value.is_meta:
        raise InvalidRequest(f"{_named(piece)} is a {value.layout} tensor on {value.device}; expected a dense one")
    if value.is_complex() and not dtype.is_complex:
        raise InvalidRequest(f"{_named(piece)} is of {value.dtype}, the parameter of {dtype}; expected real numbers")
    copied = torch.empty(value.shape, dtype=dtype)
    return copied.copy_(value.detach())


def _named(piece: StatePiece) -> str:
    return f"optimizer state of tensor {piece.tensor}, {piece.key!r},"


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_cut(key: str, value: object, size: int) -> bool:
    if isinstance(value, torch.Tensor):
        if value.shape == (size,):
            return True
        if value.dim():
            raise UnsupportedOptimizer(
                f"the optimizer keeps a state {key!r} of shape {list(value.shape)} for a parameter of {size} elements; "
                "an element-wise one keeps values of the parameter's shape or 0 dimensions: register it with "
                "elementwise=False"
            )
    elif not _is_plain(value):
        raise UnsupportedOptimizer(_not_storable(key, value))
    return False


def _not_storable(key: str, value: object) -> str:
    return (
        f"the optimizer keeps a state {key!r} of type {type(value).__qualname__}; expected a tensor, number, None, "
        "boolean or string"
    )
