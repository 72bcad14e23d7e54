"""What replicas cost: synchronous steps with one, against the same without."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from benchmarks.cluster import running_cluster
from benchmarks.harness import Benchmark, Case
from benchmarks.trainers import our_trainers, ready_gradients

_NUM_SERVERS = 2
_NUM_TRAINERS = 2
_NUM_TENSORS = 50
_NUM_BYTES = 100_000_000
_QUICK_NUM_BYTES = 4_000_000

#: Steps in one turn: what a replica does after a step must not fall on the other side's turn.
_PER_TURN = 8


@contextmanager
def _sync_step(num_bytes: int) -> Iterator[Case]:
    with (
        running_cluster(_NUM_SERVERS) as plain,
        running_cluster(_NUM_SERVERS) as replicated,
        our_trainers(
            plain.address, ready_gradients(_NUM_TENSORS, num_bytes), count=_NUM_TRAINERS, repeats=_PER_TURN
        ) as without,
        our_trainers(
            replicated.address,
            ready_gradients(_NUM_TENSORS, num_bytes, options={"replicas": 1}),
            count=_NUM_TRAINERS,
            repeats=_PER_TURN,
        ) as one,
    ):
        yield Case(ours=one, peers={"no replicas": without})


def _cases(quick: bool) -> Mapping[str, AbstractContextManager[Case]]:
    return {"sync-step": _sync_step(_QUICK_NUM_BYTES if quick else _NUM_BYTES)}


BENCHMARK = Benchmark(
    name="replication",
    summary="synchronous steps of 2 trainers with one replica of each shard, against none",
    rounds=9,
    quick_rounds=3,
    cases=_cases,
)
