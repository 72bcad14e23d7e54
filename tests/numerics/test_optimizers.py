"""Every optimizer that servers know gives the bits of torch's own, by name, with one trainer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.core.optimizers import OPTIMIZERS
from pserver.errors import LayoutMismatch, UnsupportedOptimizer
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    BUCKET_BYTES,
    Batch,
    assert_close,
    assert_same_bits,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    trainable,
    values,
)

FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
WHOLE = {"Adafactor", "Muon"}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.05, "momentum": 0.9, "nesterov": True}],
    "Adam": [{"lr": 0.01, "amsgrad": True}, {"lr": 0.01, "maximize": True, "weight_decay": 0.1}],
    "AdamW": [{"lr": 0.01, "amsgrad": True, "maximize": True}],
    "Adagrad": [{"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.1, "weight_decay": 0.05}],
    "RMSprop": [{"lr": 0.01, "momentum": 0.9, "centered": True}, {"lr": 0.01, "alpha": 0.8}],
    "Adadelta": [{"lr": 0.5, "rho": 0.8, "weight_decay": 0.01}],
    "NAdam": [{"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}],
    "Adamax": [{"lr": 0.01, "weight_decay": 0.05}],
    "ASGD": [{"lr": 0.05, "t0": 2.0, "lambd": 0.01}],
    "Rprop": [{"lr": 0.01, "etas": (0.4, 1.3)}, {"lr": 0.01, "maximize": True}],
    "Adafactor": [{"lr": 0.05}, {"lr": 0.05, "weight_decay": 0.1, "maximize": True}],
    "Muon": [{"lr": 0.05, "momentum": 0.9, "nesterov": True}],
}
CASES = [(name, options) for name, each in OPTIONS.items() for options in each]
IDS = [f"{name}-{'-'.join(options)}" for name, options in CASES]
STEPS = 6


def test_every_known_optimizer_is_tried() -> None:
    of_torch = {name for name, entry in OPTIMIZERS.items() if entry.cls.__module__.startswith("torch.optim")}
    assert of_torch == OPTIONS.keys()


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("optimizer", "options"), CASES, ids=IDS)
def test_one_trainer_gets_the_bits_of_torch(
    optimizer: str, options: Mapping[str, Any], servers: int, cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    as_torch = {"fused": True} if optimizer in FUSED else {}
    check(cluster_of(servers), name, optimizer, options, {}, as_torch)


@pytest.mark.parametrize(("optimizer", "options"), CASES, ids=IDS)
def test_foreach_is_what_servers_use_if_asked(
    optimizer: str, options: Mapping[str, Any], cluster: LocalCluster, name: str
) -> None:
    if optimizer == "Muon":
        pytest.skip("torch's Muon has no foreach")
    check(cluster, name, optimizer, options, {"foreach": True}, {"foreach": True})


@pytest.mark.parametrize(("optimizer", "options"), CASES, ids=IDS)
def test_parameters_without_a_gradient_are_not_stepped_and_not_counted(
    optimizer: str, options: Mapping[str, Any], cluster: LocalCluster, name: str
) -> None:
    """Others take part in other steps: step counts, and state, are per parameter.

    Torch's fused SGD cannot step parameters with and without a momentum buffer in one call; one optimizer for each can.
    """
    as_torch = {"fused": True} if optimizer in FUSED else {}

    def absent(step: int, index: int) -> bool:
        return (step + index) % 3 == 0

    batches = of_rank(make_batches([8], steps=STEPS), 0)
    module = make_module()
    each = [class_of(optimizer)([parameter], **options, **as_torch) for parameter in stepped(optimizer, module)]
    expected = run_steps(each, module, batches, absent)
    (found,) = cluster.train(1, lambda session: train(session, name, optimizer, options, batches, absent))
    assert_same_bits(found, expected)


@pytest.mark.parametrize(("optimizer", "options"), CASES, ids=IDS)
def test_two_trainers_step_with_the_mean(
    optimizer: str, options: Mapping[str, Any], cluster: LocalCluster, name: str
) -> None:
    """The same arithmetic as torch on (first + second) / 2."""
    batches = make_batches([8, 8], steps=STEPS)
    module = make_module()
    local = make_local(optimizer, module, {**options, **({"fused": True} if optimizer in FUSED else {})})
    expected = []
    for first, second in batches:
        parameters = stepped(optimizer, module)
        grads = [torch.autograd.grad(loss_of(module, batch), parameters) for batch in (first, second)]
        for parameter, one, other in zip(parameters, *grads, strict=True):
            parameter.grad = one.add(other).div_(2)
        local.step()
        expected.append(values(module))

    def program(session: Cluster) -> list[list[torch.Tensor]]:
        return train(session, name, optimizer, options, of_rank(batches, session.rank))

    for found in cluster.train(2, program):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("optimizer", sorted(OPTIONS.keys() - WHOLE))
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_wide_and_complex_parameters_get_the_bits_of_torch(
    optimizer: str, dtype: torch.dtype, cluster: LocalCluster, name: str
) -> None:
    generator = torch.Generator().manual_seed(3)

    def make_parameters() -> list[torch.nn.Parameter]:
        drawn = torch.Generator().manual_seed(2)
        return [
            torch.nn.Parameter(torch.randn(shape, dtype=dtype, generator=drawn)) for shape in ((3, 77), (1,), (130,))
        ]

    gradients = [
        [torch.randn(each.shape, dtype=dtype, generator=generator) for each in make_parameters()] for _ in range(4)
    ]
    cls = getattr(torch.optim, optimizer)
    fused = {"fused": True} if optimizer in FUSED and not dtype.is_complex else {}

    def run(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> list[list[torch.Tensor]]:
        parameters = make_parameters()
        one = make(parameters)
        trajectory = []
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            one.step()
            trajectory.append([each.detach().clone() for each in parameters])
        return trajectory

    expected = run(lambda parameters: cls(parameters, lr=0.01, **fused))
    (found,) = cluster.train(
        1,
        lambda session: run(
            lambda parameters: pserver.optim.RemoteOptimizer(
                cls, parameters, lr=0.01, name=name, cluster=session, bucket_bytes=256
            )
        ),
    )
    assert_same_bits(found, expected)


def test_a_registered_optimizer_steps_whole_tensors(cluster: LocalCluster, name: str) -> None:
    check(cluster, name, NormalisedSGD, {"lr": 0.1}, {}, {})


def test_a_registered_element_wise_optimizer_is_cut(cluster: LocalCluster, name: str) -> None:
    check(cluster, name, SignSGD, {"lr": 0.01, "momentum": 0.8}, {}, {})


def test_an_unregistered_optimizer_is_refused_with_the_remedy(cluster: LocalCluster, name: str) -> None:
    class Mine(torch.optim.SGD):
        pass

    def program(session: Cluster) -> None:
        with pytest.raises(UnsupportedOptimizer, match="register_optimizer"):
            pserver.optim.RemoteOptimizer(Mine, make_module(), lr=0.1, name=name, cluster=session)

    cluster.train(1, program)


def test_lbfgs_is_refused_by_name(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> None:
        with pytest.raises(UnsupportedOptimizer, match=r"LBFGS.*closure several times"):
            pserver.optim.RemoteOptimizer(torch.optim.LBFGS, make_module(), name=name, cluster=session)

    cluster.train(1, program)


def test_another_optimizer_on_the_second_trainer_is_named(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> str:
        cls = [torch.optim.Adam, torch.optim.NAdam][session.rank]
        try:
            pserver.optim.RemoteOptimizer(cls, make_module(), name=name, cluster=session)
        except LayoutMismatch as error:
            return str(error)
        return ""

    said = "".join(cluster.train(2, program))
    assert "optimizer: expected" in said
    assert "NAdam" in said


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop", "Adafactor"])
def test_half_precision_follows_a_float32_master(
    optimizer: str, dtype: torch.dtype, cluster: LocalCluster, name: str
) -> None:
    """As torch would with a float32 copy that gets the same (half precision) gradients."""
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(17, 23, generator=generator).to(dtype) for _ in range(5)]
    start = torch.randn(17, 23, generator=generator).to(dtype)
    cls = getattr(torch.optim, optimizer)
    fused = {"fused": True} if optimizer in FUSED else {}
    master = torch.nn.Parameter(start.float())
    local = cls([master], lr=0.01, **fused)
    expected = []
    for gradient in gradients:
        master.grad = gradient.float()
        local.step()
        expected.append([master.detach().to(dtype)])

    def program(session: Cluster) -> list[list[torch.Tensor]]:
        parameter = torch.nn.Parameter(start.clone())
        remote = pserver.optim.RemoteOptimizer(cls, [parameter], lr=0.01, name=name, cluster=session)
        trajectory = []
        for gradient in gradients:
            parameter.grad = gradient.clone()
            remote.step()
            trajectory.append([parameter.detach().clone()])
        return trajectory

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


# What is trained, and how

OptimizerChoice = str | type[torch.optim.Optimizer]


@pserver.optim.register_optimizer
class NormalisedSGD(torch.optim.Optimizer):
    """Divides each gradient by its norm, so it needs whole tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["largest"] = max(state.get("largest", 0.0), parameter.grad.norm().item())
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"] * state["largest"])


