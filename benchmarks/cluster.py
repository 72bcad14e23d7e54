"""Our servers, as a user starts them: one process each on this machine."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.network import LOOPBACK, Site
from benchmarks.server_process import server_process

_SERVE = (sys.executable, "-m", "pserver.cli.main", "serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """Servers that answer: the address to connect to, "host:port", and the process of each."""

    address: str
    pids: Sequence[int]


@contextmanager
def running_cluster(num_servers: int, *, site: Site = LOOPBACK.servers) -> Iterator[RunningCluster]:
    """Runs `num_servers` servers for as long as the block lasts."""
    serve = (*_SERVE, "--host", site.host)
    with ExitStack() as stack:
        first = stack.enter_context(
            server_process(
                [*serve, "--name", "s0", "--coordinator", "--min-servers", str(num_servers)], namespace=site.namespace
            )
        )
        others = [
            stack.enter_context(
                server_process(
                    [*serve, "--name", f"s{index}", "--join", first["coordinator"]], namespace=site.namespace
                )
            )
            for index in range(1, num_servers)
        ]
        yield RunningCluster(address=first["coordinator"], pids=[int(each["pid"]) for each in (first, *others)])
