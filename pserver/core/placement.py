"""Which server owns which buckets."""

import heapq
from collections.abc import Sequence
from itertools import accumulate

from pserver.wire.layout import Layout


def place_buckets(layout: Layout, num_servers: int) -> list[tuple[range, ...]]:
    """For each server its runs of buckets: ascending, disjoint, not empty, never two next to each other.

    A model cut anywhere gives each server one run, equal in bytes up to one bucket. Buckets that hold whole tensors may
    be of very different sizes: the largest goes first, each onto the server with the fewest bytes so far (the lowest
    number among equals). Servers left over, because there are too few buckets, have no run.
    """
    if layout.whole_tensors:
        return _place_by_size([bucket.num_bytes for bucket in layout.buckets], num_servers)
    ends = list(accumulate(bucket.num_bytes for bucket in layout.buckets))
    total = ends[-1] if ends else 0
    placed: list[tuple[range, ...]] = []
    first = 0
    for server in range(num_servers):
        target = total * (server + 1) / num_servers
        last = first
        while last < len(ends) and _middle(ends, last) < target:
            last += 1
        placed.append((range(first, last),) if first < last else ())
        first = last
    return placed


def _middle(ends: Sequence[int], bucket: int) -> float:
    start = ends[bucket - 1] if bucket else 0
    return (start + ends[bucket]) / 2


def _place_by_size(sizes: Sequence[int], num_servers: int) -> list[tuple[range, ...]]:
    loads = [(0, server) for server in range(num_servers)]  # a heap: all are equal
    owners = [0] * len(sizes)
    for bucket in sorted(range(len(sizes)), key=lambda bucket: -sizes[bucket]):
        load, owners[bucket] = loads[0]
        heapq.heapreplace(loads, (load + sizes[bucket], owners[bucket]))
    placed: list[list[range]] = [[] for _ in range(num_servers)]
    for bucket, owner in enumerate(owners):
        runs = placed[owner]
        if runs and runs[-1].stop == bucket:
            runs[-1] = range(runs[-1].start, bucket + 1)
        else:
            runs.append(range(bucket, bucket + 1))
    return [tuple(runs) for runs in placed]
