"""A lack of memory in Python: a call that raises MemoryError has done nothing, or has canceled what it began, and may be made again."""

import functools
import select

import pytest

pytest.importorskip("numpy", reason="its arrays are read without PyTorch's code")
capi = pytest.importorskip("_testcapi", reason="makes allocations fail")

SIZE = (16,)
ALLOCATIONS = 20  # more than a call makes


def without(allocation, call):
    """Makes a call during which one of Python's allocations fails, and again after a MemoryError. Returns its result, and whether
    there was a MemoryError."""
    import _testcapi

    _testcapi.set_nomemory(allocation, allocation + 1)
    try:
        result = call()
    except MemoryError:
        result = None
    finally:
        _testcapi.remove_mem_hooks()
    return (result, False) if result is not None else (call(), True)


def strided_worker(n):
    """Without memory for the name of its part, an array that is not contiguous is not taken for one that is."""
    array = n.lib.make("uint8", (32,), bytes(range(32)))[::2]

    class Strided:  # NumPy 1 crashes when it has no memory for the dict
        __array_interface__ = array.__array_interface__

    strided = Strided()
    pull, failed = n.lib.zeros("uint8", SIZE), 0
    for i in range(ALLOCATIONS):
        try:
            without(i, functools.partial(n.f.push_pull, [strided], [1], [pull], [1]))  # Python 3.11 needs memory to call a lambda
        except n.f.ValueError:  # without memory it may have no text
            failed += 1
    assert failed == ALLOCATIONS
    answered_worker(n)


def answered_worker(n):
    for i in range(ALLOCATIONS):
        pull = n.lib.zeros("uint8", SIZE)
        n.f.wait(n.f.push_pull([n.lib.make("uint8", SIZE, bytes([i]) * 16)], [1], [pull], [1]))
        assert n.lib.bytes(pull) == bytes([i]) * 16


def answering_server(n):
    failed = 0
    for i in range(ALLOCATIONS):
        (handler, tensors, _), = n.f.get_batch()
        answer, is_again = without(i, lambda: n.f.respond(tensors, handler))
        answer.wait(60000)
        failed += is_again
    assert failed > 0


def begun_worker(n):
    """Without memory for its number, a request is canceled."""
    arrays = n.lib.make("uint8", SIZE, bytes(16)), n.lib.zeros("uint8", SIZE)
    x, y = (type("Memory", (), {"__array_interface__": a.__array_interface__})() for a in arrays)  # NumPy 1 crashes when it has no memory for the dict
    handler = -1
    while handler < 300:  # Python has the small numbers already
        handler = n.f.push_pull([x], [1], [y], [1])
        n.f.wait(handler)
    failed = 0
    for i in range(ALLOCATIONS):
        handler, is_again = without(i, functools.partial(n.f.push_pull, [x], [1], [y], [1]))
        n.f.wait(handler)
        failed += is_again
    assert failed > 0
    exchange, failed = n.f.prepare([x], [1], [y], [1]), 0
    for i in range(ALLOCATIONS):
        handler, is_again = without(i, exchange.start)
        exchange.wait()
        failed += is_again
    assert failed > 0
    n.f.push_pull([x], [1], [y], [1])
    while not select.select([n.f.fileno()], [], [], 60)[0]:
        pass
    n.f.wait(handler + 2)
    assert not select.select([n.f.fileno()], [], [], 0)[0], "a request has ended whose number is lost"


def begun_server(n):
    try:
        while True:
            for handler, tensors, _ in n.f.get_batch():
                n.f.respond(tensors, handler)
    except n.f.Finished:
        pass


def test_push_pull(cluster):
    cluster(lib="numpy").run(begun_worker, begun_server)


def test_init():
    """Without memory for the name of a module, the module is not taken for one that the program has not imported."""
    import fserver_lib

    capi.set_nomemory(0, 1)
    try:
        fserver_lib.init()
        wrong = None
    except (MemoryError, fserver_lib.Error) as e:
        wrong = e
    finally:
        capi.remove_mem_hooks()
    assert isinstance(wrong, MemoryError), wrong


def test_respond(cluster):
    cluster(lib="numpy").run(answered_worker, answering_server)


def test_strides(cluster):
    cluster(lib="numpy").run(strided_worker, answering_server)
