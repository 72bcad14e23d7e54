"""The protocol between coordinator, shards and trainers, over a network that loses, repeats, delays and reorders.

Hypothesis looks for an order of events after which `protocol_model` finds something that must not be: shards that
differ, a gradient counted twice or never, a mix of rounds, memory that leaks, somebody who waits for ever.
"""

import logging
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, note, settings
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
    Cluster,
    PushEarly,
    Quit,
    Setup,
    TakeStep,
)

from pserver.core.rules import GradientRules
from pserver.core.sync import Async, Bsp, Ssp

T = TypeVar("T")

MAX_TRAINERS = 4
#: How often a trainer that waits loses patience and repeats its call, per message that arrives.
IMPATIENCE = 0.05
LEASE_TICKS = math.ceil(TRAINER_LEASE_S / TICK_S)

#: Chooses one of however many there are.
PICK = st.integers(0, 255)
#: How much of the most possible traffic there is, in percent, and in which order.
TRAFFIC = st.tuples(st.integers(0, 100), st.integers(0, 1 << 16))
#: What trainers do, the usual more often.
ACTIONS = (
    *(TakeStep(samples=samples, lr=lr) for samples, lr in [(1, 1.0), (1, 1.0), (1, 2.0), (2, 1.0), (3, 0.5), (0, 1.0)]),
    *(TakeStep(samples=samples, all_pushed=True) for samples in (1, 2)),
    *(TakeStep(odd=True), TakeStep(overflow=True)),
    *(PushEarly(), PushEarly(), Abandon()),
)


def pick_from(items: Sequence[T], pick: int) -> T:
    """The item that a number chooses."""
    return items[pick % len(items)]


# What may happen. Each takes two numbers, which choose whom it happens to and how; without anybody, nothing does.


def nothing(_: Cluster, __: int, ___: int) -> None:
    """Only the traffic goes on."""


def join(cluster: Cluster, _: int, __: int) -> None:
    """A trainer starts, unless there are many."""
    if len(cluster.running_trainers) < MAX_TRAINERS:
        cluster.join()


def all_act(cluster: Cluster, _: int, how: int) -> None:
    """Every idle trainer does something."""
    for number, trainer in enumerate(cluster.idle_trainers):
        trainer.act(pick_from(ACTIONS, how + 3 * number))


def leave(cluster: Cluster, pick: int, _: int) -> None:
    """An idle trainer leaves."""
    if cluster.idle_trainers:
        pick_from(cluster.idle_trainers, pick).act(Quit())


def lose_messages(cluster: Cluster, pick: int, num_messages: int) -> None:
    """Some messages of trainers or to them are lost."""
    for _ in range(1 + num_messages % 4):
        if messages := [*cluster.requests, *cluster.replies]:
            cluster.lose(pick_from(messages, pick))


def repeat_request(cluster: Cluster, pick: int, _: int) -> None:
    """A request arrives, and will arrive once more, some time."""
    if cluster.requests:
        cluster.deliver_request(pick_from(cluster.requests, pick), keep=True)


def break_link(cluster: Cluster, pick: int, how: int) -> None:
    """A link breaks; the coordinator notices, or not, and may have had some reports already."""
    if linked := [each for each in cluster.running_servers if each.link is not None]:
        cluster.break_link(pick_from(linked, pick), noticed=how % 2 == 0, num_late_reports=how % 3)


def relink(cluster: Cluster, _: int, noticed: int) -> None:
    """Every broken link is made again, by a server that notices first or after the coordinator."""
    for server in [each for each in cluster.running_servers if each.link is None]:
        if noticed % 2 == 0:
            cluster.notice_break(server)
        cluster.relink(server)


def renew_link(cluster: Cluster, pick: int, how: int) -> None:
    """A link breaks and is made again at once."""
    break_link(cluster, pick, how)
    relink(cluster, pick, how)


