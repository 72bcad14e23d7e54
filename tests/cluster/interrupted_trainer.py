"""Rank 0 of two trainers, who goes on after Ctrl-C: ADDRESS MODEL ROUNDS.

It says "ready" before its first step, "stepping" before each one, where a Ctrl-C is caught, "interrupted" for each
Ctrl-C, and "done" with the value of its weight.
"""

import sys

import torch

import pserver

LEARNING_RATE = 0.25


def loss(weight, rank, round_number):
    """Its gradient depends on the parameters, on the rank and on the round."""
    target = float((rank + 1) * (round_number + 1))
    return ((weight - target) ** 2).mean() * weight.numel() / 2


def make(cluster, name):
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = pserver.optim.RemoteOptimizer(
        torch.optim.SGD,
        [("weight", weight)],
        lr=LEARNING_RATE,
        momentum=0.5,
        name=name,
        cluster=cluster,
        bucket_bytes=128,
    )
    return weight, optimizer


def train(cluster, weight, optimizer, num_rounds):
    """Trains until a round; what was interrupted is done again from the top, as in a notebook."""
    while optimizer.round < num_rounds:
        try:
            optimizer.zero_grad()
            loss(weight, cluster.rank, optimizer.round).backward()
            print("stepping", flush=True)
            optimizer.step()
        except KeyboardInterrupt:
            print("interrupted", flush=True)


def main():
    with pserver.connect(sys.argv[1], rank=0, world_size=2) as cluster:
        weight, optimizer = make(cluster, sys.argv[2])
        print("ready", flush=True)
        train(cluster, weight, optimizer, int(sys.argv[3]))
        print("done", weight.unique().item().hex(), flush=True)


if __name__ == "__main__":
    main()
