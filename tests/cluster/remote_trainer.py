"""A trainer that does what the lines on its stdin say, and prints a line of JSON about each.

join ADDRESS RANK WORLD_SIZE TIMEOUT_S   opens a session, in a `with` block
start ADDRESS RANK WORLD_SIZE TIMEOUT_S  opens a session that nobody closes
model NAME                               makes a model and its optimizer
steps NUMBER                             trains; -1: until something fails
digest                                   a hash of the parameters
leave                                    ends the `with` block
exit CODE                                sys.exit inside the `with` block
end                                      ends the program with no further ado
"""

import hashlib
import itertools
import json
import os
import sys
import time
from contextlib import ExitStack

import torch
from torch.nn.functional import mse_loss

import pserver
from pserver.errors import PserverError


class RemoteTrainer:
    """One trainer; `blocks` are the `with` blocks that it is in."""

    def __init__(self, blocks):
        self._blocks = blocks

    def join(self, *settings):
        self._cluster = self._blocks.enter_context(_connect(*settings))
        return {"rank": self._cluster.rank, "world_size": self._cluster.world_size}

    def start(self, *settings):
        self._cluster = _connect(*settings)
        self._cluster.start()
        return {"rank": self._cluster.rank, "world_size": self._cluster.world_size}

    def model(self, name):
        rank = self._cluster.rank
        torch.manual_seed(rank)
        self._model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self._name = name
        self._data = torch.Generator().manual_seed(1000 + rank)
        self._optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.Adam, self._model, lr=0.01, name=name, cluster=self._cluster
        )
        return {}

    def steps(self, number):
        losses = []
        for _ in itertools.count() if int(number) < 0 else range(int(number)):
            inputs = torch.randn(64, 32, generator=self._data)
            loss = mse_loss(self._model(inputs), inputs[:, :4].sum(dim=1, keepdim=True))
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            losses.append(loss.item())
            self._cluster.report(loss=losses[-1])
            if len(losses) == 1:
                print(f"{self._name}: first step done", flush=True)
        return {"round": self._optimizer.last_result.round, "losses": losses}

    def digest(self):
        values = [parameter.detach().numpy().tobytes() for parameter in self._model.parameters()]
        return {"digest": hashlib.sha256(b"".join(values)).hexdigest()}

    def leave(self):
        self._blocks.close()
        return {}

    def exit(self, code):
        sys.exit(int(code))


def _connect(address, rank, world_size, timeout_s):
    os.environ |= {
        "PSERVER_ADDRESS": address,
        "PSERVER_RANK": rank,
        "PSERVER_WORLD_SIZE": world_size,
        "PSERVER_TIMEOUT_S": timeout_s,
    }
    return pserver.connect()


def _obey(trainer, line):
    command, *arguments = line.split()
    begin_s = time.monotonic()
    result, error = {}, ""
    try:
        result = getattr(trainer, command)(*arguments)
    except PserverError as failure:
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.monotonic() - begin_s
    print("reply", json.dumps({"result": result, "error": error, "seconds": seconds}), flush=True)


def main():
    # The first optimizer of a process makes torch import a good deal more; it shall not count as part of a command.
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    print("idle", flush=True)
    with ExitStack() as blocks:
        trainer = RemoteTrainer(blocks)
        for line in sys.stdin:
            if line == "end\n":
                break
            _obey(trainer, line)


if __name__ == "__main__":
    main()
