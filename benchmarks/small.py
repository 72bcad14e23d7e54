"""A synchronous step of a small model with two trainers, against one bare grpcio call and a server on torch RPC."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from benchmarks.cluster import running_cluster
from benchmarks.harness import Benchmark, Case, Side, timed
from benchmarks.peers.batch_rpc import batch_rpc_peer
from benchmarks.peers.grpc_call import grpc_call
from benchmarks.trainers import our_trainers, ready_gradients

_NUM_BYTES = 10_000
_NUM_TENSORS = 4
_NUM_SERVERS = 2
_NUM_TRAINERS = 2

#: Steps, or calls, in one turn: many, so that both trainers run freely, as in training.
_PER_TURN = 20


@contextmanager
def _ours() -> Iterator[Side]:
    prepare = ready_gradients(_NUM_TENSORS, _NUM_BYTES)
    with (
        running_cluster(_NUM_SERVERS) as cluster,
        our_trainers(cluster.address, prepare, count=_NUM_TRAINERS, repeats=_PER_TURN) as ours,
    ):
        yield ours


@contextmanager
def _against_one_call() -> Iterator[Case]:
    with grpc_call() as call, _ours() as ours:
        yield Case(ours=ours, peers={"one grpcio call": timed(call, repeats=_PER_TURN)})


@contextmanager
def _against_batch_rpc() -> Iterator[Case]:
    peer = batch_rpc_peer(num_tensors=_NUM_TENSORS, num_bytes=_NUM_BYTES, num_trainers=_NUM_TRAINERS, repeats=_PER_TURN)
    with peer as peers, _ours() as ours:
        yield Case(ours=ours, peers=peers)


def _cases(_quick: bool) -> Mapping[str, AbstractContextManager[Case]]:
    return {
        f"step-{_NUM_SERVERS}x{_NUM_TRAINERS}": _against_one_call(),
        f"batch-{_NUM_SERVERS}x{_NUM_TRAINERS}": _against_batch_rpc(),
    }


BENCHMARK = Benchmark(
    name="small",
    summary="synchronous step of 10 kB on 2 shards with 2 trainers, against one grpcio call and a torch RPC server",
    rounds=30,
    quick_rounds=5,
    cases=_cases,
)
