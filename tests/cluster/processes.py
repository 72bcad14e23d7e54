"""Real processes for tests: servers, trainers that do what they are told, and a pool of both."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pserver.client.status import fetch_status
from pserver.types import ClusterStatus, ModelStatus

ROOT = Path(__file__).parents[2]
PSERVER = (sys.executable, "-m", "pserver.cli.main")

#: Makes a child of the given class, which ends with the test.
Start = Callable[..., Any]

#: Importing torch takes a process seconds, and there may be more processes than cores.
START_S = 60.0
#: For what takes a moment; far more than it needs, so that a loaded machine fails no test.
SOON_S = 30.0
#: Deadline of what a trainer does, unless a test wants another one; it has to reply within `SOON_S`.
TIMEOUT_S = 20.0
TRAINER_LEASE_S = 4.0
SERVER_LEASE_S = 3.0

_NUM_LINES_SHOWN = 200
_KILL_S = 10.0
_NUM_IDLE_TRAINERS = 2


class Child:
    """One child process; its output is read as it comes.

    Every child that was ever made is in `Child.all`, so that a failing test can show what each has said.
    """

    all: ClassVar[list["Child"]] = []

    def __init__(self, name: str, command: Sequence[str], **environ: str) -> None:
        self.name = name
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PSERVER_")}
        ours = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._popen = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env={**inherited, **ours, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            errors="replace",
        )
        self._changed = threading.Condition()
        self._lines: list[tuple[str, str]] = []
        self._num_open = 2
        self._readers = [
            threading.Thread(target=self._read, args=(stream, getattr(self._popen, stream)), daemon=True)
            for stream in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()
        Child.all.append(self)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def stdout(self) -> list[str]:
        with self._changed:
            return [line for stream, line in self._lines if stream == "stdout"]

    @property
    def stderr(self) -> str:
        with self._changed:
            return "\n".join(line for stream, line in self._lines if stream == "stderr")

    def say(self, line: str) -> None:
        """Writes a line to the child's stdin."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + "\n")

    def wait_for(self, pattern: str, timeout_s: float = SOON_S, *, stream: str = "stdout", skip: int = 0) -> str:
        """The line, after the first `skip` matching ones, in which the pattern is found; waits for it."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = [line for where, line in self._lines if where == stream and re.search(pattern, line)]
                if len(found) > skip:
                    return found[skip]
                remaining_s = deadline - time.monotonic()
                if not self._num_open or remaining_s <= 0 or not self._changed.wait(remaining_s):
                    why = "ended" if not self._num_open else f"went on for {timeout_s:g} s"
                    raise AssertionError(f"{self.name} {why} without {pattern!r} on {stream}")

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self, timeout_s: float = SOON_S) -> int:
        """The exit code, as in `subprocess`, once all output is there."""
        code = self._popen.wait(timeout_s)
        for reader in self._readers:
            reader.join(_KILL_S)
        return code

    def close(self) -> None:
        """Kills the child if it still runs."""
        if self.alive:
            self._popen.kill()
        self.wait(_KILL_S)
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def transcript(self) -> str:
        """Who it is, how it ended, and its last lines."""
        with self._changed:
            lines = list(self._lines)
        code = self._popen.poll()
        head = f"{self.name} (pid {self.pid}): {'running' if code is None else f'exit code {code}'}"
        if len(lines) > _NUM_LINES_SHOWN:
            head += f", {len(lines) - _NUM_LINES_SHOWN} earlier lines left out"
        return "\n".join([head, *(f"  {stream}: {line}" for stream, line in lines[-_NUM_LINES_SHOWN:])])

    def _read(self, stream: str, pipe: Iterator[str]) -> None:
        for line in pipe:
            with self._changed:
                self._lines.append((stream, line.rstrip("\n")))
                self._changed.notify_all()
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()


class Server(Child):
    """`pserver serve`; not ready yet when it is made.

    Args:
        segments: directory of its shared memory; the usual one unless given.
    """

    def __init__(self, name: str, *arguments: str, segments: Path | None = None) -> None:
        leases = ("--trainer-lease-s", str(TRAINER_LEASE_S), "--server-lease-s", str(SERVER_LEASE_S))
        program = PSERVER if segments is None else with_segments_in(segments, "pserver.cli.main")
        super().__init__(name, [*program, "serve", "--name", name, *leases, *arguments])

    def address(self) -> str:
        """Where it listens; waits until it is ready."""
        line = self.wait_for(rf"^pserver ready name={self.name} ", START_S)
        return dict(item.split("=", 1) for item in line.split()[2:])["address"]


def with_segments_in(directory: Path, module: str) -> tuple[str, ...]:
    """The command of a module whose shared memory lies in a directory."""
    return (sys.executable, "-m", "tests.cluster.segments_in", str(directory), module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a command of a trainer came to; `error` is empty if it went well."""

    result: dict[str, object]
    error: str
    seconds: float


