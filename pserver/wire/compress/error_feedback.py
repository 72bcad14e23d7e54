"""What compression loses in one step is sent in later ones."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from pserver.errors import InvalidRequest
from pserver.wire.compress.codec import BucketShape, Codec, GradBucket, Remembers, completed
from pserver.wire.compress.saved import parse_key, set_or_remove

_INNER = "codec."


@dataclass(slots=True)
class ErrorFeedbackState:
    """What one trainer remembers of one model.

    Attributes:
        codec: the state of the codec inside.
        residuals: by bucket, what was in gradients and has not been sent; float32 or wider, all finite.
        sent: by bucket, the bytes of the last push, until they are given back or others follow.
    """

    codec: Any
    residuals: dict[int, torch.Tensor] = field(default_factory=dict)
    sent: dict[int, tuple[torch.Tensor, BucketShape]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Residuals and the state inside, as tensors by name; later steps do not change them.

        What was sent is not in it: the last push counts as settled.
        """
        residuals = {f"residual.{bucket}": value for bucket, value in self.residuals.items()}
        inner = {} if self.codec is None else self.codec.state_dict()
        return residuals | {_INNER + key: value for key, value in inner.items()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Replaces everything with copies of what `state_dict` gave; nothing counts as sent.

        Raises:
            InvalidRequest: it gives no such name or tensor, or the codec inside was another one; nothing is changed.
        """
        residuals: dict[int, torch.Tensor] = {}
        inner: dict[str, torch.Tensor] = {}
        for key, value in state_dict.items():
            match parse_key(key):
                case "residual", (bucket,) if value.dim() == 1 and value.is_floating_point():
                    residuals[bucket] = value.clone()
                case _ if key.startswith(_INNER) and self.codec is not None:
                    inner[key.removeprefix(_INNER)] = value
                case _:
                    raise InvalidRequest(
                        f"a state of ErrorFeedback holds no {key!r:.80} of shape {tuple(value.shape)}; load the state "
                        "of an equal codec"
                    )
        if self.codec is not None:
            self.codec.load_state_dict(inner)
        self.residuals = residuals
        self.sent.clear()

    def of_bucket(self, bucket: int) -> tuple[Any, ...]:
        """See `Remembers`."""
        inner = self.codec.of_bucket(bucket) if isinstance(self.codec, Remembers) else None
        return inner, self.residuals.get(bucket), self.sent.get(bucket)

    def put_back(self, bucket: int, found: tuple[Any, ...]) -> None:
        """See `Remembers`."""
        inner, residual, sent = found
        if isinstance(self.codec, Remembers):
            self.codec.put_back(bucket, inner)
        set_or_remove(self.residuals, bucket, residual)
        set_or_remove(self.sent, bucket, sent)


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Adds to each gradient what the ones before it lost; Seide et al. 2014, Karimireddy et al. 2019, arXiv:1901.09847.

    What is sent is what `codec` makes of gradient + residual; the residual is then what of that did not arrive. So the
    sum of gradients arrives, some of it later: training converges even if most of each gradient is dropped.

    Where what is sent is NaN or infinite, the residual stays as it was: such a gradient is seen by the server, and not
    carried on.

    Args:
        codec: any but another ErrorFeedback.
    """

    codec: Codec

    name: ClassVar[str] = "error_feedback"

    def __post_init__(self) -> None:
        if isinstance(self.codec, type | ErrorFeedback) or not isinstance(self.codec, Codec):
            raise InvalidRequest(
                f"ErrorFeedback: expected a codec such as pserver.compress.TopK(ratio=0.01), got {self.codec!r:.80}"
            )

    @property
    def whole_tensors(self) -> bool:
        """As the codec inside."""
        return self.codec.whole_tensors

    def make_state(self) -> ErrorFeedbackState:
        """No residual yet."""
        return ErrorFeedbackState(codec=self.codec.make_state())

    @torch.no_grad()
    def encode(self, state: ErrorFeedbackState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Bytes of the codec inside, of gradient + residual; waits for it if it is not done at once.

        Raises:
            InvalidRequest: the state is of another model, or what the codec inside raises.
        """
        shape = bucket.shape
        residual = _residual(state, bucket)
        corrected = bucket.buffer + residual
        rounded = GradBucket(index=bucket.index, buffer=corrected.to(shape.dtype), segments=bucket.segments)
        data = self.codec.encode(state.codec, rounded).wait()
        arrived = self.codec.decode(data, shape).to(corrected.device)
        lost = torch.sub(corrected, arrived, out=arrived if arrived.dtype == corrected.dtype else None)
        state.residuals[bucket.index] = _where_finite(lost, residual)
        state.sent[bucket.index] = (data, shape)
        return completed(data)

    @torch.no_grad()
    def give_back(self, state: ErrorFeedbackState, bucket: int) -> None:
        """What was sent last of a bucket has not been applied (refused, or its round stepped nothing): send it later.

        The residual becomes what it was before plus the gradient, up to rounding and without NaN and infinite elements.
        Does nothing if nothing was sent, or if it was given back already.
        """
        sent = state.sent.pop(bucket, None)
        if sent is not None:
            residual = state.residuals[bucket]
            values = self.codec.decode(*sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            state.residuals[bucket] = residual + values.to(residual.device)

    def sizes(self, shape: BucketShape) -> frozenset[int]:
        """As the codec inside."""
        return self.codec.sizes(shape)

    def decode(self, data: torch.Tensor, shape: BucketShape) -> torch.Tensor:
        """As the codec inside."""
        return self.codec.decode(data, shape)


def _residual(state: ErrorFeedbackState, bucket: GradBucket) -> torch.Tensor:
    buffer = bucket.buffer
    wide = torch.promote_types(buffer.dtype, torch.float32)
    residual = state.residuals.get(bucket.index)
    if residual is None:
        return torch.zeros_like(buffer, dtype=wide)
    if residual.shape != buffer.shape or residual.dtype != wide:
        raise InvalidRequest(
            f"bucket {bucket.index} has {buffer.numel()} elements of {buffer.dtype}, but its residual has "
            f"{residual.numel()} of {residual.dtype}; a model that has changed needs a new state"
        )
    return residual.to(buffer.device)


def _where_finite(lost: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    # A finite sum says that all is finite, in one pass; but to look at it on a device would be to wait.
    if not lost.is_cuda and math.isfinite(lost.sum()):
        return lost
    return torch.where(lost.isfinite(), lost, before)
