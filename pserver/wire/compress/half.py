"""Gradients rounded to 16 bits."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from pserver.wire.compress.codec import BucketShape
from pserver.wire.compress.elements import bytes_of, elements_of
from pserver.wire.compress.stateless import StatelessCodec


class _Half(StatelessCodec):
    __slots__ = ()

    dtype: ClassVar[torch.dtype]

    def compressed_bytes(self, shape: BucketShape) -> int:
        """Two for each element."""
        return shape.num_elements * self.dtype.itemsize

    def compress(self, buffer: torch.Tensor) -> torch.Tensor:
        """Torch's cast."""
        return bytes_of(buffer.to(self.dtype))

    def expand(self, data: torch.Tensor, shape: BucketShape) -> torch.Tensor:
        """Torch's cast; exact."""
        return elements_of(data, self.dtype).to(shape.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float16(_Half):
    """Rounds to float16, to nearest even; half the bytes of float32. Elements of 16 bits go as they are.

    The error of an element is at most 2^-11 of it, or 2^-25 if that is more; a hair more for float64, which torch
    rounds to float32 on the way. From 65520 on it becomes infinite, and is thus seen by who looks for that.
    """

    name: ClassVar[str] = "float16"
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True, slots=True, kw_only=True)
class BFloat16(_Half):
    """Rounds to bfloat16, to nearest even; half the bytes of float32. Elements of 16 bits go as they are.

    The error of an element is at most 2^-8 of it, or 2^-134 if that is more; a hair more for float64, which torch
    rounds to float32 on the way. It has the range of float32; what lies beyond, or is rounded beyond, becomes infinite.
    """

    name: ClassVar[str] = "bfloat16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
