"""A training script whose data comes from forked worker processes: ADDRESS MODEL. It prints "done" and its round."""

import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset

import pserver

NUM_EPOCHS = 3


class Rows(Dataset):
    """Rows of numbers; the second column says which process read them."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([float(index), float(os.getpid())], dtype=torch.float64)


def main():
    with pserver.connect(sys.argv[1]) as cluster:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [("weight", weight)], lr=1e-3, name=sys.argv[2])
        loader = DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork")
        readers = set()
        for _ in range(NUM_EPOCHS):
            for rows in loader:
                readers |= set(rows[:, 1].tolist())
                optimizer.zero_grad()
                (weight * rows[:, 0].float()).mean().backward()
                optimizer.step()
        assert len(readers) == 2 * NUM_EPOCHS
        assert os.getpid() not in readers
        child = os.fork()
        if child == 0:
            try:
                optimizer.step()
            except pserver.errors.InvalidRequest as error:
                print("refused", error, flush=True)
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        optimizer.step()
        print("done", optimizer.round, cluster.statistics().num_retries, flush=True)


if __name__ == "__main__":
    main()
