"""Host memory that a GPU copies to and from by itself: registered with CUDA's driver.

https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html (cudaHostRegister)
"""

import logging
import weakref
from contextlib import suppress
from typing import Any

import torch

from pserver.wire.shared_buckets import tensor_over

logger = logging.getLogger(__name__)

_PORTABLE, _READ_ONLY = 1, 8


def registered_with_driver(memory: memoryview, driver: Any = None) -> memoryview:
    """The same memory, page-locked for as long as anything refers to it; slower, but usable, if the driver refuses.

    Args:
        memory: mapped memory that begins at a page.
        driver: CUDA's runtime, by default torch's.
    """
    cudart = torch.cuda.cudart() if driver is None else driver  # type: ignore[no-untyped-call]
    tensor = tensor_over(memory, torch.uint8)
    address = tensor.data_ptr()
    flags = _PORTABLE | (_READ_ONLY if memory.readonly else 0)
    result = cudart.cudaHostRegister(address, tensor.numel(), flags)
    if int(result) != 0:
        logger.warning(
            "CUDA could not register %d bytes of shared memory (error %d); copies go through a buffer of the driver",
            tensor.numel(),
            int(result),
        )
        if driver is None:
            _forget_last_error()
        return memory
    weakref.finalize(memory.obj, _unregister, cudart, address)
    return memory


def _forget_last_error() -> None:
    """Takes the refusal back: the thread's next kernel, whatever it is, would be blamed for it.

    https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__ERROR.html (cudaGetLastError)
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def _unregister(cudart: Any, address: int) -> None:
    cudart.cudaHostUnregister(address)