class SignSGD(torch.optim.Optimizer):
    """Steps by the sign of a running mean: element by element."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(group["momentum"]).add_(parameter.grad)
                    parameter.sub_(mean.sign(), alpha=group["lr"])


pserver.optim.register_optimizer(SignSGD, elementwise=True)


def class_of(optimizer: OptimizerChoice) -> type[torch.optim.Optimizer]:
    return getattr(torch.optim, optimizer) if isinstance(optimizer, str) else optimizer


def stepped(optimizer: OptimizerChoice, module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Muon takes matrices only."""
    return [each for each in trainable(module) if optimizer != "Muon" or each.dim() == 2]


def make_local(
    optimizer: OptimizerChoice, module: torch.nn.Module, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    return class_of(optimizer)(stepped(optimizer, module), **options)


def every_gradient(step: int, index: int) -> bool:
    """No gradient is absent."""
    return False


def run_steps(
    optimizers: Sequence[torch.optim.Optimizer],
    module: torch.nn.Module,
    batches: Sequence[Batch],
    absent: Callable[[int, int], bool],
) -> list[list[torch.Tensor]]:
    trajectory = []
    for step, batch in enumerate(batches):
        module.zero_grad()
        loss_of(module, batch).backward()
        for index, parameter in enumerate(module.parameters()):
            if absent(step, index):
                parameter.grad = None
        for optimizer in optimizers:
            optimizer.step()
        trajectory.append(values(module))
    return trajectory


def train(
    session: Cluster,
    name: str,
    optimizer: OptimizerChoice,
    options: Mapping[str, Any],
    batches: Sequence[Batch],
    absent: Callable[[int, int], bool] | None = None,
) -> list[list[torch.Tensor]]:
    module = make_module()
    remote = pserver.optim.RemoteOptimizer(
        class_of(optimizer),
        stepped(optimizer, module),
        module=module,
        name=name,
        cluster=session,
        bucket_bytes=BUCKET_BYTES,
        **options,
    )
    return run_steps([remote], module, batches, absent or every_gradient)


def check(
    cluster: LocalCluster,
    name: str,
    optimizer: OptimizerChoice,
    options: Mapping[str, Any],
    remote: Mapping[str, Any],
    local: Mapping[str, Any],
) -> None:
    """Remote and local training agree to the bit, and moved the parameters."""
    batches = of_rank(make_batches([8], steps=STEPS), 0)
    module = make_module()
    expected = run_steps([make_local(optimizer, module, {**options, **local})], module, batches, every_gradient)
    (found,) = cluster.train(1, lambda session: train(session, name, optimizer, {**options, **remote}, batches))
    assert_same_bits(found, expected)
    with pytest.raises(AssertionError):
        assert_close(found[:1], found[-1:], tolerance=1e-6)
