"""Sync policies: whose gradients make a round, what is refused and why, and that all of them learn."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.clock import ManualClock
from pserver.core.sync import SyncPolicy
from pserver.errors import DeadlineExceeded, InvalidRequest, LayoutMismatch, RoundFailed
from pserver.testing.local_cluster import LocalCluster
from pserver.types import StepResult
from tests.numerics.training import (
    RECIPES,
    WAYS,
    assert_same_bits,
    in_parallel,
    loss_of,
    make_batches,
    make_module,
    model_status,
    of_rank,
    remote_optimizer,
    step_on,
    train_locally,
    values,
)
from tests.waiting import set_timeout, until

SIZE = 300


class Trainer:
    """One parameter, trained by SGD with learning rate 1 and gradients that are whole numbers: sums are exact."""

    def __init__(self, session: Cluster, name: str, sync: SyncPolicy, **rules: Any) -> None:
        self.session, self.name = session, name
        self.value = torch.nn.Parameter(torch.zeros(SIZE))
        self.optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            [("value", self.value)],
            lr=1.0,
            name=name,
            sync=sync,
            cluster=session,
            bucket_bytes=128,
            **rules,
        )

    def step(self, gradient: float) -> StepResult:
        self.value.grad = torch.full((SIZE,), gradient)
        self.optimizer.step()
        assert self.optimizer.last_result is not None
        return self.optimizer.last_result

    @property
    def number(self) -> float:
        assert self.value.min() == self.value.max(), "torn"
        return self.value[0].item()


Join = Callable[..., list[Trainer]]


@pytest.fixture
def join(cluster: LocalCluster, name: str) -> Iterator[Join]:
    """Makes trainers of one model, with the ranks 0, 1, ...; they leave at the end."""
    with ExitStack() as stack:

        def joined(sync: SyncPolicy, trainers: int, *, within: LocalCluster = cluster) -> list[Trainer]:
            sessions = [stack.enter_context(within.connect(rank, trainers)) for rank in range(trainers)]
            return [Trainer(session, name, sync) for session in sessions]

        yield joined


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as running:
        yield running


def waits_for(trainer: Trainer, ranks: Sequence[int]) -> bool:
    return list(model_status(trainer.session, trainer.name).waiting_for_ranks) == list(ranks)


def begin(pool: ThreadPoolExecutor, trainer: Trainer, gradient: float, *, waits: Sequence[int]) -> Future[StepResult]:
    """Starts a step that cannot end, and returns once the round waits for exactly these ranks because of it."""
    before = model_status(trainer.session, trainer.name).round
    step = pool.submit(trainer.step, gradient)

    def held_up() -> bool:
        steps = {each.rank: each.step for each in trainer.session.status().trainers}
        return steps[trainer.session.rank] > trainer_steps and waits_for(trainer, waits)

    trainer_steps = trainer.optimizer._model._step - 1 if trainer.optimizer._model else 0
    until(held_up, f"the round waits for {waits}")
    assert not step.done()
    assert model_status(trainer.session, trainer.name).round == before
    return step


# Bulk synchronous


@pytest.mark.parametrize(
    "sync", [pserver.Bsp(), pserver.Bsp(deadline=600.0), pserver.Bsp(deadline=600.0, absent="fail")]
)
def test_every_gradient_of_a_round_is_computed_on_the_round_before(
    sync: SyncPolicy, cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8, 8, 8], steps=6)

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd-momentum"], name, sync=sync)
        bases, results = [], []
        for batch in of_rank(batches, session.rank):
            bases.append(values(module))
            step_on(module, optimizer, batch)
            results.append(optimizer.last_result)
        return bases, results, optimizer.statistics()

    runs = cluster.train(3, program)
    for bases, results, statistics in runs:
        assert_same_bits(bases, runs[0][0])
        assert [(each.round, each.num_trainers, each.staleness) for each in results] == [
            (number, 3, 0) for number in range(1, 7)
        ]
        assert (statistics.num_accepted, statistics.num_rejected, statistics.staleness) == (6, 0, {0: 6})
        assert statistics.num_mixed_pulls == 0


def test_a_gradient_that_comes_late_is_refused_with_a_reason_and_its_trainer_goes_on_with_fresh_parameters(
    join: Join,
) -> None:
    fast, slow = join(pserver.Bsp(backup_workers=1), 2)
    assert fast.step(1.0).num_trainers == 1
    assert fast.number == -1.0

    late = slow.step(100.0)

    assert (late.accepted, late.stepped, late.round, late.num_trainers, late.staleness) == (False, False, 1, 0, 1)
    assert "parameters of round 0" in late.reason
    assert "round 1 has been decided without it" in late.reason
    assert not late.error
    assert slow.number == -1.0, "it holds the parameters of the round that was decided"
    assert slow.optimizer.round == 1
    again = slow.step(2.0)
    assert (again.accepted, again.round, slow.number) == (True, 2, -3.0)
    assert slow.optimizer.statistics().num_rejected == 1
    status = model_status(slow.session, slow.name)
    assert (status.num_accepted, status.num_rejected, status.staleness) == (2, 1, {0: 2})


def test_with_backup_workers_a_round_closes_without_the_slowest_and_counts_who_is_in(join: Join) -> None:
    first, second, third = join(pserver.Bsp(backup_workers=1), 3)
    results = in_parallel(lambda: first.step(1.0), lambda: third.step(3.0))
    assert [each.num_trainers for each in results] == [2, 2]
    assert first.number == third.number == -2.0
    assert not second.step(50.0).accepted
    results = in_parallel(lambda: second.step(4.0), lambda: third.step(2.0))
    assert [each.round for each in results] == [2, 2]
    assert second.number == third.number == -5.0
    assert not first.step(50.0).accepted
    assert first.number == -5.0


def test_a_trainer_that_has_not_heard_of_the_last_round_holds_nobody_up(join: Join) -> None:
    """One backup worker of three; two are silent after the first round, and only one of them is behind."""
    first, second, third = join(pserver.Bsp(backup_workers=1), 3)
    in_parallel(lambda: first.step(1.0), lambda: second.step(1.0))
    in_parallel(lambda: first.step(1.0), lambda: second.step(1.0))
    assert first.number == -2.0
    assert not third.step(9.0).accepted
    assert third.number == -2.0


@pytest.fixture(scope="module")
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="module")
def clocked(clock: ManualClock) -> Iterator[LocalCluster]:
    """Two servers whose coordinator's clock moves only when told to."""
    with LocalCluster(2, timeout_s=15.0, trainer_lease_s=1e6, server_lease_s=1e6, clock=clock) as running:
        yield running


