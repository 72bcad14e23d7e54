"""Trains MNIST with one codec, and leaves accuracy, bytes and time; see compare_codecs.py.

pserver launch --servers 2 --trainers 2 workers/compression.py -- --codec int8 --out runs/codecs
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
from pserver.compress import BFloat16, Codec, ErrorFeedback, Float16, Int8, NoCompression, PowerSGD, TopK

#: Rounds in which PowerSGD sends gradients whole.
START = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to send less, and the colour of its curve."""

    compress: Codec
    pull_dtype: torch.dtype | None = None
    label: str
    colour: str


CANDIDATES = {
    "none": Candidate(compress=NoCompression(), label="NoCompression()", colour="#7f7f7f"),
    "fp16": Candidate(compress=Float16(), label="Float16()", colour="#1f77b4"),
    "bf16": Candidate(compress=BFloat16(), label="BFloat16()", colour="#17becf"),
    "bf16-pull": Candidate(
        compress=BFloat16(),
        pull_dtype=torch.bfloat16,
        label="BFloat16(), pull_dtype=torch.bfloat16",
        colour="#9467bd",
    ),
    "int8": Candidate(compress=Int8(), label="Int8()", colour="#2a7f3f"),
    "topk": Candidate(
        compress=ErrorFeedback(TopK(ratio=0.05)), label="ErrorFeedback(TopK(ratio=0.05))", colour="#ff7f0e"
    ),
    "powersgd": Candidate(
        compress=ErrorFeedback(PowerSGD(rank=2, start_iteration=START)),
        label=f"ErrorFeedback(PowerSGD(rank=2, start_iteration={START}))",
        colour="#d62728",
    ),
}


def run(cluster: pserver.Cluster, arguments: argparse.Namespace, digits: Digits) -> tuple[list[Snapshot], int]:
    """Trains; also returns the bytes of parameters received, which registering the model does not count among."""
    candidate = CANDIDATES[arguments.codec]
    torch.manual_seed(arguments.seed)
    model = DigitsNet()
    optimizer = pserver.optim.RemoteOptimizer(
        torch.optim.SGD,
        model,
        lr=arguments.lr,
        momentum=0.9,
        name="mnist",
        compress=candidate.compress,
        pull_dtype=candidate.pull_dtype,
    )
    before = cluster.statistics().received_bytes
    examples = batches(digits, size=arguments.batch_size, seed=arguments.seed, rank=cluster.rank)
    snapshots = train(cluster, model, optimizer, examples, num_rounds=arguments.rounds)
    return snapshots, cluster.statistics().received_bytes - before


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--codec", choices=sorted(CANDIDATES), required=True)
    add("--out", type=Path, default=Path("runs/codecs"))
    add("--rounds", type=int, default=600)
    add("--batch-size", type=int, default=32)
    add("--lr", type=float, default=0.04)
    add("--seed", type=int, default=0)
    add("--cache-dir", type=Path, default=Path("runs/cache"))
    return parser.parse_args(arguments)


def main() -> None:
    """Run one trainer; `pserver launch` says in the environment which one it is."""
    arguments = parse()
    torch.set_num_threads(1)
    digits, held_out = split(load_digits(arguments.cache_dir))
    with pserver.connect() as cluster:
        snapshots, received_bytes = run(cluster, arguments, digits)
        if cluster.rank != 0:
            return
    measurements = measure(snapshots, held_out)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {"curve": [asdict(each) for each in measurements], "received_bytes": received_bytes}
    (arguments.out / f"{arguments.codec}-{arguments.seed}.json").write_text(json.dumps(result, indent=2))
    last = measurements[-1]
    print(f"{CANDIDATES[arguments.codec].label}: {100 * last.accuracy:.2f} % in {last.seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
