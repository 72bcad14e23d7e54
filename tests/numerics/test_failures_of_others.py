"""Mistakes that parameter servers are known for."""

from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    RECIPES,
    WAYS,
    assert_same_bits,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    values,
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trainers", [2, 3])
def test_the_loss_curve_is_that_of_all_reduce(way: str, trainers: int, cluster: LocalCluster, name: str) -> None:
    """Every trainer's loss in every step is that of a replica that steps with hand-averaged gradients."""
    recipe = RECIPES["sgd-momentum"]
    batches = make_batches([8] * trainers, steps=10)
    replicas = [make_module() for _ in range(trainers)]
    optimizers = [recipe.make(each, {"fused": True}) for each in replicas]
    curves: list[list[torch.Tensor]] = [[] for _ in replicas]
    for step in batches:
        for rank, replica in enumerate(replicas):
            optimizers[rank].zero_grad()
            loss = loss_of(replica, step[rank])
            loss.backward()
            curves[rank].append(loss.detach())
        for together in zip(*(each.parameters() for each in replicas), strict=True):
            mean = together[0].grad.clone()
            for other in together[1:]:
                mean += other.grad
            mean /= trainers
            for parameter in together:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return WAYS[way](session, make_module(), recipe, own, {}, name=name)

    for rank, (losses, trajectory) in enumerate(cluster.train(trainers, program)):
        assert_same_bits([losses], [curves[rank]])
        assert_same_bits(trajectory[-1:], [values(replicas[rank])])


def test_the_learning_rate_is_applied_once(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(100))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=0.5, name=name, cluster=session)
        found = []
        for lr in (0.5, 0.25, 0.0):
            optimizer.param_groups[0]["lr"] = lr
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            assert weight.min() == weight.max()
            found.append(weight[0].item())
        return found

    for found in cluster.train(2, program):
        assert found == [-0.5, -0.75, -0.75]


def test_what_trainers_hold_after_a_step_is_what_servers_hold(cluster: LocalCluster, name: str) -> None:
    """A step applied on the trainer as well would show when the next trainer reads the servers' values."""
    batches = make_batches([8, 8], steps=3)

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return WAYS["contexts"](session, make_module(), RECIPES["adamw"], own, {}, name=name)[1][-1]

    first, second = cluster.train(2, program)
    with cluster.connect(0, 2) as session:
        module = make_module(seed=99)
        WAYS["contexts"](session, module, RECIPES["adamw"], [], {}, name=name)
    held = values(module)
    assert_same_bits([first, second], [held, held])


@pytest.mark.parametrize("way", ["remote optimizer", "context", "pushed context"])
def test_gradients_of_the_last_step_do_not_leak_into_the_next(way: str, cluster: LocalCluster, name: str) -> None:
    """Steps with gradients 1, 0 and 4 move by exactly those; so do trainers with different ones."""

    def program(session: Cluster) -> list[float]:
        module = torch.nn.ParameterList([torch.zeros(70), torch.zeros(3)])
        if way == "remote optimizer":
            remote = pserver.optim.RemoteOptimizer(torch.optim.SGD, module, lr=1.0, name=name, cluster=session)
        else:
            model = pserver.distribute(module, name=name, cluster=session)
            distributed = pserver.optim.DistributedOptimizer(torch.optim.SGD, model.parameter_refs(), lr=1.0)
        found = []
        for size in (1.0, 0.0, 4.0):
            loss = sum(each.sum() for each in module) * (size * (1 + session.rank))
            if way == "remote optimizer":
                remote.zero_grad()
                loss.backward()
                remote.step()
            else:
                with pserver.autograd.context() as context_id:
                    pserver.autograd.backward(context_id, [loss])
                    if way == "pushed context":
                        distributed.push(context_id)
                    distributed.step(context_id)
            found.append(module[0][0].item())
        assert all(each.min() == each.max() == found[-1] for each in module)
        return found

    for found in cluster.train(2, program):
        assert found == [-1.5, -1.5, -7.5]


def test_without_zero_grad_gradients_pile_up_on_the_trainer_as_in_torch(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(9))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session)
        found = []
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()
            found.append(weight[0].item())
        return found

    assert cluster.train(1, program) == [[-1.0, -3.0, -6.0]]


def test_grad_stays_the_trainers_own_and_never_becomes_the_average(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> float:
        weight = torch.nn.Parameter(torch.zeros(9))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session)
        (weight.sum() * (session.rank + 1)).backward()
        optimizer.step()
        assert weight[0] == -1.5
        return weight.grad[0].item()

    assert cluster.train(2, program) == [1.0, 2.0]
