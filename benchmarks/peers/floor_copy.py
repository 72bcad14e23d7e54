"""The work of a step without a parameter server: copies and arithmetic in one process.

Every parameter server gathers gradients, steps and puts the parameters back in place; none on one machine does less.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from benchmarks.harness import Side, timed
from benchmarks.parameters import LEARNING_RATE, make_parameters
from benchmarks.peers.torch_rpc import IMPLEMENTATIONS
from benchmarks.team import take_turns, team


@contextmanager
def copy_floor(*, num_tensors: int, num_bytes: int) -> Iterator[Mapping[str, Side]]:
    """Runs the one process for as long as the block lasts; yields one side for each implementation of SGD."""
    with team(1, _run, num_tensors, num_bytes) as sides:
        yield {f"copies and {name} SGD in one process": sides(name) for name in IMPLEMENTATIONS}


class FlatStep:
    """Parameters with gradients, as `make_parameters` makes them, and a flat copy of both."""

    def __init__(self, *, num_tensors: int, num_bytes: int) -> None:
        self.parameters = make_parameters(num_tensors, num_bytes)
        sizes = [parameter.numel() for parameter in self.parameters]
        self._values = torch.nn.Parameter(torch.cat([parameter.detach() for parameter in self.parameters]))
        self._values.grad = torch.zeros_like(self._values)
        self._value_views = self._values.detach().split(sizes)
        self._gradient_views = self._values.grad.split(sizes)
        self._optimizers = {
            name: torch.optim.SGD([self._values], lr=LEARNING_RATE, **options)
            for name, options in IMPLEMENTATIONS.items()
        }

    @torch.no_grad()
    def step(self, implementation: str) -> None:
        """Copies the gradients into the flat one, steps the flat parameter, copies it back into the parameters."""
        torch._foreach_copy_(self._gradient_views, [parameter.grad for parameter in self.parameters])
        self._optimizers[implementation].step()
        torch._foreach_copy_(self.parameters, self._value_views)


def _run(connection: Connection, _rank: int, num_tensors: int, num_bytes: int) -> None:
    flat = FlatStep(num_tensors=num_tensors, num_bytes=num_bytes)
    take_turns(connection, {name: timed(lambda name=name: flat.step(name)) for name in IMPLEMENTATIONS})
