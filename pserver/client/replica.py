"""A model's tensors on this trainer."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch

from pserver.client.description import ModelDescription
from pserver.core.messages import ModelSpec
from pserver.errors import InvalidRequest
from pserver.wire.layout import BUFFERS, STORED, Layout

#: Tensors of so many bytes together are worth a thread switch.
PART_BYTES = 4 << 20


class Replica:
    """The tensors as described: which of them travel when, and whether they are still as they were.

    Args:
        description: of the model.
        world_size: trainers that its first round waits for.

    Attributes:
        tensors: all of them, by index in the layout.
        stepped: the parameters among them that are stepped, by index.
        exchanged: those that travel with every step; `exchanged_buckets`: the buckets that do.
        parts: the same in pieces of at least `PART_BYTES`, in order: while one travels, the next may be copied.

    Not thread-safe.
    """

    def __init__(self, description: ModelDescription, world_size: int) -> None:
        self.spec: ModelSpec = description.spec(world_size)
        self.layout: Layout = self.spec.layout()
        self.coding = self.spec.coding(self.layout)
        tensors = description.tensors
        self.device = model_device([each.tensor for each in tensors])
        self.tensors = {index: each.tensor for index, each in enumerate(tensors)}
        self.exchanged = {index: each.tensor for index, each in enumerate(tensors) if each.group != STORED}
        self.exchanged_buckets = frozenset(each.index for each in self.layout.buckets if each.group != STORED)
        self.stepped = {index: each.tensor for index, each in enumerate(tensors) if each.group >= 0}
        self._buckets_of: dict[int, list[int]] = {}
        for bucket, segments in enumerate(self.layout.segments):
            for segment in segments:
                self._buckets_of.setdefault(segment.tensor, []).append(bucket)
        self.parts = _in_parts(self.exchanged)
        self._buffers = {index: each.tensor for index, each in enumerate(tensors) if each.group == BUFFERS}
        self._seen: dict[int, tuple[int, int]] = {}  # of parameters that are not being written

    @property
    def has_complex_parameters(self) -> bool:
        """Whether any parameter that is stepped is complex."""
        return any(self.tensors[index].is_complex() for index in self.stepped)

    def to_send(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
        """Gradients and the buffers of now, by index.

        Args:
            gradients: one for each parameter that is stepped, in order of registration.

        Raises:
            InvalidRequest: one of another shape, dtype, device or memory format than was registered.
        """
        found = self.by_index(gradients) | self._buffers
        self.check(found)
        return found

    def check(self, tensors: Mapping[int, torch.Tensor | None]) -> None:
        """Refuses gradients and buffers of another shape, dtype, device or memory format than was registered."""
        for index, tensor in tensors.items():
            if tensor is not None:
                self._check(index, tensor)

    def buckets_with(self, tensors: Iterable[int]) -> set[int]:
        """The buckets in which some of these tensors lie, wholly or in part."""
        return {bucket for index in tensors for bucket in self._buckets_of.get(index, ())}

    def complete_with(self, last: Iterable[int], tensors: Set[int]) -> set[int]:
        """The buckets with some of the `last` tensors in which nothing lies but these `tensors`."""
        return {
            bucket
            for bucket in self.buckets_with(last)
            if all(segment.tensor in tensors for segment in self.layout.segments[bucket])
        }

    def by_index(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
        """The gradients by index of their parameters."""
        return dict(zip(self.stepped, gradients, strict=True))

    def writing(self, tensors: Iterable[int]) -> None:
        """These tensors are about to be given the servers' values; if that is interrupted, they hold anything."""
        for index in tensors:
            self._seen.pop(index, None)

    def written(self, tensors: Iterable[int]) -> None:
        """These tensors have been given the servers' values."""
        self._seen |= {index: _state_of(self.tensors[index]) for index in tensors if index in self.stepped}

    def check_unchanged(self, holds: Callable[[int, torch.Tensor], bool]) -> None:
        """Refuses to go on if somebody else has written to the parameters: the servers' values would win silently.

        Args:
            holds: whether a parameter has the values that it was given, by index; asked only if it was touched.

        Raises:
            InvalidRequest: naming the first parameter that was changed, or one that is not as it was registered.
        """
        for index in self.stepped:
            parameter = self.tensors[index]
            self._check(index, parameter)
            if index not in self._seen or _state_of(parameter) == self._seen[index]:
                continue
            if not holds(index, parameter):
                name = self.spec.tensors[index].name
                raise InvalidRequest(
                    f"model {self.spec.name!r}: parameter {name!r} was changed on this trainer since the last step "
                    "(load_state_dict, an in-place operation?), but the servers hold the model. Undo the change, or "
                    "call broadcast_parameters() on the optimizer of every trainer to make the values of the "
                    "lowest rank everybody's"
                )
            self._seen[index] = _state_of(parameter)

    def _check(self, index: int, tensor: torch.Tensor) -> None:
        spec = self.spec.tensors[index]
        if tensor.layout is not torch.strided:
            raise InvalidRequest(
                f"the gradient of {spec.name!r} is {tensor.layout}; only dense ones can be pushed: use sparse=False"
            )
        if tensor.shape != spec.shape or tensor.dtype != spec.dtype or tensor.device != self.device:
            raise InvalidRequest(
                f"{spec.name!r} was registered as {list(spec.shape)} {spec.dtype} on {self.device}, but is now "
                f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}; a model must not change after registration"
            )


def _in_parts(tensors: Mapping[int, torch.Tensor]) -> list[dict[int, torch.Tensor]]:
    parts: list[dict[int, torch.Tensor]] = []
    num_bytes = PART_BYTES
    for index, tensor in tensors.items():
        if num_bytes >= PART_BYTES:
            parts.append({})
            num_bytes = 0
        parts[-1][index] = tensor
        num_bytes += tensor.nbytes
    return parts


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


def _state_of(parameter: torch.Tensor) -> tuple[int, int]:
    """What changes if somebody writes to a parameter or gives it other memory; not if it is written to by `.data`."""
    return parameter._version, parameter.data_ptr()
