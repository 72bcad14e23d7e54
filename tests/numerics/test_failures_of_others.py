"""Mistakes that parameter servers are known for."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.core.sync import SyncPolicy
from pserver.errors import DeadlineExceeded
from pserver.testing.local_cluster import LocalCluster
from pserver.transport.faults import Fault, FaultKind
from pserver.types import StepResult
from tests.numerics.training import (
    RECIPES,
    WAYS,
    assert_same_bits,
    fill_,
    in_parallel,
    loss_of,
    make_batches,
    make_module,
    model_status,
    of_rank,
    remote_optimizer,
    step_on,
    train_on_averages,
    values,
)
from tests.routes import Route
from tests.waiting import set_timeout


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trainers", [2, 3])
def test_the_loss_curve_is_that_of_all_reduce(way: str, trainers: int, cluster: LocalCluster, name: str) -> None:
    """Every trainer's loss in every step is that of a replica that steps with hand-averaged gradients."""
    recipe = RECIPES["sgd-momentum"]
    batches = make_batches([8] * trainers, steps=10)
    replicas = [make_module() for _ in range(trainers)]
    optimizers = [recipe.make(each, {"fused": True}) for each in replicas]
    curves: list[list[torch.Tensor]] = [[] for _ in replicas]
    for step in batches:
        for rank, replica in enumerate(replicas):
            optimizers[rank].zero_grad()
            loss = loss_of(replica, step[rank])
            loss.backward()
            curves[rank].append(loss.detach())
        for together in zip(*(each.parameters() for each in replicas), strict=True):
            mean = together[0].grad.clone()
            for other in together[1:]:
                mean += other.grad
            mean /= trainers
            for parameter in together:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return WAYS[way](session, make_module(), recipe, own, {}, name=name)

    for rank, (losses, trajectory) in enumerate(cluster.train(trainers, program)):
        assert_same_bits([losses], [curves[rank]])
        assert_same_bits(trajectory[-1:], [values(replicas[rank])])


def test_the_learning_rate_is_applied_once(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(100))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=0.5, name=name, cluster=session)
        found = []
        for lr in (0.5, 0.25, 0.0):
            optimizer.param_groups[0]["lr"] = lr
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            assert weight.min() == weight.max()
            found.append(weight[0].item())
        return found

    for found in cluster.train(2, program):
        assert found == [-0.5, -0.75, -0.75]


def test_what_trainers_hold_after_a_step_is_what_servers_hold(cluster: LocalCluster, name: str) -> None:
    """A step applied on the trainer as well would show when the next trainer reads the servers' values."""
    batches = make_batches([8, 8], steps=3)

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return WAYS["contexts"](session, make_module(), RECIPES["adamw"], own, {}, name=name)[1][-1]

    first, second = cluster.train(2, program)
    with cluster.connect(0, 2) as session:
        module = make_module(seed=99)
        WAYS["contexts"](session, module, RECIPES["adamw"], [], {}, name=name)
    held = values(module)
    assert_same_bits([first, second], [held, held])


@pytest.mark.parametrize("way", ["remote optimizer", "context", "pushed context"])
def test_gradients_of_the_last_step_do_not_leak_into_the_next(way: str, cluster: LocalCluster, name: str) -> None:
    """Steps with gradients 1, 0 and 4 move by exactly those; so do trainers with different ones."""

    def program(session: Cluster) -> list[float]:
        module = torch.nn.ParameterList([torch.zeros(70), torch.zeros(3)])
        if way == "remote optimizer":
            remote = pserver.optim.RemoteOptimizer(torch.optim.SGD, module, lr=1.0, name=name, cluster=session)
        else:
            model = pserver.distribute(module, name=name, cluster=session)
            distributed = pserver.optim.DistributedOptimizer(torch.optim.SGD, model.parameter_refs(), lr=1.0)
        found = []
        for size in (1.0, 0.0, 4.0):
            loss = sum(each.sum() for each in module) * (size * (1 + session.rank))
            if way == "remote optimizer":
                remote.zero_grad()
                loss.backward()
                remote.step()
            else:
                with pserver.autograd.context() as context_id:
                    pserver.autograd.backward(context_id, [loss])
                    if way == "pushed context":
                        distributed.push(context_id)
                    distributed.step(context_id)
            found.append(module[0][0].item())
        assert all(each.min() == each.max() == found[-1] for each in module)
        return found

    for found in cluster.train(2, program):
        assert found == [-1.5, -1.5, -7.5]


