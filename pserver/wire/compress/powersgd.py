"""Gradients of matrices as two thin factors; PowerSGD, Vogels et al. 2019, arXiv:1905.13727."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from pserver.errors import InvalidRequest
from pserver.wire.compress.arguments import check_count, is_number
from pserver.wire.compress.codec import BucketShape, GradBucket, check_encoded, completed
from pserver.wire.compress.elements import bytes_of, elements_of
from pserver.wire.compress.none import NoCompression
from pserver.wire.compress.saved import parse_key, set_or_remove

_NONE = NoCompression()


@dataclass(slots=True)
class PowerSGDState:
    """What one trainer remembers of one model.

    Attributes:
        factors: by bucket and tensor the Q that the next step begins with, transposed: r x m, float32 or wider.
        iterations: by bucket, gradients encoded so far.
    """

    factors: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    iterations: dict[int, int] = field(default_factory=dict)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything, as tensors by name; later steps do not change them."""
        factors = {
            f"factor.{bucket}.{tensor}": value
            for bucket, found in self.factors.items()
            for tensor, value in found.items()
        }
        iterations = {f"iteration.{bucket}": torch.tensor(count) for bucket, count in self.iterations.items()}
        return factors | iterations

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Replaces everything with copies of what `state_dict` gave.

        Raises:
            InvalidRequest: it gives no such name or tensor; nothing is changed.
        """
        factors: dict[int, dict[int, torch.Tensor]] = {}
        iterations: dict[int, int] = {}
        for key, value in state_dict.items():
            match parse_key(key):
                case "factor", (bucket, tensor) if value.dim() == 2:
                    factors.setdefault(bucket, {})[tensor] = value.clone()
                case "iteration", (bucket,) if value.numel() == 1:
                    iterations[bucket] = int(value)
                case _:
                    raise InvalidRequest(f"a state of PowerSGD holds no {key!r:.80} of shape {tuple(value.shape)}")
        self.factors, self.iterations = factors, iterations

    def of_bucket(self, bucket: int) -> tuple[dict[int, torch.Tensor], int | None]:
        """See `Remembers`."""
        return dict(self.factors.get(bucket, {})), self.iterations.get(bucket)

    def put_back(self, bucket: int, found: tuple[dict[int, torch.Tensor], int | None]) -> None:
        """See `Remembers`."""
        factors, iteration = found
        set_or_remove(self.factors, bucket, dict(factors) or None)
        set_or_remove(self.iterations, bucket, iteration)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Sends two thin factors of each matrix; Vogels et al. 2019, arXiv:1905.13727, without its collectives.

    A tensor of 2 or more dimensions is a matrix M of n x m, its first dimension being n. One step of power iteration
    gives P = orthogonal(M Q), n x r, and the next Q = M^T P, m x r; both are sent, and the server has P Q^T. Each
    trainer sends factors of its own gradient, and the server sums the products. Each step begins with the Q of the
    last one, so that for gradients that change slowly P Q^T approaches the best matrix of that rank.

    P Q^T is M projected, so but for rounding it is no farther from M than zero is, and is M if M has at most rank r.
    Its rounding is that of a few sums over rows and columns, in float32 or wider, and of factors in the bucket's dtype.
    NaN and infinite elements, and those whose sums overflow, make the tensor NaN or infinite in at least those places.

    The rest goes uncompressed: vectors, matrices whose factors would not have fewer elements by more than
    `min_compression_rate` times, and everything in the first `start_iteration` gradients of a bucket. Training needs
    `ErrorFeedback` around it: what no factor holds would never be sent.

    Args:
        rank: r, at least 1; a matrix has at most its n and m.
        warm_start: begin with the Q of the last step; otherwise with another random one each time.
        start_iteration: gradients of each bucket that go uncompressed first.
        min_compression_rate: at least 1.
        seed: of the random Q.
    """

    rank: int = 1
    warm_start: bool = True
    start_iteration: int = 1000
    min_compression_rate: float = 2
    seed: int = 0

    name: ClassVar[str] = "powersgd"
    whole_tensors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("PowerSGD", "rank", self.rank, least=1)
        check_count("PowerSGD", "start_iteration", self.start_iteration, least=0)
        check_count("PowerSGD", "seed", self.seed, least=0)
        if type(self.warm_start) is not bool:
            raise InvalidRequest(f"PowerSGD: warm_start must be True or False, but is {self.warm_start!r:.80}")
        if not is_number(self.min_compression_rate) or not 1 <= self.min_compression_rate < math.inf:
            raise InvalidRequest(
                f"PowerSGD: min_compression_rate must be a number, 1 or more, but is {self.min_compression_rate!r:.80}"
            )

    def make_state(self) -> PowerSGDState:
        """An empty one."""
        return PowerSGDState()

    @torch.no_grad()
    def encode(self, state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The tensors in order, P^T beside Q^T or as they are; or the bucket uncompressed.

        Raises:
            InvalidRequest: the bucket cuts a tensor, or the state is of another model or rank.
        """
        iteration = state.iterations.get(bucket.index, 0)
        pieces = self._pieces(bucket.shape)
        if iteration < self.start_iteration or not any(each.rank for each in pieces):
            encoded = _NONE.encode(None, bucket)
        else:
            parts = [
                self._factors(state, bucket, each, iteration) if each.rank else bucket.buffer[each.start : each.stop]
                for each in pieces
            ]
            encoded = completed(bytes_of(torch.cat([each.to(bucket.buffer.dtype) for each in parts])))
        state.iterations[bucket.index] = iteration + 1
        return encoded

    def sizes(self, shape: BucketShape) -> frozenset[int]:
        """The bucket's, and the smaller one with factors if it has any.

        Raises:
            InvalidRequest: the bucket cuts a tensor.
        """
        pieces = self._pieces(shape)
        if not any(each.rank for each in pieces):
            return frozenset({shape.num_bytes})
        return frozenset({shape.num_bytes, sum(each.num_sent for each in pieces) * shape.dtype.itemsize})

    @torch.no_grad()
    def decode(self, data: torch.Tensor, shape: BucketShape) -> torch.Tensor:
        """Products of factors, and what went uncompressed; the size tells which of the two came.

        Raises:
            InvalidRequest: another size, or the bucket cuts a tensor.
        """
        check_encoded(self.name, data, shape, self.sizes(shape))
        if data.numel() == shape.num_bytes:
            return _NONE.decode(data, shape)
        decoded = torch.zeros(shape.num_elements, dtype=shape.dtype, device=data.device)
        sent = elements_of(data, shape.dtype)
        position = 0
        for piece in self._pieces(shape):
            values = sent[position : position + piece.num_sent]
            decoded[piece.start : piece.stop] = _product(values, piece) if piece.rank else values
            position += piece.num_sent
        return decoded

    def _pieces(self, shape: BucketShape) -> list["_Piece"]:
        pieces = []
        for segment in shape.segments:
            if segment.shape is None:
                raise InvalidRequest(
                    f"bucket {shape.index} cuts tensor {segment.tensor}, but PowerSGD needs whole ones; make the "
                    "layout with whole_tensors=True"
                )
            rows = segment.shape[0] if len(segment.shape) > 1 else 1
            columns = math.prod(segment.shape[1:])
            rank = min(self.rank, rows, columns)
            if (rows + columns) * rank * self.min_compression_rate >= rows * columns:
                rank = 0
            pieces.append(
                _Piece(
                    tensor=segment.tensor,
                    start=segment.start,
                    stop=segment.stop,
                    rows=rows,
                    columns=columns,
                    rank=rank,
                )
            )
        return pieces

    def _factors(self, state: PowerSGDState, bucket: GradBucket, piece: "_Piece", iteration: int) -> torch.Tensor:
        """P^T beside Q^T, flat; and remembers Q."""
        values = bucket.buffer[piece.start : piece.stop]
        matrix = _wide(values).view(piece.rows, piece.columns)
        fresh = self._random(piece, iteration, matrix)
        known = state.factors.get(bucket.index, {})
        start = known.get(piece.tensor, fresh) if self.warm_start else fresh
        if start.shape != fresh.shape:
            raise InvalidRequest(
                f"bucket {bucket.index}: expected a state with {piece.rank} x {piece.columns} elements for tensor "
                f"{piece.tensor}, but it has {tuple(start.shape)}; a model that has changed needs a new state"
            )
        left = _orthogonal_rows(_orthogonal_rows(start.to(matrix)) @ matrix.T)
        right = left @ matrix
        if self.warm_start:
            # From a row that is zero, or no number, no step would ever come away.
            sizes = right.abs().amax(dim=1, keepdim=True)
            remembered = torch.where(sizes.isfinite() & (sizes > 0), right, fresh)
            state.factors[bucket.index] = known | {piece.tensor: remembered}
        return torch.cat([left, right], dim=1).view(-1)

    def _random(self, piece: "_Piece", iteration: int, like: torch.Tensor) -> torch.Tensor:
        """The same for a tensor and step, in whatever order buckets are encoded."""
        digest = hashlib.blake2b(f"{self.seed} {piece.tensor} {iteration}".encode(), digest_size=8).digest()
        generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(piece.rank, piece.columns, generator=generator, dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One tensor in a bucket, as a matrix; `rank` is 0 if it goes uncompressed."""

    tensor: int
    start: int
    stop: int
    rows: int
    columns: int
    rank: int

    @property
    def num_sent(self) -> int:
        """Elements on the wire."""
        return self.rank * (self.rows + self.columns) if self.rank else self.stop - self.start


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _orthogonal_rows(rows: torch.Tensor) -> torch.Tensor:
    """As many orthonormal rows, which span what those span; also where these are zero, for QR fills up."""
    columns: torch.Tensor = torch.linalg.qr(rows.T).Q
    return columns.T


def _product(values: torch.Tensor, piece: _Piece) -> torch.Tensor:
    factors = _wide(values).view(piece.rank, -1)
    return (factors[:, : piece.rows].T @ factors[:, piece.rows :]).view(-1)
