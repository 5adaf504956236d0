"""Calls that fail half-way leave nothing behind, and errors have the classes that the
help texts promise."""

import gc
import weakref

import pytest

numpy = pytest.importorskip("numpy", reason="weak references to its arrays tell who holds them")


class Held(numpy.ndarray):
    """An array that weak references can point to, whatever NumPy's version."""


def held(size):
    a = numpy.zeros(size, dtype=numpy.uint8).view(Held)
    return a, weakref.ref(a)


# register_recv_buffer that is refused

REFUSED = (  # worker ranks, keys, words
    ([0, 99], [1, 2], ("worker rank 99",)),
    ([0, 0], [1, 1], ("key 1", "twice")),
    ([0, 0], [1, 9], ("key 9", "already")),
)


def refused_server(n):
    f = n.f
    taken, kept = held(4)
    f.register_recv_buffer(taken, [0], [9])
    del taken
    for ranks, keys, words in REFUSED:
        a, gone = held(8)
        with n.raises(ValueError, *words):
            f.register_recv_buffer(a, ranks, keys)
        del a
        with n.raises((), "handler"):
            f.respond([], 1 << 40)  # any call drops what Go has given back
        gc.collect()
        assert gone() is None, (ranks, keys)
    a, kept2 = held(8)
    f.register_recv_buffer(a, [0, 0], [1, 2])
    view = numpy.asarray(a)
    del a
    gc.collect()
    n.tell("registered")
    (handler, tensors, keys), = f.get_batch()
    assert keys == [1, 2, 9]
    f.respond([], handler)
    assert kept() is not None and kept2() is not None
    assert bytes(view) == b"aaaabbbb" and bytes(numpy.asarray(kept())) == b"cccc"


def refused_worker(n):
    n.listen()
    push = [numpy.full(4, c, dtype=numpy.uint8) for c in b"abc"]
    n.f.wait(n.f.push_pull(push, [1, 2, 9], [], []))


def test_refused_registration(cluster):
    c = cluster(lib="numpy")
    (worker,), (server,) = c.start(refused_worker, refused_server)
    assert server.hear() == "registered"
    worker.tell("go")
    c.finish()
