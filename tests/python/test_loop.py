"""The end of a server's loop: get_batch raises Finished when all workers are in stop(), and a server that has left its loop
refuses requests."""

import os
import signal
import subprocess
import sys
import threading
import time

import harness
import pytest
from harness import by_hand, within

SIZE = (16,)
LIMIT = {"STEPAF_STOP_TIMEOUT": "150", "STEPAF_REPLACE_TIMEOUT": "60"}  # an end that only a limit makes is seen


def request(n, **to):
    push = [n.lib.make("uint8", SIZE, bytes(16))]
    count = len(to.get("servers", range(n.servers)))
    return n.f.push_pull(push, [1], [n.lib.zeros("uint8", SIZE) for _ in range(count)], [1] * count, **to)


def worker(n):
    for _ in range(2):
        n.f.wait(request(n), 30000)


@by_hand
def loop(n):
    n.f.init()
    while True:
        for handler, tensors, keys in n.f.get_batch():
            n.f.respond(tensors, handler)


def ends(cluster, lib="numpy", **shape):
    """Makes a cluster whose end is measured. Its nodes are programs of their own, and NumPy is imported much faster than PyTorch."""
    env = dict(LIMIT, **shape.pop("env", {}))
    return cluster(env=env, copies=False, lib=lib if harness.have(lib) else harness.libraries()[0], **shape)


@pytest.mark.parametrize("shape", [dict(lib=harness.libraries()[0]), dict(workers=2, servers=2), dict(group=2)], ids=["1x1", "2x2", "groups"])
def test_natural_program(cluster, shape):
    """The server's loop has no exit condition, and no worker's stop() fails."""
    ends(cluster, **shape).run(worker, loop, timeout=60)


@by_hand
def uneven(n):
    """Worker 0 sends 2 batches, worker 1 sends 6, of which it waits for half. The rest is not waited for before stop()."""
    n.f.init()
    for i in range(2 if n.rank == 0 else 6):
        handler = n.f.push_pull([n.lib.make("uint8", SIZE, bytes(16))], [1], [], [])
        if n.rank == 1 and i < 3:
            n.f.wait(handler, 30000)
    n.f.stop()


@by_hand
def counting(n):
    n.f.init()
    got = []
    try:
        while True:
            batches = n.f.get_batch(**n.args)
            got += batches
            for handler, _, _ in batches:
                n.f.respond([], handler)
    except n.f.Finished:
        n.f.stop()
    return len(got)


@pytest.mark.parametrize("args", [{}, {"any": True}], ids=["each", "any"])
def test_uneven_workers(cluster, args):
    """A worker in stop() is not waited for, and all batches are returned before Finished."""
    c = ends(cluster, workers=2)
    c.start(uneven, counting, args)
    assert c.finish(60)[-1] == 8


@by_hand
def anywhere(n):
    n.f.init()

    def serve():
        while True:
            for handler, tensors, keys in n.f.get_batch(any=True):
                n.f.respond(tensors, handler)

    t = threading.Thread(target=serve)
    t.start()
    t.join()  # the end of the program then leaves the cluster as stop() does


def test_thread(cluster):
    ends(cluster).run(worker, anywhere, timeout=60)


@by_hand
def catches(n):
    f = n.f
    f.init()
    seen = 0
    try:
        while True:
            try:
                batches = f.get_batch(timeout_ms=20, any=n.args["any"])
            except f.TimeoutError:
                continue
            except Exception as e:  # servers use this to continue after an error
                raise AssertionError("no Exception is raised") from e
            for handler, tensors, keys in batches:
                seen += 1
    except f.Finished as e:
        assert isinstance(e, SystemExit) and e.code == 0 and type(e)("again").code == 0
        assert "worker 0" in str(e), e
    for how in (dict(timeout_ms=0), dict(any=True), dict()):
        with pytest.raises(f.Finished):
            f.get_batch(**how)
    f.stop()
    return seen


@by_hand
def leaves_all_behind(n):
    n.f.init()
    for _ in range(n.args["requests"]):
        request(n)
    n.f.stop()


