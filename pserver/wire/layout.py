"""Where each tensor of a model lies: name -> flat, offset, bucket.

Tensors of one dtype and optimizer group lie end to end in one flat, each starting at a 64-byte boundary. Flats are cut
into buckets at multiples of the bucket size, so a bucket starts at a 64-byte boundary of its flat *and* of the tensor
it cuts. That keeps vectorised kernels bit-identical however a model is cut: they treat whole vectors alike, and only a
tensor's own tail apart.

The layout follows from the model alone, never from the number of servers, so every process computes the same one.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from pserver.errors import InvalidRequest, UnsupportedModel
from pserver.wire.tensors import element_type

ALIGNMENT_BYTES = 64
#: Group of values that no optimizer steps: buffers and frozen parameters.
STORED = -1
MAX_BUCKET_BYTES = 4 << 20
MIN_BUCKET_BYTES = 4 << 10
#: A small model is cut into about this many buckets, so that it still spreads over servers.
TARGET_NUM_BUCKETS = 16
MAX_MODEL_BYTES = 1 << 43
MAX_TENSORS = 1_000_000
MAX_BUCKETS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter or buffer: qualified name, shape, dtype on the trainer, optimizer group (`STORED`: not stepped)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def __str__(self) -> str:
        group = "stored" if self.group == STORED else f"group {self.group}"
        return f"{self.name!r} {list(self.shape)} {str(self.dtype).removeprefix('torch.')} {group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """All tensors of one dtype and group, end to end. `num_elements` includes the padding between tensors."""

    dtype: torch.dtype
    group: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor starts: index of its flat, and offset in elements."""

    flat: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The piece of one tensor that lies in one bucket; `start` and `stop` are element offsets in the bucket."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A piece of a flat: elements `start` to `stop` of flat number `flat`."""

    index: int
    flat: int
    start: int
    stop: int
    dtype: torch.dtype
    group: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.num_elements * self.dtype.itemsize

    @property
    def num_master_bytes(self) -> int:
        """Bytes on a server."""
        return self.num_elements * element_type(self.dtype).master.itemsize


