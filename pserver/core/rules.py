"""What becomes of a round's mean gradient before it is stepped with: clipping, and NaN or infinite elements."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pserver.errors import InvalidRequest, NonFiniteGradient

#: What to do about NaN and infinite elements: step all the same, as torch does; step nothing; step nothing and raise.
NONFINITE_POLICIES = ("pass", "skip", "raise")
#: Keeps a zero norm from dividing by zero, as in torch.nn.utils.clip_grad_norm_.
NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRules:
    """Rules for the mean gradient over all trainers; those of the lowest rank count in a round.

    Attributes:
        max_norm: limit of the global 2-norm over all parameters, as torch.nn.utils.clip_grad_norm_ sets it; None: none.
        clip_value: limit of each element's absolute value, after the norm; None: none.
        nonfinite: one of `NONFINITE_POLICIES`.

    Raises:
        InvalidRequest: a limit that is not a positive number, or an unknown policy.
    """

    max_norm: float | None = None
    clip_value: float | None = None
    nonfinite: str = "pass"

    def __post_init__(self) -> None:
        for name in ("max_norm", "clip_value"):
            limit = getattr(self, name)
            if limit is not None and not (isinstance(limit, int | float) and 0 < limit <= sys.float_info.max):
                raise InvalidRequest(f"{name} must be a positive, finite number, or None, but is {limit!r}")
        if self.nonfinite not in NONFINITE_POLICIES:
            raise InvalidRequest(f"nonfinite must be one of {list(NONFINITE_POLICIES)}, but is {self.nonfinite!r}")

    @property
    def need_look(self) -> bool:
        """Whether shards must look at the mean gradient before the round can be decided."""
        return self.max_norm is not None or self.look_for_nonfinite

    @property
    def look_for_nonfinite(self) -> bool:
        """Whether shards must count NaN and infinite elements."""
        return self.nonfinite != "pass"


NO_RULES = GradientRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """NaN and infinite elements in one trainer's gradient of one tensor, on one shard.

    `trainer_id` 0 stands for the mean: all gradients were finite, their sum was not.
    """

    trainer_id: int
    tensor: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What rules make of a mean gradient; the fields are those of `Decision`."""

    clip_coefficient: float = 1.0
    clip_value: float | None = None
    skip: str = ""
    error: str = ""
    grad_norm: float | None = None
    num_nonfinite: int = 0


def treat(
    rules: GradientRules, squares: Iterable[float], nonfinite: Sequence[NonFinite], names: Sequence[str]
) -> Treatment:
    """Applies rules to what the shards found.

    Args:
        squares: of every bucket of every shard; their order does not matter to the bit.
        nonfinite: of every shard.
        names: of the model's tensors.
    """
    num_nonfinite = sum(each.count for each in nonfinite)
    skip = error = ""
    if num_nonfinite:
        first = min(nonfinite, key=lambda each: (each.trainer_id, each.tensor))
        whose = f"of trainer {first.trainer_id}" if first.trainer_id else "of the mean, of finite gradients"
        skip = (
            f"the gradients of this round have {num_nonfinite} NaN or infinite elements, the first in "
            f"{names[first.tensor]!r} {whose}; nothing was stepped"
        )
        error = NonFiniteGradient.__name__ if rules.nonfinite == "raise" else ""
    norm: float | None = None
    coefficient = 1.0
    if rules.max_norm is not None:
        norm = math.sqrt(_exact_sum(squares))
        coefficient = rules.max_norm / (norm + NORM_EPSILON)
        if coefficient > 1.0:
            coefficient = 1.0
    return Treatment(
        clip_coefficient=coefficient,
        clip_value=rules.clip_value,
        skip=skip,
        error=error,
        grad_norm=norm,
        num_nonfinite=num_nonfinite,
    )


def _exact_sum(squares: Iterable[float]) -> float:
    values = list(squares)
    if not all(math.isfinite(each) for each in values):
        return math.nan if any(math.isnan(each) for each in values) else math.inf
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
