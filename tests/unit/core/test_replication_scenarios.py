"""The moments in which a primary, the coordinator or both may die, one by one."""

import logging
import random
from collections.abc import Callable

import pytest
from replication_model import MODEL, Copy, Server, Setup, Trainer, World, contexts_of, push

from pserver.core.changes import BucketHeld, GradientsPushed, RoundApplied, RoundPrepared, StepRefused
from pserver.core.messages import AbandonPlan, Apply, FenceReplica, Prepare, Prepared, Promote, ReplicaCaughtUp
from pserver.core.sync import Async
from pserver.types import StepResult

ORDER = random.Random(0)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Servers are lost here, and that is logged."""
    caplog.set_level(logging.CRITICAL, logger="pserver")


def holding(*kinds: type, server: str = "") -> Callable[[str, object], bool]:
    """Messages of these kinds do not arrive, or not there, nor what comes after them."""
    return lambda name, message: isinstance(message, kinds) and server in ("", name)


def all_step(world: World) -> None:
    """Every trainer commits a step."""
    for trainer in world.trainers:
        trainer.begin(commit=True)


def primary_of(world: World, shard: int) -> tuple[Server, Copy]:
    server = world.servers[world.shards()[shard].server]
    return server, server.copies[shard]


def loses(world: World, name: str, whom: str) -> None:
    """The coordinator, a server or both die; the server is started again."""
    if whom != "server":
        world.change_leader()
    if whom != "coordinator":
        world.crash(name, ORDER)
        world.restart(name)


def take_steps(world: World, trainer: Trainer, num: int) -> None:
    for _ in range(num):
        trainer.begin(commit=True)
        world.run()
        assert trainer.call is None


WHOM = pytest.mark.parametrize("whom", ["server", "coordinator", "both"])
SETUP = pytest.mark.parametrize(
    "setup", [Setup(), Setup(max_norm=5.0), Setup(replicas=2, num_servers=4)], ids=["1", "1-norm", "2"]
)
#: What does not arrive when they die: nothing of the plan is reported, decided or applied; or one shard has applied.
MOMENTS = {
    "before-prepare": holding(Prepare),
    "before-replication": holding(RoundPrepared),
    "before-prepared": holding(Prepared),
    "before-apply": holding(Apply),
    "before-it-applies": holding(Apply, server="s0"),
    "after-only-it-applied": lambda name, message: isinstance(message, Apply) and name != "s0",
    "before-applied-is-replicated": holding(RoundApplied),
}


@SETUP
@WHOM
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_step_counts_once_whoever_dies_and_when(setup: Setup, whom: str, moment: str) -> None:
    world = World(setup)
    all_step(world)
    world.run()
    all_step(world)
    world.holds = MOMENTS[moment]
    world.run()
    loses(world, "s0", whom)
    world.holds = holding()
    world.heal()
    assert [each.num_told for each in world.trainers] == [2, 2]
    assert len(world.reference.decisions) == 2


def test_apply_of_an_older_leader_changes_nothing() -> None:
    world = World(Setup())
    all_step(world)
    world.holds = holding(Apply)
    world.run()
    late = {
        name: next(each for each in link.down if isinstance(each, Apply)) for name, link in world.host.links.items()
    }
    loses(world, "s0", "both")
    world.holds = holding()
    world.heal()
    for name, apply in late.items():
        world.servers[name].handle(apply)
    world.run()
    world.check_at_rest()
    assert len(world.reference.decisions) == 1


def test_repeated_push_is_told_the_recorded_outcome_by_a_promoted_replica() -> None:
    world = World(Setup())
    all_step(world)
    world.run()
    (call,) = {id(call): call for *_, call in world.trainers[0].sent}.values()
    _, copy = primary_of(world, 0)
    recorded = copy.shard.outcome(call.push_id)
    loses(world, "s0", "server")
    world.run()
    server, copy = primary_of(world, 0)
    assert server.name != "s0"
    push(server, copy, call)
    world.run()
    assert copy.shard.outcome(call.push_id) == recorded
    world.heal()
    assert len(world.reference.decisions) == 1


@pytest.mark.parametrize("replicated", [True, False])
@WHOM
def test_refused_step_is_refused_again_after_a_failover(whom: str, replicated: bool) -> None:
    world = World(Setup(policy=Async(max_staleness=0)))
    quick, slow = world.trainers
    take_steps(world, quick, 2)
    slow.begin(commit=True)
    world.holds = (lambda name, message: False) if replicated else holding(StepRefused)
    world.run()
    assert (slow.call is None) == replicated
    call = slow.sent[0][-1]
    loses(world, "s0", whom)
    world.holds = holding()
    world.run()
    world.heal()
    assert slow.call is None
    assert slow.num_told == 1
    server, copy = primary_of(world, 0)
    push(server, copy, call)
    world.run()
    outcome = copy.shard.outcome(call.push_id)
    assert isinstance(outcome, StepResult)
    assert not outcome.accepted
    assert len(world.reference.decisions) == 2


def test_primary_that_was_stopped_begins_anew_when_it_comes_back() -> None:
    world = World(Setup())
    trainer = world.trainers[0]
    trainer.begin(commit=False)
    world.holds = holding(GradientsPushed)
    world.run()
    assert trainer.call is not None  # the replicas lack what it pushed
    stopped, copy = primary_of(world, 0)
    world.cut_off(stopped.name)
    world.run()  # what it has sent arrives at a replica that takes nothing from it any more
    world.holds = holding()
    world.run()
    assert trainer.call is None
    server, promoted = primary_of(world, 0)
    assert server is not stopped
    assert contexts_of(promoted.shard)
    stopped.cut_off = False
    world.run()
    assert stopped.copies.get(0) is not copy
    all_step(world)
    world.heal()
    assert len(world.reference.decisions) == 1


@pytest.mark.parametrize("committed", [False, True])
def test_acknowledged_push_reaches_a_replica_that_is_made_later(committed: bool) -> None:
    world = World(Setup())
    trainer = world.trainers[0]
    trainer.begin(commit=False)
    world.run()
    if committed:  # and waits for the other trainer
        trainer.begin(commit=True)
        world.run()
    (replica,) = world.shards()[0].replicas
    for name in (replica.server, "s0"):
        loses(world, name, "server")
        world.run()
    assert world.shards()[0].server != "s0"
    if not committed:
        trainer.begin(commit=True)
    world.trainers[1].begin(commit=True)
    world.heal()
    assert len(world.reference.decisions) == 1


def test_replica_that_counts_has_what_was_shown_before_it_did() -> None:
    world = World(Setup())
    trainer = world.trainers[0]
    (replica,) = world.shards()[0].replicas
    loses(world, replica.server, "server")
    world.holds = holding(BucketHeld)
    world.run()
    trainer.begin(commit=False)  # while nobody counts
    world.run()
    assert trainer.call is None
    world.holds = holding(GradientsPushed)
    world.run()
    assert not world.may_lose("s0")
    world.holds = holding()
    world.run()
    assert world.may_lose("s0")
    loses(world, "s0", "server")
    world.run()
    assert contexts_of(primary_of(world, 0)[1].shard)
    world.heal()


@pytest.mark.parametrize("whom", ["link", "coordinator"])
def test_coordinator_that_missed_that_a_replica_has_caught_up_hears_it_again(whom: str) -> None:
    world = World(Setup())
    (replica,) = world.shards()[0].replicas
    loses(world, replica.server, "server")
    world.holds = holding(ReplicaCaughtUp)
    world.run()
    if whom == "link":
        world.break_link("s0")
    else:
        world.change_leader()
    world.holds = holding()
    world.run()
    assert [each.state for each in world.shards()[0].replicas] == ["in sync"]
    world.heal()


def test_model_fails_by_name_when_primary_and_replica_are_lost() -> None:
    world = World(Setup())
    (replica,) = world.shards()[0].replicas
    world.crash("s0", ORDER)
    world.restart("s0")
    world.holds = lambda name, message: name == replica.server
    world.run()
    world.crash(replica.server, ORDER)
    world.restart(replica.server)
    world.holds = holding()
    named = r"server s1 at s1 was lost: it was restarted; that was the last copy of shard 0"
    with pytest.raises(AssertionError, match=named):
        world.run()


def test_replica_that_says_twice_that_it_is_fenced_is_elected_once() -> None:
    world = World(Setup())
    (replica,) = world.shards()[0].replicas
    world.crash("s0", ORDER)
    world.restart("s0")
    world.holds = holding(Promote)
    world.run()
    server = world.servers[replica.server]
    server.handle(FenceReplica(model=MODEL, shard=0, epoch=world.shards()[0].epoch))
    world.run()
    world.holds = holding()
    world.heal()


def test_elected_replica_that_links_anew_is_the_primary_only_once_it_is_promoted() -> None:
    world = World(Setup())
    (replica,) = world.shards()[0].replicas
    all_step(world)
    world.holds = holding(Apply)
    world.run()
    world.crash("s0", ORDER)
    world.restart("s0")
    world.holds = holding(Promote, server=replica.server)
    world.run()
    world.break_link(replica.server)
    world.run()
    world.holds = holding()
    world.heal()
    assert len(world.reference.decisions) == 1


def test_shard_that_missed_that_its_plan_was_given_up_hears_it_again() -> None:
    world = World(Setup())
    all_step(world)
    world.holds = holding(RoundPrepared, server=world.shards()[0].replicas[0].server)
    world.run()
    other = next(each for each in world.servers if each not in ("s0", world.shards()[0].replicas[0].server))
    loses(world, "s0", "server")  # and with it the gradients that its plan was made of
    world.holds = holding(AbandonPlan)
    world.run()
    world.break_link(other)
    world.holds = holding()
    world.heal()
    assert len(world.reference.decisions) == 1


def test_plan_that_an_earlier_leader_gave_up_is_not_taken_for_a_later_one() -> None:
    world = World(Setup(policy=Async()))
    first, second = world.trainers
    first.begin(commit=True)
    world.holds = holding(Prepare, server="s2")
    world.run()  # the other shards have prepared a round, and so have their replicas
    world.trainers.remove(first)  # is slow to repeat its call
    loses(world, "s2", "both")
    world.holds = holding()
    world.run()  # shard 2 lacks the gradient: all abandon the plan
    world.change_leader()
    world.run()
    world.holds = holding(RoundPrepared, server="s1")
    second.begin(commit=True)
    world.run()
    assert world.shards()[0].server == "s0"
    loses(world, "s0", "server")
    world.holds = holding()
    world.run()
    world.trainers.insert(0, first)
    world.heal()
    assert len(world.reference.decisions) == 2


def test_command_that_waited_for_an_earlier_link_is_not_sent_on_a_later_one() -> None:
    world = World(Setup())
    world.break_link("s0")
    world.servers["s0"].relink()  # it is told that it has shard 0, once what has changed is kept
    world.cut_off("s0")
    world.servers["s0"].cut_off = False
    world.servers["s0"].relink()  # learns that its lease has ended
    world.servers["s0"].relink()
    world.heal()
    assert 0 not in world.servers["s0"].copies or world.servers["s0"].copies[0].is_replica


def test_server_that_begins_anew_takes_no_living_trainer_for_one_that_has_ended() -> None:
    world = World(Setup())
    world.cut_off("s0")
    world.servers["s0"].cut_off = False
    world.servers["s0"].relink()
    server = world.servers["s0"]
    assert not server.copies
    assert all(each.trainer_id > server.highest_id for each in world.trainers)
    world.heal()
