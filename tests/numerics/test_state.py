"""Optimizer state: in torch's format, from and to torch, on any number of servers; and models that change."""

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.errors import DeadlineExceeded, InvalidRequest, LayoutMismatch
from pserver.testing.local_cluster import LocalCluster
from pserver.wire.tensors import to_bytes
from tests.numerics.training import (
    RECIPES,
    Batch,
    Recipe,
    assert_same_bits,
    fill_,
    in_parallel,
    make_batches,
    make_module,
    of_rank,
    remote_optimizer,
    step_on,
    train_on_averages,
    values,
)
from tests.waiting import set_timeout, until_shards

STATEFUL = ["sgd-momentum", "adam", "adamw-amsgrad", "adamw-groups"]
#: Where torch and servers may differ: how a step is computed, not what.
IMPLEMENTATION = ("fused", "foreach")

State = Mapping[str, Any]


def local(module: torch.nn.Module, recipe: str) -> torch.optim.Optimizer:
    return RECIPES[recipe].make(module, {"fused": True})


def assert_same_state(found: State, expected: State) -> None:
    """Two state dicts have the same keys, shapes and bits."""
    assert found.keys() == expected.keys()
    for ours, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[key] == theirs[key] for key in theirs if key not in IMPLEMENTATION)
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            ours = found["state"][index][key]
            assert (key, ours.dtype, ours.shape) == (key, value.dtype, value.shape)
            assert to_bytes(ours) == to_bytes(value), (index, key)


def train(module: torch.nn.Module, optimizer: Any, batches: Sequence[Batch]) -> list[list[torch.Tensor]]:
    trajectory = []
    for batch in batches:
        step_on(module, optimizer, batch)
        trajectory.append(values(module))
    return trajectory


