"""Schedulers of torch on a remote optimizer: the same bits, and the same schedule for all trainers."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import pserver
from pserver.client.cluster import Cluster
from pserver.core.sync import SyncPolicy
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    RECIPES,
    Batch,
    Recipe,
    assert_same_bits,
    in_parallel,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    remote_optimizer,
    step_on,
    train_on_averages,
    values,
)

STEPS = 9

#: A scheduler of torch for an optimizer, by name.
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, step_size=2, gamma=0.3),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, T_max=5),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=True),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=1, threshold=0.5
    ),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.8**epoch),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [
            schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=3),
            schedulers.ExponentialLR(optimizer, gamma=0.7),
        ],
        milestones=[3],
    ),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, total_iters=4), schedulers.StepLR(optimizer, step_size=3)]
    ),
}

#: Options that schedulers change.
SCHEDULED = ("lr", "momentum", "betas")


def train(module: torch.nn.Module, optimizer: Any, schedule: str, batches: Sequence[Batch]) -> list[list[torch.Tensor]]:
    """Parameters and scheduled options after every step."""
    scheduler = SCHEDULES[schedule](optimizer)
    trajectory = []
    for batch in batches:
        loss = step_on(module, optimizer, batch)
        scheduler.step(loss) if schedule == "ReduceLROnPlateau" else scheduler.step()
        options = [torch.tensor(group[key]) for group in optimizer.param_groups for key in SCHEDULED if key in group]
        trajectory.append([*values(module), *options])
    return trajectory


@pytest.mark.parametrize("recipe", ["sgd-momentum", "adam", "adamw-groups"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scheduled_run_has_the_bits_of_torch(schedule: str, recipe: str, cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8], steps=STEPS), 0)
    module = make_module()
    expected = train(module, RECIPES[recipe].make(module, {"fused": True}), schedule, batches)
    assert len({step[-2].item() for step in expected}) > 1, "the schedule must change the last group's learning rate"

    def program(session: Cluster) -> Any:
        replica = make_module()
        return train(replica, remote_optimizer(session, replica, RECIPES[recipe], name), schedule, batches)

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("schedule", ["OneCycleLR", "SequentialLR"])
def test_a_schedule_saved_and_loaded_with_its_optimizer_goes_on_as_in_torch(
    schedule: str, cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8], steps=STEPS), 0)

    def loop(make: Callable[[torch.nn.Module, str], Any]) -> list[list[torch.Tensor]]:
        module = make_module()
        optimizer = make(module, "first")
        scheduler = SCHEDULES[schedule](optimizer)
        for batch in batches[:4]:
            step_on(module, optimizer, batch)
            scheduler.step()
        saved = module.state_dict(), optimizer.state_dict(), scheduler.state_dict()

        again = make_module(seed=5)
        optimizer = make(again, "second")
        scheduler = SCHEDULES[schedule](optimizer)
        for part, state in zip((again, optimizer, scheduler), saved, strict=True):
            part.load_state_dict(state)
        trajectory = []
        for batch in batches[4:]:
            step_on(again, optimizer, batch)
            scheduler.step()
            trajectory.append(values(again))
        return trajectory

    expected = loop(lambda module, _: RECIPES["sgd-momentum"].make(module, {"fused": True}))

    def program(session: Cluster) -> Any:
        return loop(lambda module, part: remote_optimizer(session, module, RECIPES["sgd-momentum"], f"{name}-{part}"))

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_if_schedules_differ_the_lowest_rank_counts_and_the_others_say_so_once(
    cluster: LocalCluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps = 4
    batches = make_batches([8, 8, 8], steps=steps)
    module = make_module()
    expected = averaged(module, RECIPES["sgd-momentum"], batches, lambda epoch: 0.5**epoch)

    def program(session: Cluster) -> Any:
        replica = make_module()
        optimizer = remote_optimizer(session, replica, RECIPES["sgd-momentum"], name)
        factor = 0.5 if session.rank == 0 else 0.9
        scheduler = schedulers.LambdaLR(optimizer, lambda epoch: factor**epoch)
        found, used = [], []
        for batch in of_rank(batches, session.rank):
            step_on(replica, optimizer, batch)
            scheduler.step()
            found.append(values(replica))
            used.append(optimizer.last_result.options[0]["lr"])
        return found, used

    with caplog.at_level(logging.WARNING, logger="pserver.client.model"):
        runs = cluster.train(3, program)

    for found, used in runs:
        assert_same_bits(found, expected)
        assert used == [0.1 * 0.5**epoch for epoch in range(steps)]
    said = [each.getMessage() for each in caplog.records if "this trainer asked for" in each.getMessage()]
    assert len(said) == 2
    assert all(name in each and "round 2" in each for each in said)


def averaged(
    module: torch.nn.Module, recipe: Recipe, batches: Sequence[Sequence[Batch]], factor: Callable[[int], float]
) -> list[list[torch.Tensor]]:
    """Torch with the trainers' mean gradient and a LambdaLR that is stepped once a round."""
    optimizer = recipe.make(module, {"fused": True})
    scheduler = schedulers.LambdaLR(optimizer, factor)
    trajectory = []
    for ranks in batches:
        parameters = list(module.parameters())
        gradients = [torch.autograd.grad(loss_of(module, batch), parameters) for batch in ranks]
        for parameter, *own in zip(parameters, *gradients, strict=True):
            total = own[0].clone()
            for gradient in own[1:]:
                total += gradient
            parameter.grad = total / len(own)
        optimizer.step()
        scheduler.step()
        trajectory.append(values(module))
    return trajectory


