"""Gradients of one forward/backward pass, kept on a shard until a round takes them."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import torch

from pserver.errors import InvalidRequest, UnknownContext
from pserver.types import GroupOptions, PushId

#: Most contexts that one trainer may have open on one shard.
MAX_CONTEXTS_PER_TRAINER = 1024


@dataclass(slots=True, kw_only=True)
class CommitInfo:
    """What a trainer says with its last push of a step; `samples` is the weight of its gradient in the mean."""

    step: int
    samples: int
    options: tuple[GroupOptions, ...]


@dataclass(slots=True, kw_only=True)
class GradientContext:
    """Gradients summed over every push into one context; `commit` is set once it is complete.

    `absent` are the tensors that had no gradient in any push.
    """

    trainer_id: int
    context_id: int
    buckets: dict[int, torch.Tensor] = field(default_factory=dict)
    absent: Set[int] | None = None
    commit: CommitInfo | None = None
    push_id: PushId | None = None

    def add_(self, buckets: dict[int, torch.Tensor], absent: Set[int]) -> None:
        """Adds gradients; takes ownership of the tensors."""
        self.absent = absent if self.absent is None else self.absent & absent
        for index, gradient in buckets.items():
            held = self.buckets.get(index)
            if held is None:
                self.buckets[index] = gradient
            else:
                held.add_(gradient)


class ContextTable:
    """The contexts of one shard by (trainer, context id). Not thread-safe."""

    def __init__(self) -> None:
        self._contexts: dict[tuple[int, int], GradientContext] = {}
        self._open: dict[int, int] = {}

    def open(self, trainer_id: int, context_id: int) -> GradientContext:
        """The context, made if it is new.

        Raises:
            InvalidRequest: it is committed already, or the trainer has too many.
        """
        known = self._contexts.get((trainer_id, context_id))
        if known is not None:
            if known.commit is not None:
                raise InvalidRequest(
                    f"context {context_id} of trainer {trainer_id} is committed for step {known.commit.step}; "
                    "use a new context for the next step"
                )
            return known
        if self._open.get(trainer_id, 0) >= MAX_CONTEXTS_PER_TRAINER:
            raise InvalidRequest(
                f"trainer {trainer_id} has {MAX_CONTEXTS_PER_TRAINER} contexts open on this shard; step or drop some"
            )
        context = GradientContext(trainer_id=trainer_id, context_id=context_id)
        self._contexts[trainer_id, context_id] = context
        self._open[trainer_id] = self._open.get(trainer_id, 0) + 1
        return context

    def holds(self, trainer_id: int, context_id: int) -> bool:
        """Whether the context is open, committed or not."""
        return (trainer_id, context_id) in self._contexts

    def drop(self, trainer_id: int, context_id: int) -> None:
        """Frees a context that is not committed; one that does not exist is no error.

        Raises:
            UnknownContext: it is committed and waits for its round.
        """
        known = self._contexts.get((trainer_id, context_id))
        if known is not None and known.commit is not None:
            raise UnknownContext(
                f"context {context_id} of trainer {trainer_id} is committed for step {known.commit.step} and belongs "
                "to a round now; it can no longer be dropped"
            )
        self._remove(trainer_id, context_id)

    def committed(self) -> Iterator[GradientContext]:
        """Contexts that wait for a round."""
        return (context for context in self._contexts.values() if context.commit is not None)

    def take_committed(self, trainer_id: int, step: int) -> GradientContext | None:
        """Removes and returns the committed context of a trainer's step."""
        for context in self.committed():
            if context.trainer_id == trainer_id and context.commit is not None and context.commit.step == step:
                self._remove(trainer_id, context.context_id)
                return context
        return None

    def end_trainer(self, trainer_id: int) -> list[GradientContext]:
        """Frees every context of a trainer and returns those that waited for a round."""
        gone = [context for context in self._contexts.values() if context.trainer_id == trainer_id]
        for context in gone:
            self._remove(trainer_id, context.context_id)
        return [context for context in gone if context.commit is not None]

    def __len__(self) -> int:
        return len(self._contexts)

    def _remove(self, trainer_id: int, context_id: int) -> None:
        if self._contexts.pop((trainer_id, context_id), None) is None:
            return
        self._open[trainer_id] -= 1
        if not self._open[trainer_id]:
            del self._open[trainer_id]
