"""Scripts in workers/ import their siblings by bare name, as they do when Python runs them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "workers"))