DEADLINE_S = 60.0


def pass_time(clock: ManualClock, step: Future[StepResult]) -> None:
    """Lets time pass until a step has ended."""

    def ended() -> bool:
        clock.advance(DEADLINE_S / 10)
        return step.done()

    until(ended, "the deadline ends the step")


def test_at_its_deadline_a_round_is_decided_with_those_who_are_there(
    clocked: LocalCluster, clock: ManualClock, join: Join, pool: ThreadPoolExecutor
) -> None:
    first, second, third = join(pserver.Bsp(deadline=DEADLINE_S), 3, within=clocked)
    step = begin(pool, first, 1.0, waits=[1, 2])
    clock.advance(DEADLINE_S / 2)
    other = begin(pool, third, 3.0, waits=[1])
    pass_time(clock, step)
    assert (step.result().num_trainers, other.result(10).num_trainers) == (2, 2)
    assert first.number == third.number == -2.0

    late = second.step(100.0)
    assert not late.accepted
    assert "without it" in late.reason
    results = in_parallel(*(lambda each=each: each.step(1.0) for each in (first, second, third)))
    assert [(each.round, each.num_trainers) for each in results] == [(2, 3)] * 3
    assert second.number == -3.0


def test_without_reaching_its_deadline_a_round_waits_for_all(
    clocked: LocalCluster, clock: ManualClock, join: Join, pool: ThreadPoolExecutor
) -> None:
    first, second = join(pserver.Bsp(deadline=DEADLINE_S), 2, within=clocked)
    step = begin(pool, first, 1.0, waits=[1])
    clock.advance(DEADLINE_S * 0.9)
    assert second.step(3.0).num_trainers == 2
    assert step.result(10).num_trainers == 2


