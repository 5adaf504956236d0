"""Collectives among workers, and among servers: values, misuse, ranks that differ or are killed."""

import gc
import signal
import time

import arrays
import harness
import pytest
from harness import within

HOST = "torch" if "torch" in harness.libraries() else "numpy"


def make(n, seed, shape, dtype="float32"):
    return n.lib.make(dtype, shape, arrays.pattern(seed, dtype, shape))


def data(seed, shape, dtype="float32"):
    return arrays.pattern(seed, dtype, shape)


def ints(n, values):
    return n.lib.make("int32", (len(values),), b"".join(int(v).to_bytes(4, "little", signed=True) for v in values))


def numbers(n, t):
    b = n.lib.bytes(t)
    return [int.from_bytes(b[i:i + 4], "little", signed=True) for i in range(0, len(b), 4)]


def every_call(n, c, rank, size):
    """Each collective of c, the module or a Communicator, over several sizes."""
    f, lib = n.f, n.lib
    for k in (1, 7, 3000):
        shape = (k, 2)

        def seed(i, j=0):
            return 1000 * k + 10 * i + j

        x, out = make(n, seed(rank), shape), lib.zeros("float32", (size,) + shape)
        f.wait(c.all_gather(out, x))
        joined = b"".join(data(seed(r), shape) for r in range(size))
        assert lib.bytes(out) == joined, ("all_gather", k)

        outs = [lib.zeros("float32", (k, r)) for r in range(size)]  # rank 0 sends nothing
        c.all_gather_v(outs, make(n, seed(rank), (k, rank))).wait()
        assert [lib.bytes(t) for t in outs] == [data(seed(r), (k, r)) for r in range(size)], ("all_gather_v", k)

        outs = [lib.zeros("float32", (k, r + rank)) for r in range(size)]
        c.all_to_all(outs, [make(n, seed(rank, r), (k, r + rank)) for r in range(size)]).wait(timeout_ms=20000)
        assert [lib.bytes(t) for t in outs] == [data(seed(r, rank), (k, r + rank)) for r in range(size)], ("all_to_all", k)

        for root in range(size):
            x = make(n, seed(root), shape) if rank == root else lib.zeros("float32", shape)
            f.wait(c.broadcast(x, root), 20000)
            assert lib.bytes(x) == data(seed(root), shape), ("broadcast", k)
            whole = lib.zeros("float32", (size,) + shape) if rank == root else None
            c.gather(whole, make(n, seed(rank), shape), root=root).wait()
            assert rank != root or lib.bytes(whole) == joined, ("gather", k)
            part = lib.zeros("float32", shape)
            c.scatter(part, whole, root=root).wait()
            assert lib.bytes(part) == data(seed(rank), shape), ("scatter", k)

        give = [i * (rank + 1) for i in range(k * size)]
        x, out, part = ints(n, give), lib.zeros("int32", (k * size,)), lib.zeros("int32", (k,))
        ops = [c.all_reduce(out, x), c.reduce_scatter(part, x, op="max")]  # two in flight
        del x
        gc.collect()
        for op in reversed(ops):
            op.wait()
        total = size * (size + 1) // 2
        assert numbers(n, out) == [i * total for i in range(k * size)], ("all_reduce", k)
        assert numbers(n, part) == [i * size for i in range(rank * k, rank * k + k)], ("reduce_scatter", k)


def values_server(n):
    c = n.f.Communicator([0, 1])
    every_call(n, c, c.rank, c.size)
    n.f.barrier(True, True)


def values_worker(n):
    f = n.f
    c = f.Communicator(range(n.workers), id=2, timeout_ms=30000)
    assert (c.rank, c.size) == (n.rank, n.workers)
    every_call(n, c, c.rank, c.size)
    c.barrier()
    x, out = ints(n, [n.rank]), n.lib.zeros("int32", (1,))
    f.all_gather(out, x).wait()  # the group has only this process
    assert numbers(n, out) == [n.rank]
    c.close()
    with n.raises((), "closed"):
        c.all_gather(n.lib.zeros("int32", (n.workers,)), x)
    with n.raises((), "closed"):
        c.barrier()
    with n.raises((), "closed"):
        c.rebuild()
    f.barrier(True, True)


