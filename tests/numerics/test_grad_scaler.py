"""torch.amp.GradScaler: as in torch with one trainer, and one decision for all with several."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    RECIPES,
    Batch,
    assert_same_bits,
    fill_,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    remote_optimizer,
    train_on_averages,
    values,
)

pytestmark = pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")

STEPS = 9
#: Backward passes overflow float32 while the scale is 2**122 or more; the gradient itself is that of the plain loss.
GAIN = 64.0
INITIAL_SCALE = 2.0**123


def make_scaler(initial: float = INITIAL_SCALE, **more: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=initial, **{"growth_interval": 2, **more})


def train(
    module: torch.nn.Module,
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    batches: Sequence[Batch],
    *,
    unscale: bool = False,
) -> Any:
    """Parameters and buffers after every step, and the scale used in it."""
    trajectory, scales = [], []
    for batch in batches:
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        scaler.scale(loss_of(module, batch) / GAIN * GAIN).backward()
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        trajectory.append(values(module))
    return trajectory, scales


def local(module: torch.nn.Module, recipe: str) -> torch.optim.Optimizer:
    """Torch's optimizer, skipped by the scaler itself.

    Its fused SGD leaves the momentum of a first step that overflows uninitialised.
    """
    optimizer = RECIPES[recipe].make(module, {"fused": True})
    optimizer._step_supports_amp_scaling = False
    return optimizer


def stepped(trajectory: Sequence[Sequence[torch.Tensor]]) -> list[bool]:
    """Whether each step but the first changed anything."""
    return [not torch.equal(now[0], before[0]) for before, now in pairwise(trajectory)]


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ and clip first"])
@pytest.mark.parametrize("recipe", ["sgd-momentum", "adam"])
def test_one_trainer_gets_the_bits_of_torch_while_the_scale_backs_off_and_grows(
    recipe: str, unscale: bool, cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8], steps=STEPS), 0)
    module = make_module()
    expected, scales = train(module, local(module, recipe), make_scaler(), batches, unscale=unscale)
    assert {*stepped(expected)} == {False, True}, "some steps must be skipped, others not"
    assert any(after > before for before, after in pairwise(scales))

    def program(session: Cluster) -> Any:
        replica = make_module()
        optimizer = remote_optimizer(session, replica, RECIPES[recipe], name)
        return train(replica, optimizer, make_scaler(), batches, unscale=unscale), optimizer.statistics()

    (((found, found_scales), statistics),) = cluster.train(1, program)
    assert_same_bits(found, expected)
    assert found_scales == scales
    assert statistics.num_accepted == STEPS
    assert statistics.num_skipped >= 1


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_overflow_on_one_trainer_skips_the_round_on_all_and_all_scales_back_off(
    culprit: int, cluster: LocalCluster, name: str
) -> None:
    """Only the culprit sees an infinity, in the third of five rounds."""
    batches = make_batches([8, 8, 8], steps=5)
    clean = [step for number, step in enumerate(batches) if number != 2]
    expected = train_on_averages(make_module(), RECIPES["adam"], clean, {"fused": True})
    expected.insert(2, expected[1])

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["adam"], name)
        scaler = make_scaler(2.0**10)
        trajectory, scales, results = [], [], []
        for number, batch in enumerate(of_rank(batches, session.rank)):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, batch)).backward()
            if (number, session.rank) == (2, culprit):
                next(module.parameters()).grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            trajectory.append(values(module))
            scales.append(scaler.get_scale())
            results.append(optimizer.last_result)
        return trajectory, scales, results

    for found, scales, results in cluster.train(3, program):
        assert_same_bits(found, expected)
        assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
        assert [result.overflow for result in results] == [False, False, True, False, False]
        assert [result.stepped for result in results] == [True, True, False, True, True]
        assert [result.round for result in results] == [1, 2, 3, 4, 5]
        assert f"ranks [{culprit}]" in results[2].reason
        assert all(result.accepted and not result.error for result in results)


def test_scales_that_differ_between_trainers_do_not_distort_the_mean(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 8], steps=3)
    expected = train_on_averages(make_module(), RECIPES["sgd-momentum"], batches, {"fused": True})

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd-momentum"], name)
        scaler = make_scaler(2.0 ** (4 + 5 * session.rank))
        return train(module, optimizer, scaler, of_rank(batches, session.rank))[0]

    for found in cluster.train(2, program):
        assert_same_bits(found, expected)


def test_a_disabled_scaler_changes_nothing(cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8]), 0)
    module = make_module()
    expected, _ = train(module, local(module, "adam"), make_scaler(enabled=False), batches)

    def program(session: Cluster) -> Any:
        replica = make_module()
        optimizer = remote_optimizer(session, replica, RECIPES["adam"], name)
        found, scales = train(replica, optimizer, make_scaler(enabled=False), batches)
        assert scales == [1.0] * len(batches)
        assert not optimizer.last_result.overflow
        return found

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_a_second_step_before_the_update_is_an_error_as_in_torch(cluster: LocalCluster, name: str) -> None:
    batch = make_batches([8], steps=1)[0][0]

    def program(session: Cluster) -> None:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        scaler = make_scaler(8.0)
        scaler.scale(loss_of(module, batch)).backward()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called since the last update"):
            scaler.step(optimizer)

    cluster.train(1, program)


class Normed(torch.nn.Module):
    """Batch normalisation between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(13, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 1)
        fill_(self, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)))


@pytest.mark.parametrize("buffers", ["lowest", "mean", "local"])
def test_running_statistics_of_a_skipped_round_count_as_in_torch(
    buffers: str, cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8], steps=STEPS), 0)
    module = Normed()
    expected, _ = train(module, local(module, "sgd-momentum"), make_scaler(), batches)
    assert not stepped(expected)[0]
    assert not torch.equal(expected[0][-3], expected[1][-3]), "running means must move in a skipped step"

    def program(session: Cluster) -> Any:
        replica = Normed()
        optimizer = remote_optimizer(session, replica, RECIPES["sgd-momentum"], name, buffers=buffers)
        return train(replica, optimizer, make_scaler(), batches)[0]

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_a_scheduler_on_top_does_not_hide_the_scaler(cluster: LocalCluster, name: str) -> None:
    """Torch's schedulers wrap `optimizer.step`."""
    batches = of_rank(make_batches([8], steps=STEPS), 0)

    def loop(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        return train(module, optimizer, make_scaler(), batches)

    module = make_module()
    expected = loop(module, local(module, "adam"))

    def program(session: Cluster) -> Any:
        replica = make_module()
        return loop(replica, remote_optimizer(session, replica, RECIPES["adam"], name))

    ((found, scales),) = cluster.train(1, program)
    assert_same_bits(found, expected[0])
    assert scales == expected[1]


def test_an_overflow_in_a_gradient_that_is_refused_backs_the_scale_off_all_the_same(
    cluster: LocalCluster, name: str
) -> None:
    """The round was decided without it; what was found here is all that this trainer's scaler can go by."""
    batch = make_batches([8], steps=1)[0][0]
    sync = pserver.Bsp(backup_workers=1)
    with cluster.connect(0, 2) as fast, cluster.connect(1, 2) as slow:
        modules = [make_module(), make_module()]
        first, second = (
            remote_optimizer(session, module, RECIPES["sgd"], name, sync=sync)
            for session, module in zip((fast, slow), modules, strict=True)
        )
        train(modules[0], first, make_scaler(2.0), [batch])
        scaler = make_scaler()
        train(modules[1], second, scaler, [batch])
        assert not second.last_result.accepted
        assert scaler.get_scale() == INITIAL_SCALE / 2
