"""A trainer that pushes what pushes.py says, and notes in its ledger what it is told, until SIGTERM.

Usage: ADDRESSES NUMBER LEDGER POLICY. It prints "training" once it has joined, "done" at its end.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

import pserver
from pserver.core.sync import make_policy
from pserver.errors import PserverError, ServerErrors, TrainerEnded
from pserver.optim import RemoteOptimizer
from tests.chaos.pushes import BUCKET_BYTES, NUM_STEPS, Accumulators

MODEL = "chaos"
#: The first round waits for so many.
WORLD_SIZE = 2
REPLICAS = 1
TIMEOUT_S = 60.0
#: Between two steps.
PACE_S = 0.04


def share(policy: str, cluster: pserver.Cluster) -> tuple[Accumulators, RemoteOptimizer]:
    """The model, with the values that it has on the servers, and its optimizer."""
    module = Accumulators()
    optimizer = RemoteOptimizer(
        torch.optim.SGD,
        module,
        lr=1.0,
        name=MODEL,
        sync=make_policy(policy, {}),
        replicas=REPLICAS,
        bucket_bytes=BUCKET_BYTES,
        cluster=cluster,
    )
    return module, optimizer


class LedgerFile:
    """Lines that are there even if the process is killed right after."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: str, step: int, **about: Any) -> None:
        line = json.dumps({"event": event, "step": step, "at_s": time.monotonic(), **about})
        os.write(self._file, f"{line}\n".encode())


def train(addresses: str, number: int, ledger: LedgerFile, policy: str, told: threading.Event) -> None:
    """Trains until it is told to stop. When its lease ends, it joins again."""
    step = 0
    while not told.is_set() and step < NUM_STEPS:
        try:
            with pserver.connect(addresses, world_size=WORLD_SIZE, timeout_s=TIMEOUT_S) as cluster:
                module, optimizer = share(policy, cluster)
                print("training", flush=True)
                while not told.is_set() and step < NUM_STEPS:
                    module.set_gradients((number, step))
                    ledger.note("begin", step)
                    step += 1
                    optimizer.step()
                    result = optimizer.last_result
                    assert result is not None
                    ledger.note(
                        "end",
                        step - 1,
                        round=result.round,
                        accepted=result.accepted and result.stepped,
                        num_trainers=result.num_trainers,
                    )
                    told.wait(PACE_S)
        except PserverError as error:
            members = error.exceptions if isinstance(error, ServerErrors) else (error,)
            if not all(isinstance(each, TrainerEnded) for each in members):
                ledger.note("failed", step, error="; ".join(f"{type(each).__name__}: {each}" for each in members))
                raise
            print(f"joins again: {error}", flush=True)
            ledger.note("lease ended", step)


def main() -> None:
    addresses, number, path, policy = sys.argv[1:]
    torch.set_num_threads(1)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    train(addresses, int(number), LedgerFile(path), policy, told)
    print("done", flush=True)


if __name__ == "__main__":
    main()
