"""Gradients as integers of 8 bits, with a scale for each block."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from pserver.wire.compress.arguments import check_count
from pserver.wire.compress.codec import BucketShape
from pserver.wire.compress.elements import elements_of
from pserver.wire.compress.stateless import StatelessCodec

#: A hair more than 127, the largest integer: a scale that was rounded up must not make `127 * scale` infinite.
_DIVISOR = 127 * (1 + 2**-22)
#: The smallest normal float32. A block of zeros has it too, so that nothing is divided by zero.
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(StatelessCodec):
    """Rounds to -127 to 127 times a scale, which is a 127th of the largest element of each block.

    A quarter of the bytes of float32, and 4 for each block. The error of an element is at most 1/253 of the block's
    largest one, or 2^-127 if that is more, and what rounding to the bucket's dtype adds. A block with NaN or infinite
    elements, or with one beyond 4e40 (which only float64 holds), has no finite element once it is decoded.

    Args:
        block: elements that share a scale, 1 or more.
    """

    block: int = 256

    name: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        check_count("Int8", "block", self.block, least=1)

    def compressed_bytes(self, shape: BucketShape) -> int:
        """float32 scales, then one byte for each element."""
        return self._scale_bytes(shape.num_elements) + shape.num_elements

    def compress(self, buffer: torch.Tensor) -> torch.Tensor:
        """Scales, then integers."""
        scale_bytes = self._scale_bytes(buffer.numel())
        data = torch.empty(scale_bytes + buffer.numel(), dtype=torch.uint8, device=buffer.device)
        scales, integers = data[:scale_bytes].view(torch.float32), data[scale_bytes:].view(torch.int8)
        for (rows, column), (targets, _) in zip(self._cut(buffer, scales), self._cut(integers, scales), strict=True):
            _quantise(rows, column, targets)
        return data

    def expand(self, data: torch.Tensor, shape: BucketShape) -> torch.Tensor:
        """Takes any scales and any integers."""
        scale_bytes = self._scale_bytes(shape.num_elements)
        wide = torch.promote_types(shape.dtype, torch.float32)
        scales = elements_of(data[:scale_bytes], torch.float32).to(wide)
        values = data[scale_bytes:].view(torch.int8).to(wide)
        for rows, column in self._cut(values, scales):
            rows.mul_(column)
        return values.to(shape.dtype)

    def _scale_bytes(self, num_elements: int) -> int:
        return -(-num_elements // self.block) * torch.float32.itemsize

    def _cut(self, elements: torch.Tensor, scales: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Elements with a row for each block, and the column of its scales: whole blocks, then a shorter last one."""
        count = elements.numel() // self.block
        end = count * self.block
        parts = []
        if count:
            parts.append((elements[:end].view(count, self.block), scales[:count, None]))
        if end < elements.numel():
            parts.append((elements[end:].view(1, -1), scales[count:, None]))
        return parts


def _quantise(rows: torch.Tensor, scales: torch.Tensor, integers: torch.Tensor) -> None:
    largest = torch.maximum(rows.amax(dim=1, keepdim=True), rows.amin(dim=1, keepdim=True).neg_())
    scales.copy_(largest.to(torch.promote_types(rows.dtype, torch.float32)).div_(_DIVISOR)).clamp_(min=_SMALLEST_SCALE)
    # NaN and infinite elements are in their scale already; as integers they have no value.
    integers.copy_(torch.div(rows, scales).round_().nan_to_num_(nan=0.0))
