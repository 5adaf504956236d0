"""Windows in host memory (open_window), among workers: values, endings, misuse. GPU windows are in
test_gpu_windows.py."""

import gc
import signal
import time

import arrays
import harness
import pytest
from harness import within

HOST = "torch" if "torch" in harness.libraries() else "numpy"
SIZES = (1, 4096, 100_000, 3 << 20)


def idle(n):
    """A server without requests."""


def pattern(size, seed):
    return arrays.pattern(seed, "uint8", (size,))


def bytes_of(n, t, first, size):
    """Returns bytes of a window, whose tensor is one of the array library or a fserver_lib.Tensor."""
    if not hasattr(t, "tobytes") and type(t) is n.f.Tensor:
        import numpy
        t = numpy.from_dlpack(t)
    return n.lib.bytes(t)[first:first + size]


def opened(n, size, signals=1, **kw):
    c = n.f.Communicator(list(range(n.workers)), timeout_ms=20000)
    return c, c.open_window(size, signals, **kw)


def ring(n):
    """Each rank writes to the next one, and answers received data with values derived from it."""
    lib, count = n.lib, n.workers
    after, before = (n.rank + 1) % count, (n.rank - 1) % count
    for own in (False, True):  # memory of the library, or of the program
        room = max(SIZES) + 64
        c, w = opened(n, lib.zeros("uint8", (room,)) if own else room, 3, device="cpu" if own else None)
        for k, size in enumerate(SIZES):
            for i in range(6):
                x = lib.make("uint8", (size,), pattern(size, 100 * k + 10 * i + n.rank))
                w.put(after, 64, x)
                w.signal(after, 2)
                w.wait_signal(before, 2)
                got = bytes_of(n, w.tensor, 64, size)
                assert got == pattern(size, 100 * k + 10 * i + before), (own, size, i)
                y = lib.make("uint8", (4,), bytes(got[:1]) * 4)
                w.put_signal(before, 4 * i, y, 1)
                w.wait_signal(after, 1)
                assert bytes_of(n, w.tensor, 4 * i, 4) == bytes(pattern(size, 100 * k + 10 * i + n.rank)[:1]) * 4
                w.flush(after)
                w.flush(before)
        w.put_signal(n.rank, 0, lib.make("uint8", (3,), b"abc"))  # to itself
        w.wait_signal(n.rank)
        assert bytes_of(n, w.tensor, 0, 3) == b"abc"
        w.check()
        c.barrier()
        t = w.tensor
        w.close()
        with n.raises((), "closed"):
            w.put(after, 0, t)
        c.close()
        del w, c
        gc.collect()
        assert bytes_of(n, t, 0, 3) == b"abc"  # it outlives its window
        n.f.barrier(False, True)
        del t


@pytest.mark.parametrize("ipc", ["0", "1"], ids=["zmq", "shm"])
def test_values(cluster, ipc):
    cluster(workers=3, servers=1, lib=HOST, env={"BYTEPS_ENABLE_IPC": ipc}).run(ring, idle, timeout=120)


def source(n):
    """The library keeps put data until it is sent, even if the program does not."""
    lib = n.lib
    c, w = opened(n, 4 << 20)
    if n.rank == 0:
        for i in range(40):
            w.put_signal(1, 0, lib.make("uint8", (4 << 20,), bytes([i]) * (4 << 20)))
            gc.collect()
            w.wait_signal(1)
    else:
        for i in range(40):
            w.wait_signal(0)
            assert bytes_of(n, w.tensor, 0, 4 << 20) == bytes([i]) * (4 << 20), i
            w.signal(0)
    c.barrier()
    w.close()


def test_source_is_kept(cluster):
    cluster(workers=2, servers=1, lib=HOST, env={"BYTEPS_ENABLE_IPC": "0"}).run(source, idle, timeout=120)


class NoMemory:
    """An argument whose attribute cannot be read for lack of memory."""

    @property
    def __dlpack__(self):
        raise MemoryError("mine")


