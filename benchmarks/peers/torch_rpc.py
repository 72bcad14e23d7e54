"""A parameter server on torch.distributed.rpc for one trainer.

One server process holds the parameters and their SGD optimizer. One trainer process ships a list of gradients with one
`rpc_sync` and gets the list of stepped parameters back. benchmarks/README.md says why this is the peer's best setting.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed import rpc

from benchmarks.children import child
from benchmarks.harness import Side, timed
from benchmarks.network import LOOPBACK, Network
from benchmarks.parameters import LEARNING_RATE, make_parameters
from benchmarks.peers.rpc import SERVER, Wiring, joined_rpc
from benchmarks.team import take_turns, team

#: The implementations of torch's SGD; which one is faster depends on the number of tensors.
IMPLEMENTATIONS: Mapping[str, Mapping[str, bool]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}

_WORLD_SIZE = 2


@contextmanager
def torch_rpc_peer(
    *, num_tensors: int, num_bytes: int, wiring: Wiring, network: Network = LOOPBACK
) -> Iterator[Mapping[str, Side]]:
    """Runs server and trainer for as long as the block lasts; yields one side for each implementation of SGD.

    A side makes the trainer process take one step, and returns the seconds that the trainer measured.
    """
    with tempfile.TemporaryDirectory() as directory:
        shared = (Path(directory, "store"), wiring, num_tensors, num_bytes)
        servers, trainers = network.servers, network.trainers
        with (
            child(_serve, servers.interface, *shared, namespace=servers.namespace),
            team(1, _train, trainers.interface, *shared, namespace=trainers.namespace) as sides,
        ):
            yield {f"{wiring.label}, {name} SGD": sides(name) for name in IMPLEMENTATIONS}


class ParameterServer:
    """Parameters and one stateless SGD optimizer over them for each implementation."""

    def __init__(self, *, num_tensors: int, num_bytes: int) -> None:
        self._parameters = make_parameters(num_tensors, num_bytes)
        self._optimizers = {
            name: torch.optim.SGD(self._parameters, lr=LEARNING_RATE, **options)
            for name, options in IMPLEMENTATIONS.items()
        }

    @torch.no_grad()
    def step(self, implementation: str, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Takes one step with `gradients`, which it keeps; returns the parameters, not copied."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizers[implementation].step()
        return [parameter.detach() for parameter in self._parameters]


# torch RPC finds what it calls by module and name, so what the call works on has to be at module level too.
_parameter_server: ParameterServer


def _remote_step(implementation: str, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return _parameter_server.step(implementation, gradients)


def _serve(
    _connection: Connection, interface: str, store: Path, wiring: Wiring, num_tensors: int, num_bytes: int
) -> None:
    global _parameter_server
    _parameter_server = ParameterServer(num_tensors=num_tensors, num_bytes=num_bytes)
    with joined_rpc(SERVER, rank=0, world_size=_WORLD_SIZE, store=store, wiring=wiring, interface=interface):
        pass


def _train(
    connection: Connection,
    _rank: int,
    interface: str,
    store: Path,
    wiring: Wiring,
    num_tensors: int,
    num_bytes: int,
) -> None:
    parameters = make_parameters(num_tensors, num_bytes)
    with joined_rpc("trainer", rank=1, world_size=_WORLD_SIZE, store=store, wiring=wiring, interface=interface):
        take_turns(connection, {name: timed(partial(_step, parameters, name)) for name in IMPLEMENTATIONS})


def _step(parameters: list[torch.nn.Parameter], implementation: str) -> None:
    gradients = [parameter.grad for parameter in parameters]
    stepped = rpc.rpc_sync(SERVER, _remote_step, (implementation, gradients))
    for parameter, value in zip(parameters, stepped, strict=True):
        parameter.data = value
