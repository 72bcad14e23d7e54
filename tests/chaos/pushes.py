"""What trainers push: integers whose sums and means are exact, and tell who is in them.

The model has two parameters. `slots` has one element for each step of each trainer, which only this step changes: it
proves which updates are in. `dense` gets something of every step in every element, over many buckets on all shards: it
proves that what is in, is in everywhere, once.
"""

import torch

#: Trainers of one run, with those that take the place of others, and steps of each.
NUM_TRAINERS, NUM_STEPS = 16, 4096
NUM_DENSE = 40_000
BUCKET_BYTES = 16 << 10
#: A mean over so many trainers, or fewer, is exact.
MAX_IN_ROUND = 4
UNIT = 12
#: Elements of `dense` change with this period, and so do the steps' shares in one element.
PERIOD = 5

#: (trainer, step): names an update.
Update = tuple[int, int]


class Accumulators(torch.nn.Module):
    """The model. With SGD of learning rate 1 each parameter becomes the sum of the means of what was pushed."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = torch.nn.Parameter(torch.zeros(NUM_TRAINERS, NUM_STEPS))
        self.dense = torch.nn.Parameter(torch.zeros(NUM_DENSE))

    def set_gradients(self, update: Update) -> None:
        """Those of one step."""
        self.slots.grad = torch.zeros_like(self.slots)
        self.slots.grad[update] = -UNIT
        self.dense.grad = -UNIT * shares(update)


def shares(update: Update) -> torch.Tensor:
    """What each element of `dense` gets for each unit in the slot of the update: 1 to `PERIOD`."""
    return shares_of_kind(kind_of(update))


def kind_of(update: Update) -> int:
    """Updates of the same kind have the same shares."""
    return (3 * update[0] + update[1]) % PERIOD


def shares_of_kind(kind: int) -> torch.Tensor:
    return ((7 * torch.arange(NUM_DENSE) + kind) % PERIOD + 1).float()
