"""Exchanges that the streams of two GPUs make by themselves (prepare_streams). Without a GPU these
tests are skipped and say why."""

import os
import time

import pytest

torch = pytest.importorskip("torch", reason="the tests on GPUs use PyTorch")
from harness import scheduler  # noqa: E402
from test_gpu import GPUS, on_gpu  # noqa: E402
from test_graphs import AHEAD, captured, own_stream, settle  # noqa: E402

EXPANDABLE = "expandable_segments:True"
PARTS = 3  # micro-batches in flight
REPLAYS = 1000
SIZES = (1, 4097, 458_752)  # int32 of a micro-batch


def start(cluster, worker, server, count=1, args=None):
    """So many workers on GPU 0, and as many servers on GPU 1 if there is one."""
    c = cluster(lib="torch", workers=count, servers=count, env={"STEPMESH_BAKCEND": "GPU"})
    c.spawn("scheduler", scheduler)
    other = min(GPUS - 1, 1)
    workers = [c.spawn("worker", worker, rank, args=args) for rank in range(count)]
    servers = [c.spawn("server", server, rank, args=args, env={"STEPMESH_GPU": str(other), "DMLC_RANK_OFFSET": str(-other)}) for rank in range(count)]
    return c, workers, servers


def ints(n, size):
    """Zeros on the node's GPU, which is then the current one."""
    gpu = int(n.env["STEPMESH_GPU"])
    torch.cuda.set_device(gpu)
    return torch.zeros(size, dtype=torch.int32, device="cuda:%d" % gpu)


def part(n, i):
    """The two tensors of a micro-batch, and its exchange."""
    push, pull = ints(n, SIZES[i]), ints(n, 2 * SIZES[i])
    return push, pull, n.f.prepare_streams([push], [10 * i], [pull], [10 * i + 1], timeout_ms=30000)


def answer(push, out, one):
    """Returns the answer, which depends on every element."""
    k = push.numel()
    torch.mul(push, 3, out=out[:k])
    torch.add(push, one, out=out[k:])


def memory(kind):
    if kind == "expandable":
        torch.cuda.memory._set_allocator_settings(EXPANDABLE)


def worker(n):
    memory(n.args)
    parts = [part(n, i) for i in range(PARTS)]
    one, step = ints(n, 1) + 1, ints(n, 1)
    wants = [torch.zeros_like(p[1]) for p in parts]
    wrong = torch.zeros((), dtype=torch.int64, device=step.device)

    def layer():
        step.add_(one)
        for push, pull, x in parts:
            push.add_(step)
            pull.fill_(-1)
            x.send()
        for (push, pull, x), want in zip(parts, wants):
            x.receive()
            answer(push, want, one)
            wrong.add_((pull != want).sum())

    graph = captured(layer)
    begun = time.perf_counter()
    with own_stream():
        for i in range(REPLAYS):
            if i % AHEAD == 0:
                for push, _, _ in parts:
                    push.random_(-1 << 30, 1 << 29)
            graph.replay()
            if i % AHEAD == AHEAD - 1:
                settle()
        settle()
    took = time.perf_counter() - begun
    for _ in range(20):
        layer()  # not of a graph
    settle()
    for _, _, x in parts:
        x.check()
    assert int(wrong) == 0, int(wrong)
    assert int(step) == REPLAYS + 21, int(step)
    n.f.barrier(True, True)
    for _, _, x in parts:
        x.close()
        with n.raises((), "is over"):
            x.send()
    n.f.barrier(True, True)  # the server's end closes at the end of its function, too
    return took / REPLAYS * 1e6


def server(n):
    memory(n.args)
    parts, one = [part(n, i) for i in range(PARTS)], ints(n, 1) + 1

    def layer():
        for push, out, x in parts:
            x.receive()
            answer(push, out, one)
            x.send()

    graph = captured(layer)
    with own_stream():
        for i in range(REPLAYS):
            graph.replay()
            if i % AHEAD == AHEAD - 1:
                settle()
        settle()
    for _ in range(20):
        layer()
    settle()
    for _, _, x in parts:
        x.check()
    n.f.barrier(True, True)
    n.f.barrier(True, True)


@on_gpu
@pytest.mark.parametrize("memory", ["ordinary", "expandable"])
def test_replays(cluster, memory):
    c = start(cluster, worker, server, args=memory)[0]
    print("%.1f us for each replay of %d exchanges" % (c.finish(100)[0], PARTS))


# Two workers and two servers.

def many_worker(n):
    push, pulls = ints(n, 5000), [ints(n, 700) for _ in range(2)]
    x = n.f.prepare_streams([push], [1], pulls, [2, 2], timeout_ms=30000)
    assert x.path == "streams: gpu:%s with server 0, server 1" % n.env["STEPMESH_GPU"]
    for i in range(100):
        push.fill_(i + 1000 * n.rank)
        x.send()
        x.receive()
        settle()
        x.check()
        for s, pull in enumerate(pulls):
            assert bool((pull == (i + 1000 * n.rank) * 2 + s).all()), (i, s, pull)
    n.f.barrier(True, True)


