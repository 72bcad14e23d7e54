"""Shards with replicas, their promotion and the change of leaders, while anything dies between any two steps.

Hypothesis looks for an order of events after which `replication_model` finds an update lost, doubled or half there, a
copy that differs, or somebody who waits for ever.
"""

import logging
import random
import sys
from functools import partial

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from replication_model import Setup, World, stale_push

from pserver.core import shard as core_shard
from pserver.core.sync import Async

PICK = st.integers(0, 255)
SEED = st.integers(0, 1 << 16)

SETUPS = {
    "bsp-1": Setup(),
    "bsp-1-norm": Setup(max_norm=20.0),
    "bsp-2": Setup(replicas=2, num_servers=4),
    "async-1": Setup(policy=Async(), num_trainers=3),
    "async-1-norm": Setup(policy=Async(), max_norm=20.0),
    "async-2": Setup(policy=Async(max_staleness=1), replicas=2, num_servers=4, num_trainers=3),
}


class Replication(RuleBasedStateMachine):
    """Traffic, and what may go wrong with it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.world: World

    @initialize()
    def begin(self) -> None:
        self.world = World(self.setup)

    @rule(seed=SEED, most=st.integers(1, 60))
    def traffic(self, seed: int, most: int) -> None:
        order = random.Random(seed)
        for _ in range(most):
            events = self.world.events()
            for trainer in self.world.trainers:
                if trainer.idle:
                    events.append(partial(trainer.begin, commit=order.random() < 0.7))
            if events:
                order.choice(events)()

    @rule(picks=st.lists(PICK, max_size=8))
    def events(self, picks: list[int]) -> None:
        for pick in picks:
            events = self.world.events()
            if events:
                events[pick % len(events)]()

    @rule()
    def calm(self) -> None:
        self.world.run()

    @rule(pick=PICK, commit=st.booleans())
    def step(self, pick: int, commit: bool) -> None:
        idle = [each for each in self.world.trainers if each.idle]
        if idle:
            idle[pick % len(idle)].begin(commit=commit)

    @rule()
    def tick(self) -> None:
        self.world.tick()

    @rule(pick=PICK, seed=SEED)
    def crash(self, pick: int, seed: int) -> None:
        able = [name for name, each in self.world.servers.items() if each.alive and self.world.may_lose(name)]
        if able:
            self.world.crash(able[pick % len(able)], random.Random(seed))

    @rule(pick=PICK)
    def restart(self, pick: int) -> None:
        dead = [name for name, each in self.world.servers.items() if not each.alive]
        if dead:
            self.world.restart(dead[pick % len(dead)])

    @rule(pick=PICK)
    def break_link(self, pick: int) -> None:
        able = [name for name, each in self.world.servers.items() if each.linked]
        if able:
            self.world.break_link(able[pick % len(able)])

    @rule(pick=PICK, seed=SEED)
    def break_stream(self, pick: int, seed: int) -> None:
        able = [each.follower for each in self.world.streams if each.follower is not None]
        if able:
            self.world.note("-- a stream breaks")
            able[pick % len(able)].leave(random.Random(seed))

    @rule()
    def change_leader(self) -> None:
        self.world.change_leader()

    @rule(pick=PICK, back=st.booleans())
    def cut_off(self, pick: int, back: bool) -> None:
        able = [
            name
            for name, each in self.world.servers.items()
            if each.alive and not each.cut_off and self.world.may_lose(name)
        ]
        if able and not any(each.cut_off for each in self.world.servers.values()):
            self.world.cut_off(able[pick % len(able)])

    @rule()
    def back(self) -> None:
        for server in self.world.servers.values():
            server.cut_off = False

    @rule(pick=PICK)
    def end_trainer(self, pick: int) -> None:
        if len(self.world.trainers) > 1:
            self.world.end_trainer(self.world.trainers[pick % len(self.world.trainers)])

    @rule(pick=PICK, which=PICK)
    def repeat(self, pick: int, which: int) -> None:
        trainer = self.world.trainers[pick % len(self.world.trainers)]
        if trainer.sent:
            stale_push(*trainer.sent[which % len(trainer.sent)])

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if sys.exception() is None:
            try:
                self.world.heal()
            except BaseException:
                note("\n".join(self.world.trace))
                raise
        else:
            note("\n".join(self.world.trace))


def _check(setup: Setup, max_examples: int, stateful_step_count: int, *, derandomize: bool = True) -> None:
    run_state_machine_as_test(
        partial(Replication, setup),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=stateful_step_count,
            deadline=None,
            derandomize=derandomize,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are lost by the hundred here, and rounds few."""
    caplog.set_level(logging.CRITICAL, logger="pserver")
    monkeypatch.setattr(core_shard, "CHECK_EVERY_ROUNDS", 2)


@pytest.mark.parametrize("setup", SETUPS)
def test_nothing_is_lost_or_doubled_while_anything_dies(setup: str) -> None:
    _check(SETUPS[setup], max_examples=8, stateful_step_count=50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", SETUPS)
def test_nothing_is_lost_or_doubled_while_anything_dies_for_long(setup: str) -> None:
    _check(SETUPS[setup], max_examples=300, stateful_step_count=60, derandomize=False)
