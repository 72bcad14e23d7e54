"""Buffers, such as the running statistics of batch normalisation: one truth for all trainers, unless told otherwise."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.errors import InvalidRequest, LayoutMismatch
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    RECIPES,
    WAYS,
    Batch,
    assert_same_bits,
    fill_,
    in_parallel,
    loss_of,
    make_batches,
    of_rank,
    remote_optimizer,
    step_on,
    train_locally,
    values,
)


class Normed(torch.nn.Module):
    """Batch normalisation between two layers, a count of rows, and a flag that a forward pass sets."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(13, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 1)
        self.register_buffer("rows", torch.tensor(0))
        self.register_buffer("seen", torch.tensor([False, False]))
        fill_(self, seed)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.rows += len(inputs)
            self.seen[len(inputs) % 2] = True
        return self.last(self.norm(self.first(inputs)))


Buffers = dict[str, torch.Tensor]


def buffers_of(module: torch.nn.Module) -> Buffers:
    return {key: each.clone() for key, each in module.named_buffers()}


def assert_same_buffers(found: Buffers, expected: Buffers) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), (key, found[key], value)


def after_forward(module: Normed, batches: Sequence[Batch]) -> list[Buffers]:
    """What a forward pass on each batch would leave in the buffers, each from the present ones."""
    before = buffers_of(module)
    left = []
    for inputs, _ in batches:
        with torch.no_grad():
            module(inputs)
        left.append(buffers_of(module))
        module.load_state_dict(before, strict=False)
    return left


def mean_of(each: Sequence[Buffers], weights: Sequence[int]) -> Buffers:
    """The weighted mean in order; integers and flags of the first."""

    def mean(key: str) -> torch.Tensor:
        first = each[0][key]
        if not first.is_floating_point():
            return first
        total = sum(buffers[key] * weight for buffers, weight in zip(each, weights, strict=True))
        return total / sum(weights)

    return {key: mean(key) for key in each[0]}


def train_together(module: Normed, batches: Sequence[Sequence[Batch]], buffers: str, weights: Sequence[int]) -> Any:
    """Torch in one process as trainers with shared buffers would be: buffers and parameters after every round."""
    optimizer = RECIPES["sgd-momentum"].make(module, {"fused": True})
    parameters = list(module.parameters())
    found = []
    for ranks in batches:
        left = after_forward(module, ranks)
        before = buffers_of(module)
        totals = [torch.zeros_like(each) for each in parameters]
        for weight, batch in zip(weights, ranks, strict=True):
            for total, gradient in zip(totals, torch.autograd.grad(loss_of(module, batch), parameters), strict=True):
                total += gradient * weight
            module.load_state_dict(before, strict=False)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total / sum(weights)
        optimizer.step()
        module.load_state_dict(left[0] if buffers == "lowest" else mean_of(left, weights), strict=False)
        found.append(values(module))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("buffers", ["lowest", "mean"])
@pytest.mark.parametrize("rows", [(8, 8), (8, 4, 12)], ids=str)
def test_every_trainer_has_the_same_buffers_after_every_round(
    rows: Sequence[int], buffers: str, way: str, cluster: LocalCluster, name: str
) -> None:
    batches = make_batches(rows, steps=4)
    weights = [each // 4 for each in rows] if len(rows) == 3 else [1, 1]
    expected = train_together(Normed(), batches, buffers, weights)

    def program(session: Cluster) -> Any:
        module = Normed()
        own = of_rank(batches, session.rank)
        trajectory = WAYS[way](
            session, module, RECIPES["sgd-momentum"], own, {}, name=name, weighted=True, buffers=buffers
        )[1]
        module.eval()
        return trajectory, module(batches[0][0][0])

    runs = cluster.train(len(rows), program)
    for found, output in runs:
        assert_same_bits(found, runs[0][0])
        assert torch.equal(output, runs[0][1]), "all trainers evaluate alike"
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
            integers = [(one, other) for one, other in zip(ours, theirs, strict=True) if not one.is_floating_point()]
            assert len(integers) == 3
            assert all(torch.equal(one, other) for one, other in integers)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("buffers", ["lowest", "mean", "local"])
def test_with_one_trainer_buffers_have_the_bits_of_torch(
    buffers: str, way: str, cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8], steps=4), 0)
    _, expected = train_locally(Normed(), RECIPES["adam"], batches, {"fused": True})

    def program(session: Cluster) -> Any:
        return WAYS[way](session, Normed(), RECIPES["adam"], batches, {}, name=name, buffers=buffers)[1]

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_local_buffers_drift_apart_by_design_and_parameters_do_not(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 6], steps=3)

    def program(session: Cluster) -> Any:
        module, twin = Normed(), Normed()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, buffers="local")
        for batch in of_rank(batches, session.rank):
            (left,) = after_forward(module, [batch])
            step_on(module, optimizer, batch)
            assert_same_buffers(buffers_of(module), left)
        del twin
        return [each.detach() for each in module.parameters()], buffers_of(module)

    (first, one), (second, other) = cluster.train(2, program)
    assert_same_bits([first], [second])
    assert not torch.equal(one["norm.running_mean"], other["norm.running_mean"])
    assert (one["rows"], other["rows"]) == (24, 18)


