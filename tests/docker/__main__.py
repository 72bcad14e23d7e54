"""Builds the image and runs docker/compose.yaml to its end in real containers, without pulling any image.

Twice: as it is, with trainers that share memory with the servers, and with one that cannot and sends messages.

Uses the Docker daemon that answers, or starts one of its own (as root, with Debian's packages), and leaves nothing
behind but these packages.
"""

import argparse
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tests.docker.checking import CheckFailed, check
from tests.docker.cluster import SERVERS, TRAINERS, Composed
from tests.docker.commands import CommandFailed, run, say
from tests.docker.context import download_wheels, make_context
from tests.docker.daemon import Docker, NoDaemon, docker_daemon, install_packages
from tests.docker.image import build_host_traces, find_traces
from tests.docker.memory import (
    check_empty_after_down,
    check_empty_after_stop,
    check_fall_backs,
    check_in_use,
    check_killed_server,
    check_network,
    check_one_memory,
    check_size,
)

TRAINING_S = 600.0
BASE_IMAGE_S = 600.0
MIN_ACCURACY = 0.95
NUM_PARAMETERS = 105_866
#: Of nobody: neither root nor the user that the image names.
USER_ID = 54_321
#: Of the second run; not what the compose file has by itself.
SHM_BYTES = 64 * 2**20
#: Over the compose file, in the second run.
OWN_MEMORY = Path(__file__).with_name("own_memory.yaml")
#: In a file that is in the image for sure.
IN_THE_IMAGE = b"def accuracy_on("


def check_image(docker: Docker, image: str, planted: Mapping[str, bytes]) -> None:
    """Nothing in `image` tells where it was built, or is needed only to build."""
    texts = {**build_host_traces(), **planted, "control": IN_THE_IMAGE}
    found, unwanted = find_traces(docker, image, texts)
    control = {trace for trace in found if trace.startswith("control: ")}
    check(bool(control), "the search through the image finds what is there")
    check(found == control, "no host, credential or folder that pip is told here is in the image", found - control)
    check(not unwanted, "no pip settings, wheels, build tools or package lists are in the image", sorted(unwanted))


def check_servers(cluster: Composed) -> None:
    """Every server is healthy, runs as who it should, and shows up in the status of the cluster."""
    for server in SERVERS:
        health = cluster.state(server)["Health"]["Status"]
        check(health == "healthy", f"{server} is healthy", health)
    user = cluster.read("server-0", "id", "-u").strip()
    check(user == str(USER_ID), "containers run as the user they are told", user)


def check_training(cluster: Composed, *, apart: Set[str]) -> None:
    """Waits for the trainers, of which those in `apart` send messages, and checks that all of them have trained."""
    for trainer in TRAINERS:
        code = cluster.wait(trainer, timeout_s=TRAINING_S)
        check(code == 0, f"{trainer} ends with exit code 0", code)
    print(*cluster.logs(TRAINERS[0]), sep="\n", flush=True)
    check_servers(cluster)
    rounds = check_placement(cluster)
    check_fall_backs(cluster, apart)
    check_network(cluster, rounds * NUM_PARAMETERS * 4, num_apart=len(apart))


def check_placement(cluster: Composed) -> int:
    """The model was trained on every server, by gradients of every trainer; returns in how many rounds."""
    status = json.loads(cluster.read("coordinator", "pserver", "status", "coordinator:7077", "--json"))
    alive = {server["name"]: server["address"] for server in status["servers"] if server["alive"]}
    check(alive == {name: f"{name}:7077" for name in SERVERS}, "all servers are known by their names", alive)
    (model,) = status["models"]
    shards = {shard["server"]: shard["round"] for shard in model["shards"]}
    check(set(shards) == set(SERVERS), "the model lies on all servers", shards)
    check(set(shards.values()) == {model["round"]} != {0}, f"all shards are in round {model['round']}", shards)
    num_gradients = model["num_accepted"]
    check(num_gradients == len(TRAINERS) * model["round"], f"{num_gradients} gradients of both trainers", num_gradients)
    return int(model["round"])


def check_results(out: Path) -> bytes:
    """The trained model is on the host, and as good as `make demo` promises; returns its file."""
    from safetensors.torch import load_file

    summary = json.loads((out / "summary.json").read_text())
    accuracy = summary["accuracy"]
    check(accuracy > MIN_ACCURACY, f"held-out accuracy {100 * accuracy:.2f} %, more than {100 * MIN_ACCURACY:g} %")
    check(summary["world_size"] == len(TRAINERS), "both trainers took part", summary)
    model = out / "model.safetensors"
    state = load_file(model)
    number = sum(value.numel() for value in state.values())
    check(number == NUM_PARAMETERS, f"model.safetensors holds {NUM_PARAMETERS:,} parameters", number)
    check((out / "curves.png").stat().st_size > 0, "curves.png is there")
    return model.read_bytes()


