"""`pserver launch`: the servers and trainers of one run, on this machine."""

import math
import os
import re
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pserver.cli.live import Screen
from pserver.cli.supervise import Child, Supervisor, describe_exit, failure_summary
from pserver.config import ServerSettings

_READY_S = 60.0
_POLL_TIMEOUT_S = 2.0
_DRAIN_S = ServerSettings(name="s0").drain_s + 5.0
#: How often a server that was killed is started again.
_RESTARTS = 10
_READY_LINE = re.compile(r"pserver ready name=s0 address=(\S+) ")
_SERVE = (sys.executable, "-m", "pserver.cli.main", "serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What to run: `script` with `arguments` in `trainers` processes, on `servers` servers, for at most `timeout_s`.

    `imports` are modules that every server imports first.
    """

    servers: int
    trainers: int
    script: Path
    arguments: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    timeout_s: float = math.inf


def launch(plan: LaunchPlan, *, live: bool) -> int:
    """Runs the plan to its end and returns the exit code of the run; nothing that it started is left then.

    A server that a signal ends is started again; what it held goes on if its models have replicas.

    0: every trainer has exited with 0. 1: a child has failed, a server has ended by itself, or the time was over, and
    stderr says which. 128 + N: signal N (SIGINT, SIGTERM or SIGHUP) came and everything was stopped.
    """
    return _Launch(plan, live=live).run()


class _Launch:
    def __init__(self, plan: LaunchPlan, *, live: bool) -> None:
        self._plan = plan
        self._screen = Screen(Console(highlight=False), live=live)
        self._supervisor = Supervisor(self._on_line)
        self._address = ""
        self._data_dir = ""

    def run(self) -> int:
        problem = ""
        with tempfile.TemporaryDirectory(prefix="pserver-") as self._data_dir, self._supervisor:
            finished = False
            try:
                finished = self._run_trainers()
                if not finished:
                    problem = self._describe_problem()
                    self._supervisor.abort()
            finally:
                self._screen.close(last_poll=finished)
            if finished:
                self._drain_servers()
        if problem:
            print(f"pserver: error: {problem}", file=sys.stderr)
        if self._supervisor.interrupted_by is not None:
            return 128 + self._supervisor.interrupted_by
        return 1 if problem else 0

    def _run_trainers(self) -> bool:
        """Starts everything; True when all trainers have ended well."""
        plan, supervisor = self._plan, self._supervisor
        coordinator = ("--coordinator", "--min-servers", str(plan.servers), "--data-dir", self._data_dir)
        child = self._start_server("s0", *coordinator)
        if not supervisor.wait(lambda: bool(self._address), timeout_s=_READY_S):
            return False
        # All others know it by its address, by which it must be found if it is started again.
        child.command = self._server_command("s0", *coordinator, "--port", self._address.rpartition(":")[2])
        for index in range(1, plan.servers):
            self._start_server(f"s{index}", "--join", self._address)
        for rank in range(plan.trainers):
            self._start_trainer(rank)
        # Not before: the import takes a while, which the children need as well.
        from pserver.client.status import fetch_status

        self._screen.watch(lambda: fetch_status(self._address, timeout_s=_POLL_TIMEOUT_S))
        return supervisor.wait(supervisor.workers_ended, timeout_s=plan.timeout_s)

    def _start_server(self, name: str, *arguments: str) -> Child:
        command = self._server_command(name, *arguments)
        return self._supervisor.start(name, command, environ=self._environ({}), service=True, restarts=_RESTARTS)

    def _server_command(self, name: str, *arguments: str) -> list[str]:
        imports = [option for module in self._plan.imports for option in ("--import", module)]
        return [*_SERVE, "--name", name, *imports, *arguments]

    def _start_trainer(self, rank: int) -> None:
        variables = {
            "PSERVER_ADDRESS": self._address,
            "PSERVER_RANK": str(rank),
            "PSERVER_WORLD_SIZE": str(self._plan.trainers),
        }
        command = [sys.executable, "-u", str(self._plan.script), *self._plan.arguments]
        self._supervisor.start(f"t{rank}", command, environ=self._environ(variables))

    def _environ(self, variables: dict[str, str]) -> dict[str, str]:
        """What a child gets: this process's environment, passed on unread, and `variables`."""
        num_cores = len(os.sched_getaffinity(0))
        num_threads = max(1, num_cores // (self._plan.servers + self._plan.trainers))
        return {"OMP_NUM_THREADS": str(num_threads), **os.environ, **variables}

    def _drain_servers(self) -> None:
        for server in self._supervisor.drain(_DRAIN_S):
            self._screen.note(f"{server.name} did not shut down in order: {describe_exit(server.exit_code)}")

    def _describe_problem(self) -> str:
        if self._supervisor.failures:
            return f"the run has failed\n{failure_summary(self._supervisor.failures)}"
        if self._supervisor.interrupted_by is not None:
            return f"the run was stopped by {signal.Signals(self._supervisor.interrupted_by).name}"
        if not self._address:
            return f"s0 was not ready within {_READY_S:.0f} s; see its output above"
        names = ", ".join(child.name for child in self._supervisor.running if not child.service)
        return f"the run did not end within {self._plan.timeout_s:g} s; still running: {names}"

    def _on_line(self, name: str, text: str) -> None:
        self._screen.line(name, text)
        if name == "s0" and (found := _READY_LINE.match(text)):
            self._address = found[1]
