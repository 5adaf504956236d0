"""Nodes that end: killed, forked, without stop."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from harness import by_hand, within

SIZE = (16,)


def request(n):
    push = [n.lib.make("uint8", SIZE, bytes(16))]
    return n.f.push_pull(push, [1], [n.lib.zeros("uint8", SIZE) for _ in range(n.servers)], [1] * n.servers)


# Killed peers

@by_hand
def widow_worker(n):
    n.f.init()
    h = request(n)
    n.tell("waiting")
    with n.raises(ConnectionError, "server 1") as e:
        n.f.wait(h, 30000)
    assert "server 0" not in str(e.error)
    with n.raises(ConnectionError, "server 1"):
        n.f.wait(request(n), 30000)
    n.tell("lost")


@by_hand
def widow_server(n):
    n.f.init()
    (handler, tensors, _), = n.f.get_batch()
    if n.rank == 0:
        n.f.respond(tensors, handler)
    n.tell("answered")
    n.listen()


def test_server_killed_in_wait(cluster):
    c = cluster(servers=2)
    (worker,), servers = c.start(widow_worker, widow_server)
    for p in servers:
        assert p.hear() == "answered"
    assert worker.hear() == "waiting"
    servers[1].kill()
    start = time.monotonic()
    assert worker.hear(20) == "lost"
    assert time.monotonic() - start < within(15)
    assert worker.wait() == 0, worker.report()


@by_hand
def parent_server(n):
    n.f.init()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)  # otherwise the test would wait for the child's end
        time.sleep(40)
        os._exit(0)
    (handler, tensors, _), = n.f.get_batch()
    n.f.respond(tensors, handler)
    n.f.get_batch()
    n.tell("got")
    n.listen()


@by_hand
def parent_worker(n):
    n.f.init()
    n.f.wait(request(n))
    h = request(n)
    n.tell("waiting")
    with n.raises(ConnectionError, "server 0"):
        n.f.wait(h, 30000)
    n.tell("lost")


@pytest.mark.parametrize("env", [{"BYTEPS_ENABLE_IPC": "0"}, {}], ids=["tcp", "memory"])
def test_killed_with_a_living_child(cluster, env):
    """A server that is killed is dead for all at once, though a child that it has forked
    lives, which has inherited its connections. Heartbeats would take longer."""
    c = cluster(env=dict(env, PS_HEARTBEAT_INTERVAL="30", PS_HEARTBEAT_TIMEOUT="300"))
    (worker,), (server,) = c.start(parent_worker, parent_server)
    assert server.hear() == "got"
    assert worker.hear() == "waiting"
    server.kill()
    start = time.monotonic()
    assert worker.hear(30) == "lost"
    assert time.monotonic() - start < within(8)
    assert worker.wait() == 0, worker.report()


@by_hand
def orphan_server(n):
    n.f.init()
    n.tell("waiting")
    with n.raises(ConnectionError, "get_batch", "worker 1"):
        n.f.get_batch()
    n.tell("lost")


@by_hand
def orphan_worker(n):
    n.f.init()
    if n.rank == 0:
        request(n)
    n.tell("there")
    n.listen()


def test_worker_killed_in_get_batch(cluster):
    c = cluster(workers=2, env={"STEPAF_REPLACE_TIMEOUT": "1"})
    workers, (server,) = c.start(orphan_worker, orphan_server)
    assert server.hear() == "waiting"
    for p in workers:
        assert p.hear() == "there"
    workers[1].kill()
    assert server.hear(20) == "lost"
    assert server.wait() == 0, server.report()


@by_hand
def deserted(n):
    n.f.init()
    n.tell("waiting")
    with n.raises(ConnectionError, "barrier", "scheduler"):
        n.f.barrier(True, True)
    n.tell("lost")


@by_hand
def bystander(n):
    n.f.init()
    n.tell("waiting")
    n.listen()


def test_scheduler_killed_in_barrier(cluster):
    c = cluster()
    (worker,), (server,) = c.start(deserted, bystander)
    assert worker.hear() == server.hear() == "waiting"
    c.processes[0].kill()
    assert worker.hear(20) == "lost"
    assert worker.wait() == 0, worker.report()


# A busy worker

def busy(n):
    # Longer than STEPAF_STOP_TIMEOUT: servers and scheduler wait in stop for it.
    threading.Event().wait(2.5)


def test_stop_waits_for_a_busy_worker(cluster):
    cluster(env={"STEPAF_STOP_TIMEOUT": "1"}).run(busy, goes_on)


# Ends without stop

ENDS = {
    "falls off the end": lambda n: None,
    "sys.exit": lambda n: sys.exit(0),
    "exception": lambda n: 1 // 0,
    "os._exit": lambda n: os._exit(0),
    "in get_batch on a daemon thread": lambda n: threading.Thread(target=n.f.get_batch, daemon=True).start(),
    "SIGTERM": lambda n: os.kill(os.getpid(), signal.SIGTERM),
}


@by_hand
def ending(n):
    n.f.init()
    if n.role == "server":
        n.tell(time.monotonic())
        ENDS[n.args](n)
    else:
        n.listen()


@pytest.mark.parametrize("how", ENDS)
def test_exit_without_stop(cluster, how):
    c = cluster()
    _, (server,) = c.start(ending, ending, args=how)
    server.hear()
    start = time.monotonic()
    status = server.wait()
    assert time.monotonic() - start < within(8)
    want = {"exception": 1, "SIGTERM": -signal.SIGTERM}.get(how, 0)
    assert status == want, server.report()
    assert "Fatal" not in server.report() and "panic" not in server.report(), server.report()


@by_hand
def ends_in_flight(n):
    n.f.init()
    if n.role == "worker":
        for _ in range(50):
            request(n)
        n.tell("sent")
        n.listen()  # a server drops requests that it receives after their worker has ended
    else:
        n.tensors = n.f.get_batch()
        n.tell("got")


def test_exit_with_requests_in_flight(cluster):
    c = cluster()
    (worker,), (server,) = c.start(ends_in_flight, ends_in_flight)
    assert (worker.hear(), server.hear()) == ("sent", "got")
    worker.tell("end")
    assert (worker.wait(), server.wait()) == (0, 0), worker.report() + server.report()


# Forks

@by_hand
def fork_before_init(n):
    pid = os.fork()
    if pid == 0:
        # The import was before the fork.
        start = time.monotonic()
        try:
            with n.raises((), "fork"):
                n.f.init()
            with n.raises((), "fork"):
                n.f.get_batch()
            with n.raises((), "fork"):
                n.f.get_nanosecond() and n.f.stop()
            ok = time.monotonic() - start < within(5)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            ok = False
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    n.f.init()  # the parent continues
    n.f.stop()


def goes_on(n):
    pass


def test_fork_before_init(cluster):
    cluster().run(fork_before_init, goes_on)


def fork_after_init(n):
    (handler, tensors, _), = n.f.get_batch()
    pid = os.fork()
    if pid == 0:
        try:
            for call, args in ((n.f.get_batch, ()), (n.f.respond, (tensors, handler)), (n.f.barrier, (True, True)), (n.f.init, ())):
                with n.raises((), "fork"):
                    call(*args)
            assert n.lib.bytes(tensors[0]) == bytes(16)
            del tensors
            import gc

            gc.collect()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        n.tell("child")
        sys.exit(0)  # with finalisers and atexit
    assert os.waitpid(pid, 0)[1] == 0
    n.f.respond(tensors, handler)


def fork_worker(n):
    n.f.wait(request(n))


def test_fork_after_init(cluster):
    cluster().run(fork_worker, fork_after_init)


def children_worker(n):
    """The module does not affect other processes that a node starts."""
    import multiprocessing
    import subprocess

    assert subprocess.run([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE, check=True).stdout == b"1\n"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(abs, [-3]) == [3]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(abs, [-4]) == [4]
    n.f.wait(request(n))


def echo_server(n):
    (handler, tensors, _), = n.f.get_batch()
    n.f.respond(tensors, handler)


def test_children(cluster):
    cluster().run(children_worker, echo_server)


# Interpreters

INTERPRETERS = """
try:
    import _interpreters as s
    other, run = s.create("legacy"), s.exec