# Schedules count rounds


class Follower:
    """A trainer whose schedule follows the model's rounds, as `RemoteOptimizer.round` says to."""

    def __init__(self, session: Cluster, name: str, sync: SyncPolicy | None = None, seed: int = 0) -> None:
        self.module = make_module(seed)
        self.optimizer = remote_optimizer(session, self.module, RECIPES["sgd-momentum"], name, sync=sync)
        self.scheduler = schedulers.LambdaLR(self.optimizer, lambda epoch: 0.5**epoch)

    def step(self, batch: Batch) -> float:
        """One step; returns the learning rate that the round used."""
        while self.scheduler.last_epoch < self.optimizer.round:
            self.scheduler.step()
        step_on(self.module, self.optimizer, batch)
        assert self.optimizer.last_result is not None
        used: float = self.optimizer.last_result.options[0]["lr"]
        return used


def rate(round_number: int) -> float:
    """The learning rate after that many rounds."""
    return 0.1 * 0.5**round_number


@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_trainer_that_joins_late_follows_the_schedule_of_those_who_were_there(
    late_rank: int, cluster: LocalCluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    batches = make_batches([8, 8], steps=6)
    with cluster.connect(1 - late_rank, 1) as early, cluster.connect(late_rank, 1) as late:
        first = Follower(early, name)
        for number in range(3):
            assert first.step(batches[number][0]) == rate(number)
        second = Follower(late, name, seed=9)
        assert second.optimizer.round == 3
        assert_same_bits([values(second.module)], [values(first.module)])
        for number in range(3, 6):
            used = in_parallel(
                lambda number=number: first.step(batches[number][0]),
                lambda number=number: second.step(batches[number][1]),
            )
            assert used == [rate(number)] * 2
        assert_same_bits([values(second.module)], [values(first.module)])
    assert "this trainer asked for" not in caplog.text


def test_a_trainer_whose_gradients_are_refused_does_not_fall_behind_in_its_schedule(
    cluster: LocalCluster, name: str
) -> None:
    """The round closes without the slower of two; local steps would count 2 where rounds count 4."""
    sync = pserver.Bsp(backup_workers=1)
    batch = make_batches([8], steps=1)[0][0]
    with cluster.connect(0, 2) as fast, cluster.connect(1, 2) as slow:
        first, second = Follower(fast, name, sync), Follower(slow, name, sync)
        for number in range(0, 4, 2):
            assert first.step(batch) == rate(number)
            second.step(batch)
            assert not second.optimizer.last_result.accepted
            assert first.step(batch) == rate(number + 1)
            second.step(batch)
        while second.scheduler.last_epoch < second.optimizer.round:
            second.scheduler.step()
        assert second.optimizer.round == 4
        assert second.optimizer.param_groups[0]["lr"] == rate(4)


def test_without_synchronisation_the_schedule_counts_rounds_of_all_trainers(cluster: LocalCluster, name: str) -> None:
    """The lowest rank's options count: those of its last step, which is as many rounds ago as there are others."""
    batch = make_batches([8], steps=1)[0][0]
    sync = pserver.Async()
    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        first, second = Follower(one, name, sync), Follower(other, name, sync)
        used = [trainer.step(batch) for _ in range(3) for trainer in (first, second)]
        # Rank 0 holds the parameters of the rounds 0, 1 and 3 when it steps.
        assert used == [rate(0), rate(0), rate(1), rate(1), rate(3), rate(3)]
        assert (first.optimizer.round, second.optimizer.round) == (5, 6)


def test_with_one_schedule_for_all_several_trainers_equal_torch_that_steps_it_once_a_round(
    cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8, 8], steps=5)
    expected = averaged(make_module(), RECIPES["sgd-momentum"], batches, lambda epoch: 0.5**epoch)
    constant = train_on_averages(make_module(), RECIPES["sgd-momentum"], batches, {"fused": True})
    assert not torch.equal(expected[-1][0], constant[-1][0])

    def program(session: Cluster) -> Any:
        trainer = Follower(session, name)
        found = []
        for batch in of_rank(batches, session.rank):
            trainer.step(batch)
            found.append(values(trainer.module))
        return found

    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        runs = in_parallel(lambda: program(one), lambda: program(other))
    assert_same_bits(runs[0], runs[1])
    assert_same_bits(runs[0], expected)
