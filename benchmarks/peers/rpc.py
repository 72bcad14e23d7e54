"""What the peers on torch.distributed.rpc (TensorPipe) share: how they join, and how bytes move."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import rpc

#: The one process that holds the parameters.
SERVER = "server"

_NUM_WORKER_THREADS = 16
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What TensorPipe may move bytes with; None: it chooses among all that it has."""

    label: str
    transports: list[str] | None = None
    channels: list[str] | None = None


#: Shared memory between processes of one machine, and memory read straight out of the other process.
LOCAL = Wiring(label="torch RPC")
#: All bytes through the transport, shared memory: a system call less for every tensor.
LOCAL_BASIC = Wiring(label="torch RPC, basic channel", channels=["basic"])
TCP = Wiring(label="torch RPC over TCP", transports=["uv"], channels=["basic"])


@contextmanager
def joined_rpc(name: str, *, rank: int, world_size: int, store: Path, wiring: Wiring, interface: str) -> Iterator[None]:
    """This process is a member of the RPC group that meets at the file `store`: the block begins when all have joined.

    After it, the process goes on answering the others, until all have come to the end of theirs. `interface` is the
    network interface that it listens on.
    """
    # Without these it listens on whatever address the host name resolves to.
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = interface
    # torch warns about its own use of gloo: https://github.com/pytorch/pytorch/blob/main/torch/distributed/rpc/api.py
    warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_NUM_WORKER_THREADS,
        rpc_timeout=_TIMEOUT_S,
        init_method=store.as_uri(),
        _transports=wiring.transports,
        _channels=wiring.channels,
    )
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    yield
    rpc.shutdown()
