"""Pushed and pulled tensors, numbers of workers and servers, and orders of arrival."""

import pytest
from arrays import pattern

SHAPE = (257,)


def tensor(n, seed):
    return n.lib.make("uint8", SHAPE, pattern(seed, "uint8", SHAPE))


# Every server answers pull j of a batch with its first push (or with random bytes), changed depending on server and
# pull.

def answer(first, server, pull):
    return bytes(b ^ (16 * server + pull + 1) for b in first)


def matrix_worker(n):
    for i, (pushes, pulls) in enumerate(n.args):
        seeds = [1000 * n.rank + 10 * i + p for p in range(pushes)]
        push = [tensor(n, s) for s in seeds]
        pull = [n.lib.zeros("uint8", SHAPE) for _ in range(pulls * n.servers)]
        # The same keys for every server, and the same as those of the pushes.
        h = n.f.push_pull(push, [100 + p for p in range(pushes)], pull, [100 + j for j in range(pulls)] * n.servers)
        assert n.f.get_all_handlers(h) == list(range(h, h + pushes + pulls))
        n.f.wait(h)
        first = pattern(seeds[0], "uint8", SHAPE) if pushes else bytes(SHAPE[0])
        for s in range(n.servers):
            for j in range(pulls):
                assert n.lib.bytes(pull[s * pulls + j]) == answer(first, s, j), (pushes, pulls, s, j)


def matrix_server(n):
    expected = 0
    for i, (pushes, pulls) in enumerate(n.args):
        batches = n.f.get_batch()
        assert len(batches) == n.workers
        for rank, (handler, tensors, keys) in enumerate(batches):
            assert keys == [100 + p for p in range(pushes)]
            seeds = [1000 * rank + 10 * i + p for p in range(pushes)]
            assert [n.lib.bytes(t) for t in tensors] == [pattern(s, "uint8", SHAPE) for s in seeds]
            first = pattern(seeds[0], "uint8", SHAPE) if pushes else bytes(SHAPE[0])
            n.f.respond([n.lib.make("uint8", SHAPE, answer(first, n.rank, j)) for j in range(pulls)], handler)
            expected += 1
        assert sorted(h for h, _, _ in batches)[-1] >= expected - 1


ROUNDS = [(p, q) for p in (0, 1, 2, 3, 7) for q in (0, 1, 2, 5) if p + q] * 2


@pytest.mark.parametrize("workers,servers,group", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 3, 1), (1, 2, 2)])
def test_matrix(cluster, workers, servers, group):
    cluster(workers=workers, servers=servers, group=group).run(matrix_worker, matrix_server, ROUNDS)


# Server-major pull tensors, with separate keys for each server.

def keys_worker(n):
    push = [tensor(n, 1)]
    pull = [n.lib.zeros("uint8", SHAPE) for _ in range(4)]
    n.f.wait(n.f.push_pull(push, [0], pull, [2**64 - 1, 5, 6, 7]))
    got = [n.lib.bytes(t)[0] for t in pull]
    assert got == [1, 2, 11, 12], got


def keys_server(n):
    (handler, _, _), = n.f.get_batch()
    n.f.respond([n.lib.make("uint8", SHAPE, bytes([10 * n.rank + j]) * SHAPE[0]) for j in (1, 2)], handler)


def test_server_major(cluster):
    cluster(servers=2).run(keys_worker, keys_server)


# Requests in flight. Servers answer in any order; the worker waits in any order.

def flight_worker(n):
    waits = []
    for i in range(8):
        pull = n.lib.zeros("uint8", SHAPE)
        waits.append((i, n.f.push_pull([tensor(n, i)], [i], [pull], [i]), pull))
    for i, h, pull in waits[::-1]:
        n.f.wait(h)
        n.f.wait(h)
        assert n.lib.bytes(pull) == pattern(i, "uint8", SHAPE)


def flight_server(n):
    batches = [n.f.get_batch()[0] for _ in range(8)]
    assert [b[2] for b in batches] == [[i] for i in range(8)]
    for handler, tensors, _ in batches[::2] + batches[1::2]:
        n.f.respond(tensors, handler)


def test_in_flight(cluster):
    cluster().run(flight_worker, flight_server)


# A handler from the middle of a batch waits for that tensor.

def middle_worker(n):
    h = n.f.push_pull([tensor(n, 1), tensor(n, 2)], [1, 2], [n.lib.zeros("uint8", SHAPE)], [3])
    handlers = n.f.get_all_handlers(h)
    assert handlers == [h, h + 1, h + 2]
    for x in handlers[1:]:  # the answer acknowledges the pushes
        with n.raises(TimeoutError):
            n.f.wait(x, timeout_ms=100)
    n.tell("sent")
    n.listen()
    n.f.wait(h + 2)
    n.f.wait(h)
    for x in handlers:
        n.f.wait(x)
        assert n.f.fetch_trace(x)[7] > 0


def middle_server(n):
    (handler, tensors, _), = n.f.get_batch()
    n.listen()
    n.f.respond(tensors[:1], handler)


