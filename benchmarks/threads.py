"""One thread setting for everything that a run starts, ours and the peer's."""

import os

import torch


def set_threads() -> None:
    """Gives this process, and every process started after the call, half of the cores for tensor arithmetic.

    Half, because a trainer and a server work on the same machine.
    """
    num_threads = max(1, (os.cpu_count() or 1) // 2)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    torch.set_num_threads(num_threads)
