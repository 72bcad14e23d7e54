"""Parameters and buffers of every kind: missing gradients, frozen, tied, low precision, tiny, and buffers."""

from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    BUCKET_BYTES,
    IMPLEMENTATIONS,
    RECIPES,
    WAYS,
    Batch,
    Recipe,
    assert_close,
    assert_same_bits,
    fill_,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    train_locally,
    values,
)
from tests.waiting import until_shards

Wait = Callable[[Event], None]


class Branches(torch.nn.Module):
    """Four parameters, of which a forward uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.empty(size) for size in (50, 7, 33, 100)])
        fill_(self, 3)

    def forward(self, used: Sequence[int]) -> torch.Tensor:
        return sum(((self.parts[index] - index) ** 2).sum() for index in used)  # type: ignore[return-value]


#: Parameters used in each step.
EVERY_FIRST = [(0, 1, 2, 3), (0, 2), (0, 1, 2), (3,), (0, 1, 2, 3)]
SOME_FIRST = [(0, 2), (1, 2), (), (0, 1, 2, 3), (1,)]


def steps_of_branches(optimizer: torch.optim.Optimizer, module: Branches, uses: Sequence[Sequence[int]]) -> Any:
    trajectory = []
    for used in uses:
        optimizer.zero_grad()
        if used:
            module(used).backward()
        optimizer.step()
        trajectory.append(values(module))
    return trajectory


def remote(cluster: Cluster, module: torch.nn.Module, recipe: Recipe, name: str, **more: Any) -> Any:
    return pserver.optim.RemoteOptimizer(
        recipe.optimizer, module, name=name, cluster=cluster, bucket_bytes=BUCKET_BYTES, **recipe.options, **more
    )


# Missing gradients


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("recipe", "uses"),
    [
        ("sgd", SOME_FIRST),
        ("sgd-weight-decay", EVERY_FIRST),
        ("sgd-dampening", EVERY_FIRST),
        ("adam", EVERY_FIRST),
        ("adam", SOME_FIRST),
        ("adamw-amsgrad", SOME_FIRST),
    ],
)
def test_a_parameter_without_a_gradient_is_not_stepped_and_counts_no_step(
    recipe: str, uses: Sequence[Sequence[int]], implementation: str, cluster: LocalCluster, name: str
) -> None:
    asked, same = IMPLEMENTATIONS[implementation]
    module = Branches()
    expected = steps_of_branches(RECIPES[recipe].make(module, same), module, uses)

    def program(session: Cluster) -> Any:
        replica = Branches()
        return steps_of_branches(remote(session, replica, RECIPES[recipe], name, **asked), replica, uses)

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_a_first_gradient_that_comes_late_is_stepped_with_momentum(cluster: LocalCluster, name: str) -> None:
    """Torch's fused SGD cannot do this (it refuses a missing momentum buffer), torch's default can."""
    module = Branches()
    expected = steps_of_branches(RECIPES["sgd-momentum"].make(module, {}), module, SOME_FIRST)

    def program(session: Cluster) -> Any:
        replica = Branches()
        return steps_of_branches(remote(session, replica, RECIPES["sgd-momentum"], name), replica, SOME_FIRST)

    (found,) = cluster.train(1, program)
    assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("recipe", ["sgd", "adam"])
def test_a_gradient_that_only_one_trainer_has_is_averaged_with_zero(
    recipe: str, cluster: LocalCluster, name: str
) -> None:
    uses = [[(0, 1), (0, 2)], [(0, 2), (2,)], [(1,), (1,)]]
    module = Branches()
    optimizer = RECIPES[recipe].make(module, {"fused": True})
    expected = []
    for ranks in uses:
        optimizer.zero_grad()
        (sum(module(used) for used in ranks) / len(ranks)).backward()
        optimizer.step()
        expected.append(values(module))

    def program(session: Cluster) -> Any:
        replica = Branches()
        own = [ranks[session.rank] for ranks in uses]
        return steps_of_branches(remote(session, replica, RECIPES[recipe], name), replica, own)

    for found in cluster.train(2, program):
        assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_without_samples_contributes_nothing(way: str, cluster: LocalCluster, name: str) -> None:
    batches = make_batches([6, 0])
    _, expected = train_locally(make_module(), RECIPES["adam"], of_rank(batches, 0), {"fused": True})

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return WAYS[way](session, make_module(), RECIPES["adam"], own, {}, name=name, weighted=True)[1]

    for found in cluster.train(2, program):
        assert_same_bits(found, expected)


def test_a_round_without_samples_steps_nothing_and_counts_no_version(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        module = make_module()
        optimizer = remote(session, module, RECIPES["sgd-weight-decay"], name)
        before = values(module)
        loss_of(module, make_batches([4])[0][0]).backward()
        optimizer.step(samples=0)
        until_shards(session.status, name, round_number=1, version=0)
        return before, values(module)

    ((before, after),) = cluster.train(1, program)
    assert_same_bits([after], [before])


# What is not trained


class Mixed(torch.nn.Module):
    """A frozen layer, batch normalisation, and a trained layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(13, 9).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(9)
        self.last = torch.nn.Linear(9, 1)
        fill_(self, seed)
        self.norm.running_mean.fill_(seed)
        self.norm.running_var.fill_(seed + 0.5)
        self.norm.num_batches_tracked.fill_(seed)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.frozen(inputs)))


