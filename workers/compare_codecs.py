"""Runs compression.py once for each codec and seed, draws accuracy over rounds and over bytes, and prints a table.

    python workers/compare_codecs.py --out runs/codecs

Two trainers, two servers, and messages for everything: shared memory has no use for fewer bytes.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from comparing import launch, table
from compression import CANDIDATES

PICTURE = "codecs.png"
TABLE = "codecs.md"

#: What the runs of one codec left, one for each seed.
Runs = Sequence[Mapping[str, Any]]


def run(codec: str, seed: int, out: Path, passed_on: Sequence[str]) -> Mapping[str, Any]:
    """One run in processes of its own; what it left."""
    arguments = ["--codec", codec, "--seed", str(seed), "--out", str(out), *passed_on]
    found: Mapping[str, Any] = launch(
        "compression.py", arguments, out / f"{codec}-{seed}.json", trainers=2, PSERVER_TRANSPORT="grpc"
    )
    return found


def row(codec: str, runs: Runs) -> list[str]:
    """Means over the seeds, but the seconds of the fastest run; bytes are those of one trainer."""
    ends = [each["curve"][-1] for each in runs]
    accuracies = [100 * end["accuracy"] for end in ends]
    sent = mean(end["sent_bytes"] / end["round"] for end in ends)
    received = mean(each["received_bytes"] / end["round"] for each, end in zip(runs, ends, strict=True))
    return [
        f"`{CANDIDATES[codec].label}`",
        f"{mean(accuracies):.1f} % ({min(accuracies):.1f} to {max(accuracies):.1f})",
        f"{sent / 1000:.0f}",
        f"{received / 1000:.0f}",
        f"{min(end['seconds'] for end in ends):.1f}",
    ]


def draw(results: Mapping[str, Runs], path: Path) -> None:
    """Held-out accuracy over rounds, and over what one trainer has sent; means over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_round, by_bytes) = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for codec, runs in results.items():
        points = list(zip(*(each["curve"] for each in runs), strict=True))
        accuracies = [100 * mean(each["accuracy"] for each in point) for point in points]
        rounds = [mean(each["round"] for each in point) for point in points]
        megabytes = [mean(each["sent_bytes"] for each in point) / 1e6 for point in points]
        style = {"color": CANDIDATES[codec].colour, "label": CANDIDATES[codec].label, "linewidth": 1.6}
        by_round.plot(rounds, accuracies, **style)
        by_bytes.plot(megabytes, accuracies, **style)
    by_round.set_xlabel("rounds")
    by_round.set_ylabel("held-out accuracy, %")
    by_round.set_ylim(70, 100)
    by_bytes.set_xlabel("gradients sent by one trainer, MB")
    by_bytes.set_xscale("log")
    by_bytes.set_xlim(left=1)
    by_bytes.xaxis.set_major_formatter("{x:g}")
    for axes in (by_round, by_bytes):
        axes.grid(alpha=0.3)
    by_round.legend(loc="lower right", fontsize=8)
    figure.suptitle(f"MNIST, 2 trainers, 2 servers; means of {len(next(iter(results.values())))} runs", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Run every codec; arguments that are not known here go on to compression.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/codecs"))
    parser.add_argument("--only", nargs="+", choices=sorted(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each codec")
    arguments, passed_on = parser.parse_known_args()
    # Seed by seed, so that whatever else the machine does falls on every codec.
    runs = {
        (codec, seed): run(codec, seed, arguments.out, passed_on)
        for seed in range(arguments.seeds)
        for codec in arguments.only
    }
    results = {codec: [runs[codec, seed] for seed in range(arguments.seeds)] for codec in arguments.only}
    header = ["codec", "held-out accuracy", "KB sent a round", "KB received a round", "seconds, fastest run"]
    shown = table(header, [row(codec, each) for codec, each in results.items()])
    (arguments.out / TABLE).write_text(shown)
    draw(results, arguments.out / PICTURE)
    print(f"\n{shown}\ncurves in {arguments.out / PICTURE}")


if __name__ == "__main__":
    main()
