"""Clipping, loss scaling, accumulation and the search for NaN act on what arrives."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.compress import BFloat16, Codec, Float16
from pserver.errors import NonFiniteGradient
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.compressing import FED_BACK, HALVES, LOSSY, STEPS, to_bfloat16, train_rounded
from tests.numerics.training import (
    BUCKET_BYTES,
    RECIPES,
    assert_close,
    assert_same_bits,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    remote_optimizer,
    step_on,
    values,
)


@pytest.fixture
def cluster(cluster_of: Callable[[int], LocalCluster]) -> LocalCluster:
    """Two servers."""
    return cluster_of(2)


def test_clipping_acts_on_the_mean_of_what_arrives(cluster: LocalCluster, name: str) -> None:
    batches, limit, norms = make_batches([8, 8], steps=STEPS), 0.05, []

    def clip(masters: list[torch.nn.Parameter]) -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(masters, limit).item())

    expected = train_rounded(make_module(), RECIPES["sgd-momentum"], batches, gradients=to_bfloat16, clip=clip)

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(
            session, module, RECIPES["sgd-momentum"], name, compress=BFloat16(), max_norm=limit
        )
        trajectory, found = [], []
        for batch in of_rank(batches, session.rank):
            step_on(module, optimizer, batch)
            trajectory.append(values(module))
            found.append(optimizer.last_result.grad_norm)
        return trajectory, found

    for trajectory, found in cluster.train(2, program):
        assert_close(trajectory, expected, 1e-6)
        torch.testing.assert_close(found, norms)


@pytest.mark.parametrize("codec", [*LOSSY, *FED_BACK], ids=str)
def test_no_codec_gets_past_the_limit_of_the_norm(codec: Codec, cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> float:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, compress=codec, max_norm=0.05)
        before = values(module)
        step_on(module, optimizer, make_batches([8, 8])[0][session.rank])
        assert optimizer.last_result.grad_norm > 0.05
        moved = [after - each for after, each in zip(values(module), before, strict=True)]
        return torch.cat([each.view(-1) for each in moved]).norm().item() / RECIPES["sgd"].options["lr"]

    for norm in cluster.train(2, program):
        assert norm == pytest.approx(0.05, rel=1e-4)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_scaled_gradients_are_unscaled_before_they_are_rounded(cluster: LocalCluster, name: str) -> None:
    """Float16 has no elements beyond 65504; the loss is scaled by 2 ** 20."""
    expected = train_rounded(
        make_module(), RECIPES["adam"], make_batches([8, 8], steps=STEPS), gradients=HALVES[torch.float16]
    )

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["adam"], name, compress=Float16(), nonfinite="raise")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        trajectory = []
        for batch in of_rank(make_batches([8, 8], steps=STEPS), session.rank):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            trajectory.append(values(module))
        return trajectory

    for found in cluster.train(2, program):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("last", ["pushed", "with the step"])
def test_each_push_of_a_context_is_encoded_and_servers_add_them_up(last: str, cluster: LocalCluster, name: str) -> None:
    parts = make_batches([8, 8], steps=3)
    module = make_module()
    optimizer = RECIPES["sgd-momentum"].make(module, {"fused": True})
    expected = []
    for batches in parts:
        found = [
            [to_bfloat16(each) for each in torch.autograd.grad(loss_of(module, batch), list(module.parameters()))]
            for batch in batches
        ]
        for parameter, *each in zip(module.parameters(), *found, strict=True):
            parameter.grad = sum(each[1:], start=each[0])
        optimizer.step()
        expected.append(values(module))

    def program(session: Cluster) -> Any:
        replica = make_module()
        model = pserver.distribute(replica, name=name, cluster=session, bucket_bytes=BUCKET_BYTES, compress=BFloat16())
        remote = pserver.optim.DistributedOptimizer(
            RECIPES["sgd-momentum"].optimizer, model.parameter_refs(), **RECIPES["sgd-momentum"].options
        )
        trajectory = []
        for batches in parts:
            with pserver.autograd.context() as context_id:
                for number, batch in enumerate(batches):
                    pserver.autograd.backward(context_id, [loss_of(replica, batch)])
                    if number == 0 or last == "pushed":
                        remote.push(context_id)
                remote.step(context_id)
            trajectory.append(values(replica))
        return trajectory

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("codec", [*LOSSY, *FED_BACK], ids=str)
def test_what_is_not_finite_is_seen_through_every_codec(codec: Codec, cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> None:
        weight = torch.nn.Parameter(torch.zeros(40, 30))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", weight)], lr=1.0, nonfinite="raise", name=name, cluster=session, compress=codec
        )
        generator = torch.Generator().manual_seed(session.rank)
        for value in (None, math.nan, math.inf, None, -math.inf, None):
            before = weight.detach().clone()
            weight.grad = torch.randn(40, 30, generator=generator)
            if session.rank and value is not None:
                weight.grad[7, 11] = value
            with nullcontext() if value is None else pytest.raises(NonFiniteGradient, match="weight"):
                optimizer.step()
            assert torch.equal(weight, before) == (value is not None)
            assert weight.isfinite().all()

    cluster.train(2, program)


def test_what_float16_makes_infinite_is_seen(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> None:
        weight = torch.nn.Parameter(torch.zeros(40))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=1.0, nonfinite="raise", name=name, cluster=session, compress=Float16()
        )
        weight.grad = torch.full((40,), 70_000.0)
        with pytest.raises(NonFiniteGradient, match="40 NaN or infinite elements"):
            optimizer.step()

    cluster.train(1, program)
