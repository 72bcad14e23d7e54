"""What happens to a cluster in one run, as data: a seed gives a scenario and the faults that come over it."""

import random
from dataclasses import dataclass
from enum import Enum

SERVERS = ("s0", "s1", "s2")
#: Which of them coordinate, without etcd and with it.
COORDINATOR_ALONE, CANDIDATES = SERVERS[0], SERVERS[:2]
#: This trainer is left alone, so that there is always one whose steps can be timed.
STEADY_TRAINER = "t0"
FAULTY_TRAINER = "t1"
ETCD = "etcd"

SERVER_LEASE_S = 1.5
TRAINER_LEASE_S = 3.0
#: Stops and partitions, as parts of a lease: well below it, and well above.
SHORT, LONG = (0.2, 0.6), (1.6, 2.5)


class FaultKind(Enum):
    """KILL: SIGKILL, and another one starts later. STOP: SIGSTOP, then SIGCONT. PARTITION: every packet from and to it
    is lost."""

    KILL = "kill"
    STOP = "stop"
    PARTITION = "partition"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        target: "s0", "t1", "etcd".
        after_s: pause since the fault before, in seconds; what the budget asks for comes on top.
        for_s: how long it lasts, in seconds.
        returns: whether it ends at all; only a trainer may be gone for good.
    """

    kind: FaultKind
    target: str
    after_s: float
    for_s: float
    returns: bool = True

    def __str__(self) -> str:
        return f"{self.kind.value} {self.target} for {self.for_s:.2f} s{'' if self.returns else ', for good'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster and its training.

    Attributes:
        policy: "bsp" or "async".
        etcd: whether coordinators, s0 and s1, agree in etcd. Otherwise s0 is the only one, and keeps what it must know
            in a folder.
        partitions: whether each server has a network of its own, so that it can be cut off.
    """

    name: str
    policy: str
    etcd: bool = False
    partitions: bool = False


SCENARIOS = (
    Scenario(name="alone-bsp", policy="bsp"),
    Scenario(name="alone-async", policy="async"),
    Scenario(name="etcd-bsp", policy="bsp", etcd=True),
    Scenario(name="etcd-async", policy="async", etcd=True),
    Scenario(name="partitioned-bsp", policy="bsp", partitions=True),
    Scenario(name="partitioned-async", policy="async", partitions=True),
)


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed: neighbours have different ones."""
    return SCENARIOS[seed % len(SCENARIOS)]


def make_schedule(seed: int, scenario: Scenario, num_faults: int) -> tuple[Fault, ...]:
    """The faults of a seed, in order."""
    chance = random.Random(f"{scenario.name} {seed}")
    faults: list[Fault] = []
    targets = [*SERVERS, *SERVERS, FAULTY_TRAINER, *([ETCD] if scenario.etcd else [])]
    while len(faults) < num_faults:
        before = faults[-1].target if faults else None
        fault = _make_fault(chance, chance.choice([each for each in targets if each != before]), scenario)
        faults.append(fault)
        if not fault.returns:
            targets = [each for each in targets if each != fault.target]
    return tuple(faults)


def _make_fault(chance: random.Random, target: str, scenario: Scenario) -> Fault:
    kinds = [FaultKind.KILL, FaultKind.STOP]
    if scenario.partitions and target in SERVERS:
        kinds.append(FaultKind.PARTITION)
    kind = chance.choice(kinds)
    lease_s = TRAINER_LEASE_S if target == FAULTY_TRAINER else SERVER_LEASE_S
    # A coordinator that is alone takes everybody whom it cannot hear for lost: that is more than one copy.
    alone = kind is FaultKind.PARTITION and target == COORDINATOR_ALONE and not scenario.etcd
    part = chance.uniform(*(SHORT if alone else chance.choice((SHORT, LONG))))
    gone = kind is FaultKind.KILL and target == FAULTY_TRAINER and chance.random() < 0.25
    return Fault(
        kind=kind, target=target, after_s=chance.uniform(0.0, 1.0), for_s=round(part * lease_s, 3), returns=not gone
    )
