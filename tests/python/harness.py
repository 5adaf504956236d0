"""Clusters of real processes on the loopback, for the tests in this directory.

A test writes what a node does as a function of its module:

    def server(n):
        for handler, tensors, keys in n.f.get_batch():
            n.f.respond(tensors, handler)

    def worker(n): ...

    def test_it(cluster):
        cluster(workers=2).run(worker, server)

Each runs in a process of its own between init() and stop(), with a Node as its
argument. Its result comes back as JSON. An exception fails the test with
everything that the processes printed.
"""

import functools
import importlib
import importlib.util
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

from template import Copy, start

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = 180  # seconds that a cluster may take: a guard, with time to import PyTorch in many processes at once; see within
MARK = "\x1enode "  # starts a line from a node to the harness
OURS = ("DMLC_", "STEPMESH_", "STEPAF_", "BYTEPS_", "PS_", "BENCHMARK_")


MODULES = {"torch": "torch", "numpy": "numpy", "jax": "jax.numpy"}  # of each array library, what its processes import


def by_hand(function):
    """Marks a node function that calls init and stop itself, if at all."""
    function.by_hand = True
    return function


def scheduler(n):
    """The function of a scheduler: it only waits in stop()."""


def within(seconds):
    """A limit of real time: seconds on a machine with a processor for each process that wants one, longer on a loaded one."""
    return seconds * max(os.getloadavg()[0] / (os.cpu_count() or 1), 1)


class Node:
    """The argument of a node function."""

    def __init__(self, spec):
        self.role, self.rank, self.instance = spec["role"], spec["rank"], spec["instance"]
        self.workers, self.servers, self.group = spec["workers"], spec["servers"], spec["group"]
        self.env = spec["env"]  # of this process, set after the import
        self.args = spec["args"]
        self.lib = None  # arrays.Lib
        self.f = None  # fserver_lib
        self.wrong = []  # errors found by raises()

    def tell(self, what):
        """Sends a value to the test; see Process.hear. The line is written in one call, so that neither a signal's exception
        nor another thread's line can divide it."""
        sys.stdout.write(MARK + json.dumps(what) + "\n")
        sys.stdout.flush()

    def announce(self, what="waiting"):
        """Sends a value to the test as soon as the main thread waits in a call. The thread waits if two consecutive ticks of
        a timer find it at the same instruction. The test may then send a signal. The signal's exception can be raised at
        any later point."""
        found = []

        def tick(number, frame):
            if frame.f_code is tick.__code__ or found == [None]:
                return
            here = (frame, frame.f_lasti)
            if found != [here]:
                found[:] = [here]
                return
            found[:] = [None]
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.tell(what)

        signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)

    def interrupted(self, call, *args, **named):
        """Makes a call that the test ends with SIGINT. It sends "waiting" from within the call, and "interrupted" after it."""
        try:
            self.announce()
            call(*args, **named)
        except KeyboardInterrupt:
            self.tell("interrupted")
            return
        raise AssertionError("no KeyboardInterrupt")

    def listen(self):
        """Waits for the test's Process.tell."""
        line = sys.stdin.readline()
        if not line:
            sys.exit("the test has ended")
        return json.loads(line)

    def raises(self, classes, *words):
        """A context manager: the block must raise one of our exceptions, of one of
        these classes (any, if it is ()), whose text has all the words. A mismatch is
        reported at the end of the function."""
        return Raises(self, classes if isinstance(classes, tuple) else (classes,), words)


class Raises:
    def __init__(self, n, classes, words):
        self.n, self.classes, self.words = n, classes or (RuntimeError,), words
        self.error = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None and not isinstance(error, Exception):
            return False
        self.error = error
        text = "no exception" if kind is None else f"{kind.__module__}.{kind.__name__}: {error}"
        if kind is None or not isinstance(error, self.classes) or not isinstance(error, (self.n.f.Error,)):
            text += "; want one of ours, " + " or ".join(c.__name__ for c in self.classes)
        elif all(w in str(error) for w in self.words):
            return True
        frame = sys._getframe(1)
        self.n.wrong.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}: {text}; want in it: {self.words}")
        return True


