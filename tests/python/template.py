"""A Python that has imported an array library already, and is copied (fork) for each node
of a test: importing PyTorch takes over a second of a core, JAX half of one, and the tests
start many hundred nodes. A node does the same as in a Python of its own: fserver_lib is
imported in the copy.
"""

import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys


class Copy:
    """One copy, as a subprocess.Popen with text pipes that are flushed after each line."""

    def __init__(self, template, environ):
        stdin, stdout, stderr, fate = (os.pipe() for _ in range(4))  # of each the end to read, and the end to write
        ours, theirs = (stdin[1], stdout[0], stderr[0], fate[0]), (stdin[0], stdout[1], stderr[1], fate[1])
        socket.send_fds(template, [json.dumps(environ).encode()], theirs)
        for fd in theirs:
            os.close(fd)
        self.stdin = open(ours[0], "w", buffering=1)
        self.stdout, self.stderr = (open(fd) for fd in ours[1:3])
        self.fate = os.fdopen(ours[3])  # its process id, and at its end its status
        self.pid = int(self.fate.readline())
        self.returncode = None

    def poll(self):
        return self._ended(0)

    def _ended(self, timeout):
        if self.returncode is None and select.select([self.fate], [], [], timeout)[0]:
            self.returncode = int(self.fate.readline() or -signal.SIGKILL)  # no line: the waiting parent was killed
            self.fate.close()
        return self.returncode

    def wait(self, timeout=None):
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(f"copy {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start(python, directory, module):
    """Starts a template of that Python which has imported the module. Returns the socket on
    which Copy asks for copies; the template ends when it is closed. None: there can be none,
    as the module has started threads, of which a copy would have the locks only."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(180)  # time for the import
    with theirs:
        subprocess.Popen(
            [python, "-c", "import template; template.main()", str(theirs.fileno()), module],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([directory, os.environ.get("PYTHONPATH", "")]),
                 "OPENBLAS_NUM_THREADS": "1"},  # NumPy's would start threads at the import
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    return ours if ours.recv(1) == b"1" else None


def main():
    """The template. Returns in a copy that has run."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    importlib.import_module(sys.argv[2])
    alone = len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()  # a collection at the end of each copy would write to, and so copy, the memory of all these objects
    requests.send(b"1" if alone else b"0")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # processes that wait for the copies, in become, leave no zombies
    while alone:
        data, fds, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not data:
            return
        if os.fork() == 0:
            requests.close()
            become(json.loads(data), fds)
            return
        for fd in fds:
            os.close(fd)


def become(environ, fds):
    """Runs harness.child in a copy; its parent waits for it and tells its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fate = fds.pop()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        os.write(fate, f"{pid}\n".encode())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _, status = os.waitpid(pid, 0)
        os.write(fate, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(fate)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environ)
    faulthandler.enable()
    sys.argv[1:] = []

    import harness

    harness.child()
