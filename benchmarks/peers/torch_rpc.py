"""A parameter server on torch.distributed.rpc (TensorPipe), restricted to TCP.

One server process holds the parameters and their SGD optimizer. One trainer process ships a list of gradients with one
`rpc_sync` and gets the list of stepped parameters back. benchmarks/README.md says why this is the peer's best setting.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed import rpc

from benchmarks.children import Child, child, messages
from benchmarks.harness import Side
from benchmarks.parameters import LEARNING_RATE, make_parameters

#: The implementations of torch's SGD; which one is faster depends on the number of tensors.
IMPLEMENTATIONS: Mapping[str, Mapping[str, bool]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}

_SERVER = "server"
_TRAINER = "trainer"
_NUM_WORKER_THREADS = 16
_TIMEOUT_S = 60.0


@contextmanager
def torch_rpc_peer(*, num_tensors: int, num_bytes: int) -> Iterator[Mapping[str, Side]]:
    """Runs server and trainer for as long as the block lasts; yields one side for each implementation of SGD.

    A side makes the trainer process take one step, and returns the seconds that the trainer measured.
    """
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory, "store")
        with child(_serve, store, num_tensors, num_bytes), child(_train, store, num_tensors, num_bytes) as trainer:
            yield {f"torch RPC over TCP, {name} SGD": partial(_step, trainer, name) for name in IMPLEMENTATIONS}


def _step(trainer: Child, implementation: str) -> float:
    trainer.send(implementation)
    seconds: float = trainer.receive()
    return seconds


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


def _serve(_connection: Connection, store: Path, num_tensors: int, num_bytes: int) -> None:
    global _parameter_server
    _parameter_server = ParameterServer(num_tensors=num_tensors, num_bytes=num_bytes)
    _join_rpc(_SERVER, rank=0, store=store)
    rpc.shutdown()


def _train(connection: Connection, store: Path, num_tensors: int, num_bytes: int) -> None:
    parameters = make_parameters(num_tensors, num_bytes)
    _join_rpc(_TRAINER, rank=1, store=store)
    for implementation in messages(connection):
        started = time.perf_counter()
        gradients = [parameter.grad for parameter in parameters]
        stepped = rpc.rpc_sync(_SERVER, _remote_step, (implementation, gradients))
        for parameter, value in zip(parameters, stepped, strict=True):
            parameter.data = value
        connection.send(time.perf_counter() - started)
    rpc.shutdown()


def _join_rpc(name: str, *, rank: int, store: Path) -> None:
    # Without these both listen on whatever address the host name resolves to.
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # torch warns about its own use of gloo: https://github.com/pytorch/pytorch/blob/main/torch/distributed/rpc/api.py
    warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_NUM_WORKER_THREADS,
        rpc_timeout=_TIMEOUT_S,
        init_method=store.as_uri(),
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
