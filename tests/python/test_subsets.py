"""Requests to some of the servers, get_batch(any=True), and the completion of answers."""

import signal
import time

import arrays
import harness
import pytest
from harness import within

HOST = "torch" if "torch" in harness.libraries() else "numpy"
ROUNDS, SIZE = 12, 48


def value(worker, round_, server):
    return arrays.pattern((worker << 16) + (round_ << 8) + server, "uint8", (SIZE,))


def targets(n, round_):
    """The servers of a worker's round: one in turn, then two in falling order, then all."""
    if round_ % 3 == 0:
        return [(n.rank + round_) % n.servers]
    if round_ % 3 == 1 and n.servers > 1:
        return sorted(((n.rank + round_) % n.servers, (n.rank + round_ + 1) % n.servers), reverse=True)
    return None


def worker(n):
    f, lib = n.f, n.lib
    flying = []
    for i in range(ROUNDS):
        to = targets(n, i)
        asked = range(n.servers) if to is None else to
        x = lib.make("uint8", (SIZE,), value(n.rank, i, 0))
        y = [lib.zeros("uint8", (SIZE,)) for _ in asked]
        h = f.push_pull([x], [n.rank * 1000 + i], y, [7] * len(y), servers=to)
        flying.append((i, h, asked, y))
        if len(flying) == 3:
            check(n, *flying.pop(0))
    for one in flying:
        check(n, *one)
    f.barrier(True, True)


def check(n, i, handler, asked, y):
    n.f.wait(handler)
    for server, t in zip(asked, y):
        want = bytes(b ^ (server + 1) for b in value(n.rank, i, 0))
        assert n.lib.bytes(t) == want, (n.rank, i, server)


def expected(n):
    """The number of batches for this server."""
    total = 0
    for rank in range(n.workers):
        of = type("Of", (), dict(rank=rank, servers=n.servers))
        total += sum(targets(of, i) is None or n.rank in targets(of, i) for i in range(ROUNDS))
    return total


def server(n):
    f = n.f
    left, seen, answers = expected(n), {}, []
    while left:
        batches = f.get_batch(any=True, max_batches=2 if n.rank == 0 else None)
        assert 1 <= len(batches) <= (2 if n.rank == 0 else left)
        for handler, (t,), (key,) in batches:
            rank, i = divmod(key, 1000)
            assert n.lib.bytes(t) == value(rank, i, 0)
            assert seen.get(rank, -1) < i, "a worker's batches come in order"
            seen[rank] = i
            answers.append(f.respond([n.lib.make("uint8", (SIZE,), bytes(b ^ (n.rank + 1) for b in n.lib.bytes(t)))], handler))
        left -= len(batches)
    for a in answers:
        a.wait(20000)
        assert a.done()
    f.barrier(True, True)


@pytest.mark.parametrize("attention, ffn", [(1, 2), (3, 2), (5, 2), (8, 1)])
def test_ratios(cluster, attention, ffn):
    cluster(workers=attention, servers=ffn, lib=HOST if attention < 5 else "numpy", env={"PS_VERBOSE": "-1"}).run(worker, server, timeout=180)


# Refused calls.

def bad_worker(n):
    f, lib = n.f, n.lib
    x, y = [lib.zeros("uint8", (4,))], [lib.zeros("uint8", (4,)) for _ in range(2)]
    for servers, pulls, classes, words in (
            ([0, 0], 2, ValueError, ("server 0 is there twice",)),
            ([1, 0, 1], 0, ValueError, ("server 1 is there twice",)),
            ([2], 1, ValueError, ("there is no server 2", "0 to 1")),
            ([-1], 1, ValueError, ("there is no server -1",)),
            ([2**40], 1, ValueError, ("there is no server",)),
            ([2**70], 1, ValueError, ("servers",)),
            ([], 0, ValueError, ("to no server",)),
            ([0, 1], 1, ValueError, ("1 pull tensors for 2 servers",)),
            (1, 1, TypeError, ("servers", "sequence")),
            (["0"], 1, TypeError, ("servers", "'0'")),
            ([0.0], 1, TypeError, ("servers",))):
        with n.raises(classes, *words):
            f.push_pull(x, [1], y[:pulls], [1] * pulls, servers=servers)
    f.wait(f.push_pull(x, [1], y, [1, 1]))
    f.wait(f.push_pull(x, [1], y[:1], [1], servers=[1]))


