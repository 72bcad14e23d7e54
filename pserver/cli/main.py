"""The `pserver` command line; each command imports what it needs, so that `--help` is quick."""

import gc
import logging
import math
import secrets
import sys
from collections.abc import Iterable
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from pserver.config import ServerSettings, with_sleeping_threads
from pserver.errors import ConfigError, PserverError

_DEFAULT = ServerSettings(name="s0")

app = typer.Typer(
    help="A parameter server for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class LogLevel(StrEnum):
    """The levels of `logging`."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


@app.command()
def serve(
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of this server, unique in its cluster. [default: s0 with --coordinator, else a random one]"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULT.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = _DEFAULT.port,
    stream_port: Annotated[
        int,
        typer.Option(
            help="Second port, for tensors beside gRPC; 0: any free one. Where it cannot be reached, gRPC has them."
        ),
    ] = _DEFAULT.stream_port,
    coordinator: Annotated[bool, typer.Option("--coordinator", help="Host the coordinator of a new cluster.")] = False,
    join: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Join the cluster of this coordinator.")] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="With --coordinator: the folder where it keeps what it must know when it is started again."),
    ] = None,
    coordination: Annotated[
        str | None,
        typer.Option(
            metavar="etcd://HOST:PORT[,...]/PREFIX",
            help="With --coordinator: one of several, of which etcd says who leads. Without: join whoever does.",
        ),
    ] = None,
    min_servers: Annotated[
        int | None, typer.Option(help="With --coordinator: servers to wait for before a model is placed. [default: 1]")
    ] = None,
    trainer_lease_s: Annotated[
        float, typer.Option(help="Seconds of silence after which a trainer counts as dead.")
    ] = _DEFAULT.trainer_lease_s,
    server_lease_s: Annotated[
        float, typer.Option(help="Seconds of silence after which a server counts as dead.")
    ] = _DEFAULT.server_lease_s,
    drain_s: Annotated[
        float, typer.Option(help="Seconds that a shutdown by SIGTERM waits for work under way.")
    ] = _DEFAULT.drain_s,
    shared_memory: Annotated[
        bool, typer.Option(help="Let trainers on this machine read and write /dev/shm instead of sending messages.")
    ] = _DEFAULT.shared_memory,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            show_default=False,
            help="Import this module first, for example one that registers an optimizer. May be repeated.",
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(case_sensitive=False, help="What to log on stderr.")] = LogLevel.INFO,
) -> None:
    """Run one server until SIGTERM (in order) or SIGINT (at once).

    When it answers, one line comes on stdout: pserver ready name=... address=... coordinator=...
    """
    if coordinator == (join is not None) and (coordinator or coordination is None):
        raise ConfigError(
            "a server needs exactly one of --coordinator (host a new cluster) and --join HOST:PORT (join one; or "
            f"--coordination, to join whoever leads), but got {'both' if coordinator else 'neither'}"
        )
    if data_dir is not None and not coordinator:
        raise ConfigError("--data-dir is for the server that has --coordinator; leave it out")
    if join is not None and min_servers is not None:
        raise ConfigError("--min-servers is for the server that has --coordinator; leave it out with --join")
    name = name or (_DEFAULT.name if coordinator else f"s-{secrets.token_hex(3)}")
    settings = ServerSettings(
        name=name,
        host=host,
        port=port,
        stream_port=stream_port,
        join=join,
        min_servers=_DEFAULT.min_servers if min_servers is None else min_servers,
        trainer_lease_s=trainer_lease_s,
        server_lease_s=server_lease_s,
        drain_s=drain_s,
        shared_memory=shared_memory,
        data_dir=data_dir,
        coordination=coordination,
        stands_by=coordinator or coordination is None,
    )
    logging.basicConfig(stream=sys.stderr, level=log_level.value, format="%(levelname)s %(name)s: %(message)s")
    with_sleeping_threads()
    _import_all(imports or ())
    from pserver.server.process import run_server

    try:
        run_server(
            settings,
            on_ready=lambda address: print(
                f"pserver ready name={name} address={address} coordinator={join or coordination or address}", flush=True
            ),
        )
    finally:
        # Python would otherwise collect all of torch once more on its way out, which takes a second or two.
        gc.freeze()


@app.command()
def launch(
    script: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="The training script; `pserver.connect()` finds the run."),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS...", show_default=False, help="Arguments of the script.")
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="How many servers to start.")] = 1,
    trainers: Annotated[int, typer.Option(min=1, help="How many copies of the script to start.")] = 1,
    timeout_s: Annotated[
        float | None, typer.Option(min=0, help="Stop, as a failure, after so many seconds. [default: never]")
    ] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            show_default=False,
            help="Module that every server imports first. May be repeated.",
        ),
    ] = None,
    no_live: Annotated[bool, typer.Option("--no-live", help="Lines of progress instead of a live table.")] = False,
) -> None:
    """Start servers and trainers on this machine, and stop them all when the run ends, however it ends."""
    from pserver.cli.launch import LaunchPlan
    from pserver.cli.launch import launch as run

    plan = LaunchPlan(
        servers=servers,
        trainers=trainers,
        script=script,
        arguments=tuple(arguments or ()),
        imports=tuple(imports or ()),
        timeout_s=math.inf if timeout_s is None else timeout_s,
    )
    raise typer.Exit(run(plan, live=sys.stdout.isatty() and not no_live))


@app.command()
def status(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The coordinator.")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Show the servers, models, shards and trainers of a cluster."""
    from pserver.cli.status import show_status
    from pserver.client.status import fetch_status

    show_status(fetch_status(address), as_json=as_json)


def _import_all(modules: Iterable[str]) -> None:
    """Imports modules by name; the current folder counts, as in `python -m`.

    Raises:
        ConfigError: one cannot be imported.
    """
    sys.path.insert(0, "")
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"--import {module}: {error}; start the server where Python finds the module, or set PYTHONPATH"
            ) from error


def main() -> None:
    """Runs the command line; an error of this package becomes one message on stderr and exit code 1."""
    try:
        app()
    except PserverError as error:
        print(f"pserver: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