def test_buffers_of_the_first_trainer_are_everybodys_from_the_beginning_whatever_the_policy(
    cluster: LocalCluster, name: str
) -> None:
    for buffers in ("lowest", "mean", "local"):
        with cluster.connect(0, 1) as early, cluster.connect(1, 1) as late:
            modules = [Normed(), Normed(seed=4)]
            modules[0].rows.fill_(7)
            modules[0].norm.running_mean.fill_(3.0)
            for session, module in zip((early, late), modules, strict=True):
                remote_optimizer(session, module, RECIPES["sgd"], f"{name}-{buffers}", buffers=buffers)
            assert_same_buffers(buffers_of(modules[1]), buffers_of(modules[0]))
            assert modules[1].rows == 7


def test_a_trainer_that_joins_late_gets_the_present_buffers(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8], steps=3)
    with cluster.connect(0, 1) as early, cluster.connect(1, 1) as late:
        module, newcomer = Normed(), Normed(seed=4)
        optimizer = remote_optimizer(early, module, RECIPES["sgd"], name)
        for batch in of_rank(batches, 0):
            step_on(module, optimizer, batch)
        remote_optimizer(late, newcomer, RECIPES["sgd"], name)
        assert newcomer.rows == 24
        assert_same_buffers(buffers_of(newcomer), buffers_of(module))


def test_if_the_lowest_rank_has_no_samples_the_next_ones_buffers_count(cluster: LocalCluster, name: str) -> None:
    batch = make_batches([8], steps=1)[0][0]
    (expected,) = after_forward(Normed(), [batch])

    def program(session: Cluster) -> Buffers:
        module = Normed()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        if session.rank == 0:
            module.rows.fill_(1000)  # of no account
            optimizer.skip()
        else:
            step_on(module, optimizer, batch)
        return buffers_of(module)

    for found in cluster.train(2, program):
        assert_same_buffers(found, expected)


def test_a_round_without_samples_leaves_the_buffers_as_they_were(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> int:
        module = Normed()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        module.rows.fill_(5)
        optimizer.skip()
        return module.rows.item()

    assert cluster.train(2, program) == [0, 0]


def test_buffers_of_a_refused_step_are_replaced_by_those_that_count(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 6], steps=1)[0]
    (expected,) = after_forward(Normed(), [batches[0]])
    with cluster.connect(0, 2) as fast, cluster.connect(1, 2) as slow:
        modules = [Normed(), Normed()]
        optimizers = [
            remote_optimizer(session, module, RECIPES["sgd"], name, sync=pserver.Bsp(backup_workers=1))
            for session, module in zip((fast, slow), modules, strict=True)
        ]
        for module, optimizer, batch in zip(modules, optimizers, batches, strict=True):
            step_on(module, optimizer, batch)
        assert not optimizers[1].last_result.accepted
        for module in modules:
            assert_same_buffers(buffers_of(module), expected)
        assert_same_bits([values(modules[0])], [values(modules[1])])


def test_without_synchronisation_only_the_lowest_rank_that_contributes_moves_the_buffers(
    cluster: LocalCluster, name: str
) -> None:
    batch = make_batches([8], steps=1)[0][0]
    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        modules = [Normed(), Normed()]
        optimizers = [
            remote_optimizer(session, module, RECIPES["sgd"], name, sync=pserver.Async())
            for session, module in zip((one, other), modules, strict=True)
        ]
        step_on(modules[1], optimizers[1], batch)
        assert modules[1].rows == 8
        step_on(modules[0], optimizers[0], batch)
        assert modules[0].rows == 8
        step_on(modules[1], optimizers[1], batch)
        assert modules[1].rows == 8
        assert_same_buffers(buffers_of(modules[1]), buffers_of(modules[0]))


def test_policies_for_buffers_that_differ_or_do_not_exist_are_refused(cluster: LocalCluster, name: str) -> None:
    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        with pytest.raises(InvalidRequest, match=r"buffers must be one of .*'highest'"):
            remote_optimizer(one, Normed(), RECIPES["sgd"], name, buffers="highest")
        remote_optimizer(one, Normed(), RECIPES["sgd"], name, buffers="lowest")
        with pytest.raises(LayoutMismatch, match="buffers: expected lowest, got mean"):
            remote_optimizer(other, Normed(), RECIPES["sgd"], name, buffers="mean")


def test_running_statistics_gathered_over_several_pushes_are_those_of_the_last(
    cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8, 4], steps=1)[0]
    twin = Normed()
    for inputs, _ in batches:
        twin(inputs)

    def program(session: Cluster) -> Buffers:
        module = Normed()
        model = pserver.distribute(module, name=name, cluster=session)
        optimizer = pserver.optim.DistributedOptimizer(torch.optim.SGD, model.parameter_refs(), lr=0.1)
        with pserver.autograd.context() as context_id:
            for batch in batches:
                pserver.autograd.backward(context_id, [loss_of(module, batch)])
                optimizer.push(context_id)
            optimizer.step(context_id)
        return buffers_of(module)

    (found,) = cluster.train(1, program)
    assert_same_buffers(found, buffers_of(twin))


def test_a_model_whose_only_buffer_is_a_flag_trains_in_step(cluster: LocalCluster, name: str) -> None:
    class Flagged(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(13, 1)
            self.register_buffer("used", torch.tensor(False), persistent=False)
            fill_(self, 0)

    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        modules = [Flagged(), Flagged()]
        optimizers = in_parallel(
            lambda: remote_optimizer(one, modules[0], RECIPES["sgd"], name, buffers="mean"),
            lambda: remote_optimizer(other, modules[1], RECIPES["sgd"], name, buffers="mean"),
        )
        modules[0].used.fill_(True)
        batch = make_batches([8], steps=1)[0][0]
        in_parallel(*(lambda rank=rank: step_on(modules[rank], optimizers[rank], batch) for rank in (0, 1)))
        assert modules[1].used
