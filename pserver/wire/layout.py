"""Where each tensor of a model lies: name -> flat, offset, bucket.

Tensors of one dtype and optimizer group lie end to end in one flat, each starting at a 64-byte boundary. Flats are cut
into buckets at multiples of the bucket size, so a bucket starts at a 64-byte boundary of its flat *and* of the tensor
it cuts. That keeps vectorised kernels bit-identical however a model is cut: they treat whole vectors alike, and only a
tensor's own tail apart. Optimizers that must see a tensor as a whole get buckets that cut none.

The layout follows from the model alone, never from the number of servers, so every process computes the same one.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from pserver.errors import InvalidRequest, UnsupportedModel
from pserver.wire.tensors import MAX_DIMENSIONS, element_type

ALIGNMENT_BYTES = 64
#: Group of values that no optimizer steps: frozen parameters, and buffers that stay as they are.
STORED = -1
#: Group of buffers that travel with every step and are combined by a policy; no optimizer steps them either.
BUFFERS = -2
MAX_BUCKET_BYTES = 4 << 20
MIN_BUCKET_BYTES = 8 << 10
#: A small model is cut into about this many buckets, so that it still spreads over servers.
TARGET_NUM_BUCKETS = 16
MAX_MODEL_BYTES = 1 << 43
MAX_TENSORS = 1_000_000
MAX_BUCKETS = 1 << 18
MAX_NAME_LENGTH = 1024

_GROUP_NAMES = {STORED: "stored", BUFFERS: "buffer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter or buffer: qualified name, shape, dtype on the trainer, group (below 0: not stepped)."""

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
        group = _GROUP_NAMES.get(self.group, f"group {self.group}")
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
    """The piece of one tensor that lies in one bucket; `start` and `stop` are element offsets in the bucket.

    `offset` is where the piece starts in its tensor, in elements of the tensor flattened in row-major order.
    """

    tensor: int
    start: int
    stop: int
    offset: int


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
    """The layout of one model; build it with `build_layout`. `whole_tensors` says that no bucket cuts a tensor."""

    tensors: tuple[TensorSpec, ...]
    flats: tuple[Flat, ...]
    places: tuple[Place, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int
    whole_tensors: bool
    fingerprint: int = field(repr=False)

    def part(self, runs: Iterable[range]) -> tuple[Bucket, ...]:
        """The buckets of these runs.

        Raises:
            InvalidRequest: runs that are empty, out of order, or beyond the layout's buckets.
        """
        last = 0
        found: list[Bucket] = []
        for run in runs:
            if not last <= run.start < run.stop <= len(self.buckets) or run.step != 1:
                raise InvalidRequest(
                    f"the layout has {len(self.buckets)} buckets; expected ascending runs of them, but {run} came "
                    f"after {last}"
                )
            found += self.buckets[run.start : run.stop]
            last = run.stop
        return tuple(found)

    def shapes(self, bucket: int) -> list[tuple[int, ...]] | None:
        """The shapes of the tensors in a bucket, by segment; None where tensors may be cut."""
        return [self.tensors[each.tensor].shape for each in self.segments[bucket]] if self.whole_tensors else None

    @cached_property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """For each bucket the pieces of tensors in it, in order."""
        found: list[list[Segment]] = [[] for _ in self.buckets]
        starts: list[list[int]] = [[] for _ in self.flats]
        for bucket in self.buckets:
            starts[bucket.flat].append(bucket.start)
        first_bucket = [0, *accumulate(map(len, starts))]
        for index, (spec, place) in enumerate(zip(self.tensors, self.places, strict=True)):
            begin, end = place.offset, place.offset + spec.num_elements
            number = first_bucket[place.flat] + bisect_right(starts[place.flat], begin) - 1
            while begin < end:
                bucket = self.buckets[number]
                stop = min(end, bucket.stop)
                found[number].append(
                    Segment(
                        tensor=index,
                        start=begin - bucket.start,
                        stop=stop - bucket.start,
                        offset=begin - place.offset,
                    )
                )
                begin, number = stop, number + 1
        return tuple(tuple(each) for each in found)


def build_layout(tensors: Sequence[TensorSpec], bucket_bytes: int = 0, *, whole_tensors: bool = False) -> Layout:
    """Computes the layout of a model.

    Args:
        tensors: in the model's order.
        bucket_bytes: size of a bucket on the wire; a multiple of 64, or 0 to choose from the model's size.
        whole_tensors: cut no tensor. The tensors of a flat are packed in order into buckets of up to `bucket_bytes`; a
            larger tensor has a bucket of its own, of whatever size.

    Raises:
        UnsupportedModel: no parameter to step, or a dtype that cannot travel.
        InvalidRequest: a tensor that no model has (name, shape, group), too many of them, a repeated name, or a bucket
            size that is not a multiple of 64 or makes more than `MAX_BUCKETS` buckets.
    """
    _check(tensors, bucket_bytes)
    padded: dict[tuple[torch.dtype, int], list[int]] = {}  # by flat, elements of each tensor with its padding
    positions: list[tuple[tuple[torch.dtype, int], int]] = []
    ends: dict[tuple[torch.dtype, int], int] = {}
    for spec in tensors:
        key = (spec.dtype, spec.group)
        size = _round_up(spec.num_bytes, ALIGNMENT_BYTES) // spec.dtype.itemsize
        padded.setdefault(key, []).append(size)
        offset = ends.get(key, 0)
        positions.append((key, offset))
        ends[key] = offset + size
    numbers = {key: number for number, key in enumerate(ends)}
    flats = tuple(Flat(dtype=dtype, group=group, num_elements=size) for (dtype, group), size in ends.items())
    cuts = [_Cut(dtype.itemsize, sizes, whole_tensors) for (dtype, _), sizes in padded.items()]
    bucket_bytes = bucket_bytes or _choose_bucket_bytes(cuts)
    num_buckets = sum(cut.num_buckets(bucket_bytes) for cut in cuts)
    if num_buckets > MAX_BUCKETS:
        raise InvalidRequest(
            f"buckets of {bucket_bytes} bytes would cut this model into {num_buckets} of them, in {len(flats)} flats; "
            f"at most {MAX_BUCKETS} are accepted: choose a larger bucket_bytes or 0, and fewer parameter groups"
        )
    return Layout(
        tensors=tuple(tensors),
        flats=flats,
        places=tuple(Place(flat=numbers[key], offset=offset) for key, offset in positions),
        buckets=tuple(_buckets(flats, cuts, bucket_bytes)),
        bucket_bytes=bucket_bytes,
        whole_tensors=whole_tensors,
        fingerprint=_fingerprint(tensors, bucket_bytes, whole_tensors),
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
    for index, spec in enumerate(tensors):
        _check_tensor(index, spec)
        if spec.name in names:
            raise InvalidRequest(f"two tensors are named {spec.name!r}; names must be unique in a model")
        names.add(spec.name)
        total_bytes += spec.num_bytes
        if total_bytes > MAX_MODEL_BYTES:
            raise InvalidRequest(f"a model may have {MAX_MODEL_BYTES} bytes; tensor {spec} goes beyond")
    if not any(spec.group >= 0 and spec.num_elements for spec in tensors):
        raise UnsupportedModel(
            f"the model has no parameter to train ({len(tensors)} tensors, all empty, frozen or buffers); "
            "pass a module with at least one parameter that requires a gradient"
        )


def _check_tensor(index: int, spec: TensorSpec) -> None:
    # What is quoted in a message is bounded first: these values come from the network.
    if not 1 <= len(spec.name) <= MAX_NAME_LENGTH:
        raise InvalidRequest(
            f"tensor {index}: a name must have 1 to {MAX_NAME_LENGTH} characters, but this one has {len(spec.name)}: "
            f"{spec.name[:40]!r}"
        )
    if len(spec.shape) > MAX_DIMENSIONS:
        raise InvalidRequest(
            f"tensor {index}, {spec.name!r}: at most {MAX_DIMENSIONS} dimensions are accepted, but it has "
            f"{len(spec.shape)}"
        )
    element_type(spec.dtype)
    if any(size < 0 for size in spec.shape):
        raise InvalidRequest(f"tensor {spec}: dimensions must not be negative")
    if spec.group < BUFFERS:
        raise InvalidRequest(f"tensor {spec}: the group must be 0 or more, {STORED} (stored) or {BUFFERS} (buffer)")
    # Torch computes strides of empty tensors too, and refuses those that overflow.
    if math.prod(max(size, 1) for size in spec.shape) * spec.dtype.itemsize > MAX_MODEL_BYTES:
        raise InvalidRequest(f"a model may have {MAX_MODEL_BYTES} bytes; the dimensions of tensor {spec} go beyond")


class _Cut:
    """How one flat is cut; `sizes` are the padded sizes of its tensors, in elements of `itemsize` bytes."""

    def __init__(self, itemsize: int, sizes: Sequence[int], whole_tensors: bool) -> None:
        self._itemsize = itemsize
        self._sizes = sizes
        self._whole_tensors = whole_tensors
        self.num_bytes = sum(sizes) * itemsize

    def num_buckets(self, bucket_bytes: int) -> int:
        """How many buckets the flat has, without making them."""
        if self._whole_tensors:
            return sum(1 for _ in self.stops(bucket_bytes))
        return -(-self.num_bytes // bucket_bytes)

    def stops(self, bucket_bytes: int) -> Iterator[int]:
        """Where each bucket stops, in elements."""
        step, end = bucket_bytes // self._itemsize, self.num_bytes // self._itemsize
        if not self._whole_tensors:
            yield from range(step, end, step)
        else:
            start = position = 0
            for size in self._sizes:
                if size and start < position and position + size - start > step:
                    yield position
                    start = position
                position += size
        if end:
            yield end


def _choose_bucket_bytes(cuts: Sequence[_Cut]) -> int:
    total_bytes = sum(cut.num_bytes for cut in cuts)
    wanted = _round_up(-(-total_bytes // TARGET_NUM_BUCKETS), ALIGNMENT_BYTES)
    chosen = min(max(wanted, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)
    while chosen < total_bytes and sum(cut.num_buckets(chosen) for cut in cuts) > MAX_BUCKETS:
        chosen *= 2
    return chosen


def _buckets(flats: Sequence[Flat], cuts: Sequence[_Cut], bucket_bytes: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    for number, (flat, cut) in enumerate(zip(flats, cuts, strict=True)):
        start = 0
        for stop in cut.stops(bucket_bytes):
            bucket = Bucket(index=len(buckets), flat=number, start=start, stop=stop, dtype=flat.dtype, group=flat.group)
            buckets.append(bucket)
            start = stop
    return buckets


def _fingerprint(tensors: Sequence[TensorSpec], bucket_bytes: int, whole_tensors: bool) -> int:
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{bucket_bytes}{' whole' if whole_tensors else ''}\n".encode())
    for spec in tensors:
        digest.update(f"{spec.name!r} {spec.shape} {element_type(spec.dtype).code} {spec.group}\n".encode())
    return int.from_bytes(digest.digest(), "little")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
