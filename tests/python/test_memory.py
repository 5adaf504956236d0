"""A lack of memory in Python: a call that raises MemoryError has done nothing, and may be made again."""

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


def test_respond(cluster):
    cluster(lib="numpy").run(answered_worker, answering_server)