def crash_trainer(cluster: Cluster, pick: int, ticks: int) -> None:
    """A trainer dies; time passes, perhaps until its lease has ended; another one joins."""
    if running := cluster.running_trainers:
        pick_from(running, pick).crash()
        let_time_pass(cluster, pick, ticks)
        cluster.join()


def cut_off_trainer(cluster: Cluster, pick: int, ticks: int) -> None:
    """A trainer cannot renew its lease, but goes on with everything else."""
    if running := cluster.running_trainers:
        pick_from(running, pick).renews = False
        let_time_pass(cluster, pick, ticks)
        cluster.join()


def let_time_pass(cluster: Cluster, _: int, ticks: int) -> None:
    """Time passes, up to twice a lease."""
    cluster.advance(ticks % (2 * LEASE_TICKS))


def pause_coordinator(cluster: Cluster, _: int, leases: int) -> None:
    """The coordinator sleeps for many leases."""
    cluster.pause(TRAINER_LEASE_S * (1 + leases % 8))


def crash_server(cluster: Cluster, pick: int, _: int) -> None:
    """A server dies; nobody knows yet."""
    if cluster.running_servers:
        cluster.crash_server(pick_from(cluster.running_servers, pick))


def silence_server(cluster: Cluster, pick: int, _: int) -> None:
    """A server is suspended for longer than its lease."""
    if cluster.running_servers:
        cluster.silence_server(pick_from(cluster.running_servers, pick))


def break_down(cluster: Cluster, pick: int, _: int) -> None:
    """A server runs out of memory the next time that it computes."""
    if cluster.running_servers:
        cluster.break_down(pick_from(cluster.running_servers, pick))


def change_description(cluster: Cluster, _: int, after_rounds: int) -> None:
    """Every trainer asks for another description of the model, in the same place."""
    cluster.change_description(1 + after_rounds % 3)


def crash_initialiser(cluster: Cluster, _: int, ticks: int) -> None:
    """If a model waits for values that several have, the trainer whose values count dies; another one joins."""
    reference = cluster.reference
    having = [each for each in cluster.running_trainers if each.trainer_id in reference.expected]
    if len(having) > 1 and not reference.ready:
        min(having, key=lambda each: reference.ranks[each.trainer_id]).crash()
        cluster.join()
        let_time_pass(cluster, 0, LEASE_TICKS + ticks % LEASE_TICKS)


def recover(cluster: Cluster, _: int, __: int) -> None:
    """Everything comes to rest."""
    cluster.heal()


Happening = Callable[[Cluster, int, int], None]

