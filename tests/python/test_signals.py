"""Signals of the program, its forks and the library's threads. Handlers are installed without SA_ONSTACK, as
libuv, libev and Python before 3.10 do it, and use more stack than a goroutine has."""

import asyncio
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

import pytest
from harness import by_hand, have, within

HERE = os.path.dirname(os.path.abspath(__file__))
ROUNDS = 150
SIZE = (20000,)
ENV = {"STEPAF_REPLACE_TIMEOUT": "1"}


@functools.lru_cache(None)
def native():
    """signals.c, or None if there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as d:
        library = os.path.join(d, "signals.so")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-pthread", "-o", library, os.path.join(HERE, "signals.c")], check=True)
        c = ctypes.CDLL(library)
    c.count.restype = c.count_elsewhere.restype = ctypes.c_int64
    return c


needs_c = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")


def needs(name):
    return pytest.mark.skipif(not have(name), reason=f"this Python has no {name}")


# Traffic in a thread of its own while the test runs. Every value is checked.

def serve(n, rounds=ROUNDS):
    for _ in range(rounds):
        for handler, tensors, _ in n.f.get_batch():
            n.f.respond(tensors, handler)


def push(n, rounds=ROUNDS):
    pull = n.lib.zeros("uint8", SIZE)
    for i in range(rounds):
        data = bytes([i % 251]) * SIZE[0]
        n.f.wait(n.f.push_pull([n.lib.make("uint8", SIZE, data)], [1], [pull], [2]), 60000)
        assert n.lib.bytes(pull) == data, f"round {i}: another value came back"


class Traffic:
    """Runs push or serve in a thread. running() tells whether it does."""

    def __init__(self, n, rounds=ROUNDS):
        self.error = None
        self.thread = threading.Thread(target=self._run, args=(n, rounds))
        self.thread.start()

    def _run(self, n, rounds):
        try:
            (push if n.role == "worker" else serve)(n, rounds)
        except BaseException as e:
            self.error = e

    def running(self):
        return self.thread.is_alive()

    def end(self):
        self.thread.join()
        if self.error is not None:
            raise self.error


def beside(function):
    """A node function: function(n, traffic) runs in the main thread during the traffic, on the worker and on the server."""

    @functools.wraps(function)
    def node(n):
        traffic = Traffic(n)
        try:
            return function(n, traffic)
        finally:
            traffic.end()

    return node


def run(cluster, node, **options):
    options.setdefault("env", ENV)
    if have("numpy"):
        options.setdefault("lib", "numpy")
    # Threads of OpenBLAS and of JAX take the program's signals. OpenBLAS reads its variable when it is loaded.
    with mock.patch.dict(os.environ, OPENBLAS_NUM_THREADS="1"):
        return cluster(copies=False, **options).run(node, node)


# The library's threads

THREADS = """
import os, threading, time
before = set(os.listdir("/proc/self/task"))
import fserver_lib as f
calls = [threading.Thread(target=f.get_nanosecond) for _ in range(20)]
[t.start() for t in calls] and [t.join() for t in calls]
faults = {4, 5, 7, 8, 9, 11, 19, 31, 32, 33}  # SIGILL SIGTRAP SIGBUS SIGFPE SIGKILL SIGSEGV SIGSTOP SIGSYS, two of glibc
def takes(task):
    try:
        with open(f"/proc/self/task/{task}/status") as status:
            blocked = int([line for line in status if line.startswith("SigBlk")][0].split()[1], 16)
    except OSError:
        return set()  # a thread of Python that has ended
    return {s for s in range(1, 65) if not blocked >> (s - 1) & 1}
own = set(os.listdir("/proc/self/task")) - before
assert len(own) >= 2, own
end = time.monotonic() + 20
while any(takes(t) - faults for t in own) and time.monotonic() < end:
    time.sleep(0.01)  # a thread that has just begun
