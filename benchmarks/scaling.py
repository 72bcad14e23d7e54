"""How our step grows with trainers, servers and bytes, and what memory a server takes for it."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch

from benchmarks.cluster import running_cluster
from benchmarks.harness import MEGABYTES, Benchmark, Case, Side
from benchmarks.memory import highest_resident_bytes, resident_bytes
from benchmarks.trainers import our_trainers, ready_gradients

_NUM_TENSORS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A cluster and the model that its trainers step together."""

    trainers: int = 1
    servers: int = 1
    megabytes: int = 10

    @property
    def num_bytes(self) -> int:
        """Bytes of the model's parameters."""
        return self.megabytes * 1_000_000

    @property
    def moved_bytes(self) -> int:
        """What one step moves: every trainer's gradients to the servers, and the parameters to every trainer."""
        return 2 * self.trainers * self.num_bytes


_BASE, _QUICK_BASE = Setup(), Setup(megabytes=1)
_TRAINERS, _QUICK_TRAINERS = (1, 2, 4, 8), (1, 2)
_SERVERS, _QUICK_SERVERS = (1, 2, 4), (1, 2)
_MEGABYTES, _QUICK_MEGABYTES = (1, 10, 100, 1000), (1, 4)

_RSS_TRAINERS = 2
_RSS_MEGABYTES, _QUICK_RSS_MEGABYTES = 100, 4
#: Adam keeps two values for each parameter.
_STATE_VALUES = 2


@contextmanager
def _steps(setup: Setup) -> Iterator[Side]:
    prepare = ready_gradients(_NUM_TENSORS, setup.num_bytes)
    with (
        running_cluster(setup.servers) as cluster,
        our_trainers(cluster.address, prepare, count=setup.trainers) as ours,
    ):
        yield ours


@contextmanager
def _against_base(setup: Setup, base: Setup) -> Iterator[Case]:
    label = f"{base.trainers} trainer, {base.servers} server, {base.megabytes} MB"
    with _steps(base) as base_step, _steps(setup) as step:
        yield Case(ours=step, peers={label: base_step}, moved_bytes=setup.moved_bytes)


@contextmanager
def _server_memory(megabytes: int) -> Iterator[Case]:
    num_bytes = megabytes * 1_000_000
    prepare = ready_gradients(_NUM_TENSORS, num_bytes, torch.optim.Adam)
    with running_cluster(1) as cluster:
        (pid,) = cluster.pids
        idle_bytes = resident_bytes(pid)
        with (
            highest_resident_bytes(pid) as highest,
            our_trainers(cluster.address, prepare, count=_RSS_TRAINERS) as steps,
        ):

            def used_bytes() -> float:
                steps()
                return highest() - idle_bytes

            allowed_bytes = allowed_server_bytes(num_bytes, num_state_values=_STATE_VALUES, num_trainers=_RSS_TRAINERS)
            yield Case(ours=used_bytes, peers={"what is allowed": lambda: allowed_bytes}, unit=MEGABYTES)


def allowed_server_bytes(num_bytes: int, *, num_state_values: int, num_trainers: int) -> float:
    """What a server may take above an idle one for a model whose parameters have `num_bytes`.

    `num_state_values` is how many values the optimizer keeps for each parameter, `num_trainers` how many make a round.
    """
    return 1.15 * num_bytes * (1 + num_state_values) + num_bytes * num_trainers + 200e6


def _cases(quick: bool) -> Mapping[str, AbstractContextManager[Case]]:
    base = _QUICK_BASE if quick else _BASE
    setups = {}
    for count in _QUICK_TRAINERS if quick else _TRAINERS:
        setups[f"trainers-{count}"] = replace(base, trainers=count)
    for count in _QUICK_SERVERS if quick else _SERVERS:
        setups[f"servers-{count}"] = replace(base, servers=count)
    for megabytes in _QUICK_MEGABYTES if quick else _MEGABYTES:
        setups[f"size-{megabytes}MB"] = replace(base, megabytes=megabytes)
    memory = _server_memory(_QUICK_RSS_MEGABYTES if quick else _RSS_MEGABYTES)
    return {name: _against_base(setup, base) for name, setup in setups.items()} | {"server-rss": memory}


BENCHMARK = Benchmark(
    name="scaling",
    summary="steps by trainers, servers and bytes against a base case, and a server's memory against what is allowed",
    rounds=7,
    quick_rounds=3,
    cases=_cases,
)
