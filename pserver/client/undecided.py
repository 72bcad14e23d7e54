"""What error feedback has counted as sent, until it is known whether it is applied."""

from collections.abc import Iterable, Set
from typing import Any

from pserver.wire.compress import Codec, ErrorFeedback
from pserver.wire.layout import Layout


class Undecided:
    """What was encoded, by context and push. For another codec than error feedback nothing is kept.

    Args:
        codec, state: of the model on this trainer.

    Not thread-safe.
    """

    def __init__(self, codec: Codec, state: Any) -> None:
        self._codec = codec if isinstance(codec, ErrorFeedback) else None
        self._state = state
        self._pushes: dict[int, list[dict[int, Any]]] = {}

    def add(self, context_id: int) -> None:
        """What has been encoded since the last call is one more push of this context."""
        if self._codec is not None:
            self._pushes.setdefault(context_id, []).append(self._state.sent)
            self._state.sent = {}

    def forget(self, context_id: int) -> None:
        """The context has been applied, or is not wanted any more."""
        self._pushes.pop(context_id, None)

    def give_back(self, context_id: int, *, last_only: bool = False) -> None:
        """The context, or its last push, has not been applied: it goes out with later gradients."""
        pushes = self._pushes.pop(context_id, [])
        if self._codec is None or not pushes:
            return
        for sent in pushes[-1:] if last_only else pushes:
            self._state.sent = sent
            self.take_back(tuple(sent))
        self._state.sent = {}
        if last_only and pushes[:-1]:
            self._pushes[context_id] = pushes[:-1]

    def take_back(self, buckets: Iterable[int]) -> None:
        """What has been encoded of these buckets, and belongs to no push yet, is not to be sent after all."""
        if self._codec is not None:
            for bucket in self._state.residuals.keys() & buckets:
                self._codec.give_back(self._state, bucket)

    def take_all_back(self) -> None:
        """The same for everything that belongs to no push yet."""
        if self._codec is not None:
            self.take_back(tuple(self._state.sent))

    def kept_of(self, tensors: Set[int], layout: Layout) -> frozenset[int]:
        """Those of some tensors of which something is kept: it may be sent without a gradient."""
        if self._codec is None or not tensors:
            return frozenset()
        return frozenset(
            segment.tensor
            for bucket, segments in enumerate(layout.segments)
            for segment in segments
            if segment.tensor in tensors
            and (residual := self._state.residuals.get(bucket)) is not None
            and residual[segment.start : segment.stop].any()
        )