except ImportError:
    import _xxsubinterpreters as s
    try:
        other, run = s.create(isolated=False), s.run_string
    except TypeError:  # Python 3.8 has no isolated interpreters
        other, run = s.create(), s.run_string

def elsewhere():
    run(other, "try:\\n import fserver_lib\\n print('imported')\\nexcept ImportError as e:\\n print(e)")

def here():
    import fserver_lib
    print(fserver_lib.get_nanosecond() > 0)
"""


@pytest.mark.parametrize("order", ["elsewhere", "here elsewhere", "elsewhere here elsewhere"])
def test_one_interpreter(order):
    """Another interpreter than the main one is refused, in every order; one that is left over does not keep the process from ending."""
    program = INTERPRETERS + "".join(f"{name}()\n" for name in order.split())
    r = subprocess.run([sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=180)
    want = {"here": "True", "elsewhere": "fserver_lib was imported in interpreter 1, want the main one: a process is one node"}
    assert (r.returncode, r.stdout.decode().splitlines()) == (0, [want[name] for name in order.split()])


def test_import_again():
    """An import after the first one has the same classes."""
    program = "import fserver_lib as a, sys; del sys.modules['fserver_lib']; import fserver_lib as b; assert b.Error is a.Error; b.get_nanosecond()"
    subprocess.run([sys.executable, "-c", program], timeout=180, check=True)