def check_run(cluster: Composed, out: Path) -> bytes:
    """Trains to the end, kills a server in another training, and stops everything; returns the model's file."""
    say("up")
    with cluster.up():
        check_servers(cluster)
        check_one_memory(cluster)
        say("training")
        check_in_use(cluster)
        check_training(cluster, apart=frozenset())
        model = check_results(out)
        check_killed_server(cluster)
        check_empty_after_stop(cluster)
        for server in SERVERS:
            code = cluster.state(server)["ExitCode"]
            check(code == 0, f"{server} ends with exit code 0", code)
    check(not cluster.leftovers(), "no container, volume or network is left", cluster.leftovers())
    return model


def check_run_apart(cluster: Composed, out: Path, expected: bytes) -> None:
    """Trains, with one trainer apart as `OWN_MEMORY` has it, to the `expected` model, and kills everything."""
    say("up, and training with messages of one trainer")
    with cluster.up():
        check_size(cluster, SHM_BYTES)
        check_training(cluster, apart={TRAINERS[1]})
        same = check_results(out) == expected
        check(same, "the model is the same, to the bit, as that of trainers that share memory")
        check_empty_after_down(cluster)
    check(not cluster.leftovers(), "no container, volume or network is left", cluster.leftovers())


@contextmanager
def images(docker: Docker, *names: str) -> Iterator[None]:
    """Removes the images `names` in the end, those that are there, from a daemon that goes on."""
    try:
        yield
    finally:
        for name in () if docker.ends_with_us else names:
            with suppress(CommandFailed):
                docker.run("image", "rm", name)


def build_and_run(folder: Path, base_image: str | None) -> None:
    """Everything, with its files in `folder`; `base_image` None: one that is made here.

    Raises:
        NoDaemon, CommandFailed, CheckFailed
    """
    token = secrets.token_hex(4)
    project, image = f"pserver-test-{token}", f"pserver-test:{token}"
    context, together, apart = folder / "context", folder / "together", folder / "apart"
    make_context(context)
    (folder / "daemon").mkdir()
    with docker_daemon(folder / "daemon") as docker:
        say(f"docker {docker.run('version', '--format', '{{.Server.Version}}').strip()}, {' '.join(docker.compose)}")
        base = base_image or f"pserver-test-base:{token}"
        with images(docker, image, *(() if base_image else (base,))):
            if base_image is None:
                make_base_image(docker, base)
            say("downloading wheels")
            say(f"{download_wheels(context)} wheels")
            for out in (together, apart):
                out.mkdir()
                if os.geteuid() == 0:
                    os.chown(out, USER_ID, USER_ID)
                else:
                    out.chmod(0o777)
            environ = {
                **docker.environ,
                "COMPOSE_PROJECT_NAME": project,
                "BASE_IMAGE": base,
                "PSERVER_IMAGE": image,
                "PSERVER_OUT": str(together),
                "PSERVER_USER": f"{USER_ID}:{USER_ID}",
            }
            cluster = Composed(docker=docker, files=(context / "docker" / "compose.yaml",), environ=environ)
            say("building the image")
            host, secret = f"{token}.invalid", secrets.token_hex(8)
            cluster.build({"PIP_INDEX_URL": f"https://somebody:{secret}@{host}/simple"})
            check_image(docker, image, {"planted host": host.encode(), "planted secret": secret.encode()})
            model = check_run(cluster, together)
            other = {"PSERVER_OUT": str(apart), "PSERVER_SHM_SIZE": str(SHM_BYTES)}
            cluster = replace(cluster, files=(*cluster.files, OWN_MEMORY), environ={**environ, **other})
            check_run_apart(cluster, apart, model)


def make_base_image(docker: Docker, name: str) -> None:
    """Makes the base image `name` from Debian's packages.

    Raises:
        NoDaemon: this needs root.
    """
    if os.geteuid() != 0:
        raise NoDaemon("a daemon answers, but only root can make the base image; name one that is there: --base-image")
    install_packages()
    say("making the base image")
    script = Path(__file__).parents[2] / "docker" / "make-base-image.sh"
    run((script, name), environ=docker.environ, timeout_s=BASE_IMAGE_S)


def main() -> int:
    """Runs the test; 0: passed, or with --where-possible not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.docker", description=__doc__)
    parser.add_argument("--base-image", metavar="NAME", help="build on this image instead of making one")
    parser.add_argument("--where-possible", action="store_true", help="without a Docker daemon say so, and exit with 0")
    arguments = parser.parse_args()
    # So that an end by SIGTERM, too, takes everything down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        # On a disk, since /tmp may be memory; and near the root, since the path of a socket must be short.
        with tempfile.TemporaryDirectory(prefix="pserver-docker-", dir="/var/tmp") as folder:
            build_and_run(Path(folder), arguments.base_image)
    except NoDaemon as error:
        print(f"not run: {error}", flush=True)
        return 0 if arguments.where_possible else 1
    except (CheckFailed, CommandFailed) as error:
        say(f"FAILED: {error}")
        return 1
    say("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
