"""The processes of one run: they start, suffer faults, settle, and are looked at."""

import contextlib
import heapq
import logging
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch

import pserver
from pserver.client.status import fetch_status
from pserver.errors import PserverError
from pserver.types import ClusterStatus, ModelStatus
from pserver.wire import shm
from tests.chaos import checking
from tests.chaos.network import Networks
from tests.chaos.processes import Child
from tests.chaos.schedule import (
    CANDIDATES,
    COORDINATOR_ALONE,
    ETCD,
    FAULTY_TRAINER,
    SERVER_LEASE_S,
    SERVERS,
    STEADY_TRAINER,
    TRAINER_LEASE_S,
    Fault,
    FaultKind,
    Scenario,
)
from tests.chaos.trainer import MODEL, WORLD_SIZE, share
from tests.etcd_server import EtcdServer, find_etcd

logger = logging.getLogger(__name__)

#: Everything that must come to pass has so long, in seconds; it takes a small part of it.
LIMIT_S = 90.0
_POLL_S = 0.05
_STATUS_S = 2.0
#: Copies count as complete once the coordinator has said so for as long as it takes to miss a server.
_STEADY_S = SERVER_LEASE_S
#: Steps of every trainer after the last fault.
_NUM_LAST_STEPS = 3


C = TypeVar("C", bound=Child)


class Violation(Exception):
    """Something is not as it must be."""


class Server(Child):
    """One server; not ready yet when it is made."""

    def __init__(self, name: str, *arguments: str, log: Path, segments: Path, network: str) -> None:
        leases = ("--server-lease-s", str(SERVER_LEASE_S), "--trainer-lease-s", str(TRAINER_LEASE_S))
        command = ("pserver.cli.main", "serve", "--name", name, *leases, *arguments)
        super().__init__(name, command, log=log, segments=segments, network=network)

    @property
    def address(self) -> str | None:
        """Where it listens; None: it is not ready yet."""
        ready = self.find("^pserver ready ")
        return None if ready is None else dict(item.split("=", 1) for item in ready.split()[2:])["address"]


class Trainer(Child):
    """One trainer, with its ledger."""

    def __init__(self, name: str, number: int, addresses: str, policy: str, *, folder: Path, segments: Path) -> None:
        self.number = number
        self._path = folder / f"trainer-{number}.jsonl"
        name = f"{name}-{number}"
        command = ("tests.chaos.trainer", addresses, str(number), str(self._path), policy)
        super().__init__(name, command, log=folder / f"{name}.log", segments=segments)
        #: Whether its end is one of the faults.
        self.killed = False

    def ledger(self) -> checking.Ledger:
        return checking.Ledger.read(self.number, self._path)


