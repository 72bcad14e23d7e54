"""Clipping applies to the mean gradient over all trainers, parameters and shards, and nobody's own."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.errors import InvalidRequest, PserverError
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    BUCKET_BYTES,
    RECIPES,
    Batch,
    assert_close,
    assert_same_bits,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    remote_optimizer,
    step_on,
    train_on_averages,
    values,
)

#: Below the norm of every mean gradient of these tests.
MAX_NORM = 0.05
CLIP_VALUE = 0.01

Edit = Callable[[list[torch.nn.Parameter]], Any]


def averaged(
    recipe: str, batches: Sequence[Sequence[Batch]], edits: Sequence[Edit], weights: Sequence[int] | None = None
) -> tuple[list[list[torch.Tensor]], list[Any]]:
    """Torch with the mean gradient, of which an edit sees `.grad` in each step; also what the edits returned."""
    module = make_module()
    optimizer = RECIPES[recipe].make(module, {"fused": True})
    parameters = list(module.parameters())
    trajectory, returned = [], []
    for ranks, edit in zip(batches, edits, strict=True):
        each = weights or [1] * len(ranks)
        optimizer.zero_grad()
        for weight, batch in zip(each, ranks, strict=True):
            (loss_of(module, batch) * (weight / sum(each))).backward()
        returned.append(edit(parameters))
        optimizer.step()
        trajectory.append(values(module))
    return trajectory, returned


def clip_norm(parameters: list[torch.nn.Parameter]) -> float:
    return torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM).item()


def clip_value(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_value_(parameters, CLIP_VALUE)


def leave(parameters: list[torch.nn.Parameter]) -> None:
    """No clipping."""


def with_remote(session: Cluster, batches: Sequence[Batch], recipe: str, name: str, **rules: Any) -> Any:
    module = make_module()
    optimizer = remote_optimizer(session, module, RECIPES[recipe], name, **rules)
    trajectory, norms = [], []
    for batch in batches:
        step_on(module, optimizer, batch, samples=len(batch[0]))
        trajectory.append(values(module))
        norms.append(optimizer.last_result.grad_norm)
    return trajectory, norms


def with_contexts(session: Cluster, batches: Sequence[Batch], recipe: str, name: str, **rules: Any) -> Any:
    module = make_module()
    model = pserver.distribute(module, name=name, cluster=session, bucket_bytes=BUCKET_BYTES)
    optimizer = pserver.optim.DistributedOptimizer(
        RECIPES[recipe].optimizer, model.parameter_refs(), **RECIPES[recipe].options
    )
    trajectory, norms = [], []
    for batch in batches:
        with pserver.autograd.context() as context_id:
            pserver.autograd.backward(context_id, [loss_of(module, batch)])
            result = optimizer.step(context_id, samples=len(batch[0]), **rules)
        trajectory.append(values(module))
        norms.append(result.grad_norm)
    return trajectory, norms


TRAIN = {"remote optimizer": with_remote, "contexts": with_contexts}


@pytest.mark.parametrize("way", TRAIN)
@pytest.mark.parametrize("trainers", [1, 3])
@pytest.mark.parametrize("recipe", ["sgd-momentum", "adamw"])
def test_max_norm_is_that_of_clip_grad_norm_on_the_mean_gradient(
    recipe: str, trainers: int, way: str, cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8] * trainers, steps=4)
    expected, norms = averaged(recipe, batches, [clip_norm] * 4)
    assert min(norms) > MAX_NORM, "every step must clip"

    def program(session: Cluster) -> Any:
        return TRAIN[way](session, of_rank(batches, session.rank), recipe, name, max_norm=MAX_NORM)

    for found, found_norms in cluster.train(trainers, program):
        assert_close(found, expected, 1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-5)


def test_both_ways_to_train_clip_to_the_same_bits(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 8], steps=3)
    (remote, norms), (contexts, others) = (
        cluster.train(
            2,
            lambda session, way=way: TRAIN[way](
                session, of_rank(batches, session.rank), "adam", f"{name}-{way}", max_norm=MAX_NORM, clip_value=0.005
            ),
        )[0]
        for way in TRAIN
    )
    assert_same_bits(remote, contexts)
    assert norms == others


def test_the_number_of_servers_changes_no_bit_of_the_norm_or_the_result(
    cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    batches = make_batches([8, 8], steps=3)

    def program(session: Cluster) -> Any:
        return with_remote(session, of_rank(batches, session.rank), "adamw", name, max_norm=MAX_NORM)

    (first, norms), *others = (cluster_of(servers).train(2, program)[0] for servers in (1, 2, 3))
    for found, found_norms in others:
        assert_same_bits(found, first)
        assert found_norms == norms


def test_clip_value_is_that_of_clip_grad_value_on_the_mean_gradient(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 8], steps=3)
    expected, _ = averaged("sgd-momentum", batches, [clip_value] * 3)
    unclipped = train_on_averages(make_module(), RECIPES["sgd-momentum"], batches, {"fused": True})
    assert (expected[0][0] - unclipped[0][0]).abs().max() > 1e-3, "the limit must matter"

    def program(session: Cluster) -> Any:
        return with_remote(session, of_rank(batches, session.rank), "sgd-momentum", name, clip_value=CLIP_VALUE)

    for found, norms in cluster.train(2, program):
        assert_close(found, expected, 1e-6)
        assert norms == [None] * 3


def test_with_both_limits_the_norm_comes_first(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8], steps=3)

    def both(parameters: list[torch.nn.Parameter]) -> None:
        clip_norm(parameters)
        clip_value(parameters)

    def reversed_(parameters: list[torch.nn.Parameter]) -> None:
        clip_value(parameters)
        clip_norm(parameters)

    expected, _ = averaged("sgd", batches, [both] * 3)
    other, _ = averaged("sgd", batches, [reversed_] * 3)
    assert (expected[-1][0] - other[-1][0]).abs().max() > 1e-5, "the order must matter"

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return with_remote(session, own, "sgd", name, max_norm=MAX_NORM, clip_value=CLIP_VALUE)[0]

    assert_close(cluster.train(1, program)[0], expected, 1e-6)


def test_a_limit_that_is_not_reached_changes_no_bit(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 8], steps=3)
    expected = train_on_averages(make_module(), RECIPES["adam"], batches, {"fused": True})

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return with_remote(session, own, "adam", name, max_norm=1e6, clip_value=1e6)

    for found, norms in cluster.train(2, program):
        assert_same_bits(found, expected)
        assert all(norm > 0 for norm in norms)


def test_uneven_batches_are_clipped_as_one_weighted_mean(cluster: LocalCluster, name: str) -> None:
    rows = [2, 10, 0]
    batches = make_batches(rows, steps=3)
    expected, norms = averaged("adam", [ranks[:2] for ranks in batches], [clip_norm] * 3, weights=rows[:2])

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["adam"], name, max_norm=MAX_NORM)
        trajectory, found_norms = [], []
        for batch in of_rank(batches, session.rank):
            if len(batch[0]):
                step_on(module, optimizer, batch, samples=len(batch[0]))
            else:
                optimizer.skip()
            trajectory.append(values(module))
            found_norms.append(optimizer.last_result.grad_norm)
        return trajectory, found_norms

    for found, found_norms in cluster.train(3, program):
        assert_close(found, expected, 1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-5)


def test_limits_changed_between_steps_hold_from_the_next_step_on(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 8], steps=5)
    edits = [leave, clip_norm, clip_value, leave, clip_norm]
    limits = [(None, None), (MAX_NORM, None), (None, CLIP_VALUE), (None, None), (MAX_NORM, None)]
    expected, norms = averaged("sgd-momentum", batches, edits)

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd-momentum"], name)
        trajectory, found_norms = [], []
        for batch, (optimizer.max_norm, optimizer.clip_value) in zip(
            of_rank(batches, session.rank), limits, strict=True
        ):
            step_on(module, optimizer, batch)
            trajectory.append(values(module))
            found_norms.append(optimizer.last_result.grad_norm)
        return trajectory, found_norms

    for found, found_norms in cluster.train(2, program):
        assert_close(found, expected, 1e-6)
        assert [norm is None for norm in found_norms] == [norm is None for norm in norms]


def test_if_limits_differ_the_lowest_rank_counts(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 8], steps=2)
    expected, _ = averaged("sgd", batches, [clip_norm] * 2)

    def program(session: Cluster) -> Any:
        limit = MAX_NORM if session.rank == 0 else 1e-6
        return with_remote(session, of_rank(batches, session.rank), "sgd", name, max_norm=limit)[0]

    for found in cluster.train(2, program):
        assert_close(found, expected, 1e-6)


# Limits and gradients of special kinds


@pytest.mark.parametrize(
    "rules",
    [{"max_norm": 0.0}, {"max_norm": -1.0}, {"max_norm": math.inf}, {"clip_value": math.nan}, {"max_norm": "1"}],
    ids=str,
)
def test_a_limit_that_makes_no_sense_is_refused_before_anything_happens(
    rules: dict[str, Any], cluster: LocalCluster, name: str
) -> None:
    batch = make_batches([8], steps=1)[0][0]
    ((key, limit),) = rules.items()

    def program(session: Cluster) -> Any:
        module = make_module()
        with pytest.raises(InvalidRequest, match=key):
            remote_optimizer(session, module, RECIPES["sgd"], name, **rules)
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        setattr(optimizer, key, limit)
        with pytest.raises(InvalidRequest, match=key):
            step_on(module, optimizer, batch)
        setattr(optimizer, key, None)
        step_on(module, optimizer, batch)
        return values(module)

    expected, _ = averaged("sgd", [[batch]], [leave])
    assert_same_bits(cluster.train(1, program), expected)


class Waves(torch.nn.Module):
    """Complex parameters next to real ones."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.waves = torch.nn.Parameter(torch.randn(70, dtype=torch.complex64, generator=generator))
        self.real = torch.nn.Parameter(torch.randn(200, generator=generator))

    def forward(self) -> torch.Tensor:
        return (self.waves * (1 + 2j)).abs().square().sum() + self.real.square().sum()