wrong = {t: takes(t) - faults for t in own if takes(t) - faults}
assert not wrong, wrong
assert takes(os.getpid()) == set(range(1, 65)), "the importing thread has another mask than before"
"""


def test_threads_take_no_signal():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@by_hand
def threads_of_a_node(n):
    n.f.init()
    mine = {str(t.native_id) for t in threading.enumerate()}
    taking, wanted = {}, (signal.SIGCHLD, signal.SIGPROF, signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGURG, signal.SIGPIPE)
    for task in set(os.listdir("/proc/self/task")) - mine:
        with open(f"/proc/self/task/{task}/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        for s in wanted:
            if not int(lines["SigBlk"], 16) >> (s - 1) & 1:
                taking.setdefault(lines["Name"].strip(), []).append(int(s))
    n.f.stop()
    assert not taking, taking


def test_threads_of_a_node_take_no_signal(cluster):
    """Also those of libzmq, and of the transport within a host."""
    run(cluster, threads_of_a_node, lib="")


# Handlers without SA_ONSTACK

STORM = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGALRM, signal.SIGPROF, signal.SIGVTALRM, signal.SIGURG, signal.SIGIO,
         signal.SIGWINCH, signal.SIGPIPE, signal.SIGHUP, signal.SIGTERM, signal.SIGCONT, signal.SIGRTMIN, signal.SIGRTMIN + 5]


def storm(n):
    c = native()
    traffic = Traffic(n)
    c.expect_in(0, threading.main_thread().native_id)
    c.expect_in(1, traffic.thread.native_id)
    for s in STORM:
        assert c.install(s) == 0
    assert c.storm((ctypes.c_int * (len(STORM) + 1))(*STORM, 0), 1000) == 0
    while traffic.running():
        n.f.get_nanosecond()
        gc.collect()
    c.calm()
    traffic.end()
    missing = [s for s in STORM if c.count(s) == 0]
    assert not missing, f"these signals did not arrive: {missing}"
    return c.count_elsewhere()


@needs_c
def test_handlers_without_onstack(cluster):
    """Every signal, sent to the process and to each thread that calls the library. No handler runs in a thread of
    the library."""
    assert run(cluster, storm) == [0, 0]


@beside
def timers(n, traffic):
    ticks = {}

    def tick(number, frame):
        ticks[number] = ticks.get(number, 0) + 1

    kinds = ((signal.ITIMER_REAL, signal.SIGALRM), (signal.ITIMER_PROF, signal.SIGPROF), (signal.ITIMER_VIRTUAL, signal.SIGVTALRM))
    for kind, number in kinds:
        signal.signal(number, tick)
        signal.setitimer(kind, 0.001, 0.001)
    while traffic.running() or len(ticks) < 3:
        sum(range(1000))
    for kind, _ in kinds:
        signal.setitimer(kind, 0)


def test_timers_and_profilers_by_signals(cluster):
    """signal.setitimer, all three; profilers use ITIMER_PROF."""
    run(cluster, timers)


@beside
def late_sigurg(n, traffic):
    got = []
    signal.signal(signal.SIGURG, lambda number, frame: got.append(number))
    while traffic.running():
        gc.collect()
        time.sleep(0.001)
    assert not got, f"the library sent the program {len(got)} SIGURG"
    os.kill(os.getpid(), signal.SIGURG)
    while not got:
        time.sleep(0.001)


def test_sigurg_is_the_programs(cluster):
    run(cluster, late_sigurg)


def setuid(n):
    traffic = Traffic(n)
    while traffic.running():
        os.setuid(os.getuid())  # glibc sends a signal to every thread
        os.setgid(os.getgid())
    traffic.end()


def test_setuid_beside_traffic(cluster):
    run(cluster, setuid)


# Signals without a handler, which the program waits for

@by_hand
def waits_for_signals(n):
    mine = {signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, mine)
    n.f.init()
    traffic = Traffic(n)
    got = 0
    descriptor = native().signal_descriptor(signal.SIGCHLD) if native() else None
    while traffic.running() or got < 20:
        os.kill(os.getpid(), signal.SIGUSR1)  # without a handler it would end the process
        assert signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.sigtimedwait({signal.SIGTERM}, 20), "SIGTERM was taken by another thread"
        child = subprocess.Popen(["/bin/true"])
        if descriptor is not None:
            assert len(os.read(descriptor, 128)) == 128
        else:
            assert signal.sigtimedwait({signal.SIGCHLD}, 20), "SIGCHLD was taken by another thread"
        assert child.wait(180) == 0
        got += 1
    traffic.end()
    n.f.stop()


def test_sigwait_and_signalfd(cluster):
    run(cluster, waits_for_signals)


# Child processes

async def children(traffic, each=4):
    count = 0
    while traffic.running() or count < 40:
        some = [await asyncio.create_subprocess_exec("/bin/true") for _ in range(each)]
        assert [await p.wait() for p in some] == [0] * each
        count += each
    return count


@beside
def uvloop_children(n, traffic):
    import uvloop

    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(children(traffic))
    finally:
        loop.close()


@needs("uvloop")
def test_uvloop(cluster):
    """Child processes from uvloop, whose SIGCHLD handler has no SA_ONSTACK, as front ends of engines start them."""
    assert min(run(cluster, uvloop_children)) >= 40


@beside
def asyncio_children(n, traffic):
    if sys.version_info < (3, 12):
        asyncio.set_child_watcher(asyncio.SafeChildWatcher())  # by SIGCHLD
        loop = asyncio.new_event_loop()
        asyncio.get_child_watcher().attach_loop(loop)
    else:
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(children(traffic))


def test_asyncio(cluster):
    assert min(run(cluster, asyncio_children)) >= 40


@by_hand
def gevent_children(n):
    import gevent.monkey
    import gevent.subprocess

    n.f.init()
    real = gevent.monkey.get_original("threading", "Thread")
    assert real is threading.Thread
    traffic = Traffic(n)
    count = 0
    while traffic.running() or count < 40:
        some = [gevent.spawn(gevent.subprocess.call, ["/bin/true"]) for _ in range(4)]
        gevent.joinall(some, raise_error=True)
        assert [s.value for s in some] == [0] * 4
        count += 4
    traffic.end()
    n.f.stop()


@needs("gevent")
def test_gevent(cluster):
    run(cluster, gevent_children)


def nothing():
    pass


@beside
def processes(n, traffic):
    """Every way of Python to start a process, with a SIGCHLD handler as torch's DataLoader has it."""
    seen = []
    signal.signal(signal.SIGCHLD, lambda number, frame: seen.append(number))
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        some = [context.Process(target=nothing) for _ in range(3)]
        for p in some:
            p.start()
        for p in some:
            p.join()
            assert p.exitcode == 0, (method, p.exitcode)
    while traffic.running():
        pid = os.posix_spawn("/bin/true", ["true"], os.environ)
        assert os.waitpid(pid, 0)[1] == 0
        for close in (True, False):
            assert subprocess.call(["/bin/true"], close_fds=close) == 0
        assert subprocess.call(["/bin/true"], preexec_fn=nothing) == 0
    assert seen


