"""What codecs have in common that keep no state and whose size follows from the bucket's: a base class."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from pserver.wire.compress.codec import BucketShape, GradBucket, check_encoded, completed
from pserver.wire.compress.none import NoCompression

_NONE = NoCompression()


class StatelessCodec(ABC):
    """Compresses a bucket if that makes it smaller; else it goes uncompressed, as `NoCompression` has it.

    So no bucket has more bytes than uncompressed, and each has exactly one size.
    """

    __slots__ = ()

    name: ClassVar[str]
    whole_tensors: ClassVar[bool] = False

    @abstractmethod
    def compressed_bytes(self, shape: BucketShape) -> int:
        """Bytes that `compress` gives for such a bucket."""

    @abstractmethod
    def compress(self, buffer: torch.Tensor) -> torch.Tensor:
        """A new 1-D uint8 tensor on the same device; `buffer` has at least one element and is left as it is."""

    @abstractmethod
    def expand(self, data: torch.Tensor, shape: BucketShape) -> torch.Tensor:
        """The reverse; `data` has the right type and size.

        Raises:
            InvalidRequest: `compress` gives no such data.
        """

    def make_state(self) -> None:  # noqa: B027
        """Nothing."""

    def encode(self, state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Bytes of the one size that such a bucket has."""
        if not self._compresses(bucket.shape):
            return _NONE.encode(state, bucket)
        return completed(self.compress(bucket.buffer.detach()))

    def sizes(self, shape: BucketShape) -> frozenset[int]:
        """One size, at most the bucket's."""
        return frozenset({min(self.compressed_bytes(shape), shape.num_bytes)})

    def decode(self, data: torch.Tensor, shape: BucketShape) -> torch.Tensor:
        """A new tensor.

        Raises:
            InvalidRequest: another size, or data that `compress` does not give.
        """
        check_encoded(self.name, data, shape, self.sizes(shape))
        return self.expand(data, shape) if self._compresses(shape) else _NONE.decode(data, shape)

    def _compresses(self, shape: BucketShape) -> bool:
        return self.compressed_bytes(shape) < shape.num_bytes
