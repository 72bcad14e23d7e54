"""Gradients of one forward/backward pass, kept on a shard until a round takes them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

import torch

from pserver.core.messages import CommitInfo
from pserver.errors import InvalidRequest, UnknownContext
from pserver.types import PushId

#: Most contexts that one trainer may have open on one shard.
MAX_CONTEXTS_PER_TRAINER = 1024


@dataclass(slots=True, kw_only=True)
class GradientContext:
    """Gradients summed over every push into one context, and the buffers of the last; `commit`: it is complete.

    `absent` are the tensors that had no gradient in any push. `lent`: the last push is read where its trainer wrote it;
    tells whether it still lies there. `acknowledged`: what it had before the push that completed it, as `buckets` and
    `absent`; replicas have that.
    """

    trainer_id: int
    context_id: int
    buckets: dict[int, torch.Tensor] = field(default_factory=dict)
    absent: Set[int] | None = None
    commit: CommitInfo | None = None
    push_id: PushId | None = None
    lent: Callable[[], bool] | None = None
    acknowledged: tuple[dict[int, torch.Tensor], Set[int]] | None = None

    @property
    def replicated(self) -> tuple[dict[int, torch.Tensor], Set[int]] | None:
        """What its trainer does not push again: all but the push that completed it."""
        if self.commit is not None:
            return self.acknowledged
        return None if self.absent is None else (self.buckets, self.absent)

    def add_(
        self,
        pushed: dict[int, torch.Tensor],
        absent: Set[int],
        replaced: Set[int],
        dtypes: Mapping[int, torch.dtype],
    ) -> None:
        """Adds one push. The tensors are kept, and not written to: they may be memory of a message or a mailbox.

        Args:
            pushed: 1-D tensors by bucket, as they travel.
            absent: tensors of the model without a gradient in this push.
            replaced: buckets whose values take the place of earlier ones.
            dtypes: of the buckets, and of sums.
        """
        self.absent = absent if self.absent is None else self.absent & absent
        for index, values in pushed.items():
            held = self.buckets.get(index)
            if held is None or index in replaced:
                self.buckets[index] = values
            else:
                self.buckets[index] = held.to(dtypes[index]) + values


class ContextTable:
    """The contexts of one shard by (trainer, context id). Not thread-safe."""

    def __init__(self) -> None:
        self._contexts: dict[tuple[int, int], GradientContext] = {}
        self._committed: dict[tuple[int, int], GradientContext] = {}
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

    def commit(self, context: GradientContext, commit: CommitInfo, push_id: PushId) -> None:
        """Completes an open context; it waits for a round from now on."""
        context.commit, context.push_id = commit, push_id
        self._committed[context.trainer_id, commit.step] = context

    def committed(self) -> Iterable[GradientContext]:
        """Contexts that wait for a round, in order of commit."""
        return self._committed.values()

    def committed_by(self, push_id: PushId) -> GradientContext | None:
        """The context that this mutation completed, if it waits for a round."""
        return next((each for each in self._committed.values() if each.push_id == push_id), None)

    def take_committed(self, trainer_id: int, step: int) -> GradientContext | None:
        """Removes and returns the committed context of a trainer's step; earlier ones of that trainer are freed.

        Those were refused by another shard: they are whole nowhere, and enter no round.
        """
        context = self._committed.get((trainer_id, step))
        for key in [key for key in self._committed if key[0] == trainer_id and key[1] < step]:
            self._remove(trainer_id, self._committed[key].context_id)
        if context is not None:
            self._remove(trainer_id, context.context_id)
        return context

    def take_open(self, trainer_id: int, context_id: int) -> GradientContext | None:
        """Removes and returns a context."""
        context = self._contexts.get((trainer_id, context_id))
        self._remove(trainer_id, context_id)
        return context

    def put_back(self, context: GradientContext) -> None:
        """Takes a context that was removed once more; a committed one waits for a round again."""
        self._contexts[context.trainer_id, context.context_id] = context
        self._open[context.trainer_id] = self._open.get(context.trainer_id, 0) + 1
        if context.commit is not None:
            self._committed[context.trainer_id, context.commit.step] = context

    def __iter__(self) -> Iterator[GradientContext]:
        return iter(self._contexts.values())

    def end_trainer(self, trainer_id: int) -> None:
        """Frees every context of a trainer."""
        if trainer_id not in self._open:
            return
        for context_id in [each.context_id for each in self._contexts.values() if each.trainer_id == trainer_id]:
            self._remove(trainer_id, context_id)

    def __len__(self) -> int:
        return len(self._contexts)

    def _remove(self, trainer_id: int, context_id: int) -> None:
        context = self._contexts.pop((trainer_id, context_id), None)
        if context is None:
            return
        if context.commit is not None:
            del self._committed[trainer_id, context.commit.step]
        self._open[trainer_id] -= 1
        if not self._open[trainer_id]:
            del self._open[trainer_id]
