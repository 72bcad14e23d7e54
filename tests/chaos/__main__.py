"""Runs seeds, each another scenario and other faults, until the time is over: python -m tests.chaos --duration-s N.

The last line has the sums; the exit code is 1 if anything was violated, and then the run's seed is named.
"""

import argparse
import logging
import random
import secrets
import signal
import sys
import time

from tests.chaos.runs import run_schedule, why_not
from tests.chaos.schedule import SCENARIOS, SERVERS, make_schedule, scenario_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--duration-s", type=float, default=300.0, help="no run begins later than this")
    parser.add_argument("--seed", type=int, help="of the first run; later ones follow. Random unless given")
    parser.add_argument("--faults", type=int, default=8, help="in each run")
    arguments = parser.parse_args()
    # Processes and networks go in order also if the run is ended from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    left_out = {each.name: reason for each in SCENARIOS if (reason := why_not(each))}
    for name, reason in left_out.items():
        print(f"not run: {name}: {reason}", flush=True)
    seed = secrets.randbelow(1 << 20) if arguments.seed is None else arguments.seed
    ends = time.monotonic() + arguments.duration_s
    results = []
    while not results or time.monotonic() < ends:
        scenario = scenario_of(seed)
        if scenario.name in left_out and len(left_out) < len(SCENARIOS):
            seed += 1
            continue
        began = time.monotonic()
        order = random.Random(seed).sample(SERVERS[1:], k=2)
        result = run_schedule(scenario, make_schedule(seed, scenario, arguments.faults), order)
        results.append(result)
        print(
            f"seed {seed} {scenario.name}: {result.num_faults} faults, {result.num_updates} updates, longest pause "
            f"{result.longest_pause_s:.2f} s, {len(result.violations)} violations, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        for violation in result.violations:
            print(f"  {violation}", flush=True)
        if result.violations:
            print(f"replay with SEED={seed}", flush=True)
        seed += 1
    violations = sum(len(each.violations) for each in results)
    print(
        f"chaos: runs {len(results)}, faults {sum(each.num_faults for each in results)}, updates checked "
        f"{sum(each.num_updates for each in results)}, violations: {violations}, longest pause "
        f"{max(each.longest_pause_s for each in results):.2f} s",
        flush=True,
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
