"""A synchronous parameter server on torch.distributed.rpc for several trainers: batch updating.

The pattern of https://docs.pytorch.org/tutorials/intermediate/rpc_async_execution.html: one server process adds up the
gradients that trainers send, and answers nobody before it has those of all; then it steps once, and answers everybody
with the same parameters.
"""

import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed import rpc

from benchmarks.children import child
from benchmarks.harness import Side, timed
from benchmarks.network import LOOPBACK
from benchmarks.parameters import LEARNING_RATE, make_parameters
from benchmarks.peers.rpc import LOCAL, SERVER, joined_rpc
from benchmarks.peers.torch_rpc import IMPLEMENTATIONS
from benchmarks.team import take_turns, team

Answer = torch.futures.Future[list[torch.Tensor]]


@contextmanager
def batch_rpc_peer(
    *, num_tensors: int, num_bytes: int, num_trainers: int, repeats: int
) -> Iterator[Mapping[str, Side]]:
    """Runs server and trainers for as long as the block lasts; yields one side for each implementation of SGD.

    A side makes all trainers take `repeats` steps in a row, and returns the mean seconds of one on the slowest trainer.
    """
    with tempfile.TemporaryDirectory() as directory:
        shared = (Path(directory, "store"), num_tensors, num_bytes, num_trainers)
        with child(_serve, *shared), team(num_trainers, _train, *shared, repeats) as sides:
            yield {f"{LOCAL.label}, batch updating, {name} SGD": sides(name) for name in IMPLEMENTATIONS}


class BatchServer:
    """Parameters, and a round that is open until `num_trainers` have sent their gradients. Thread-safe."""

    def __init__(self, *, num_tensors: int, num_bytes: int, num_trainers: int) -> None:
        self._num_trainers = num_trainers
        self._lock = threading.Lock()  # guards everything below
        self._parameters = make_parameters(num_tensors, num_bytes)
        self._optimizers = {
            name: torch.optim.SGD(self._parameters, lr=LEARNING_RATE, **options)
            for name, options in IMPLEMENTATIONS.items()
        }
        self._num_received = 0
        self._answer: Answer = torch.futures.Future()

    @torch.no_grad()
    def add(self, implementation: str, gradients: list[torch.Tensor]) -> Answer:
        """Adds one trainer's `gradients`, which it may keep, to the round; the answer is the stepped parameters."""
        with self._lock:
            answer = self._answer
            if self._num_received == 0:
                for parameter, gradient in zip(self._parameters, gradients, strict=True):
                    parameter.grad = gradient
            else:
                torch._foreach_add_([parameter.grad for parameter in self._parameters], gradients)
            self._num_received += 1
            if self._num_received == self._num_trainers:
                torch._foreach_div_([parameter.grad for parameter in self._parameters], self._num_trainers)
                self._optimizers[implementation].step()
                self._num_received, self._answer = 0, torch.futures.Future()
                answer.set_result([parameter.detach() for parameter in self._parameters])
        return answer


# torch RPC finds what it calls by module and name, so what the call works on has to be at module level too.
_batch_server: BatchServer


@rpc.functions.async_execution
def _remote_add(implementation: str, gradients: list[torch.Tensor]) -> Answer:
    return _batch_server.add(implementation, gradients)


def _serve(_connection: Connection, store: Path, num_tensors: int, num_bytes: int, num_trainers: int) -> None:
    global _batch_server
    _batch_server = BatchServer(num_tensors=num_tensors, num_bytes=num_bytes, num_trainers=num_trainers)
    interface = LOOPBACK.servers.interface
    with joined_rpc(SERVER, rank=0, world_size=1 + num_trainers, store=store, wiring=LOCAL, interface=interface):
        pass


def _train(
    connection: Connection,
    rank: int,
    store: Path,
    num_tensors: int,
    num_bytes: int,
    num_trainers: int,
    repeats: int,
) -> None:
    parameters = make_parameters(num_tensors, num_bytes)

    def step(implementation: str) -> None:
        gradients = [parameter.grad for parameter in parameters]
        stepped = rpc.rpc_sync(SERVER, _remote_add, (implementation, gradients))
        for parameter, value in zip(parameters, stepped, strict=True):
            parameter.data = value

    name, interface = f"trainer{rank}", LOOPBACK.trainers.interface
    with joined_rpc(name, rank=1 + rank, world_size=1 + num_trainers, store=store, wiring=LOCAL, interface=interface):
        take_turns(connection, {each: timed(lambda each=each: step(each), repeats=repeats) for each in IMPLEMENTATIONS})
