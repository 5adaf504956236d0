"""The limit of each test."""

import os
import subprocess
import sys

import harness

HANG = """
import subprocess, threading
import pytest

def test_hangs():
    threading.Event().wait()

def test_child_hangs():
    subprocess.run(["sleep", "100"])

def test_works():
    pass

@pytest.fixture
def ends():
    yield
    threading.Event().wait()

def test_end_hangs(ends):
    pass
"""


def test_hang(tmp_path):
    """A test that hangs fails with the place where it waits, and the tests after it run."""
    (tmp_path / "test_it.py").write_text(HANG)
    env = dict(os.environ, PYTEST_STILL="1", PYTHONPATH=harness.HERE)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "limits", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)],
                          env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 1, done.stdout
    for want in ("threading.Event().wait()", 'subprocess.run(["sleep", "100"])', "limits.Late: it has waited in one place for ", " sleep S': 1}", "2 failed, 2 passed, 1 error"):
        assert want in done.stdout, done.stdout
