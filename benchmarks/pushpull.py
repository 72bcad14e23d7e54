"""Push, SGD step and pull of a large model: one trainer, one server, against torch RPC and against bare floors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.cluster import running_cluster
from benchmarks.harness import Benchmark, Case, Side
from benchmarks.network import LOOPBACK, Network, link
from benchmarks.peers.floor_copy import copy_floor
from benchmarks.peers.floor_socket import socket_floor
from benchmarks.peers.rpc import LOCAL, LOCAL_BASIC, TCP, Wiring
from benchmarks.peers.torch_rpc import torch_rpc_peer
from benchmarks.trainers import our_trainers, ready_gradients
from pserver.compress import BFloat16

_NUM_BYTES = 100_000_000
_QUICK_NUM_BYTES = 4_000_000

_LOOPBACK = partial(nullcontext, LOOPBACK)
_LINK = partial(link, "10gbit")

Peer = Callable[["Setup", int, Network], AbstractContextManager[Mapping[str, Side]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a row measures; `options` are further arguments of our `RemoteOptimizer`."""

    num_tensors: int
    transport: str
    peer: Peer
    network: Callable[[], AbstractContextManager[Network]] = _LOOPBACK
    options: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def _torch_rpc(
    wirings: Sequence[Wiring], setup: Setup, num_bytes: int, network: Network
) -> Iterator[Mapping[str, Side]]:
    with ExitStack() as stack:
        peers: dict[str, Side] = {}
        for wiring in wirings:
            peer = torch_rpc_peer(num_tensors=setup.num_tensors, num_bytes=num_bytes, wiring=wiring, network=network)
            peers |= stack.enter_context(peer)
        yield peers


def _copies(setup: Setup, num_bytes: int, _network: Network) -> AbstractContextManager[Mapping[str, Side]]:
    return copy_floor(num_tensors=setup.num_tensors, num_bytes=num_bytes)


def _sockets(_setup: Setup, num_bytes: int, _network: Network) -> AbstractContextManager[Mapping[str, Side]]:
    return socket_floor(num_bytes=num_bytes)


_RPC = partial(_torch_rpc, (LOCAL,))
_RPC_OF_MANY = partial(_torch_rpc, (LOCAL, LOCAL_BASIC))
_RPC_TCP = partial(_torch_rpc, (TCP,))

_BF16 = {"compress": BFloat16(), "pull_dtype": torch.bfloat16}

_SETUPS = {
    "shm-1": Setup(num_tensors=1, transport="shm", peer=_RPC),
    "shm-50": Setup(num_tensors=50, transport="shm", peer=_RPC),
    "shm-10000": Setup(num_tensors=10_000, transport="shm", peer=_RPC_OF_MANY),
    "tcp-1": Setup(num_tensors=1, transport="tcp", peer=_RPC_TCP),
    "tcp-50": Setup(num_tensors=50, transport="tcp", peer=_RPC_TCP),
    "tcp-50-bf16": Setup(num_tensors=50, transport="tcp", peer=_RPC_TCP, options=_BF16),
    "link10g-50": Setup(num_tensors=50, transport="tcp", peer=_RPC_TCP, network=_LINK),
    "link10g-50-bf16": Setup(num_tensors=50, transport="tcp", peer=_RPC_TCP, network=_LINK, options=_BF16),
    "floor-copy": Setup(num_tensors=50, transport="shm", peer=_copies),
    "floor-socket": Setup(num_tensors=50, transport="tcp", peer=_sockets),
}


@contextmanager
def _case(setup: Setup, num_bytes: int) -> Iterator[Case]:
    prepare = ready_gradients(setup.num_tensors, num_bytes, options=setup.options)
    with (
        setup.network() as network,
        running_cluster(1, site=network.servers) as cluster,
        setup.peer(setup, num_bytes, network) as peers,
        our_trainers(cluster.address, prepare, transport=setup.transport, site=network.trainers) as ours,
    ):
        yield Case(ours=ours, peers=peers)


def _cases(quick: bool) -> Mapping[str, AbstractContextManager[Case]]:
    num_bytes = _QUICK_NUM_BYTES if quick else _NUM_BYTES
    return {name: _case(setup, num_bytes) for name, setup in _SETUPS.items()}


BENCHMARK = Benchmark(
    name="pushpull",
    summary="push + SGD + pull of 100 MB fp32, as 1, 50 and 10,000 tensors, against torch RPC and bare floors",
    rounds=15,
    quick_rounds=5,
    cases=_cases,
)
