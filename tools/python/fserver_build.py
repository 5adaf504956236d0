"""Builds and packs the Python module: what pip calls (PEP 517, PEP 660), and

    python3 tools/python/fserver_build.py    # make fserver

Only the standard library is needed. The extension uses CPython's limited API, so
one library serves every Python from 3.8, whatever Python's headers it saw.
"""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# HOME is the directory that PYTHONPATH and an editable installation point to. It has the library and
# links to the Python directories, but not the Go directories of the repository.
HOME = ROOT / "bin" / "python"
LIBRARY = HOME / "fserver_lib.abi3.so"
LINKS = {
    "fserver": ROOT / "fserver",
    "fserver_lib-stubs": ROOT / "fserver" / "stubs",
}
# PACKED are the directories of a wheel that have Python files.
PACKED = dict(LINKS, **{"fserver/connectors": ROOT / "fserver" / "connectors"})
# ENTRIES are the entry points that vLLM calls in each of its processes.
ENTRIES = "[vllm.general_plugins]\nstepaf = fserver.connectors.vllm_plugin:register\n"
TAG = "cp38-abi3-" + re.sub(r"[-.]", "_", sysconfig.get_platform())
OLDEST = (3, 8)
# GODEBUG are settings of Go's runtime in the library, see fserver/module/threads.c: no preemption
# by SIGURG, which belongs to the program, and no shrinking of stacks.
GODEBUG = "-X=runtime.godebugDefault=asyncpreemptoff=1,gcshrinkstackoff=1"


class BuildError(Exception):
    """The module cannot be built here; the text says what is missing."""


def say(text):
    print("fserver: " + text, file=sys.stderr, flush=True)


def version():
    text = (ROOT / "fserver" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.M).group(1)


def output(*command):
    """What the command prints, or None when it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode().strip()


def missing_tools():
    """What a build would lack, with the names of Debian's packages."""
    lacking = []
    if not shutil.which("go"):
        lacking.append("Go (https://go.dev/dl)")
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "cc"))):
        lacking.append("a C compiler (gcc)")
    if not shutil.which("pkg-config"):
        lacking.append("pkg-config (pkg-config)")
    elif output("pkg-config", "--exists", "libzmq") is None:
        lacking.append("libzmq's headers (libzmq3-dev)")
    if not headers():
        lacking.append("Python's headers (python3-dev; Fedora: python3-devel; or set PYTHON to an interpreter that has them)")
    return lacking


def headers():
    """Directories for -I: of $PYTHON or this Python, else of any that is new enough."""
    python = os.environ.get("PYTHON")
    if python and python != sys.executable:
        asked = output(python, "-c", "import sysconfig as s; print(s.get_path('include')); print(s.get_path('platinclude'))")
        candidates = [asked.split("\n")] if asked else []
    else:
        candidates = [[sysconfig.get_path("include"), sysconfig.get_path("platinclude")]]
    flags = output("pkg-config", "--cflags-only-I", "python3")
    candidates.append([f[2:] for f in (flags or "").split()])
    candidates += [[str(d)] for d in sorted(Path("/usr/include").glob("python3.*"))]
    for found in candidates:
        if any(new_enough(Path(d)) for d in found):
            return list(dict.fromkeys(found))
    return None


def new_enough(include):
    try:
        text = (include / "patchlevel.h").read_text(encoding="utf-8")
    except OSError:
        return False
    numbers = [int(re.search(r"define %s\s+(\d+)" % name, text).group(1)) for name in ("PY_MAJOR_VERSION", "PY_MINOR_VERSION")]
    return (include / "Python.h").exists() and tuple(numbers) >= OLDEST


def build():
    """Makes bin/python: builds the library, or takes the one that is there when the tools are not."""
    HOME.mkdir(parents=True, exist_ok=True)
    for name, target in LINKS.items():
        link = HOME / name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(target, HOME), target_is_directory=True)
    lacking = missing_tools()
    if lacking and LIBRARY.exists():
        say("taking %s as it is; building it anew needs %s" % (LIBRARY, ", ".join(lacking)))
        return
    if lacking:
        raise BuildError("cannot build fserver_lib, missing: %s; on Debian and Ubuntu: tools/install_deps.sh" % ", ".join(lacking))
    work = ROOT / "build" / "python"
    work.mkdir(parents=True, exist_ok=True)
    made = work / LIBRARY.name
    flags = output("tools/build_flags.sh", "-q")
    if flags is None:
        subprocess.run(["tools/build_flags.sh", "-q"], cwd=ROOT, check=False)  # for its words
        raise BuildError("cannot build fserver_lib with these USE_ variables")
    tags = ",".join(["fserver"] + [f[len("-tags="):] for f in flags.split()])
    command = ["tools/go.sh", "build", "-tags=" + tags, "-trimpath", "-buildvcs=false", "-ldflags=-s -w " + GODEBUG, "-buildmode=c-shared", "-o", str(made), "./fserver/module"]
    say(" ".join(command))
    if subprocess.run(command, cwd=ROOT, env=environment(work)).returncode:
        raise BuildError("go build failed; its words are above")
    made.with_suffix(".h").unlink()  # go's, for C programs
    os.replace(made, LIBRARY)  # a running program keeps the old one
    say("built %s" % LIBRARY)