@pytest.mark.parametrize("way", WAYS)
def test_frozen_parameters_and_buffers_come_from_the_first_trainer(way: str, cluster: LocalCluster, name: str) -> None:
    first_is_registered = Event()

    def program(session: Cluster) -> list[torch.Tensor]:
        module = Mixed(seed=session.rank + 1)
        if session.rank == 1:
            assert first_is_registered.wait(10)
        WAYS[way](session, module, RECIPES["adamw"], [], {}, name=name)
        first_is_registered.set()
        return values(module)

    first, second = cluster.train(2, program)
    assert_same_bits([first], [values(Mixed(seed=1))])
    assert_same_bits([second], [first])


@pytest.mark.parametrize("way", WAYS)
def test_frozen_parameters_never_move_and_local_buffers_stay_the_trainers_own(
    way: str, cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8, 5])
    module = Mixed(seed=1)
    local: list[torch.nn.Module] = [Mixed(seed=1), Mixed(seed=1)]

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return WAYS[way](session, Mixed(seed=1), RECIPES["adamw"], own, {}, name=name, buffers="local")[1]

    runs = cluster.train(2, program)
    optimizers = [RECIPES["adamw"].make(each, {"fused": True}) for each in local]
    for step, ranks in enumerate(batches):
        gradients = []
        for replica, batch in zip(local, ranks, strict=True):
            replica.zero_grad()
            loss_of(replica, batch).backward()
            gradients.append([each.grad for each in replica.parameters() if each.requires_grad])
        mean = [(one + other) / 2 for one, other in zip(*gradients, strict=True)]
        for rank, (replica, optimizer) in enumerate(zip(local, optimizers, strict=True)):
            trained = [each for each in replica.parameters() if each.requires_grad]
            for parameter, gradient in zip(trained, mean, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            assert_same_bits([runs[rank][step]], [values(replica)])
    assert torch.equal(local[0].frozen.weight, module.frozen.weight)


class Tied(torch.nn.Module):
    """An embedding whose weights are those of the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(13, 13, bias=False)
        self.second = torch.nn.Linear(13, 13)
        self.second.weight = self.first.weight
        fill_(self, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh()).mean(dim=1, keepdim=True)


@pytest.mark.parametrize("way", WAYS)
def test_tied_weights_are_one_parameter(way: str, cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8]), 0)
    losses, expected = train_locally(Tied(), RECIPES["sgd-momentum"], batches, {"fused": True})

    def program(session: Cluster) -> Any:
        module = Tied()
        run = WAYS[way](session, module, RECIPES["sgd-momentum"], batches, {}, name=name)
        return run, module.second.weight is module.first.weight

    ((((found_losses, found), still_tied)),) = cluster.train(1, program)
    assert still_tied
    assert_same_bits(found, expected)
    assert torch.equal(torch.stack(found_losses), torch.stack(losses))


# Element types and sizes


def train_with_masters(module: torch.nn.Module, recipe: Recipe, batches: Sequence[Sequence[Batch]]) -> Any:
    """Gradients and parameters in the module's own dtype, sums and steps in float32, as servers do."""
    parameters = list(module.parameters())
    masters = [torch.nn.Parameter(each.detach().float()) for each in parameters]
    optimizer = recipe.optimizer(masters, **recipe.options, fused=True)
    trajectory = []
    for ranks in batches:
        gradients = [torch.autograd.grad(loss_of(module, batch), parameters) for batch in ranks]
        for master, *own in zip(masters, *gradients, strict=True):
            total = own[0].float()
            for gradient in own[1:]:
                total += gradient.float()
            master.grad = total / len(ranks)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        trajectory.append(values(module))
    return trajectory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["sgd-momentum", "adamw"])
