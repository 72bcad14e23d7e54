"""How the buckets of one model travel: gradients as its codec makes them, values rounded if trainers want that."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from pserver.errors import InvalidRequest
from pserver.wire.compress import (
    BFloat16,
    BucketShape,
    Codec,
    Float16,
    GradBucket,
    NoCompression,
    TensorSegment,
    codec_for,
    make_codec,
)
from pserver.wire.layout import Bucket, Layout

#: Codecs that values may be rounded by on their way to trainers.
PULL_CODECS = (NoCompression.name, Float16.name, BFloat16.name)


class BucketCoding:
    """One bucket's codec, and the shape it needs to know."""

    def __init__(self, codec: Codec, shape: BucketShape) -> None:
        self.codec = codec
        self.shape = shape

    @cached_property
    def sizes(self) -> frozenset[int]:
        """Every number of bytes that the encoded bucket may have."""
        return self.codec.sizes(self.shape)

    def encode(self, state: Any, values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Bytes of the bucket's elements; see `Codec.encode`."""
        return self.codec.encode(state, GradBucket(index=self.shape.index, buffer=values, segments=self.shape.segments))

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        """The bucket, in its wire dtype; raises InvalidRequest for what the codec never gives."""
        return self.codec.decode(data, self.shape)


class Coding:
    """The codecs of a model, by bucket. Thread-safe.

    Args:
        layout: of the model.
        codec, arguments: name and arguments of the codec of its gradients.
        pull_codec: one of `PULL_CODECS`.

    Raises:
        InvalidRequest: no such codec, or arguments that it refuses.
    """

    def __init__(self, layout: Layout, codec: str, arguments: Mapping[str, object], pull_codec: str) -> None:
        self._layout = layout
        self.codec = make_codec(codec, arguments)
        if pull_codec not in PULL_CODECS:
            raise InvalidRequest(f"values can travel as {list(PULL_CODECS)}, not {pull_codec!r:.80}")
        self._pull_codec = make_codec(pull_codec, {})
        self._codings: dict[int, BucketCoding | None] = {}
        self._pushed: dict[int, Bucket] = {}
        self._pulled: dict[int, Bucket] = {}

    @property
    def gradients_are_plain(self) -> bool:
        """Whether gradients travel as they are, all of them."""
        return isinstance(self.codec, NoCompression)

    @property
    def values_are_plain(self) -> bool:
        """Whether values travel as they are, all of them."""
        return isinstance(self._pull_codec, NoCompression)

    def pushed(self, bucket: Bucket) -> Bucket:
        """The bucket with the dtype in which its gradients travel: a smaller one if the codec only casts."""
        if bucket.index not in self._pushed:
            self._pushed[bucket.index] = _cast(self.codec, bucket)
        return self._pushed[bucket.index]

    def pulled(self, bucket: Bucket) -> Bucket:
        """The bucket with the dtype in which its values travel."""
        if bucket.index not in self._pulled:
            self._pulled[bucket.index] = _cast(self._pull_codec, bucket)
        return self._pulled[bucket.index]

    def of_gradients(self, bucket: Bucket) -> BucketCoding | None:
        """What makes bytes of a bucket's gradients; None: they travel as elements, see `pushed`."""
        if bucket.index not in self._codings:
            self._codings[bucket.index] = self._of(self.codec, bucket)
        return self._codings[bucket.index]

    def _of(self, codec: Codec, bucket: Bucket) -> BucketCoding | None:
        codec = codec_for(codec, bucket.dtype)
        if bucket.group < 0 or isinstance(codec, NoCompression) or _dtype_of(codec) is not None:
            return None
        segments = []
        for each in self._layout.segments[bucket.index]:
            spec = self._layout.tensors[each.tensor]
            whole = each.stop - each.start == spec.num_elements
            segments.append(
                TensorSegment(tensor=each.tensor, start=each.start, stop=each.stop, shape=spec.shape if whole else None)
            )
        shape = BucketShape(
            index=bucket.index, dtype=bucket.dtype, num_elements=bucket.num_elements, segments=tuple(segments)
        )
        return BucketCoding(codec, shape)


def _cast(codec: Codec, bucket: Bucket) -> Bucket:
    """The bucket in the dtype that the codec casts it to, if it casts it and does nothing else."""
    dtype = _dtype_of(codec)
    if bucket.group < 0 or dtype is None or not bucket.dtype.is_floating_point:
        return bucket
    return replace(bucket, dtype=dtype) if dtype.itemsize < bucket.dtype.itemsize else bucket


def _dtype_of(codec: Codec) -> torch.dtype | None:
    """What a codec casts to; None if it does anything else, as a class derived from these may."""
    return codec.dtype if type(codec) is Float16 or type(codec) is BFloat16 else None