def through_a_file(state: Any) -> Any:
    """What torch.save and torch.load, without pickled code, make of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# The format


@pytest.mark.parametrize(("servers", "bucket_bytes"), [(1, 0), (2, 1024), (3, 1024), (3, 64), (2, 1 << 20)])
@pytest.mark.parametrize("recipe", [*STATEFUL, "sgd"])
def test_the_state_is_that_of_torch_to_the_bit(
    recipe: str, servers: int, bucket_bytes: int, cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    batches = of_rank(make_batches([8], steps=2), 0)
    module = make_module()
    optimizer = local(module, recipe)
    before = copy.deepcopy(optimizer.state_dict())
    train(module, optimizer, batches)

    def program(session: Cluster) -> tuple[State, State]:
        replica = make_module()
        remote = remote_optimizer(session, replica, RECIPES[recipe], name, bucket_bytes=bucket_bytes)
        fresh = remote.state_dict()
        train(replica, remote, batches)
        return fresh, remote.state_dict()

    ((fresh, found),) = cluster_of(servers).train(1, program)
    assert_same_state(fresh, before)
    assert_same_state(found, optimizer.state_dict())
    assert_same_state(through_a_file(found), optimizer.state_dict())


def test_a_parameter_that_was_never_stepped_has_no_state_as_in_torch(cluster: LocalCluster, name: str) -> None:
    def run(module: torch.nn.ParameterList, optimizer: torch.optim.Optimizer) -> State:
        for used in ((0, 2), (0,)):
            optimizer.zero_grad()
            sum(module[index].square().sum() for index in used).backward()
            optimizer.step()
        return optimizer.state_dict()

    def make() -> torch.nn.ParameterList:
        return torch.nn.ParameterList([torch.ones(70), torch.ones(5), torch.ones(33)])

    def program(session: Cluster) -> State:
        module = make()
        return run(module, remote_optimizer(session, module, RECIPES["adam"], name))

    module = make()
    expected = run(module, local(module, "adam"))
    assert [*expected["state"]] == [0, 2]
    assert [each["step"].item() for each in expected["state"].values()] == [2, 1]
    (found,) = cluster.train(1, program)
    assert_same_state(found, expected)


def test_names_of_parameters_are_in_the_state_as_in_torch(cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8], steps=2), 0)
    module = make_module()
    optimizer = torch.optim.Adam(module.named_parameters(), lr=0.01, foreach=False)
    expected = train(module, optimizer, batches)

    def program(session: Cluster) -> Any:
        replica = make_module()
        remote = pserver.optim.RemoteOptimizer(
            torch.optim.Adam, replica.named_parameters(), lr=0.01, foreach=False, name=name, cluster=session
        )
        return train(replica, remote, batches), remote.state_dict()

    ((found, state),) = cluster.train(1, program)
    assert_same_bits(found, expected)
    assert state["param_groups"][0]["param_names"] == [key for key, _ in module.named_parameters()]
    assert_same_state(state, optimizer.state_dict())


def test_a_learning_rate_that_is_a_tensor_trains_as_in_torch(cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8], steps=3), 0)

    def run(module: torch.nn.Module, make: Callable[..., Any]) -> Any:
        optimizer = make(torch.tensor(0.5))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        found = []
        for batch in batches:
            step_on(module, optimizer, batch)
            scheduler.step()
            found.append(values(module))
        return found

    module = make_module()
    expected = run(module, lambda lr: torch.optim.SGD(module.parameters(), lr=lr, foreach=False))

    def program(session: Cluster) -> Any:
        replica = make_module()
        return run(
            replica,
            lambda lr: pserver.optim.RemoteOptimizer(
                torch.optim.SGD, replica, lr=lr, foreach=False, name=name, cluster=session
            ),
        )

    assert_same_bits(cluster.train(1, program)[0], expected)


def test_asking_for_the_state_disturbs_nothing_and_all_trainers_get_the_same(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 8])
    expected = train_on_averages(make_module(), RECIPES["adam"], batches, {"fused": True})

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["adam"], name)
        trajectory = []
        for batch in of_rank(batches, session.rank):
            optimizer.state_dict()
            step_on(module, optimizer, batch)
            trajectory.append(values(module))
        assert not optimizer.state
        return trajectory, optimizer.state_dict()

    (found, state), (other, same) = cluster.train(2, program)
    assert_same_bits(found, expected)
    assert_same_bits(other, expected)
    assert_same_state(state, same)


# Loading


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("recipe", STATEFUL)
@pytest.mark.parametrize("way", ["remote to remote", "torch to remote", "remote to torch"])
def test_training_goes_on_from_a_checkpoint_with_the_bits_of_an_uninterrupted_run(
    way: str, recipe: str, servers: int, cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    batches = of_rank(make_batches([8], steps=6), 0)
    module = make_module()
    expected = train(module, local(module, recipe), batches)
    saves, _, loads = way.split()

    def program(session: Cluster) -> Any:
        def make(kind: str, replica: torch.nn.Module) -> Any:
            if kind == "torch":
                return local(replica, recipe)
            return remote_optimizer(session, replica, RECIPES[recipe], f"{name}-{len(trajectory)}")

        trajectory: list[list[torch.Tensor]] = []
        first = make_module()
        optimizer = make(saves, first)
        trajectory += train(first, optimizer, batches[:3])
        saved = through_a_file({"model": first.state_dict(), "optimizer": optimizer.state_dict()})

        second = make_module(seed=8)
        optimizer = make(loads, second)
        second.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for group in optimizer.param_groups if loads == "torch" else ():
            group["fused"] = True  # the checkpoint says what is computed, not how
        trajectory += train(second, optimizer, batches[3:])
        return trajectory

    (found,) = cluster_of(servers).train(1, program)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("source", ["remote", "torch"])
def test_several_trainers_go_on_from_a_checkpoint_together(source: str, cluster: LocalCluster, name: str) -> None:
    """The lowest rank's checkpoint counts; rounds count on."""
    batches = make_batches([8, 8], steps=5)
    expected = train_on_averages(make_module(), RECIPES["adam"], batches, {"fused": True})
    module = make_module()
    plain = local(module, "adam")
    train_on_averages_with(plain, module, batches[:2])

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        replica = make_module()
        optimizer = remote_optimizer(session, replica, RECIPES["adam"], name)
        train(replica, optimizer, own[:2])
        saved = copy.deepcopy(replica.state_dict()), optimizer.state_dict()
        train(replica, optimizer, own[:1])  # goes astray, and comes back
        if source == "torch":
            saved = module.state_dict(), plain.state_dict()
        if session.rank:
            saved = make_module(seed=7).state_dict(), saved[1]
        replica.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert optimizer.round == 3
        found = [values(replica), *train(replica, optimizer, own[2:])]
        assert optimizer.last_result.round == 6
        until_shards(session.status, name, round_number=6, version=6)
        return found

    for found in cluster.train(2, program):
        assert_same_bits(found, expected[1:])


