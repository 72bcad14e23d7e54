"""Backward passes whose gradients go into a context instead of `.grad`.

The shape of torch.distributed.autograd (https://docs.pytorch.org/docs/stable/rpc.html#distributed-autograd-framework).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pserver.client.cluster import current_cluster
from pserver.errors import InvalidRequest


@contextmanager
def context() -> Iterator[int]:
    """Opens a context and gives its id; it is freed at the end of the block, on servers too.

    Raises:
        ConfigError: not inside `with pserver.connect()`.
    """
    contexts = current_cluster().contexts
    opened = contexts.open()
    try:
        yield opened.context_id
    finally:
        contexts.close(opened.context_id)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Runs a backward pass from the sum of `roots`; gradients are added to the context, and `.grad` is left alone.

    Torch's own accumulation runs, hooks included. Not safe while another thread uses `.grad` of the same tensors.

    Args:
        context_id: of an open context.
        roots: scalars that require a gradient.
        retain_graph: keep the graph for another pass.

    Raises:
        UnknownContext: no such context.
        InvalidRequest: no roots, or one that is no scalar or requires no gradient.
    """
    opened = current_cluster().contexts.require(context_id)
    if not roots or not all(root.numel() == 1 and root.requires_grad for root in roots):
        raise InvalidRequest("roots must be one or more scalar tensors that require a gradient, for example [loss]")
    leaves = _leaves(roots)
    aside = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        torch.autograd.backward(list(roots), retain_graph=retain_graph)
        for leaf in leaves:
            if leaf.grad is not None:
                opened.accumulate(leaf, leaf.grad)
    finally:
        for leaf, grad in zip(leaves, aside, strict=True):
            leaf.grad = grad


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of a context that are on this trainer, by tensor.

    Raises:
        UnknownContext: no such context.
    """
    return dict(current_cluster().contexts.require(context_id).gradients)


def _leaves(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a backward pass from these roots accumulates into."""
    found: dict[torch.Tensor, None] = {root: None for root in roots if root.grad_fn is None}
    seen: set[Any] = set()
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[node.variable] = None
        waiting += [following for following, _ in node.next_functions if following is not None]
    return list(found)
