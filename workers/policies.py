"""Trains MNIST under one sync policy with one slow trainer, and leaves accuracy over time; see compare_policies.py.

    pserver launch --servers 2 --trainers 4 workers/policies.py -- --policy async --out runs/policies

Every step takes at least --step-ms, on the highest rank --slowdown times as long: a slow machine, on a small one. All
policies get the same number of gradients; the learning rate grows with the gradients in a round.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from comparing import Snapshot, batches, measure, train
from mnist import DigitsNet
from mnist_data import Digits, load_digits, split

import pserver


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy to compare; `num_gradients` is how many a round has with four trainers, `colour` that of its curve."""

    sync: pserver.Bsp | pserver.Ssp | pserver.Async
    num_gradients: int
    label: str
    colour: str


CANDIDATES = {
    "bsp": Candidate(sync=pserver.Bsp(), num_gradients=4, label="Bsp()", colour="#1f77b4"),
    "bsp-backup": Candidate(
        sync=pserver.Bsp(backup_workers=1), num_gradients=3, label="Bsp(backup_workers=1)", colour="#17becf"
    ),
    "bsp-deadline": Candidate(
        sync=pserver.Bsp(deadline=0.06), num_gradients=3, label="Bsp(deadline=0.06)", colour="#9467bd"
    ),
    "ssp": Candidate(sync=pserver.Ssp(max_lag=8), num_gradients=1, label="Ssp(max_lag=8)", colour="#2a7f3f"),
    "async": Candidate(sync=pserver.Async(), num_gradients=1, label="Async()", colour="#d62728"),
    "async-bounded": Candidate(
        sync=pserver.Async(max_staleness=4), num_gradients=1, label="Async(max_staleness=4)", colour="#ff7f0e"
    ),
}


def run(cluster: pserver.Cluster, arguments: argparse.Namespace, digits: Digits) -> list[Snapshot]:
    """Takes steps until the gradients are used up."""
    candidate = CANDIDATES[arguments.policy]
    torch.manual_seed(arguments.seed)
    model = DigitsNet()
    optimizer = pserver.optim.RemoteOptimizer(
        torch.optim.SGD,
        model,
        lr=arguments.lr * candidate.num_gradients,
        momentum=0.9,
        name="mnist",
        sync=candidate.sync,
    )
    slowdown = arguments.slowdown if cluster.rank == cluster.world_size - 1 else 1.0
    examples = batches(digits, size=arguments.batch_size, seed=arguments.seed, rank=cluster.rank)
    return train(
        cluster,
        model,
        optimizer,
        examples,
        num_rounds=arguments.gradients // candidate.num_gradients,
        step_s=arguments.step_ms / 1000 * slowdown,
    )


def main() -> None:
    """Run one trainer; `pserver launch` says in the environment which one it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--policy", choices=sorted(CANDIDATES), required=True)
    add("--out", type=Path, default=Path("runs/policies"))
    add("--gradients", type=int, default=1200, help="of all trainers together")
    add("--batch-size", type=int, default=32)
    add("--lr", type=float, default=0.01, help="for each gradient in a round")
    add("--step-ms", type=float, default=40.0)
    add("--slowdown", type=float, default=5.0)
    add("--seed", type=int, default=0)
    add("--cache-dir", type=Path, default=Path("runs/cache"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    digits, held_out = split(load_digits(arguments.cache_dir))
    with pserver.connect() as cluster:
        snapshots = run(cluster, arguments, digits)
        if cluster.rank != 0:
            return
        (model,) = cluster.status().models
    measurements = measure(snapshots, held_out)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {
        "policy": model.sync_policy,
        "curve": [asdict(each) for each in measurements],
        "num_accepted": model.num_accepted,
        "num_rejected": model.num_rejected,
        "staleness": model.staleness,
    }
    (arguments.out / f"{arguments.policy}.json").write_text(json.dumps(result, indent=2))
    print(
        f"{model.sync_policy}: {100 * measurements[-1].accuracy:.2f} % in {measurements[-1].seconds:.1f} s", flush=True
    )


if __name__ == "__main__":
    main()
