"""Gradients go to the servers while the backward pass goes on."""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager
from typing import Any

import torch

from pserver.client.hooks import removed_with
from pserver.client.ready_buckets import ReadyBuckets
from pserver.wire.layout import Layout

logger = logging.getLogger(__name__)

#: Sends gradients, by tensor of the layout, and says which buckets are complete with them.
Send = Callable[[Mapping[int, torch.Tensor], Sequence[int]], None]


class EarlyPush:
    """Hands over each bucket of gradients when its last one is ready, usually those of the last layers first.

    A gradient is taken up when the next one is ready: by then all hooks on it have run, the user's own included,
    whenever they were registered. What is left at the end of the pass, or was never ready, is left to the step; so is
    finding out what has been changed since it was handed over, or accumulated into.

    Args:
        layout: of the model.
        parameters: those that are stepped, by index in the layout.
        send: called on `worker`, one call after the other.
        worker: an executor of one thread, whose calls run in order.

    Backward passes may run on any thread, the rest belongs to one.
    """

    def __init__(self, layout: Layout, parameters: Mapping[int, torch.Tensor], send: Send, worker: Executor) -> None:
        self._send = send
        self._worker = worker
        self._lock = threading.Lock()  # guards the five fields below
        self._buckets = ReadyBuckets(layout, parameters)
        self._last: tuple[int, torch.Tensor] | None = None  # a parameter that is ready, but for the hooks after ours
        self._waiting: dict[int, torch.Tensor] = {}  # ready, but in no bucket that is complete
        self._paused = 0
        self._jobs: list[Future[None]] = []
        # A parameter outlives its optimizer; what sends its gradients must not live on with it.
        this = weakref.ref(self)

        def hook_of(index: int) -> Callable[[torch.Tensor], None]:
            def ready(parameter: torch.Tensor) -> None:
                early = this()
                if early is not None and not torch.compiler.is_compiling():
                    early._is_ready(index, parameter)

            return ready

        hooks = [
            parameter.register_post_accumulate_grad_hook(hook_of(index))  # type: ignore[no-untyped-call]
            for index, parameter in parameters.items()
        ]
        self._remove_hooks = removed_with(self, hooks)

    def close(self) -> None:
        """No gradient is handed over any more."""
        self._remove_hooks()
        self.drain()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block gradients only accumulate."""
        with self._lock:
            self._paused += 1
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1

    def drain(self) -> None:
        """Waits until all that is under way has been handed over; the next gradients are those of another step."""
        with self._lock:
            self._last = None
            self._waiting.clear()
            self._buckets.restart()
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            with contextlib.suppress(CancelledError):
                # What went wrong goes wrong again in the step, which says so.
                if (error := job.exception()) is not None:
                    logger.debug("gradients could not be pushed early: %s", error)

    def _is_ready(self, index: int, parameter: torch.Tensor) -> None:
        with self._lock:
            if self._paused:
                return
            before, self._last = self._last, (index, parameter)
            if before is None:
                return
            index, gradient = before[0], before[1].grad
            if gradient is None or self._buckets.is_ready(index):
                return  # a hook has cleared it, or it has grown since: the step will notice
            complete = self._buckets.mark(index)
            self._waiting[index] = gradient
            if not complete:
                return
            gradients, self._waiting = self._waiting, {}
            on_device = _Moment(parameter.device)
            with contextlib.suppress(RuntimeError):  # the session has ended
                self._jobs.append(self._worker.submit(self._hand_over, gradients, complete, on_device))

    def _hand_over(self, gradients: Mapping[int, torch.Tensor], buckets: Sequence[int], ready: "_Moment") -> None:
        with ready.passed():
            self._send(gradients, buckets)


def is_compiled(module: torch.nn.Module | None) -> bool:
    """Whether any part of a module is compiled: its gradients are ready all at once, and hooks are compiled with it."""
    return module is not None and any(
        isinstance(each, torch._dynamo.OptimizedModule) or each._compiled_call_impl is not None
        for each in module.modules()
    )


class _Moment:
    """Now, in the order of work on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Work of the block comes after that moment, beside what is queued later."""
        with contextlib.ExitStack() as stack:
            if self._event is not None:
                stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                stream.wait_event(self._event)
                stack.enter_context(torch.cuda.stream(stream))
            yield
