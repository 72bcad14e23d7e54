"""What one round does to a shard's values: the mean gradient, what is wrong with it, the step, and buffers."""

from collections.abc import Iterator, Mapping, Sequence, Set

import torch

from pserver.core.contexts import GradientContext
from pserver.core.messages import Decision
from pserver.core.reduce import count_nonfinite, weighted_mean_
from pserver.core.rules import NonFinite
from pserver.core.stepping import BucketStepper
from pserver.wire.layout import Bucket, Layout


class Update:
    """The arithmetic of rounds on one shard. Contexts come in the order of a decision's contributions.

    Args:
        layout: of the model.
        values: masters by bucket; `step_` and `take_buffers_` change them in place.
        trained: buckets that are stepped.
        steppers: of those, by bucket.
        buffer_buckets: buckets of buffers.
        buffers: one of `rounds.BUFFER_POLICIES`.

    Not thread-safe.
    """

    def __init__(
        self,
        layout: Layout,
        values: Mapping[int, torch.Tensor],
        trained: Sequence[Bucket],
        steppers: Mapping[int, BucketStepper],
        buffer_buckets: Set[int],
        buffers: str,
    ) -> None:
        self._layout = layout
        self._values = values
        self._trained = trained
        self._steppers = steppers
        self._buffer_buckets = buffer_buckets
        self._buffers = buffers

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

    def means(self, decision: Decision, contexts: Sequence[GradientContext]) -> dict[int, torch.Tensor]:
        """The mean gradient by bucket; uses up the contexts' gradients."""
        counted = [
            (each.weight, ctx) for each, ctx in zip(decision.contributions, contexts, strict=True) if each.weight
        ]
        means: dict[int, torch.Tensor] = {}
        for bucket in self._trained:
            master = self._values[bucket.index].dtype
            gradients = [context.buckets.pop(bucket.index).to(master) for _, context in counted]
            means[bucket.index] = weighted_mean_(gradients, [weight for weight, _ in counted], decision.divisor)
        return means

    def step_(self, decision: Decision, contexts: Sequence[GradientContext], means: Mapping[int, torch.Tensor]) -> None:
        """Steps every parameter that has a gradient from anybody with the mean, once it is clipped."""
        counted = [ctx for each, ctx in zip(decision.contributions, contexts, strict=True) if each.weight]
        absent = frozenset.intersection(*(frozenset(context.absent or ()) for context in counted))
        for bucket in self._trained:
            mean = means[bucket.index]
            if decision.clip_coefficient != 1.0:
                mean.mul_(decision.clip_coefficient)
            if decision.clip_value is not None:
                mean.clamp_(-decision.clip_value, decision.clip_value)
            self._steppers[bucket.index].step_(mean, absent, decision.options[bucket.group])

    def take_buffers_(self, decision: Decision, contexts: Sequence[GradientContext]) -> None:
        """Takes the round's buffers: those of one trainer, or the mean (integers: of the lowest rank)."""
        if self._buffers == "local":
            return
        counted = [(each, ctx) for each, ctx in zip(decision.contributions, contexts, strict=True) if each.weight]
        if self._buffers == "lowest":
            counted = [(each, ctx) for each, ctx in counted if each.trainer_id == decision.buffers_from]
        for index in self._buffer_buckets if counted else ():
            values = self._values[index]
            if len(counted) > 1 and (values.is_floating_point() or values.is_complex()):
                offered = [context.buckets.pop(index).to(values.dtype) for _, context in counted]
                values.copy_(weighted_mean_(offered, [each.weight for each, _ in counted], decision.divisor))
            else:
                values.copy_(counted[0][1].buckets[index])
