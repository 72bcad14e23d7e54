"""Steps that return before their values are there: nobody sees old ones through the module, and nothing is lost."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.core.sync import SyncPolicy
from pserver.errors import InvalidRequest, NonFiniteGradient, PserverError, RoundFailed
from pserver.testing.local_cluster import LocalCluster
from tests.numerics.overlapping import MODES, HeldReplies, holding
from tests.numerics.training import (
    RECIPES,
    Batch,
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
from tests.routes import STREAM, Route

LIMIT_S = 10.0
#: Of the buckets of `make_module` in order, so many hold its first layer; the others hold a part of the second, too.
FIRST_LAYER = 3
Optimizer = pserver.optim.RemoteOptimizer


@pytest.fixture
def batches() -> list[Batch]:
    return of_rank(make_batches([8], steps=4), 0)


@pytest.fixture
def expected(batches: list[Batch]) -> list[list[torch.Tensor]]:
    """What torch in one process has after each step."""
    return train_locally(make_module(), RECIPES["sgd-momentum"], batches, {"fused": True})[1]


@pytest.fixture
def replies(cluster_of: Callable[[int], LocalCluster]) -> Iterator[HeldReplies]:
    """Of a cluster of one server, whose steps are streams."""
    with STREAM.taken(), holding(cluster_of(1)) as found:
        yield found


@pytest.fixture
def session(replies: HeldReplies, cluster_of: Callable[[int], LocalCluster]) -> Iterator[Cluster]:
    """The only trainer of that cluster."""
    with cluster_of(1).connect(transport="grpc") as found:
        yield found
        replies.release()


def late_optimizer(session: Cluster, module: torch.nn.Module, name: str, **more: Any) -> Optimizer:
    return remote_optimizer(session, module, RECIPES["sgd-momentum"], name, **{"late_pull": True, **more})


def as_they_are(module: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the parameters as they are held, without looking at them through the module."""
    return [each.detach().clone() for part in module for each in dict.values(part.__dict__["_parameters"])]


# Who looks sees new values

LOOKS: dict[str, Callable[[Any], list[torch.Tensor]]] = {
    "attribute": lambda module: [getattr(module[index], name) for index in (0, 2, 4) for name in ("weight", "bias")],
    "state_dict": lambda module: list(module.state_dict().values()),
    "parameters": lambda module: list(module.parameters()),
    "named_parameters": lambda module: [each for _, each in module.named_parameters()],
    "deepcopy": lambda module: list(copy.deepcopy(module).parameters()),
    "pickled": lambda module: list(pickle.loads(pickle.dumps(module)).parameters()),
    "pickled state": lambda module: list(pickle.loads(pickle.dumps(module.state_dict())).values()),
    "saved": lambda module: list(saved_and_loaded(module.state_dict()).values()),
    "a part": lambda module: [each for part in module for each in part.parameters()],
    "vector": lambda module: list(
        torch.nn.utils.parameters_to_vector(module.parameters()).split([each.numel() for each in module.parameters()])
    ),
}


def saved_and_loaded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, torch.Tensor] = torch.load(file)
    return found


@pytest.mark.parametrize("look", LOOKS)
def test_right_after_a_step_whoever_looks_sees_its_values(
    look: str, batches: list[Batch], expected: list[list[torch.Tensor]], route: Route, cluster: LocalCluster, name: str
) -> None:
    def program(session: Cluster) -> Any:
        module = make_module()
        optimizer = late_optimizer(session, module, name)
        trajectory = []
        for batch in batches:
            step_on(module, optimizer, batch)
            found = LOOKS[look](module)
            trajectory.append(
                [each.detach().clone().view_as(like) for each, like in zip(found, expected[0], strict=True)]
            )
        optimizer.wait()
        return trajectory

    (found,) = cluster.train(1, program, transport=route.transport)
    assert_same_bits(found, expected)


