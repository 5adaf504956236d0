"""Descriptors 0 to 2 of a node: closed, a pipe without a reader, or another file of the program."""

import os
import subprocess
import sys
import textwrap

import pytest
from harness import by_hand, free_port, scheduler

LOUD = {"PS_VERBOSE": "2", "STEPAF_REPLACE_TIMEOUT": "1"}

NODE = """
import os, sys
{before}
import fserver_lib as f
{between}
f.init()
{after}
f.stop()
"""


def node_env(role, port):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "STEPAF_", "PS_"))}
    return dict(clean, DMLC_ROLE=role, DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_NODE_HOST="127.0.0.1",
                DMLC_PS_ROOT_PORT=str(port), STEPAF_START_TIMEOUT="100", STEPAF_STOP_TIMEOUT="40", **LOUD)


def program(before="pass", between="pass", after="pass"):
    return NODE.format(before=textwrap.dedent(before), between=textwrap.dedent(between), after=textwrap.dedent(after))


def run(text, tmp_path, **redirect):
    """Runs a cluster of three nodes of which the server is the program text. redirect is of subprocess. Returns the
    server's result, and ends all."""
    port = free_port()
    others = [subprocess.Popen([sys.executable, "-c", program()], env=node_env(role, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
              for role in ("scheduler", "worker")]
    try:
        done = subprocess.run([sys.executable, "-c", text], env=node_env("server", port), cwd=str(tmp_path), timeout=120, **redirect)
        for p in others:
            out, _ = p.communicate(timeout=60)
            assert p.returncode == 0, out.decode()
        return done
    finally:
        for p in others:
            p.kill()
            p.communicate()


def broken():
    r, w = os.pipe()
    os.close(r)
    return w


@pytest.mark.parametrize("sigpipe", ["SIG_IGN", "SIG_DFL"])
def test_error_output_that_nobody_reads(tmp_path, sigpipe):
    """Lines of the log go to a pipe without a reader. The process continues, whatever its action for SIGPIPE."""
    w = broken()
    try:
        set_it = f"import signal; signal.signal(signal.SIGPIPE, signal.{sigpipe})"
        assert run(program(between=set_it), tmp_path, stderr=w).returncode == 0
    finally:
        os.close(w)


def test_full_error_output(tmp_path):
    """The reader lives, but does not read, and the pipe is full."""
    r, w = os.pipe()
    os.set_blocking(w, False)
    try:
        while True:
            os.write(w, bytes(4096))
    except BlockingIOError:
        pass
    os.set_blocking(w, True)
    try:
        assert run(program(), tmp_path, stderr=w).returncode == 0
    finally:
        os.close(r)
        os.close(w)


CLOSED = {
    "all, when it starts": (range(3), {}),
    "1 and 2, when it starts": ((1, 2), {}),
    "2, before the import": ((), {"before": "os.close(2)"}),
    "all, after the import": ((), {"between": "for fd in range(3): os.close(fd)"}),
}

CHECK = """
import stat
for fd in range(3):
    mode = os.fstat(fd).st_mode
    assert stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISREG(mode), (fd, oct(mode))
os.write(1, b"a line of the program\\n")
with open("checked", "w") as file:
    file.write(os.readlink("/proc/self/fd/2"))
"""


@pytest.mark.parametrize("case", CLOSED)
def test_closed(tmp_path, case):
    """No descriptor of the library gets a number below 3, where lines for standard output and error would go."""
    fds, places = CLOSED[case]

    def close():
        for fd in fds:
            os.close(fd)

    done = run(program(after=CHECK, **places), tmp_path, preexec_fn=close, stdout=subprocess.PIPE)
    assert done.returncode == 0, done
    assert (tmp_path / "checked").read_text() == "/dev/null"


OTHERS = """
os.close(2)
file = open("data", "wb", buffering=0)
assert file.fileno() == 2
file.write(b"data")
"""


@pytest.mark.parametrize("place", ["before", "between"])
def test_a_file_of_the_program(tmp_path, place):
    """The program has closed standard error and opened a file, which got the number. No line of the log goes there."""
    assert run(program(**{place: OTHERS}), tmp_path).returncode == 0
    assert (tmp_path / "data").read_bytes() == b"data"


@by_hand
def redirects(n):
    file = os.open(n.args, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    n.f.init()
    n.f.stop()


def by_default(n):
    pass


def test_a_redirected_error_output(tmp_path, cluster):
    """dup2 onto 2 after the import redirects the log, as it does for C."""
    c = cluster(copies=False, lib="", env=LOUD)
    path = str(tmp_path / "log")
    c.spawn("scheduler", scheduler)
    c.spawn("worker", by_default)
    c.spawn("server", redirects, args=path)
    c.finish()
    with open(path) as log:
        assert "server" in log.read()
