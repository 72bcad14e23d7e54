"""Regenerates pserver/transport/gen from protos/pserver/v1. `make protos` runs it; CI checks that it changes nothing.

protoc writes imports for a package named after the proto package (`pserver.v1`). The generated code lives elsewhere, so
the imports are rewritten.
"""

import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
OUTPUT = ROOT.parent / "pserver" / "transport" / "gen"


def main() -> int:
    sources = sorted((ROOT / "pserver" / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{ROOT}", f"--python_out={scratch}", f"--pyi_out={scratch}", *map(str, sources)]
        if protoc.main(arguments) != 0:
            return 1
        for generated in (Path(scratch) / "pserver" / "v1").iterdir():
            text = re.sub(
                r"^from pserver\.v1 import", "from pserver.transport.gen import", generated.read_text(), flags=re.M
            )
            (OUTPUT / generated.name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
