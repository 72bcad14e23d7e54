"""Writes values to shared memory as fast as it can, or reads and checks every element, until a line comes on stdin.

Usage: hammer.py write NUMBER_OF_READERS
       hammer.py read VALUES MAILBOX

The writer says "ready VALUES MAILBOX..." with the names of its segments, and its number of rounds at the end. A reader
says "raced" once it has raced the writer often enough, and at the end "findings" and `Findings` as JSON, by whether
rounds might be mixed.
"""

import json
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass

import torch

from pserver.client.mapped_shard import MappedShard
from pserver.core.value_store import ValueStore
from pserver.server.shard_memory import ShardMemory
from pserver.wire.layout import BUFFERS, TensorSpec, build_layout
from pserver.wire.shm import map_segment

EPOCH = 1
#: Tensors that buckets cut, buckets of several tensors, and a dtype that servers hold in another one.
LAYOUT = build_layout(
    [
        TensorSpec(name="long", shape=(200_003,), dtype=torch.float32, group=0),
        TensorSpec(name="square", shape=(257, 129), dtype=torch.float32, group=0),
        *(TensorSpec(name=f"short{number}", shape=(1001,), dtype=torch.float32, group=0) for number in range(40)),
        TensorSpec(name="rounded", shape=(100_001,), dtype=torch.bfloat16, group=1),
        TensorSpec(name="statistics", shape=(5000,), dtype=torch.float64, group=BUFFERS),
    ],
    64 << 10,
)
BUCKETS = LAYOUT.buckets
#: An element is this, times the round, and a part that tells its place.
STEP = 64
#: What bfloat16, which has 8 bits, tells of a round is what is left of it after division by this.
ROUNDED = 251
#: float32 has 24 bits.
LAST_ROUND = (1 << 24) // STEP - 1
#: Reads of each kind that a reader has to have seen before it says so.
ENOUGH = 10


def pattern(bucket, round_number, dtype):
    """What a bucket holds in a round."""
    elements = torch.arange(bucket.num_elements) + bucket.index
    if bucket.dtype == torch.bfloat16:
        return ((elements + round_number) % ROUNDED).to(dtype)
    return (elements % STEP + STEP * round_number).to(dtype)


class Writer:
    """A server without a network."""

    def __init__(self, num_readers):
        self._memory = ShardMemory(BUCKETS, BUCKETS, fingerprint=LAYOUT.fingerprint, epoch=EPOCH)
        self._store = ValueStore(BUCKETS, self._memory)
        # Made once: to compute them takes longer than to write them.
        self._bases = [pattern(bucket, 0, self._store.masters[bucket.index].dtype) for bucket in BUCKETS]
        self._write(1)
        self._memory.extend_lease(time.monotonic_ns() + 3600 * 10**9)
        mailboxes = [self._memory.open_mailbox(number + 1) for number in range(num_readers)]
        print("ready", self._memory.name, *mailboxes, flush=True)

    def run(self, told):
        """Rounds end to end, and now and then some with gaps, in which a reader may find all buckets of one round."""
        choose = random.Random(1)
        round_number = 1
        while not told.is_set():
            longest_gap_s = choose.choice([0.0, 0.01])
            for _ in range(20):
                if round_number < LAST_ROUND:
                    round_number += 1
                    self._write(round_number)
                if longest_gap_s:
                    time.sleep(choose.uniform(0.0, longest_gap_s))
        self._memory.close()
        print("rounds", round_number, flush=True)

    def _write(self, round_number):
        for bucket, base in zip(BUCKETS, self._bases, strict=True):
            with self._store.changing(bucket.index, round_number) as master:
                if bucket.dtype == torch.bfloat16:
                    torch.remainder(base + round_number % ROUNDED, ROUNDED, out=master)
                else:
                    torch.add(base, STEP * round_number, out=master)


@dataclass
class Findings:
    """Of reads: how many gave values, how many of them after a race, how many none, and what was wrong with them."""

    read: int = 0
    read_after_race: int = 0
    given_up: int = 0
    pauses: int = 0
    torn_buckets: int = 0
    of_other_rounds: int = 0


class Reader:
    """A trainer without a network."""

    def __init__(self, values, mailbox):
        self._shard = MappedShard(
            LAYOUT,
            BUCKETS,
            BUCKETS,
            torch.device("cpu"),
            values=map_segment(values, writable=False),
            mailbox=map_segment(mailbox, writable=True),
            epoch=EPOCH,
        )
        self._tensors = {index: torch.zeros(each.shape, dtype=each.dtype) for index, each in enumerate(LAYOUT.tensors)}
        self._bases = [pattern(bucket, 0, torch.int64) for bucket in BUCKETS]
        self._findings = {"mixed": Findings(), "one round": Findings()}

    def run(self, told):
        said = False
        while not told.is_set():
            for way, found in self._findings.items():
                self._read(found, mixed_rounds=way == "mixed")
            if not said and all(each.read_after_race >= ENOUGH for each in self._findings.values()):
                said = True
                print("raced", flush=True)
        print("findings", json.dumps({way: asdict(each) for way, each in self._findings.items()}), flush=True)

    def _read(self, found, *, mixed_rounds):
        num_before = found.pauses

        def pause(seconds):
            found.pauses += 1
            time.sleep(seconds)

        oldest = self._shard.read_(self._tensors, mixed_rounds=mixed_rounds, pause=pause)
        if oldest is None:
            found.given_up += 1
            return
        found.read += 1
        found.read_after_race += found.pauses > num_before
        rounds = [self._round_of(bucket, oldest) for bucket in BUCKETS]
        found.torn_buckets += rounds.count(None)
        whole = {each for each in rounds if each is not None}
        found.of_other_rounds += min(whole) != oldest or (not mixed_rounds and whole != {oldest})

    def _round_of(self, bucket, oldest):
        """The round that all elements of a bucket are of; None if it is torn."""
        found = set()
        for each in LAYOUT.segments[bucket.index]:
            values = self._tensors[each.tensor].view(-1)[each.offset :][: each.stop - each.start].to(torch.int64)
            difference = values - self._bases[bucket.index][each.start : each.stop]
            if bucket.dtype == torch.bfloat16:
                difference = STEP * (oldest + (difference - oldest) % ROUNDED)
            found |= {int(difference.min()), int(difference.max())}
        (first, *others) = found
        return None if others or first % STEP else first // STEP


def main():
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    program = Writer(int(sys.argv[2])) if sys.argv[1] == "write" else Reader(*sys.argv[2:])
    program.run(told)


if __name__ == "__main__":
    main()
