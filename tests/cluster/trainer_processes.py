"""Many trainers, each in a process of its own: forked once torch is imported, before anybody connects.

Usage: ADDRESS MODEL NUMBER_OF_TRAINERS CONTEXTS_EACH. Prints a line for each trainer, by rank.
"""

import multiprocessing
import sys

import torch

import pserver

NUM_ROUNDS = 3
NUM_ELEMENTS = 1024
FIRST_CONTEXT = 10_000


def train(address, name, rank, world_size, num_contexts):
    """Three steps with the rank as gradient, while contexts are open; the weight, and the sizes of the rounds."""
    torch.set_num_threads(1)
    with pserver.connect(address, rank=rank, world_size=world_size) as cluster:
        module = torch.nn.Linear(NUM_ELEMENTS, 1, bias=False)
        torch.nn.init.zeros_(module.weight)
        model = pserver.distribute(module, name=name, cluster=cluster)
        optimizer = pserver.optim.DistributedOptimizer(torch.optim.SGD, model.parameter_refs(), lr=1.0)

        def backward(context):
            pserver.autograd.backward(context, [rank * module.weight.sum()])

        opened = []
        for _ in range(num_contexts):
            context = pserver.autograd.context()
            opened.append((context, context.__enter__()))
            backward(opened[-1][1])
            optimizer.push(opened[-1][1])
        sizes = set()
        for _ in range(NUM_ROUNDS):
            with pserver.autograd.context() as context:
                backward(context)
                sizes.add(optimizer.step(context).num_trainers)
        for context, _ in opened:
            context.__exit__(None, None, None)
        return f"{module.weight.unique().item()} {sorted(sizes)}"


def main():
    address, name, world_size, num_contexts = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with multiprocessing.get_context("fork").Pool(world_size) as pool:
        calls = [pool.apply_async(train, (address, name, rank, world_size, num_contexts)) for rank in range(world_size)]
        for call in calls:
            print(call.get(), flush=True)


if __name__ == "__main__":
    main()