class Process:
    """One node, as the test uses it."""

    def __init__(self, spec, python, copies):
        self.name = f"{spec['role']} {spec['rank']}" + (f".{spec['instance']}" if spec["group"] > 1 else "")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        environ["PYTHONPATH"] = os.pathsep.join([HERE] + environ.get("PYTHONPATH", "").split(os.pathsep)).rstrip(os.pathsep)
        environ["PYTHONFAULTHANDLER"] = "1"
        of = template(python, copies) if copies and spec["role"] != "scheduler" else None
        self.popen = Copy(of, environ) if of else subprocess.Popen(
            [python, "-c", "import harness; harness.child()"], env=environ, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.out, self.err, self.heard = [], [], queue.Queue()
        self.readers = [threading.Thread(target=self._read, args=a, daemon=True)
                        for a in ((self.popen.stdout, self.out), (self.popen.stderr, self.err))]
        for t in self.readers:
            t.start()
        self.result = None
        self.tell(spec)

    def _read(self, stream, lines):
        for line in stream:
            if line.startswith(MARK):
                self.heard.put(json.loads(line[len(MARK):]))
            else:
                lines.append(line)
        if lines is self.out:
            self.heard.put(EOFError(f"{self.name} has ended"))

    def tell(self, what):
        self.popen.stdin.write(json.dumps(what) + "\n")
        self.popen.stdin.flush()

    def hear(self, timeout=LIMIT):
        """The next value of Node.tell."""
        got = self.heard.get(timeout=within(timeout))
        if isinstance(got, EOFError):
            self.heard.put(got)
            raise AssertionError(self.report())
        return got

    def signal(self, number):
        self.popen.send_signal(number)

    def kill(self):
        self.popen.kill()
        self.popen.wait(LIMIT)

    def wait(self, timeout=LIMIT):
        """Returns its exit status after reading all its output."""
        status = self.popen.wait(within(timeout))
        for t in self.readers:
            t.join(5)
        return status

    def report(self):
        status = self.popen.poll()
        state = "runs" if status is None else f"ended with {status}"
        return f"--- {self.name} {state}\n" + "".join(self.out) + "".join(self.err)


class Cluster:
    """Processes of one job. Use the fixture of conftest.py, which ends them. Workers and
    servers are copies (fork) of one Python that has imported a module: their array library,
    or that of copies; schedulers, and with copies=False all, are started as programs are."""

    def __init__(self, module, lib="", workers=1, servers=1, group=1, env=None, python=sys.executable, copies=None):
        self.module, self.lib, self.python = module, lib, python
        self.copies = MODULES.get(lib) if copies is None else copies
        self.workers, self.servers, self.group, self.env = workers, servers, group, env or {}
        self.port = free_port()
        self.processes = []

    def spawn(self, role, function, rank=0, instance=0, args=None, env=None):
        """Starts one node."""
        node_env = {
            "DMLC_ROLE": role, "DMLC_NUM_WORKER": str(self.workers), "DMLC_NUM_SERVER": str(self.servers),
            "DMLC_GROUP_SIZE": str(self.group), "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NODE_HOST": "127.0.0.1", "DMLC_ENABLE_RDMA": "zmq", "STEPMESH_BAKCEND": "CPU",
            "STEPAF_START_TIMEOUT": "150", "STEPAF_STOP_TIMEOUT": "40",
        }
        if role != "scheduler":
            node_env.update(DMLC_NODE_RANK=str(rank), STEPMESH_GPU=str(instance))
        node_env.update(self.env)
        node_env.update(env or {})
        spec = dict(role=role, rank=rank, instance=instance, workers=self.workers, servers=self.servers, group=self.group,
                    lib=self.lib, env=node_env, args=args, module=function.__module__, function=function.__name__)
        p = Process(spec, self.python, self.copies)
        self.processes.append(p)
        return p

    def start(self, worker, server, args=None):
        """Starts all nodes. Returns the workers and the servers."""
        self.spawn("scheduler", scheduler)
        nodes = [[self.spawn(role, function, i // self.group, i % self.group, args) for i in range(count * self.group)]
                 for role, function, count in (("worker", worker, self.workers), ("server", server, self.servers))]
        return nodes[0], nodes[1]

    def finish(self, timeout=LIMIT):
        """Waits for all; each must have ended well. Returns what the functions of
        workers and servers returned, in the order of their start."""
        end = time.monotonic() + within(timeout)
        bad = []
        for p in self.processes:
            try:
                status = p.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                status = "still running"
            if status != 0:
                bad.append(f"{p.name}: {status}")
                end = min(end, time.monotonic() + 5)
        assert not bad, "\n".join(bad + [p.report() for p in self.processes])
        results = []
        for p in self.processes[1:]:
            last = None
            while not p.heard.empty():
                got = p.heard.get()
                last = last if isinstance(got, EOFError) else got
            results.append(last)
        return results

    def run(self, worker, server, args=None, timeout=LIMIT):
        self.start(worker, server, args)
        return self.finish(timeout)

    def end(self):
        for p in self.processes:
            if p.popen.poll() is None:
                p.kill()
            p.popen.stdin.close()
            for t in p.readers:
                t.join(5)
            p.popen.stdout.close()
            p.popen.stderr.close()


PORTS = {}  # by process id: its ports, in turns, and the socket that claims them


def claim():
    """Claims a block of ports for this process until it ends, as internal/freeport does: no other process can bind a socket to the same name."""
    for i in range(40):
        block, name = (os.getpid() * 17 + i) % 40, socket.socket(socket.AF_UNIX)
        try:
            name.bind("\0stepaf-ports-%d" % block)
        except OSError:
            name.close()
            continue
        return itertools.cycle(range(10000 + 250 * block, 10000 + 250 * (block + 1))), name
    return itertools.cycle(range(10000, 20000)), None


def free_port():
    """A port for a scheduler, which no other process of these tests gets while this one runs. The port is below the
    range that the kernel assigns to connections, so no other program gets it by chance."""
    if os.getpid() not in PORTS:
        PORTS[os.getpid()] = claim()
    for port in itertools.islice(PORTS[os.getpid()][0], 10000):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass
    raise AssertionError("no free port from 10000 to 19999")


@functools.lru_cache(None)
def template(python, module):
    return start(python, HERE, module) if hasattr(socket, "send_fds") else None  # since Python 3.9


def child():
    """The main program of a node."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spec = json.loads(sys.stdin.readline())
    n = Node(spec)
    if n.role != "scheduler" and spec["lib"]:
        import arrays

        n.lib = arrays.load(spec["lib"])
    import fserver_lib

    n.f = fserver_lib
    # After the import, and where C reads them, as programs do.
    os.environ.update(n.env)
    function = getattr(importlib.import_module(spec["module"]), spec["function"])
    if getattr(function, "by_hand", False):
        result = function(n)
    else:
        n.f.init()
        result = function(n)
        n.f.stop()
    if n.wrong:
        raise AssertionError("\n".join(n.wrong))
    if result is not None:
        n.tell(result)


@functools.lru_cache(None)
def libraries():
    """The array libraries that this interpreter has."""
    import arrays

    return tuple(name for name in arrays.NAMES if have(name))


def have(name):
    """Whether this interpreter has a module."""
    return importlib.util.find_spec(name) is not None