def many_server(n):
    pushes, outs = [ints(n, 5000) for _ in range(2)], [ints(n, 700) for _ in range(2)]
    x = n.f.prepare_streams(pushes, [1, 1], outs, [2, 2], timeout_ms=30000)
    for i in range(100):
        x.receive()
        for push, out in zip(pushes, outs):
            torch.mul(push[:700], 2, out=out)
            out.add_(n.rank)
        x.send()
        settle()
        x.check()
    n.f.barrier(True, True)


@on_gpu
def test_two_and_two(cluster):
    start(cluster, many_worker, many_server, 2)[0].finish(100)


# Other endings.

def killed_worker(n):
    push, pull = ints(n, 1000), ints(n, 1000)
    x = n.f.prepare_streams([push], [1], [pull], [2], timeout_ms=30000)

    def ask():
        x.send()
        x.receive()

    graph = captured(ask)
    n.tell("ready")
    begun = time.monotonic()
    graph.replay()  # there is no answer
    settle()
    assert time.monotonic() - begun < 9
    with n.raises(ConnectionError, "server 0"):
        x.check()
    graph.replay()  # waits for nothing
    settle()
    with n.raises(ConnectionError, "server 0"):
        x.send()
    assert not n.wrong, n.wrong
    os._exit(0)  # without the barrier of stop(), for which the server is missing


def killed_server(n):
    push, pull = ints(n, 1000), ints(n, 1000)
    x = n.f.prepare_streams([push], [1], [pull], [2], timeout_ms=30000)
    x.receive()
    x.send()
    settle()
    n.tell("ready")
    while True:
        time.sleep(1)


@on_gpu
def test_server_killed(cluster):
    _, (w,), (s,) = start(cluster, killed_worker, killed_server)
    assert w.hear() == s.hear() == "ready"
    s.kill()
    assert w.wait(60) == 0, w.report()


def ahead_worker(n):
    push, pull = ints(n, 1000), ints(n, 1000)
    x = n.f.prepare_streams([push], [1], [pull], [2], timeout_ms=30000, round_timeout_ms=None)

    def ask():
        for _ in range(3):
            x.send()
            x.receive()

    graph = captured(ask)
    n.tell("ready")
    with own_stream():
        for _ in range(300):  # more than the queue of launches takes
            graph.replay()
        settle()
    with n.raises(ConnectionError, "server 0"):
        x.check()
    assert not n.wrong, n.wrong
    os._exit(0)


def ahead_server(n):
    push, pull = ints(n, 1000), ints(n, 1000)
    x = n.f.prepare_streams([push], [1], [pull], [2], timeout_ms=30000)
    for _ in range(3):
        x.receive()
        x.send()
    settle()
    n.tell("ready")
    while True:
        time.sleep(1)


@on_gpu
def test_server_killed_with_a_full_queue(cluster):
    _, (w,), (s,) = start(cluster, ahead_worker, ahead_server)
    assert w.hear() == s.hear() == "ready"
    time.sleep(2)  # the queue of launches is full by then
    s.kill()
    assert w.wait(60) == 0, w.report()


def late_worker(n):
    push, pull = ints(n, 1000), ints(n, 1000)
    x = n.f.prepare_streams([push], [1], [pull], [2], timeout_ms=30000, round_timeout_ms=500)
    x.send()
    x.receive()
    settle()
    x.check()
    time.sleep(1.5)  # nothing is in flight
    x.check()
    begun = time.monotonic()
    x.send()
    x.receive()
    settle()
    assert 0.4 < time.monotonic() - begun < 3
    with n.raises(TimeoutError, "server 0", "limit 500ms"):
        x.check()
    n.f.barrier(True, True)


def late_server(n):
    push, pull = ints(n, 1000), ints(n, 1000)
    x = n.f.prepare_streams([push], [1], [pull], [2], timeout_ms=30000)
    x.receive()
    x.send()
    settle()
    n.f.barrier(True, True)
    with n.raises((), "worker 0", "is over"):
        x.receive()
    with n.raises((ValueError,), "need_event", "host=True"):
        x.send(need_event=False)
    with n.raises((ValueError,), "want memory of the node's device"):
        n.f.prepare_streams([torch.zeros(4)], [5], [], [])
    with n.raises(TimeoutError, "worker 0", "has not prepared"):
        n.f.prepare_streams([push], [5], [], [], timeout_ms=200)


@on_gpu
def test_late(cluster):
    start(cluster, late_worker, late_server)[0].finish(60)


def test_without_gpu(cluster):
    """The error names what is missing."""
    if GPUS:
        pytest.skip("this machine has a GPU")

    c = cluster(lib="torch")
    c.spawn("scheduler", scheduler)
    c.spawn("server", host_server)
    c.spawn("worker", host_worker)
    c.finish()


def host_server(n):
    pass


def host_worker(n):
    with n.raises((ValueError,), "want memory of the node's device"):
        n.f.prepare_streams([torch.zeros(4)], [1], [torch.zeros(4)], [2])
    with n.raises((TypeError,), "push_tensors"):
        n.f.prepare_streams([1], [1], [], [])
    with n.raises((ValueError,), "timeout_ms"):
        n.f.prepare_streams([torch.zeros(4)], [1], [], [], timeout_ms=-5)