def test_handler_from_the_middle(cluster):
    c = cluster()
    (worker,), (server,) = c.start(middle_worker, middle_server)
    assert worker.hear() == "sent"
    server.tell("answer")
    worker.tell("wait")
    c.finish()


# One worker is ahead of the other: get_batch waits for both, and returns one batch of each.

def ahead_worker(n):
    handlers = []
    for i in range(5):
        if n.rank == 1:
            n.listen()
        handlers.append(n.f.push_pull([tensor(n, 100 * n.rank + i)], [i], [], []))
        if n.rank == 0 and i == 4:
            n.tell("all sent")
        n.f.wait(handlers[-1]) if n.rank == 1 else None
    if n.rank == 0:
        for h in handlers:
            n.f.wait(h)


def ahead_server(n):
    n.listen()
    with n.raises(TimeoutError, "worker 1"):
        n.f.get_batch(timeout_ms=1500)
    with n.raises((), "has not returned handler 0"):
        n.f.respond([], 0)  # the batch is queued, but not handed out
    n.tell("one is missing")
    for i in range(5):
        batches = n.f.get_batch()
        assert [b[2] for b in batches] == [[i], [i]]
        for rank, (handler, (t,), _) in enumerate(batches):
            assert n.lib.bytes(t) == pattern(100 * rank + i, "uint8", SHAPE)
            n.f.respond([], handler)


def test_one_worker_ahead(cluster):
    c = cluster(workers=2)
    (ahead, late), (server,) = c.start(ahead_worker, ahead_server)
    assert ahead.hear() == "all sent"
    server.tell("look")
    assert server.hear() == "one is missing"
    for _ in range(5):
        late.tell("go")
    c.finish()


# A server refuses a batch. The worker's wait raises an error with the reason at once.

def refused_worker(n):
    f = n.f
    ask = lambda: f.push_pull([tensor(n, 1)], [1], [n.lib.zeros("uint8", SHAPE)], [2])
    for _ in range(2):
        with n.raises((), "request refused: expert 5 is not here", "server 0"):
            f.wait(ask())
    for reason in ("a push", "no reason was given", "nul?line"):
        with n.raises((), "request refused: " + reason):  # a single push waits for its answer
            f.wait(f.push_pull([tensor(n, 1)], [1], [], []))
    f.wait(f.push_pull([tensor(n, 1), tensor(n, 2)], [1, 2], [], []))
    f.wait(ask())


def refusing_server(n):
    f = n.f
    for call in (f.refuse, lambda h, r: f.refuse(handler=h, reason=r)):
        (handler, tensors, _), = f.get_batch()
        for bad in (5, None, b"x"):
            with n.raises(TypeError, "reason"):
                f.refuse(handler, bad)
        with n.raises(ValueError, "handler"):
            f.refuse(handler + 100, "x")
        assert call(handler, "expert 5\nis not here") is None
        assert n.lib.bytes(tensors[0]) == pattern(1, "uint8", SHAPE)  # as long as Python has it
        for again in (lambda: f.refuse(handler, "x"), lambda: f.respond(tensors, handler)):
            with n.raises((), "answered already"):
                again()
    for reason in ("a push \udcff", "", "nul\0line"):  # an exception's text may be any of these
        (handler, _, _), = f.get_batch()
        f.refuse(handler, reason)
    (handler, _, _), = f.get_batch()
    with n.raises((), "acknowledged as they arrive"):
        f.refuse(handler, "x")
    (handler, tensors, _), = f.get_batch()
    f.respond(tensors, handler)


def test_refuse(cluster, lib):
    cluster(lib=lib).run(refused_worker, refusing_server)


# respond_vec: every answer begins at row 0.

def vec_worker(n):
    rows = 2 + n.rank
    pull = n.lib.zeros("float32", (rows, 3))
    n.f.wait(n.f.push_pull([n.lib.make("int32", (rows, 1), bytes(4 * rows))], [0], [pull], [1]))
    assert n.lib.bytes(pull) == pattern(5, "float32", (10, 3))[: rows * 12]
    pull = n.lib.zeros("float32", (0, 3))
    n.f.wait(n.f.push_pull([n.lib.make("int32", (0, 1), b"")], [2], [pull], [3]))


def vec_server(n):
    f, lib = n.f, n.lib
    buffer = lib.make("float32", (10, 3), pattern(5, "float32", (10, 3)))
    batches = f.get_batch()
    tensors, handlers = [b[1][0] for b in batches], [b[0] for b in batches]
    with n.raises(ValueError, "2", "1"):
        f.respond_vec(buffer, tensors, handlers[:1])
    with n.raises(ValueError, "11", "10"):
        f.respond_vec(buffer, [lib.zeros("uint8", (11,)), tensors[1]], handlers)
    with n.raises(ValueError, "ret_buffer"):
        f.respond_vec(lib.zeros("float32", ()), tensors, handlers)
    with n.raises(ValueError, "tensors_vec[1]"):
        f.respond_vec(buffer, [tensors[0], lib.zeros("float32", ())], handlers)
    with n.raises(TypeError, "ret_buffer", "int"):
        f.respond_vec(5, tensors, handlers)
    for bad in ([99, handlers[1]], [handlers[0], "x"], [handlers[0], -1], [handlers[0]] * 2):
        with n.raises((), "handler"):
            f.respond_vec(buffer, tensors, bad)
    assert f.respond_vec(buffer, tensors, handlers) is None
    batches = f.get_batch()
    f.respond_vec(buffer, tuple(b[1][0] for b in batches), tuple(b[0] for b in batches))
    f.respond_vec(buffer, [], [])