@pytest.mark.parametrize("any", [False, True])
def test_requests_before_stop_come_first(cluster, any):
    """A worker that does not wait for its requests calls stop(): the server gets all of them before Finished."""
    args = {"requests": 40, "any": any}
    assert ends(cluster).run(leaves_all_behind, catches, args, timeout=60)[1] == args["requests"]


@by_hand
def goes_on(n):
    n.f.init()
    n.tell("ready")
    assert n.listen() == "go"
    if n.rank == 0:
        n.f.wait(request(n), 30000)
    n.f.stop()


@by_hand
def tells(n):
    n.f.init()
    n.tell("serves")
    try:
        while True:
            for handler, tensors, keys in n.f.get_batch(any=True):
                n.f.respond(tensors, handler)
                n.tell("answered")
    except n.f.Finished as e:
        n.tell(str(e))


def test_not_before_the_last(cluster):
    """The server continues as long as one worker does."""
    c = ends(cluster, workers=2)
    workers, (server,) = c.start(goes_on, tells)
    assert server.hear() == "serves" and [w.hear() for w in workers] == ["ready"] * 2
    workers[1].tell("go")
    with pytest.raises(Exception):
        server.hear(1.5)
    workers[0].tell("go")
    assert server.hear(20) == "answered"
    assert "worker 1" in server.hear(20)
    c.finish(30)


def test_dead_worker(cluster):
    """A worker that is lost without a replacement is not waited for longer than STEPAF_REPLACE_TIMEOUT."""
    c = ends(cluster, workers=2, env={"STEPAF_REPLACE_TIMEOUT": "4", "STEPAF_STOP_TIMEOUT": "30"})
    workers, (server,) = c.start(goes_on, tells)
    assert server.hear() == "serves" and [w.hear() for w in workers] == ["ready"] * 2
    workers[0].tell("go")
    assert server.hear(20) == "answered"
    workers[1].kill()
    text = server.hear(20)
    assert "in stop(): worker 0" in text and "worker 1" in text and "is lost" in text, text


@by_hand
def late_server(n):
    n.f.init()
    for _ in range(n.args["rounds"]):
        for handler, tensors, keys in n.f.get_batch():
            n.f.respond(tensors, handler)
    n.tell("stops")
    n.f.stop()


@by_hand
def asks_too_much(n):
    n.f.init()
    for _ in range(n.args["rounds"]):
        n.f.wait(request(n), 30000)
    early = request(n)  # it may come before the server is in stop()
    assert n.listen() == "go"
    for handler in (early, request(n)):
        start = time.monotonic()
        with n.raises((), "server 0", "has left its loop", "waits in stop()"):
            n.f.wait(handler, 60000)
        assert time.monotonic() - start < within(10), "not at once"
    n.f.stop()


@pytest.mark.parametrize("rounds", [0, 2])
def test_refused_in_stop(cluster, rounds):
    c = ends(cluster)
    (w,), (server,) = c.start(asks_too_much, late_server, {"rounds": rounds})
    assert server.hear() == "stops"
    w.tell("go")
    c.finish(60)


@by_hand
def other_thread(n):
    n.f.init()

    def serve():
        try:
            for i in range(3):
                for handler, tensors, keys in n.f.get_batch():
                    time.sleep(1.5)  # longer than the time after which the server refuses requests
                    n.f.respond(tensors, handler)
        except n.f.Finished:
            n.wrong.append("Finished before the worker's last request")

    threading.Thread(target=serve, daemon=True).start()
    n.f.stop()  # at once, as servers with threads do


@by_hand
def asks_a_thread(n):
    n.f.init()
    for _ in range(3):
        n.f.wait(request(n), 30000)
    with n.raises((), "has left its loop"):  # the thread has ended
        n.f.wait(request(n), 60000)
    n.f.stop()


def test_another_thread_serves_in_stop(cluster):
    ends(cluster).run(asks_a_thread, other_thread, timeout=60)


