"""Buckets, and one push of them, for the tests of this folder."""

import math

import torch

from pserver.wire.compress import Codec, GradBucket, TensorSegment


def bucket(*tensors: torch.Tensor, index: int = 0) -> GradBucket:
    """Whole tensors end to end."""
    segments, start = [], 0
    for number, tensor in enumerate(tensors):
        stop = start + math.prod(tensor.shape)
        segments.append(TensorSegment(tensor=number, start=start, stop=stop, shape=tuple(tensor.shape)))
        start = stop
    return GradBucket(index=index, buffer=torch.cat([each.reshape(-1) for each in tensors]), segments=tuple(segments))


def sent(codec: Codec, gradient: GradBucket, state: object = None) -> torch.Tensor:
    """The bytes of one push; of a new trainer if there is no state."""
    return codec.encode(codec.make_state() if state is None else state, gradient).wait()


def received(codec: Codec, gradient: GradBucket, state: object = None) -> torch.Tensor:
    """What a server makes of one push."""
    return codec.decode(sent(codec, gradient, state), gradient.shape)