def test_what_is_held_otherwise_is_old_and_whole_until_somebody_waits(
    batches: list[Batch], expected: list[list[torch.Tensor]], session: Cluster, replies: HeldReplies, name: str
) -> None:
    module = make_module()
    optimizer = late_optimizer(session, module, name)
    step_on(module, optimizer, batches[0])
    optimizer.wait()
    replies.hold(FIRST_LAYER)
    step_on(module, optimizer, batches[1])
    assert replies.held.wait(LIMIT_S)
    assert_same_bits([as_they_are(module)], [expected[0]])
    assert torch.equal(module[0].weight, expected[1][0]), "it has arrived"
    assert_same_bits([as_they_are(module)[1:]], [expected[0][1:]])
    replies.release()
    optimizer.wait()
    assert_same_bits([as_they_are(module)], [expected[1]])


def test_the_first_layer_goes_on_while_the_last_waits(
    batches: list[Batch], expected: list[list[torch.Tensor]], session: Cluster, replies: HeldReplies, name: str
) -> None:
    module = make_module()
    optimizer = late_optimizer(session, module, name)
    reached = [threading.Event() for _ in module]
    for part, event in zip(module, reached, strict=True):
        part.register_forward_hook(lambda *_, event=event: event.set())
    replies.hold(FIRST_LAYER)
    step_on(module, optimizer, batches[0])
    assert replies.held.wait(LIMIT_S)
    for event in reached:
        event.clear()
    with ThreadPoolExecutor(1) as pool:
        forward = pool.submit(module, batches[1][0])
        assert reached[1].wait(LIMIT_S)
        assert torch.equal(as_they_are(module)[0], expected[0][0])
        assert not forward.done()
        assert not reached[2].is_set(), "the second layer has not all of its values"
        replies.release()
        found = forward.result(LIMIT_S)
    like = make_module()
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(expected[0]), like.parameters())
    assert torch.equal(found, like(batches[1][0]))


@pytest.mark.parametrize("looked", [False, True])
def test_a_stream_that_breaks_after_the_first_values_were_taken_is_repeated(
    looked: bool,
    batches: list[Batch],
    expected: list[list[torch.Tensor]],
    session: Cluster,
    replies: HeldReplies,
    name: str,
) -> None:
    module = make_module()
    optimizer = late_optimizer(session, module, name)
    for number, batch in enumerate(batches):
        replies.hold(FIRST_LAYER, breaks=True)
        step_on(module, optimizer, batch)
        assert replies.held.wait(LIMIT_S)
        if looked:
            assert torch.equal(module[0].weight, expected[number][0])
        replies.release()
        assert_same_bits([values(module)], [expected[number]])
    assert optimizer.statistics().num_accepted == len(batches)
    assert session.statistics().num_retries == len(batches)


