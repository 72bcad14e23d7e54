"""Distributed autograd contexts, in the shape of torch.distributed.autograd."""

from pserver.client.autograd import backward, context, get_gradients

__all__ = ["backward", "context", "get_gradients"]
