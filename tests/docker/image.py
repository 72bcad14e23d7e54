"""Looks through every layer of an image for what the machine that built it must not leave there."""

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from typing import IO
from urllib.parse import urlsplit

from pip._internal.models.index import PyPI

from tests.docker.commands import run
from tests.docker.daemon import Docker

#: The public registry, as pip knows it: packages name it in their own documentation, wherever they were installed from.
_NAMED_BY_PACKAGES = {PyPI.netloc, PyPI.file_storage_domain}
#: Certificates of the system, in the image as well.
_PLACES_EVERYWHERE = ("/etc/ssl/",)
#: Settings and leftovers of package managers, and what is needed only to build.
_UNWANTED = re.compile(
    r"(^|/)(pip\.conf|\.netrc|\.pypirc|\.git|\.venv)$"
    r"|^(?!usr/share/python-wheels/).*\.whl$"
    r"|^build/"
    r"|^var/lib/apt/lists/.+_|\.deb$"
    r"|^opt/venv/bin/pip"
    r"|(^|/)bin/(gcc|cc|g\+\+|c\+\+|ld|make|git)$"
)
_MAGIC_START, _MAGIC = 257, b"ustar"
_SAVE_S = 60.0


def build_host_traces() -> Mapping[str, bytes]:
    """What pip is told on this machine (hosts, credentials, folders) by files and environment; by setting."""
    traces: dict[str, bytes] = {}
    listing = run((sys.executable, "-m", "pip", "config", "list"), timeout_s=60.0)
    for line in listing.splitlines():
        setting, _, literal = line.partition("=")
        texts = (text for word in str(ast.literal_eval(literal)).split() for text in _traces_in(word))
        traces |= {f"{setting} ({number})": text for number, text in enumerate(texts, start=1)}
    return traces


def _traces_in(word: str) -> Iterator[bytes]:
    url = urlsplit(word)
    if url.scheme and url.netloc:
        if url.hostname and url.hostname not in _NAMED_BY_PACKAGES:
            yield url.hostname.encode()
        yield from (part.encode() for part in (url.username, url.password) if part and len(part) > 3)
    elif (url.scheme == "file" or word.startswith("/")) and not url.path.startswith(_PLACES_EVERYWHERE):
        yield url.path.encode()


def find_traces(docker: Docker, image: str, texts: Mapping[str, bytes]) -> tuple[set[str], set[str]]:
    """Looks for `texts` in all of `image`: its configuration, its history, and every file of every layer.

    Returns:
        What was found, as "name of the text: file", and the unwanted files by name.
    """
    found: set[str] = set()
    unwanted: set[str] = set()
    with subprocess.Popen(
        ("docker", "save", image), env=docker.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for path, file in _files(archive):
                data = file.read()
                found |= {f"{name}: {path}" for name, text in texts.items() if text in data}
                if _UNWANTED.search(path) or (path.startswith("etc/apt/sources.list") and data.strip()):
                    unwanted.add(path)
        process.wait(_SAVE_S)
    if process.returncode:
        raise RuntimeError(f"docker save {image}: exit code {process.returncode}")
    return found, unwanted


def _files(archive: tarfile.TarFile) -> Iterator[tuple[str, IO[bytes]]]:
    """The files in `archive`; those in a file that is an archive itself (a layer) instead of that file."""
    for member in archive:
        file = archive.extractfile(member) if member.isfile() else None
        if not isinstance(file, io.BufferedReader):
            continue
        if not file.peek(_MAGIC_START + len(_MAGIC))[_MAGIC_START:].startswith(_MAGIC):
            yield member.name, file
            continue
        with tarfile.open(fileobj=file, mode="r|") as layer:
            for inner in layer:
                content = layer.extractfile(inner) if inner.isfile() else None
                if content is not None:
                    yield inner.name.removeprefix("./"), content
