"""A training script that ends in the way that it is told: ADDRESS MODEL HOW. It trains, or waits for a second trainer.

It says "steps" when it is about to step for good, and never closes its session by itself.
"""

import contextlib
import os
import sys
import threading
import time

import torch

import pserver
from pserver.errors import PserverError


def train(cluster, name):
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [("weight", weight)], lr=1.0, name=name, cluster=cluster)
    weight.grad = torch.ones(64)
    optimizer.step()
    print("steps", flush=True)
    return optimizer


def main():
    address, name, how = sys.argv[1:]
    if how == "raise in with":
        with pserver.connect(address) as cluster:
            train(cluster, name)
            raise ValueError("boom")
    cluster = pserver.connect(address, timeout_s=100.0)
    cluster.start()
    optimizer = train(cluster, name)
    if how == "raise":
        raise ValueError("boom")
    if how == "exit":
        sys.exit(3)
    if how == "vanish":
        os._exit(4)
    if how == "terminated":
        time.sleep(100.0)
    if how == "while a thread steps":
        begun = threading.Event()
        threading.Thread(target=step_for_ever, args=(optimizer, begun), daemon=True).start()
        begun.wait()


def step_for_ever(optimizer, begun):
    with contextlib.suppress(PserverError):
        while True:
            optimizer.step()
            begun.set()


if __name__ == "__main__":
    main()
