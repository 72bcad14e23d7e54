"""Optimizer state in torch's shape (by parameter) <-> pieces of buckets, as shards keep it."""

from collections.abc import Iterable, Iterator, Mapping

import torch

from pserver.core.optimizer_state import StatePiece
from pserver.errors import InternalError
from pserver.wire.layout import Layout

#: Values that torch's element-wise optimizers keep once per parameter. The shape cannot tell: a parameter may have 0
#: dimensions itself.
SCALAR_STATE = frozenset({"step", "mu_product", "eta", "mu"})

#: State of each parameter by its index in the model's tensors; values by torch's names.
TensorStates = Mapping[int, Mapping[str, object]]


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
