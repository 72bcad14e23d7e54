"""What a run leaves behind: a JSON file with a fixed schema, and a table for the reader."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import grpc
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Row


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


def write_json(path: Path, *, name: str, rows: Sequence[Row]) -> None:
    """Writes {"name", "machine", "rows"}, each row the fields of `Row`; times in milliseconds."""
    record = {"name": name, "machine": machine(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=2) + "\n")


def print_table(console: Console, *, name: str, rows: Sequence[Row]) -> None:
    """Prints one line a row; the ratio is peer / ours, so above 1 ours is faster."""
    table = Table(title=f"{name} ({machine()})")
    table.add_column("case")
    table.add_column("ours, ms", justify="right")
    table.add_column("peer, ms", justify="right")
    table.add_column("ratio (peer / ours)", justify="right")
    table.add_column("peer")
    for row in rows:
        table.add_row(row.case, f"{row.ours_ms:.3f}", f"{row.peer_ms:.3f}", f"{row.ratio:.2f}", row.peer)
    console.print(table)
