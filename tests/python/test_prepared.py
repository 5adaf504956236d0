"""Prepared exchanges: prepare(), start() and wait(), repeatedly."""

import gc
import signal
import threading
import time
import weakref

import arrays
import harness
import pytest

HOST = "torch" if "torch" in harness.libraries() else "numpy"
ROWS, COLUMNS = 5, 3


def write(n, t, data):
    """Changes the contents of a host tensor."""
    import ctypes

    if data:
        ctypes.memmove(n.lib.pointer(t), data, len(data))


def masked(n):
    """Answers one batch of each worker with its tensors, of which each byte is changed."""
    for handler, tensors, keys in n.f.get_batch():
        lib = n.lib
        out = [lib.make(lib.dtype(t), lib.shape(t), bytes(b ^ (n.rank + 1) for b in lib.bytes(t))) for t in tensors]
        n.f.respond(out, handler)


# Bit for bit: types, rows, changing contents, two workers and two servers.

PLAN = (None, 1, 0, 4, None, 5)


def values_worker(n):
    f, lib = n.f, n.lib
    for k, dtype in enumerate(lib.dtypes):
        x, scales = lib.zeros(dtype, (ROWS, COLUMNS)), lib.zeros("uint8", (ROWS, 1))
        pull = [lib.zeros(t, (ROWS, c)) for _ in range(n.servers) for t, c in ((dtype, COLUMNS), ("uint8", 1))]
        e = f.prepare([x, scales], [2 * k, 2 * k + 1], pull, [7, 8] * n.servers)
        for i, rows in enumerate(PLAN):
            sent = [arrays.pattern((n.rank << 16) + (k << 8) + i + j, t, (ROWS, c)) for j, (t, c) in enumerate(((dtype, COLUMNS), ("uint8", 1)))]
            write(n, x, sent[0])
            write(n, scales, sent[1])
            for t in pull:
                write(n, t, b"\xee" * len(lib.bytes(t)))
            h = e.start() if rows is None else e.start(rows=rows)
            assert len(f.get_all_handlers(h)) == 4
            e.wait()
            for s in range(n.servers):
                for j in range(2):
                    cut = len(sent[j]) // ROWS * (ROWS if rows is None else rows)
                    want = bytes(b ^ (s + 1) for b in sent[j][:cut]) + b"\xee" * (len(sent[j]) - cut)
                    assert lib.bytes(pull[2 * s + j]) == want, (dtype, i, s, j)
            assert all(f.fetch_trace(h)), "the handler has a trace"
    f.wait(f.push_pull([], [], [lib.zeros("uint8", (1,)) for _ in range(n.servers)], [9] * n.servers))


def values_server(n):
    while True:
        batches = n.f.get_batch()
        for handler, tensors, keys in batches:
            lib = n.lib
            if keys:
                n.f.respond([lib.make(lib.dtype(t), lib.shape(t), bytes(b ^ (n.rank + 1) for b in lib.bytes(t))) for t in tensors], handler)
            else:
                n.f.respond([lib.zeros("uint8", (1,))], handler)
        if not batches[0][2]:
            return


@pytest.mark.parametrize("env", [{}, {"BYTEPS_ENABLE_IPC": "0"}], ids=["shm", "zmq"])
def test_values(cluster, env):
    cluster(workers=2, servers=2, lib=HOST, env=env).run(values_worker, values_server)


# Some of the servers, in any order.

def subset_worker(n):
    f, lib = n.f, n.lib
    x, y = lib.zeros("uint8", (4,)), [lib.zeros("uint8", (4,)) for _ in range(2)]
    e = f.prepare([x], [1], y, [1, 1], servers=[2, 0])
    for i in range(20):
        write(n, x, bytes([i] * 4))
        e.start()
        e.wait(timeout_ms=5000)
        assert [lib.bytes(t) for t in y] == [bytes([i ^ 3] * 4), bytes([i ^ 1] * 4)]
    f.barrier(True, True)


def subset_server(n):
    for _ in range(20 if n.rank != 1 else 0):
        (handler, (t,), _), = n.f.get_batch(any=True, max_batches=1)
        n.f.respond([n.lib.make("uint8", (4,), bytes(b ^ (n.rank + 1) for b in n.lib.bytes(t)))], handler)
    n.f.barrier(True, True)


