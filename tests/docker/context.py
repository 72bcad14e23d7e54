"""The build context: what the image is made from, and the wheels that spare the build a registry."""

import shutil
import sys
import tomllib
from pathlib import Path

from tests.docker.commands import run

ROOT = Path(__file__).parents[2]

_FILES = (".dockerignore", "README.md", "constraints.txt", "pyproject.toml")
_FOLDERS = ("docker", "pserver", "workers")
#: Python of the base image.
_PYTHON_VERSION = "3.11"
_DOWNLOAD_S = 600.0


def make_context(folder: Path) -> None:
    """Makes `folder` and copies into it what the compose file needs: no caches, no wheels and no results."""
    folder.mkdir()
    for name in _FILES:
        shutil.copy(ROOT / name, folder)
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.whl", "out"))


def download_wheels(context: Path) -> int:
    """Puts the wheels of all that the image needs into `context`, with pip as it is set up here; returns their number.

    Raises:
        CommandFailed: there is something of which pip finds no wheel.
    """
    data = tomllib.loads((context / "pyproject.toml").read_text())
    project = data["project"]
    wheels = context / "docker" / "wheels"
    command = (
        *(sys.executable, "-m", "pip", "download", "--quiet", "--dest", wheels),
        *("--only-binary", ":all:", "--python-version", _PYTHON_VERSION, "--constraint", context / "constraints.txt"),
        *(*data["build-system"]["requires"], *project["dependencies"], *project["optional-dependencies"]["examples"]),
    )
    run(command, timeout_s=_DOWNLOAD_S)
    return len(list(wheels.glob("*.whl")))
