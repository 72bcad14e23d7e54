"""Which server owns which buckets."""

from collections.abc import Sequence
from itertools import accumulate

from pserver.wire.layout import Layout


def place_buckets(layout: Layout, num_servers: int) -> list[range]:
    """Cuts a model's buckets into one run per server, equal in bytes up to one bucket.

    The last servers own nothing if there are more servers than buckets.
    """
    ends = list(accumulate(bucket.num_bytes for bucket in layout.buckets))
    total = ends[-1] if ends else 0
    runs: list[range] = []
    first = 0
    for server in range(num_servers):
        target = total * (server + 1) / num_servers
        last = first
        while last < len(ends) and _middle(ends, last) < target:
            last += 1
        runs.append(range(first, last))
        first = last
    return runs


def _middle(ends: Sequence[int], bucket: int) -> float:
    start = ends[bucket - 1] if bucket else 0
    return (start + ends[bucket]) / 2