def test_a_round_that_fails_at_its_deadline_names_the_absent_steps_nothing_and_training_goes_on(
    clocked: LocalCluster, clock: ManualClock, join: Join, pool: ThreadPoolExecutor
) -> None:
    first, second, third = join(pserver.Bsp(deadline=DEADLINE_S, absent="fail"), 3, within=clocked)
    steps = [begin(pool, first, 1.0, waits=[1, 2]), begin(pool, third, 1.0, waits=[1])]
    pass_time(clock, steps[0])
    for step in steps:
        with pytest.raises(RoundFailed, match=rf"round 1 failed: the ranks \[1\] .* {DEADLINE_S:g} s .*nothing was"):
            step.result(10)
    assert first.number == third.number == 0.0
    assert model_status(first.session, first.name).round == 0

    results = in_parallel(*(lambda each=each: each.step(2.0) for each in (first, second, third)))
    assert [(each.round, each.num_trainers, each.accepted) for each in results] == [(1, 3, True)] * 3
    assert first.number == second.number == -2.0


def test_a_trainer_that_leaves_ends_the_wait_for_it(join: Join, pool: ThreadPoolExecutor) -> None:
    first, second = join(pserver.Bsp(), 2)
    step = begin(pool, first, 1.0, waits=[1])
    second.session.close()
    assert step.result(10).num_trainers == 1


# Stale synchronous


@pytest.mark.parametrize("max_lag", [0, 2])
def test_nobody_gets_further_ahead_of_the_slowest_than_allowed(
    max_lag: int, join: Join, pool: ThreadPoolExecutor
) -> None:
    fast, slow = join(pserver.Ssp(max_lag=max_lag), 2)
    for number in range(max_lag + 1):
        assert fast.step(1.0).round == number + 1
    ahead = begin(pool, fast, 1.0, waits=[1])

    assert slow.step(1.0).staleness == max_lag + 1
    assert ahead.result(10).round == max_lag + 3

    ahead = begin(pool, fast, 1.0, waits=[1])
    slow.session.close()
    assert ahead.result(10).accepted
    assert fast.number == -(max_lag + 4.0)


def test_lag_is_counted_from_where_a_trainer_joined(cluster: LocalCluster, name: str, pool: ThreadPoolExecutor) -> None:
    """A newcomer neither waits for the past nor makes others wait for it."""
    sync = pserver.Ssp(max_lag=1)
    with cluster.connect(0, 1) as early, cluster.connect(1, 1) as late:
        first = Trainer(early, name, sync)
        for _ in range(5):
            first.step(1.0)
        second = Trainer(late, name, sync)
        assert second.number == -5.0
        second.step(1.0)
        second.step(1.0)
        ahead = begin(pool, second, 1.0, waits=[0])
        first.step(1.0)
        assert ahead.result(10).accepted
        assert second.number == -9.0


def test_stale_synchronous_trainers_wait_until_all_are_there(cluster: LocalCluster, name: str) -> None:
    with cluster.connect(0, 2) as session:
        trainer = Trainer(session, name, pserver.Ssp(max_lag=5))
        set_timeout(session, 0.3)
        with pytest.raises(DeadlineExceeded, match="1 trainers to attach"):
            trainer.step(1.0)


# Asynchronous


def test_without_synchronisation_every_gradient_is_a_round_and_staleness_is_told(join: Join) -> None:
    trainers = join(pserver.Async(), 3)
    found = []
    for turn in range(3):
        for trainer in trainers:
            result = trainer.step(1.0)
            assert (result.num_trainers, result.accepted, result.stepped) == (1, True, True)
            found.append((result.round, result.staleness))
        assert trainers[-1].number == -3.0 * (turn + 1)
    assert found == [(1, 0), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2), (8, 2), (9, 2)]
    assert [trainer.optimizer.statistics().staleness for trainer in trainers] == [{0: 1, 2: 2}, {1: 1, 2: 2}, {2: 3}]
    status = model_status(trainers[0].session, trainers[0].name)
    assert status.staleness == {0: 1, 1: 1, 2: 7}
    assert sum(status.staleness.values()) == status.num_accepted == 9