@pytest.mark.parametrize("trainers", [1, 3])
def test_low_precision_parameters_are_stepped_on_float32_masters(
    trainers: int, recipe: str, dtype: torch.dtype, cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8] * trainers, steps=6, dtype=dtype)
    expected = train_with_masters(make_module(dtype=dtype), RECIPES[recipe], batches)

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return WAYS["contexts"](session, make_module(dtype=dtype), RECIPES[recipe], own, {}, name=name)[1]

    for found in cluster.train(trainers, program):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_updates_too_small_for_low_precision_add_up_in_the_master(
    dtype: torch.dtype, cluster: LocalCluster, name: str
) -> None:
    steps, lr = 64, 2.0**-14

    def program(session: Cluster) -> float:
        weight = torch.nn.Parameter(torch.ones(5, dtype=dtype))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=lr, name=name, cluster=session)
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight[0].item()

    assert torch.tensor(1.0, dtype=dtype) - lr == 1.0, "one update alone is lost in this dtype"
    assert cluster.train(1, program) == [1.0 - steps * lr]


class Odd(torch.nn.Module):
    """Scalars, empty tensors, one element, and several element types in one model."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(), (0,), (3, 0, 2), (1,), (65,), ()]
        dtypes = [torch.float32, torch.float32, torch.float64, torch.float64, torch.float32, torch.float64]
        pairs = zip(shapes, dtypes, strict=True)
        self.parts = torch.nn.ParameterList([torch.empty(shape, dtype=dtype) for shape, dtype in pairs])
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("nothing", torch.empty(0, dtype=torch.int64))
        self.register_buffer("phase", torch.tensor([1 + 2j, -3j]))
        fill_(self, 9)

    def forward(self) -> torch.Tensor:
        return sum(((each.double() - 1) ** 2).sum() for each in self.parts)  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", ["sgd-weight-decay", "adam"])
def test_scalars_empty_tensors_and_mixed_types_train_like_torch(recipe: str, cluster: LocalCluster, name: str) -> None:
    def run(module: Odd, optimizer: torch.optim.Optimizer) -> Any:
        trajectory = []
        for _ in range(4):
            optimizer.zero_grad()
            module().backward()
            optimizer.step()
            trajectory.append(values(module))
        return trajectory

    def program(session: Cluster) -> Any:
        replica = Odd()
        return run(replica, remote(session, replica, RECIPES[recipe], name))

    module = Odd()
    expected = run(module, RECIPES[recipe].make(module, {"fused": True}))
    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_double_precision_is_kept(way: str, cluster: LocalCluster, name: str) -> None:
    dtype = torch.float64
    batches = of_rank(make_batches([8], dtype=dtype), 0)
    _, expected = train_locally(make_module(dtype=dtype), RECIPES["adamw"], batches, {"fused": True})

    def program(session: Cluster) -> Any:
        return WAYS[way](session, make_module(dtype=dtype), RECIPES["adamw"], batches, {}, name=name)[1]

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_parameters_that_are_not_contiguous_train_like_torch(cluster: LocalCluster, name: str) -> None:
    def make() -> torch.nn.Module:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.linspace(-1, 1, 35).reshape(5, 7).t())
        module.image = torch.nn.Parameter(
            torch.linspace(0, 1, 48).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)
        )
        return module

    def run(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        trajectory = []
        for _ in range(3):
            optimizer.zero_grad()
            (module.weight.pow(3).sum() + module.image.sin().sum()).backward()
            optimizer.step()
            trajectory.append(values(module))
        return trajectory

    def program(session: Cluster) -> Any:
        replica = make()
        return run(replica, remote(session, replica, RECIPES["adam"], name, foreach=False))

    module = make()
    expected = run(module, RECIPES["adam"].make(module, {"foreach": False}))
    (found,) = cluster.train(1, program)
    assert_close(found, expected, 1e-6)
