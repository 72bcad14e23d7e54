"""NaN and infinite gradients: passed on as in torch, skipped, or raised, and the same on every trainer and server."""

import math
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.errors import InvalidRequest, LayoutMismatch, NonFiniteGradient
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    BUCKET_BYTES,
    RECIPES,
    Batch,
    assert_same_bits,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    remote_optimizer,
    train_on_averages,
    values,
)

POISONS = [math.nan, math.inf, -math.inf]
#: Round in which one trainer's gradient is poisoned, of four.
POISONED = 1


def poison_(module: torch.nn.Module, poison: float) -> None:
    """Three elements of the third and the last parameter."""
    parameters = list(module.parameters())
    parameters[2].grad[1, 4:6] = poison
    parameters[-1].grad[0] = poison


def backward(module: torch.nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    loss_of(module, batch).backward()


@pytest.mark.parametrize("poison", POISONS)
def test_passed_on_they_do_what_they_do_in_torch(poison: float, cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8], steps=2), 0)

    def run(module: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
        backward(module, optimizer, batches[0])
        poison_(module, poison)
        optimizer.step()
        return values(module)

    module = make_module()
    expected = run(module, RECIPES["sgd"].make(module, {"fused": True}))

    def program(session: Cluster) -> Any:
        replica = make_module()
        optimizer = remote_optimizer(session, replica, RECIPES["sgd"], name)
        return run(replica, optimizer), optimizer.last_result

    ((found, result),) = cluster.train(1, program)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=0, atol=0)
    assert not all(each.isfinite().all() for each in found)
    assert (result.stepped, result.num_nonfinite) == (True, 0), "nobody was asked to look"


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("poison", POISONS)
def test_skipped_they_change_nothing_and_all_trainers_hear_who_and_where(
    poison: float, culprit: int, cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8, 8, 8], steps=4)
    clean = [ranks for number, ranks in enumerate(batches) if number != POISONED]
    expected = train_on_averages(make_module(), RECIPES["adam"], clean, {"fused": True})
    expected.insert(POISONED, expected[POISONED - 1])

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["adam"], name, nonfinite="skip")
        trajectory, results = [], []
        for number, batch in enumerate(of_rank(batches, session.rank)):
            backward(module, optimizer, batch)
            if (number, session.rank) == (POISONED, culprit):
                poison_(module, poison)
            optimizer.step()
            trajectory.append(values(module))
            results.append(optimizer.last_result)
        (model,) = [each for each in session.status().models if each.name == name]
        return trajectory, results, session.trainer_id, optimizer.statistics(), model

    runs = cluster.train(3, program)
    for found, results, _, statistics, model in runs:
        assert_same_bits(found, expected)
        assert results == runs[0][1]
        assert [each.stepped for each in results] == [True, False, True, True]
        assert [each.num_nonfinite for each in results] == [0, 3, 0, 0]
        assert [each.round for each in results] == [1, 2, 3, 4]
        assert all(each.accepted and not each.error for each in results)
        reason = results[POISONED].reason
        assert "3 NaN or infinite elements" in reason
        assert "'2.weight'" in reason
        assert f"trainer {runs[culprit][2]}" in reason
        assert (statistics.num_accepted, statistics.num_skipped, statistics.num_nonfinite) == (4, 1, 3)
        assert model.num_skipped == 1


@pytest.mark.parametrize("way", ["remote optimizer", "context"])
def test_raised_they_change_nothing_every_trainer_raises_and_training_goes_on(
    way: str, cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8, 8], steps=4)
    clean = [ranks for number, ranks in enumerate(batches) if number != POISONED]
    expected = train_on_averages(make_module(), RECIPES["sgd-momentum"], clean, {"fused": True})
    expected.insert(POISONED, expected[POISONED - 1])

    def with_remote(session: Cluster, module: torch.nn.Module) -> Any:
        optimizer = remote_optimizer(session, module, RECIPES["sgd-momentum"], name, nonfinite="raise")

        def step(batch: Batch, poison: float) -> None:
            backward(module, optimizer, batch)
            module[4].bias.grad[0] *= poison
            optimizer.step()

        return step

    def with_context(session: Cluster, module: torch.nn.Module) -> Any:
        model = pserver.distribute(module, name=name, cluster=session, bucket_bytes=BUCKET_BYTES)
        recipe = RECIPES["sgd-momentum"]
        optimizer = pserver.optim.DistributedOptimizer(recipe.optimizer, model.parameter_refs(), **recipe.options)

        def step(batch: Batch, poison: float) -> None:
            with pserver.autograd.context() as context_id:
                pserver.autograd.backward(context_id, [loss_of(module, batch)])
                pserver.autograd.get_gradients(context_id)[module[4].bias][0] *= poison
                optimizer.step(context_id, nonfinite="raise")

        return step

    def program(session: Cluster) -> Any:
        module = make_module()
        step = (with_remote if way == "remote optimizer" else with_context)(session, module)
        trajectory = []
        for number, batch in enumerate(of_rank(batches, session.rank)):
            if number == POISONED:
                with pytest.raises(NonFiniteGradient, match=r"1 NaN or infinite elements, the first in '4\.bias'"):
                    step(batch, math.nan if session.rank == 1 else 1.0)
            else:
                step(batch, 1.0)
            trajectory.append(values(module))
        return trajectory

    for found in cluster.train(2, program):
        assert_same_bits(found, expected)