@dataclass(frozen=True)
class Layout:
    """The layout of one model; build it with `build_layout`."""

    tensors: tuple[TensorSpec, ...]
    flats: tuple[Flat, ...]
    places: tuple[Place, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int
    fingerprint: int = field(repr=False)

    @cached_property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """For each bucket the pieces of tensors in it, in order."""
        found: list[list[Segment]] = [[] for _ in self.buckets]
        first_bucket: dict[int, int] = {}
        for bucket in self.buckets:
            first_bucket.setdefault(bucket.flat, bucket.index)
        for index, (spec, place) in enumerate(zip(self.tensors, self.places, strict=True)):
            if spec.num_elements == 0:
                continue
            step = self.bucket_bytes // spec.dtype.itemsize
            begin, end = place.offset, place.offset + spec.num_elements
            for number in range(begin // step, (end - 1) // step + 1):
                bucket = self.buckets[first_bucket[place.flat] + number]
                start, stop = max(begin, bucket.start), min(end, bucket.stop)
                found[bucket.index].append(Segment(tensor=index, start=start - bucket.start, stop=stop - bucket.start))
        return tuple(tuple(each) for each in found)


def build_layout(tensors: Sequence[TensorSpec], bucket_bytes: int = 0) -> Layout:
    """Computes the layout of a model; `bucket_bytes` 0 chooses from its size.

    Raises:
        UnsupportedModel: no parameter to step, or a dtype that cannot travel.
        InvalidRequest: a negative or absurd size, a repeated name, or a bucket size that is not a multiple of 64.
    """
    _check(tensors, bucket_bytes)
    sizes: dict[tuple[torch.dtype, int], int] = {}
    positions: list[tuple[tuple[torch.dtype, int], int]] = []
    for spec in tensors:
        key = (spec.dtype, spec.group)
        offset = sizes.get(key, 0)
        positions.append((key, offset))
        sizes[key] = offset + _round_up(spec.num_bytes, ALIGNMENT_BYTES) // spec.dtype.itemsize
    numbers = {key: number for number, key in enumerate(sizes)}
    flats = tuple(Flat(dtype=dtype, group=group, num_elements=size) for (dtype, group), size in sizes.items())
    total_bytes = sum(flat.num_elements * flat.dtype.itemsize for flat in flats)
    bucket_bytes = bucket_bytes or _choose_bucket_bytes(total_bytes)
    if total_bytes // bucket_bytes > MAX_BUCKETS:
        raise InvalidRequest(
            f"buckets of {bucket_bytes} bytes would cut this model of {total_bytes} bytes into more than "
            f"{MAX_BUCKETS}; choose a larger bucket_bytes, or 0"
        )
    return Layout(
        tensors=tuple(tensors),
        flats=flats,
        places=tuple(Place(flat=numbers[key], offset=offset) for key, offset in positions),
        buckets=tuple(_cut(flats, bucket_bytes)),
        bucket_bytes=bucket_bytes,
        fingerprint=_fingerprint(tensors, bucket_bytes),
    )


def first_difference(registered: Sequence[TensorSpec], offered: Sequence[TensorSpec]) -> str | None:
    """The first tensor in which two models differ, as text for a user; None if they agree."""
    for index, (ours, theirs) in enumerate(zip(registered, offered, strict=False)):
        if ours != theirs:
            return f"tensor {index}: expected {ours}, got {theirs}"
    if len(registered) > len(offered):
        return f"tensor {len(offered)}: expected {registered[len(offered)]}, got none"
    if len(offered) > len(registered):
        return f"tensor {len(registered)}: expected none, got {offered[len(registered)]}"
    return None


def _check(tensors: Sequence[TensorSpec], bucket_bytes: int) -> None:
    if bucket_bytes < 0 or bucket_bytes % ALIGNMENT_BYTES:
        raise InvalidRequest(f"bucket_bytes must be a multiple of {ALIGNMENT_BYTES}, or 0, but is {bucket_bytes}")
    if len(tensors) > MAX_TENSORS:
        raise InvalidRequest(f"a model may have {MAX_TENSORS} tensors, but this one has {len(tensors)}")
    names: set[str] = set()
    total_bytes = 0
    for spec in tensors:
        element_type(spec.dtype)
        if any(size < 0 for size in spec.shape):
            raise InvalidRequest(f"tensor {spec}: dimensions must not be negative")
        if spec.group < STORED:
            raise InvalidRequest(f"tensor {spec}: the group must be {STORED} or more")
        if spec.name in names:
            raise InvalidRequest(f"two tensors are named {spec.name!r}; names must be unique in a model")
        names.add(spec.name)
        total_bytes += spec.num_bytes
        if total_bytes > MAX_MODEL_BYTES:
            raise InvalidRequest(f"a model may have {MAX_MODEL_BYTES} bytes; tensor {spec} goes beyond")
    if not any(spec.group != STORED and spec.num_elements for spec in tensors):
        raise UnsupportedModel(
            f"the model has no parameter to train ({len(tensors)} tensors, all empty, frozen or buffers); "
            "pass a module with at least one parameter that requires a gradient"
        )


def _choose_bucket_bytes(total_bytes: int) -> int:
    wanted = _round_up(-(-total_bytes // TARGET_NUM_BUCKETS), ALIGNMENT_BYTES)
    return min(max(wanted, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)


def _cut(flats: Sequence[Flat], bucket_bytes: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    for number, flat in enumerate(flats):
        step = bucket_bytes // flat.dtype.itemsize
        for start in range(0, flat.num_elements, step):
            stop = min(start + step, flat.num_elements)
            bucket = Bucket(index=len(buckets), flat=number, start=start, stop=stop, dtype=flat.dtype, group=flat.group)
            buckets.append(bucket)
    return buckets


def _fingerprint(tensors: Sequence[TensorSpec], bucket_bytes: int) -> int:
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{bucket_bytes}\n".encode())
    for spec in tensors:
        digest.update(f"{spec.name!r} {spec.shape} {element_type(spec.dtype).code} {spec.group}\n".encode())
    return int.from_bytes(digest.digest(), "little")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
