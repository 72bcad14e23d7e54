"""The services of docker/compose.yaml, as one project of Compose that the test starts and removes."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docker.commands import CommandFailed, last_lines, run, say
from tests.docker.daemon import Docker

SERVERS = ("coordinator", "server-0", "server-1")
TRAINERS = ("trainer-0", "trainer-1")

#: Compose's own. https://docs.docker.com/reference/compose-file/services/#labels
_LABEL = "com.docker.compose"
_BUILD_S = 900.0
_UP_S = 300.0
_DOWN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A project of Compose: `files`, each over those before it, with the settings in `environ`, which also names it."""

    docker: Docker
    files: tuple[Path, ...]
    environ: Mapping[str, str]

    @property
    def label(self) -> str:
        """A filter for what belongs to the project."""
        return f"label={_LABEL}.project={self.environ['COMPOSE_PROJECT_NAME']}"

    def compose(self, *arguments: str, timeout_s: float = 60.0, extra: Mapping[str, str] | None = None) -> str:
        """What `docker compose ARGUMENTS` prints; `extra` goes into its environment.

        Raises:
            CommandFailed: as `commands.run` does.
        """
        files = (part for file in self.files for part in ("--file", file))
        command: tuple[str | Path, ...] = (*self.docker.compose, "--ansi", "never", *files)
        return run(
            (*command, *arguments),
            environ={**self.environ, **(extra or {})},
            timeout_s=timeout_s,
            cwd=self.files[0].parent,
        )

    def build(self, extra: Mapping[str, str]) -> None:
        """Builds the image, with `extra` in the environment of Compose."""
        self.compose("build", timeout_s=_BUILD_S, extra=extra)

    @contextmanager
    def up(self) -> Iterator[None]:
        """Starts everything and returns when the trainers have been started; removes everything in the end.

        What fails inside comes out with the end of every container's output printed before it.
        """
        try:
            self.compose("up", "-d", timeout_s=_UP_S)
            yield
        except BaseException:
            with suppress(CommandFailed):
                print(self.compose("ps", "-a"), last_lines(self.compose("logs", "--no-color"), 200), sep="\n")
            raise
        finally:
            say("down")
            self.compose("down", "--volumes", "--timeout", "10", timeout_s=_DOWN_S)

    def container(self, service: str) -> str:
        """The id of the container of `service`, running or not; those that `run` started do not count."""
        labels = (f"{_LABEL}.service={service}", f"{_LABEL}.oneoff=False")
        filters = (part for label in labels for part in ("--filter", f"label={label}"))
        return self.docker.run("ps", "-a", "-q", "--filter", self.label, *filters).strip()

    def read(self, service: str, *command: str) -> str:
        """What `command` prints in the running container of `service`."""
        # Compose would take a second.
        return self.docker.run("exec", self.container(service), *command)

    def logs(self, service: str) -> list[str]:
        """What the container of `service` has printed so far, in all its runs."""
        return self.compose("logs", "--no-color", service).splitlines()

    def state(self, service: str) -> Mapping[str, Any]:
        """What Docker knows about the container of `service`: Status, ExitCode, Health, ..."""
        state: Mapping[str, Any] = json.loads(self.docker.run("inspect", self.container(service)))[0]["State"]
        return state

    def wait(self, service: str, *, timeout_s: float) -> int:
        """Waits until the container of `service` has ended, and returns its exit code."""
        return int(self.docker.run("wait", self.container(service), timeout_s=timeout_s))

    def leftovers(self) -> list[str]:
        """Containers, volumes and networks of the project that are still there."""
        mine = ("-q", "--filter", self.label)
        listings = (("ps", "-a"), ("volume", "ls"), ("network", "ls"))
        return [name for listing in listings for name in self.docker.run(*listing, *mine).split()]
