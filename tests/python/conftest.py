"""Fixtures: clusters, and the installed array libraries."""

import importlib.util
import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness  # noqa: E402

pytest_plugins = ["limits"]


def pytest_addoption(parser):
    parser.addoption("--each-library", action="store_true", help="of files with tests for each array library, only these tests")
    parser.addoption("--short", action="store_true", help="leave out the tests that are marked long, and all array libraries but the first")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--short"):
        first = harness.libraries()[0]
        out = [i for i in items if i.get_closest_marker("long") or hasattr(i, "callspec") and i.callspec.params.get("lib", first) != first]
        deselect(config, items, out)
    if config.getoption("--each-library"):
        each = {i for i in items if "lib" in getattr(i, "fixturenames", ())}
        files = {i.path for i in each}
        deselect(config, items, [i for i in items if i.path in files and i not in each])


def deselect(config, items, out):
    config.hook.pytest_deselected(items=out)
    items[:] = [i for i in items if i not in out]


def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes more than 10 s of a processor, or repeats a shorter test; make test leaves it out, make test-long runs it")
    if importlib.util.find_spec("fserver_lib") is None:
        pytest.exit("no fserver_lib for this Python: 'make fserver', or 'pip3 install -e .'", 2)
    if not harness.libraries():
        pytest.exit("this Python has none of torch, jax, numpy", 2)


@pytest.fixture
def cluster(request):
    """Makes clusters that end with the test."""
    made = []

    def make(**options):
        options.setdefault("lib", harness.libraries()[0])
        c = harness.Cluster(request.module.__name__, **options)
        made.append(c)
        return c

    yield make
    for c in made:
        c.end()


@pytest.fixture(params=harness.libraries())
def lib(request):
    """The name of each installed array library."""
    return request.param
