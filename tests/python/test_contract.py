"""Calls that inference engines make, and that every version of this module must accept.

The tests of this file cover what the other files do not. Elsewhere are:

- keys that are a range, NumPy integers or int64 arrays: test_calls.test_sequences_and_types
- one tensor without a device where four GPU tensors are usual: test_consumers.test_sglang, test_gpu.test_mixed
- pulls that are no multiple of the servers, a second init(): test_misuse.test_misuse
- batches of more than 30 workers: TestManyWorkers in fserver/core
- a fork before init(): test_ends.test_fork_before_init, test_before_fork
"""

import queue
import threading

import arrays
import pytest
from harness import by_hand

ROUNDS, SIZE = 4, 96


def data(rank, i):
    return arrays.pattern(rank * 1000 + i, "uint8", (SIZE,))


def empty_init(n):
    """init() with the arguments that other builds of StepMesh take."""
    with n.raises(ValueError, "init", "'/opt/backend.so'", "STEPMESH_BAKCEND", "missing"):
        n.f.init("/opt/backend.so")
    for path in (7, b"", None):
        with n.raises(TypeError, "init", "path", repr(path)):
            n.f.init(path)
    n.f.init("")
    with n.raises((), "init() was called already"):
        n.f.init("")


# Every worker uses the same keys, and pulls one tensor from each server. Threads of the server other than the one that calls
# get_batch respond.

@by_hand
def one_pull_worker(n):
    f, lib = n.f, n.lib
    empty_init(n)
    for i in range(ROUNDS):
        pulls = [lib.zeros("uint8", (SIZE,)) for _ in range(n.servers)]
        handler = f.push_pull([lib.make("uint8", (SIZE,), data(n.rank, i))], range(7, 8), pulls, range(8, 8 + n.servers))
        f.wait(handler, 60000) if i % 2 else f.wait(handler, timeout_ms=100000)
        for server, pull in enumerate(pulls):
            assert lib.bytes(pull) == bytes(b ^ server for b in data(n.rank, i)), (i, server)
    # Tensors without elements.
    pulls = [lib.zeros("uint8", (0, 4)) for _ in range(n.servers)]
    f.wait(f.push_pull([lib.zeros("uint8", (0, 4))], [7], pulls, range(8, 8 + n.servers)))
    if n.servers == 1:  # one tensor as push and pull
        both = lib.zeros("uint8", (SIZE,))
        f.wait(f.push_pull([both], [1], [both], [2]), timeout_ms=100000)
        assert lib.bytes(both) == b"\x01" * SIZE
    f.finalize()
    f.finalize()
    f.stop()


@by_hand
def one_pull_server(n):
    f, lib = n.f, n.lib
    empty_init(n)
    work, failed = queue.Queue(), []

    def responder():
        try:
            for handler, tensor, number in iter(work.get, None):
                f.respond([lib.make("uint8", lib.shape(tensor), bytes(b ^ number for b in lib.bytes(tensor)))], handler, True)
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=responder) for _ in range(2)]
    for t in threads:
        t.start()
    for i in range(ROUNDS + 1):
        batches = f.get_batch()
        assert len(batches) == n.workers
        for rank, (handler, (tensor,), keys) in enumerate(batches):  # in the order of ranks
            assert keys == [7] and lib.shape(tensor) == ((SIZE,) if i < ROUNDS else (0, 4))
            assert lib.bytes(tensor) == (data(rank, i) if i < ROUNDS else b""), (i, rank)
            work.put((handler, tensor, n.rank))
    if n.servers == 1:
        for handler, (tensor,), _ in f.get_batch():
            work.put((handler, tensor, 1))
    for _ in threads:
        work.put(None)
    for t in threads:
        t.join()
    assert not failed, failed
    f.finalize(timeout_ms=30000)


@pytest.mark.parametrize("servers", (1, 3, 8))
def test_one_pull_from_each_server(cluster, servers):
    cluster(workers=2, servers=servers).run(one_pull_worker, one_pull_server)


def test_one_pull_from_each_server_in_arrays(cluster, lib):
    cluster(workers=1, servers=1, lib=lib).run(one_pull_worker, one_pull_server)