def test_respond_vec(cluster, lib):
    cluster(lib=lib, workers=2).run(vec_worker, vec_server)


# register_recv_buffer

def register_worker(n):
    n.f.barrier(True, True)
    for i in range(3):
        for key in (10, 11):
            n.f.wait(n.f.push_pull([tensor(n, 100 * i + 10 * n.rank + key)], [key], [], []))
    small = n.lib.make("uint8", (3, 5), pattern(1, "uint8", (15,)))  # less than the chunk
    n.f.wait(n.f.push_pull([small], [10], [], []))


def register_server(n):
    f, lib = n.f, n.lib
    buffer = lib.zeros("uint8", (4, SHAPE[0]))
    base = lib.pointer(buffer)
    for arguments, classes, words in (
            ((buffer, [0, 1], [10]), ValueError, ("2", "1")),
            ((buffer, [], []), ValueError, ("at least one",)),
            ((buffer, [0, 0, 1], [1, 2, 3]), ValueError, (str(4 * SHAPE[0]), "3")),
            ((buffer, [2], [10]), ValueError, ("worker rank 2", "0 to 1")),
            ((buffer, [-1], [10]), ValueError, ("worker rank -1", "0 to 1")),
            ((buffer, [0], [-1]), (), ("push_keys[0]", "-1")),
            ((buffer, [0], [2**64]), ValueError, ("push_keys[0]", str(2**64))),
            ((buffer, [0], ["a"]), TypeError, ("push_keys[0]", "'a'")),
            ((5, [0], [1]), TypeError, ("tensor", "int"))):
        with n.raises(classes, *words):
            f.register_recv_buffer(*arguments)
    assert f.register_recv_buffer(buffer, [0, 0, 1, 1], [10, 11, 10, 11]) is None
    n.f.barrier(True, True)
    with_buffer = [[0, 1], [2, 3]]
    for i in range(3):
        for column, key in enumerate((10, 11)):
            for rank, (handler, (t,), _) in enumerate(f.get_batch()):
                assert lib.pointer(t) == base + with_buffer[rank][column] * SHAPE[0]
                assert lib.bytes(t) == pattern(100 * i + 10 * rank + key, "uint8", SHAPE)
                row = with_buffer[rank][column] * SHAPE[0]
                assert lib.bytes(buffer)[row : row + SHAPE[0]] == lib.bytes(t)
                f.respond([], handler)
    with n.raises((), "10"):
        f.register_recv_buffer(lib.zeros("uint8", SHAPE), [0], [10])
    for rank, (handler, (t,), _) in enumerate(f.get_batch()):
        assert lib.shape(t) == (3, 5)
        assert lib.pointer(t) == base + with_buffer[rank][0] * SHAPE[0]
        assert lib.bytes(t) == pattern(1, "uint8", (15,))
        f.respond([], handler)


def test_register_recv_buffer(cluster, lib):
    if lib == "jax":
        lib = "numpy"  # JAX's arrays cannot be received into
    cluster(lib=lib, workers=2).run(register_worker, register_server)


# Traces

def traces_worker(n):
    before = n.f.get_nanosecond()
    h = n.f.push_pull([tensor(n, 1), tensor(n, 2)], [1, 2], [n.lib.zeros("uint8", SHAPE) for _ in range(n.servers)], [1] * n.servers)
    handlers = n.f.get_all_handlers(h)
    n.f.wait(h)
    after = n.f.get_nanosecond()
    traces = [n.f.fetch_trace(x) for x in handlers]
    for t in traces:
        # On one host all times are of one clock.
        assert all(x > 0 for x in t), t
        assert [before] + t + [after] == sorted([before] + t + [after]), (before, t, after)
    # The server slept before its answer, which acknowledges the pushes, too.
    assert min(t[4] - t[3] for t in traces) > 50e6
    for bad in (h + 3, -1, 2**31, 2**64, -2**63):
        with n.raises(ValueError, str(bad)):
            n.f.fetch_trace(bad)
    with n.raises(TypeError, "handler"):
        n.f.fetch_trace("0")


def traces_server(n):
    import time

    (handler, tensors, _), = n.f.get_batch()
    time.sleep(0.06)  # a delay that the trace must show
    n.f.respond(tensors[:1], handler)


@pytest.mark.parametrize("servers", [1, 2])
def test_traces(cluster, servers):
    cluster(servers=servers).run(traces_worker, traces_server)
