"""`pserver serve`, with the arguments it is given; for each line on stdin it prints, as JSON, what it has in memory."""

import gc
import json
import sys
import threading
from pathlib import Path

from pserver.cli.main import main
from pserver.core.contexts import GradientContext
from pserver.core.coordinator import Coordinator
from pserver.core.dedup import DedupTable
from pserver.core.membership import Member
from pserver.core.models import Model
from pserver.core.shard import Shard
from pserver.server.hosted_shard import HostedShard

COUNTED = (GradientContext, Coordinator, DedupTable, HostedShard, Member, Model, Shard)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


def count() -> dict[str, int]:
    """Objects that the garbage collector knows, by class; also outcomes, threads and resident bytes."""
    gc.collect()
    found = gc.get_objects()
    counts = {each.__name__: sum(type(thing) is each for thing in found) for each in COUNTED}
    counts["outcomes"] = sum(len(thing) for thing in found if type(thing) is DedupTable)
    counts["threads"] = threading.active_count()
    counts["resident_bytes"] = resident_bytes()
    return counts


def _answer() -> None:
    for _ in sys.stdin:
        print("count", json.dumps(count()), flush=True)


if __name__ == "__main__":
    threading.Thread(target=_answer, daemon=True).start()
    main()