class Trainer(Child):
    """A process that runs remote_trainer.py: it does what it is told, so a test decides what happens when.

    Args:
        segments: directory of its servers' shared memory; the usual one unless given.
    """

    def __init__(self, name: str, *, segments: Path | None = None) -> None:
        module = "tests.cluster.remote_trainer"
        program = (sys.executable, "-m", module) if segments is None else with_segments_in(segments, module)
        super().__init__(name, program)
        self._num_told = 0
        self._num_replies = 0
        self.in_session = False

    @property
    def idle(self) -> bool:
        """Whether it can take part in another test."""
        return self.alive and not self.in_session and self._num_told == self._num_replies

    def tell(self, command: str, *arguments: object) -> None:
        """Sends a command; `reply` waits for what becomes of it. See remote_trainer.py for the commands."""
        self.in_session = command != "leave"
        self._num_told += 1
        self.say(" ".join(map(str, [command, *arguments])))

    def reply(self, timeout_s: float = SOON_S) -> Reply:
        """The reply to the oldest command that has none yet."""
        line = self.wait_for("^reply ", timeout_s, skip=self._num_replies)
        self._num_replies += 1
        return Reply(**json.loads(line.removeprefix("reply ")))

    def ask(self, command: str, *arguments: object, timeout_s: float = SOON_S) -> dict[str, object]:
        """Sends a command that has to go well and returns its result."""
        self.tell(command, *arguments)
        reply = self.reply(timeout_s)
        assert not reply.error, f"{self.name}: {command} failed: {reply.error}"
        return reply.result

    def train_on(self, model: str) -> None:
        """Trains until something fails; returns after the first step."""
        self.tell("steps", -1)
        self.wait_for(f"^{model}: first step done")

    def join(self, address: str, *, rank: int = 0, world_size: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        """Opens a session; `leave` ends it."""
        self.ask("join", address, rank, world_size, timeout_s)


class Cluster:
    """Two servers, s0 with the coordinator and s1, that have served a model before."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = list(servers)
        self.coordinator, self.other = servers
        self.address = self.coordinator.address()

    @property
    def intact(self) -> bool:
        return all(server.alive for server in self.servers)

    def status(self) -> ClusterStatus:
        return fetch_status(self.address)

    def model(self, name: str) -> ModelStatus:
        return next(model for model in self.status().models if model.name == name)

    def wait_until(self, condition: Callable[[ClusterStatus], bool], timeout_s: float = SOON_S) -> ClusterStatus:
        """Asks for the status until it satisfies the condition; each question takes a few milliseconds."""
        deadline = time.monotonic() + timeout_s
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {status}"
        return status

    def wait_for_round(self, model: str, last_round: int, *, waiting_for: tuple[int, ...], missing: int = 0) -> None:
        """Waits until the round after `last_round` waits for just these ranks, and so many trainers to attach."""
        expected = (last_round, waiting_for, missing)
        self.wait_until(
            lambda status: any(
                (each.round, each.waiting_for_ranks, each.missing_trainers) == expected
                for each in status.models
                if each.name == model
            )
        )


@contextlib.contextmanager
def unused_address() -> Iterator[str]:
    """An address at which nobody listens. A server may take it; nobody else will."""
    with socket.socket() as placeholder:
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        placeholder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{placeholder.getsockname()[1]}"


class Pool:
    """Processes that tests share, because starting one is slow. Closing it ends them."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._num_trainers = 0
        self._idle: list[Trainer] = []

    def cluster(self) -> Cluster:
        """A cluster with both servers alive. A test may end servers: the next one gets a new cluster."""
        if self._cluster is None or not self._cluster.intact:
            self._close_cluster()
            self._cluster = self._start_cluster()
        return self._cluster

    @contextlib.contextmanager
    def trainers(self, number: int) -> Iterator[list[Trainer]]:
        """Idle trainers; those that have not left at the end of the block are killed, and others start."""
        self._keep(number)
        lent, self._idle = self._idle[:number], self._idle[number:]
        try:
            for trainer in lent:
                trainer.wait_for("^idle$", START_S)
            yield lent
        finally:
            for trainer in lent:
                if trainer.idle:
                    self._idle.append(trainer)
                else:
                    trainer.close()
            self._keep(_NUM_IDLE_TRAINERS)

    def close(self) -> None:
        self._close_cluster()
        for trainer in self._idle:
            trainer.close()

    def _keep(self, number: int) -> None:
        """Starts trainers until so many are idle or about to be."""
        while len(self._idle) < number:
            self._num_trainers += 1
            self._idle.append(Trainer(f"trainer-{self._num_trainers}"))

    def _start_cluster(self) -> Cluster:
        self._keep(1)
        servers = [Server("s0", "--coordinator")]
        try:
            servers.append(Server("s1", "--join", servers[0].address()))
            servers[1].address()
            cluster = Cluster(servers)
            # The first model makes a server import what torch's optimizers need; later timeouts are about other things.
            with self.trainers(1) as (trainer,):
                trainer.join(cluster.address, timeout_s=START_S)
                trainer.ask("model", "first", timeout_s=START_S)
                trainer.ask("leave")
        except BaseException:
            for server in servers:
                server.close()
            raise
        return cluster

    def _close_cluster(self) -> None:
        if self._cluster is not None:
            for server in self._cluster.servers:
                server.close()
