"""Elements of a tensor as bytes and back, on any device."""

import torch


def bytes_of(elements: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-D uint8 tensor that shares its memory."""
    return elements.detach().reshape(-1).view(torch.uint8)


def elements_of(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as 1-D elements of `dtype`, sharing memory if `data` is aligned for it; a whole number of them."""
    aligned = data.data_ptr() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0
    return (data if aligned else data.clone()).view(dtype)
