"""Tensors of a model <-> flats in host memory: the copy that coalescing needs, and the only one.

On CUDA the flats exist twice: on the device, where many small copies are cheap, and pinned on the host. The two are
joined by one asynchronous copy on a stream of its own; events order it, and nothing waits for the whole device.
https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from collections.abc import Mapping, Sequence, Set

import torch

from pserver.errors import InvalidRequest
from pserver.wire.layout import Bucket, Layout
from pserver.wire.tensors import memory_of


class FlatBuffers:
    """One host buffer per flat of a layout, and views of it for every tensor.

    Args:
        layout: of the model.
        device: where the model's tensors are.

    Not thread-safe.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._host = [
            torch.zeros(flat.num_elements, dtype=flat.dtype, pin_memory=self._on_cuda) for flat in layout.flats
        ]
        self._near = [torch.zeros_like(each, device=device) for each in self._host] if self._on_cuda else self._host
        self._views = [
            self._near[place.flat][place.offset : place.offset + spec.num_elements].view(spec.shape)
            for spec, place in zip(layout.tensors, layout.places, strict=True)
        ]
        self._bytes = [memory_of(each) for each in self._host]
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def bucket_bytes(self, bucket: Bucket) -> memoryview:
        """The host memory of one bucket; writable."""
        size = bucket.dtype.itemsize
        return self._bytes[bucket.flat][bucket.start * size : bucket.stop * size]

    @torch.no_grad()
    def gather(self, tensors: Mapping[int, torch.Tensor | None]) -> frozenset[int]:
        """Copies tensors into the flats; the host buffers are complete on return.

        Args:
            tensors: by index in the layout, of its shape and dtype; None is sent as zeros. Others stay as they are.

        Returns:
            The indices that were None.

        Raises:
            InvalidRequest: another shape, dtype, device or memory format than was registered.
        """
        present = [(self._views[index], tensor) for index, tensor in tensors.items() if tensor is not None]
        for index, tensor in tensors.items():
            if tensor is not None:
                self.check(index, tensor)
        absent = frozenset(index for index, tensor in tensors.items() if tensor is None)
        if absent:
            torch._foreach_zero_([self._views[index] for index in sorted(absent)])
        if present:
            torch._foreach_copy_([view for view, _ in present], [tensor for _, tensor in present])
        if self._on_cuda:
            self._copy_between(to_host=True)
        return absent

    @torch.no_grad()
    def scatter_(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Copies the flats into tensors in place; on CUDA, ordered before later work of the current stream.

        Args:
            tensors: by index in the layout.
        """
        if self._on_cuda:
            self._copy_between(to_host=False)
        if tensors:
            torch._foreach_copy_(list(tensors.values()), [self._views[index] for index in tensors])

    @torch.no_grad()
    def holds(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the values that were scattered last, bit for bit where they are numbers."""
        return torch.equal(self._views[index], tensor)

    def wait_until_free(self) -> None:
        """Waits until the host buffers may be overwritten: the device has read what they held."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy_between(self, *, to_host: bool) -> None:
        assert self._stream is not None
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for host, near in zip(self._host, self._near, strict=True):
                target, source = (host, near) if to_host else (near, host)
                target.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        if to_host:
            self._copied.synchronize()
        else:
            current.wait_event(self._copied)

    def check(self, index: int, tensor: torch.Tensor) -> None:
        """Refuses a tensor that is not as it was registered.

        Raises:
            InvalidRequest: another shape, dtype, device or memory format.
        """
        spec = self._layout.tensors[index]
        if tensor.layout is not torch.strided:
            raise InvalidRequest(
                f"the gradient of {spec.name!r} is {tensor.layout}; only dense ones can be pushed: use sparse=False"
            )
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype or tensor.device != self._device:
            raise InvalidRequest(
                f"{spec.name!r} was registered as {list(spec.shape)} {spec.dtype} on {self._device}, but is now "
                f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}; a model must not change after registration"
            )


def model_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The one device that all tensors of a model are on.

    Raises:
        InvalidRequest: several, or one that is neither a CPU nor a CUDA device.
    """
    devices: Set[torch.device] = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise InvalidRequest(f"a model must be on one device, but its tensors are on {sorted(map(str, devices))}")
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"a model must be on a CPU or CUDA device, but is on {device}")
    return device
