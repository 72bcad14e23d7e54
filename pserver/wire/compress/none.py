"""Gradients as they are."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from pserver.wire.compress.codec import BucketShape, GradBucket, check_encoded, completed
from pserver.wire.compress.elements import bytes_of, elements_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCompression:
    """Sends every bit as it is; for buckets of any dtype. What is encoded shares the buffer's memory."""

    name: ClassVar[str] = "none"
    whole_tensors: ClassVar[bool] = False

    def make_state(self) -> None:
        """Nothing."""

    def encode(self, state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The buffer's own bytes, without a copy."""
        return completed(bytes_of(bucket.buffer))

    def sizes(self, shape: BucketShape) -> frozenset[int]:
        """The bucket's."""
        return frozenset({shape.num_bytes})

    def decode(self, data: torch.Tensor, shape: BucketShape) -> torch.Tensor:
        """A copy.

        Raises:
            InvalidRequest: another size.
        """
        check_encoded(self.name, data, shape, self.sizes(shape))
        return elements_of(data.clone(), shape.dtype)
