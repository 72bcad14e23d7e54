"""Commands with a deadline, whose output an error carries."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_NUM_LINES_SHOWN = 40
_START_S = time.monotonic()


class CommandFailed(Exception):
    """A command that did not end with 0, or not in time."""


def say(text: str) -> None:
    """Prints one line of progress, with the seconds since the start."""
    print(f"{time.monotonic() - _START_S:6.1f} s  {text}", flush=True)


def last_lines(text: str, number: int = _NUM_LINES_SHOWN) -> str:
    """The end of `text`."""
    return "\n".join(text.splitlines()[-number:])


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Runs `command` with nothing on stdin and returns its stdout.

    Raises:
        CommandFailed: it could not be started, failed, or took longer than `timeout_s`; with the end of its output.
    """
    shown = " ".join(map(str, command))
    try:
        done = subprocess.run(
            command,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        parts = (part.decode(errors="replace") for part in (error.stdout, error.stderr) if isinstance(part, bytes))
        raise CommandFailed(f"{shown}: not done after {timeout_s:g} s\n{last_lines(''.join(parts))}") from None
    except OSError as error:
        raise CommandFailed(f"{shown}: {error}") from None
    if done.returncode:
        raise CommandFailed(f"{shown}: exit code {done.returncode}\n{last_lines(done.stdout + done.stderr)}")
    return done.stdout