def train_on_averages_with(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, batches: Sequence[Sequence[Batch]]
) -> None:
    for ranks in batches:
        optimizer.zero_grad()
        for inputs, targets in ranks:
            ((module(inputs) - targets).square().mean()).backward()
        for parameter in module.parameters():
            parameter.grad /= len(ranks)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["sgd", "sgd-momentum", "adamw"])
def test_parameters_in_half_precision_keep_their_float32_masters_over_a_checkpoint(
    recipe: str, dtype: torch.dtype, cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8], steps=6, dtype=dtype), 0)

    def program(session: Cluster) -> Any:
        whole = make_module(dtype=dtype)
        expected = train(whole, remote_optimizer(session, whole, RECIPES[recipe], f"{name}-whole"), batches)

        first = make_module(dtype=dtype)
        optimizer = remote_optimizer(session, first, RECIPES[recipe], f"{name}-first")
        train(first, optimizer, batches[:3])
        saved = through_a_file((first.state_dict(), optimizer.state_dict()))
        second = make_module(seed=8, dtype=dtype)
        optimizer = remote_optimizer(session, second, RECIPES[recipe], f"{name}-second")
        second.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return expected, train(second, optimizer, batches[3:]), saved[1]["state"]

    ((expected, found, state),) = cluster.train(1, program)
    assert_same_bits(found, expected[3:])
    masters = [each["master_param"] for each in state.values()]
    assert len(masters) == 6
    assert all(master.dtype == torch.float32 for master in masters)
    assert any(not torch.equal(master, master.to(dtype).float()) for master in masters), "more than half precision"
    for master, parameter in zip(masters, expected[2], strict=True):
        assert torch.equal(master.to(dtype), parameter)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["broadcast_parameters", "load_state_dict"])
def test_values_written_here_count_and_not_the_masters_of_what_was_there_before(
    way: str, dtype: torch.dtype, cluster: LocalCluster, name: str
) -> None:
    """In half precision too: only the masters of parameters that are as they were keep their precision."""
    batch = make_batches([8], steps=1, dtype=dtype)[0][0]

    def program(session: Cluster) -> None:
        module = make_module(dtype=dtype)
        optimizer = remote_optimizer(session, module, RECIPES["sgd-momentum"], name)
        step_on(module, optimizer, batch)
        before = optimizer.state_dict()
        with torch.no_grad():
            module[0].weight[3].fill_(0.25)
        written = values(module)
        optimizer.broadcast_parameters() if way == "broadcast_parameters" else optimizer.load_state_dict(before)
        assert_same_bits([values(module)], [written])
        after = optimizer.state_dict()
        masters, old = after["state"][0]["master_param"], before["state"][0]["master_param"]
        assert torch.all(masters[3] == 0.25)
        assert torch.equal(masters[4:], old[4:])
        assert torch.equal(after["state"][0]["momentum_buffer"], before["state"][0]["momentum_buffer"])

    cluster.train(1, program)


