"""Makes the `benchmarks` package importable: it is not part of what is installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
