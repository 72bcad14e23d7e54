"""Which gradients are handed over during a backward pass, when, and as what."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pserver.client.early_push import EarlyPush, is_compiled
from pserver.wire.layout import TensorSpec, build_layout

LIMIT_S = 10.0


class Inline(Executor):
    """Runs each call where it is submitted."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **more))
        except Exception as error:
            future.set_exception(error)
        return future


class Watched:
    """Parameters p0, p1, ... of 16 elements, one to a bucket, and what is handed over of them."""

    def __init__(self, number: int = 4, *, bucket_bytes: int = 64, worker: Executor | None = None) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(16)) for _ in range(number)]
        self.sent: list[tuple[dict[int, float], list[int]]] = []
        self.error: Exception | None = None
        specs = [TensorSpec(name=f"p{index}", shape=(16,), dtype=torch.float32, group=0) for index in range(number)]
        self.early = EarlyPush(
            build_layout(specs, bucket_bytes), dict(enumerate(self.parameters)), self._send, worker or Inline()
        )

    def _send(self, gradients: Mapping[int, torch.Tensor], buckets: Sequence[int]) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(({index: each[0].item() for index, each in gradients.items()}, list(buckets)))

    def backward(self, *used: int, scale: float = 1.0) -> None:
        """Gradients of p`i` are (i + 1) * scale; they become ready in the order given."""
        loss = torch.zeros(())
        for index in reversed(used):
            loss = loss + (self.parameters[index] * ((index + 1) * scale)).sum()
        loss.backward()

    def tensors(self) -> list[list[int]]:
        """Those handed over, call by call."""
        return [list(gradients) for gradients, _ in self.sent]


def test_each_bucket_is_handed_over_when_the_next_gradient_is_ready_and_the_last_one_is_left_to_the_step() -> None:
    watched = Watched()
    watched.backward(3, 1, 2, 0)
    assert watched.sent == [({3: 4.0}, [3]), ({1: 2.0}, [1]), ({2: 3.0}, [2])]


def test_a_bucket_is_handed_over_with_all_its_tensors() -> None:
    watched = Watched(bucket_bytes=128)
    watched.backward(3, 1, 2, 0)
    assert watched.sent == [({3: 4.0, 1: 2.0, 2: 3.0}, [1])]


def test_what_has_no_gradient_is_not_waited_for() -> None:
    watched = Watched()
    watched.backward(3, 0)
    watched.early.drain()
    watched.backward(2, 1)
    assert watched.tensors() == [[3], [2]]