def test_options_of_the_checkpoint_count(cluster: LocalCluster, name: str) -> None:
    batches = of_rank(make_batches([8], steps=4), 0)
    module = make_module()
    optimizer = Recipe(optimizer=torch.optim.Adam, options={"lr": 0.03, "betas": (0.5, 0.8)}).make(
        module, {"fused": True}
    )
    train(module, optimizer, batches[:2])
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    expected = train(module, optimizer, batches[2:])

    def program(session: Cluster) -> Any:
        replica = make_module()
        remote = remote_optimizer(session, replica, Recipe(optimizer=torch.optim.Adam, options={"lr": 7.0}), name)
        replica.load_state_dict(saved[0])
        remote.load_state_dict(saved[1])
        assert remote.param_groups[0]["lr"] == 0.03
        return train(replica, remote, batches[2:])

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_a_state_that_does_not_fit_is_refused_as_torch_does_and_training_goes_on(
    cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8], steps=4), 0)
    module = make_module()
    expected = train(module, local(module, "adam"), batches)
    grouped = make_module()
    other = local(grouped, "adamw-groups")

    def program(session: Cluster) -> Any:
        replica = make_module()
        optimizer = remote_optimizer(session, replica, RECIPES["adam"], name)
        found = train(replica, optimizer, batches[:2])
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict(other.state_dict())
        short = optimizer.state_dict()
        short["state"][0]["exp_avg"] = torch.zeros(3)
        with pytest.raises(InvalidRequest, match="exp_avg"):
            optimizer.load_state_dict(short)
        return found + train(replica, optimizer, batches[2:])

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


def test_hooks_of_torch_run(cluster: LocalCluster, name: str) -> None:
    batch = make_batches([8], steps=1)[0][0]

    def run(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        ran: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: ran.append("before step"))
        optimizer.register_step_post_hook(lambda *_: ran.append("after step"))
        optimizer.register_state_dict_pre_hook(lambda *_: ran.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 7})

        def prepare(_: torch.optim.Optimizer, state: Any) -> Any:
            ran.append(f"before loading {state.pop('extra')}")
            groups = [{**group, "lr": 0.5} for group in state["param_groups"]]
            return {**state, "param_groups": groups}

        optimizer.register_load_state_dict_pre_hook(prepare)
        optimizer.register_load_state_dict_post_hook(lambda _: ran.append("after loading"))
        step_on(module, optimizer, batch)
        optimizer.load_state_dict(optimizer.state_dict())
        step_on(module, optimizer, batch)
        return ran, values(module)

    module = make_module()
    ran, expected = run(module, local(module, "adam"))

    def program(session: Cluster) -> Any:
        replica = make_module()
        return run(replica, remote_optimizer(session, replica, RECIPES["adam"], name))

    ((found_ran, found),) = cluster.train(1, program)
    assert found_ran == ran
    assert_same_bits([found], [expected])


def test_a_hook_before_loading_may_replace_the_state_of_half_precision_parameters(
    cluster: LocalCluster, name: str
) -> None:
    def program(session: Cluster) -> tuple[float, float]:
        weight = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=0.5, momentum=0.5, name=name, cluster=session
        )
        weight.grad = torch.ones_like(weight)
        optimizer.step()

        def double(_: torch.optim.Optimizer, state: Any) -> Any:
            state = copy.deepcopy(state)
            state["state"][0]["momentum_buffer"] *= 2
            return state

        optimizer.register_load_state_dict_pre_hook(double)
        optimizer.load_state_dict(optimizer.state_dict())
        return optimizer.state_dict()["state"][0]["momentum_buffer"].tolist()

    assert cluster.train(1, program) == [[2.0] * 5]


# Models that change


