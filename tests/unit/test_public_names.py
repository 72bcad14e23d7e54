import subprocess
import sys
from types import ModuleType

import pytest

import pserver
from pserver import autograd, optim


@pytest.mark.parametrize("name", pserver.__all__)
def test_every_public_name_resolves(name):
    value = getattr(pserver, name)
    if isinstance(value, ModuleType):
        assert value.__name__ == f"pserver.{name}"
    else:
        assert value.__name__ == name
        assert value.__doc__


@pytest.mark.parametrize("module", [autograd, optim])
def test_every_name_of_a_public_module_resolves(module):
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


def test_public_names_are_listed_once_and_in_order():
    assert pserver.__all__ == sorted(set(pserver.__all__))
    assert dir(pserver) == pserver.__all__


def test_every_name_with_a_home_is_public():
    assert set(pserver._HOMES) <= set(pserver.__all__)


def test_an_unknown_name_is_an_attribute_error_that_lists_the_public_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'conect'; public names: .*connect"):
        pserver.conect  # noqa: B018
    assert not hasattr(pserver, "client_")


def test_importing_everything_brings_every_public_name():
    namespace = {}
    exec("from pserver import *", namespace)
    assert set(pserver.__all__) <= set(namespace)


@pytest.mark.parametrize("heavy", ["torch", "numpy", "grpc"])
def test_importing_the_package_alone_loads_nothing_heavy(heavy):
    program = f"import pserver, sys; dir(pserver); pserver.__all__; sys.exit({heavy!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr or f"{heavy} was imported"