def bad_server(n):
    f = n.f
    for most in (0, -1, 2**70):
        with n.raises(ValueError, "max_batches"):
            f.get_batch(any=True, max_batches=most)
    with n.raises(ValueError, "max_batches", "any=True"):
        f.get_batch(max_batches=1)
    with n.raises(TypeError, "max_batches"):
        f.get_batch(any=True, max_batches="1")
    (handler, tensors, _), = f.get_batch()
    f.respond(tensors, handler)
    with n.raises((), "already"):
        f.respond(tensors, handler)
    if n.rank == 1:
        (handler, tensors, _), = f.get_batch(any=True)
        assert f.respond(tensors, handler).wait() is None
    with n.raises(TimeoutError, "get_batch", "worker 0"):
        f.get_batch(any=True, timeout_ms=20)


def test_refused(cluster):
    cluster(servers=2, lib=HOST).run(bad_worker, bad_server)


# Completion: the buffer is changed as soon as done() returns True.

def reuse_worker(n):
    y = [n.lib.zeros("uint8", (BIG,)) for _ in range(4)]
    flying = [n.f.push_pull([n.lib.zeros("uint8", (1,))], [i], [t], [i]) for i, t in enumerate(y)]
    for i, (h, t) in enumerate(zip(flying, y)):
        n.f.wait(h)
        assert n.lib.bytes(t) == bytes([i + 1]) * BIG, i
    n.f.wait(n.f.push_pull([n.lib.zeros("uint8", (1,))], [9], [], []))


BIG = 3 << 20


def reuse_server(n):
    import ctypes

    f, lib = n.f, n.lib
    buffer = lib.zeros("uint8", (BIG,))
    for i in range(4):
        (handler, _, _), = f.get_batch()
        ctypes.memset(lib.pointer(buffer), i + 1, BIG)
        a = f.respond([buffer], handler)
        if i % 2:
            a.wait()
        else:
            while True:
                try:
                    a.wait(timeout_ms=1)
                    break
                except TimeoutError as e:
                    assert f"server {n.rank}" in str(e) and "are not sent" in str(e)
        assert a.done()
    (handler, _, _), = f.get_batch()
    assert f.respond([], handler).done()
    with n.raises(TypeError, "Answer"):
        type(a)()


@pytest.mark.parametrize("env", [{}, {"BYTEPS_ENABLE_IPC": "0"}], ids=["shm", "zmq"])
def test_answer(cluster, env):
    cluster(lib=HOST, env=env).run(reuse_worker, reuse_server)


def stopped_worker(n):
    first = n.lib.zeros("uint8", (1,))
    n.f.wait(n.f.push_pull([n.lib.zeros("uint8", (1,))], [1], [first], [2]), 60000)  # there are connections both ways
    y = n.lib.zeros("uint8", (20 * BIG,))
    h = n.f.push_pull([n.lib.zeros("uint8", (1,))], [1], [y], [2])
    n.tell("asked")
    n.f.wait(h, 60000)


def ctrl_c_server(n):
    (handler, _, _), = n.f.get_batch()
    n.f.respond([n.lib.zeros("uint8", (1,))], handler)
    (handler, _, _), = n.f.get_batch()
    n.listen()
    a = n.f.respond([n.lib.zeros("uint8", (20 * BIG,))], handler)
    n.interrupted(a.wait, 60000)
    assert not a.done()
    n.listen()
    a.wait(20000)
    assert a.done()


@pytest.mark.parametrize("env", [{}, {"BYTEPS_ENABLE_IPC": "0"}], ids=["shm", "zmq"])
def test_ctrl_c_of_answer(cluster, env):
    """Ctrl-C ends Answer.wait while the worker does not read; the answer is sent afterwards."""
    c = cluster(lib=HOST, env=env)
    (w,), (s,) = c.start(stopped_worker, ctrl_c_server)
    assert w.hear() == "asked"
    w.signal(signal.SIGSTOP)
    s.tell("respond")
    assert s.hear() == "waiting"
    began = time.monotonic()
    s.signal(signal.SIGINT)
    assert s.hear(20) == "interrupted"
    assert time.monotonic() - began < within(10)
    w.signal(signal.SIGCONT)
    s.tell("wait")
    c.finish(60)
