"""Models of unusual shapes: complex, many tensors, one huge tensor, few buckets, none."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import pserver
from pserver.client import shard_client
from pserver.client.cluster import Cluster
from pserver.errors import UnsupportedModel
from pserver.testing.local_cluster import LocalCluster
from pserver.transport.faults import FaultKind, FaultPlan
from tests.numerics.training import RECIPES, Recipe, assert_same_bits, model_status, remote_optimizer, values
from tests.routes import ONE_MESSAGE, Route
from tests.waiting import until_shards


def parameters(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.nn.ParameterList:
    generator = torch.Generator().manual_seed(2)
    return torch.nn.ParameterList([torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes])


def train(module: torch.nn.ParameterList, optimizer: Any, steps: int = 3) -> list[list[torch.Tensor]]:
    trajectory = []
    for _ in range(steps):
        optimizer.zero_grad()
        sum(((each - number % 7) ** 2).abs().sum() for number, each in enumerate(module)).backward()
        optimizer.step()
        trajectory.append(values(module))
    return trajectory


def compare(
    cluster: LocalCluster, name: str, recipe: Recipe, make: Callable[[], torch.nn.ParameterList], **more: Any
) -> None:
    """One trainer's run has the bits of torch's optimizer, fused where that exists."""
    module = make()
    fused = all(each.is_floating_point() for each in module)
    expected = train(module, recipe.make(module, {"fused": fused}))

    def program(session: Cluster) -> Any:
        replica = make()
        return train(replica, remote_optimizer(session, replica, recipe, name, **more))

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("recipe", ["sgd-momentum", "adam"])
def test_complex_parameters_train_as_in_torch(
    recipe: str, dtype: torch.dtype, cluster: LocalCluster, name: str
) -> None:
    module = parameters((70,), (3, 5), (), dtype=dtype)
    expected = train(module, RECIPES[recipe].make(module, {}))

    def program(session: Cluster) -> Any:
        replica = parameters((70,), (3, 5), (), dtype=dtype)
        return train(replica, remote_optimizer(session, replica, RECIPES[recipe], name))

    (found,) = cluster.train(1, program)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_complex_gradients_are_averaged(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> Any:
        weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.complex64))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session)
        weight.grad = torch.full_like(weight, [2 + 2j, 4 - 6j][session.rank])
        optimizer.step()
        return weight.tolist()

    assert cluster.train(2, program) == [[-3 + 2j] * 5] * 2


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_scalar_an_empty_and_a_strided_parameter_are_the_same_on_every_trainer(
    trainers: int, cluster: LocalCluster, name: str
) -> None:
    def make() -> torch.nn.ParameterList:
        module = parameters((), (0, 4), (1,))
        module.append(torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1))
        module.append(torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last))
        return module

    def program(session: Cluster) -> Any:
        module = make()
        strides = [each.stride() for each in module]
        found = train(module, remote_optimizer(session, module, RECIPES["sgd-momentum"], name))
        assert [each.stride() for each in module] == strides
        return found

    module = make()
    expected = train(module, RECIPES["sgd-momentum"].make(module, {"foreach": False}))
    for found in cluster.train(trainers, program):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("recipe", ["sgd-momentum", "adamw"])
@pytest.mark.parametrize("large_at", [0, 3])
def test_one_tensor_larger_than_all_others_together_is_cut_over_servers(
    large_at: int, recipe: str, cluster: LocalCluster, name: str
) -> None:
    shapes = [(5,), (3, 3), (17,)]
    shapes.insert(large_at, (101, 103))
    compare(cluster, name, RECIPES[recipe], lambda: parameters(*shapes))
    with cluster.connect(0, 1) as session:
        sizes = [shard.num_bytes for shard in model_status(session, name).shards]
    assert len(sizes) == 3
    assert max(sizes) < 2 * min(sizes), "every server has a fair part"


def test_servers_that_get_no_bucket_take_no_part(cluster: LocalCluster, name: str) -> None:
    compare(cluster, name, RECIPES["adam"], lambda: parameters((3,)), bucket_bytes=0)
    with cluster.connect(0, 1) as session:
        shards = model_status(session, name).shards
        assert [shard.num_bytes for shard in shards if shard.num_bytes] == [64]
        until_shards(session.status, name, round_number=3, version=3)


@pytest.mark.parametrize("trainers", [1, 2])
def test_more_servers_than_buckets_give_the_state_too(trainers: int, cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> Any:
        module = parameters((3,))
        optimizer = remote_optimizer(session, module, RECIPES["adam"], name, max_norm=0.5, nonfinite="skip")
        train(module, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        train(module, optimizer)
        return values(module), optimizer.state_dict()["state"][0]["step"].item(), optimizer.last_result.grad_norm

    runs = cluster.train(trainers, program)
    for (found,), step, norm in runs:
        assert torch.equal(found, runs[0][0][0])
        assert (step, norm is None) == (6, False)


class CountingPlan(FaultPlan):
    """Counts the calls of every RPC, and lets all of them pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def take(self, method: str, address: str) -> FaultKind | None:
        self.calls[method] += 1
        return super().take(method, address)


def test_a_step_is_one_call_per_server_however_many_tensors_there_are(
    name: str, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without limits, and with those that servers must look at the gradient for."""
    if route is ONE_MESSAGE:
        monkeypatch.setattr(shard_client, "SMALL_BYTES", 1 << 20)
    servers, limits = 2, (None, 1.0)
    with LocalCluster(servers, timeout_s=60.0) as own:
        counted: list[Counter[str]] = []
        for num_tensors in (1, 10_000):
            own.faults = CountingPlan()
            with own.connect(0, 1, transport=route.transport) as session:
                module = torch.nn.ParameterList([torch.zeros(40_000 // num_tensors) for _ in range(num_tensors)])
                optimizer = pserver.optim.RemoteOptimizer(
                    torch.optim.SGD, module, lr=1.0, name=f"{name}-{num_tensors}", cluster=session
                )
                own.faults.calls.clear()
                for weight in module:
                    weight.grad = torch.ones_like(weight)
                for optimizer.max_norm in limits:
                    optimizer.step()
                counted.append(Counter({key: calls for key, calls in own.faults.calls.items() if key != "Renew"}))
                torch.testing.assert_close(torch.cat([*module]), torch.full((40_000,), -1.0 - 1.0 / 200.0))
    assert counted == [Counter({route.method: servers * len(limits)})] * 2


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.ReLU(),
        torch.nn.BatchNorm1d(3, affine=False),
        torch.nn.Linear(2, 2).requires_grad_(False),
        torch.nn.ParameterList([torch.empty(0), torch.empty(2, 0)]),
    ],
    ids=["nothing", "only buffers", "only frozen parameters", "only empty parameters"],
)
def test_a_model_without_parameters_is_refused_by_name(
    module: torch.nn.Module, cluster: LocalCluster, name: str
) -> None:
    """Torch's own optimizers refuse an empty list as well."""
    with cluster.connect(0, 1) as session:
        with pytest.raises((UnsupportedModel, ValueError), match=r"no parameter to train|empty parameter list"):
            pserver.optim.RemoteOptimizer(torch.optim.SGD, module, lr=1.0, name=name, cluster=session)
        assert name not in {model.name for model in session.status().models}
