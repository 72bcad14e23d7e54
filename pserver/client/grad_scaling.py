"""What torch.amp.GradScaler and an optimizer whose steps happen elsewhere must tell each other.

The scaler keeps a stage and the infinities that it found for each optimizer; only through these can it learn of
infinities on other trainers. https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

# The scaler hands itself to `step` if the optimizer takes it, and warns that this may end some day.
warnings.filterwarnings("ignore", message="GradScaler is going to stop passing itself", category=FutureWarning)


class GradScaling:
    """One optimizer's side. Not thread-safe."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._unscaled: list[tuple[int, int]] | None = None

    def unscale_(self, scaler: Any) -> bool:
        """Unscales `.grad`, unless that has been done; whether there were infinities."""
        ready = scaler._per_optimizer_states[id(self._optimizer)]["stage"] is OptState.READY
        if ready and self._unscaled != self._gradients():
            scaler.unscale_(self._optimizer)
        return any(found.item() for found in scaler._found_inf_per_device(self._optimizer).values())

    def tell(self, scaler: Any, overflow: bool) -> None:
        """Makes `scaler.update()` see what the round decided instead of what was found here."""
        self._unscaled = None
        for found in scaler._found_inf_per_device(self._optimizer).values():
            found.fill_(float(overflow))

    def failed(self, scaler: Any) -> None:
        """The step raised: the next gradient is to be unscaled, unless it is the same one once more."""
        self._unscaled = self._gradients()
        scaler._per_optimizer_states[id(self._optimizer)]["stage"] = OptState.READY

    def _gradients(self) -> list[tuple[int, int]]:
        gradients = (parameter.grad for parameter in self._parameters)
        return [(id(each), each._version) for each in gradients if each is not None]
