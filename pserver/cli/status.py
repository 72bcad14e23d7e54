"""`pserver status`: one look at a cluster, as tables or as JSON."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pserver.types import ClusterStatus, ModelStatus, ShardStatus

#: Wide enough that no cell wraps where there is no terminal to ask.
_WIDTH_WITHOUT_TERMINAL = 160


def show_status(status: ClusterStatus, *, as_json: bool) -> None:
    """Prints a status on stdout, as tables or as JSON; in JSON, a number that is not finite is null."""
    if as_json:
        print(json.dumps(_finite(asdict(status)), indent=2, allow_nan=False))
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
    for table in status_tables(status):
        console.print(table)


def status_tables(status: ClusterStatus) -> Iterable[Table]:
    """The tables servers, models, shards and trainers."""
    yield text_table(
        "servers",
        ("name", "address", "state", "silent"),
        [(s.name, s.address, "alive" if s.alive else "lost", f"{s.silent_s:.1f} s") for s in status.servers],
    )
    yield text_table(
        "models",
        ("name", "state", "policy", "optimizer", "round", "accepted", "rejected", "staleness", "waiting for"),
        [
            (
                m.name,
                _state(m),
                m.sync_policy,
                m.optimizer,
                str(m.round),
                str(m.num_accepted),
                str(m.num_rejected),
                staleness_text(m.staleness),
                _waiting_for(m),
            )
            for m in status.models
        ],
    )
    yield text_table(
        "shards",
        ("model", "shard", "primary", "epoch", "size", "round", "version", "replicas"),
        [
            (
                m.name,
                str(shard.shard),
                f"{shard.server}, lost" if shard.electing else shard.server,
                str(shard.epoch),
                bytes_text(shard.num_bytes),
                str(shard.round),
                str(shard.version),
                replicas_text(shard),
            )
            for m in status.models
            for shard in m.shards
        ],
    )
    yield text_table(
        "trainers",
        ("rank", "id", "step", "lease", "lag", "reported"),
        [
            (
                str(t.rank),
                str(t.trainer_id),
                str(t.step),
                f"{t.lease_s:.1f} s",
                str(t.lag_rounds),
                reported_text(t.reported),
            )
            for t in status.trainers
        ],
    )


def text_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of plain cells; what looks like rich markup in them stays as it is."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def bytes_text(num_bytes: float) -> str:
    """For people, in powers of 1000: "999 B", "1.5 kB", "12.3 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 1000:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} TB"


def replicas_text(shard: ShardStatus) -> str:
    """For people: "s1, s2: catching up, 3 behind (1 missing)"; "-" if there are to be none."""
    texts = [
        f"{each.server}{'' if each.state == 'in sync' else ': ' + each.state}"
        + (f", {each.lag} behind" if each.lag else "")
        for each in shard.replicas
    ]
    missing = f"({shard.num_missing_replicas} missing)" if shard.num_missing_replicas else ""
    return " ".join(filter(None, ["; ".join(texts), missing])) or "-"


def reported_text(reported: Mapping[str, float]) -> str:
    """For people: "loss 0.214, accuracy 0.93"."""
    return ", ".join(f"{name} {value:.4g}" for name, value in reported.items())


def staleness_text(histogram: Mapping[int, int]) -> str:
    """For people: mean and maximum of a histogram of staleness, "mean 1.4, max 6"; "-" without any."""
    total = sum(histogram.values())
    if not total:
        return "-"
    mean = sum(rounds * count for rounds, count in histogram.items()) / total
    return f"mean {mean:.1f}, max {max(histogram)}"


def _state(model: ModelStatus) -> str:
    return f"{model.state}: {model.failure}" if model.failure else model.state


def _waiting_for(model: ModelStatus) -> str:
    if model.missing_trainers:
        return f"{model.missing_trainers} more trainers"
    if model.waiting_for_ranks:
        return "ranks " + ", ".join(map(str, model.waiting_for_ranks))
    return "-"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