def test_values_of_a_call_that_was_repeated_are_as_old_as_the_first_that_were_taken(
    batches: list[Batch], replies: HeldReplies, cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    """Others step meanwhile, and under Async the repeated call brings what these made of it."""
    cluster = cluster_of(1)
    with cluster.connect(0, 2, transport="grpc") as one, cluster.connect(1, 2, transport="grpc") as other:
        modules = make_module(), make_module()
        sync = pserver.Async()
        first, second = in_parallel(
            lambda: late_optimizer(one, modules[0], name, sync=sync),
            lambda: late_optimizer(other, modules[1], name, sync=sync, late_pull=False),
        )
        replies.hold(FIRST_LAYER, breaks=True)
        step_on(modules[0], first, batches[0])
        assert replies.held.wait(LIMIT_S)
        assert modules[0][0].weight is not None
        replies.let_through = None
        step_on(modules[1], second, batches[1])
        replies.release()
        assert (first.round, second.round) == (1, 2)
        step_on(modules[0], first, batches[2])
        first.wait()
        assert first.last_result is not None
        assert first.last_result.staleness == 1
        assert first.round == 3


# What may happen between two steps


def test_a_change_right_after_a_step_is_refused_by_name(
    batches: list[Batch], route: Route, cluster: LocalCluster, name: str
) -> None:
    def program(session: Cluster) -> None:
        module: Any = make_module()
        optimizer = late_optimizer(session, module, name)
        step_on(module, optimizer, batches[0])
        with torch.no_grad():
            module[2].weight.clamp_(-0.01, 0.01)
        loss_of(module, batches[1]).backward()
        with pytest.raises(InvalidRequest, match=r"'2\.weight' was changed on this trainer"):
            optimizer.step()

    cluster.train(1, program, transport=route.transport)


def with_a_scheduler(module: torch.nn.Module, optimizer: Any, batches: list[Batch]) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for number, batch in enumerate(batches):
        step_on(module, optimizer, batch)
        while scheduler.last_epoch < getattr(optimizer, "round", number + 1):
            scheduler.step()


def with_a_closure(module: torch.nn.Module, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:

        def closure(batch: Batch = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(module, batch)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None


def with_a_scaler(module: torch.nn.Module, optimizer: Any, batches: list[Batch]) -> None:
    """The second batch overflows at the first scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1, backoff_factor=2.0**-100)
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(module, batch)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**100


def by_parts(module: Any, optimizer: Any, batches: list[Batch]) -> None:
    """The whole is never called."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        (module[2:](module[:2](inputs)) - targets).square().mean().backward()
        optimizer.step()


def two_steps_in_a_row(module: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss_of(module, batch).backward()
        optimizer.step()
        optimizer.step()


def looked_at_by_halves(module: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:
        step_on(module, optimizer, batch)
        assert module[4].weight is not None
        assert module[0].bias is not None


def saved_and_gone_on(module: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:
        step_on(module, optimizer, batch)
        optimizer.load_state_dict(optimizer.state_dict())


def broadcast(module: Any, optimizer: Any, batches: list[Batch]) -> None:
    for batch in batches:
        step_on(module, optimizer, batch)
        if isinstance(optimizer, Optimizer):
            optimizer.broadcast_parameters()


def hooks_of_the_module(module: Any, optimizer: Any, batches: list[Batch]) -> None:
    """A forward pre-hook of the user's that uses a parameter of another layer, and one that was there before."""
    handle = module[0].register_forward_pre_hook(lambda part, inputs: (inputs[0] + module[4].bias,))
    for batch in batches:
        step_on(module, optimizer, batch)
    handle.remove()


PROGRAMS: dict[str, Callable[[Any, Any, list[Batch]], None]] = {
    each.__name__.replace("_", " "): each
    for each in (
        with_a_scheduler,
        with_a_closure,
        with_a_scaler,
        by_parts,
        two_steps_in_a_row,
        looked_at_by_halves,
        saved_and_gone_on,
        broadcast,
        hooks_of_the_module,
    )
}


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("mode", ["late", "both"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_end_with_the_bits_of_torch(
    program: str, mode: str, batches: list[Batch], route: Route, cluster: LocalCluster, name: str
) -> None:
    local = make_module()
    PROGRAMS[program](local, RECIPES["sgd-momentum"].make(local, {"fused": True}), batches)

    def train(session: Cluster) -> list[torch.Tensor]:
        module = make_module()
        PROGRAMS[program](
            module, remote_optimizer(session, module, RECIPES["sgd-momentum"], name, **MODES[mode]), batches
        )
        return values(module)

    assert_same_bits(cluster.train(1, train, transport=route.transport), [values(local)])


def test_a_wrapper_that_compiles_sees_new_values(cluster: LocalCluster, batches: list[Batch], name: str) -> None:
    """Made after the optimizer, which knows nothing of it."""
    local = make_module()
    optimizer = RECIPES["sgd-momentum"].make(local, {"fused": True})
    losses = [step_on(local, optimizer, batch) for batch in batches]

    def train(session: Cluster) -> list[torch.Tensor]:
        module = make_module()
        optimizer = late_optimizer(session, module, name)
        compiled = torch.compile(module, backend="eager")
        found = [step_on(compiled, optimizer, batch) for batch in batches]
        optimizer.wait()
        return [*found, *values(module)]

    with STREAM.taken():
        assert_same_bits(cluster.train(1, train, transport="grpc"), [[*losses, *values(local)]])


@pytest.mark.parametrize("sync", [pserver.Async(), pserver.Ssp(max_lag=4), pserver.Bsp(backup_workers=1)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_trainers_at_steps_of_their_own_lose_and_repeat_nothing(
    mode: str, sync: SyncPolicy, route: Route, cluster: LocalCluster, name: str
) -> None:
    """Every gradient is the same in every element, so every bucket must be at any time."""

    def program(session: Cluster) -> Any:
        module: Any = torch.nn.ParameterList([torch.zeros(16) for _ in range(4)])
        optimizer = Optimizer(
            torch.optim.SGD, module, lr=1.0, name=name, sync=sync, cluster=session, bucket_bytes=128, **MODES[mode]
        )
        for number in range(8):
            optimizer.zero_grad()
            sum(each.sum() for each in reversed(module)).mul(1 + number % 3).backward()
            optimizer.step()
            assert all(each.min() == each.max() for each in module)
        optimizer.wait()
        return optimizer.round, optimizer.statistics(), [each[0].item() for each in module]

    found = cluster.train(2, program, transport=route.transport)
    accepted = sum(statistics.num_accepted for _, statistics, _ in found)
    assert accepted + sum(statistics.num_rejected for _, statistics, _ in found) == 16
    if sync.name != "bsp":
        assert accepted == 16
        total = -2.0 * sum(1 + number % 3 for number in range(8))
        assert min(each for _, _, ends in found for each in ends) == total


# Errors


def forward(module: torch.nn.Module, optimizer: Any, batch: Batch) -> None:
    module(batch[0])


def wait(module: torch.nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.wait()


def step(module: torch.nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.step()


def statistics(module: torch.nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.statistics()


@pytest.mark.parametrize("mode", ["late", "both"])
@pytest.mark.parametrize("who", [forward, wait, step, statistics], ids=lambda who: who.__name__)
def test_what_a_step_raises_is_raised_once_by_whoever_waits_and_training_goes_on(
    who: Callable[..., None], mode: str, batches: list[Batch], route: Route, cluster: LocalCluster, name: str
) -> None:
    expected = train_locally(make_module(), RECIPES["sgd-momentum"], batches[1:], {"fused": True})[1]

    def program(session: Cluster) -> Any:
        module: Any = make_module()
        optimizer = late_optimizer(session, module, name, nonfinite="raise", **MODES[mode])
        loss_of(module, batches[0]).backward()
        module[2].weight.grad[0, 0] = float("nan")
        optimizer.step()
        with pytest.raises(NonFiniteGradient):
            who(module, optimizer, batches[0])
        optimizer.wait()
        trajectory = []
        for batch in batches[1:]:
            step_on(module, optimizer, batch)
            trajectory.append(values(module))
        return trajectory

    (found,) = cluster.train(1, program, transport=route.transport)
    assert_same_bits(found, expected)


def test_a_round_that_fails_because_others_are_absent_says_so_later(
    batches: list[Batch], route: Route, cluster: LocalCluster, name: str
) -> None:
    sync = pserver.Bsp(deadline=0.05, absent="fail")
    with (
        cluster.connect(0, 2, transport=route.transport) as one,
        cluster.connect(1, 2, transport=route.transport) as other,
    ):
        modules = make_module(), make_module()
        first, second = in_parallel(
            lambda: late_optimizer(one, modules[0], name, sync=sync),
            lambda: late_optimizer(other, modules[1], name, sync=sync),
        )
        step_on(modules[0], first, batches[0])
        with pytest.raises(RoundFailed, match=r"\[1\]"):
            modules[0](batches[0][0])
        assert_same_bits([values(modules[0])], [values(make_module())])
        second.wait()


def test_a_server_that_is_lost_is_named_by_the_next_forward_pass(batches: list[Batch], name: str) -> None:
    with (
        LocalCluster(2, timeout_s=3.0, server_lease_s=0.5) as cluster,
        STREAM.taken(),
        cluster.connect(transport="grpc") as session,
    ):
        module = make_module()
        optimizer = late_optimizer(session, module, name)
        step_on(module, optimizer, batches[0])
        optimizer.wait()
        cluster.kill(1)
        step_on(module, optimizer, batches[1])
        with pytest.raises(PserverError, match="s1"):
            module(batches[2][0])
        module(batches[2][0])  # it was told once
        loss_of(module, batches[2]).backward()
        with pytest.raises(PserverError, match="s1"):
            optimizer.step()


def test_only_a_module_can_be_watched(cluster: LocalCluster, name: str) -> None:
    with (
        cluster.connect() as session,
        pytest.raises(InvalidRequest, match="late_pull watches a module's forward: pass the module itself, or module="),
    ):
        Optimizer(torch.optim.SGD, [torch.zeros(1)], lr=1.0, name=name, cluster=session, late_pull=True)


# Time


@pytest.mark.parametrize("mode", [{}, *MODES.values()], ids=["neither", *MODES])
def test_the_hidden_share_is_of_the_time_that_the_trainer_did_not_stand_still(
    mode: dict[str, bool], batches: list[Batch], session: Cluster, replies: HeldReplies, name: str
) -> None:
    module = make_module()
    optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, **mode)
    assert optimizer.statistics().hidden_share == 0.0
    before = optimizer.statistics()
    for batch in batches:
        if mode.get("late_pull"):
            replies.hold(0)
        step_on(module, optimizer, batch)
        if mode.get("late_pull"):
            assert replies.held.wait(LIMIT_S), "the trainer computes meanwhile"
            replies.release()
        after = optimizer.statistics()
        assert after.communication_s > before.communication_s
        assert after.waited_s > before.waited_s
        assert 0.0 <= after.hidden_share <= 1.0
        before = after
    assert before.hidden_share > 0.0 if mode else before.hidden_share < 0.5


# Ends


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["all is there", "values are on their way"])
def test_a_module_outlives_its_optimizer(
    when: str, mode: str, batches: list[Batch], expected: list[list[torch.Tensor]], session: Cluster, name: str
) -> None:
    module: Any = make_module()
    optimizer = late_optimizer(session, module, name, **{"late_pull": False, **MODES[mode]})
    step_on(module, optimizer, batches[0])
    if when == "all is there":
        optimizer.wait()
    gone = weakref.ref(optimizer), weakref.ref(optimizer._model)
    del optimizer
    assert_same_bits([[each.detach().clone() for each in module.parameters()]], [expected[0]])
    module(batches[0][0])
    gc.collect()
    assert [each() for each in gone] == [None, None]
    for each in module.modules():
        assert type(each.__dict__["_parameters"]) is type(each.__dict__["_buffers"]) is dict
        assert not each._forward_pre_hooks
        assert not each._forward_hooks
    assert not any(each._post_accumulate_grad_hooks for each in module.parameters())


def test_another_optimizer_takes_over(batches: list[Batch], session: Cluster, name: str) -> None:
    module = make_module()
    one = late_optimizer(session, module, f"{name}-one", early_push=True)
    step_on(module, one, batches[0])
    other = late_optimizer(session, module, f"{name}-other", early_push=True)
    found = values(module)
    local = make_module()
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(found), local.parameters())
    del one
    for batch in batches[1:]:
        step_on(module, other, batch)
    assert_same_bits(
        [values(module)], train_locally(local, RECIPES["sgd-momentum"], batches[1:], {"fused": True})[1][-1:]
    )


def test_values_that_are_on_their_way_when_the_block_fails_are_missed_loudly(
    batches: list[Batch], replies: HeldReplies, cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    module: Any = make_module()

    def train() -> None:
        with cluster_of(1).connect(transport="grpc", timeout_s=1.0) as session:
            optimizer = late_optimizer(session, module, name)
            replies.hold(0)
            step_on(module, optimizer, batches[0])
            assert replies.held.wait(LIMIT_S)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    with pytest.raises(PserverError):
        module.state_dict()


def test_the_last_step_of_a_session_counts_for_everybody(
    batches: list[Batch], cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    """Its trainer leaves only once the others have stepped too."""
    local = cluster_of(1)

    def train(session: Cluster) -> tuple[int, list[torch.Tensor]]:
        with session:
            module = make_module()
            optimizer = late_optimizer(session, module, name)
            if session.rank == 0:
                both_are_here.wait(LIMIT_S)
                step_on(module, optimizer, batches[0])
                return 2, list(module.parameters())  # the session ends first
            both_are_here.wait(LIMIT_S)
            step_on(module, optimizer, batches[1])
            optimizer.wait()
            assert optimizer.last_result is not None
            return optimizer.last_result.num_trainers, list(module.parameters())

    both_are_here = threading.Barrier(2)
    (_, first), (num_trainers, second) = in_parallel(
        lambda: train(local.connect(0, 2)), lambda: train(local.connect(1, 2))
    )
    assert num_trainers == 2
    assert_same_bits([first], [second])
