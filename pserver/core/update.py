"""What one round does to a shard's values: the mean gradient, what is wrong with it, the step, and buffers."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import torch

from pserver.core.contexts import GradientContext
from pserver.core.messages import Contribution, Decision
from pserver.core.reduce import count_nonfinite, weighted_mean
from pserver.core.rules import NonFinite
from pserver.core.stepping import BucketStepper
from pserver.core.value_store import ValueStore
from pserver.wire.layout import Bucket, Layout


class Update:
    """The arithmetic of rounds on one shard. Contexts come in the order of a decision's contributions.

    Args:
        layout: of the model.
        store: the shard's values; `step_` and `take_buffers_` change them in place.
        trained: buckets that are stepped.
        steppers: of those, by bucket.
        buffer_buckets: buckets of buffers.
        buffers: one of `rounds.BUFFER_POLICIES`.
        keeps_gradients: whether the optimizer may keep or change the gradients it is given: it gets copies then.

    Not thread-safe.
    """

    def __init__(
        self,
        layout: Layout,
        store: ValueStore,
        trained: Sequence[Bucket],
        steppers: Mapping[int, BucketStepper],
        buffer_buckets: Set[int],
        buffers: str,
        keeps_gradients: bool,
    ) -> None:
        self._layout = layout
        self._store = store
        self._trained = trained
        self._steppers = steppers
        self._buffer_buckets = buffer_buckets
        self._buffers = buffers
        self._keeps_gradients = keeps_gradients

    def nonfinite(self, decision: Decision, contexts: Sequence[GradientContext]) -> tuple[NonFinite, ...]:
        """What is in the gradients that count: those without weight are in no mean."""
        found: list[NonFinite] = []
        for contribution, context in zip(decision.contributions, contexts, strict=True):
            if contribution.weight:
                found += self.count_nonfinite(context.trainer_id, context.buckets)
        return tuple(found)

    def count_nonfinite(self, trainer_id: int, gradients: Mapping[int, torch.Tensor]) -> Iterator[NonFinite]:
        """What is in one trainer's gradients, by tensor; 0 stands for the mean."""
        for bucket in self._trained:
            gradient = gradients[bucket.index]
            for segment in self._layout.segments[bucket.index] if count_nonfinite(gradient) else ():
                if count := count_nonfinite(gradient[segment.start : segment.stop]):
                    yield NonFinite(trainer_id=trainer_id, tensor=segment.tensor, count=count)

    def mean(self, decision: Decision, contexts: Sequence[GradientContext], bucket: Bucket) -> torch.Tensor:
        """The mean gradient of a bucket, in the dtype of its master; the contexts have it no more.

        It may be the memory of the one context that counts: nobody writes to it.
        """
        gradients, weights = self._gradients(decision, contexts, bucket)
        for _, context in _counted(decision, contexts):
            del context.buckets[bucket.index]
        return weighted_mean(gradients, weights, decision.divisor)

    def means(
        self, decision: Decision, contexts: Sequence[GradientContext], out: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The mean gradient of every bucket, each written to `out`; the contexts stay as they are."""
        return {
            bucket.index: weighted_mean(
                *self._gradients(decision, contexts, bucket), decision.divisor, out[bucket.index]
            )
            for bucket in self._trained
        }

    def _gradients(
        self, decision: Decision, contexts: Sequence[GradientContext], bucket: Bucket
    ) -> tuple[list[torch.Tensor], list[int]]:
        master = self._store.masters[bucket.index].dtype
        counted = _counted(decision, contexts)
        return [ctx.buckets[bucket.index].to(master) for _, ctx in counted], [each.weight for each, _ in counted]

    def absent(self, decision: Decision, contexts: Sequence[GradientContext]) -> frozenset[int]:
        """Tensors without a gradient from anybody who counts."""
        counted = [frozenset(context.absent or ()) for _, context in _counted(decision, contexts)]
        return frozenset.intersection(*counted) if counted else frozenset()

    def step_(
        self,
        decision: Decision,
        mean_of: Callable[[Bucket], torch.Tensor],
        absent: Set[int],
        stepped: Callable[[int], None],
        held: Set[int] | None,
    ) -> None:
        """Steps every parameter that has a gradient from anybody with the mean, once it is clipped.

        Args:
            mean_of: the mean gradient of a bucket.
            absent: tensors without a gradient.
            stepped: called with each bucket once it is.
            held: the buckets to step; None: all.
        """
        for bucket in self._trained:
            if held is not None and bucket.index not in held:
                continue
            mean = mean_of(bucket)
            if decision.clip_coefficient != 1.0:
                mean = mean * decision.clip_coefficient
            if decision.clip_value is not None:
                # Torch refuses a limit that the dtype cannot hold.
                limit = min(decision.clip_value, torch.finfo(mean.dtype).max)
                mean = mean.clamp(-limit, limit)
            if self._keeps_gradients:
                mean = mean.clone()
            with self._store.changing(bucket.index, decision.round):
                self._steppers[bucket.index].step_(mean, absent, decision.options[bucket.group])
            stepped(bucket.index)

    def buffers(self, decision: Decision, contexts: Sequence[GradientContext]) -> dict[int, torch.Tensor]:
        """The values that the round's buffers get: those of one trainer, or the mean (integers: of the lowest rank)."""
        if self._buffers == "local" or not decision.divisor:
            return {}
        counted = _counted(decision, contexts)
        if self._buffers == "lowest":
            counted = [(each, ctx) for each, ctx in counted if each.trainer_id == decision.buffers_from]
        found: dict[int, torch.Tensor] = {}
        for index in self._buffer_buckets if counted else ():
            dtype = self._store.masters[index].dtype
            if len(counted) > 1 and (dtype.is_floating_point or dtype.is_complex):
                offered = [context.buckets[index].to(dtype) for _, context in counted]
                found[index] = weighted_mean(offered, [each.weight for each, _ in counted], decision.divisor)
            else:
                found[index] = counted[0][1].buckets[index]
        return found

    def take_buffers_(self, decision: Decision, buffers: Mapping[int, torch.Tensor], held: Set[int] | None) -> None:
        """Gives buffers their values; `held` as in `step_`."""
        for index, values in buffers.items():
            if held is None or index in held:
                with self._store.changing(index, decision.round) as master:
                    master.copy_(values)


def _counted(decision: Decision, contexts: Sequence[GradientContext]) -> list[tuple[Contribution, GradientContext]]:
    """Those with weight."""
    return [(each, ctx) for each, ctx in zip(decision.contributions, contexts, strict=True) if each.weight]
