"""Where servers and trainers run: on the loopback interface, or at the two ends of a link of limited rate."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.children import Child, child, messages
from benchmarks.harness import Skip
from benchmarks.namespace import make_namespace

_DEVICE = "link0"
# Of 198.18.0.0/15, which RFC 2544 sets aside for benchmarks; the namespaces know no other network anyway.
_HOSTS = ("198.18.0.1", "198.18.0.2")
#: What may pass at once, and how long a packet may wait for its turn: neither lets a packet be lost.
_BURST = "1mb"
_LATENCY = "50ms"
_COMMAND_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place for processes: what they listen on, and their network namespace (its path; None: this process's)."""

    host: str = "127.0.0.1"
    interface: str = "lo"
    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Where the servers are, ours or the peer's, and where the trainers are."""

    servers: Site
    trainers: Site


LOOPBACK = Network(servers=Site(), trainers=Site())


@contextmanager
def link(rate: str) -> Iterator[Network]:
    """Two network namespaces and a virtual cable between them, each direction limited to `rate` ("10gbit").

    Namespaces and cable belong to two child processes, and the kernel removes them with those, however this one ends.

    Raises:
        Skip: not root, no `ip` or `tc`, or the kernel refuses.
    """
    if os.geteuid() != 0:
        raise Skip("network namespaces need root")
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        raise Skip(f"needs the programs ip and tc (iproute2); missing: {', '.join(missing)}")
    with child(_hold) as near, child(_hold) as far:
        servers, trainers = (
            Site(host=host, interface=_DEVICE, namespace=_answer(holder))
            for host, holder in zip(_HOSTS, (near, far), strict=True)
        )
        far_pid = trainers.namespace.split("/")[2]
        _run(near, "ip", "link", "add", _DEVICE, "type", "veth", "peer", "name", _DEVICE, "netns", far_pid)
        for holder, site in ((near, servers), (far, trainers)):
            _run(holder, "ip", "link", "set", "lo", "up")
            _run(holder, "ip", "address", "add", f"{site.host}/24", "dev", _DEVICE)
            _run(holder, "ip", "link", "set", _DEVICE, "up")
            limit = ("rate", rate, "burst", _BURST, "latency", _LATENCY)
            _run(holder, "tc", "qdisc", "add", "dev", _DEVICE, "root", "tbf", *limit)
        yield Network(servers=servers, trainers=trainers)


def _run(holder: Child, *command: str) -> None:
    holder.send(command)
    _answer(holder)


def _answer(holder: Child) -> str:
    text, error = holder.receive()
    if error is not None:
        raise Skip(f"cannot make two linked network namespaces: {error}")
    return text


def _hold(connection: Connection) -> None:
    """In a child process: keeps a new namespace, and runs in it what comes through the pipe."""
    try:
        connection.send((make_namespace(), None))
    except OSError as error:
        connection.send((None, str(error)))
        return
    for command in messages(connection):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_DEADLINE_S)
        error = f"{' '.join(command)}: {done.stderr.strip()}" if done.returncode != 0 else None
        connection.send((done.stdout, error))
