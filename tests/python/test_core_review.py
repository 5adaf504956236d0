"""Calls that fail half-way leave nothing behind, and errors have the classes that the
help texts promise."""

import gc
import threading
import weakref

import pytest
from harness import by_hand

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
            f.respond([], 1 << 40)  # every call drops the objects that Go has returned
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


# stop() drops the references to tensors whose request has ended meanwhile.

def stopping_worker(n):
    (x, gone_x), (y, gone_y) = held(8), held(8)
    n.f.push_pull([x], [1], [y], [1])
    del x, y
    n.announce("in stop")
    n.f.stop()
    gc.collect()
    assert gone_x() is None and gone_y() is None


def stopping_server(n):
    (handler, tensors, _), = n.f.get_batch()
    n.listen()
    n.f.respond(tensors, handler)


def test_stop_releases(cluster):
    c = cluster(lib="numpy")
    (worker,), (server,) = c.start(stopping_worker, stopping_server)
    assert worker.hear() == "in stop"
    server.tell("answer")
    c.finish()


# The classes of errors about handlers: ValueError for an unknown handler, no more than Error
# for an answered one.

def handlers_worker(n):
    f = n.f
    push, pull = numpy.zeros(4, dtype=numpy.uint8), numpy.zeros(4, dtype=numpy.uint8)
    n.listen()
    h = f.push_pull([push], [1], [pull], [2])
    f.wait(h)
    f.wait(h)
    f.fetch_trace(h)
    for call in (f.wait, f.fetch_trace):
        for bad in (h + 2, -1, 2**31, 2**40):
            with n.raises(ValueError, "handler", str(bad)):
                call(bad)
    for _ in range(4096):  # traces
        f.wait(f.push_pull([push], [1], [], []))
    with n.raises(ValueError, "fetch_trace", "handler %d" % h):
        f.fetch_trace(h)
    n.tell("done")


def handlers_server(n):
    f = n.f
    with n.raises(ValueError, "unknown handler 0"):
        f.respond([], 0)
    n.tell("asked")
    (handler, tensors, _), = f.get_batch()
    for bad in (handler + 1, 2**63):
        with n.raises(ValueError, "unknown handler %d" % bad):
            f.respond(tensors, bad)
        with n.raises(ValueError, "unknown handler %d" % bad):
            f.respond_vec(tensors[0], tensors, [bad])
    f.respond(tensors, handler)
    for call in (lambda: f.respond(tensors, handler), lambda: f.respond_vec(tensors[0], tensors, [handler])):
        with n.raises((), "answered already") as e:
            call()
        assert not isinstance(e.error, ValueError), e.error
    for _ in range(4096):
        (handler, _, _), = f.get_batch()
        f.respond([], handler)


def test_handlers(cluster):
    c = cluster(lib="numpy")
    (worker,), (server,) = c.start(handlers_worker, handlers_server)
    assert server.hear() == "asked"
    worker.tell("go")
    c.finish()


# Threads that call init and stop at the same time: one node starts and stops, once.

@by_hand
def crowd(n):
    for call, others in ((n.f.init, n.f.Error), (n.f.stop, n.f.Error)):
        good, bad, go = [], [], threading.Barrier(8)

        def run():
            go.wait()
            try:
                call()
                good.append(1)
            except others as e:
                bad.append(str(e))

        threads = [threading.Thread(target=run) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(good) + len(bad) == 8 and good, (call, bad)
        assert call is n.f.stop or len(good) == 1, good  # after a stop there is nothing left to wait for
        assert all("another thread" in text or "called already" in text for text in bad), bad


def test_crowd(cluster):
    cluster(lib="numpy").run(crowd, crowd)
