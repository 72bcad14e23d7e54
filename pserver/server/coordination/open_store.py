"""Chooses the store of a coordinator."""

from pathlib import Path

from pserver.clock import Clock
from pserver.config import parse_coordination
from pserver.errors import ConfigError
from pserver.server.coordination.etcd_store import EtcdStore
from pserver.server.coordination.file_store import FileStore
from pserver.server.coordination.memory_store import MemoryStore
from pserver.server.coordination.store import CoordinationStore


def open_store(
    *, data_dir: Path | None, coordination: str | None, first_term: int, clock: Clock, lease_ttl_s: int = 5
) -> CoordinationStore:
    """The store in a directory or in etcd; with neither, one in memory. Nothing starts yet.

    Args:
        data_dir: the directory.
        coordination: where etcd is, for example "etcd://127.0.0.1:2379/pserver".
        first_term: of a store in memory; see `MemoryStore`.
        clock: tells when a lease of etcd ends.
        lease_ttl_s: of that lease.

    Raises:
        ConfigError: both places are given, or one cannot be used.
    """
    if data_dir is not None and coordination is not None:
        raise ConfigError(
            f"a coordinator keeps its data in one place, but two are given: the directory {data_dir} and "
            f"{coordination!r}; leave one out"
        )
    if data_dir is not None:
        return FileStore(data_dir)
    if coordination is not None:
        return EtcdStore(parse_coordination(coordination), clock, lease_ttl_s=lease_ttl_s)
    return MemoryStore(first_term)