@pytest.mark.parametrize("env", [{}, {"BYTEPS_ENABLE_IPC": "0"}], ids=["shm", "zmq"])
def test_values(cluster, env):
    cluster(workers=3, servers=2, lib=HOST, env=env).run(values_worker, values_server)


def group_worker(n):
    """The functions of the module use the instances of the group."""
    f, lib = n.f, n.lib
    every_call(n, f, n.instance, n.group)
    f.barrier(True, True)


def group_server(n):
    n.f.barrier(True, True)


def test_group(cluster):
    cluster(workers=2, servers=1, group=2, lib=HOST).run(group_worker, group_server)


class OnGPU:
    """An object that claims to be on a GPU, on a machine without one."""

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **kw):
        raise AssertionError("its memory is not asked for")


def misuse_worker(n):
    f, lib = n.f, n.lib
    V, T = f.ValueError, f.TypeError
    with n.raises(V, "id", "0", "1 to 4095"):
        f.Communicator([0, 1], id=0)
    with n.raises(V, "id", "5000", "1 to 4095"):
        f.Communicator([0, 1], id=5000)
    with n.raises(V, "rank 7", "0 to 1"):
        f.Communicator([0, 7])
    with n.raises(V, "ascending"):
        f.Communicator([1, 0])
    with n.raises(V, "among them"):
        f.Communicator([1 - n.rank])
    with n.raises(T, "ranks"):
        f.Communicator("01")
    with n.raises(V, "timeout_ms", "-1"):
        f.Communicator([0, 1], timeout_ms=-1)
    c = f.Communicator([0, 1])
    with n.raises((), "1"):  # a second communicator with that ID
        f.Communicator([0, 1])
    x, out, half = (lib.zeros("float32", (k,)) for k in (4, 8, 6))
    with n.raises(V, "out", "want 32"):
        c.all_gather(half, x)
    with n.raises(V, "float32", "int32"):
        c.all_gather(lib.zeros("int32", (8,)), x)
    with n.raises(T, "x"):
        c.all_gather(out, None)
    with n.raises(T, "out"):
        c.all_gather("out", x)
    with n.raises(T, "out"):
        c.all_gather_v(out=3, x=x)
    with n.raises(V, "out", "2"):
        c.all_gather_v([x], x)
    with n.raises(V, "root", "2", "0 to 1"):
        c.broadcast(x, 2)
    with n.raises(T, "root"):
        c.broadcast(x, "0")
    with n.raises(V, "op", "mean", "sum, min, max or product"):
        c.all_reduce(x, x, op="mean")
    with n.raises(T, "op"):
        c.all_reduce(x, x, op=1)
    with n.raises((V, T), "x"):
        c.all_gather(out, OnGPU())
    with n.raises(T, "Operation"):
        f.Operation()
    with n.raises(V, "timeout_ms"):
        c.barrier(timeout_ms=-5)
    op = c.all_gather(out, x)  # nothing was sent by the calls above
    with n.raises(V, "timeout_ms"):
        op.wait(timeout_ms=-1)
    op.wait()
    op.wait()  # a second wait has the same result

    def again():
        c.rebuild()
        c.all_gather(out, x).wait()

    # Calls that do not match: both ranks get an error that names both calls.
    for mine, theirs in (
            (lambda: c.all_gather(out, x), lambda: c.all_to_all([lib.zeros("float32", (k,)) for k in (4, 6)], [x, half])),
            (lambda: c.all_gather(out, x), lambda: c.all_gather(lib.zeros("float32", (12,)), half)),
            (lambda: c.all_gather(out, x), lambda: c.all_gather(lib.zeros("int32", (8,)), lib.zeros("int32", (4,)))),
            (lambda: c.all_reduce(out, out), lambda: c.all_reduce(out, out, "max"))):
        if n.rank == 0:
            with n.raises((), "do not match"):
                mine().wait()
        else:
            with n.raises((), "do not match"):
                theirs().wait()
        with n.raises((), "communicator"):
            c.all_gather(out, x)
        again()
    # A rank that does not call.
    if n.rank == 0:
        begin = time.monotonic()
        with n.raises(f.TimeoutError, "worker 1"):
            c.all_gather(out, x).wait(timeout_ms=300)
        assert time.monotonic() - begin < within(8)
        f.barrier(False, True)
    else:
        f.barrier(False, True)
        with n.raises((), "worker 0"):
            c.all_gather(out, x).wait()
    again()
    del c
    f.barrier(False, True)


