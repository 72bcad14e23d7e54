"""Several trainers in one process, each with a session of its own. Usage: ADDRESS MODEL FIRST_RANK NUMBER."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

import pserver

NUM_ROUNDS = 3
NUM_ELEMENTS = 1024


def train(address, name, rank):
    """Three steps with the rank as gradient; the value of the weight, and the sizes of the rounds."""
    with pserver.connect(address, rank=rank) as cluster:
        weight = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", weight)], lr=1.0, name=name, cluster=cluster
        )
        sizes = set()
        for _ in range(NUM_ROUNDS):
            weight.grad = torch.full((NUM_ELEMENTS,), float(rank))
            optimizer.step()
            sizes.add(optimizer.last_result.num_trainers)
        return f"{weight.unique().item()} {sorted(sizes)}"


def main():
    address, name, first_rank, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    ranks = range(first_rank, first_rank + number)
    with ThreadPoolExecutor(number) as threads:
        for line in threads.map(lambda rank: train(address, name, rank), ranks):
            print(line, flush=True)


if __name__ == "__main__":
    main()