class Run:
    """Processes of one run; use it in a `with` block, at the end of which they have ended.

    Args:
        scenario: what is trained, and how servers find each other.
        folder: for what servers and trainers write.
        trains: whether there are trainers.
    """

    def __init__(self, scenario: Scenario, folder: Path, *, trains: bool = True) -> None:
        self._scenario = scenario
        self._folder = folder
        self._trains = trains
        self._resources = contextlib.ExitStack()
        self.children: list[Child] = []
        self.servers: dict[str, Server] = {}
        self.trainers: dict[str, Trainer] = {}
        self._all_trainers: list[Trainer] = []
        self._addresses: dict[str, str] = {}
        self._gone: set[str] = set()  # servers that are killed and not started again
        self._faulted: set[str] = set()
        self._heals: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._numbers_of_heals, self._numbers_of_logs = count(), count()
        self._stops: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._etcd: EtcdServer | None = None
        self._networks: Networks | None = None

    def __enter__(self) -> "Run":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            child.kill()
        self._resources.close()

    # Starting

    def _start(self) -> None:
        self._segments = Path(
            self._resources.enter_context(tempfile.TemporaryDirectory(dir=shm.DIRECTORY, prefix="pschaos-"))
        )
        if self._scenario.etcd:
            self._etcd = EtcdServer(find_etcd(), self._folder)
            self._resources.callback(self._etcd.stop)
            self._etcd.start()
        if self._scenario.partitions:
            self._networks = Networks(SERVERS)
            self._resources.callback(self._networks.close)
            self._networks.start()
        names = list(SERVERS)
        if not self._scenario.etcd:
            self._serve(names.pop(0))
            self._wait_ready()
        for name in names:
            self._serve(name)
        self._wait_ready()
        for name in (STEADY_TRAINER, FAULTY_TRAINER) if self._trains else ():
            self._train(name)
        for trainer in self.trainers.values():
            self.until(lambda trainer=trainer: bool(trainer.find("^training$")), f"{trainer.name} trains")

    def _serve(self, name: str) -> None:
        arguments: list[str] = []
        if name in self._addresses:
            arguments += ["--port", self._addresses[name].rpartition(":")[2]]
        if self._networks is not None:
            arguments += ["--host", self._networks.host(name)]
        if self._etcd is not None:
            arguments += ["--coordination", f"etcd://{self._etcd.endpoint}/chaos"]
            arguments += ["--coordinator"] if name in CANDIDATES else []
        elif name == COORDINATOR_ALONE:
            arguments += ["--coordinator", "--data-dir", str(self._folder / "coordinator")]
        else:
            arguments += ["--join", self._addresses[COORDINATOR_ALONE]]
        network = "" if self._networks is None else self._networks.space(name)
        log = self._folder / f"{name}-{next(self._numbers_of_logs)}.log"
        self.servers[name] = self._child(Server(name, *arguments, log=log, segments=self._segments, network=network))

    def _wait_ready(self) -> None:
        self.until(self._ready, "every server is ready")

    def _ready(self) -> bool:
        for name, server in self.servers.items():
            if server.address is not None:
                self._addresses[name] = server.address
        return all(server.address is not None for name, server in self.servers.items() if name not in self._gone)

    @property
    def coordinators(self) -> str:
        """Their addresses."""
        names = CANDIDATES if self._scenario.etcd else (COORDINATOR_ALONE,)
        return ",".join(self._addresses[each] for each in names)

    def _train(self, name: str) -> None:
        trainer = Trainer(
            name,
            next(self._numbers),
            self.coordinators,
            self._scenario.policy,
            folder=self._folder,
            segments=self._segments,
        )
        self.trainers[name] = self._child(trainer)
        self._all_trainers.append(trainer)

    def _child(self, child: C) -> C:
        self.children.append(child)
        return child

    # Waiting

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Polls until a condition holds; meanwhile faults end when their time comes.

        Raises:
            Violation: it does not in time, or a process has ended that nobody has killed.
        """
        give_up = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > give_up:
                raise Violation(f"not within {limit_s:g} s: {what}; {self._status_or_why_not()}")
            self._look_after()
            time.sleep(_POLL_S)

    def rest(self, seconds: float) -> None:
        """Lets so much time pass."""
        ends = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= ends, "a pause ends", seconds + LIMIT_S)

    def _look_after(self) -> None:
        while self._heals and self._heals[0][0] <= time.monotonic():
            heapq.heappop(self._heals)[2]()
        for name, server in self.servers.items():
            if name not in self._faulted | self._gone and not server.alive:
                raise Violation(f"server {name} has ended by itself")
        for trainer in self.trainers.values():
            if not trainer.killed and not trainer.alive:
                self._require_well(trainer)

    @staticmethod
    def _require_well(trainer: Trainer) -> None:
        if (code := trainer.wait(LIMIT_S)) != 0:
            raise Violation(f"{trainer.name} has failed, exit code {code}: {trainer.ledger().failure}")

    def wait_for_copies(self) -> None:
        """Waits until no server is missing, and no shard lacks a copy."""
        self._wait_ready()
        since = time.monotonic()

        def complete() -> bool:
            nonlocal since
            status = self._status()
            if status is None or not self._complete(status):
                since = time.monotonic()
            return time.monotonic() - since > _STEADY_S

        self.until(complete, "every shard has its copies")

    def _complete(self, status: ClusterStatus) -> bool:
        heard = {each.name for each in status.servers if each.alive and each.silent_s < SERVER_LEASE_S / 2}
        return heard == set(SERVERS) - self._gone and all(
            model.state == "ready" and not any(each.num_missing_replicas or each.electing for each in model.shards)
            for model in status.models
        )

    def _status(self) -> ClusterStatus | None:
        try:
            return fetch_status(self.coordinators, _STATUS_S)
        except PserverError:
            return None

    def _status_or_why_not(self) -> str:
        try:
            return str(fetch_status(self.coordinators, _STATUS_S))
        except PserverError as error:
            return f"no status: {error}"

    # Faults

    def inject(self, fault: Fault) -> None:
        """Waits for its time and until the budget allows it, and lets it happen; it ends by itself."""
        self.rest(fault.after_s)
        if fault.target in SERVERS:
            # The one before has ended, and what it cost is made good.
            self.until(lambda: not self._faulted & set(SERVERS), "the fault before has ended")
            self.wait_for_copies()
        else:
            self.until(lambda: fault.target not in self._faulted, "the fault before has ended")
        if fault.target in self.trainers:
            trainer = self.trainers[fault.target]
            self.until(lambda: bool(trainer.ledger().outcomes), f"{trainer.name} has trained")
        logger.info("%s", fault)
        self._faulted.add(fault.target)
        begin = {FaultKind.KILL: self._kill, FaultKind.STOP: self._stop, FaultKind.PARTITION: self._cut}[fault.kind]
        end = begin(fault.target)
        if fault.returns:
            heapq.heappush(self._heals, (time.monotonic() + fault.for_s, next(self._numbers_of_heals), end))

    def _kill(self, target: str) -> Callable[[], None]:
        if target == ETCD:
            assert self._etcd is not None
            self._etcd.kill()
            return lambda: self._end(target, self._etcd.start)
        if target in SERVERS:
            self.servers[target].kill()
            return lambda: self._end(target, lambda: self._serve(target))
        self.trainers[target].killed = True
        self.trainers[target].kill()
        return lambda: self._end(target, lambda: self._train(target))

    def _stop(self, target: str) -> Callable[[], None]:
        if target == ETCD:
            assert self._etcd is not None
            self._etcd.pause()
            return lambda: self._end(target, self._etcd.resume)
        child = self.servers[target] if target in SERVERS else self.trainers[target]
        began_s = time.monotonic()
        child.send(signal.SIGSTOP)

        def go_on() -> None:
            child.send(signal.SIGCONT)
            if isinstance(child, Trainer):
                self._stops[child.number].append((began_s, time.monotonic()))

        return lambda: self._end(target, go_on)

    def _cut(self, target: str) -> Callable[[], None]:
        networks = self._networks
        assert networks is not None
        networks.cut(target)
        return lambda: self._end(target, lambda: networks.heal(target))

    def _end(self, target: str, end: Callable[[], None]) -> None:
        end()
        self._faulted.discard(target)

    def kill_for_good(self, name: str) -> None:
        """Kills a server, and expects it no more."""
        self._gone.add(name)
        self.servers[name].kill()

    # The end

    def settle(self) -> None:
        """Lets all faults end, has every trainer step again, and ends the trainers."""
        self.until(lambda: not self._heals, "every fault has ended")
        self.wait_for_copies()
        living = [each for each in self.trainers.values() if not each.killed]
        before = {each.number: len(each.ledger().outcomes) for each in living}
        for trainer in living:
            self.until(
                lambda trainer=trainer: len(trainer.ledger().outcomes) >= before[trainer.number] + _NUM_LAST_STEPS,
                f"{trainer.name} steps after the last fault",
            )
        for trainer in living:
            trainer.send(signal.SIGTERM)
        for trainer in living:
            self.until(lambda trainer=trainer: not trainer.alive, f"{trainer.name} ends")
            self._require_well(trainer)

    def ledgers(self) -> list[checking.Ledger]:
        return [each.ledger() for each in self._all_trainers]

    def model(self) -> ModelStatus:
        """The model that trainers train."""
        return next(each for each in fetch_status(self.coordinators, _STATUS_S).models if each.name == MODEL)

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the servers hold now."""
        with pserver.connect(self.coordinators, world_size=WORLD_SIZE, timeout_s=LIMIT_S, transport="grpc") as cluster:
            module, _ = share(self._scenario.policy, cluster)
            return module.slots.detach().clone(), module.dense.detach().clone()

    def check(self) -> list[str]:
        """What is wrong with values and ledgers; see checking.py."""
        ledgers = self.ledgers()
        slots, dense = self.values()
        found = checking.violations(ledgers, slots, dense)
        for ledger in ledgers:
            if ledger.num_ended > len(self._stops[ledger.trainer]):
                found.append(f"the lease of trainer {ledger.trainer} ended, although it was never stopped")
        return found

    def check_copies(self, order: Sequence[str]) -> list[str]:
        """Kills these servers one after the other: whoever goes on must have the same bits. All copies are there."""
        found = []
        first = self.values()
        for name in order:
            if self._gone:
                self.wait_for_copies()
            self.kill_for_good(name)
            for what, before, after in zip(("slots", "dense"), first, self.values(), strict=True):
                if not torch.equal(before.view(torch.int32), after.view(torch.int32)):
                    where = (before != after).nonzero()[:4].tolist()
                    found.append(f"{what} has other bits once {name} is gone, first at {where}")
        return found

    def longest_pause_s(self) -> float:
        return checking.longest_pause_s(self.ledgers(), self._stops)

    def check_nothing_left(self) -> list[str]:
        """Ends all servers, and looks for what is left of them."""
        living = [each for name, each in self.servers.items() if name not in self._gone]
        for server in living:
            server.send(signal.SIGTERM)
        found = [f"server {each.name} ended with {code}" for each in living if (code := each.wait(LIMIT_S)) != 0]
        found += [f"{child.name} still runs" for child in self.children if child.alive]
        with _segments_in(self._segments):
            shm.sweep()
            found += [f"{path.name} is left in shared memory" for path in self._segments.iterdir()]
        return found


@contextlib.contextmanager
def _segments_in(directory: Path) -> Iterator[None]:
    before, shm.DIRECTORY = shm.DIRECTORY, directory
    try:
        yield
    finally:
        shm.DIRECTORY = before
