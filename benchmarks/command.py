"""The command line: `python -m benchmarks NAME [--json FILE] [--png FILE] [--case CASE] [--quick] [--rounds N]`."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.chart import draw_chart
from benchmarks.harness import UnknownCase, run
from benchmarks.registry import BENCHMARKS
from benchmarks.report import print_table, write_json
from benchmarks.threads import set_threads

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    name: Annotated[str | None, typer.Argument(help="Which benchmark to run; --list shows them.")] = None,
    json: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
    png: Annotated[Path | None, typer.Option(help="Where to write a chart of the ratios; needs matplotlib.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less data and fewer rounds: does it run at all?")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each side, instead of its own number.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case. May be repeated.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the benchmarks and stop.")] = False,
) -> None:
    """Times pserver and its peers side by side. Figures only: nothing passes or fails on time."""
    if list_:
        for benchmark in BENCHMARKS.values():
            print(f"{benchmark.name:12} {benchmark.summary}")
        return
    if name not in BENCHMARKS:
        raise typer.BadParameter(f"the benchmarks are {', '.join(BENCHMARKS)}, but this is {name!r}", param_hint="NAME")
    # Python would die of SIGTERM without ending the processes that the benchmark started.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    set_threads()
    try:
        figures = run(BENCHMARKS[name], quick=quick, rounds=rounds, only=case or ())
    except UnknownCase as error:
        raise typer.BadParameter(str(error), param_hint="--case") from None
    if json is not None:
        write_json(json, figures)
    if png is not None:
        draw_chart(png, figures)
    print_table(Console(), figures)