def test_misuse(cluster):
    cluster(workers=2, servers=1, lib=HOST).run(misuse_worker, idle_server)


def idle_server(n):
    pass


def lives_worker(n):
    """Communicators and tensors without references, and limits of one call."""
    f, lib = n.f, n.lib
    x, out = ints(n, [n.rank]), lib.zeros("int32", (2,))
    f.Communicator([0, 1]).all_gather(out, x).wait()  # the call keeps its communicator
    assert numbers(n, out) == [0, 1]
    for i in range(5):  # the id of a dropped communicator is free
        c = f.Communicator([0, 1], timeout_ms=3000)
        c.barrier(timeout_ms=20000)
        if (n.rank, i) == (1, 0):
            time.sleep(3.5)
        c.barrier(timeout_ms=20000)  # longer than the communicator's limit
        del c
    c = f.Communicator([0, 1])
    with n.raises(f.ValueError, "ID 1", "close this node's other communicator"):
        f.Communicator([0, 1])
    if HOST == "torch":
        c.barrier()
        t = lib.make("float32", (50_000,), data(n.rank, (50_000,)))
        op = c.broadcast(t, 0)
        t.data = lib.zeros("float32", (3,))  # the library keeps the old memory
        op.wait()
    c.close()
    c.close()
    f.barrier(False, True)


def test_lives(cluster):
    cluster(workers=2, servers=1, lib=HOST).run(lives_worker, idle_server, timeout=120)


def late_worker(n):
    """rebuild() of the module on a rank that has no communicator yet."""
    f, lib = n.f, n.lib
    x, out = ints(n, [n.instance]), lib.zeros("int32", (2,))
    if n.instance == 0:
        with n.raises(f.TimeoutError, "worker 1"):
            f.rebuild(timeout_ms=300)
    f.barrier(False, True)
    f.rebuild(timeout_ms=30000)
    f.all_gather(out, x).wait()
    assert numbers(n, out) == [0, 1]
    f.rebuild()
    f.all_gather(out, x).wait()
    f.barrier(True, True)


def test_group_is_rebuilt(cluster):
    cluster(workers=1, servers=1, group=2, lib=HOST).run(late_worker, group_server, timeout=120)


# A rank is killed inside a call.

def killed_worker(n):
    f, lib = n.f, n.lib
    ranks = list(range(n.workers))
    c = f.Communicator(ranks, timeout_ms=20000)
    x, out = make(n, n.rank, (50_000,)), lib.zeros("float32", (n.workers, 50_000))
    n.tell("made")
    while True:
        begin = time.monotonic()
        try:
            c.all_gather(out, x).wait()
            assert lib.bytes(out) == b"".join(data(r, (50_000,)) for r in ranks)
        except f.Error as e:
            n.tell([type(e).__name__, str(e), time.monotonic() - begin])
            break
    with n.raises((), "communicator"):
        c.all_gather(out, x)
    c.close()
    rest = f.Communicator([0, 1], id=2)  # continues without the killed rank
    every_call(n, rest, rest.rank, rest.size)
    n.tell("went on")
    time.sleep(60)


