"""A Docker daemon to test with: the one that answers, or one of our own, of which nothing is left afterwards."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.docker.commands import CommandFailed, last_lines, run, say

#: Debian's packages, by a command of theirs.
PACKAGES = {"dockerd": "docker.io", "docker-compose": "docker-compose", "debootstrap": "debootstrap"}
#: What the layers take while the image is built, and some more.
NEEDED_BYTES = 6 * 10**9

_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_INSTALL_S = 300.0
_START_S = 60.0
_ANSWER_S = 20.0
_STOP_S = 20.0


class NoDaemon(Exception):
    """No Docker daemon can be had here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Docker:
    """A daemon that answers, and the Compose that talks to it; one that `ends_with_us` takes its images with it."""

    environ: Mapping[str, str]
    compose: tuple[str, ...]
    ends_with_us: bool

    def run(self, *arguments: str | Path, timeout_s: float = 60.0) -> str:
        """What `docker ARGUMENTS` prints.

        Raises:
            CommandFailed: as `commands.run` does.
        """
        return run(("docker", *arguments), environ=self.environ, timeout_s=timeout_s)


@contextmanager
def docker_daemon(folder: Path) -> Iterator[Docker]:
    """The daemon that answers already, or else, for root, one that keeps everything in `folder` and ends here.

    Root gets Debian's packages installed where they are missing; these stay.

    Raises:
        NoDaemon: there is none, and none can be started.
    """
    environ = dict(os.environ)
    if _answers(environ):
        yield Docker(environ=environ, compose=_find_compose(environ), ends_with_us=False)
        return
    if os.name != "posix" or os.geteuid() != 0:
        raise NoDaemon("no Docker daemon answers, and only root can start one")
    # The client and Compose that come with the daemon, and none of its own in the way.
    environ = {name: value for name, value in environ.items() if not name.startswith(("DOCKER_", "COMPOSE_"))}
    environ |= {"PATH": _SYSTEM_PATH, "DOCKER_HOST": f"unix://{folder}/docker.sock", "DOCKER_CONFIG": str(folder)}
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < NEEDED_BYTES:
        raise NoDaemon(f"{folder} has {free_bytes / 1e9:.1f} GB left, and {NEEDED_BYTES / 1e9:g} GB are needed")
    install_packages()
    with _own_daemon(folder, environ):
        yield Docker(environ=environ, compose=_find_compose(environ), ends_with_us=True)


def install_packages() -> None:
    """Installs those of `PACKAGES` that are missing.

    Raises:
        NoDaemon: they cannot be had.
    """
    missing = [package for command, package in PACKAGES.items() if not shutil.which(command, path=_SYSTEM_PATH)]
    if not missing:
        return
    if not shutil.which("apt-get", path=_SYSTEM_PATH):
        raise NoDaemon(f"{', '.join(missing)} not installed, and there is no apt-get to do it")
    say(f"apt-get install {' '.join(missing)}")
    environ = {**os.environ, "PATH": _SYSTEM_PATH, "DEBIAN_FRONTEND": "noninteractive"}
    apt_get = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=120")
    try:
        run((*apt_get, "update"), environ=environ, timeout_s=_INSTALL_S)
        run((*apt_get, "install", "--yes", "--no-install-recommends", *missing), environ=environ, timeout_s=_INSTALL_S)
    except CommandFailed as error:
        raise NoDaemon(f"the packages {', '.join(missing)} cannot be installed: {error}") from None


def _answers(environ: Mapping[str, str]) -> bool:
    try:
        run(("docker", "version"), environ=environ, timeout_s=_ANSWER_S)
    except CommandFailed:
        return False
    return True


def _find_compose(environ: Mapping[str, str]) -> tuple[str, ...]:
    for command in (("docker", "compose"), ("docker-compose",)):
        try:
            run((*command, "version"), environ=environ, timeout_s=_ANSWER_S)
        except CommandFailed:
            continue
        return command
    raise NoDaemon("a Docker daemon answers, but there is neither `docker compose` nor `docker-compose`")


def _command(folder: Path) -> Sequence[str]:
    # In namespaces of its own: its bridges, firewall rules, mounts and processes end with the first process, and that
    # one ends with us, however we end.
    namespaces = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
    places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
    return (
        *("setpriv", "--pdeathsig", "KILL"),
        *namespaces,
        *("dockerd", "--host", f"unix://{folder}/docker.sock", "--log-level", "warn", "--storage-driver", "overlay2"),
        *("--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", f"/{folder.parent.name}"),
        *(f"--{option}={folder}/{place}" for option, place in places.items()),
    )


@contextmanager
def _own_daemon(folder: Path, environ: Mapping[str, str]) -> Iterator[None]:
    say("starting dockerd")
    log = folder / "dockerd.log"
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                _command(folder), env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise NoDaemon(f"dockerd cannot be started: {error}") from None
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(environ):
            if process.poll() is not None:
                raise NoDaemon(f"dockerd ended with exit code {process.returncode}\n{_end_of(log)}")
            if time.monotonic() > deadline:
                raise NoDaemon(f"dockerd does not answer after {_START_S:g} s\n{_end_of(log)}")
            time.sleep(0.2)
        yield
    finally:
        say("stopping dockerd")
        _stop(process)
        _remove_groups(folder.parent.name)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    # The process is unshare, which outlives the first process of its namespaces, dockerd; so does no other.
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for pid in children.read_text().split() if process.poll() is None else ():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _remove_groups(name: str) -> None:
    """Removes the control groups `name`, which are empty now, of every hierarchy."""
    root = Path("/sys/fs/cgroup")
    for group in (*root.glob(name), *root.glob(f"*/{name}")):
        for inner in sorted(group.glob("**/"), reverse=True):
            with suppress(OSError):
                inner.rmdir()


def _end_of(log: Path) -> str:
    return last_lines(log.read_text(errors="replace"), 15)