@by_hand
def interrupted(n):
    n.f.init()
    try:
        while True:
            n.f.get_batch()
    except n.f.Finished:
        n.tell("finished")
        assert n.listen() == "end"
        raise


def test_end_of_the_program_can_be_interrupted(cluster):
    """Ctrl-C ends the wait for other nodes at the end of the program."""
    c = ends(cluster, servers=2)
    (w,), servers = c.start(leaves_all_behind, interrupted, {"requests": 0})
    assert [s.hear(20) for s in servers] == ["finished"] * 2
    servers[0].tell("end")  # the second server does not end
    with pytest.raises(Exception):
        servers[0].hear(1)
    servers[0].signal(signal.SIGINT)
    servers[0].wait()


# Children of multiprocessing, which end with os._exit

CHILDREN = '''
import multiprocessing, os, sys, threading

class Array:
    def __init__(self):
        self.memory = bytearray(16)
        import ctypes
        at = ctypes.addressof((ctypes.c_char * 16).from_buffer(self.memory))
        self.__array_interface__ = {"typestr": "|u1", "shape": (16,), "data": (at, False), "version": 3}

def node(role, rank, port, threads):
    os.environ.update(DMLC_ROLE=role, DMLC_NODE_RANK=str(rank), DMLC_PS_ROOT_PORT=str(port))
    import fserver_lib as f
    f.init()
    if role == "scheduler":
        f.stop()
    elif role == "server":
        def serve():
            try:
                while True:
                    for handler, tensors, keys in f.get_batch():
                        f.respond(tensors, handler)
            except f.Finished:
                if not threads:
                    raise
        threading.Thread(target=serve).start() if threads else serve()
    else:
        for _ in range(20):
            f.wait(f.push_pull([Array()], [1], [Array(), Array()], [1, 1]), 30000)
        f.stop()

if __name__ == "__main__":
    method, port, threads = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "threads"
    context = multiprocessing.get_context(method)
    children = [context.Process(target=node, args=(role, rank, port, threads))
                for role, rank in (("scheduler", 0), ("server", 0), ("server", 1), ("worker", 0))]
    for p in children:
        p.start()
    for p in children:
        p.join(30)
    print([p.exitcode for p in children])
    for p in children:
        p.kill()
'''


@pytest.mark.parametrize("threads", ["main", "threads"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_children_of_multiprocessing(tmp_path, method, threads):
    """Servers without an exit condition, in the main thread or in others. No stop() fails."""
    program = tmp_path / "program.py"
    program.write_text(CHILDREN)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(harness.OURS)}
    environ.update(LIMIT, DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="2", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_NODE_HOST="127.0.0.1", STEPMESH_BAKCEND="CPU",
                   STEPAF_STOP_TIMEOUT="20")
    done = subprocess.run([sys.executable, str(program), method, str(harness.free_port()), threads], env=environ, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=120)
    assert done.stdout == "[0, 0, 0, 0]\n", done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr


# Sessions

@by_hand
def serves(n):
    from fserver import session

    n.f.init()
    n.tell("serves")
    while True:
        session.serve({"same": lambda x: x})


@by_hand
def controls(n):
    from fserver import session

    n.f.init()
    s = session.open()
    s.call("same", 1)  # neither the call nor the session is ended
    n.f.stop()


def test_serve(cluster):
    """serve() ends with its controller's program, and the next one with the programs of all workers."""
    ends(cluster, servers=2).run(controls, serves, timeout=60)


@by_hand
def serves_the_dead(n):
    from fserver import session

    n.f.init()
    n.tell("serves")
    with n.raises(ConnectionError, "no worker is left"):
        session.serve({})


@by_hand
def waits(n):
    n.f.init()
    n.listen()


def test_serve_without_workers(cluster):
    c = ends(cluster, env={"STEPAF_REPLACE_TIMEOUT": "2"})
    (w,), (server,) = c.start(waits, serves_the_dead)
    assert server.hear() == "serves"
    w.kill()
    assert server.wait() == 0, server.report()
