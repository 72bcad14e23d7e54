"""Gradients that are sent during the backward pass: the same bits as without, whatever becomes of them meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import pserver
from pserver.client.cluster import Cluster
from pserver.compress import Codec, ErrorFeedback, Float16, Int8, PowerSGD, TopK
from pserver.errors import PserverError
from pserver.testing.local_cluster import LocalCluster
from pserver.transport.faults import Fault, FaultKind
from tests.numerics.compressing import residual
from tests.numerics.overlapping import (
    MODES,
    await_early,
    await_no_streams,
    exchanged_bytes,
    own_batches,
    sent_bytes,
    streams,
    train_mixed,
)
from tests.numerics.training import (
    RECIPES,
    Batch,
    assert_same_bits,
    contexts_held,
    loss_of,
    make_module,
    remote_optimizer,
    step_on,
    values,
)
from tests.routes import STREAM, Route
from tests.waiting import until

Module = torch.nn.Module
#: Computes gradients of two batches, and does something to them.
Program = Callable[[Module, Any, Batch, Batch], None]
Trajectory = list[list[torch.Tensor]]


@pytest.fixture
def streaming() -> Iterator[None]:
    """Steps are streams, over which gradients really go early."""
    with STREAM.taken():
        yield


_expected: dict[tuple[str, int], list[Trajectory]] = {}


def without_either(cluster: LocalCluster, recipe: str, trainers: int) -> list[Trajectory]:
    """What every trainer of the mixed model finds; computed once."""
    if (recipe, trainers) not in _expected:
        _expected[recipe, trainers] = cluster.train(
            trainers, lambda session: train_mixed(session, recipe, f"without-{recipe}-{trainers}"), transport="grpc"
        )
    return _expected[recipe, trainers]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("recipe", "trainers"), [("sgd-momentum", 1), ("adam", 2)])
def test_a_run_ends_with_the_same_bits_as_without_either(
    recipe: str, trainers: int, mode: str, route: Route, cluster: LocalCluster, name: str
) -> None:
    found = cluster.train(
        trainers, lambda session: train_mixed(session, recipe, name, **MODES[mode]), transport=route.transport
    )
    for ours, theirs in zip(found, without_either(cluster, recipe, trainers), strict=True):
        assert_same_bits(ours, theirs)


def test_half_of_a_models_gradients_or_more_go_early(streaming: None, cluster: LocalCluster, name: str) -> None:
    """If they never did, all tests here would pass."""

    def program(session: Cluster) -> None:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, early_push=True)
        before = session.statistics().sent_bytes
        loss_of(module, own_batches(session)[0]).backward()
        assert await_early(optimizer) >= 2
        until(lambda: streams(cluster) > 0, "a server has a part of them")
        model = optimizer._model
        assert model is not None
        early = sum(model.layout.buckets[index].num_bytes for index in model._early.buckets)
        until(lambda: session.statistics().sent_bytes == before + early, "just these were sent")
        assert sent_bytes(session, optimizer.step) == exchanged_bytes(optimizer) - early

    cluster.train(1, program, transport="grpc")


# What happens to gradients between the backward pass and the step


def backward(module: Module, batch: Batch) -> None:
    loss_of(module, batch).backward()


def edited_in_place(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    backward(module, first)
    await_if_early(optimizer)
    module[2].weight.grad.mul_(2)


def edited_through_data(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    backward(module, first)
    await_if_early(optimizer)
    module[2].weight.grad.data[3, 5] += 1


def replaced(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    backward(module, first)
    await_if_early(optimizer)
    module[2].weight.grad = module[2].weight.grad * 3


def cleared(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    backward(module, first)
    await_if_early(optimizer)
    module[2].weight.grad = None


def all_cleared(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    backward(module, first)
    await_if_early(optimizer)
    module.zero_grad()


def clipped(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    backward(module, first)
    await_if_early(optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)


def made_nan(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    backward(module, first)
    await_if_early(optimizer)
    module[2].weight.grad[0, 0] = float("nan")


def begun_anew(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    backward(module, second)
    await_if_early(optimizer)
    optimizer.zero_grad()
    backward(module, first)
    await_if_early(optimizer)


def begun_anew_by_the_module(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    backward(module, second)
    await_if_early(optimizer)
    module.zero_grad()
    backward(module, first)
    await_if_early(optimizer)


def zeroed_in_place(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    backward(module, second)
    await_if_early(optimizer)
    optimizer.zero_grad(set_to_none=False)
    backward(module, first)


def accumulated(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    for batch in (first, second, first):
        backward(module, batch)
        await_if_early(optimizer)


def accumulated_without_sync(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    with optimizer.no_sync() if isinstance(optimizer, pserver.optim.RemoteOptimizer) else nullcontext():
        for batch in (first, second):
            backward(module, batch)
            await_if_early(optimizer)
    backward(module, first)
    await_if_early(optimizer)


def two_losses(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    output = module(first[0])
    (output - first[1]).square().mean().backward(retain_graph=True)
    await_if_early(optimizer)
    output.abs().mean().backward()


def with_a_penalty_on_gradients(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    loss = loss_of(module, first)
    found = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    (loss + sum(each.square().sum() for each in found)).backward()


def double_backward(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    loss_of(module, first).backward(create_graph=True)
    await_if_early(optimizer)
    sum(each.grad.square().sum() for each in module.parameters()).backward()
    for parameter in module.parameters():
        parameter.grad = parameter.grad.detach()


def checkpointed(reentrant: bool) -> Program:
    def program(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
        hidden = module[1](module[0](first[0]))
        for part in (module[2:4], module[4:]):
            hidden = checkpoint(part, hidden, use_reentrant=reentrant)
        (hidden - first[1]).square().mean().backward()

    return program


def checkpointed_twice(module: Any, optimizer: Any, first: Batch, second: Batch) -> None:
    """Each use of the layer has a backward pass of its own, inside that of the whole."""
    hidden = module[1](module[0](first[0]))
    both = [checkpoint(module[2:], each, use_reentrant=True) for each in (hidden, hidden * 2)]
    (both[0] - both[1]).square().mean().backward()


def await_if_early(optimizer: Any) -> None:
    """All that is to be sent early has been, so that what follows is an edit."""
    if isinstance(optimizer, pserver.optim.RemoteOptimizer) and optimizer._early is not None:
        await_early(optimizer)


PROGRAMS: dict[str, Program] = {
    "in place": edited_in_place,
    "through data": edited_through_data,
    "replaced": replaced,
    "cleared": cleared,
    "all cleared": all_cleared,
    "clipped": clipped,
    "not a number": made_nan,
    "begun anew": begun_anew,
    "begun anew by the module": begun_anew_by_the_module,
    "zeroed in place": zeroed_in_place,
    "accumulated": accumulated,
    "accumulated without sync": accumulated_without_sync,
    "two losses": two_losses,
    "a penalty": with_a_penalty_on_gradients,
    "double backward": double_backward,
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
    "checkpointed twice, reentrant": checkpointed_twice,
}


def run(session: Cluster, program: Program, name: str, *, recipe: str = "sgd-momentum", **more: Any) -> Trajectory:
    """Two steps with what a program makes of their gradients; one before and one after, with gradients as they come."""
    module = make_module()
    optimizer = remote_optimizer(session, module, RECIPES[recipe], name, **more)
    first, second, third, last = own_batches(session)
    step_on(module, optimizer, last)
    trajectory = []
    for batches in ((first, second), (second, third)):
        optimizer.zero_grad()
        program(module, optimizer, *batches)
        optimizer.step()
        trajectory.append(values(module))
    step_on(module, optimizer, third)
    return [*trajectory, values(module)]


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_what_becomes_of_gradients_before_the_step_counts(
    program: Program, route: Route, cluster: LocalCluster, name: str
) -> None:
    """As in the same program without early push."""
    (expected,) = cluster.train(1, lambda session: run(session, program, f"{name}-without"), transport="grpc")
    (found,) = cluster.train(
        1, lambda session: run(session, program, f"{name}-early", early_push=True), transport=route.transport
    )
    assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("program", "edited"),
    [
        (edited_in_place, [2]),
        (edited_through_data, [2]),
        (replaced, [2]),
        (cleared, [2]),
        (checkpointed(True), []),
        (checkpointed(False), []),
        (with_a_penalty_on_gradients, []),
        (accumulated_without_sync, []),
        (lambda module, optimizer, first, second: backward(module, first), []),
    ],
    ids=["in place", "through data", "replaced", "cleared", "reentrant", "checkpointed", "penalty", "no_sync", "as is"],
)
def test_only_what_was_edited_is_sent_twice(
    program: Program, edited: list[int], streaming: None, cluster: LocalCluster, name: str
) -> None:
    def train(session: Cluster) -> None:
        module: Any = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, early_push=True)
        batches = own_batches(session)

        def step() -> None:
            program(module, optimizer, batches[0], batches[1])
            optimizer.step()

        again = [module[index].weight for index in edited]
        expected = exchanged_bytes(optimizer) + (exchanged_bytes(optimizer, again) if again else 0)
        assert sent_bytes(session, step) == expected

    cluster.train(1, train, transport="grpc")


@pytest.mark.parametrize("when", ["before", "after", "on the gradient"])
def test_what_the_users_hooks_do_is_sent_early(when: str, streaming: None, cluster: LocalCluster, name: str) -> None:
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    def watch(module: Module) -> None:
        for parameter in module.parameters():
            if when == "on the gradient":
                parameter.register_hook(lambda gradient: gradient * 0.5)
            else:
                parameter.register_post_accumulate_grad_hook(halve)

    def train(session: Cluster, early: bool) -> tuple[Trajectory, int]:
        module = make_module()
        if when == "before":
            watch(module)
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], f"{name}-{early}", early_push=early)
        if when != "before":
            watch(module)
        batch = own_batches(session)[0]
        twice = sent_bytes(session, lambda: step_on(module, optimizer, batch)) - exchanged_bytes(optimizer)
        return [values(module)], twice

    (found, found_twice), (expected, _) = (
        cluster.train(1, lambda session, early=early: train(session, early), transport="grpc")[0]
        for early in (True, False)
    )
    assert_same_bits(found, expected)
    assert found_twice == 0


# Codecs

CODECS: list[Codec] = [
    Float16(),
    Int8(block=64),
    TopK(ratio=0.3),
    PowerSGD(rank=2, start_iteration=1),
    ErrorFeedback(TopK(ratio=0.3)),
    ErrorFeedback(PowerSGD(rank=2, start_iteration=1)),
]


@pytest.mark.parametrize(
    "program",
    [PROGRAMS["checkpointed"], edited_in_place, cleared, begun_anew, accumulated],
    ids=["as it comes", "in place", "cleared", "begun anew", "accumulated"],
)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_a_codec_makes_of_gradients_is_the_same(
    codec: Codec, program: Program, streaming: None, cluster: LocalCluster, name: str
) -> None:
    """Also what it remembers of them, if one was encoded early and has changed since."""

    def train(session: Cluster, early: bool) -> Trajectory:
        return run(session, program, f"{name}-{early}", compress=codec, early_push=early)

    found, expected = (
        cluster.train(1, lambda session, early=early: train(session, early), transport="grpc")[0]
        for early in (True, False)
    )
    assert_same_bits(found, expected)


SIZE = 304


@pytest.mark.parametrize("last", ["as it comes", "edited", "cleared", "begun anew", "skipped", "not a number"])
def test_error_feedback_loses_nothing_and_counts_nothing_twice(
    last: str, route: Route, cluster: LocalCluster, name: str
) -> None:
    """Gradients are whole numbers, so that sums are exact: what is applied and what is kept is their sum."""

    def train(session: Cluster) -> None:
        weight, other = torch.nn.Parameter(torch.zeros(SIZE)), torch.nn.Parameter(torch.zeros(1))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            [("weight", weight), ("other", other)],
            lr=1.0,
            name=name,
            cluster=session,
            bucket_bytes=128,
            compress=ErrorFeedback(TopK(ratio=0.1)),
            nonfinite="skip",
            early_push=True,
        )
        generator = torch.Generator().manual_seed(3)
        given = torch.zeros(SIZE)

        def compute() -> torch.Tensor:
            gradient = torch.randint(-50, 50, (SIZE,), generator=generator).float()
            (other.sum() + (weight * gradient).sum()).backward()
            await_early(optimizer)
            return gradient

        for number in range(4):
            optimizer.zero_grad()
            gradient = compute()
            assert len(optimizer._model._early.buckets) >= SIZE * 4 // 128
            match last if number % 2 else "as it comes":
                case "edited":
                    weight.grad.mul_(3)
                    gradient = gradient * 3
                case "cleared":
                    weight.grad = None
                    gradient = torch.zeros(SIZE)
                case "begun anew":
                    optimizer.zero_grad()
                    gradient = compute()
                case "skipped":
                    optimizer.skip()
                    gradient = torch.zeros(SIZE)
                    optimizer.zero_grad()
                case "not a number":
                    weight.grad[17] = float("nan")
                    gradient[17] = 0.0
            optimizer.step()
            given += gradient
            kept = residual(optimizer.codec_state_dict(), SIZE)
            assert torch.equal(kept - weight.detach(), given), number

    cluster.train(1, train, transport=route.transport)


def test_what_a_codec_remembers_is_saved_as_of_the_last_step(streaming: None, cluster: LocalCluster, name: str) -> None:
    def train(session: Cluster, early: bool) -> Any:
        module = make_module()
        optimizer = remote_optimizer(
            session,
            module,
            RECIPES["sgd"],
            f"{name}-{early}",
            compress=ErrorFeedback(TopK(ratio=0.3)),
            early_push=early,
        )
        first, second, *_ = own_batches(session)
        step_on(module, optimizer, first)
        optimizer.zero_grad()
        backward(module, second)
        await_if_early(optimizer)
        saved = optimizer.codec_state_dict()
        optimizer.load_codec_state_dict({key: value * 0.5 for key, value in saved.items()})
        optimizer.step()
        return [[saved[key] for key in sorted(saved)], values(module)]

    found, expected = (
        cluster.train(1, lambda session, early=early: train(session, early), transport="grpc")[0]
        for early in (True, False)
    )
    assert_same_bits(found, expected)


# Broken streams


@pytest.mark.parametrize("kind", FaultKind)
@pytest.mark.parametrize("when", ["during the backward pass", "at the step"])
@pytest.mark.parametrize("mode", ["early", "both"])
def test_a_stream_that_breaks_is_repeated_and_each_gradient_counts_once(
    mode: str, when: str, kind: FaultKind, streaming: None, cluster: LocalCluster, name: str
) -> None:
    def train(session: Cluster, broken: bool) -> Trajectory:
        module = make_module()
        early = MODES[mode] if broken else {}
        optimizer = remote_optimizer(session, module, RECIPES["sgd-momentum"], f"{name}-{broken}", **early)
        struck = cluster.faults.struck
        for number, batch in enumerate(own_batches(session)):
            optimizer.zero_grad()
            loss = loss_of(module, batch)
            fault = Fault(kind=kind, method="Step", times=2)
            if broken and number == 1 and when == "during the backward pass":
                cluster.faults.faults.append(fault)
            loss.backward()
            if broken and number == 1 and when == "at the step":
                await_early(optimizer)
                cluster.faults.faults.append(fault)
                optimizer._model.abandon_early()  # the calls that are to break are those of the step
            optimizer.step()
        optimizer.wait()
        assert optimizer.statistics().num_accepted == optimizer.round == 4
        assert cluster.faults.struck == struck + 2 * broken
        return [values(module)]

    found, expected = (
        cluster.train(1, lambda session, broken=broken: train(session, broken), transport="grpc")[0]
        for broken in (True, False)
    )
    assert_same_bits(found, expected)
    await_no_streams(cluster)


def test_a_server_that_is_lost_during_the_backward_pass_is_named(streaming: None, name: str) -> None:
    with LocalCluster(2, timeout_s=3.0, server_lease_s=0.5) as cluster, cluster.connect(transport="grpc") as session:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, early_push=True)
        batch = own_batches(session)[0]
        step_on(module, optimizer, batch)
        optimizer.zero_grad()
        backward(module, batch)
        assert await_early(optimizer)
        cluster.kill(1)
        with pytest.raises(PserverError, match="s1"):
            optimizer.step()
        optimizer.zero_grad()
        backward(module, batch)
        with pytest.raises(PserverError, match="s1"):
            optimizer.step()


# Ends of a push that has begun


def drop(optimizer: Any, module: Any) -> None:
    optimizer.zero_grad()


def skip(optimizer: Any, module: Any) -> None:
    optimizer.skip()
    optimizer.zero_grad()


def give_no_weight(optimizer: Any, module: Any) -> None:
    optimizer.step(samples=0)
    optimizer.zero_grad()


def load(optimizer: Any, module: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()


def broadcast(optimizer: Any, module: Any) -> None:
    optimizer.broadcast_parameters()
    optimizer.zero_grad()


def add_a_group(optimizer: Any, module: Any) -> None:
    optimizer.add_param_group({"params": list(module[4].parameters()), "lr": 0.01})
    optimizer.zero_grad()


ENDS = {each.__name__.replace("_", " "): each for each in (drop, skip, give_no_weight, load, broadcast, add_a_group)}


@pytest.mark.parametrize("end", ENDS)
def test_a_push_that_is_given_up_leaves_nothing_and_the_next_step_is_right(
    end: str, streaming: None, cluster: LocalCluster, name: str
) -> None:
    def train(session: Cluster, early: bool) -> Trajectory:
        module: Any = make_module()
        parameters = list(module.parameters())
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            parameters[: 4 if end == "add a group" else 6],
            lr=0.1,
            momentum=0.9,
            module=module,
            name=f"{name}-{early}",
            cluster=session,
            bucket_bytes=256,
            early_push=early,
        )
        first, second, third, _ = own_batches(session)
        step_on(module, optimizer, first)
        optimizer.zero_grad()
        backward(module, second)
        if early:
            assert await_early(optimizer)
            until(lambda: streams(cluster) > 0, "a stream is open")
        ENDS[end](optimizer, module)
        await_no_streams(cluster)
        assert not any(contexts_held(cluster, f"{name}-{early}"))
        trajectory = []
        for batch in (third, first):
            step_on(module, optimizer, batch)
            trajectory.append(values(module))
        return trajectory

    found, expected = (
        cluster.train(1, lambda session, early=early: train(session, early), transport="grpc")[0]
        for early in (True, False)
    )
    assert_same_bits(found, expected)


def test_a_session_that_ends_takes_along_what_has_begun(streaming: None, cluster: LocalCluster, name: str) -> None:
    """Gradients are computed afterwards as ever, and nothing is sent."""
    module = make_module()
    with cluster.connect(transport="grpc") as session:
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, early_push=True)
        batch = own_batches(session)[0]
        step_on(module, optimizer, batch)
        optimizer.zero_grad()
        backward(module, batch)
        assert await_early(optimizer)
        until(lambda: streams(cluster) > 0, "a stream is open")
    await_no_streams(cluster)
    assert not any(contexts_held(cluster, name))
    backward(module, batch)
    optimizer.zero_grad()
    backward(module, batch)


def test_the_users_mistake_leaves_the_push_open_until_it_is_mended(
    streaming: None, cluster: LocalCluster, name: str
) -> None:
    def train(session: Cluster, early: bool) -> Trajectory:
        module: Any = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], f"{name}-{early}", early_push=early)
        backward(module, own_batches(session)[0])
        await_if_early(optimizer)
        gradient = module[2].weight.grad
        module[2].weight.grad = None
        module[2].weight.grad = gradient.to_sparse() if early else gradient
        if early:
            with pytest.raises(pserver.errors.InvalidRequest, match=r"2\.weight.*only dense"):
                optimizer.step()
        module[2].weight.grad = gradient
        optimizer.max_norm = -1.0
        with pytest.raises(pserver.errors.InvalidRequest, match="max_norm"):
            optimizer.step()
        optimizer.max_norm = None
        optimizer.step()
        return [values(module)]

    found, expected = (
        cluster.train(1, lambda session, early=early: train(session, early), transport="grpc")[0]
        for early in (True, False)
    )
    assert_same_bits(found, expected)


# Compiled modules


def test_a_compiled_module_is_trained_without_either_and_the_log_says_so(
    cluster: LocalCluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(session: Cluster, compiled: bool) -> Trajectory:
        module = make_module()
        if compiled:
            module.compile(backend="eager")
        more = MODES["both"] if compiled else {}
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], f"{name}-{compiled}", **more)
        trajectory = []
        for batch in own_batches(session):
            step_on(module, optimizer, batch)
            trajectory.append(values(module))
        assert optimizer._early is optimizer._late is None
        return trajectory

    found, expected = (
        cluster.train(1, lambda session, compiled=compiled: train(session, compiled), transport="grpc")[0]
        for compiled in (True, False)
    )
    assert_same_bits(found, expected)
    told = [each.getMessage() for each in caplog.records if "compiled" in each.getMessage()]
    assert told == ["the module is compiled: early_push and late_pull are off"]