def test_subset(cluster):
    cluster(servers=3, lib=HOST).run(subset_worker, subset_server)


# Misuse.

def refused_worker(n):
    f, lib = n.f, n.lib
    x, y = lib.zeros("uint8", (4, 2)), [lib.zeros("uint8", (4, 2)) for _ in range(2)]
    for args, servers, classes, words in (
            (([x], [1, 2], y, [1, 1]), None, ValueError, ("push_keys",)),
            (([x], [1], y[:1], [1]), None, ValueError, ("1 pull tensors for 2 servers",)),
            (([], [], [], []), None, ValueError, ("no push and no pull",)),
            (([x, x], [1, 1], [], []), None, ValueError, ("both have key 1",)),
            (([x], [1], y, [1, 1]), [1, 1], ValueError, ("server 1 is there twice",)),
            (([x], [1], y[:1], [1]), [2], ValueError, ("there is no server 2",)),
            (([x], [1], y[:1], [1]), [2**70], ValueError, ("servers",)),
            (([x], [1], [], []), [], ValueError, ("to no server",)),
            (([x], [1], [], []), 1, TypeError, ("servers",)),
            ((3, [1], [], []), None, TypeError, ("push_tensors",)),
            (([x], [-1], [], []), None, ValueError, ("push_keys[0]",))):
        with n.raises(classes, *words):
            f.prepare(*args, servers=servers)
    e = f.prepare([x], [1], y, [1, 1])
    with n.raises((), "not started", "start() first"):
        e.wait()
    for rows, classes, words in ((5, ValueError, ("5 rows", "push tensor 0 (key 1)", "has 4")), (-1, ValueError, ("rows", "-1")), (2**70, ValueError, ("rows",)),
                                 (2**62, ValueError, ("rows",)), ("2", TypeError, ("rows", "'2'")), (1.0, TypeError, ("rows",))):
        with n.raises(classes, *words):
            e.start(rows)
    e.start()
    with n.raises((), "started already", "wait for its last call first"):
        e.start()
    with n.raises(ValueError, "timeout_ms"):
        e.wait(-1)
    e.wait(None)
    with n.raises((), "not started"):
        e.wait()
    f.wait(e.start(rows=2))  # wait() accepts its handler
    e.start()
    e.close()  # the round continues
    e.wait()
    e.close()
    with n.raises((), "closed"):
        e.start()
    with n.raises(TypeError, "Exchange"):
        type(e)()
    after = f.prepare([x], [1], [], [], servers=[0])
    with n.raises(TimeoutError, "server 0", "50ms"):
        after.start()
        after.wait(50)
    n.tell("rounds done")
    n.listen()
    f.stop()
    with n.raises((), "closed"):
        after.start()
    with n.raises((), "stop"):
        f.prepare([x], [1], y, [1, 1])
    del after


def refused_server(n):
    with n.raises((), "prepare", "only a worker"):
        n.f.prepare([n.lib.zeros("uint8", (1,))], [1], [], [])
    for _ in range(3):
        (handler, (t,), _), = n.f.get_batch()
        n.f.respond([t], handler)
    n.listen()


def test_refused(cluster):
    c = cluster(servers=2, lib=HOST)
    (worker,), servers = c.start(refused_worker, refused_server)
    assert worker.hear() == "rounds done"
    for p in [worker, *servers]:
        p.tell("go on")
    c.finish()


# The memory belongs to the exchange until it is released.

class Memory:
    """An array that can be watched, by its array interface."""

    def __init__(self, size):
        import ctypes

        self.buffer = ctypes.create_string_buffer(size)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (ctypes.addressof(self.buffer), False), "strides": None}


