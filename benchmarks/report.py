"""What a run leaves behind: a JSON file with a fixed schema, and a table for the reader."""

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import grpc
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Figures, Row


def machine() -> str:
    """The machine in words: processor, cores, memory and versions; nothing that tells whose it is."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ", ".join(
        (
            _cpu_model(),
            f"{os.cpu_count()} cores",
            f"{memory_bytes / 2**30:.0f} GiB",
            f"python {platform.python_version()}",
            f"torch {torch.__version__}",
            f"grpcio {grpc.__version__}",
        )
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def write_json(path: Path, figures: Figures) -> None:
    """Writes {"name", "machine", "rows", "skipped"}; benchmarks/README.md says what a row holds."""
    record = {
        "name": figures.name,
        "machine": machine(),
        "rows": [_fields(row) for row in figures.rows],
        "skipped": [asdict(each) for each in figures.skipped],
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


def _fields(row: Row) -> dict[str, object]:
    fields: dict[str, object] = {
        "case": row.case,
        f"ours_{row.unit.lower()}": row.ours,
        f"peer_{row.unit.lower()}": row.theirs,
        "peer": row.peer,
        "ratio": row.ratio,
    }
    more = {"mb_per_s": row.mb_per_s, "hidden_share": row.hidden_share}
    return fields | {name: value for name, value in more.items() if value is not None}


def print_table(console: Console, figures: Figures) -> None:
    """Prints one line a row; the ratio is peer / ours, so above 1 ours is faster, or smaller."""
    table = Table(title=f"{figures.name} ({machine()})")
    table.add_column("case")
    for heading in ("ours", "peer", "ratio (peer / ours)"):
        table.add_column(heading, justify="right")
    table.add_column("peer")
    if has_speeds := any(row.mb_per_s is not None for row in figures.rows):
        table.add_column("ours, MB/s", justify="right")
    if has_shares := any(row.hidden_share is not None for row in figures.rows):
        table.add_column("hidden", justify="right")
    for row in figures.rows:
        speed = "" if row.mb_per_s is None else f"{row.mb_per_s:.0f}"
        share = "" if row.hidden_share is None else f"{row.hidden_share:.0%}"
        cells = (row.case, f"{row.ours:.3f} {row.unit}", f"{row.theirs:.3f} {row.unit}", f"{row.ratio:.2f}", row.peer)
        table.add_row(*cells, *([speed] if has_speeds else []), *([share] if has_shares else []))
    console.print(table)
    for each in figures.skipped:
        console.print(f"skipped: {each.case}: {each.reason}", markup=False)