def test_without_zero_grad_gradients_pile_up_on_the_trainer_as_in_torch(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(9))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session)
        found = []
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()
            found.append(weight[0].item())
        return found

    assert cluster.train(1, program) == [[-1.0, -3.0, -6.0]]


def test_grad_stays_the_trainers_own_and_never_becomes_the_average(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> float:
        weight = torch.nn.Parameter(torch.zeros(9))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session)
        (weight.sum() * (session.rank + 1)).backward()
        optimizer.step()
        assert weight[0] == -1.5
        return weight.grad[0].item()

    assert cluster.train(2, program) == [1.0, 2.0]


# Several trainers, and what they must not do to each other


class Weight:
    """A weight that SGD with learning rate 1 trains with gradients of the test's choice."""

    def __init__(self, session: Cluster, name: str, sync: SyncPolicy) -> None:
        self.session, self.name = session, name
        self.value = torch.nn.Parameter(torch.zeros(70))
        self.optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [self.value], lr=1.0, name=name, sync=sync, cluster=session
        )

    def step(self, gradient: float) -> StepResult:
        self.value.grad = torch.full((70,), gradient)
        self.optimizer.step()
        assert self.optimizer.last_result is not None
        return self.optimizer.last_result


@pytest.mark.parametrize(
    "sync", [pserver.Bsp(backup_workers=1), pserver.Async(max_staleness=0)], ids=lambda sync: sync.name
)
def test_late_gradients_are_never_dropped_without_a_word(sync: SyncPolicy, cluster: LocalCluster, name: str) -> None:
    """The trainer hears that, why and how late, and the cluster counts it."""
    with cluster.connect(0, 2) as fast, cluster.connect(1, 2) as slow:
        first, second = Weight(fast, name, sync), Weight(slow, name, sync)
        first.step(1.0)
        late = second.step(64.0)
        assert not late.accepted
        assert late.reason
        assert late.staleness == 1
        assert second.optimizer.statistics().num_rejected == model_status(slow, name).num_rejected == 1
        assert second.value[0] == first.value[0] == -1.0, "none of it is in the parameters"
        assert second.step(2.0).accepted


def test_bulk_synchronous_is_strict_even_if_one_trainer_is_told_late(
    cluster: LocalCluster, name: str, route: Route
) -> None:
    """A trainer whose replies are lost holds the others up; nobody runs ahead, and no old gradient is added.

    "BSP" elsewhere lets the fast ones start the next round on parameters that the slow one has not contributed to.
    """
    batches = make_batches([8, 8], steps=4)
    expected = train_on_averages(make_module(), RECIPES["sgd-momentum"], batches, {"fused": True})
    cluster.faults.faults += [Fault(kind=FaultKind.LOSE_REPLY, method=route.method, times=5)]

    def program(session: Cluster) -> Any:
        own = of_rank(batches, session.rank)
        return WAYS["remote optimizer"](session, make_module(), RECIPES["sgd-momentum"], own, {}, name=name)[1]

    struck = cluster.faults.struck
    for found in cluster.train(2, program, transport=route.transport):
        assert_same_bits(found, expected)
    assert cluster.faults.struck - struck == 5


@pytest.mark.parametrize("trainers", [2, 4])
def test_asynchronous_training_learns(trainers: int, cluster: LocalCluster, name: str) -> None:
    """Elsewhere the loss stays where it was: gradients overwrite each other, or meet parameters of their own future."""
    steps = 30
    inputs = torch.cat([drawn for drawn, _ in make_batches([32] * trainers, steps=1)[0]])
    batches = [(part, part[:, :4].sum(dim=1, keepdim=True)) for part in inputs.split(32)]

    def loss_of_all(module: torch.nn.Module) -> float:
        return sum(loss_of(module, batch).item() for batch in batches) / trainers

    def program(session: Cluster) -> tuple[torch.nn.Module, Any]:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, sync=pserver.Async())
        for _ in range(steps):
            step_on(module, optimizer, batches[session.rank])
        return module, optimizer.statistics()

    with ExitStack() as stack:
        sessions = [stack.enter_context(cluster.connect(rank, trainers)) for rank in range(trainers)]
        runs = in_parallel(*(lambda session=session: program(session) for session in sessions))
    before = loss_of_all(make_module())
    for module, statistics in runs:
        assert loss_of_all(module) < 0.3 * before
        assert (statistics.num_accepted, statistics.num_rejected) == (steps, 0)