def misuse(n):
    f, lib = n.f, n.lib
    c, w = opened(n, 64, 2)
    x = lib.make("uint8", (4,), b"1234")
    for call, names in (
            (lambda: w.put(0, 61, x), "beyond the 64"), (lambda: w.put(0, -1, x), "offset -1"),
            (lambda: w.signal(0, 2), "signal 2"), (lambda: w.signal(0, -1), "want 0 or more"),
            (lambda: w.flush(2), "rank 2"), (lambda: w.wait_signal(-1), "rank -1"),
            (lambda: w.put_signal(1, 0, x, 2), "signal 2"), (lambda: w.wait_signal(0, timeout_ms=-1), "timeout_ms is -1"),
            (lambda: c.open_window(1, device="tpu"), "device is 'tpu'")):
        with n.raises(f.ValueError, names):
            call()
    for call, names in ((lambda: w.put(0, 0, b"1234"), "x"), (lambda: w.put("0", 0, x), "rank"),
                        (lambda: c.open_window("1"), "size"), (lambda: f.Window(), "open_window")):
        with n.raises((f.Error, TypeError), names):
            call()
    with pytest.raises(MemoryError, match="mine"):
        c.open_window(NoMemory())
    with n.raises((), "GPU"):
        c.open_window(64, device="cuda")
    c.rebuild()  # the killed rank may have made it fail
    c.barrier()
    begun = time.monotonic()
    v = c.open_window(64)
    with n.raises(f.TimeoutError, "signal 0 has not arrived", "worker %d" % (1 - n.rank), "limit 300ms"):
        v.wait_signal(1 - n.rank, timeout_ms=300)
    assert 0.29 < time.monotonic() - begun < within(15)
    c.barrier()
    v.signal(1 - n.rank)  # the failed wait has consumed none
    v.wait_signal(1 - n.rank)
    for size in (64 + n.rank, -1, 1 << 50):  # sizes that differ or are invalid
        with n.raises((f.Error, MemoryError)):
            c.open_window(size)
        c.rebuild()
    c.close()


def test_misuse(cluster):
    cluster(workers=2, servers=1, lib=HOST).run(misuse, idle, timeout=120)


def closing(n):
    """A rank that closes its end does not affect calls between the other ranks."""
    c, w = opened(n, 64)
    other = 3 - n.rank
    x = n.lib.make("uint8", (2,), b"xy")
    if n.rank == 0:
        w.put_signal(1, 8, x)
        w.put_signal(2, 8, x)
        w.close()
    else:
        w.wait_signal(0)  # the earlier signal counts
        assert bytes_of(n, w.tensor, 8, 2) == b"xy"
        with n.raises((), "worker 0"):
            w.wait_signal(0)
        with n.raises((), "worker 0"):
            w.put(0, 0, x)
        w.put_signal(other, 0, x)
        w.wait_signal(other)
        w.check()
    c.barrier()
    w.close()


def test_closing(cluster):
    cluster(workers=3, servers=1, lib=HOST).run(closing, idle, timeout=120)


def killed(n):
    c, w = opened(n, 64)
    w.signal(1 - n.rank)
    w.wait_signal(1 - n.rank)
    n.tell("ready")
    if n.rank == 1:
        time.sleep(60)
    begun = time.monotonic()
    with n.raises(n.f.ConnectionError, "worker 1"):
        w.wait_signal(1)
    assert time.monotonic() - begun < within(15)
    with n.raises(n.f.ConnectionError, "worker 1"):
        w.check()
    w.close()
    n.tell("told")
    time.sleep(60)


def test_killed(cluster):
    c = cluster(workers=2, servers=1, lib=HOST)
    (a, b), _ = c.start(killed, idle)
    assert a.hear() == b.hear() == "ready"
    b.kill()
    assert a.hear() == "told", a.report()


def interrupted(n):
    c, w = opened(n, 64)
    n.f.barrier(False, True)
    if n.rank == 0:
        n.interrupted(w.wait_signal, 1, timeout_ms=60000)
        n.f.barrier(False, True)
        w.wait_signal(1)  # none was consumed
    else:
        n.f.barrier(False, True)
        w.signal(0)
    c.barrier()
    w.close()


def test_ctrl_c(cluster):
    c = cluster(workers=2, servers=1, lib=HOST)
    (a, _), _ = c.start(interrupted, idle)
    assert a.hear() == "waiting"
    a.signal(signal.SIGINT)
    assert a.hear() == "interrupted", a.report()
    c.finish(60)
