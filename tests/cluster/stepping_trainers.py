"""Two trainers in one process; lines on stdin, "ROUTE: NUMBER", say how often both step, and by which route.

Usage: stepping_trainers.py ADDRESS. For each line it prints "stepped RESIDENT_BYTES", of the process after that.
"""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.config import TrainerSettings
from tests.cluster.counted_server import resident_bytes
from tests.routes import NETWORK_ROUTES

NUM_TRAINERS = 2
#: Of one gradient: as many bytes as go in one message.
NUM_BYTES = 64 << 10


class Trainer:
    """One of them, with one parameter that SGD with momentum trains."""

    def __init__(self, address, route_name, rank):
        transport = NETWORK_ROUTES[route_name].transport
        settings = TrainerSettings.resolve(address, rank=rank, world_size=NUM_TRAINERS, transport=transport)
        self._session = Cluster(settings)
        self._session.start()
        self._name = f"steps by {route_name}"

    def register(self):
        self._weight = torch.nn.Parameter(torch.zeros(NUM_BYTES // 4))
        self._optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", self._weight)], lr=0.1, momentum=0.5, name=self._name, cluster=self._session
        )

    def step(self, number):
        for _ in range(number):
            self._weight.grad = torch.ones_like(self._weight)
            self._optimizer.step()

    def close(self):
        self._session.drop_model(self._name)
        self._session.close()


class Pair:
    """Both of them, on one route; a pair on another one takes their ranks."""

    def __init__(self, address, route_name, threads):
        self.route_name = route_name
        self._threads = threads
        self._trainers = [Trainer(address, route_name, rank) for rank in range(NUM_TRAINERS)]
        self._together(Trainer.register)

    def step(self, number):
        with NETWORK_ROUTES[self.route_name].taken():
            self._together(lambda trainer: trainer.step(number))

    def close(self):
        self._together(Trainer.close)

    def _together(self, function):
        for _ in self._threads.map(function, self._trainers):
            pass


def main():
    pair = None
    with ThreadPoolExecutor(NUM_TRAINERS) as threads:
        for line in sys.stdin:
            route_name, number = line.split(": ")
            if pair is None or pair.route_name != route_name:
                if pair is not None:
                    pair.close()
                pair = Pair(sys.argv[1], route_name, threads)
            pair.step(int(number))
            gc.collect()
            print("stepped", resident_bytes(), flush=True)
        if pair is not None:
            pair.close()


if __name__ == "__main__":
    main()
