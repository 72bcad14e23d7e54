"""One shard's buckets in host memory <-> tensors of a model: the copy that coalescing needs, and the only one.

On CUDA the buckets exist twice: on the device, where many small copies are cheap, and on the host, pinned or, if they
are shared memory, registered with the driver. The two are joined by one asynchronous copy on a stream of its own;
events order it, and nothing waits for the whole device. https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pserver.client.host_memory import registered_with_driver
from pserver.wire.layout import Bucket, Layout
from pserver.wire.shared_buckets import BucketOffsets, tensor_over
from pserver.wire.tensors import memory_of


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements `start` to `stop` of a tensor; the view has its shape if they are all of it, else it is 1-D."""

    tensor: int
    start: int
    stop: int
    view: torch.Tensor
    whole: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.whole else tensor.reshape(-1)[self.start : self.stop]


class _Stretch(NamedTuple):
    """A bucket's place in a run of buckets: elements from `start` on of the run's memory."""

    host: torch.Tensor
    near: torch.Tensor
    start: int
    num_elements: int

    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        part = slice(self.start, self.start + self.num_elements)
        return self.host[part], self.near[part]


class Region:
    """Views of some buckets for every tensor that lies in them, wholly or in part.

    Args:
        layout: of the model.
        offsets: of the buckets in the memory. Their dtype may be smaller than their tensors': copies convert.
        device: where the model's tensors are.
        memory: shared memory; None: memory of its own, zeroed.

    Not thread-safe.
    """

    def __init__(
        self, layout: Layout, offsets: BucketOffsets, device: torch.device, memory: memoryview | None = None
    ) -> None:
        self._offsets = offsets
        self._device = device
        self._on_cuda = device.type == "cuda"
        if memory is None:
            memory = memory_of(torch.zeros(offsets.num_bytes, dtype=torch.uint8, pin_memory=self._on_cuda))
        elif self._on_cuda:
            memory = registered_with_driver(memory)
        self._memory = memory
        self._casts = any(bucket.dtype != layout.buckets[bucket.index].dtype for bucket in offsets.buckets)
        self._stretches: dict[int, _Stretch] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        on_flat = _tensors_by_flat(layout)
        for run in offsets.runs():
            first, last = offsets.range_of(run[0].index), offsets.range_of(run[-1].index)
            host = tensor_over(memory[first.start : last.stop], run[0].dtype)
            near = torch.zeros_like(host, device=device) if self._on_cuda else host
            for bucket in run:
                self._stretches[bucket.index] = _Stretch(host, near, bucket.start - run[0].start, bucket.num_elements)
            for piece in _pieces(layout, on_flat[run[0].flat], run[0].start, near):
                self._pieces.setdefault(piece.tensor, []).append(piece)
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def bucket_bytes(self, bucket: Bucket) -> memoryview:
        """The host memory of one bucket."""
        return self._memory[self._offsets.range_of(bucket.index)]

    def cuts(self, tensor: int) -> bool:
        """Whether some of a tensor lies here, but not all."""
        return any(not piece.whole for piece in self._pieces.get(tensor, ()))

    @torch.no_grad()
    def gather(self, tensors: Mapping[int, torch.Tensor | None], buckets: Iterable[int] | None = None) -> None:
        """Copies tensors into the buckets; the host memory is complete on return.

        Args:
            tensors: by index in the layout, of its shape and dtype; None is zeros. Others stay as they are.
            buckets: those whose host memory is to be complete; None: all.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        absent: list[torch.Tensor] = []
        for index, tensor in tensors.items():
            for piece in self._pieces.get(index, ()):
                if tensor is None:
                    absent.append(piece.view)
                else:
                    targets.append(piece.view)
                    sources.append(piece.of(tensor))
        if absent:
            torch._foreach_zero_(absent)
        self._copy(targets, sources)
        if self._on_cuda:
            self._copy_between(self._runs() if buckets is None else self._of(buckets), to_host=True)

    @torch.no_grad()
    def scatter_(self, tensors: Mapping[int, torch.Tensor], buckets: Iterable[int] | None = None) -> None:
        """Copies the buckets into tensors in place; on CUDA, ordered before later work of the current stream.

        Args:
            tensors: by index in the layout; those that the region cuts must be contiguous.
            buckets: those in which the tensors lie; None: perhaps all.
        """
        if self._on_cuda:
            self._copy_between(self._runs() if buckets is None else self._of(buckets), to_host=False)
        found = [(piece, tensor) for index, tensor in tensors.items() for piece in self._pieces.get(index, ())]
        targets = [tensor if piece.whole else tensor.view(-1)[piece.start : piece.stop] for piece, tensor in found]
        self._copy(targets, [piece.view for piece, _ in found])

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copies each source into its target."""
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        if self._casts:
            # On CUDA some versions of torch take all targets for the dtype of the first: pytorch/pytorch issue 173383.
            for target, source in zip(targets, sources, strict=True):
                into, of = groups.setdefault((target.dtype, source.dtype), ([], []))
                into.append(target)
                of.append(source)
        elif targets:
            groups[targets[0].dtype, sources[0].dtype] = targets, sources
        for into, of in groups.values():
            torch._foreach_copy_(into, of)

    @torch.no_grad()
    def holds(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the values that lie here, bit for bit where they are numbers."""
        return all(torch.equal(piece.view.to(tensor.dtype), piece.of(tensor)) for piece in self._pieces.get(index, ()))

    @torch.no_grad()
    def has_gathered(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor would be gathered as what lies here, bit for bit where it is numbers."""
        return all(
            torch.equal(piece.view, piece.of(tensor).to(piece.view.dtype)) for piece in self._pieces.get(index, ())
        )

    def wait_until_free(self) -> None:
        """Waits until the device has read the host memory, or written it."""
        if self._copied is not None:
            self._copied.synchronize()

    def _of(self, buckets: Iterable[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Host and device memory of some of the buckets."""
        return [found.both() for bucket in buckets if (found := self._stretches.get(bucket)) is not None]

    def _runs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Host and device memory of all buckets, in as few pieces as can be."""
        return list({id(each.host): (each.host, each.near) for each in self._stretches.values()}.values())

    def _copy_between(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, to_host: bool) -> None:
        assert self._stream is not None
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for host, near in pairs:
                target, source = (host, near) if to_host else (near, host)
                target.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        if to_host:
            self._copied.synchronize()
        else:
            current.wait_event(self._copied)


def _tensors_by_flat(layout: Layout) -> list[tuple[list[int], list[int]]]:
    """For each flat the ends of its tensors, and their indices, in order."""
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in layout.flats]
    for index, (spec, place) in enumerate(zip(layout.tensors, layout.places, strict=True)):
        if spec.num_elements:
            found[place.flat][0].append(place.offset + spec.num_elements)
            found[place.flat][1].append(index)
    return found


def _pieces(
    layout: Layout, on_flat: tuple[list[int], list[int]], start: int, stretch: torch.Tensor
) -> Iterator[_Piece]:
    """What lies in a stretch of a flat that begins at element `start`."""
    ends, indices = on_flat
    stop = start + stretch.numel()
    for number in range(bisect_left(ends, start + 1), len(ends)):
        index = indices[number]
        spec, offset = layout.tensors[index], layout.places[index].offset
        if offset >= stop:
            return
        first, last = max(offset, start), min(ends[number], stop)
        view = stretch[first - start : last - start]
        whole = last - first == spec.num_elements
        yield _Piece(index, first - offset, last - offset, view.view(spec.shape) if whole else view, whole)