class TwoLayers(torch.nn.Module):
    """The first layer is frozen at the beginning."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(13, 21), torch.nn.Linear(21, 1)
        fill_(self, seed)
        self.first.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs).tanh())


def unfreeze(module: TwoLayers, optimizer: Any) -> None:
    module.first.requires_grad_(True)
    optimizer.add_param_group({"params": list(module.first.parameters()), "lr": 0.003})


@pytest.mark.parametrize("recipe", ["sgd-momentum", "adam"])
def test_a_group_added_while_training_equals_torch_and_the_others_keep_their_state(
    recipe: str, cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8], steps=6), 0)

    def run(module: TwoLayers, optimizer: Any) -> Any:
        trajectory = train(module, optimizer, batches[:3])
        unfreeze(module, optimizer)
        trajectory += train(module, optimizer, batches[3:])
        return trajectory, optimizer.state_dict()

    module = TwoLayers()
    expected, state = run(module, local(module, recipe))
    assert not torch.equal(expected[3][0], expected[2][0])

    def program(session: Cluster) -> Any:
        replica = TwoLayers()
        return run(replica, remote_optimizer(session, replica, RECIPES[recipe], name))

    ((found, found_state),) = cluster.train(1, program)
    assert_same_bits(found, expected)
    assert_same_state(found_state, state)


def test_two_trainers_add_a_group_together(cluster: LocalCluster, name: str) -> None:
    batches = make_batches([8, 8], steps=4)
    module = TwoLayers()
    optimizer = local(module, "adam")
    train_on_averages_with_some(optimizer, module, batches[:2])
    unfreeze(module, optimizer)
    train_on_averages_with_some(optimizer, module, batches[2:])

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        replica = TwoLayers()
        remote = remote_optimizer(session, replica, RECIPES["adam"], name)
        train(replica, remote, own[:2])
        unfreeze(replica, remote)
        train(replica, remote, own[2:])
        return values(replica)

    first, second = cluster.train(2, program)
    assert_same_bits([first], [second])
    for ours, theirs in zip(first, values(module), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def train_on_averages_with_some(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, batches: Sequence[Sequence[Batch]]
) -> None:
    for ranks in batches:
        optimizer.zero_grad()
        for inputs, targets in ranks:
            ((module(inputs) - targets).square().mean() / len(ranks)).backward()
        optimizer.step()


def test_a_group_of_parameters_that_the_module_lacks_is_refused_and_training_goes_on(
    cluster: LocalCluster, name: str
) -> None:
    batches = of_rank(make_batches([8], steps=4), 0)
    module = TwoLayers()
    expected = train(module, local(module, "adam"), batches)

    def program(session: Cluster) -> Any:
        replica = TwoLayers()
        optimizer = remote_optimizer(session, replica, RECIPES["adam"], name)
        found = train(replica, optimizer, batches[:2])
        with pytest.raises(InvalidRequest, match="the module has only 2"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        assert len(optimizer.param_groups) == 1
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [replica.last.weight]})
        return found + train(replica, optimizer, batches[2:])

    (found,) = cluster.train(1, program)
    assert_same_bits(found, expected)


CHANGES: dict[str, Callable[[TwoLayers, Any], None]] = {
    "add_param_group": unfreeze,
    "load_state_dict": lambda module, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "broadcast_parameters": lambda module, optimizer: optimizer.broadcast_parameters(),
}


@pytest.mark.parametrize("changes", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_only_one_of_two_trainers_asks_for_ends_in_time_and_names_the_other(
    change: str, changes: int, cluster: LocalCluster, name: str
) -> None:
    """Afterwards both train on with what was."""
    batches = make_batches([8, 8], steps=4)
    expected = []
    module = TwoLayers()
    optimizer = local(module, "adam")
    for ranks in batches:
        train_on_averages_with_some(optimizer, module, [ranks])
        expected.append(values(module))

    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        sessions = (one, other)
        modules = [TwoLayers(), TwoLayers()]
        remotes = in_parallel(
            *(
                lambda rank=rank: remote_optimizer(sessions[rank], modules[rank], RECIPES["adam"], name)
                for rank in (0, 1)
            )
        )

        def step_both(ranks: Sequence[Batch]) -> list[list[torch.Tensor]]:
            in_parallel(*(lambda rank=rank: step_on(modules[rank], remotes[rank], ranks[rank]) for rank in (0, 1)))
            return [values(each) for each in modules]

        found = [step_both(batches[0])]
        set_timeout(sessions[changes], 0.3)
        with pytest.raises(DeadlineExceeded, match=rf"ranks \[{1 - changes}\]"):
            CHANGES[change](modules[changes], remotes[changes])
        set_timeout(sessions[changes], cluster.timeout_s)
        modules[changes].first.requires_grad_(False)
        assert len(remotes[changes].param_groups) == 1
        found += [step_both(ranks) for ranks in batches[1:]]

    for step, both in enumerate(found):
        assert_same_bits([both[0]], [both[1]])
        for ours, theirs in zip(both[0], expected[step], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_change_that_was_given_up_does_not_count_when_the_other_trainer_asks_for_it(
    cluster: LocalCluster, name: str
) -> None:
    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        modules = [TwoLayers(), TwoLayers()]
        remotes = in_parallel(
            lambda: remote_optimizer(one, modules[0], RECIPES["adam"], name),
            lambda: remote_optimizer(other, modules[1], RECIPES["adam"], name),
        )
        for session, remote, absent in ((one, remotes[0], 1), (other, remotes[1], 0)):
            set_timeout(session, 0.3)
            with pytest.raises(DeadlineExceeded, match=rf"ranks \[{absent}\]"):
                remote.broadcast_parameters()
            set_timeout(session, cluster.timeout_s)


def test_trainers_that_ask_for_different_changes_are_told_the_first_difference(
    cluster: LocalCluster, name: str
) -> None:
    def change(session: Cluster) -> str:
        module = TwoLayers()
        optimizer = remote_optimizer(session, module, RECIPES["adam"], name)
        set_timeout(session, 1.0)
        module.first.requires_grad_(True)
        added = list(module.first.parameters()) if session.rank else [module.first.weight]
        with pytest.raises((LayoutMismatch, DeadlineExceeded)) as raised:
            optimizer.add_param_group({"params": added})
        return str(raised.value)

    with cluster.connect(0, 2) as one, cluster.connect(1, 2) as other:
        said = in_parallel(lambda: change(one), lambda: change(other))
    assert any("'first.bias'" in each and "in another way" in each for each in said), said


def test_broadcast_parameters_makes_the_values_of_the_lowest_rank_everybodys_and_keeps_the_state(
    cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8, 8], steps=4)
    module = make_module()
    optimizer = local(module, "adam")
    train_on_averages_with_some(optimizer, module, batches[:2])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.2, 0.2)
    clamped = values(module)
    train_on_averages_with_some(optimizer, module, batches[2:])

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        replica = make_module()
        remote = remote_optimizer(session, replica, RECIPES["adam"], name)
        train(replica, remote, own[:2])
        with torch.no_grad():
            for parameter in replica.parameters():
                parameter.clamp_(-0.2, 0.2) if session.rank == 0 else parameter.fill_(9.0)
        remote.broadcast_parameters()
        together = values(replica)
        train(replica, remote, own[2:])
        return together, values(replica)

    for together, last in cluster.train(2, program):
        for ours, theirs in zip([*together, *last], [*clamped, *values(module)], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_trainer_that_joins_after_a_change_gets_the_changed_model(cluster: LocalCluster, name: str) -> None:
    batch = make_batches([8], steps=1)[0][0]
    with cluster.connect(0, 1) as early, cluster.connect(1, 1) as late:
        module, newcomer = TwoLayers(), TwoLayers(seed=5)
        optimizer = remote_optimizer(early, module, RECIPES["adam"], name)
        step_on(module, optimizer, batch)
        unfreeze(module, optimizer)
        step_on(module, optimizer, batch)
        with pytest.raises(LayoutMismatch, match=r"'first\.weight'"):
            remote_optimizer(late, newcomer, RECIPES["adam"], name)
        newcomer.first.requires_grad_(True)
        groups = [
            {"params": list(newcomer.last.parameters())},
            {"params": list(newcomer.first.parameters()), "lr": 0.003},
        ]
        joined = pserver.optim.RemoteOptimizer(
            torch.optim.Adam, groups, lr=0.01, module=newcomer, name=name, cluster=late, bucket_bytes=1024
        )
        assert joined.round == 2
        assert_same_bits([values(newcomer)], [values(module)])
        in_parallel(lambda: step_on(module, optimizer, batch), lambda: step_on(newcomer, joined, batch))
        assert_same_bits([values(newcomer)], [values(module)])
        assert_same_state(joined.state_dict(), optimizer.state_dict())