@pytest.mark.parametrize("env", [{}, {"BYTEPS_ENABLE_IPC": "0"}], ids=["shm", "zmq"])
def test_killed(cluster, env):
    c = cluster(workers=3, servers=1, lib=HOST, env=env)
    workers, _ = c.start(killed_worker, idle_server)
    for w in workers:
        assert w.hear() == "made"
    time.sleep(0.3)
    workers[2].kill()
    for w in workers[:2]:
        kind, text, took = w.hear()
        assert "worker 2" in text and took < 15, (kind, text, took)
        assert w.hear() == "went on"


ARRAYS = [lib for lib in ("numpy", "jax") if lib in harness.libraries()]


def arrays_worker(n):
    """Inputs may be any arrays; results need writable memory."""
    import numpy

    c = n.f.Communicator([0, 1])
    x = make(n, n.rank, (5, 3))
    out = numpy.zeros((2, 5, 3), "float32")
    c.all_gather(out, x).wait()
    assert out.tobytes() == data(0, (5, 3)) + data(1, (5, 3))
    if n.rank == 0:
        c.broadcast(x, 0).wait()  # the root only reads it
    else:
        y = numpy.zeros((5, 3), "float32")
        c.broadcast(y, 0).wait()
        assert y.tobytes() == data(0, (5, 3))
    with n.raises(n.f.ValueError, "out", "read-only"):
        frozen = numpy.zeros((2, 5, 3), "float32")
        frozen.flags.writeable = False
        c.all_gather(frozen, x)
    n.f.barrier(False, True)


@pytest.mark.parametrize("lib", ARRAYS)
def test_arrays(cluster, lib):
    cluster(workers=2, servers=1, lib=lib).run(arrays_worker, idle_server)


def no_window_worker(n):
    f = n.f
    c = f.Communicator([0, 1], timeout_ms=20000)
    with n.raises(f.Error, "STEPMESH_BAKCEND"):
        c.open_window(100, device="cuda")
    with n.raises(f.Error, "STEPMESH_BAKCEND"):
        c.open_window(100, signals=2, device="cuda", timeout_ms=10000)
    with n.raises(f.TypeError, "size"):
        c.open_window("a")
    with n.raises(f.ValueError, "-1 signals"):
        c.open_window(100, -1)
    with n.raises(f.TypeError, "open_window"):
        f.Window()
    c.barrier()
    c.close()


def test_no_window(cluster):
    """GPU windows on machines without a GPU: all ranks get an error."""
    cluster(workers=2, servers=1, lib=HOST, env={"STEPMESH_BAKCEND": "CPU"}).run(no_window_worker, idle_server)


def ctrl_c(n):
    c = n.f.Communicator(list(range(n.workers)), timeout_ms=40000)
    out, x = n.lib.zeros("float32", (2 * n.workers,)), n.lib.zeros("float32", (2,))
    if n.rank == 0:
        op = c.all_gather(out, x)
        n.interrupted(op.wait)
        n.f.barrier(False, True)
        op.wait()  # it was not canceled
        n.interrupted(c.barrier)
        n.f.barrier(False, True)
    else:
        n.f.barrier(False, True)
        c.all_gather(out, x).wait()
        n.f.barrier(False, True)


def test_ctrl_c(cluster):
    """Ctrl-C ends the wait for a collective call that another rank has not begun."""
    c = cluster(workers=2, servers=1, lib=HOST)
    (w, _), _ = c.start(ctrl_c, idle_server)
    for _ in range(2):
        assert w.hear() == "waiting"
        began = time.monotonic()
        w.signal(signal.SIGINT)
        assert w.hear(20) == "interrupted", w.report()
        assert time.monotonic() - began < within(10)
    c.finish(60)