def environment(work):
    """The environment of go build, in which pkg-config's python3 is the headers chosen."""
    (work / "python3.pc").write_text(
        "Name: Python\nDescription: headers for the limited API\nVersion: %d.%d\nCflags: %s\n"
        % (*OLDEST, " ".join("-I" + d for d in headers())),
        encoding="utf-8",
    )
    path = [str(work)] + [p for p in [os.environ.get("PKG_CONFIG_PATH")] if p]
    return dict(os.environ, CGO_ENABLED="1", PKG_CONFIG_PATH=os.pathsep.join(path))


class Wheel:
    """A wheel being written; a context manager."""

    def __init__(self, directory):
        self.name = "fserver-%s-%s.whl" % (version(), TAG)
        self.info = "fserver-%s.dist-info" % version()
        self.path = Path(directory) / self.name
        self.records = []

    def __enter__(self):
        self.zip = zipfile.ZipFile(self.path, "w", zipfile.ZIP_DEFLATED)
        return self

    def add(self, name, data, mode=0o644):
        if isinstance(data, str):
            data = data.encode()
        entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))  # the same input gives the same wheel
        entry.external_attr = (0o100000 | mode) << 16
        entry.compress_type = zipfile.ZIP_DEFLATED
        self.zip.writestr(entry, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self.records.append("%s,sha256=%s,%d" % (name, digest, len(data)))

    def __exit__(self, kind, *_):
        if kind is None:
            for name, data in metadata().items():
                self.add(self.info + "/" + name, data)
            record = self.info + "/RECORD"
            self.zip.writestr(record, "\n".join([*self.records, record + ",,"]) + "\n")
        self.zip.close()


def metadata():
    """The files of the .dist-info directory, but RECORD."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    field = lambda name: re.search(r'^%s = "(.+)"$' % name, project, re.M).group(1)
    files = {
        "METADATA": "Metadata-Version: 2.1\nName: %s\nVersion: %s\nSummary: %s\nLicense: Apache-2.0\nRequires-Python: %s\n"
        "Description-Content-Type: text/markdown\n\n%s"
        % (
            field("name"),
            version(),
            field("description"),
            field("requires-python"),
            (ROOT / "docs" / "python.md").read_text(encoding="utf-8"),
        ),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: fserver_build\nRoot-Is-Purelib: false\nTag: %s\n" % TAG,
        "top_level.txt": "fserver\nfserver_lib\n",
        "entry_points.txt": ENTRIES,
    }
    for name in ("LICENSE", "NOTICE"):
        files["licenses/" + name] = (ROOT / name).read_text(encoding="utf-8")
    return files


# The functions that pip calls. pip shows the text of an exception below a stack, so the
# important words are at its end.


def get_requires_for_build_wheel(config_settings=None):
    return []


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name = "fserver-%s.dist-info" % version()
    for file, data in metadata().items():
        path = Path(metadata_directory) / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data, encoding="utf-8")
    return name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None, extra=dict):
    build()
    with Wheel(wheel_directory) as wheel:
        wheel.add(LIBRARY.name, LIBRARY.read_bytes(), 0o755)
        for package, source in PACKED.items():
            for file in sorted(source.iterdir()):
                if file.suffix in (".py", ".pyi") or file.name == "py.typed":
                    wheel.add("%s/%s" % (package, file.name), file.read_bytes())
        for name, data in extra().items():
            wheel.add(wheel.info + "/" + name, data)
    return wheel.name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    build()
    with Wheel(wheel_directory) as wheel:
        wheel.add("__editable__fserver.pth", str(HOME) + "\n")
    return wheel.name


def build_sdist(sdist_directory, config_settings=None):
    raise BuildError("there is no source distribution: install from the repository, or make wheel")


def licences():
    """The licences of the libraries that auditwheel will put into the wheel, on Debian."""
    files = {}
    for path in re.findall(r"=> (/\S+)", output("ldd", str(LIBRARY)) or ""):
        if os.path.basename(path).split(".")[0] in ("libc", "libm", "libpthread", "libresolv", "libstdc++", "libgcc_s"):
            continue  # every Linux has them, auditwheel leaves them out
        owner = output("dpkg-query", "-S", os.path.realpath(path)) or output("dpkg-query", "-S", "*/" + os.path.basename(path))
        text = Path("/usr/share/doc") / (owner or "").split(":")[0] / "copyright"
        if owner and text.exists():
            files["licenses/%s.txt" % text.parent.name] = text.read_bytes()
    return files


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--if-possible"] and missing_tools():
            say("not building fserver_lib, missing: " + ", ".join(missing_tools()))
        elif sys.argv[1:] in ([], ["--if-possible"]):
            build()
        elif len(sys.argv) == 3 and sys.argv[1] == "wheel":
            print(build_wheel(sys.argv[2], extra=licences))
        else:
            raise BuildError("want no arguments, --if-possible, or: wheel DIRECTORY")
    except BuildError as e:
        say(str(e))
        sys.exit(1)
