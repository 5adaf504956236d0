"""Building, packing, installing, and the stub for editors."""

import ast
import base64
import hashlib
import importlib.util
import inspect
import os
import pydoc
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import fserver_lib
import pytest
from harness import within

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tools" / "python" / "fserver_build.py"


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The build backend, with a bin/python of its own."""
    spec = importlib.util.spec_from_file_location("fserver_build", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HOME", tmp_path / "bin")
    monkeypatch.setattr(module, "LIBRARY", tmp_path / "bin" / "fserver_lib.abi3.so")
    return module


def without_tools(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def pretend_built(backend):
    backend.HOME.mkdir()
    shutil.copy(fserver_lib.__file__, backend.LIBRARY)


def test_says_what_is_missing(backend, monkeypatch, tmp_path):
    without_tools(monkeypatch, tmp_path)
    with pytest.raises(backend.BuildError) as e:
        backend.build()
    for word in ("Go", "gcc", "pkg-config", "tools/install_deps.sh"):
        assert word in str(e.value)


def test_takes_the_library_that_is_there(backend, monkeypatch, tmp_path, capsys):
    pretend_built(backend)
    without_tools(monkeypatch, tmp_path)
    backend.build()
    assert "as it is" in capsys.readouterr().err
    assert (backend.HOME / "fserver" / "__init__.py").exists()


def test_headers_too_old(backend, tmp_path):
    (tmp_path / "Python.h").touch()
    for version, good in (((3, 7), False), ((3, 8), True), ((3, 14), True), ((2, 7), False)):
        (tmp_path / "patchlevel.h").write_text("#define PY_MAJOR_VERSION\t%d\n#define PY_MINOR_VERSION\t%d\n" % version)
        assert backend.new_enough(tmp_path) == good, version
    assert not backend.new_enough(tmp_path / "none")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_wheel(backend, monkeypatch, tmp_path, kind):
    pretend_built(backend)
    without_tools(monkeypatch, tmp_path)
    name = getattr(backend, "build_" + kind)(tmp_path)
    with zipfile.ZipFile(tmp_path / name) as wheel:
        files = {n: wheel.read(n) for n in wheel.namelist()}
    info = "fserver-%s.dist-info/" % backend.version()
    listed = {}
    for line in files[info + "RECORD"].decode().splitlines():
        file, digest, size = line.rsplit(",", 2)
        listed[file] = (digest, size)
    assert set(listed) == set(files)
    for file, data in files.items():
        want = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert listed[file] == (("", "") if file.endswith("RECORD") else (want, str(len(data))))
    assert b"\nName: FServer\n" in files[info + "METADATA"]
    assert name.endswith(backend.TAG + ".whl") and ("Tag: %s\n" % backend.TAG).encode() in files[info + "WHEEL"]
    content = {n for n in files if not n.startswith(info)}
    if kind == "wheel":
        connectors = {f"fserver/connectors/{n}.py" for n in ("__init__", "channels", "cluster", "layout", "pair", "sglang", "vllm_afd", "vllm_plugin")}
        assert content == connectors | {"fserver_lib.abi3.so", "fserver/__init__.py", "fserver/ops.py", "fserver/py.typed", "fserver/session.py", "fserver_lib-stubs/__init__.pyi"}
    else:
        assert {n: files[n].decode() for n in content} == {"__editable__fserver.pth": str(backend.HOME) + "\n"}


@pytest.mark.long
@pytest.mark.still(180)  # pip reads many files, and waits for other builds
def test_pip_install_offline(tmp_path):
    """pip3 install -v -e . as a user types it, with pip's build isolation, and no network if we may."""
    # Our own Python may live in an environment, whose pip would be a copy of its pip.
    made = subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    offline = ["unshare", "-n"] if os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0 else []
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(
        offline + [str(tmp_path / "env" / "bin" / "pip3"), "install", "--no-index", "-v", "-e", "."],
        cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        [str(tmp_path / "env" / "bin" / "python"), "-c", "import fserver, fserver_lib; print(fserver.f is fserver_lib, fserver_lib.__file__)"],
        cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.stdout == "True %s\n" % (ROOT / "bin" / "python" / "fserver_lib.abi3.so"), done.stderr


# The stub, for editors

def stub():
    return ast.parse((ROOT / "fserver" / "stubs" / "__init__.pyi").read_text())


def parameters(function, skip=0):
    """{name: (kind, default)} of a function of the stub; those of names with __ have no name."""
    a = function.args
    given = [None] * (len(a.args) - len(a.defaults)) + a.defaults
    value = lambda d: inspect.Parameter.empty if d is None else ast.literal_eval(d)
    P = inspect.Parameter
    found = [(p.arg.lstrip("_"), P.POSITIONAL_ONLY if p.arg.startswith("__") else P.POSITIONAL_OR_KEYWORD, value(d)) for p, d in zip(a.args, given)]
    found += [(p.arg, P.KEYWORD_ONLY, value(d)) for p, d in zip(a.kwonlyargs, a.kw_defaults)]
    return found[skip:]


def test_stub_is_the_module():
    public = {n for n in vars(fserver_lib) if not n.startswith("_")}
    functions = {n.name: n for n in stub().body if isinstance(n, ast.FunctionDef)}
    classes = {n.name: n for n in stub().body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")}
    assert set(functions) | set(classes) == public
    for name, function in functions.items():
        signature = inspect.signature(getattr(fserver_lib, name))
        got = [(p.name, p.kind, p.default) for p in signature.parameters.values()]
        assert got == parameters(function), name
    for name, c in classes.items():
        assert {b.id for b in c.bases if isinstance(b, ast.Name)} <= {k.__name__ for k in getattr(fserver_lib, name).__mro__}
    members = {n.name for n in classes["Tensor"].body}
    assert members == {n for n in vars(fserver_lib.Tensor) if n not in ("__new__", "__repr__", "__doc__", "__module__")}


def test_help_teaches():
    import fserver

    assert fserver.f is fserver_lib
    for name in fserver.__all__:
        if name == "f":
            continue
        o = getattr(fserver, name)
        assert o is getattr(fserver_lib, name)
        assert len(o.__doc__) > 100, name
    text = pydoc.plain(pydoc.render_doc(fserver.push_pull))
    for word in ("push_tensors, push_keys, pull_tensors, pull_keys, need_event=True", "2**64-1", "contiguous", "Returns", "Raises", "wait()"):
        assert word in text
    for name in ("Error", "TimeoutError", "ConnectionError", "ValueError", "TypeError"):
        c = getattr(fserver, name)
        assert issubclass(c, RuntimeError) and c.__doc__
    assert not {"TimeoutError", "ConnectionError", "ValueError", "TypeError"} & set(fserver.__all__)


def old_pythons():
    """Interpreters older than the oldest that is supported, which find the library all the same."""
    for minor in (6, 7):
        versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
        for python in (shutil.which(f"python3.{minor}"), *versions.glob(f"3.{minor}.*/bin/python3")):
            if python and subprocess.run([str(python), "-c", ""], capture_output=True).returncode == 0:
                yield str(python)
                break


def test_too_old():
    pythons = list(old_pythons())
    if not pythons:
        pytest.skip("there is no Python 3.6 or 3.7 in PATH or in pyenv's versions")
    for python in pythons:
        done = subprocess.run([python, "-c", "import fserver_lib"], env=dict(os.environ, PYTHONPATH=os.path.dirname(fserver_lib.__file__)),
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=within(60))
        assert done.returncode == 1 and b"ImportError: fserver_lib needs Python 3.8 or later; this is 3." in done.stderr, (python, done)
