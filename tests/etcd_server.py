"""A real etcd for tests: the one that is installed, or Debian's, unpacked beside the code and never installed."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.docker.commands import CommandFailed, last_lines, run

PACKAGE = "etcd-server"

_CACHE = Path(__file__).parents[1] / "build" / "etcd"
_DOWNLOAD_S = 120.0
_START_S = 20.0
_STOP_S = 10.0


class NoEtcd(Exception):
    """No etcd can be had here; the message says why."""


def find_etcd() -> Path:
    """The program.

    Raises:
        NoEtcd: it is neither installed nor can it be downloaded.
    """
    if found := shutil.which("etcd"):
        return Path(found)
    unpacked = _CACHE / "usr" / "bin" / "etcd"
    if not unpacked.exists():
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            raise NoEtcd("etcd is not installed, and there is no apt-get to fetch it")
        try:
            _unpack()
        except CommandFailed as error:
            raise NoEtcd(f"etcd is not installed, and the package {PACKAGE} cannot be fetched: {error}") from None
    return unpacked


def _unpack() -> None:
    _CACHE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE.parent) as name:
        folder = Path(name)
        # apt downloads as a user of its own, who may write nowhere else.
        folder.chmod(0o755)
        download = ("apt-get", "-q", "download", PACKAGE)
        try:
            run(download, cwd=folder, timeout_s=_DOWNLOAD_S)
        except CommandFailed:
            # A fresh machine has no list of packages, or an old one; only root may fetch it.
            run(("apt-get", "-q", "update"), timeout_s=_DOWNLOAD_S)
            run(download, cwd=folder, timeout_s=_DOWNLOAD_S)
        (package,) = folder.glob("*.deb")
        run(("dpkg", "-x", package, folder / "etcd"), timeout_s=_DOWNLOAD_S)
        if not _CACHE.exists():
            (folder / "etcd").rename(_CACHE)


class EtcdServer:
    """A cluster of one etcd on 127.0.0.1; it keeps its port and its data when it is started again.

    Its elections are quick, so that a lease may be as short as one second.
    """

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it and waits until it answers."""
        url = f"http://{self.endpoint}"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(str(self._program), "--data-dir", str(self._folder / "etcd")),
                    *("--listen-client-urls", url, "--advertise-client-urls", url),
                    *("--listen-peer-urls", "http://127.0.0.1:0"),
                    *("--heartbeat-interval", "20", "--election-timeout", "200"),
                ],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        give_up = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, f"etcd ended with {self._process.returncode}\n{self._log()}"
            assert time.monotonic() < give_up, f"etcd does not answer after {_START_S:g} s\n{self._log()}"
            time.sleep(0.02)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends it, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)
            # A paused process hears nothing else before it goes on.
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def kill(self) -> None:
        """Ends it without warning."""
        self.stop(signal.SIGKILL)

    def pause(self) -> None:
        """It keeps its connections, and answers nothing until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{self.endpoint}/health", timeout=1.0) as reply:
                return b"true" in reply.read()
        except (urllib.error.URLError, OSError):
            return False

    def _log(self) -> str:
        return last_lines((self._folder / "etcd.log").read_text(errors="replace"))
