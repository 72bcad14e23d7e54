"""Reads every module's imports, and holds the package to its layers."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pserver"

#: From the bottom up. A module imports from its own package, or from layers below, never beside or above.
LAYERS = (
    ("errors", "types", "config", "clock"),
    ("wire",),
    ("core",),
    ("transport",),
    ("remote",),
    ("server", "client"),
    ("autograd", "compress", "optim", "rpc"),
    ("",),
    ("cli", "testing"),
)
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
#: Modules of the lowest layer are single files and may use each other.
LOWEST = LAYERS[0]

GRPC = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "grpc_tools")
ETCD = ("etcd3gw",)
MESSAGES = ("pserver.transport.gen", "google.protobuf.message.Message")
WAITING = (
    "asyncio",
    "concurrent",
    "datetime",
    "multiprocessing",
    "queue",
    "sched",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
)
PICKLES = ("_pickle", "cloudpickle", "dill", "marshal", "pickle", "shelve")


def is_under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def part_of(module: str) -> str:
    """pserver.wire.layout -> wire; the package itself is the part with the empty name."""
    return module.partition(".")[2].partition(".")[0]


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, anywhere in the file; `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            yield from ((node.lineno, f"{dots}{node.module or ''}.{alias.name}") for alias in node.names)


def import_problem(module: str, name: str) -> str | None:
    """What is wrong with `module` importing `name`, if anything."""
    part = part_of(module)
    if name.startswith("."):
        return "imports are written in full"
    if is_under(name, PICKLES):
        return "nothing is ever pickled"
    if is_under(name, GRPC) and part != "transport":
        return "only transport imports grpc"
    if is_under(name, ETCD) and module != "pserver.server.coordination.etcd_store":
        return "only the store in etcd imports its client"
    uses_messages = part in ("server", "client") and is_under(name, MESSAGES)
    if is_under(name, ("google", "pserver.transport.gen")) and part != "transport" and not uses_messages:
        return "only transport knows protobuf; server and client use its messages"
    if is_under(name, WAITING) and part == "core":
        return "core neither waits nor tells the time"
    if is_under(name, ("pserver",)):
        return layer_problem(part, name)
    return None


def layer_problem(part: str, name: str) -> str | None:
    imported = part_of(name)
    if imported not in RANKS:  # `from pserver import connect`
        imported = ""
    if part == imported or (part in LOWEST and imported in LOWEST):
        return None
    return None if RANKS[part] > RANKS[imported] else f"{part or 'the package'} is not above {imported or 'it'}"


def environment_uses(tree: ast.AST) -> Iterator[tuple[int, bool]]:
    """Line of every use of the environment, and whether it is passed on unread: {**os.environ}."""
    unread = {
        id(value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if key is None
    }
    names = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                yield node.lineno, id(node) in unread
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from ((node.lineno, False) for alias in node.names if alias.name in (*names, "*"))


def problems(module: str, source: str) -> list[str]:
    """Every rule that a module breaks, as line: what."""
    tree = ast.parse(source)
    found = [
        f"{line}: {name}: {problem}"
        for line, name in imports_of(tree)
        if (problem := import_problem(module, name)) is not None
    ]
    for line, unread in environment_uses(tree):
        if module != "pserver.config" and not (module == "pserver.cli.launch" and unread):
            found.append(f"{line}: os.environ: only config reads the environment")
    return found


def modules() -> dict[str, Path]:
    """Every module of the package that people write."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not is_under(name, ("pserver.transport.gen",)):
            found[name] = path
    return found


MODULES = modules()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module):
    assert problems(module, MODULES[module].read_text()) == []


def test_every_module_has_a_layer():
    assert {part_of(module) for module in MODULES} <= set(RANKS)
    assert {"wire", "core", "transport", "server", "client", "cli", "testing"} <= {part_of(each) for each in MODULES}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pserver.core.shard", "import pserver.transport.convert"),
        ("pserver.core.shard", "from pserver.server import node"),
        ("pserver.wire.values", "from pserver.core.shard import Shard"),
        ("pserver.errors", "def f():\n    from pserver.wire import layout"),
        ("pserver.server.node", "from pserver.client.model import SharedModel"),
        ("pserver.client.model", "from pserver.server.node import ServerNode"),
        ("pserver.client.model", "import pserver"),
        ("pserver.client.model", "from pserver import connect"),
        ("pserver.cli.main", "from pserver.testing import local_cluster"),
        ("pserver.core.shard", "if TYPE_CHECKING:\n    from pserver.server.node import ServerNode"),
        ("pserver.core.shard", "from . import rounds"),
        ("pserver.server.node", "import grpc.aio"),
        ("pserver.cli.main", "from grpc import aio"),
        ("pserver.server.node", "from grpc_health.v1 import health"),
        ("pserver.core.shard", "from pserver.transport.gen import types_pb2"),
        ("pserver.cli.main", "from pserver.transport.gen import types_pb2"),
        ("pserver.core.shard", "from google.protobuf.message import Message"),
        ("pserver.client.model", "from google.protobuf import descriptor_pb2"),
        ("pserver.server.node", "import etcd3gw"),
        ("pserver.core.shard", "import threading"),
        ("pserver.core.shard", "from time import monotonic"),
        ("pserver.core.shard", "import os, socket"),
        ("pserver.core.shard", "from concurrent.futures import ThreadPoolExecutor"),
        ("pserver.core.shard", "from asyncio import Lock"),
        ("pserver.wire.values", "import pickle"),
        ("pserver.client.model", "import os\nos.environ['PSERVER_RANK']"),
        ("pserver.client.model", "from os import getenv"),
        ("pserver.cli.launch", "import os\nos.environ.get('PATH')"),
        ("pserver.cli.main", "import os\nchild = {**os.environ}"),
    ],
)
def test_a_module_that_breaks_a_rule_is_found(module, source):
    assert len(problems(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "pserver.core.shard",
            "from pserver.core.rounds import RoundBook\nfrom pserver.wire import layout\nimport torch",
        ),
        ("pserver.config", "import os\nfrom pserver.errors import ConfigError\nos.environ"),
        ("pserver.transport.status", "import grpc\nfrom google.protobuf import any_pb2\nimport time"),
        ("pserver.client.model", "from pserver.transport.gen import shards_pb2\nimport threading"),
        ("pserver.client.model", "from google.protobuf.message import Message"),
        ("pserver.optim", "from pserver.client.optimizers import RemoteOptimizer"),
        ("pserver.cli.main", "import pserver\nfrom pserver.server.process import run_server"),
        ("pserver.cli.launch", "import os\nchild = {**os.environ, 'PSERVER_RANK': '0'}"),
    ],
)
def test_a_module_that_keeps_the_rules_is_left_alone(module, source):
    assert problems(module, source) == []
