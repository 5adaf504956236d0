"""Exchanges of two GPUs that both ends prepare and their processors make (prepare_streams with host=True).
Without a GPU these tests are skipped and say why."""

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch", reason="the tests on GPUs use PyTorch")
from test_gpu import on_gpu  # noqa: E402
from test_gpu_streams import answer, ints, memory, start  # noqa: E402

PARTS = 3  # micro-batches in flight
ROUNDS = 500
SIZES = (1, 4097, 458_752)  # int32 of a micro-batch


def part(n, i, peers=1, **more):
    """Tensors of a micro-batch, and its exchange: on a worker of so many servers, on a server of so many workers."""
    gathers = n.role == "server"
    push = [ints(n, SIZES[i]) for _ in range(peers if gathers else 1)]
    pull = [ints(n, 2 * SIZES[i]) for _ in range(peers)]
    keys = [10 * i] * len(push), [10 * i + 1] * len(pull)
    return push, pull, n.f.prepare_streams(push, keys[0], pull, keys[1], timeout_ms=30000, host=True, **more)


def worker(n):
    kind, peers = n.args
    memory(kind)
    parts, one = [part(n, i, peers) for i in range(PARTS)], ints(n, 1) + 1
    wrong, want = torch.zeros((), dtype=torch.int64, device=one.device), [torch.zeros_like(p[1][0]) for p in parts]
    begun = time.perf_counter()
    for step in range(ROUNDS):
        for (push,), pull, x in parts:
            if step % 7 == 0:
                push.random_(-1 << 30, 1 << 29)
            push.add_(step)  # the stream may still be working on it when this end reports its send
            for p in pull:
                p.fill_(-1)
            if step % 3 == 0:
                torch.cuda.synchronize()
            x.send(step % 3 > 0)
        for ((push,), pull, x), w in zip(parts, want):
            torch.cuda.current_stream().synchronize()  # receive() does not wait for the work that fills its tensors
            x.receive()
            answer(push, w, one)
            for p in pull:
                wrong.add_((p != w).sum())
    assert int(wrong) == 0, int(wrong)
    took = time.perf_counter() - begun
    for _, _, x in parts:
        x.check()
    n.f.barrier(True, True)
    for _, _, x in parts if peers == 1 else []:  # the first close ends it for the other worker
        x.close()
        with n.raises((), "is over"):
            x.send()
    n.f.barrier(True, True)
    return took / ROUNDS * 1e6


def server(n):
    kind, peers = n.args
    memory(kind)
    parts, one = [part(n, i, peers) for i in range(PARTS)], ints(n, 1) + 1
    for _ in range(ROUNDS):
        for push, out, x in parts:
            x.receive()
            for p, o in zip(push, out):
                answer(p, o, one)
            x.send()
    n.f.barrier(True, True)
    n.f.barrier(True, True)


@on_gpu
@pytest.mark.parametrize("kind", ["ordinary", "expandable"])
def test_rounds(cluster, kind):
    c = start(cluster, worker, server, args=(kind, 1))[0]
    print("%.1f us for each round of %d exchanges" % (c.finish(100)[0], PARTS))


@on_gpu
def test_two_and_two(cluster):
    start(cluster, worker, server, 2, args=("ordinary", 2))[0].finish(100)


# Other endings.

def killed_worker(n):
    _, (pull,), x = part(n, 1)
    x.send()
    x.receive()
    n.tell("ready")
    x.send()
    begun = time.monotonic()
    with n.raises(ConnectionError, "server 0"):
        x.receive()
    assert time.monotonic() - begun < 9
    with n.raises(ConnectionError, "server 0"):
        x.check()
    assert not n.wrong, n.wrong
    os._exit(0)  # without the barrier of stop(), for which the server is missing


def killed_server(n):
    x = part(n, 1)[2]
    x.receive()
    x.send()
    n.tell("ready")
    while True:
        time.sleep(1)


@on_gpu
def test_server_killed(cluster):
    _, (w,), (s,) = start(cluster, killed_worker, killed_server)
    assert w.hear() == s.hear() == "ready"
    s.kill()
    assert w.wait(60) == 0, w.report()


def storm_worker(n):
    _, _, x = part(n, 2)
    n.tell("ready")
    with n.raises(ConnectionError, "server 0"):
        while True:
            x.send()
            x.receive()
    assert not n.wrong, n.wrong
    os._exit(0)


def storm_server(n):
    x = part(n, 2)[2]
    n.tell("ready")
    while True:
        x.receive()
        x.send()


@on_gpu
def test_server_killed_in_the_midst(cluster):
    """In copies, mostly."""
    _, (w,), (s,) = start(cluster, storm_worker, storm_server)
    assert w.hear() == s.hear() == "ready"
    time.sleep(0.5)
    s.kill()
    assert w.wait(60) == 0, w.report()


def late_worker(n):
    (push,), _, x = part(n, 1, round_timeout_ms=500)
    with n.raises((), "alternate"):
        x.receive()
    x.send()
    x.receive()
    with n.raises((ValueError,), "timeout_ms"):
        x.receive(-5)
    time.sleep(1.5)  # nothing is in flight
    x.check()
    x.send()
    with n.raises(TimeoutError, "server 0"):
        x.receive(100)
    begun = time.monotonic()
    with n.raises(TimeoutError, "server 0", "limit 500ms"):
        x.receive()
    assert time.monotonic() - begun < 3
    y, graph = n.f.prepare_streams([push], [5], [], [], timeout_ms=30000, host=True), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with n.raises((), "captured"):
            y.send()
    n.f.barrier(True, True)
    with n.raises((), "by hosts", "in streams"):
        n.f.prepare_streams([push], [6], [], [], timeout_ms=30000, host=True)
    n.f.barrier(True, True)


def late_server(n):
    (push,), _, x = part(n, 1)
    x.receive()
    x.send()
    with n.raises(TimeoutError, "worker 0"):
        x.receive(200)
    x.receive()
    time.sleep(1.5)  # longer than the worker's limit
    with n.raises((), "worker 0", "is over"):
        x.send()
    y = n.f.prepare_streams([push], [5], [], [], timeout_ms=30000, host=True)
    n.interrupted(y.receive)
    n.f.barrier(True, True)
    with n.raises((), "by hosts", "in streams"):
        n.f.prepare_streams([push], [6], [], [], timeout_ms=30000)
    n.f.barrier(True, True)


@on_gpu
def test_late(cluster):
    c, _, (s,) = start(cluster, late_worker, late_server)
    assert s.hear() == "waiting"
    s.signal(signal.SIGINT)
    c.finish(60)
