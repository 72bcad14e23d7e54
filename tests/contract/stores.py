"""The implementations of the store of coordinators, each in a place that all candidates of a test share."""

import asyncio
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pserver.clock import Clock, SystemClock
from pserver.config import EtcdAddress
from pserver.errors import NotLeader, StoreUnavailable
from pserver.server.coordination.etcd_store import EtcdStore
from pserver.server.coordination.file_store import LOCK, FileStore
from pserver.server.coordination.memory_store import MemoryStore
from pserver.server.coordination.open_store import open_store
from pserver.server.coordination.store import CoordinationStore

#: Shortest lease; etcd in tests grants it.
TTL_S = 1
CANDIDATE = (sys.executable, "-m", "tests.contract.stores")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where stores of one kind keep the same things."""

    #: Another candidate for the same place.
    open: Callable[[], CoordinationStore]
    #: Lets another one lead although the leader neither ends nor knows.
    depose: Callable[[], None]
    #: Command of a candidate in another process.
    command: tuple[str, ...]


def memory_place() -> Place:
    """The place of one process; all that two stores share is the growing term."""
    terms = itertools.count(1_000, 1_000)
    return Place(open=lambda: MemoryStore(next(terms)), depose=lambda: None, command=())


def file_place(directory: Path) -> Place:
    return Place(
        open=lambda: FileStore(directory),
        depose=(directory / LOCK).unlink,
        command=(*CANDIDATE, "data_dir", str(directory)),
    )


def etcd_place(endpoint: str, prefix: str) -> Place:
    def depose() -> None:
        import etcd3gw

        host, _, port = endpoint.partition(":")
        etcd3gw.client(host, int(port), timeout=5, api_path="/v3/").delete(f"{prefix}/leader")

    return Place(
        open=lambda: etcd_store(endpoint, prefix=prefix),
        depose=depose,
        command=(*CANDIDATE, "coordination", f"etcd://{endpoint}{prefix}"),
    )


def etcd_store(
    *endpoints: str,
    prefix: str,
    clock: Clock | None = None,
    lease_ttl_s: int = TTL_S,
    timeout_s: float = 3.0,
) -> EtcdStore:
    """A candidate with a short lease."""
    pairs = tuple((host, int(port)) for host, _, port in (each.partition(":") for each in endpoints))
    address = EtcdAddress(endpoints=pairs, prefix=prefix)
    return EtcdStore(address, clock or SystemClock(), lease_ttl_s=lease_ttl_s, timeout_s=timeout_s)


async def candidate(kind: str, place: str) -> None:
    """A candidate in a process of its own: leads, says so, writes each line of stdin and says how that went.

    A number instead stands for so many bytes that cannot be compressed.
    """
    data_dir = Path(place) if kind == "data_dir" else None
    coordination = place if kind == "coordination" else None
    store = open_store(
        data_dir=data_dir, coordination=coordination, first_term=1, clock=SystemClock(), lease_ttl_s=TTL_S
    )
    print("leads with", await store.lead("child:1"), flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        try:
            await store.write({"line": os.urandom(int(line)) if line.isdigit() else line.encode()})
            print("wrote", flush=True)
        except StoreUnavailable as error:
            print("unavailable:", error, "; kept:", await store.load(), flush=True)
        except NotLeader:
            print("deposed:", await store.deposed(), flush=True)


if __name__ == "__main__":
    asyncio.run(candidate(*sys.argv[1:]))
