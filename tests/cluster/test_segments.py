"""Shared memory of servers and trainers that end, in whatever way: what they leave, who removes it, who reads it."""

import signal
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster as Session
from pserver.client.shards import Shards
from pserver.config import TrainerSettings
from pserver.errors import DeadlineExceeded, ServerUnavailable
from pserver.wire import shm
from tests.cluster.processes import SOON_S, START_S, TRAINER_LEASE_S, Server, Start, Trainer
from tests.waiting import set_timeout, until

pytestmark = pytest.mark.skipif(bool(shm.why_not()), reason="this machine cannot share memory")

#: Of values, of a mailbox, and of the proof that a trainer is on this machine.
NUM_SEGMENTS = 3
#: Of operations that are to fail.
TIMEOUT_S = 1.0

_numbers = count()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Where segments of these tests' processes are: servers of other tests sweep the usual place."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=shm.DIRECTORY) as name:
        patch.setattr(shm, "DIRECTORY", Path(name))
        yield Path(name)


def segments(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    """A server that outlives all others."""
    server = Server("living", "--coordinator", segments=directory)
    server.address()
    yield server
    server.close()


@pytest.fixture
def serve(start: Start, directory: Path) -> Callable[[str], Server]:
    """Starts another server, with a coordinator of its own."""

    def serve(name: str) -> Server:
        server: Server = start(Server, name, "--coordinator", segments=directory)
        server.address()
        return server

    return serve


class Weight:
    """A session and one parameter, trained by SGD with learning rate 1 over shared memory and nothing else."""

    def __init__(self, server: Server) -> None:
        settings = TrainerSettings.resolve(server.address(), rank=0, world_size=1, timeout_s=START_S, transport="shm")
        self.session = Session(settings)
        self.session.start()
        self.value = torch.nn.Parameter(torch.zeros(64))
        self._optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            [("weight", self.value)],
            lr=1.0,
            name=f"weight-{next(_numbers)}",
            cluster=self.session,
            bucket_bytes=128,
        )

    def step(self) -> float:
        """A step with gradient 1; returns the value that all elements have then."""
        self.value.grad = torch.ones(64)
        self._optimizer.step()
        (value,) = self.value.unique().tolist()
        return value

    def read(self) -> int:
        """The round of the values that are read now, in memory or by messages."""
        return self._shards.pull_(0, {0: torch.empty(64)})

    def read_in_memory(self) -> int | None:
        """The round of the values in memory; None if they may not be used."""
        return self._shards._clients[0].read_({0: torch.empty(64)}, mixed_rounds=False)

    @property
    def _shards(self) -> Shards:
        assert self._optimizer._model is not None
        return self._optimizer._model._shards


@pytest.fixture
def connect() -> Iterator[Callable[[Server], Weight]]:
    """Makes a `Weight`, which ends with the test."""
    made: list[Weight] = []

    def connect(server: Server) -> Weight:
        made.append(Weight(server))
        return made[-1]

    yield connect
    for each in made:
        each.session.close()


def test_what_a_killed_server_left_is_read_by_nobody_and_removed_by_the_next_server(
    server: Server, serve: Callable[[str], Server], directory: Path, connect: Callable[[Server], Weight]
) -> None:
    going_on = connect(server)
    assert going_on.step() == -1.0
    of_the_living = segments(directory)
    killed = serve("killed")
    lost = connect(killed)
    assert lost.step() == -1.0
    assert lost.read_in_memory() == 1
    left = segments(directory) - of_the_living
    assert len(left) == NUM_SEGMENTS

    killed.send(signal.SIGKILL)
    killed.wait()
    until(lambda: lost.read_in_memory() is None, "its lease is over", limit_s=SOON_S)
    set_timeout(lost.session, TIMEOUT_S)
    for attempt in (lost.read, lost.step):
        with pytest.raises(ServerUnavailable, match=killed.address()):
            attempt()
    assert lost.value.eq(-1.0).all(), "what failed changes nothing"
    assert segments(directory) == of_the_living | left, "nobody has been there to remove anything"

    following = serve("following")
    following.wait_for(rf"removed {NUM_SEGMENTS} segments of shared memory", stream="stderr")
    assert segments(directory) == of_the_living
    assert lost.read_in_memory() is None
    assert going_on.step() == -2.0
    assert going_on.read_in_memory() == 2

    assert connect(following).step() == -1.0
    assert len(segments(directory) - of_the_living) == NUM_SEGMENTS
    following.send(signal.SIGTERM)
    assert following.wait() == 0
    assert segments(directory) == of_the_living, "a server that is told to end leaves nothing"


@pytest.mark.slow
def test_a_server_that_is_interrupted_leaves_nothing(
    server: Server, serve: Callable[[str], Server], directory: Path, connect: Callable[[Server], Weight]
) -> None:
    before = segments(directory)
    interrupted = serve("interrupted")
    assert connect(interrupted).step() == -1.0
    assert len(segments(directory) - before) == NUM_SEGMENTS
    interrupted.send(signal.SIGINT)
    assert interrupted.wait() == 0
    assert segments(directory) == before


def test_a_trainer_asks_a_server_that_hangs_and_reads_its_memory_again_when_it_goes_on(
    server: Server, connect: Callable[[Server], Weight]
) -> None:
    weight = connect(server)
    assert weight.step() == -1.0
    server.send(signal.SIGSTOP)
    try:
        until(lambda: weight.read_in_memory() is None, "the lease is over", limit_s=SOON_S)
        set_timeout(weight.session, TIMEOUT_S)
        with pytest.raises((ServerUnavailable, DeadlineExceeded), match=server.address()):
            weight.read()
    finally:
        server.send(signal.SIGCONT)
    until(lambda: weight.read_in_memory() == 1, "the lease is extended", limit_s=SOON_S)


def test_the_mailbox_of_a_killed_trainer_goes_with_its_lease(server: Server, start: Start, directory: Path) -> None:
    trainer: Trainer = start(Trainer, "trainer", segments=directory)
    trainer.join(server.address(), timeout_s=START_S)
    before = segments(directory)
    trainer.ask("model", "orphaned", timeout_s=START_S)
    trainer.train_on("orphaned")
    opened = segments(directory)
    assert len(opened - before) >= NUM_SEGMENTS - 1
    trainer.send(signal.SIGKILL)
    trainer.wait()
    until(lambda: segments(directory) != opened, "its mailbox is removed", limit_s=TRAINER_LEASE_S + SOON_S)
    assert len(opened - before - segments(directory)) == 1
    assert segments(directory) <= opened
