"""The modules of a process before it forks: nothing of fserver_lib, which cannot be used after a fork. Inference
engines import plugins and connectors in their front end, and start their workers by fork."""

import importlib.util
import os
import socket
import subprocess
import sys

import harness

TORCH = "torch" in harness.libraries()
STANDINS = os.path.join(harness.HERE, "standins")


def entries():
    """The entry points of the installed package, as (module, function)."""
    path = os.path.join(harness.HERE, "..", "..", "tools", "python", "fserver_build.py")
    spec = importlib.util.spec_from_file_location("fserver_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [line.split("=")[1].strip() for line in module.ENTRIES.splitlines() if "=" in line]
    assert found, module.ENTRIES
    return [tuple(e.split(":")) for e in found]


# The imports of an engine's front end. Afterwards the names of the two packages must still resolve when they are used.
FRONT = """
import importlib, sys
import fserver, fserver.connectors
def plugin():
    for module, function in %(entries)r:
        getattr(importlib.import_module(module), function)()
plugin()
assert "torch" not in sys.modules, "importing fserver imports PyTorch"
dir(fserver), dir(fserver.connectors), fserver.__version__
if %(torch)r:
    sys.path.insert(0, %(standins)r)
    plugin()
    from afd_plugin.connectors import AFDConnectorFactory
    connector = AFDConnectorFactory.get_connector_class("StepMeshAFDConnector")
    connector.parse_extra_config({"timeout_ms": 5})
for module in %(modules)r:
    importlib.import_module(module)
assert "fserver_lib" not in sys.modules, "fserver_lib was imported before the fork"
"""


def front():
    modules = ["fserver.connectors.cluster", "fserver.connectors.layout"]
    if "numpy" in harness.libraries():
        modules.append("fserver.session")
    if TORCH:
        from torch import library

        modules += ["fserver.connectors.sglang", "fserver.connectors.vllm_afd"]
        if hasattr(library, "register_fake"):
            modules.append("fserver.ops")
    return FRONT % dict(standins=STANDINS, entries=entries(), modules=modules, torch=TORCH)


def run(tmp_path, code):
    program = tmp_path / "program.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_imports_load_nothing(tmp_path):
    """All that a front end may import, and afterwards every name of the packages."""
    names = """
import fserver_lib
for name in (*fserver.__all__, "ConnectionError", "TimeoutError", "TypeError", "ValueError"):
    assert getattr(fserver, name) is (fserver_lib if name == "f" else getattr(fserver_lib, name)), name
    assert name in dir(fserver), name
for package in fserver, fserver.connectors:
    try:
        package.nothing
    except AttributeError as e:
        assert repr(package.__name__) in str(e) and "'nothing'" in str(e), e
    else:
        raise AssertionError("%s.nothing" % package.__name__)
"""
    if TORCH:
        names += """
for name in fserver.connectors.__all__:
    assert callable(getattr(fserver.connectors, name)), name
"""
    run(tmp_path, front() + names)


def test_import_star(tmp_path):
    run(tmp_path, """
from fserver import *
assert f.init is init and issubclass(Error, RuntimeError)
assert TimeoutError.__module__ == "builtins"
""")


FORK = """
import os
port = %(port)d
pids = []
for role in "ffn", "attention":
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            from fserver.connectors import join, leave
            join(role, 0, attention=1, ffn=1, port=port, timeout_ms=60000)
            os.write(1, (role + " joined\\n").encode())  # one write: the lines of two processes do not mix
            leave()
            status = 0
        finally:
            os._exit(status)
    pids.append(pid)
for pid in pids:
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
"""


def test_engine_joins_after_fork(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = run(tmp_path, front() + FORK % dict(port=port))
    assert "ffn joined" in out and "attention joined" in out, out
