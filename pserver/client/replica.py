"""A model's tensors on this trainer, and the flats in which they travel."""

from collections.abc import Sequence, Set

import torch

from pserver.client.description import ModelDescription
from pserver.client.flattening import FlatBuffers, model_device
from pserver.core.messages import ModelSpec
from pserver.errors import InvalidRequest
from pserver.wire.layout import BUFFERS, STORED, Layout


class Replica:
    """The tensors as described, and flats for what is sent and what is received.

    Args:
        description: of the model.
        world_size: trainers that its first round waits for.

    Attributes:
        values: flats that the servers' values are read into.
        gradients: flats that gradients and buffers are sent from.

    Not thread-safe.
    """

    def __init__(self, description: ModelDescription, world_size: int) -> None:
        self.spec: ModelSpec = description.spec(world_size)
        self.layout: Layout = self.spec.layout()
        tensors = description.tensors
        device = model_device([each.tensor for each in tensors])
        self.values = FlatBuffers(self.layout, device)
        self.gradients = FlatBuffers(self.layout, device)
        self.tensors = {index: each.tensor for index, each in enumerate(tensors)}
        self._stepped = [index for index, each in enumerate(tensors) if each.group >= 0]
        self._buffers = {index: each.tensor for index, each in enumerate(tensors) if each.group == BUFFERS}
        self._exchanged = {index: each.tensor for index, each in enumerate(tensors) if each.group != STORED}
        self._seen: dict[int, tuple[int, int]] = {}

    @property
    def has_complex_parameters(self) -> bool:
        """Whether any parameter that is stepped is complex."""
        return any(self.tensors[index].is_complex() for index in self._stepped)

    def gather_values(self) -> None:
        """Puts every tensor into the flats of values."""
        self.values.gather(self.tensors)

    def gather_gradients(self, gradients: Sequence[torch.Tensor | None]) -> frozenset[int]:
        """Puts gradients and the buffers of now into their flats.

        Args:
            gradients: one for each parameter that is stepped, in order of registration; None is sent as zeros.

        Returns:
            Indices of the parameters without a gradient.
        """
        return self.gradients.gather({**dict(zip(self._stepped, gradients, strict=True)), **self._buffers})

    def gathered(self, gradients: Sequence[torch.Tensor | None], absent: Set[int]) -> bool:
        """Whether the flats hold these gradients, bit for bit where they are numbers, and these are absent."""
        return all(
            index in absent if each is None else self.gradients.holds(index, each)
            for index, each in zip(self._stepped, gradients, strict=True)
        )

    def scatter_(self, *, include_all: bool) -> None:
        """Writes the values received into the tensors: into all, or into those that travel with every step."""
        self.values.scatter_(self.tensors if include_all else self._exchanged)
        self._seen = {index: _state_of(self.tensors[index]) for index in self._stepped}

    def check_unchanged(self) -> None:
        """Refuses to go on if somebody else has written to the parameters: the servers' values would win silently.

        Raises:
            InvalidRequest: naming the first parameter that was changed, or one that is not as it was registered.
        """
        for index in self._stepped:
            parameter = self.tensors[index]
            self.values.check(index, parameter)
            if _state_of(parameter) == self._seen.get(index):
                continue
            if not self.values.holds(index, parameter):
                name = self.spec.tensors[index].name
                raise InvalidRequest(
                    f"model {self.spec.name!r}: parameter {name!r} was changed on this trainer since the last step "
                    "(load_state_dict, an in-place operation?), but the servers hold the model. Undo the change, or "
                    "call broadcast_parameters() on the optimizer of every trainer to make the values of the "
                    "lowest rank everybody's"
                )
            self._seen[index] = _state_of(parameter)


def _state_of(parameter: torch.Tensor) -> tuple[int, int]:
    """What changes if somebody writes to a parameter or gives it other memory; not if it is written to by `.data`."""
    return parameter._version, parameter.data_ptr()