def test_elements_are_counted_over_all_trainers_tensors_and_servers(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> Any:
        weights = torch.nn.ParameterList([torch.zeros(3000), torch.zeros(7), torch.zeros(50)])
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, weights, lr=1.0, nonfinite="skip", name=name, cluster=session, bucket_bytes=256
        )
        for number, weight in enumerate(weights):
            weight.grad = torch.ones_like(weight)
            weight.grad[:: number + 2] = math.nan if session.rank else math.inf
        optimizer.step()
        return optimizer.last_result.num_nonfinite, optimizer.last_result.reason, session.trainer_id

    first, second = cluster.train(2, program)
    assert first[0] == second[0] == 2 * (1500 + 3 + 13)
    assert f"the first in '0' of trainer {min(first[2], second[2])}" in first[1]


def test_gradients_of_a_trainer_without_samples_do_not_count(cluster: LocalCluster, name: str) -> None:
    """Their weight in the mean is zero; what they hold is in nobody's way."""

    def program(session: Cluster) -> Any:
        weight = torch.nn.Parameter(torch.zeros(5))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=1.0, nonfinite="skip", name=name, cluster=session
        )
        weight.grad = torch.full((5,), math.nan if session.rank else 2.0)
        optimizer.step(samples=0 if session.rank else 4)
        return weight.tolist(), optimizer.last_result.stepped

    assert cluster.train(2, program) == [([-2.0] * 5, True)] * 2


def test_a_mean_that_overflows_is_skipped_even_if_every_gradient_is_finite(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> Any:
        weight = torch.nn.Parameter(torch.zeros(5))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=1.0, nonfinite="skip", name=name, cluster=session
        )
        weight.grad = torch.full((5,), 3e38)
        optimizer.step()
        assert "5 NaN or infinite elements, the first in '0.0' of the mean" in optimizer.last_result.reason
        return weight.isfinite().all().item()

    assert cluster.train(2, program) == [True, True]


def test_what_is_in_half_precision_and_complex_is_looked_at_too(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> Any:
        weights = torch.nn.ParameterList(
            [torch.zeros(5, dtype=torch.float16), torch.zeros(5, dtype=torch.complex64), torch.zeros(5).double()]
        )
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, weights, lr=1.0, nonfinite="skip", name=name, cluster=session
        )
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        weights[0].grad *= 70_000.0  # more than float16 has
        weights[1].grad[2] = complex(1.0, math.nan)
        weights[2].grad[1:3] = 1e300
        optimizer.step()
        return optimizer.last_result.num_nonfinite, optimizer.last_result.stepped

    assert cluster.train(1, program) == [(6, False)]


def test_the_rule_may_change_between_steps_and_the_lowest_ranks_counts(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> Any:
        weight = torch.nn.Parameter(torch.zeros(5))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session)
        weight.grad = torch.full((5,), math.inf)
        optimizer.nonfinite = "pass" if session.rank else "skip"
        optimizer.step()
        skipped = not optimizer.last_result.stepped
        optimizer.nonfinite = "skip" if session.rank else "pass"
        optimizer.step()
        return skipped, weight.tolist()

    assert cluster.train(2, program) == [(True, [-math.inf] * 5)] * 2


def test_an_unknown_rule_is_refused(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> None:
        weight = torch.nn.Parameter(torch.zeros(5))
        with pytest.raises(InvalidRequest, match=r"nonfinite must be one of .*'ignore'"):
            pserver.optim.RemoteOptimizer(
                torch.optim.SGD, [weight], lr=1.0, nonfinite="ignore", name=name, cluster=session
            )
        assert name not in {model.name for model in session.status().models}

    cluster.train(1, program)


def test_the_rule_is_no_part_of_the_model(cluster: LocalCluster, name: str) -> None:
    """Unlike the policy for rounds, it may differ between trainers without a `LayoutMismatch`."""
    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        remote_optimizer(one, make_module(), RECIPES["sgd"], name, nonfinite="skip", max_norm=1.0)
        remote_optimizer(other, make_module(), RECIPES["sgd"], name)
        with pytest.raises(LayoutMismatch):
            remote_optimizer(other, make_module(), RECIPES["adam"], name)
