"""Several backward passes into one context, with and without pushes in between."""

from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.errors import UnknownContext
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    BUCKET_BYTES,
    RECIPES,
    Batch,
    assert_same_bits,
    contexts_held,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    values,
)


def distributed(session: Cluster, module: torch.nn.Module, recipe: str, name: str) -> Any:
    model = pserver.distribute(module, name=name, cluster=session, bucket_bytes=BUCKET_BYTES)
    return pserver.optim.DistributedOptimizer(
        RECIPES[recipe].optimizer, model.parameter_refs(), **RECIPES[recipe].options
    )


def accumulate_locally(recipe: str, batches: list[list[Batch]]) -> list[list[torch.Tensor]]:
    module = make_module()
    optimizer = RECIPES[recipe].make(module, {"fused": True})
    trajectory = []
    for parts in batches:
        optimizer.zero_grad()
        for batch in parts:
            loss_of(module, batch).backward()
        optimizer.step()
        trajectory.append(values(module))
    return trajectory


@pytest.mark.parametrize("pushes", ["none", "after each backward", "after all but the last", "after the first"])
@pytest.mark.parametrize("recipe", ["sgd-momentum", "adamw"])
def test_several_backward_passes_add_up_as_in_torch(recipe: str, pushes: str, cluster: LocalCluster, name: str) -> None:
    batches = make_batches([5, 8, 3], steps=3)
    expected = accumulate_locally(recipe, batches)
    pushed_after = {
        "none": set(),
        "after each backward": {0, 1, 2},
        "after all but the last": {0, 1},
        "after the first": {0},
    }[pushes]

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = distributed(session, module, recipe, name)
        trajectory = []
        for parts in batches:
            with pserver.autograd.context() as context_id:
                for number, batch in enumerate(parts):
                    pserver.autograd.backward(context_id, [loss_of(module, batch)])
                    if number in pushed_after:
                        optimizer.push(context_id)
                        assert pserver.autograd.get_gradients(context_id) == {}
                optimizer.step(context_id)
            trajectory.append(values(module))
        return trajectory

    (found,) = cluster.train(1, program)
    if pushes == "after the first":
        # The last two are added up here before servers add them to the first: another order than torch's.
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    else:
        assert_same_bits(found, expected)
    assert contexts_held(cluster, name) == [0, 0, 0]


def test_trainers_that_push_differently_are_averaged_all_the_same(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([4, 4, 4, 4], steps=3)
    module = make_module()
    optimizer = RECIPES["adam"].make(module, {"fused": True})
    expected = []
    for parts in batches:
        optimizer.zero_grad()
        (sum(loss_of(module, batch) for batch in parts) / 2).backward()
        optimizer.step()
        expected.append(values(module))

    def program(session: Cluster) -> Any:
        replica = make_module()
        remote = distributed(session, replica, "adam", name)
        trajectory = []
        for parts in batches:
            with pserver.autograd.context() as context_id:
                for batch in parts[2 * session.rank : 2 * session.rank + 2]:
                    pserver.autograd.backward(context_id, [loss_of(replica, batch)])
                    if session.rank == 0:
                        remote.push(context_id)
                remote.step(context_id)
            trajectory.append(values(replica))
        return trajectory

    for found in cluster.train(2, program):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_parameter_with_a_gradient_in_one_push_only_is_stepped_with_it(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> list[torch.Tensor]:
        module = torch.nn.ParameterList([torch.ones(20), torch.ones(30), torch.ones(5)])
        optimizer = distributed(session, module, "sgd", name)
        with pserver.autograd.context() as context_id:
            pserver.autograd.backward(context_id, [module[0].sum()])
            optimizer.push(context_id)
            pserver.autograd.backward(context_id, [module[1].sum() + module[0].sum()])
            optimizer.push(context_id)
            optimizer.step(context_id)
        return values(module)

    ((first, second, third),) = cluster.train(1, program)
    torch.testing.assert_close(first, torch.full((20,), 0.8))
    torch.testing.assert_close(second, torch.full((30,), 0.9))
    assert torch.equal(third, torch.ones(5))


def test_several_roots_are_summed_and_grad_is_left_alone(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([5, 8], steps=1)
    expected = accumulate_locally("sgd", [[*batches[0]]])

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = distributed(session, module, "sgd", name)
        marker = torch.full_like(next(module.parameters()), 7.0)
        next(module.parameters()).grad = marker
        with pserver.autograd.context() as context_id:
            pserver.autograd.backward(context_id, [loss_of(module, batch) for batch in batches[0]])
            assert next(module.parameters()).grad is marker
            assert torch.all(marker == 7.0)
            optimizer.step(context_id)
        return values(module)

    (found,) = cluster.train(1, program)
    torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("leaves_by", ["its end", "an exception"])
def test_a_context_dropped_without_a_step_is_freed_on_every_shard(
    leaves_by: str, cluster: LocalCluster, name: str
) -> None:
    batch = make_batches([8], steps=1)[0][0]

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = distributed(session, module, "sgd-momentum", name)
        before = values(module)
        try:
            with pserver.autograd.context() as context_id:
                pserver.autograd.backward(context_id, [loss_of(module, batch)])
                optimizer.push(context_id)
                during = contexts_held(cluster, name)
                if leaves_by == "an exception":
                    raise KeyError("the user's own")
        except KeyError:
            pass
        after = contexts_held(cluster, name)
        with pytest.raises(UnknownContext, match=str(context_id)):
            optimizer.step(context_id)
        with pserver.autograd.context() as context_id:
            pserver.autograd.backward(context_id, [loss_of(module, batch)])
            optimizer.step(context_id)
        return before, during, after, values(module)

    ((before, during, after, found),) = cluster.train(1, program)
    assert during == [1, 1, 1]
    assert after == [0, 0, 0]
    expected = accumulate_locally("sgd-momentum", [[batch]])
    assert_same_bits([before], [values(make_module())])
    assert_same_bits([found], expected)


def test_a_trainer_that_leaves_frees_its_contexts(cluster: LocalCluster, name: str) -> None:
    batch = make_batches([8], steps=1)[0][0]

    def program(session: Cluster) -> None:
        module = make_module()
        optimizer = distributed(session, module, "sgd", name)
        context_id = session.contexts.open().context_id
        pserver.autograd.backward(context_id, [loss_of(module, batch)])
        optimizer.push(context_id)
        assert contexts_held(cluster, name) == [1, 1, 1]

    cluster.train(1, program)
    # The next trainer's registration reaches every server behind the news that the first has left.
    cluster.train(1, lambda session: distributed(session, make_module(), "sgd", f"{name}-next"))
    assert contexts_held(cluster, name) == [0, 0, 0]


def test_one_context_serves_several_steps_and_each_uses_up_its_gradients(cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8]), 0)
    expected = accumulate_locally("adamw", [[batch] for batch in batches])

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = distributed(session, module, "adamw", name)
        trajectory = []
        with pserver.autograd.context() as context_id:
            for number, batch in enumerate(batches):
                pserver.autograd.backward(context_id, [loss_of(module, batch)])
                if number % 2:
                    optimizer.push(context_id)
                optimizer.step(context_id)
                trajectory.append(values(module))
        return trajectory

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)
    assert contexts_held(cluster, name) == [0, 0, 0]
