"""One run: the faults of a schedule come over a cluster, and then all that was promised is checked."""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pserver.errors import PserverError
from tests.chaos import network
from tests.chaos.harness import Run, Violation
from tests.chaos.schedule import Fault, Scenario
from tests.etcd_server import NoEtcd, find_etcd

logger = logging.getLogger(__name__)


def why_not(scenario: Scenario) -> str:
    """Why a scenario cannot run here; empty if it can."""
    if scenario.partitions and (reason := network.why_not()):
        return reason
    if scenario.etcd:
        try:
            find_etcd()
        except NoEtcd as error:
            return str(error)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run; no violations: all is well."""

    num_faults: int
    num_updates: int
    longest_pause_s: float
    violations: tuple[str, ...]


def run_schedule(scenario: Scenario, schedule: Sequence[Fault], order: Sequence[str]) -> Result:
    """One run from its start to its end.

    Args:
        order: servers that are killed at the end, to see what their copies hold.
    """
    found: list[str] = []
    num_faults, updates, pause_s = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as folder, Run(scenario, Path(folder)) as run:
        try:
            for fault in schedule:
                run.inject(fault)
                num_faults += 1
            run.settle()
            found += run.check()
            found += run.check_copies(order)
            found += run.check_nothing_left()
        except (Violation, PserverError, AssertionError) as error:
            found.append(f"{type(error).__name__}: {error}")
        updates = sum(len(each.outcomes) for each in run.ledgers())
        pause_s = run.longest_pause_s()
        if found:
            for child in run.children:
                logger.error("%s", child.transcript())
    return Result(num_faults=num_faults, num_updates=updates, longest_pause_s=pause_s, violations=tuple(found))