ALWAYS: tuple[Happening, ...] = (
    nothing,
    join,
    all_act,
    leave,
    lose_messages,
    repeat_request,
    break_link,
    relink,
    renew_link,
    crash_trainer,
    cut_off_trainer,
    let_time_pass,
    pause_coordinator,
    recover,
)
CHANGES: tuple[Happening, ...] = (*[change_description] * 3, *[crash_initialiser] * 3, all_act, let_time_pass)
SERVERS_LOST: tuple[Happening, ...] = (crash_server, silence_server, break_down, break_down, renew_link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What runs of one kind have in common.

    Args:
        prepare: what happens before the first fault.
        max_traffic: messages that follow, at most.
        happenings: what may happen.
        setup: what the cluster trains with.
    """

    prepare: Callable[[Cluster], None]
    max_traffic: int
    happenings: Sequence[Happening] = ALWAYS
    setup: Setup = field(default_factory=Setup)


def deliver_all_but_values(cluster: Cluster) -> None:
    """Shards are there, and one trainer is about to send initial values."""
    cluster.deliver_all(to_shards=False)


STAGES = {
    "nothing is there": Stage(prepare=lambda cluster: None, max_traffic=10),
    "initialising": Stage(prepare=deliver_all_but_values, max_traffic=6),
    "training": Stage(prepare=Cluster.heal, max_traffic=30),
    "servers lost early": Stage(prepare=deliver_all_but_values, max_traffic=15, happenings=ALWAYS + SERVERS_LOST),
    "servers lost late": Stage(prepare=Cluster.heal, max_traffic=15, happenings=ALWAYS + SERVERS_LOST),
}


CLIPPED = GradientRules(max_norm=8.0, clip_value=1.0, nonfinite="skip")
SETUPS = {
    "clipped": Setup(rules=CLIPPED),
    "clipped, buffers averaged": Setup(rules=GradientRules(max_norm=4.0), buffers="mean"),
    "backup worker": Setup(policy=Bsp(backup_workers=1), rules=GradientRules(clip_value=2.0)),
    "deadline": Setup(policy=Bsp(deadline=2.0)),
    "deadline that fails": Setup(policy=Bsp(deadline=2.0, absent="fail"), buffers="local"),
    "backup worker, clipped": Setup(policy=Bsp(backup_workers=1, deadline=5.0), rules=CLIPPED),
    "async": Setup(policy=Async(max_staleness=1)),
    "async, clipped": Setup(policy=Async(max_staleness=2), rules=CLIPPED, buffers="mean"),
    "ssp": Setup(policy=Ssp(max_lag=1)),
}
STAGES |= {
    f"training: {name}": Stage(prepare=Cluster.heal, max_traffic=30, setup=setup) for name, setup in SETUPS.items()
}
STAGES |= {
    "servers lost: clipped": Stage(
        prepare=Cluster.heal, max_traffic=15, happenings=ALWAYS + SERVERS_LOST, setup=SETUPS["clipped"]
    ),
    "changing": Stage(prepare=Cluster.heal, max_traffic=30, happenings=ALWAYS + CHANGES),
    "changing: backup worker, clipped": Stage(
        prepare=Cluster.heal,
        max_traffic=30,
        happenings=ALWAYS + CHANGES,
        setup=SETUPS["backup worker, clipped"],
    ),
    "changing: async": Stage(prepare=Cluster.heal, max_traffic=30, happenings=ALWAYS + CHANGES, setup=SETUPS["async"]),
}


#: One rule for all: Hypothesis leaves rules out of whole runs, and traffic alone, or faults alone, find little.
HAPPENING = st.runner().flatmap(lambda machine: st.sampled_from(machine.stage.happenings))


class Protocol(RuleBasedStateMachine):
    """What happens to a cluster. Traffic follows everything that does, or most runs would be faults alone."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    @initialize(num_servers=st.integers(2, 3), world_size=st.integers(1, 2), num_trainers=st.integers(1, 3))
    def start(self, num_servers: int, world_size: int, num_trainers: int) -> None:
        self.cluster = Cluster(self.stage.setup, num_servers=num_servers, world_size=world_size)
        for _ in range(num_trainers):
            self.cluster.join()
        self.stage.prepare(self.cluster)

    @rule(happening=HAPPENING, pick=PICK, how=PICK, traffic=TRAFFIC)
    def happens(self, happening: Happening, pick: int, how: int, traffic: tuple[int, int]) -> None:
        happening(self.cluster, pick, how)
        self._go_on(traffic)

    @invariant()
    def holds(self) -> None:
        self.cluster.check()

    def teardown(self) -> None:
        if sys.exception() is None:
            self.cluster.heal()
        else:  # something is broken already, and that is what must be reported
            note("\n".join(self.cluster.trace))

    def _go_on(self, traffic: tuple[int, int]) -> None:
        """Messages arrive in any order, trainers that are idle step, those that wait may repeat their call."""
        percent, seed = traffic
        order = random.Random(seed)
        cluster = self.cluster
        for _ in range(self.stage.max_traffic * percent // 100):
            events: list[Callable[[], object]] = [*cluster.events()]
            events += [partial(each.act, order.choice(ACTIONS)) for each in cluster.idle_trainers]
            events += [each.send for each in cluster.waiting_trainers if order.random() < IMPATIENCE]
            if events:
                order.choice(events)()


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
    _check(stage, max_examples=5, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", STAGES)
def test_protocol_holds_over_a_hostile_network_for_long(stage: str) -> None:
    _check(stage, max_examples=200, stateful_step_count=60)
