"""Parameters that somebody else writes to between steps: refused with a remedy, since the servers' values would win."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.errors import DeadlineExceeded, InvalidRequest
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    RECIPES,
    assert_same_bits,
    in_parallel,
    loss_of,
    make_batches,
    make_module,
    of_rank,
    remote_optimizer,
    step_on,
    train_locally,
    values,
)
from tests.waiting import set_timeout


@torch.no_grad()
def scale(module: torch.nn.Module) -> None:
    module[2].weight.mul_(2.0)


@torch.no_grad()
def clamp(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.clamp_(-0.1, 0.1)


def load(module: torch.nn.Module) -> None:
    module.load_state_dict(make_module(seed=3).state_dict())


def replace_data(module: torch.nn.Module) -> None:
    module[0].bias.data = torch.ones(37)


def initialise(module: torch.nn.Module) -> None:
    torch.nn.init.normal_(module[4].weight)


CHANGES: dict[str, tuple[Callable[[torch.nn.Module], None], str]] = {
    "an in-place operation": (scale, r"2\.weight"),
    "clamping": (clamp, r"0\.weight"),
    "load_state_dict": (load, r"0\.weight"),
    "initialising anew": (initialise, r"4\.weight"),
    "other data": (replace_data, r"0\.bias"),
}


def test_writes_through_data_are_not_seen_and_the_servers_values_win(cluster: LocalCluster, name: str) -> None:
    """Torch's version counters do not count them either; DESIGN.md says so."""
    batch = of_rank(make_batches([8], steps=1), 0)[0]
    _, expected = train_locally(make_module(), RECIPES["sgd"], [batch], {"fused": True})

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        loss_of(module, batch).backward()
        module[0].bias.data.mul_(2.0)
        optimizer.step()
        return values(module)

    assert_same_bits(cluster.train(1, program), expected)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_by_name_and_training_goes_on_once_it_is_undone(
    change: str, cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8], steps=4), 0)
    _, expected = train_locally(make_module(), RECIPES["adam"], batches, {"fused": True})
    write, changed = CHANGES[change]

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["adam"], name)
        trajectory = []
        for number, batch in enumerate(batches):
            if number == 2:
                saved = {key: each.clone() for key, each in module.state_dict().items()}
                write(module)
                with pytest.raises(
                    InvalidRequest, match=rf"'{changed}' was changed on this trainer .*broadcast_parameters"
                ):
                    step_on(module, optimizer, batch)
                module.load_state_dict(saved)
            step_on(module, optimizer, batch)
            trajectory.append(values(module))
        assert optimizer.last_result.round == 4
        return trajectory

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_a_change_before_the_first_step_is_refused_too(cluster: LocalCluster, name: str) -> None:
    """A checkpoint loaded after the optimizer was made, as many scripts do."""
    batch = make_batches([8], steps=1)[0][0]

    def program(session: Cluster) -> None:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["adam"], name)
        load(module)
        with pytest.raises(InvalidRequest, match="load_state_dict"):
            step_on(module, optimizer, batch)
        with pytest.raises(InvalidRequest, match="load_state_dict"):
            optimizer.skip()
        optimizer.broadcast_parameters()
        step_on(module, optimizer, batch)
        twin = make_module(seed=3)
        _, (expected,) = train_locally(twin, RECIPES["adam"], [batch], {"fused": True})
        assert_same_bits([values(module)], [expected])

    cluster.train(1, program)


