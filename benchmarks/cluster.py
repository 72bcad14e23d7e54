"""Our servers, as a user starts them: one process each on this machine."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.server_process import server_process

_SERVE = (sys.executable, "-m", "pserver.cli.main", "serve")


@contextmanager
def running_cluster(num_servers: int) -> Iterator[str]:
    """Runs `num_servers` servers for as long as the block lasts; yields the address to connect to, "host:port"."""
    with ExitStack() as stack:
        first = stack.enter_context(
            server_process([*_SERVE, "--name", "s0", "--coordinator", "--min-servers", str(num_servers)])
        )
        for index in range(1, num_servers):
            stack.enter_context(server_process([*_SERVE, "--name", f"s{index}", "--join", first["coordinator"]]))
        yield first["coordinator"]
