"""What a codec is: gradients of one bucket -> bytes and back.

The shape follows the communication hooks of torch's DistributedDataParallel (state, bucket -> future):
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html. Unlike there, nothing is reduced between trainers: the server
decodes what each of them sends, and sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from pserver.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSegment:
    """One tensor, or a piece of one, in a bucket; `start` and `stop` are element offsets in the bucket.

    `shape` is None if the tensor is cut by the bucket's border.
    """

    tensor: int
    start: int
    stop: int
    shape: tuple[int, ...] | None

    def __post_init__(self) -> None:
        size = self.stop - self.start
        if self.start < 0 or size < 0 or (self.shape is not None and math.prod(self.shape) != size):
            raise InvalidRequest(
                f"tensor {self.tensor}: elements {self.start} to {self.stop} of a bucket cannot hold shape {self.shape}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketShape:
    """A bucket without its values: what a server knows before anything has come.

    Between segments, and after the last, there may be padding.
    """

    index: int
    dtype: torch.dtype
    num_elements: int
    segments: tuple[TensorSegment, ...]

    def __post_init__(self) -> None:
        _check_segments(self.index, self.num_elements, self.segments)

    @property
    def num_bytes(self) -> int:
        """Bytes of the bucket uncompressed."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradBucket:
    """The gradients of one bucket end to end: `buffer` is 1-D and contiguous, on CPU or CUDA, of the dtype on the wire.

    Padding is zero.
    """

    index: int
    buffer: torch.Tensor
    segments: tuple[TensorSegment, ...]

    def __post_init__(self) -> None:
        if self.buffer.dim() != 1 or not self.buffer.is_contiguous():
            raise InvalidRequest(
                f"bucket {self.index}: expected a contiguous 1-D buffer, got shape {tuple(self.buffer.shape)} with "
                f"strides {self.buffer.stride()}; flatten it first"
            )
        _check_segments(self.index, self.buffer.numel(), self.segments)

    @property
    def shape(self) -> BucketShape:
        """The same without the values."""
        return BucketShape(
            index=self.index, dtype=self.buffer.dtype, num_elements=self.buffer.numel(), segments=self.segments
        )


@runtime_checkable
class Codec(Protocol):
    """Compresses gradients. Implementations are frozen, keyword-only dataclasses of plain values, and registered.

    Only buckets of floating-point elements come here: `codec_for` decides that. A codec itself is immutable and may be
    used by several threads; a state belongs to one model on one trainer, and to one thread at a time.

    Attributes:
        name: on the wire.
        whole_tensors: whether it needs buckets that cut no tensor.
    """

    name: ClassVar[str]

    @property
    def whole_tensors(self) -> bool:
        """Whether it needs buckets that cut no tensor."""
        ...

    def make_state(self) -> Any:
        """What one trainer remembers of one model from step to step; None if nothing.

        It has `state_dict()`, which gives tensors by name, and `load_state_dict(state_dict)`, which takes them. If it
        is also `Remembers`, a bucket that was sent early and has changed since is encoded as if it had not been.
        """
        ...

    def encode(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Compresses one bucket. Called once a push: a retry sends the same bytes, and the caller keeps them.

        The same state and the same bucket give the same bytes. Nothing waits for a CUDA device.

        Args:
            state: of `make_state`; changed in place.
            bucket: left as it is.

        Returns:
            A contiguous 1-D uint8 tensor on the buffer's device or on the CPU. It may share the buffer's memory: until
            the push is settled, neither may change.
        """
        ...

    def sizes(self, shape: BucketShape) -> frozenset[int]:
        """Every number of bytes that `encode` may give for such a bucket."""
        ...

    def decode(self, data: torch.Tensor, shape: BucketShape) -> torch.Tensor:
        """Gradients of what `encode` gave, or anybody else: data from the network is checked here.

        Args:
            data: contiguous 1-D uint8; left as it is.
            shape: of the bucket. Memory taken is in proportion to it, whatever the data.

        Returns:
            A new 1-D tensor of `shape.num_elements` elements of `shape.dtype`, on the data's device.

        Raises:
            InvalidRequest: `encode` gives no such data.
        """
        ...


@runtime_checkable
class Remembers(Protocol):
    """A codec's state of which one bucket's part can become again what it was."""

    def of_bucket(self, bucket: int) -> Any:
        """What it remembers of a bucket; `encode` does not change that."""
        ...

    def put_back(self, bucket: int, found: Any) -> None:
        """Makes that what it remembers of the bucket."""
        ...


def check_encoded(name: str, data: torch.Tensor, shape: BucketShape, sizes: frozenset[int]) -> None:
    """Refuses what no `encode` gives for such a bucket, as far as type and size tell.

    Raises:
        InvalidRequest: not contiguous 1-D uint8, or another size than one of `sizes`.
    """
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise InvalidRequest(
            f"bucket {shape.index}: expected bytes as a contiguous 1-D uint8 tensor, got {data.dtype} of shape "
            f"{tuple(data.shape)}"
        )
    if data.numel() not in sizes:
        raise InvalidRequest(
            f"bucket {shape.index}: {shape.num_elements} elements of {shape.dtype} have {_or(sizes)} bytes with the "
            f"codec {name!r}, but {data.numel()} came"
        )


def completed(data: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has its value; work under way on a CUDA device is ordered before whoever waits for it."""
    devices: list[int | str | torch.device] | None = [data.device] if data.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(data)
    return future


def _check_segments(index: int, num_elements: int, segments: Sequence[TensorSegment]) -> None:
    end = segments[-1].stop if segments else 0
    if not 0 <= end <= num_elements:
        raise InvalidRequest(f"bucket {index} has {num_elements} elements, but its segments go to {end}")


def _or(sizes: frozenset[int]) -> str:
    return " or ".join(map(str, sorted(sizes)))
