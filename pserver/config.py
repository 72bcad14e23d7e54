"""Settings: one precedence (argument > environment > default), resolved here; nothing else reads `os.environ`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pserver.errors import ConfigError

T = TypeVar("T", int, float, str)

#: How tensors travel: through shared memory where there is some, else in messages; only through memory; only in
#: messages; only in messages, and those over gRPC's connection alone.
TRANSPORTS = ("auto", "shm", "tcp", "grpc")


def _resolve(
    kind: type[T], argument: T | None, variable: str, environ: Mapping[str, str], default: T | None
) -> T | None:
    if argument is not None:
        return argument
    text = environ.get(variable)
    if text is None or text == "":
        return default
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(
            f"the environment variable {variable} must be of type {kind.__name__}, but is {text!r}; correct or unset it"
        ) from None


def without_grpc_fork_handlers() -> None:
    """Tells gRPC, before it starts, to do nothing about forks.

    A forked process has none of gRPC's threads, with handlers or without; they only print a line for every DataLoader
    worker. https://github.com/grpc/grpc/blob/master/doc/fork_support.md
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def with_sleeping_threads() -> None:
    """Tells OpenMP, before torch starts it, that threads without work sleep.

    By default they spin for milliseconds, on cores that trainers beside a server need: measured on two busy cores, a
    step of 100 MB took the server 112 ms of processor time, and 33 ms with sleeping threads.
    https://gcc.gnu.org/onlinedocs/libgomp/OMP_005fWAIT_005fPOLICY.html
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def parse_address(text: str) -> tuple[str, int]:
    """Splits "host:port".

    Raises:
        ConfigError: it is not of that form, or the port is not in 1..65535.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"an address is written host:port, for example 127.0.0.1:7077, but this is {text!r}")
    return host, int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """Where coordinators agree: the members of one etcd cluster, each (host, port), and what their keys begin with."""

    endpoints: tuple[tuple[str, int], ...]
    prefix: str


def parse_coordination(text: str) -> EtcdAddress:
    """Splits "etcd://host:port,host:port/prefix"; without a prefix it is /pserver.

    Raises:
        ConfigError: it is not of that form.
    """
    scheme, separator, rest = text.partition("://")
    hosts, _, path = rest.partition("/")
    path = path.rstrip("/") or "pserver"
    if scheme != "etcd" or not separator or not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", path, re.ASCII):
        raise ConfigError(
            "where coordinators agree is written etcd://host:port,host:port/prefix, for example "
            f"etcd://127.0.0.1:2379/pserver, but this is {text!r}"
        )
    try:
        endpoints = tuple(parse_address(each) for each in hosts.split(","))
    except ConfigError as error:
        raise ConfigError(f"{text!r}, which says where coordinators agree, cannot be used: {error}") from None
    return EtcdAddress(endpoints=endpoints, prefix=f"/{path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How a trainer talks to its cluster; see `resolve`. `address` may have those of several coordinators."""

    address: str
    rank: int
    world_size: int
    timeout_s: float
    transport: str = "auto"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the coordinators."""
        return tuple(self.address.split(","))

    @classmethod
    def resolve(
        cls,
        address: str | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float | None = None,
        transport: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> "TrainerSettings":
        """Arguments first, then PSERVER_ADDRESS, PSERVER_RANK, PSERVER_WORLD_SIZE, PSERVER_TIMEOUT_S and
        PSERVER_TRANSPORT, then defaults.

        Raises:
            ConfigError: no address anywhere, or a value that cannot be used.
        """
        environ = os.environ if environ is None else environ
        found = _resolve(str, address, "PSERVER_ADDRESS", environ, None)
        if found is None:
            raise ConfigError(
                "no coordinator address: pass one, connect('127.0.0.1:7077'), or set PSERVER_ADDRESS; "
                "`pserver launch` sets it for the scripts it starts"
            )
        for each in found.split(","):
            parse_address(each)
        rank = _resolve(int, rank, "PSERVER_RANK", environ, -1)
        world_size = _resolve(int, world_size, "PSERVER_WORLD_SIZE", environ, 1)
        timeout_s = _resolve(float, timeout_s, "PSERVER_TIMEOUT_S", environ, 60.0)
        if rank is None or rank < -1:
            raise ConfigError(f"rank must be 0 or more (or -1: the coordinator chooses), but is {rank}")
        if world_size is None or world_size < 1 or rank >= world_size > 1:
            raise ConfigError(f"world_size must be at least 1 and above rank, but is {world_size} with rank {rank}")
        if timeout_s is None or not 0 < timeout_s < float("inf"):
            raise ConfigError(f"timeout_s must be a positive, finite number of seconds, but is {timeout_s}")
        transport = _resolve(str, transport, "PSERVER_TRANSPORT", environ, TRANSPORTS[0])
        if transport not in TRANSPORTS:
            raise ConfigError(f"transport must be one of {list(TRANSPORTS)}, but is {transport!r}")
        return cls(address=found, rank=rank, world_size=world_size, timeout_s=timeout_s, transport=transport)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How one server runs.

    `join` is the coordinator's address; None: this server hosts the coordinator, or one of several if there is
    `coordination`, the etcd in which they agree who leads; `stands_by` False then leaves that to others. `data_dir`:
    where a coordinator alone keeps what it must know after a restart. `min_servers` is how many servers the coordinator
    waits for before it places a model. `shared_memory`: whether trainers on this machine may use it.
    `stream_port`: where tensors may come beside gRPC.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 0
    stream_port: int = 0
    join: str | None = None
    min_servers: int = 1
    trainer_lease_s: float = 10.0
    server_lease_s: float = 5.0
    drain_s: float = 10.0
    shared_memory: bool = True
    data_dir: Path | None = None
    coordination: str | None = None
    stands_by: bool = True

    @property
    def coordinates(self) -> bool:
        """Whether this server hosts a coordinator, be it one that stands by."""
        return self.join is None and self.stands_by

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a server needs a name, for example --name s0")
        for field_name in ("port", "stream_port"):
            if not 0 <= getattr(self, field_name) < 65536:
                raise ConfigError(
                    f"{field_name} must be in 0..65535 (0: any free one), but is {getattr(self, field_name)}"
                )
        if self.join is not None:
            parse_address(self.join)
        if self.coordination is not None:
            parse_coordination(self.coordination)
        if self.join is not None and (self.coordination is not None or self.data_dir is not None):
            raise ConfigError(
                "a server that joins a coordinator keeps nothing and finds it by its address; leave out --data-dir and "
                "--coordination, or --join"
            )
        if self.min_servers < 1:
            raise ConfigError(f"min_servers must be at least 1, but is {self.min_servers}")
        for field_name in ("trainer_lease_s", "server_lease_s"):
            if not getattr(self, field_name) > 0:
                raise ConfigError(
                    f"{field_name} must be a positive number of seconds, but is {getattr(self, field_name)}"
                )