def test_an_average_of_parameters_may_be_swapped_in_and_out_between_steps(cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8], steps=5), 0)
    probe = make_batches([3], steps=1)[0][0]

    def run(module: torch.nn.Module, optimizer: Any) -> Any:
        average = torch.optim.swa_utils.AveragedModel(
            module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        found = []
        for batch in batches:
            step_on(module, optimizer, batch)
            average.update_parameters(module)
            own = [each.clone() for each in module.state_dict().values()]
            with torch.no_grad():
                for parameter, averaged in zip(module.parameters(), average.module.parameters(), strict=True):
                    parameter.copy_(averaged)
                found.append([loss_of(module, probe), *values(module)])
                for parameter, saved in zip(module.parameters(), own, strict=True):
                    parameter.copy_(saved)
            found.append(values(module))
        return found

    module = make_module()
    expected = run(module, RECIPES["sgd-momentum"].make(module, {"fused": True}))

    def program(session: Cluster) -> Any:
        replica = make_module()
        return run(replica, remote_optimizer(session, replica, RECIPES["sgd-momentum"], name))

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_swapping_is_fine_after_a_change_of_the_model_that_nobody_else_asked_for(
    cluster: LocalCluster, name: str
) -> None:
    batch = make_batches([8], steps=1)[0][0]
    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        modules = [make_module(), make_module()]
        optimizers = in_parallel(
            *(
                lambda rank=rank: remote_optimizer((one, other)[rank], modules[rank], RECIPES["adam"], name)
                for rank in (0, 1)
            )
        )
        set_timeout(one, 0.3)
        with pytest.raises(DeadlineExceeded):
            optimizers[0].broadcast_parameters()
        set_timeout(one, cluster.timeout_s)
        own = values(modules[0])
        clamp(modules[0])
        with torch.no_grad():
            for parameter, saved in zip(modules[0].parameters(), own, strict=True):
                parameter.copy_(saved)
        in_parallel(*(lambda rank=rank: step_on(modules[rank], optimizers[rank], batch) for rank in (0, 1)))
        assert_same_bits([values(modules[0])], [values(modules[1])])


def test_another_memory_format_of_the_same_values_is_no_change(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> None:
        module = torch.nn.Conv2d(3, 4, 2)
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        module.to(memory_format=torch.channels_last)
        module(torch.ones(1, 3, 4, 4)).sum().backward()
        before = values(module)
        optimizer.step()
        assert not torch.equal(module.weight, before[0])
        assert module.weight.is_contiguous(memory_format=torch.channels_last)

    cluster.train(1, program)


@pytest.mark.parametrize("cast", ["half", "double", "bfloat16"])
def test_a_module_cast_after_registration_is_refused_by_name(cast: str, cluster: LocalCluster, name: str) -> None:
    batch = make_batches([8], steps=1)[0][0]

    def program(session: Cluster) -> None:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        getattr(module, cast)()
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        dtype = str(next(module.parameters()).dtype)
        with pytest.raises(InvalidRequest, match=rf"'0\.weight' was registered as .*float32 .* now .*{dtype}"):
            optimizer.step()
        if cast == "double":  # which loses no bit
            module.float()
            step_on(module, optimizer, batch)

    cluster.train(1, program)


def test_a_change_on_one_of_two_trainers_stops_that_one_alone_and_nothing_is_sent(
    cluster: LocalCluster, name: str
) -> None:
    batch = make_batches([8], steps=1)[0][0]
    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        modules = [make_module(), make_module()]
        sync = pserver.Async()
        optimizers = [
            remote_optimizer(session, module, RECIPES["sgd"], name, sync=sync)
            for session, module in zip((one, other), modules, strict=True)
        ]
        clamp(modules[1])
        with pytest.raises(InvalidRequest, match="was changed on this trainer"):
            step_on(modules[1], optimizers[1], batch)
        step_on(modules[0], optimizers[0], batch)
        assert optimizers[0].last_result.round == 1


def test_frozen_parameters_and_buffers_are_the_trainers_own_business(cluster: LocalCluster, name: str) -> None:
    batch = make_batches([8], steps=1)[0][0]

    def program(session: Cluster) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(13, 5).requires_grad_(False), torch.nn.Linear(5, 1))
        module.register_buffer("note", torch.zeros(2))
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        with torch.no_grad():
            module[0].weight.fill_(0.5)
        module.note.fill_(3.0)
        step_on(module, optimizer, batch)
        assert torch.all(module[0].weight == 0.5)
        assert module.note.tolist() == [3.0, 3.0]

    cluster.train(1, program)


def test_contexts_check_the_same(cluster: LocalCluster, name: str) -> None:
    batch = make_batches([8], steps=1)[0][0]

    def program(session: Cluster) -> None:
        module = make_module()
        model = pserver.distribute(module, name=name, cluster=session)
        optimizer = pserver.optim.DistributedOptimizer(torch.optim.SGD, model.parameter_refs(), lr=0.1)
        load(module)
        with pserver.autograd.context() as context_id:
            pserver.autograd.backward(context_id, [loss_of(module, batch)])
            with pytest.raises(InvalidRequest, match="was changed on this trainer"):
                optimizer.step(context_id)

    cluster.train(1, program)
