"""The containers' shared memory: who has which segment of it, what is left there, and what took the network instead."""

import re
import secrets
from collections.abc import Set
from pathlib import Path

from tests.docker.checking import check, check_soon
from tests.docker.cluster import SERVERS, TRAINERS, Composed
from tests.docker.commands import say

DIRECTORY = "/dev/shm"

_FIRST_STEP_S = 300.0
_FAILURE_S = 120.0
_HEALTHY_S = 120.0
#: Of a listing: inode and name. A segment has no name while its pages are taken, so its owner's maps show none.
_NAMED = re.compile(r"^ *(\d+) (pserver-\w+)$", re.MULTILINE)
_MAPPED = re.compile(rf"^\S+ \S+ \S+ \S+ (\d+) +{DIRECTORY}/", re.MULTILINE)
#: What a trainer says of a server on its machine whose memory it cannot use.
_FALLS_BACK = re.compile(r"INFO pserver\S*: model mnist: .*reached by messages, not shared memory: (.+)")


def segments(cluster: Composed, service: str) -> set[str]:
    """Names of the segments that the container of `service` sees."""
    return {name for _, name in _NAMED.findall(cluster.read(service, "ls", "-i", DIRECTORY))}


def segments_of(cluster: Composed, service: str) -> set[str]:
    """Names of those that processes in the container of `service` have mapped: a server's are its own."""
    looks = f"ls -i {DIRECTORY}; cat /proc/[0-9]*/maps 2>/dev/null || :"
    seen = cluster.read(service, "sh", "-c", looks)
    mapped = set(_MAPPED.findall(seen))
    return {name for inode, name in _NAMED.findall(seen) if inode in mapped}


def falls_back(cluster: Composed, trainer: str) -> list[str]:
    """Why servers are reached by messages, as the trainer has logged it; one reason a server."""
    return [found[1] for line in cluster.logs(trainer) if (found := _FALLS_BACK.search(line))]


def received_bytes(cluster: Composed) -> int:
    """What has come to all servers over the network."""
    total = 0
    for server in SERVERS:
        for line in cluster.read(server, "cat", "/proc/net/dev").splitlines():
            interface, _, figures = line.partition(":")
            if figures and interface.strip() != "lo":
                total += int(figures.split()[0])
    return total


def check_one_memory(cluster: Composed) -> None:
    """A trainer and the servers have one /dev/shm, and it is the cluster's own."""
    path, text = f"{DIRECTORY}/pserver-test", secrets.token_hex(8)
    cluster.compose("run", "--rm", "--no-deps", "-T", "trainer-1", "sh", "-c", f"echo {text} >{path}")
    for server in SERVERS:
        seen = cluster.read(server, "cat", path).strip()
        check(seen == text, f"{server} reads in {DIRECTORY} what a trainer wrote there", seen)
    cluster.read("coordinator", "rm", path)
    check(not Path(path).exists(), f"the host's {DIRECTORY} is another one")


def check_size(cluster: Composed, num_bytes: int) -> None:
    """The shared memory is as large as Compose was told."""
    blocks, block_bytes = cluster.read("coordinator", "stat", "--file-system", "--format", "%b %S", DIRECTORY).split()
    size = int(blocks) * int(block_bytes)
    check(size == num_bytes, f"{DIRECTORY} has {num_bytes} bytes, as it was told", size)


def check_in_use(cluster: Composed) -> None:
    """Every trainer has mapped the values of every server, and a mailbox of its own on each."""
    of_trainers = {trainer: _mapped_by_trainer(cluster, trainer) for trainer in TRAINERS}
    for server in SERVERS:
        names = segments_of(cluster, server)
        by_trainer = {trainer: mapped & names for trainer, mapped in of_trainers.items()}
        values = set.intersection(*by_trainer.values())
        mailboxes = [mapped - values for mapped in by_trainer.values()]
        # And one with a nonce.
        check(
            len(names) == 2 + len(TRAINERS) and len(values) == 1 and all(len(each) == 1 for each in mailboxes),
            f"trainers read and write the memory of {server}: its values, and a mailbox for each",
            (names, by_trainer),
        )


