"""Which buckets of a model are complete while its gradients become ready one after the other."""

from collections.abc import Iterable, Set

from pserver.wire.layout import Layout


class ReadyBuckets:
    """Counts tensors down, bucket by bucket. Not thread-safe.

    Args:
        layout: of the model.
        tensors: those whose gradients become ready; buckets that hold others never do.
    """

    def __init__(self, layout: Layout, tensors: Iterable[int]) -> None:
        awaited = frozenset(tensors)
        self._awaited: dict[int, Set[int]] = {}
        for bucket, segments in enumerate(layout.segments):
            held = frozenset(each.tensor for each in segments)
            if held and held <= awaited:
                self._awaited[bucket] = held
        self._buckets_of: dict[int, list[int]] = {}
        for bucket, found in self._awaited.items():
            for tensor in found:
                self._buckets_of.setdefault(tensor, []).append(bucket)
        self.restart()

    def restart(self) -> None:
        """Nothing is ready."""
        self._ready: set[int] = set()
        self._missing = {bucket: len(found) for bucket, found in self._awaited.items()}

    def is_ready(self, tensor: int) -> bool:
        """Whether it has been marked."""
        return tensor in self._ready

    def mark(self, tensor: int) -> list[int]:
        """A tensor is ready, for the first time; returns the buckets that are complete now."""
        self._ready.add(tensor)
        complete = []
        for bucket in self._buckets_of.get(tensor, ()):
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                complete.append(bucket)
        return complete
