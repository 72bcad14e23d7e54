"""Models and contexts that are made and dropped leave nothing behind, on the server and on the trainer."""

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster as Session
from pserver.config import TrainerSettings
from tests.cluster.counted import CountedServer
from tests.cluster.counted_server import resident_bytes
from tests.cluster.processes import START_S, Child
from tests.cluster.stepping_trainers import NUM_BYTES
from tests.routes import NETWORK_ROUTES

MEBI = 1 << 20
#: What a process may grow by, for fragments and caches of allocators. All that was dropped is many times that.
BOUND_BYTES = 48 * MEBI
#: Of one model's values and of one context's gradients. Optimizer state and buffers on the trainer come on top.
MODEL_BYTES = MEBI
#: The same, of steps once some have been done, which keep nothing at all.
STEPS_BOUND_BYTES = 6 * MEBI
#: Steps after which every buffer there is has been made.
NUM_WARM_UP_STEPS = 150
LEASE_S = 60.0
FIRST_CONTEXT = 10_000


@pytest.fixture(scope="module")
def server() -> Iterator[CountedServer]:
    server = CountedServer(
        "s0",
        "--coordinator",
        "--trainer-lease-s",
        str(LEASE_S),
        "--server-lease-s",
        str(LEASE_S),
        "--log-level",
        "ERROR",
    )
    yield server
    server.close()


@pytest.fixture
def session(server: CountedServer) -> Iterator[Session]:
    settings = TrainerSettings.resolve(server.address(), rank=0, world_size=1, timeout_s=START_S)
    with Session(settings) as session:
        yield session


class Weight:
    """One parameter of `MODEL_BYTES`, trained by Adam."""

    def __init__(self, session: Session, name: str) -> None:
        self.value = torch.nn.Parameter(torch.zeros(MODEL_BYTES // 4))
        self.value.grad = torch.ones_like(self.value)
        self.optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.Adam, [("weight", self.value)], lr=0.1, name=name, cluster=session
        )


def make_and_drop_model(session: Session) -> list[weakref.ref[object]]:
    """Registers, trains for a step and drops it again; references to what the trainer had of it."""
    optimizer = Weight(session, "dropped").optimizer
    optimizer.step()
    session.drop_model("dropped")
    model = optimizer._model
    assert model is not None
    (shard,) = model._shards._clients
    return [weakref.ref(each) for each in (model, model._replica, shard, shard.readable, shard.outgoing)]


def report(capsys: pytest.CaptureFixture[str], what: str, server_bytes: int, trainer_bytes: int) -> None:
    with capsys.disabled():
        print(f"\n  {what}: server {server_bytes / MEBI:+.1f} MiB, trainer {trainer_bytes / MEBI:+.1f} MiB", end="")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_models_that_are_made_and_dropped_leave_nothing(
    server: CountedServer, session: Session, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(10):
        make_and_drop_model(session)
    gc.collect()
    server_bytes, trainer_bytes = server.counts()["resident_bytes"], resident_bytes()
    made = [each for _ in range(number) for each in make_and_drop_model(session)]
    # The coordinator has forgotten a model when it is dropped; servers free their shards when they hear of it.
    counts = server.counts_with(Model=0, Shard=0, HostedShard=0, GradientContext=0)
    gc.collect()
    grown = counts["resident_bytes"] - server_bytes, resident_bytes() - trainer_bytes
    report(capsys, f"{number} models of {MODEL_BYTES / MEBI:g} MiB", *grown)
    # The coordinator keeps the outcome of what the trainer did last until it hears from it again.
    assert counts["outcomes"] <= 1
    assert max(grown) < BOUND_BYTES
    assert [each() for each in made if each() is not None] == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_contexts_that_are_pushed_and_dropped_leave_nothing(
    server: CountedServer, session: Session, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = Weight(session, "contexts")
    model = weight.optimizer._model
    assert model is not None

    def push_and_drop(first: int, count: int) -> None:
        for context_id in range(first, first + count):
            model.push(context_id, [weight.value.grad])
            model.drop_context(context_id)

    push_and_drop(FIRST_CONTEXT, 20)
    server_bytes, trainer_bytes = server.counts()["resident_bytes"], resident_bytes()
    push_and_drop(2 * FIRST_CONTEXT, number)
    counts = server.counts()
    grown = counts["resident_bytes"] - server_bytes, resident_bytes() - trainer_bytes
    report(capsys, f"{number} contexts of {MODEL_BYTES / MEBI:g} MiB", *grown)
    assert counts["GradientContext"] == 0
    # One of the coordinator and one of the shard: of what the trainer did last, until they hear from it again.
    assert counts["outcomes"] <= 2
    assert max(grown) < BOUND_BYTES
    session.drop_model("contexts")


@pytest.mark.parametrize("number", [10, pytest.param(500, marks=pytest.mark.slow)])
def test_trainers_that_come_and_go_leave_nothing(server: CountedServer, number: int) -> None:
    """Each leaves a model's context open and an outcome unheard of when it goes."""
    settings = TrainerSettings.resolve(server.address(), rank=0, world_size=1, timeout_s=START_S)
    for _ in range(number):
        with Session(settings) as session:
            weight = Weight(session, "stays")
            assert weight.optimizer._model is not None
            weight.optimizer._model.push(FIRST_CONTEXT, [weight.value.grad])
    server.counts_with(Member=0, GradientContext=0, outcomes=0, Model=1, Shard=1)
    with Session(settings) as session:
        session.drop_model("stays")


# Steps


@pytest.fixture(scope="module")
def stepping(server: CountedServer) -> Iterator[Child]:
    """Two trainers in a process of their own; see stepping_trainers.py."""
    script = str(Path(__file__).with_name("stepping_trainers.py"))
    child = Child("stepping", [sys.executable, script, server.address()])
    yield child
    child.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "route_name"),
    [
        *((300, name) for name in NETWORK_ROUTES if name != "stream"),
        pytest.param(300, "stream", marks=pytest.mark.slow),
        *(pytest.param(2000, name, marks=pytest.mark.slow) for name in NETWORK_ROUTES),
    ],
)
def test_steps_leave_nothing(
    server: CountedServer, stepping: Child, number: int, route_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A leak of one gradient a step would be several times the bound."""
    assert number * NUM_BYTES > 3 * STEPS_BOUND_BYTES

    def step(count: int) -> tuple[int, int]:
        """Resident bytes of the server and of the trainers after so many steps of both."""
        num_before = sum(line.startswith("stepped ") for line in stepping.stdout)
        stepping.say(f"{route_name}: {count}")
        line = stepping.wait_for("^stepped ", 5 * START_S, skip=num_before)
        return server.counts()["resident_bytes"], int(line.split()[1])

    before = step(NUM_WARM_UP_STEPS)
    after = step(number)
    grown = after[0] - before[0], after[1] - before[1]
    report(capsys, f"{number} steps by {route_name}", *grown)
    assert max(grown) < STEPS_BOUND_BYTES
