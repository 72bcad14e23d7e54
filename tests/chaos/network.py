"""A network of its own for each server, so that one can be cut off from all others without a word."""

import os
import shutil
import subprocess
from collections.abc import Sequence


def why_not() -> str:
    """Why this machine cannot part processes; empty if it can."""
    if os.geteuid() != 0:
        return "partitions need root, for network namespaces"
    for program in ("ip", "iptables"):
        if shutil.which(program) is None:
            return f"partitions need {program}, which is not installed"
    name = f"pschaos{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "netns", "exec", name, "iptables", "-I", "INPUT", "-i", "lo", "-j", "ACCEPT")
        finally:
            _run("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"partitions need network namespaces and iptables, but: {error.stderr.strip()}"
    return ""


class Networks:
    """Network namespaces on one bridge. `close` removes them.

    Args:
        names: one for each.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"pc{os.getpid()}"
        # From the block for tests of network devices (RFC 2544), another part for each process; the machine is at .1.
        self._prefix = f"198.{18 + os.getpid() // 256 % 2}.{os.getpid() % 256}"
        self._numbers = {name: number for number, name in enumerate(names, start=2)}

    def start(self) -> None:
        _run("ip", "link", "add", self._tag, "type", "bridge")
        _run("ip", "address", "add", f"{self._prefix}.1/24", "dev", self._tag)
        _run("ip", "link", "set", self._tag, "up")
        for name, number in self._numbers.items():
            space, outer = self.space(name), f"{self._tag}v{number}"
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", outer, "master", self._tag, "up")
            for command in (("address", "add", f"{self.host(name)}/24", "dev", "eth0"), ("link", "set", "lo", "up")):
                _run("ip", "-n", space, *command)
            _run("ip", "-n", space, "link", "set", "eth0", "up")

    def host(self, name: str) -> str:
        """Its address."""
        return f"{self._prefix}.{self._numbers[name]}"

    def space(self, name: str) -> str:
        """The name of its namespace."""
        return f"pschaos-{os.getpid()}-{name}"

    def cut(self, name: str) -> None:
        """From now on nothing comes in or goes out, and nobody is told."""
        self._rules(name, "-I")

    def heal(self, name: str) -> None:
        self._rules(name, "-D")

    def close(self) -> None:
        for name, number in self._numbers.items():
            subprocess.run(("ip", "link", "del", f"{self._tag}v{number}"), capture_output=True)
            subprocess.run(("ip", "netns", "del", self.space(name)), capture_output=True)
        subprocess.run(("ip", "link", "del", self._tag), capture_output=True)

    def _rules(self, name: str, action: str) -> None:
        for chain, direction in (("INPUT", "-i"), ("OUTPUT", "-o")):
            _run("ip", "netns", "exec", self.space(name), "iptables", action, chain, direction, "eth0", "-j", "DROP")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