def train_waves(module: Waves, optimizer: torch.optim.Optimizer, edit: Edit) -> Any:
    trajectory = []
    for _ in range(3):
        optimizer.zero_grad()
        module().backward()
        edit(list(module.parameters()))
        optimizer.step()
        trajectory.append(values(module))
    return trajectory


@pytest.mark.parametrize("recipe", ["sgd-momentum", "adam"])
def test_complex_parameters_are_clipped_by_norm_as_in_torch(recipe: str, cluster: LocalCluster, name: str) -> None:
    module = Waves()
    expected = train_waves(module, RECIPES[recipe].make(module, {}), clip_norm)

    def program(session: Cluster) -> Any:
        replica = Waves()
        optimizer = remote_optimizer(session, replica, RECIPES[recipe], name, max_norm=MAX_NORM)
        return train_waves(replica, optimizer, leave)

    (found,) = cluster.train(1, program)
    assert_close(found, expected, 1e-5)


def test_complex_parameters_cannot_be_clipped_by_value_and_train_on_without(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> Any:
        module = Waves()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        optimizer.clip_value = 1.0
        with pytest.raises(InvalidRequest, match="no meaning for complex parameters"):
            train_waves(module, optimizer, leave)
        optimizer.clip_value = None
        return train_waves(module, optimizer, leave)

    (found,) = cluster.train(1, program)
    hosted = [node.shards._shards.get(name) for node in cluster.nodes]
    assert not any(each._shard.num_contexts for each in hosted if each is not None), "nothing of it was sent"
    module = Waves()
    assert_close(found, train_waves(module, RECIPES["sgd"].make(module, {}), leave), 1e-6)


@pytest.mark.parametrize("samples", [-1, 1 << 50])
def test_a_step_that_every_server_refuses_does_not_stand_in_the_way_of_the_next(
    samples: int, cluster: LocalCluster, name: str
) -> None:
    batch = make_batches([8], steps=1)[0][0]

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        with pytest.raises(PserverError) as raised:
            step_on(module, optimizer, batch, samples=samples)
        assert "samples must be in" in str(raised.value)
        step_on(module, optimizer, batch)
        return values(module)

    expected, _ = averaged("sgd", [[batch]], [leave])
    assert_same_bits(cluster.train(1, program), expected)


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_does_what_torch_does(poison: float, cluster: LocalCluster, name: str) -> None:
    """clip_grad_norm_ multiplies by 0 or NaN then; `nonfinite="skip"` is the remedy."""

    def poisoned(parameters: list[torch.nn.Parameter]) -> None:
        parameters[0].grad[3, 5] = poison

    def poisoned_and_clipped(parameters: list[torch.nn.Parameter]) -> float:
        poisoned(parameters)
        return clip_norm(parameters)

    batches = make_batches([8], steps=1)
    expected, (norm,) = averaged("sgd", batches, [poisoned_and_clipped])

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, max_norm=MAX_NORM)
        loss_of(module, batches[0][0]).backward()
        poisoned(list(module.parameters()))
        optimizer.step()
        return values(module), optimizer.last_result.grad_norm

    ((found, found_norm),) = cluster.train(1, program)
    assert found_norm == pytest.approx(norm, nan_ok=True)
    for ours, theirs in zip(found, expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=0, atol=0)


def test_a_large_gradient_does_not_overflow_the_norm(cluster: LocalCluster, name: str) -> None:
    """Its squares do not fit float32."""

    def program(session: Cluster) -> Any:
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=1.0, max_norm=2.0, name=name, cluster=session
        )
        weight.grad = torch.full((4,), 1e30)
        optimizer.step()
        return optimizer.last_result.grad_norm, weight.tolist()

    ((norm, found),) = cluster.train(1, program)
    assert norm == pytest.approx(2e30)
    assert found == pytest.approx([-1.0] * 4)