def test_processes(cluster):
    run(cluster, processes)


@beside
def thread_of_a_fork(n, traffic):
    """A thread that forks is the only one in the child, and ends there as threads do: without Go."""
    for how in ("returns", "exits", "signals"):
        def fork(how=how):
            n.f.get_nanosecond()
            if os.fork() == 0:
                if how == "signals":
                    for number in (signal.SIGURG, signal.SIGPIPE, signal.SIGCHLD):
                        os.kill(os.getpid(), number)
                    os._exit(7)
                if how == "exits":
                    os._exit(7)

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        end = time.monotonic() + 60
        pid = 0
        while pid == 0 and time.monotonic() < end:
            pid, status = os.waitpid(-1, os.WNOHANG)
            time.sleep(0.005)
        if pid == 0:
            raise AssertionError(f"the child of a thread that {how} does not end")
        assert how == "returns" or status == 7 << 8, (how, status)


def test_thread_of_a_fork(cluster):
    run(cluster, thread_of_a_fork)


def descriptors():
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return found


@beside
def inherits(n, traffic):
    import socket

    left, right = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    friend = socket.create_connection(listener.getsockname())
    mine = {left.fileno(), right.fileno(), listener.fileno(), friend.fileno()}
    signal.signal(signal.SIGSEGV, signal.SIG_DFL) if n.role == "server" else None
    r, w = os.pipe()
    if os.fork() == 0:
        internet = []
        for fd, name in descriptors().items():
            if name.startswith("socket:") and fd not in mine:
                s = socket.socket(fileno=os.dup(fd))
                if s.family in (socket.AF_INET, socket.AF_INET6):
                    internet.append(str(s))
                s.close()
        kept = mine & set(descriptors())
        os.write(w, repr((internet, kept == mine)).encode())
        os._exit(0)
    os.close(w)
    text = os.read(r, 1 << 16).decode()
    os.wait()
    traffic.end()
    assert text == "([], True)", text


@pytest.mark.parametrize("env", [{"BYTEPS_ENABLE_IPC": "0"}, {}], ids=["tcp", "memory"])
def test_fork_closes_the_nodes_sockets(cluster, env):
    """A forked child has none of the node's connections, and all sockets of the program."""
    run(cluster, inherits, env=dict(ENV, **env))


DEFAULTS = """
import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
import fserver_lib
r, w = os.pipe()
os.close(r)
if os.fork() == 0:
    os.write(w, b"x")  # ends the child, as before the import
    os._exit(0)
assert os.wait()[1] == signal.SIGPIPE
"""


