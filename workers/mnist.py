"""Trains a small convolutional network on real MNIST digits, synchronously, with any number of trainers.

    pserver launch --servers 2 --trainers 2 workers/mnist.py -- --out runs/mnist

Rank 0 measures the accuracy on held-out digits after each epoch and leaves curves.png, model.safetensors,
summary.json and TensorBoard events in the folder given by --out.
"""

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mnist_data import IMAGE_SIZE, NUM_CLASSES, Digits, epoch_batches, load_digits, num_steps, random_shift, split
from recorder import Point, Recorder, Summary
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pserver


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says; every trainer of a run gets the same."""

    out: Path
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    seed: int
    threads: int
    cache_dir: Path


@dataclass(frozen=True, slots=True)
class Epoch:
    """What one trainer saw in one epoch: its loss in each round, and how long its steps took."""

    losses: tuple[Point, ...]
    seconds: float


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers, 105,866 parameters; maps images [n, 1, 28, 28] to logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        side = IMAGE_SIZE // 4
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * side * side, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


class Training:
    """One trainer's part of a synchronous run; constructing it registers the model with the servers."""

    def __init__(self, cluster: pserver.Cluster, digits: Digits, settings: Settings) -> None:
        self._cluster = cluster
        self.num_images = len(digits)
        self._digits = digits
        self._settings = settings
        self._figures: dict[str, float] = {}
        torch.manual_seed(settings.seed)
        self.model = DigitsNet()
        self._optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            self.model,
            lr=settings.lr,
            momentum=settings.momentum,
            name="mnist",
            sync=pserver.Bsp(),
        )
        steps = num_steps(len(digits), batch_size=settings.batch_size, world_size=cluster.world_size)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, T_max=steps * settings.epochs)

    def run_epoch(self, epoch: int) -> Epoch:
        """Train on this trainer's part of the digits, once; `epoch` counts from 1."""
        settings, rank = self._settings, self._cluster.rank
        batches = epoch_batches(
            len(self._digits),
            batch_size=settings.batch_size,
            rank=rank,
            world_size=self._cluster.world_size,
            seed=settings.seed,
            epoch=epoch,
        )
        rng = np.random.default_rng([settings.seed, epoch, rank])
        start_s = time.monotonic()
        losses = []
        for indices in batches:
            batch = self._digits.subset(indices)
            losses.append(self._step(random_shift(batch.images, rng), batch.labels))
            self.show(epoch=epoch, loss=losses[-1].value)
        return Epoch(tuple(losses), time.monotonic() - start_s)

    def _step(self, images: Tensor, labels: Tensor) -> Point:
        loss = cross_entropy(self.model(images), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step(samples=len(labels))
        result = self._optimizer.last_result
        if not result.accepted:
            print(f"rank {self._cluster.rank}: not counted in round {result.round}: {result.reason}", flush=True)
        self._schedule.step()
        return Point(result.round, loss.item())

    def show(self, **figures: float) -> None:
        """Put `figures` into the live view, beside those shown before."""
        self._figures.update(figures)
        self._cluster.report(**self._figures)


def accuracy_on(model: nn.Module, digits: Digits) -> float:
    """The fraction of `digits` that `model` classifies correctly."""
    with torch.inference_mode():
        batches = zip(digits.images.split(250), digits.labels.split(250), strict=True)
        correct = sum(int((model(images).argmax(dim=1) == labels).sum()) for images, labels in batches)
    return correct / len(digits)


def lead(training: Training, held_out: Digits, settings: Settings, recorder: Recorder, world_size: int) -> Summary:
    """Train on rank 0: after each epoch measure the accuracy on `held_out`, record it and print a line."""
    start_s = time.monotonic()
    rounds = 0
    for number in range(1, settings.epochs + 1):
        epoch = training.run_epoch(number)
        accuracy = accuracy_on(training.model, held_out)
        training.show(accuracy=accuracy)
        images_per_s = training.num_images / epoch.seconds
        recorder.record_epoch(epoch.losses, accuracy=accuracy, images_per_s=images_per_s)
        rounds += len(epoch.losses)
        loss = sum(point.value for point in epoch.losses) / len(epoch.losses)
        print(
            f"epoch {number:>{len(str(settings.epochs))}}/{settings.epochs}  round {epoch.losses[-1].round:>4}  "
            f"loss {loss:.4f}  held-out accuracy {100 * accuracy:5.2f} %  {images_per_s:6.0f} images/s",
            flush=True,
        )
    return Summary(
        accuracy=accuracy,
        num_held_out=len(held_out),
        rounds=rounds,
        seconds=time.monotonic() - start_s,
        world_size=world_size,
    )


def follow(training: Training, settings: Settings) -> None:
    """Train on any other rank: the same steps, nothing else."""
    for number in range(1, settings.epochs + 1):
        training.run_epoch(number)


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from `arguments`, or from the command line; exits with a message on a wrong one, as argparse does."""
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network on 4,000 MNIST digits and measure it on 1,000 held-out ones.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/mnist"), help="folder for curves, model, summary and TensorBoard events")
    add("--epochs", type=_at_least(1), default=20, help="passes over the training digits")
    add("--batch-size", type=_at_least(1), default=64, help="largest number of digits in one trainer's step")
    add("--lr", type=float, default=0.05, help="learning rate of the first round; falls to 0 along a half cosine")
    add("--momentum", type=float, default=0.9, help="momentum of SGD")
    add("--seed", type=_at_least(0), default=0, help="fixes initial values, order and shifts of the digits")
    add("--threads", type=_at_least(1), default=1, help="CPU threads that each trainer computes with")
    add("--cache-dir", type=Path, default=Path("runs/cache"), help="folder that keeps the digits for the next start")
    return Settings(**vars(parser.parse_args(arguments)))


def _at_least(lowest: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"expected a whole number from {lowest} up, got {text}")
        return value

    return convert


def main() -> None:
    """Run one trainer; `pserver launch` says in the environment which one it is."""
    settings = parse_settings()
    torch.set_num_threads(settings.threads)
    train, held_out = split(load_digits(settings.cache_dir))
    with pserver.connect() as cluster:
        training = Training(cluster, train, settings)
        if cluster.rank != 0:
            follow(training, settings)
            return
        with Recorder(settings.out) as recorder:
            summary = lead(training, held_out, settings, recorder, cluster.world_size)
            recorder.finish(training.model, summary)
    print(
        f"held-out accuracy {100 * summary.accuracy:.2f} % on {summary.num_held_out} images "
        f"(training took {summary.seconds:.1f} s, {summary.rounds} rounds)",
        flush=True,
    )


if __name__ == "__main__":
    # Says, among other things, why a server is reached by messages where shared memory was to be expected.
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("pserver").setLevel(logging.INFO)
    main()