def memory_worker(n):
    f = n.f
    x, y = Memory(8), Memory(8)
    x.buffer.raw = b"abcdefgh"
    alive = [weakref.ref(x), weakref.ref(y)]
    data = y.buffer
    e = f.prepare([x], [1], [y], [1])
    del x, y
    for _ in range(3):
        gc.collect()
        e.start()
        e.wait()
        assert data.raw == bytes(b ^ 1 for b in b"abcdefgh") and all(r() for r in alive)
    e.start()
    before = [r() is not None for r in alive]
    del e  # in flight
    assert before == [True, True]
    n.tell("dropped")
    end = time.monotonic() + 20
    while any(r() for r in alive) and time.monotonic() < end:
        f.get_all_handlers(0)  # each call releases objects that are no longer needed
        time.sleep(0.01)
    assert not any(r() for r in alive)
    for _ in range(300):  # memory does not grow, and no index is confused
        x, y = Memory(1), Memory(1)
        x.buffer.raw = b"\x07"
        e = f.prepare([x], [1], [y], [1])
        alive = weakref.ref(y)
        e.start(1)
        e.wait()
        assert y.buffer.raw == b"\x06"
        del e, x, y
        assert alive() is None


def memory_server(n):
    for _ in range(304):
        masked(n)


def test_memory(cluster):
    cluster(lib="numpy").run(memory_worker, memory_server)


def swapped_worker(n):
    import torch

    x, y = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    old = y.numpy()
    e = n.f.prepare([x], [1], [y], [1])
    y.data = torch.zeros(4, dtype=torch.uint8)
    e.start()
    e.wait()
    assert old.tolist() == [1] * 4 and y.tolist() == [0] * 4


def swapped_server(n):
    masked(n)


@pytest.mark.skipif(HOST != "torch", reason="torch.Tensor.data is PyTorch's")
def test_swapped_data(cluster):
    cluster(lib="torch").run(swapped_worker, swapped_server)


# Several exchanges at once, from several threads.

def threads_worker(n):
    f, lib = n.f, n.lib
    wrong = []

    def rounds(k):
        x, y = lib.zeros("uint8", (64,)), lib.zeros("uint8", (64,))
        e = f.prepare([x], [k], [y], [k])
        for i in range(100):
            write(n, x, bytes([(k * 50 + i) % 256] * 64))
            e.start()
            e.wait()
            if lib.bytes(y) != bytes([((k * 50 + i) % 256) ^ 1] * 64):
                wrong.append((k, i))

    threads = [threading.Thread(target=rounds, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong


def threads_server(n):
    for _ in range(400):
        masked(n)


def test_threads(cluster):
    cluster(lib=HOST).run(threads_worker, threads_server)


# A lost server, its replacement, and Ctrl-C.

def lost_worker(n):
    f, lib = n.f, n.lib
    x, y = lib.make("uint8", (2,), b"\x08\x08"), lib.zeros("uint8", (2,))
    e = f.prepare([x], [1], [y], [1])
    e.start()
    e.wait()
    e.start()
    n.tell("started")
    with n.raises(ConnectionError, "server 0"):
        e.wait()
    e.start()
    with n.raises(ConnectionError, "server 0"):
        e.wait()
    n.tell("lost")
    n.listen()
    write(n, y, b"\0\0")
    end = time.monotonic() + 20
    while True:
        try:
            e.start()
            e.wait()
            break
        except ConnectionError:  # a message about the replacement may be in flight
            assert time.monotonic() < end
            time.sleep(0.05)
    assert lib.bytes(y) == b"\x09\x09"
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    e.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        e.wait(20000)
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        pass
    with n.raises((), "started already"):
        e.start()
    n.tell("interrupted")
    e.wait(20000)
    e.close()


@harness.by_hand
def lost_server(n):
    n.f.init()
    if n.args == "first":
        masked(n)
        n.f.get_batch()
        n.tell("held")
        n.listen()
        return
    masked(n)
    (handler, tensors, _), = n.f.get_batch()
    n.tell("held")
    n.listen()
    n.f.respond(tensors, handler)
    n.f.stop()


def test_replaced(cluster):
    c = cluster(lib=HOST, env={"PS_HEARTBEAT_INTERVAL": "1", "PS_HEARTBEAT_TIMEOUT": "3"})
    (worker,), (server,) = c.start(lost_worker, lost_server, args="first")
    assert worker.hear() == "started" and server.hear() == "held"
    server.kill()
    c.processes.remove(server)
    assert worker.hear() == "lost"
    second = c.spawn("server", lost_server, args="second")
    worker.tell("go on")
    assert worker.hear() == "interrupted" and second.hear() == "held"
    second.tell("answer")
    c.finish()