def test_a_gradient_that_is_too_old_is_refused_and_its_trainer_goes_on_with_fresh_parameters(join: Join) -> None:
    first, second = join(pserver.Async(max_staleness=1), 2)
    first.step(1.0)
    first.step(1.0)

    stale = second.step(100.0)

    assert (stale.accepted, stale.staleness, stale.round) == (False, 2, 2)
    assert stale.reason == "it is 2 rounds old; the limit is 1"
    assert second.number == -2.0
    assert second.step(1.0).accepted
    assert first.step(1.0).accepted, "one round old is not too old"
    assert first.number == -4.0
    statistics = second.optimizer.statistics()
    assert (statistics.num_accepted, statistics.num_rejected, statistics.staleness) == (1, 1, {0: 1})


def test_without_staleness_only_one_of_two_simultaneous_gradients_counts(join: Join) -> None:
    trainers = join(pserver.Async(max_staleness=0), 2)
    results = in_parallel(*(lambda each=each: each.step(1.0) for each in trainers))
    assert sorted(each.accepted for each in results) == [False, True]


def test_nobody_waits_for_a_trainer_that_is_not_there_yet(cluster: LocalCluster, name: str) -> None:
    with cluster.connect(0, 4) as session:
        trainer = Trainer(session, name, pserver.Async())
        for number in range(3):
            assert trainer.step(1.0).round == number + 1
        assert waits_for(trainer, [])


@pytest.mark.parametrize("sync", [pserver.Async(), pserver.Async(max_staleness=0), pserver.Ssp(max_lag=0)], ids=repr)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["sgd-momentum", "adamw-groups"])
def test_with_one_trainer_every_policy_gives_the_bits_of_torch(
    recipe: str, way: str, sync: SyncPolicy, cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8], steps=4), 0)
    _, expected = train_locally(make_module(), RECIPES[recipe], batches, {"fused": True})

    def program(session: Cluster) -> Any:
        return WAYS[way](session, make_module(), RECIPES[recipe], batches, {}, name=name, sync=sync)[1]

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


# All of them

POLICIES = [
    pserver.Bsp(),
    pserver.Bsp(backup_workers=1),
    pserver.Ssp(max_lag=0),
    pserver.Ssp(max_lag=3),
    pserver.Async(),
    pserver.Async(max_staleness=4),
]
STEPS = 25


@pytest.mark.parametrize("sync", POLICIES, ids=repr)
def test_every_policy_learns_and_accounts_for_every_gradient(
    sync: SyncPolicy, cluster: LocalCluster, name: str
) -> None:
    inputs = torch.cat([drawn for drawn, _ in make_batches([32, 32, 32], steps=1)[0]])
    batches = [(part, part[:, :4].sum(dim=1, keepdim=True)) for part in inputs.split(32)]

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, sync=sync)
        losses = [step_on(module, optimizer, batches[session.rank]) for _ in range(STEPS)]
        return losses[0], loss_of(module, batches[session.rank]).detach(), optimizer.statistics()

    runs = cluster.train(3, program)  # who is done leaves, and is waited for no more
    with cluster.connect() as observer:
        status = model_status(observer, name)

    for first, last, statistics in runs:
        assert last < 0.5 * first
        assert statistics.num_accepted + statistics.num_rejected == STEPS
        assert sum(statistics.staleness.values()) == statistics.num_accepted
    assert status.num_accepted == sum(each.num_accepted for _, _, each in runs)
    assert status.num_rejected == sum(each.num_rejected for _, _, each in runs)
    assert sum(status.staleness.values()) == status.num_accepted
    limit = getattr(sync, "max_staleness", None)
    assert limit is None or max(status.staleness) <= limit
    if isinstance(sync, pserver.Bsp):
        assert set(status.staleness) == {0}
    else:
        assert status.round == status.num_accepted