def test_running_statistics_of_batch_normalisation_do_not_drift_apart(cluster: LocalCluster, name: str) -> None:
    """With inputs whose means differ between trainers, every replica evaluates alike."""

    def program(session: Cluster) -> Any:
        module = torch.nn.Sequential(torch.nn.BatchNorm1d(13), torch.nn.Linear(13, 1))
        fill_(module, 0)
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        for inputs, targets in of_rank(make_batches([8, 8], steps=3), session.rank):
            step_on(module, optimizer, (inputs + 10.0 * session.rank, targets))
        module.eval()
        return values(module), module(torch.ones(2, 13))

    (first, one), (second, other) = cluster.train(2, program)
    assert_same_bits([first], [second])
    assert torch.equal(one, other)


@pytest.mark.parametrize("trainers", [2, 3])
def test_the_mean_gradient_is_clipped_and_not_each_trainers_own(
    trainers: int, cluster: LocalCluster, name: str
) -> None:
    """Gradients of 100 that cancel but for 1: the mean is within the limit, each alone is far beyond it."""

    def program(session: Cluster) -> Any:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=1.0, max_norm=1.5, name=name, cluster=session
        )
        weight.grad = torch.tensor([[100.0, -100.0, 0.0][session.rank] + 1.0])
        optimizer.step()
        return weight.item(), optimizer.last_result.grad_norm, weight.grad.item()

    for found, norm, own in cluster.train(trainers, program):
        assert found == -1.0
        assert norm == 1.0
        assert own in (101.0, -99.0, 1.0), "nobody's own gradient is touched"


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_the_loss_scale_never_differs_between_trainers(cluster: LocalCluster, name: str) -> None:
    """Infinities on changing trainers; elsewhere each scale goes its own way and some skip what others step."""
    overflows = {1: 0, 3: 2, 4: 1}
    batches = make_batches([8, 8, 8], steps=6)

    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scales = []
        for number, batch in enumerate(of_rank(batches, session.rank)):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, batch)).backward()
            if overflows.get(number) == session.rank:
                module[0].bias.grad[3] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, values(module), optimizer.statistics().num_skipped

    runs = cluster.train(3, program)
    for scales, found, num_skipped in runs:
        assert scales == [256.0, 128.0, 128.0, 64.0, 32.0, 32.0]
        assert_same_bits([found], [runs[0][1]])
        assert num_skipped == 3


def test_a_schedule_counts_rounds_and_not_the_steps_of_one_trainer(cluster: LocalCluster, name: str) -> None:
    """Two trainers that share the steps are at the same point of the schedule as one that makes them all."""

    def rates(trainers: int, model: str) -> list[float]:
        with ExitStack() as stack:
            members = []
            for rank in range(trainers):
                session = stack.enter_context(cluster.connect(rank, trainers))
                member = Weight(session, model, pserver.Async())
                scheduler = torch.optim.lr_scheduler.StepLR(member.optimizer, step_size=1, gamma=0.5)
                members.append((member, scheduler))
            for turn in range(8):
                member, scheduler = members[turn % trainers]
                member.step(1.0)
                while scheduler.last_epoch < member.optimizer.round:
                    scheduler.step()
            return [member.optimizer.param_groups[0]["lr"] for member, _ in members]

    assert rates(1, f"{name}-one") == [0.5**8]
    assert rates(2, f"{name}-two") == [0.5**7, 0.5**8], "and not 0.5**4, which local steps would give"


@pytest.mark.parametrize(
    ("sync", "free_steps"),
    [
        (pserver.Bsp(), 0),
        (pserver.Ssp(max_lag=2), 3),
        (pserver.Bsp(backup_workers=1), 5),
        (pserver.Bsp(deadline=0.05), 2),
        (pserver.Async(), 5),
    ],
    ids=repr,
)
def test_one_slow_trainer_freezes_the_others_only_if_the_policy_says_so_and_then_by_name(
    sync: SyncPolicy, free_steps: int, cluster: LocalCluster, name: str
) -> None:
    with cluster.connect(0, 2) as fast, cluster.connect(1, 2) as slow:
        weight = Weight(fast, name, sync)
        Weight(slow, name, sync)
        for number in range(free_steps):
            assert weight.step(1.0).round == number + 1
        if sync in (pserver.Bsp(), pserver.Ssp(max_lag=2)):
            set_timeout(fast, 0.3)
            with pytest.raises(DeadlineExceeded, match=r"waits for the ranks \[1\]"):
                weight.step(1.0)
            assert model_status(fast, name).waiting_for_ranks == (1,)