def _mapped_by_trainer(cluster: Composed, trainer: str) -> set[str]:
    expected = 2 * len(SERVERS)
    return check_soon(
        lambda: segments_of(cluster, trainer),
        lambda found: len(found) == expected,
        f"{trainer} has mapped {expected} segments",
        timeout_s=_FIRST_STEP_S,
    )


def check_fall_backs(cluster: Composed, apart: Set[str]) -> None:
    """Of each server, the trainers `apart` have said once why it is reached by messages; the others have not."""
    for trainer in TRAINERS:
        reasons = falls_back(cluster, trainer)
        if trainer not in apart:
            check(not reasons, f"{trainer} has nothing to say about messages", reasons)
            continue
        missing = [reason for reason in reasons if reason.endswith("cannot be opened: No such file or directory")]
        check(
            len(missing) == len(reasons) == len(SERVERS),
            f"{trainer} says once for each server why it sends messages: {reasons[0] if reasons else None}",
            reasons,
        )


def check_network(cluster: Composed, gradients_bytes: int, *, num_apart: int) -> None:
    """What `num_apart` trainers pushed went over the network, and nothing of the others.

    Args:
        gradients_bytes: of everything that one trainer pushed.
    """
    received = received_bytes(cluster)
    least, most = num_apart * gradients_bytes, (num_apart + 0.1) * gradients_bytes
    check(
        least <= received < most,
        f"{received / 1e6:.1f} MB came to the servers over the network, where each trainer's gradients have "
        f"{gradients_bytes / 1e6:.1f} MB, and {num_apart} of {len(TRAINERS)} trainers send messages",
    )


def check_killed_server(cluster: Composed) -> None:
    """What a server leaves when it is killed in a training goes once it is back, and nothing that others still use."""
    victim = SERVERS[1]
    say(f"training again, and killing {victim}")
    cluster.compose("start", *TRAINERS)
    check_in_use(cluster)
    dead = segments_of(cluster, victim)
    cluster.compose("kill", victim)
    there = segments(cluster, "coordinator")
    check(dead <= there, f"{len(dead)} segments of {victim} outlive it", there)
    for trainer in TRAINERS:
        code = cluster.wait(trainer, timeout_s=_FAILURE_S)
        said = [line for line in cluster.logs(trainer) if victim in line]
        check(code == 1 and bool(said), f"{trainer} fails and names {victim}", code)
    cluster.compose("start", victim)
    check_soon(
        lambda: cluster.state(victim)["Health"]["Status"],
        lambda health: health == "healthy",
        f"{victim} is back",
        timeout_s=_HEALTHY_S,
    )
    swept = [line for line in cluster.logs(victim) if "segments of shared memory" in line]
    # Those of living servers have a lock that the kernel keeps across containers, whatever their namespaces.
    told = f"removed {len(dead)} segments of shared memory whose servers have ended"
    check(len(swept) == 1 and told in swept[0], f"{victim} has {told}", swept)
    there = segments(cluster, "coordinator")
    check(not dead & there, "they are gone for the other servers as well", there)
    for server in (each for each in SERVERS if each != victim):
        check(bool(segments_of(cluster, server)), f"{server} keeps what it uses")


def check_empty_after_stop(cluster: Composed) -> None:
    """Stops all services; servers that stop in order leave nothing, as a container that goes on sees it."""
    watcher = cluster.compose("run", "-d", "--no-deps", TRAINERS[0], "sleep", "600").split()[-1]
    before = cluster.docker.run("exec", watcher, "ls", "-A", DIRECTORY).split()
    check(bool(before), f"{len(before)} segments are there before the servers stop")
    cluster.compose("stop")
    after = cluster.docker.run("exec", watcher, "ls", "-A", DIRECTORY).split()
    check(not after, "servers that stop leave nothing in the shared memory", after)
    cluster.docker.run("rm", "--force", watcher)


def check_empty_after_down(cluster: Composed) -> None:
    """Kills all containers and takes them down, but not the volume; nothing is left in it."""
    cluster.compose("kill")
    cluster.compose("down")
    volumes = cluster.docker.run("volume", "ls", "-q", "--filter", cluster.label).split()
    check(len(volumes) == 1, "the volume is still there", volumes)
    left = cluster.compose("run", "--rm", "--no-deps", "-T", TRAINERS[0], "ls", "-A", DIRECTORY).split()
    check(not left, "there is nothing in it", left)