@pytest.mark.parametrize("rules", [{}, {"max_norm": 1e9, "nonfinite": "skip"}], ids=["plain", "looked at first"])
@pytest.mark.parametrize("sync", POLICIES, ids=repr)
def test_all_servers_end_at_the_same_round_with_every_counted_gradient_applied_once(
    sync: SyncPolicy, rules: dict[str, Any], cluster: LocalCluster, name: str
) -> None:
    """Gradients are powers of two, so that the sum says which of them are in it."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(cluster.connect(rank, 2)) for rank in range(2)]
        trainers = [Trainer(session, name, sync, **rules) for session in sessions]

        def program(trainer: Trainer) -> float:
            counted = 0.0
            for number in range(5):
                gradient = 2.0 ** (5 * trainer.session.rank + number)
                result = trainer.step(gradient)
                counted += gradient / max(1, result.num_trainers) if result.accepted else 0.0
            return counted

        counted = sum(in_parallel(*(lambda each=each: program(each) for each in trainers)))
        status = model_status(sessions[0], name)
        until(
            lambda: {shard.round for shard in model_status(sessions[0], name).shards} == {status.round},
            "every shard is at the last round",
        )
        assert {shard.version for shard in model_status(sessions[0], name).shards} == {status.round}
        sessions[1].close()
        newcomer = stack.enter_context(cluster.connect(1, 2))
        assert Trainer(newcomer, name, sync).number == -counted


def test_nobody_skips_where_nobody_waits(join: Join) -> None:
    """Each empty round would make the others' gradients older."""
    (alone,) = join(pserver.Async(), 1)
    with pytest.raises(InvalidRequest, match="nobody waits for this trainer"):
        alone.optimizer.skip()
    assert alone.step(2.0).round == 1


@pytest.mark.parametrize("sync", [pserver.Bsp(), pserver.Ssp(max_lag=1)], ids=repr)
def test_a_trainer_that_skips_is_in_the_round_and_counts_as_no_gradient(sync: SyncPolicy, join: Join) -> None:
    trains, skips = join(sync, 2)
    results = in_parallel(lambda: trains.step(2.0), lambda: skips.optimizer.skip() or skips.optimizer.last_result)
    assert all(each.accepted for each in results)
    assert [each.optimizer.statistics().num_accepted for each in (trains, skips)] == [1, 0]
    assert model_status(trains.session, trains.name).num_accepted == 1
    in_parallel(lambda: trains.step(2.0), lambda: skips.optimizer.skip())
    until(lambda: model_status(trains.session, trains.name).num_accepted == 2, "both gradients have counted")
    assert trains.number == -4.0


@pytest.mark.parametrize(
    ("sync", "shown"),
    [
        (pserver.Bsp(), "Bsp()"),
        (pserver.Bsp(backup_workers=1, deadline=2.5), "Bsp(backup_workers=1, deadline=2.5)"),
        (pserver.Ssp(max_lag=3), "Ssp(max_lag=3)"),
        (pserver.Async(max_staleness=0), "Async(max_staleness=0)"),
    ],
    ids=repr,
)
def test_the_status_shows_the_policy_with_its_arguments(
    sync: SyncPolicy, shown: str, cluster: LocalCluster, name: str
) -> None:
    with cluster.connect(0, 1) as session:
        Trainer(session, name, sync)
        assert model_status(session, name).sync_policy == shown


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (pserver.Async(), "sync_policy: expected bsp, got async"),
        (pserver.Bsp(backup_workers=1), r"sync_policy_arguments: expected .*'backup_workers': 0.*'backup_workers': 1"),
    ],
    ids=repr,
)
def test_policies_that_differ_between_trainers_are_refused(
    theirs: SyncPolicy, difference: str, cluster: LocalCluster, name: str
) -> None:
    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        Trainer(one, name, pserver.Bsp())
        with pytest.raises(LayoutMismatch, match=difference):
            Trainer(other, name, theirs)
