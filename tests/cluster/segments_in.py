"""Runs a module as a program whose shared memory lies in a directory of its own: DIRECTORY MODULE ARGUMENTS.

Servers of other tests sweep the usual one.
"""

import runpy
import sys
from pathlib import Path

from pserver.wire import shm

if __name__ == "__main__":
    shm.DIRECTORY = Path(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
