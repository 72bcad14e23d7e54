"""Error feedback: what was applied and what trainers keep is the sum of gradients, whatever became of the rounds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.compress import BFloat16, Codec, ErrorFeedback, Int8, PowerSGD, TopK
from pserver.core.sync import SyncPolicy
from pserver.errors import DeadlineExceeded, InvalidRequest, NonFiniteGradient, ServerErrors, ServerUnavailable
from pserver.testing.local_cluster import LocalCluster
from pserver.transport.faults import Fault, FaultKind
from pserver.types import StepResult
from tests.numerics.compressing import residual
from tests.numerics.conftest import TIMEOUT_S
from tests.numerics.training import (
    in_parallel,
)
from tests.waiting import set_timeout

SIZE = 304
NAN = float("nan")


@pytest.fixture
def cluster(cluster_of: Callable[[int], LocalCluster]) -> LocalCluster:
    """Two servers."""
    return cluster_of(2)


class Trainer:
    """One parameter, trained by SGD with learning rate 1 and gradients that are whole numbers: sums are exact."""

    def __init__(self, session: Cluster, name: str, codec: Codec, sync: SyncPolicy | None, **rules: Any) -> None:
        self.session = session
        self.value = torch.nn.Parameter(torch.zeros(SIZE))
        self.given = torch.zeros(SIZE)
        self._generator = torch.Generator().manual_seed(session.rank)
        self.optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            [("value", self.value)],
            lr=1.0,
            name=name,
            sync=sync,
            cluster=session,
            bucket_bytes=128,
            compress=codec,
            **rules,
        )

    def draw(self) -> torch.Tensor:
        return torch.randint(-50, 50, (SIZE,), generator=self._generator).float()

    def step(self, *, nan_at: int | None = None, samples: int = 1) -> StepResult:
        """Steps with a gradient of its own; what is not finite, or has no samples, does not count as given."""
        gradient = self.draw()
        if nan_at is not None:
            gradient[nan_at] = NAN
        self.value.grad = gradient
        if samples:
            self.given += gradient.nan_to_num(nan=0.0)
        self.optimizer.step(samples=samples)
        assert self.optimizer.last_result is not None
        return self.optimizer.last_result

    def skip(self) -> StepResult:
        self.optimizer.skip()
        assert self.optimizer.last_result is not None
        return self.optimizer.last_result

    @property
    def kept(self) -> torch.Tensor:
        return residual(self.optimizer.codec_state_dict(), SIZE)


Join = Callable[..., list[Trainer]]


@pytest.fixture
def join(cluster: LocalCluster, name: str) -> Iterator[Join]:
    """Makes trainers of one model, with the ranks 0, 1, ...; they leave at the end."""
    with ExitStack() as stack:

        def joined(codec: Codec, trainers: int = 2, sync: SyncPolicy | None = None, **rules: Any) -> list[Trainer]:
            sessions = [stack.enter_context(cluster.connect(rank, trainers)) for rank in range(trainers)]
            return [Trainer(session, name, codec, sync, **rules) for session in sessions]

        yield joined


def assert_nothing_is_lost(trainers: Sequence[Trainer], *, in_a_round: int, tolerance: float = 0.0) -> None:
    """The sum of all gradients has been applied, times the number of trainers in a round, or is kept."""
    applied = -in_a_round * max(trainers, key=lambda trainer: trainer.optimizer.round).value.detach()
    kept = torch.stack([trainer.kept for trainer in trainers]).sum(dim=0)
    given = torch.stack([trainer.given for trainer in trainers]).sum(dim=0)
    torch.testing.assert_close(applied + kept, given, rtol=0, atol=tolerance)


#: Codecs, and how far a sum of a few whole numbers may be off by rounding.
CODECS = [
    pytest.param(ErrorFeedback(TopK(ratio=0.1)), 0.0, id="topk"),
    pytest.param(ErrorFeedback(BFloat16()), 0.0, id="bfloat16"),
    pytest.param(ErrorFeedback(Int8(block=16)), 1e-3, id="int8"),
]
TOPK = ErrorFeedback(TopK(ratio=0.1))


@pytest.mark.parametrize(("codec", "tolerance"), CODECS)
def test_what_was_applied_and_what_is_kept_is_the_sum_of_gradients(codec: Codec, tolerance: float, join: Join) -> None:
    trainers = join(codec)
    for _ in range(4):
        in_parallel(*(trainer.step for trainer in trainers))
        assert_nothing_is_lost(trainers, in_a_round=2, tolerance=tolerance)


@pytest.mark.parametrize(("codec", "tolerance"), CODECS)
@pytest.mark.parametrize(
    "sync", [pserver.Bsp(backup_workers=1), pserver.Async(max_staleness=0)], ids=lambda sync: sync.name
)
def test_what_a_policy_refuses_is_kept_and_sent_later(
    sync: SyncPolicy, codec: Codec, tolerance: float, join: Join
) -> None:
    fast, slow = trainers = join(codec, sync=sync)
    assert fast.step().accepted
    assert not slow.step().accepted
    torch.testing.assert_close(slow.kept, slow.given, rtol=0, atol=tolerance)
    for trainer, accepted in ((slow, True), (fast, False), (fast, True), (slow, False), (slow, True)):
        assert trainer.step().accepted == accepted
        assert_nothing_is_lost(trainers, in_a_round=1, tolerance=tolerance)


@pytest.mark.parametrize(("codec", "tolerance"), CODECS[:2])
def test_what_a_round_without_a_step_brought_is_kept_on_every_trainer(
    codec: Codec, tolerance: float, join: Join
) -> None:
    """The element that is NaN is gone; what was kept in its place before is not."""
    first, second = trainers = join(codec, nonfinite="skip")
    for nan_at in (None, 123, None, 5, 5, None):
        first_result, _ = in_parallel(first.step, lambda nan_at=nan_at: second.step(nan_at=nan_at))
        assert first_result.stepped == (nan_at is None)
        assert_nothing_is_lost(trainers, in_a_round=2, tolerance=tolerance)


def test_what_a_round_brought_that_raises_is_kept(join: Join) -> None:
    first, second = trainers = join(TOPK, nonfinite="raise")

    def failing(trainer: Trainer, nan_at: int | None) -> None:
        with pytest.raises(NonFiniteGradient):
            trainer.step(nan_at=nan_at)

    in_parallel(first.step, second.step)
    in_parallel(lambda: failing(first, None), lambda: failing(second, 7))
    assert_nothing_is_lost(trainers, in_a_round=2)
    in_parallel(first.step, second.step)
    assert_nothing_is_lost(trainers, in_a_round=2)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_what_an_overflow_elsewhere_keeps_from_being_applied_is_kept(join: Join) -> None:
    first, second = trainers = join(TOPK)

    def step(trainer: Trainer, overflows: bool) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        gradient = trainer.draw()
        trainer.given += 0 if overflows else gradient
        scaler.scale((trainer.value * gradient).sum() * (torch.inf if overflows else 1.0)).backward()
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()

    for overflows in (False, True, False):
        in_parallel(lambda: step(first, False), lambda overflows=overflows: step(second, overflows))
        assert first.optimizer.last_result.overflow == overflows
        assert_nothing_is_lost(trainers, in_a_round=2)


def test_what_was_applied_is_not_sent_again_after_a_round_that_steps_nothing(join: Join) -> None:
    first, second = trainers = join(TOPK)
    for _ in range(2):
        in_parallel(first.step, second.step)
        assert not in_parallel(first.skip, second.skip)[0].stepped
        assert_nothing_is_lost(trainers, in_a_round=2)


def test_a_trainer_that_skips_keeps_what_it_has(join: Join) -> None:
    first, second = join(TOPK)
    in_parallel(first.step, second.step)
    kept = second.kept
    in_parallel(first.step, second.skip)
    assert torch.equal(second.kept, kept)


def test_a_gradient_without_samples_takes_nothing_with_it(join: Join) -> None:
    """What is kept would count for nothing, like the gradient."""
    first, second = join(TOPK)
    in_parallel(first.step, second.step)
    kept = second.kept
    in_parallel(first.step, lambda: second.step(samples=0))
    assert torch.equal(second.kept, kept)


@pytest.mark.parametrize("codec", [None, TOPK, ErrorFeedback(Int8())], ids=str)
def test_a_parameter_without_a_gradient_and_of_which_nothing_is_kept_is_not_stepped(
    codec: Codec | None, cluster: LocalCluster, name: str
) -> None:
    """Weight decay and momentum would move it."""

    def program(session: Cluster) -> Any:
        module = torch.nn.ParameterList([torch.ones(70), torch.ones(90), torch.ones(5)])
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            module,
            lr=0.5,
            momentum=0.9,
            weight_decay=0.5,
            name=name,
            cluster=session,
            compress=codec,
            bucket_bytes=128,
        )
        for _ in range(3):
            module[0].grad = torch.arange(70.0)
            optimizer.step()
        return module[1].tolist(), module[2].tolist(), module[0].tolist()

    for second, third, first in cluster.train(2, program):
        assert second == [1.0] * 90
        assert third == [1.0] * 5
        assert first != [1.0] * 70


def test_what_is_kept_of_a_parameter_is_sent_without_a_gradient(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> Any:
        weight = torch.nn.Parameter(torch.zeros(112))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session, compress=ErrorFeedback(TopK(ratio=0.25))
        )
        weight.grad = torch.arange(112.0)
        optimizer.step()
        after_one = weight.tolist()
        weight.grad = None
        optimizer.step()
        return after_one, weight.tolist()

    for after_one, after_two in cluster.train(2, program):
        assert after_one == [0.0] * 84 + [-float(number) for number in range(84, 112)]
        assert after_two == [0.0] * 56 + [-float(number) for number in range(56, 112)]


class Accumulating:
    """One trainer whose gradients, whole numbers, are pushed into contexts."""

    def __init__(self, session: Cluster, name: str) -> None:
        self.module = torch.nn.ParameterList([torch.zeros(SIZE)])
        model = pserver.distribute(self.module, name=name, cluster=session, compress=TOPK, bucket_bytes=128)
        self.optimizer = pserver.optim.DistributedOptimizer(torch.optim.SGD, model.parameter_refs(), lr=1.0)
        self.given = torch.zeros(SIZE)
        self._generator = torch.Generator().manual_seed(3)

    def backward(self, context_id: int, *, nan_at: int | None = None) -> None:
        gradient = torch.randint(-50, 50, (SIZE,), generator=self._generator).float()
        if nan_at is not None:
            gradient[nan_at] = NAN
        self.given += gradient.nan_to_num(nan=0.0)
        pserver.autograd.backward(context_id, [(self.module[0] * gradient).sum()])

    def push(self, context_id: int, *, nan_at: int | None = None) -> None:
        self.backward(context_id, nan_at=nan_at)
        self.optimizer.push(context_id)

    def step(self, context_id: int) -> bool:
        return self.optimizer.step(context_id, nonfinite="skip").stepped

    def assert_nothing_is_lost(self) -> None:
        kept = residual(self.optimizer._model.codec_state.state_dict(), SIZE)
        assert torch.equal(kept - self.module[0].detach(), self.given)


@pytest.mark.parametrize("last", ["pushed", "with the step"])
def test_every_push_of_a_context_is_kept_if_its_round_steps_nothing(
    last: str, cluster: LocalCluster, name: str
) -> None:
    def program(session: Cluster) -> None:
        trainer = Accumulating(session, name)
        for nan_at in (None, 17, None):
            with pserver.autograd.context() as context_id:
                trainer.push(context_id)
                trainer.push(context_id, nan_at=nan_at)
                trainer.backward(context_id)
                if last == "pushed":
                    trainer.optimizer.push(context_id)
                assert trainer.step(context_id) == (nan_at is None)
            trainer.assert_nothing_is_lost()

    cluster.train(1, program)


def test_contexts_that_are_open_together_keep_what_is_theirs(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> None:
        trainer = Accumulating(session, name)
        with pserver.autograd.context() as one, pserver.autograd.context() as other:
            trainer.push(one, nan_at=17)
            trainer.push(other)
            trainer.push(one)
            assert not trainer.step(one)
            trainer.push(other)
            assert trainer.step(other)
        trainer.assert_nothing_is_lost()

    cluster.train(1, program)


# Interruptions


def test_a_step_that_ran_into_its_deadline_is_kept_once_it_turns_out_to_be_refused(
    cluster: LocalCluster, name: str, join: Join
) -> None:
    fast, slow = trainers = join(TOPK, sync=pserver.Bsp(backup_workers=1))
    fast.step()
    set_timeout(slow.session, 0.3)
    cluster.faults.faults += [Fault(kind=FaultKind.LOSE_REPLY, method="StepOnce", times=1000)]
    with pytest.raises((DeadlineExceeded, ServerUnavailable, ServerErrors)):
        slow.step()
    cluster.faults.faults.clear()
    set_timeout(slow.session, TIMEOUT_S)
    assert not slow.step().accepted
    assert slow.optimizer.statistics().num_rejected == 2
    assert_nothing_is_lost(trainers, in_a_round=1)
    assert slow.step().accepted
    assert_nothing_is_lost(trainers, in_a_round=1)


# Saving, loading, broadcasting


def test_a_saved_state_is_of_one_moment_and_loading_copies_it(join: Join) -> None:
    first, second = join(TOPK)
    in_parallel(first.step, second.step)
    state = first.optimizer.codec_state_dict()
    before = {key: value.clone() for key, value in state.items()}
    first.optimizer.load_codec_state_dict(state)
    in_parallel(first.step, second.step)
    assert state.keys() == before.keys() == {f"residual.{index}" for index in range(len(before))}
    assert all(torch.equal(state[key], value) for key, value in before.items())
    assert not torch.equal(first.kept, residual(state, SIZE))


@pytest.mark.parametrize(
    ("codec", "state", "message"),
    [
        (TopK(ratio=0.5), {"residual.0": torch.zeros(32)}, r"remembers nothing.*residual\.0"),
        (PowerSGD(rank=1), {"residual.0": torch.zeros(32)}, r"a state of PowerSGD holds no 'residual\.0'"),
        (TOPK, {"factor.0.0": torch.zeros(1, 9)}, r"a state of ErrorFeedback holds no 'factor\.0\.0'"),
        (TOPK, {"codec.iteration.0": torch.tensor(3)}, r"a state of ErrorFeedback holds no 'codec\.iteration\.0'"),
        (ErrorFeedback(PowerSGD()), {"codec.residual.0": torch.zeros(32)}, r"PowerSGD holds no 'residual\.0'"),
    ],
    ids=str,
)
def test_a_state_of_another_codec_is_refused_by_name(
    codec: Codec, state: dict[str, torch.Tensor], message: str, join: Join
) -> None:
    (trainer,) = join(codec, 1)
    trainer.step()
    before = trainer.optimizer.codec_state_dict()
    with pytest.raises(InvalidRequest, match=message):
        trainer.optimizer.load_codec_state_dict(state)
    assert trainer.optimizer.codec_state_dict().keys() == before.keys()
    trainer.step()


def test_a_residual_of_another_model_is_refused_at_the_next_step_and_none_is_lost(join: Join) -> None:
    (trainer,) = join(TOPK, 1)
    trainer.step()
    state = trainer.optimizer.codec_state_dict()
    trainer.optimizer.load_codec_state_dict({"residual.0": torch.zeros(7)})
    with pytest.raises(InvalidRequest, match=r"bucket 0 has 32 elements .* residual has 7 .*new state"):
        trainer.step()
    trainer.given -= trainer.value.grad
    trainer.optimizer.load_codec_state_dict(state)
    trainer.step()
    assert_nothing_is_lost([trainer], in_a_round=1)


def test_broadcasting_parameters_keeps_what_the_codec_has(join: Join) -> None:
    first, second = join(TOPK)
    in_parallel(first.step, second.step)
    kept = [first.kept, second.kept]
    with torch.no_grad():
        first.value += 1
    in_parallel(first.optimizer.broadcast_parameters, second.optimizer.broadcast_parameters)
    assert torch.equal(first.kept, kept[0])
    assert torch.equal(second.kept, kept[1])
    assert torch.equal(first.value, second.value)
    first.given -= 2  # what was added, twice: for each trainer in a round
    in_parallel(first.step, second.step)
    assert_nothing_is_lost([first, second], in_a_round=2)