def test_a_hook_of_the_users_comes_first_whenever_it_was_registered() -> None:
    watched = Watched()

    def scale(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(10)

    for parameter in watched.parameters:
        parameter.register_post_accumulate_grad_hook(scale)
        parameter.register_hook(lambda gradient: gradient + 1)
    watched.backward(1, 0)
    assert watched.sent == [({1: 30.0}, [1])]


def test_a_gradient_that_a_hook_replaces_is_handed_over_as_it_is_then() -> None:
    watched = Watched()

    def replace(parameter: torch.Tensor) -> None:
        parameter.grad = parameter.grad * 10

    watched.parameters[1].register_post_accumulate_grad_hook(replace)
    watched.backward(1, 0)
    assert watched.sent == [({1: 20.0}, [1])]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_gradient_that_a_hook_clears_is_not_handed_over(when: str) -> None:
    """As optimizers that step inside the backward pass do."""
    parameters = [torch.nn.Parameter(torch.ones(16)) for _ in range(3)]

    def clear(parameter: torch.Tensor) -> None:
        parameter.grad = None

    if when == "before":
        parameters[1].register_post_accumulate_grad_hook(clear)
    specs = [TensorSpec(name=f"p{index}", shape=(16,), dtype=torch.float32, group=0) for index in range(3)]
    sent: list[list[int]] = []
    early = EarlyPush(
        build_layout(specs, 64), dict(enumerate(parameters)), lambda each, _: sent.append(list(each)), Inline()
    )
    if when == "after":
        parameters[1].register_post_accumulate_grad_hook(clear)
    (parameters[0].sum() + parameters[1].sum() + parameters[2].sum()).backward()
    assert sent == [[2]]
    early.close()


def test_what_grows_after_it_was_handed_over_is_left_to_the_step() -> None:
    watched = Watched()
    watched.backward(3, 2, 1, 0)
    watched.backward(3, 2, 1, 0)
    assert watched.sent == [({3: 4.0}, [3]), ({2: 3.0}, [2]), ({1: 2.0}, [1]), ({0: 1.0}, [0])]


def test_inside_paused_nothing_is_handed_over_and_afterwards_what_has_accumulated() -> None:
    watched = Watched()
    with watched.early.paused():
        watched.backward(1, 0)
        with watched.early.paused():
            watched.backward(1, 0)
        watched.backward(1, 0)
    assert watched.sent == []
    watched.backward(1, 0)
    assert watched.sent == [({1: 8.0}, [1])]


def test_after_draining_gradients_are_those_of_another_step() -> None:
    watched = Watched()
    for scale in (1.0, 10.0):
        for parameter in watched.parameters:
            parameter.grad = None
        watched.backward(1, 0, scale=scale)
        watched.early.drain()
    assert watched.sent == [({1: 2.0}, [1]), ({1: 20.0}, [1])]


def test_draining_waits_for_what_is_under_way() -> None:
    release, begun = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as worker:
        watched = Watched(worker=worker)

        def hold() -> None:
            begun.set()
            assert release.wait(LIMIT_S)

        worker.submit(hold)
        assert begun.wait(LIMIT_S)
        watched.backward(2, 1, 0)
        assert watched.sent == []
        threading.Timer(0.02, release.set).start()
        watched.early.drain()
        assert watched.tensors() == [[2], [1]]


def test_what_goes_wrong_is_left_to_the_step() -> None:
    watched = Watched()
    watched.error = ValueError("x")
    watched.backward(2, 1, 0)
    watched.error = None
    watched.early.drain()
    watched.backward(2, 1, 0)
    assert watched.tensors() == [[2], [1]]


@pytest.mark.parametrize("cancel", [False, True])
def test_gradients_are_computed_as_ever_once_the_session_has_ended(cancel: bool) -> None:
    release = threading.Event()
    worker = ThreadPoolExecutor(1)
    watched = Watched(worker=worker)
    try:
        worker.submit(release.wait, LIMIT_S)
        watched.backward(2, 1, 0)
        worker.shutdown(wait=False, cancel_futures=cancel)
    finally:
        release.set()
    watched.backward(2, 1, 0)
    watched.early.drain()
    assert watched.parameters[2].grad is not None
    assert watched.parameters[2].grad[0] == 6.0
    assert len(watched.sent) == (0 if cancel else 2)


@contextmanager
def forgotten(watched: Watched, how: str) -> Iterator[None]:
    if how == "close":
        watched.early.close()
    else:
        alive = weakref.ref(watched.early)
        del watched.early
        gc.collect()
        assert alive() is None
    yield


@pytest.mark.parametrize("how", ["close", "del"])
def test_parameters_outlive_what_watched_them(how: str) -> None:
    watched = Watched()
    watched.backward(1, 0)
    with forgotten(watched, how):
        assert not any(each._post_accumulate_grad_hooks for each in watched.parameters)
        watched.backward(1, 0)
    assert len(watched.sent) == 1


def test_a_module_of_which_any_part_is_compiled_is_known() -> None:
    def module() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    assert not is_compiled(None)
    assert not is_compiled(module())
    whole, part, wrapped = module(), module(), module()
    whole.compile(backend="eager")
    part[1].compile(backend="eager")
    wrapped[0] = torch.compile(wrapped[0], backend="eager")
    assert all(map(is_compiled, (whole, part, wrapped, torch.compile(module(), backend="eager"))))
