"""Optimizer state in torch's shape (by parameter) <-> pieces of buckets, as shards keep it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from pserver.core.optimizer_state import MASTER_KEY, StatePiece, StateReader
from pserver.errors import InternalError, InvalidRequest
from pserver.types import GroupOptions
from pserver.wire.layout import Layout
from pserver.wire.tensors import element_type

#: Values that torch's element-wise optimizers keep once per parameter. The shape cannot tell: a parameter may have 0
#: dimensions itself.
SCALAR_STATE = frozenset({"step", "mu_product", "eta", "mu"})

#: State of each parameter by its index in the model's tensors; values by torch's names.
TensorStates = Mapping[int, Mapping[str, object]]


def with_present_masters(states: TensorStates, tensors: Mapping[int, torch.Tensor]) -> TensorStates:
    """The state with masters only for what parameters in half precision hold now.

    An element whose master does not round to its present value was written to since: the value is its master then.

    Raises:
        InvalidRequest: a master of another shape than its parameter.
    """
    present: dict[int, Mapping[str, object]] = {}
    for index, state in states.items():
        parameter = tensors[index].detach()
        present[index] = others = {key: value for key, value in state.items() if key != MASTER_KEY}
        master = state.get(MASTER_KEY)
        if master is None or element_type(parameter.dtype).master == parameter.dtype:
            continue
        if not isinstance(master, torch.Tensor) or master.shape != parameter.shape:
            raise InvalidRequest(f"the {MASTER_KEY} of tensor {index} must have the shape {list(parameter.shape)}")
        parameter = parameter.to(master.device)
        others[MASTER_KEY] = torch.where(master.to(parameter.dtype) == parameter, master, parameter.to(master.dtype))
    return present


def cut_state(layout: Layout, states: TensorStates) -> Iterator[tuple[int, StatePiece]]:
    """The state as (bucket, piece) pairs: values of the parameter's shape are cut like it, others go along whole."""
    for bucket in layout.buckets:
        for segment in layout.segments[bucket.index] if bucket.group >= 0 else ():
            spec = layout.tensors[segment.tensor]
            for key, value in states.get(segment.tensor, {}).items():
                start: int | None = None
                if isinstance(value, torch.Tensor):
                    value = value.detach()
                    cut = not layout.whole_tensors and tuple(value.shape) == spec.shape and key not in SCALAR_STATE
                    if cut:
                        start = segment.offset
                        value = value.reshape(-1)[start : start + segment.stop - segment.start]
                yield bucket.index, StatePiece(tensor=segment.tensor, key=key, start=start, value=value)


def check_state(layout: Layout, states: TensorStates, optimizer: str, groups: Sequence[GroupOptions]) -> None:
    """Refuses, before anything is given up for it, what servers would refuse.

    Raises:
        InvalidRequest: naming tensor and key.
    """
    pieces: dict[int, list[StatePiece]] = {}
    for index, piece in cut_state(layout, states):
        if piece.key != MASTER_KEY:
            pieces.setdefault(index, []).append(piece)
    for index, cut in pieces.items():
        bucket = layout.buckets[index]
        master = element_type(bucket.dtype).master
        StateReader(optimizer, groups[bucket.group], master, layout.segments[index], layout.shapes(index)).read(cut)


def join_state(layout: Layout, pieces: Iterable[StatePiece]) -> dict[int, dict[str, object]]:
    """The pieces of every bucket, put together by parameter.

    Raises:
        InternalError: pieces that do not fit the layout.
    """
    states: dict[int, dict[str, object]] = {}
    for piece in pieces:
        state = states.setdefault(piece.tensor, {})
        if piece.start is None:
            state.setdefault(piece.key, piece.value)
            continue
        spec = layout.tensors[piece.tensor]
        value = piece.value
        if not isinstance(value, torch.Tensor) or piece.start + value.numel() > spec.num_elements:
            raise InternalError(f"state {piece.key!r} of {spec.name!r} does not fit its shape {list(spec.shape)}")
        whole = state.get(piece.key)
        if not isinstance(whole, torch.Tensor):
            whole = state[piece.key] = torch.zeros(spec.shape, dtype=value.dtype)
        whole.view(-1)[piece.start : piece.start + value.numel()] = value
    return states
