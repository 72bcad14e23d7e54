"""Runs policies.py once for each sync policy, draws accuracy over time and prints a table.

    python workers/compare_policies.py --out runs/policies

Four trainers, the last of which is five times slower; two servers.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparing import launch, table
from policies import CANDIDATES

PICTURE = "policies.png"
TABLE = "policies.md"


def run(policy: str, out: Path, passed_on: Sequence[str]) -> Mapping[str, Any]:
    """One run in processes of its own; what it left."""
    arguments = ["--policy", policy, "--out", str(out), *passed_on]
    found: Mapping[str, Any] = launch("policies.py", arguments, out / f"{policy}.json", trainers=4)
    return found


def mean_staleness(result: Mapping[str, Any]) -> float:
    """Rounds between a gradient's parameters and its own, on average over those that were counted."""
    histogram = {int(rounds): count for rounds, count in result["staleness"].items()}
    return sum(rounds * count for rounds, count in histogram.items()) / max(1, sum(histogram.values()))


def row(result: Mapping[str, Any]) -> list[str]:
    """Time, accuracy, and what became of the gradients."""
    last = result["curve"][-1]
    return [
        f"`{result['policy']}`",
        f"{last['seconds']:.1f}",
        f"{100 * last['accuracy']:.1f} %",
        str(result["num_accepted"]),
        str(result["num_rejected"]),
        f"{mean_staleness(result):.1f}",
    ]


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Held-out accuracy over seconds, one curve for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for policy, result in results.items():
        candidate = CANDIDATES[policy]
        seconds = [each["seconds"] for each in result["curve"]]
        accuracies = [100 * each["accuracy"] for each in result["curve"]]
        axes.plot(seconds, accuracies, color=candidate.colour, label=candidate.label, linewidth=1.8)
        axes.plot(seconds[-1:], accuracies[-1:], "o", color=candidate.colour, markersize=5)
    axes.set_xlabel("seconds")
    axes.set_ylabel("held-out accuracy, %")
    axes.set_ylim(50, 100)
    axes.set_title("MNIST, 4 trainers, one of them 5 times slower; the same number of gradients each", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Run every policy; arguments that are not known here go on to policies.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/policies"))
    parser.add_argument("--only", nargs="+", choices=sorted(CANDIDATES), default=list(CANDIDATES))
    arguments, passed_on = parser.parse_known_args()
    results = {policy: run(policy, arguments.out, passed_on) for policy in arguments.only}
    draw(results, arguments.out / PICTURE)
    header = ["policy", "seconds", "held-out accuracy", "gradients counted", "refused", "mean staleness"]
    shown = table(header, [row(each) for each in results.values()])
    (arguments.out / TABLE).write_text(shown)
    print(f"\n{shown}\ncurves in {arguments.out / PICTURE}")


if __name__ == "__main__":
    main()
