"""What a training loop does around a step: closures, changed options, edited gradients, several models."""

from collections.abc import Callable
from typing import Any

import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    BUCKET_BYTES,
    RECIPES,
    Recipe,
    assert_same_bits,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    train_on_averages,
    values,
)

Loop = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


def remote(session: Cluster, module: torch.nn.Module, recipe: Recipe, name: str) -> Any:
    return pserver.optim.RemoteOptimizer(
        recipe.optimizer, module, name=name, cluster=session, bucket_bytes=BUCKET_BYTES, **recipe.options
    )


def compare(cluster: LocalCluster, name: str, recipe: str, loop: Loop) -> None:
    """Runs a loop with torch's fused optimizer and with the servers' and compares all that it returns."""
    module = make_module()
    expected = loop(module, RECIPES[recipe].make(module, {"fused": True}))

    def program(session: Cluster) -> Any:
        replica = make_module()
        return loop(replica, remote(session, replica, RECIPES[recipe], name))

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_options_changed_between_steps_hold_from_the_next_step_on(cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8]), 0)

    def loop(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
        trajectory = []
        for number, batch in enumerate(batches):
            (group,) = optimizer.param_groups
            group["lr"], group["betas"], group["weight_decay"] = 0.1 / (1 + number), (0.5, 0.9 + number / 100), number
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
            trajectory.append(values(module))
        return trajectory

    compare(cluster, name, "adam", loop)


def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_returned(
    cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8]), 0)

    def loop(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
        trajectory = []
        for batch in batches:
            calls = []

            def closure(batch: Any = batch, calls: list[bool] = calls) -> torch.Tensor:
                calls.append(torch.is_grad_enabled())
                optimizer.zero_grad()
                loss = loss_of(module, batch)
                loss.backward()
                return loss

            with torch.no_grad():
                loss = optimizer.step(closure)
            assert calls == [True]
            trajectory.append([loss.detach(), *values(module)])
        return trajectory

    compare(cluster, name, "adam", loop)


def test_gradients_that_the_user_clips_or_replaces_are_the_ones_sent(cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8]), 0)

    def loop(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
        trajectory = []
        for number, batch in enumerate(batches):
            optimizer.zero_grad(set_to_none=bool(number % 2))
            loss_of(module, batch).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            last = list(module.parameters())[-1]
            last.grad = torch.full_like(last, 0.25)
            optimizer.step()
            trajectory.append([*values(module), *(each.grad.clone() for each in module.parameters())])
        return trajectory

    compare(cluster, name, "sgd-momentum", loop)


def test_in_a_round_the_options_of_the_lowest_rank_hold_on_every_trainer(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 8, 8])
    slower = Recipe(optimizer=torch.optim.SGD, options={"lr": 0.03})
    expected = train_on_averages(make_module(), slower, batches, {"fused": True})

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote(session, module, RECIPES["sgd"], name)
        optimizer.param_groups[0]["lr"] = 0.03 if session.rank == 0 else 5.0
        trajectory = []
        for batch in of_rank(batches, session.rank):
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
            trajectory.append(values(module))
        return trajectory, [group["lr"] for group in optimizer.last_result.options]

    for found, rates in cluster.train(3, program):
        assert_same_bits(found, expected)
        assert rates == [0.03]


def test_two_models_on_one_cluster_train_apart(cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8]), 0)

    def loops(pairs: list[tuple[torch.nn.Module, torch.optim.Optimizer]]) -> list[list[torch.Tensor]]:
        trajectory = []
        for batch in batches:
            for module, optimizer in pairs:
                optimizer.zero_grad()
                loss_of(module, batch).backward()
                optimizer.step()
                trajectory.append(values(module))
        return trajectory

    def program(session: Cluster) -> Any:
        one, other = make_module(1), make_module(2)
        return loops(
            [
                (one, remote(session, one, RECIPES["adam"], f"{name}-one")),
                (other, remote(session, other, RECIPES["sgd"], f"{name}-other")),
            ]
        )

    one, other = make_module(1), make_module(2)
    fused = {"fused": True}
    expected = loops([(one, RECIPES["adam"].make(one, fused)), (other, RECIPES["sgd"].make(other, fused))])
    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)
