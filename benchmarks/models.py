"""The models of whole training steps, each with one batch for every trainer."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pserver.optim import RemoteOptimizer

LEARNING_RATE = 0.01
MOMENTUM = 0.9

_WORKERS = Path(__file__).parents[1] / "workers"

_IMAGES_PER_BATCH = 64
_SENTENCES_PER_BATCH, _TOKENS_PER_SENTENCE, _VOCABULARY = 16, 32, 1000

#: Makes a model and a batch (inputs, targets) from a seed.
MakeModel = Callable[[int], tuple[nn.Module, Tensor, Tensor]]


class TokenTagger(nn.Module):
    """A small TransformerEncoder, 653,544 parameters; maps tokens [n, length] to logits [n, length, vocabulary]."""

    def __init__(self, *, width: int = 128, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers)
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def make_mnist_cnn(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The model of workers/mnist.py, and 64 images of noise with their labels."""
    if str(_WORKERS) not in sys.path:
        sys.path.insert(0, str(_WORKERS))
    from mnist import DigitsNet
    from mnist_data import IMAGE_SIZE, NUM_CLASSES

    torch.manual_seed(0)
    model = DigitsNet()
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(_IMAGES_PER_BATCH, 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return model, images, torch.randint(NUM_CLASSES, (_IMAGES_PER_BATCH,), generator=generator)


def make_transformer(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A `TokenTagger`, and 16 sequences of 32 random tokens, each to be told its own successor."""
    torch.manual_seed(0)
    model = TokenTagger()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(_VOCABULARY, (_SENTENCES_PER_BATCH, _TOKENS_PER_SENTENCE), generator=generator)
    return model, tokens, (tokens + 1) % _VOCABULARY


MODELS: Mapping[str, MakeModel] = {"mnist-cnn": make_mnist_cnn, "transformer": make_transformer}


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One whole step when called: forward, loss, backward, optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    targets: Tensor

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.inputs).flatten(0, -2), self.targets.flatten()).backward()
        self.optimizer.step()

    def hidden_share(self) -> float:
        """The share of the communication time until now that was spent computing; 0 for an optimizer of torch."""
        return self.optimizer.statistics().hidden_share if isinstance(self.optimizer, RemoteOptimizer) else 0.0
