"""The trainer's part of autograd contexts: gradients that no server has yet."""

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from pserver.errors import UnknownContext


@dataclass(slots=True)
class LocalContext:
    """One context; gradients by parameter, and what must run to free it on servers."""

    context_id: int
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    drop_on_servers: list[Callable[[], None]] = field(default_factory=list)

    def accumulate(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds a gradient; takes ownership of the tensor."""
        held = self.gradients.get(parameter)
        self.gradients[parameter] = gradient if held is None else held + gradient

    def take(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
        """Removes and returns the gradients of these parameters; None for one without."""
        return [self.gradients.pop(parameter, None) for parameter in parameters]


class ContextBook:
    """The open contexts of one trainer. Opening and closing are thread-safe; one context belongs to one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two fields below
        self._ids = itertools.count(1)
        self._open: dict[int, LocalContext] = {}

    def new_id(self) -> int:
        """An id that no other context of this trainer has."""
        with self._lock:
            return next(self._ids)

    def open(self) -> LocalContext:
        """A new, empty context."""
        context = LocalContext(self.new_id())
        with self._lock:
            self._open[context.context_id] = context
        return context

    def require(self, context_id: int) -> LocalContext:
        """The open context with this id.

        Raises:
            UnknownContext: none, or it has ended.
        """
        context = self._open.get(context_id)
        if context is None:
            raise UnknownContext(
                f"context {context_id} is not open on this trainer; use the id inside its "
                "`with pserver.autograd.context()` block"
            )
        return context

    def close(self, context_id: int) -> None:
        """Frees a context, here and on every server that holds gradients of it."""
        with self._lock:
            context = self._open.pop(context_id, None)
        if context is not None:
            for drop in context.drop_on_servers:
                drop()
