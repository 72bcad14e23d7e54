"""The weighted mean of gradients, in a fixed order."""

from collections.abc import Iterable, Sequence
from functools import reduce
from math import gcd

import torch

from pserver.wire.layout import Bucket
from pserver.wire.tensors import element_type


def weights_and_divisor(samples: Sequence[int]) -> tuple[list[int], int]:
    """Integer weights of a mean over samples: the samples divided by their greatest common divisor, and their sum.

    Equal batches get weight 1 each, so that one trainer's gradient passes through unchanged and W equal ones are a
    plain sum divided by W. The divisor is 0 if there are no samples at all.
    """
    common = reduce(gcd, samples, 0)
    if common == 0:
        return [0] * len(samples), 0
    weights = [count // common for count in samples]
    return weights, sum(weights)


def weighted_mean(
    gradients: Sequence[torch.Tensor], weights: Sequence[int], divisor: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """sum(weight * gradient) / divisor, summed in the order given.

    Args:
        gradients: 1-D tensors of one dtype and size; they stay as they are.
        weights: one for each, at least 1.
        divisor: at least 1.
        out: where the result goes, of the same dtype and size.

    Returns:
        `out`; without one a new tensor, or the gradient itself if there is one and nothing to multiply or divide.
    """
    total: torch.Tensor | None = None
    for gradient, weight in zip(gradients, weights, strict=True):
        weighted = gradient if weight == 1 else gradient * weight
        if total is None:
            total = weighted
        elif total is gradients[0]:
            total = torch.add(total, weighted, out=out)
        else:
            total.add_(weighted)
    assert total is not None
    if divisor != 1:
        total = torch.div(total, divisor, out=out) if total is gradients[0] else total.div_(divisor)
    if out is not None and total is not out:
        return out.copy_(total)
    return total


def memory_for_means(buckets: Iterable[Bucket]) -> dict[int, torch.Tensor]:
    """New memory for the mean gradients of buckets: 1-D, in the dtype of their masters."""
    return {each.index: torch.empty(each.num_elements, dtype=element_type(each.dtype).master) for each in buckets}


def sum_of_squares(gradient: torch.Tensor) -> float:
    """Sum of the squared absolute values of a tensor's elements, in float64."""
    norm = torch.linalg.vector_norm(gradient.reshape(-1), dtype=_wide(gradient.dtype)).item()
    return float(norm * norm)


def count_nonfinite(gradient: torch.Tensor) -> int:
    """How many elements are NaN or infinite."""
    return gradient.numel() - int(torch.isfinite(gradient).sum().item())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