def test_forked_child_has_the_programs_actions():
    done = subprocess.run([sys.executable, "-c", DEFAULTS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# Programs that engines and users run in the same process

class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return i


@beside
def loads(n, traffic):
    from torch.utils.data import DataLoader

    while True:
        for context in ("fork", "spawn"):
            got = [int(x) for batch in DataLoader(Numbers(), batch_size=16, num_workers=2, multiprocessing_context=context) for x in batch]
            assert got == list(range(64))
        if not traffic.running():
            return


@needs("torch")
def test_dataloader(cluster):
    run(cluster, loads, lib="torch")


@beside
def fault_handlers(n, traffic):
    with tempfile.TemporaryFile() as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)  # other threads' frames may end while it reads them
        while traffic.running():
            os.kill(os.getpid(), signal.SIGUSR1)
            signal.pthread_kill(traffic.thread.ident, signal.SIGUSR1)
            time.sleep(0.001)
        file.seek(0)
        assert b"fault_handlers" in file.read()
        faulthandler.disable()


def test_faulthandler(cluster):
    run(cluster, fault_handlers)


@beside
def profiled(n, traffic):
    import pyinstrument

    profiler = pyinstrument.Profiler(interval=0.0005)
    profiler.start()
    while traffic.running():
        sum(range(10000))
    profiler.stop()
    assert profiler.last_session.sample_count > 0


@needs("pyinstrument")
def test_pyinstrument(cluster):
    run(cluster, profiled)


# Ctrl-C

IMPORT = """
import atexit, builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
ordinary, register = builtins.__import__, atexit.register
def strike():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass  # the exception is raised here at the latest
def importing(name, *others):
    if name == "atexit" and sys.argv[1] == "import":
        strike()
    return ordinary(name, *others)
def registering(function):
    if sys.argv[1] == "register":
        strike()
    return register(function)
builtins.__import__, atexit.register = importing, registering
try:
    import fserver_lib
    raise AssertionError("imported")
except KeyboardInterrupt as e:
    assert "fserver_lib" not in sys.modules
builtins.__import__, atexit.register = ordinary, register
import fserver_lib as f
assert f.get_nanosecond() > 0
class Size:
    def __init__(self, action): self.action = action
    def __index__(self): return self.action() or 4
class Other(Size):
    pass
class Array:
    __array_interface__ = {"typestr": "<i4", "shape": (Size(strike), Other(int)), "data": (id(f), False), "version": 3}
try:
    f.push_pull([Array()], [1], [], [])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("step", ["import", "register"])
def test_interrupt_while_importing(step):
    """KeyboardInterrupt passes through the module's C code, which makes no other call of Python meanwhile: that could clear it."""
    done = subprocess.run([sys.executable, "-c", IMPORT, step], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


@by_hand
def interrupted(n):
    n.f.init()
    if n.role == "server":
        n.tell("there")
        n.listen()
        return
    h = n.f.push_pull([n.lib.zeros("uint8", (16,))], [1], [n.lib.zeros("uint8", (16,))], [2])
    n.interrupted(n.f.wait, h, 60000)


def test_interrupt(cluster):
    """Ctrl-C ends a wait within its slice."""
    c = cluster(copies=False, env=ENV)
    (worker,), (server,) = c.start(interrupted, interrupted)
    assert server.hear() == "there" and worker.hear() == "waiting"
    began = time.monotonic()
    worker.signal(signal.SIGINT)
    assert worker.hear(20) == "interrupted"
    assert time.monotonic() - began < within(10)
    server.tell("end")


@by_hand
def outlives_a_peer(n):
    n.f.init()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as scripts do that print to head
    if n.role == "server":
        serve(n, 1)
        n.tell("answered")
        n.listen()
        return
    push(n, 1)
    n.tell("answered")
    n.listen()
    with n.raises(ConnectionError, "server 0"):
        for _ in range(100):
            push(n, 1)
    n.tell("lives")


@pytest.mark.parametrize("env", [{"BYTEPS_ENABLE_IPC": "0"}, {}], ids=["tcp", "memory"])
def test_sigpipe_by_default_and_a_lost_peer(cluster, env):
    """A program that has the default action for SIGPIPE does not end when a connection breaks."""
    c = cluster(copies=False, env=dict(ENV, **env))
    (worker,), (server,) = c.start(outlives_a_peer, outlives_a_peer)
    assert server.hear() == worker.hear() == "answered"
    server.kill()
    worker.tell("go on")
    assert worker.hear(60) == "lives", worker.report()
