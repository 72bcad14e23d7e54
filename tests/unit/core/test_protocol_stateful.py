"""The protocol between coordinator, shards and trainers, over a network that loses, repeats, delays and reorders.

Hypothesis looks for an order of events after which `protocol_model` finds something that must not be: shards that
differ, a gradient counted twice or never, a mix of rounds, memory that leaks, somebody who waits for ever.
"""

import logging
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from protocol_model import (
    TICK_S,
    TRAINER_LEASE_S,
    Abandon,
    Action,
    Cluster,
    PushEarly,
    Quit,
    SimServer,
    SimTrainer,
    TakeStep,
)

T = TypeVar("T")

MAX_TRAINERS = 4
#: In traffic without faults, how often a trainer that waits loses patience and repeats its call, per event.
IMPATIENCE = 0.05
LEASE_TICKS = math.ceil(TRAINER_LEASE_S / TICK_S)

#: Chooses one of however many there are.
PICK = st.integers(0, 255)
#: How much of the most possible traffic there is, and in which order.
TRAFFIC = st.tuples(st.integers(0, 100), st.integers(0, 1 << 16))
STEPS = st.builds(
    TakeStep, samples=st.sampled_from([1, 1, 2, 3, 0]), lr=st.sampled_from([1.0, 2.0, 0.5]), all_pushed=st.booleans()
)
ACTIONS = st.one_of(STEPS, st.sampled_from([PushEarly(), PushEarly(), Abandon(), Quit()]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where runs begin, and what they are like.

    Args:
        prepare: what happens before the first fault.
        max_traffic: messages that follow a fault, at most.
        servers_fail: whether servers are lost, too.
    """

    prepare: Callable[[Cluster], None]
    max_traffic: int
    servers_fail: bool = False


STAGES = {
    "nothing is there": Stage(prepare=lambda cluster: None, max_traffic=10),
    "initialising": Stage(prepare=lambda cluster: cluster.deliver_all(to_shards=False), max_traffic=6),
    "training": Stage(prepare=Cluster.heal, max_traffic=30),
    "losing servers": Stage(prepare=Cluster.heal, max_traffic=15, servers_fail=True),
}

#: Ways to lose a server.
LOSSES = [Cluster.crash_server, Cluster.silence_server, Cluster.break_down]


def pick_from(items: Sequence[T], pick: int) -> T:
    """The item that a number chooses."""
    return items[pick % len(items)]


class Protocol(RuleBasedStateMachine):
    """What may happen to a cluster, one rule each; a rule that has nothing to happen to only lets the traffic go on."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    @initialize(num_servers=st.integers(2, 3), world_size=st.integers(1, 2), num_trainers=st.integers(1, 3))
    def start(self, num_servers: int, world_size: int, num_trainers: int) -> None:
        self.cluster = Cluster(num_servers=num_servers, world_size=world_size)
        self.healed_round = 0
        for _ in range(num_trainers):
            self.cluster.join()
        self.stage.prepare(self.cluster)

    # The network

    @rule(picks=st.lists(PICK, min_size=1, max_size=12))
    def deliver(self, picks: list[int]) -> None:
        for pick in picks:
            if events := self.cluster.events():
                pick_from(events, pick)()

    @rule(traffic=TRAFFIC)
    def go_on(self, traffic: tuple[int, int]) -> None:
        self._go_on(traffic)

    @rule(pick=PICK, traffic=TRAFFIC)
    def repeat(self, pick: int, traffic: tuple[int, int]) -> None:
        if requests := self.cluster.requests:
            self.cluster.deliver_request(pick_from(requests, pick), keep=True)
        self._go_on(traffic)

    @rule(picks=st.lists(PICK, min_size=1, max_size=4), traffic=TRAFFIC)
    def lose(self, picks: list[int], traffic: tuple[int, int]) -> None:
        for pick in picks:
            if messages := [*self.cluster.requests, *self.cluster.replies]:
                self.cluster.lose(pick_from(messages, pick))
        self._go_on(traffic)

    @rule(pick=PICK, noticed=st.booleans(), num_late_reports=st.integers(0, 2), traffic=TRAFFIC)
    def break_link(self, pick: int, noticed: bool, num_late_reports: int, traffic: tuple[int, int]) -> None:
        if linked := [each for each in self._running() if each.link is not None]:
            self.cluster.break_link(pick_from(linked, pick), noticed=noticed, num_late_reports=num_late_reports)
        self._go_on(traffic)

    @rule(noticed=st.booleans(), traffic=TRAFFIC)
    def relink(self, noticed: bool, traffic: tuple[int, int]) -> None:
        for server in [each for each in self._running() if each.link is None]:
            if noticed:
                self.cluster.notice_break(server)
            self.cluster.relink(server)
        self._go_on(traffic)

    # Trainers

    @rule(actions=st.lists(ACTIONS, min_size=1, max_size=MAX_TRAINERS), traffic=TRAFFIC)
    def act(self, actions: list[Action], traffic: tuple[int, int]) -> None:
        for trainer, action in zip(self.cluster.idle_trainers, actions, strict=False):
            trainer.act(action)
        self._go_on(traffic)

    @rule(traffic=TRAFFIC)
    def join(self, traffic: tuple[int, int]) -> None:
        if len(self.cluster.running_trainers) < MAX_TRAINERS:
            self.cluster.join()
        self._go_on(traffic)

    @rule(pick=PICK, crash=st.booleans(), ends=st.booleans(), traffic=TRAFFIC)
    def lose_trainer(self, pick: int, crash: bool, ends: bool, traffic: tuple[int, int]) -> None:
        """It dies, or it only stops to renew its lease and goes on with everything else. Another one joins."""
        if running := self.cluster.running_trainers:
            trainer = pick_from(running, pick)
            trainer.renews = False
            if crash:
                trainer.crash()
            if ends:
                self.cluster.advance(LEASE_TICKS)
            self.cluster.join()
        self._go_on(traffic)

    # Servers

    @rule(pick=PICK, how=st.sampled_from(LOSSES), traffic=TRAFFIC)
    def lose_server(self, pick: int, how: Callable[[Cluster, SimServer], None], traffic: tuple[int, int]) -> None:
        if self.stage.servers_fail and (running := self._running()):
            how(self.cluster, pick_from(running, pick))
        self._go_on(traffic)

    # Time

    @rule(ticks=st.integers(1, 12), traffic=TRAFFIC)
    def let_time_pass(self, ticks: int, traffic: tuple[int, int]) -> None:
        self.cluster.advance(ticks)
        self._go_on(traffic)

    @rule(ticks=st.integers(1, 12), traffic=TRAFFIC)
    def pause_coordinator(self, ticks: int, traffic: tuple[int, int]) -> None:
        self.cluster.pause(10 * ticks * TICK_S)
        self._go_on(traffic)

    @rule()
    def heal(self) -> None:
        if self.cluster.reference.round > self.healed_round:
            self.cluster.heal()
            self.healed_round = self.cluster.reference.round

    # What must hold

    @invariant()
    def holds(self) -> None:
        self.cluster.check()

    def teardown(self) -> None:
        if sys.exception() is None:  # otherwise something is broken already, and that is what must be reported
            self.cluster.heal()

    def _go_on(self, traffic: tuple[int, int]) -> None:
        """Messages arrive in any order, trainers that are idle step, those that wait may repeat their call."""
        percent, seed = traffic
        order = random.Random(seed)
        for _ in range(self.stage.max_traffic * percent // 100):
            events: list[Callable[[], object]] = [*self.cluster.events()]
            events += [partial(each.act, TakeStep(samples=order.randint(0, 3))) for each in self.cluster.idle_trainers]
            events += [each.send for each in self._waiting() if order.random() < IMPATIENCE]
            if events:
                order.choice(events)()

    def _waiting(self) -> list[SimTrainer]:
        return [each for each in self.cluster.running_trainers if not each.idle]

    def _running(self) -> list[SimServer]:
        return [each for each in self.cluster.servers if each.running]


def _check(stage: str, max_examples: int, stateful_step_count: int) -> None:
    run_state_machine_as_test(
        partial(Protocol, STAGES[stage]),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=stateful_step_count,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Servers are lost by the hundred here."""
    caplog.set_level(logging.CRITICAL, logger="pserver")


@pytest.mark.parametrize("stage", STAGES)
def test_protocol_holds_over_a_hostile_network(stage: str) -> None:
    _check(stage, max_examples=40, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", STAGES)
def test_protocol_holds_over_a_hostile_network_for_long(stage: str) -> None:
    _check(stage, max_examples=1000, stateful_step_count=60)
