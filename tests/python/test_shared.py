"""Tensors in memory that both processes map: empty_shared() and answer_tensor()."""

import ctypes
import os

import pytest
from arrays import pattern

SIZE = 100_000


def write(n, tensor, data):
    ctypes.memmove(n.lib.pointer(tensor), data, len(data))


def worker(n):
    f, lib = n.f, n.lib
    x, y, other = f.empty_shared(SIZE), f.empty_shared(SIZE), lib.zeros("uint8", (SIZE,))
    assert lib.shape(x) == (SIZE,) and not any(lib.bytes(x))
    assert lib.shape(f.empty_shared(0)) == (0,)
    for bad in (-1, 2**31, 2**63 - 1):
        with n.raises(ValueError, str(bad)):
            f.empty_shared(bad)
    with n.raises(TypeError, "size"):
        f.empty_shared("1")
    child = os.fork()
    if child == 0:  # shares the memory, also after its own reference has ended
        write(n, x, b"child")
        del x
        os._exit(0)
    os.waitpid(child, 0)
    assert lib.bytes(x)[:5] == b"child"
    for i in range(3):
        write(n, x, pattern(i, "uint8", (SIZE,)))
        f.wait(f.push_pull([x], [1], [y, other], [2, 3]))
        assert lib.bytes(y) == pattern(i + 10, "uint8", (SIZE,))
        assert lib.bytes(other) == pattern(i + 20, "uint8", (SIZE,))
    with n.raises((), "answer_tensor", "server"):
        f.answer_tensor(0)
    # The server answers late. Its writes do not reach the tensor.
    with n.raises(TimeoutError):
        f.wait(f.push_pull([x], [1], [y], [2]), timeout_ms=50)
    n.f.barrier(True, True)
    n.f.barrier(True, True)
    assert lib.bytes(y) == pattern(12, "uint8", (SIZE,))
    del x, y  # while the server still has its tensors
    n.f.barrier(True, True)


def server(n):
    f, lib = n.f, n.lib
    maps = "STEPAF_SHM_MAP" in n.env and "BYTEPS_ENABLE_IPC" not in n.env
    kept = []
    for i in range(3):
        (handler, (x,), _), = f.get_batch()
        out = f.answer_tensor(handler)
        assert (out is not None) == maps and f.answer_tensor(handler, i=1) is None
        for bad in (2, -1):
            with n.raises(ValueError, "pull %d" % bad, "2 pulls"):
                f.answer_tensor(handler, bad)
        if out is None:
            out = lib.zeros("uint8", (SIZE,))
        assert lib.bytes(x) == pattern(i, "uint8", (SIZE,))
        write(n, out, pattern(i + 10, "uint8", (SIZE,)))
        f.respond([out, lib.make("uint8", (SIZE,), pattern(i + 20, "uint8", (SIZE,)))], handler)
        with n.raises((), "answer_tensor", "handler %d was answered" % handler):
            f.answer_tensor(handler)
        kept += [x, out]
    (handler, _, _), = f.get_batch()
    late = f.answer_tensor(handler)
    n.f.barrier(True, True)
    if late is not None:
        write(n, late, pattern(99, "uint8", (SIZE,)))
    n.f.barrier(True, True)
    n.f.barrier(True, True)
    assert len(lib.bytes(kept[0])) == SIZE


@pytest.mark.parametrize("env", [{"STEPAF_SHM_MAP": "1"}, {}, {"STEPAF_SHM_MAP": "1", "BYTEPS_ENABLE_IPC": "0"}], ids=["mapped", "copied", "tcp"])
def test_shared(cluster, lib, env):
    if lib == "jax":
        lib = "numpy"  # JAX's arrays cannot be received into
    cluster(lib=lib, env=env).run(worker, server)
