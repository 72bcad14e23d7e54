"""What a codec has encoded, until it is known whether it is applied."""

from collections.abc import Iterable, Set
from typing import Any

from pserver.wire.compress import Codec, ErrorFeedback, Remembers
from pserver.wire.layout import Layout


class Undecided:
    """What error feedback has counted as sent, by context and push; and what codecs remembered before the last push.

    What is sent early may change before its push is complete. It is then encoded as if it never had been: what the
    codec remembers of the bucket becomes what it was, and nothing of the gradient that is not sent after all is kept.

    Args:
        codec, state: of the model on this trainer.

    Not thread-safe.
    """

    def __init__(self, codec: Codec, state: Any) -> None:
        self._codec = codec if isinstance(codec, ErrorFeedback) else None
        self._state = state
        self._remembers = isinstance(state, Remembers)
        self._pushes: dict[int, list[dict[int, Any]]] = {}
        self._before: dict[int, Any] = {}

    def encoding(self, buckets: Iterable[int]) -> None:
        """These buckets are about to be encoded, perhaps once more for the push that is being made."""
        if self._remembers:
            for bucket in buckets:
                if bucket in self._before:
                    self._state.put_back(bucket, self._before[bucket])
                else:
                    self._before[bucket] = self._state.of_bucket(bucket)

    def take_all_back(self) -> None:
        """Whatever has been encoded since the last push is none."""
        for bucket, before in self._before.items():
            self._state.put_back(bucket, before)
        self._before.clear()

    def add(self, context_id: int) -> None:
        """What has been encoded since the last call is one more push of this context."""
        self._before.clear()
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
            for bucket in self._state.residuals.keys() & sent.keys():
                self._codec.give_back(self._state, bucket)
        self._state.sent = {}
        if last_only and pushes[:-1]:
            self._pushes[context_id] = pushes[:-1]

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
