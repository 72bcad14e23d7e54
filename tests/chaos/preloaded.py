"""What a process of a run takes seconds to import: done once, by the process that all others are forked from.

That one runs nothing else: no thread, no connection, no event loop is there to be forked.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import pserver.cli.main
import pserver.optim
import pserver.server.process  # noqa: F401

# The first optimizer makes torch import its compiler.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
