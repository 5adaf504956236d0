"""Collectives of tensors on GPUs: two instances of a group, on two GPUs where there are as
many. Skipped without GPU."""

import gc
import time

import pytest

torch = pytest.importorskip("torch", reason="the tests on GPUs use PyTorch")
from harness import scheduler  # noqa: E402
from test_gpu_local import GPUS, EXPANDABLE, device, gpu, gpu_cluster, hear, nothing_left, spawn, works  # noqa: E402, F401

SIZES = (1, 7, 0, 4097, 65_537, 917_504, 1_835_008, (5 << 20) + 3)


def data(dev, size, seed):
    """Bytes that depend on the seed and the place, at an odd address."""
    x = torch.empty(size + 1, dtype=torch.uint8, device=dev)[1:]
    x.copy_((torch.arange(size, device=dev, dtype=torch.int64) * 40_503 // 256 + seed * 17) % 251)
    return x


def slow(dev):
    """Keeps the current stream busy."""
    torch.cuda._sleep(20_000_000)


def every_call(c, rank, size, dev, k, stream):
    """Each collective without arithmetic of k bytes for each rank. The given tensors are made in stream, late."""
    def same(name, got, want):
        assert torch.equal(got, want), (name, k, int((got != want).sum()), "bytes are wrong")

    with torch.cuda.stream(stream):
        zeros = lambda n: torch.zeros(n, dtype=torch.uint8, device=dev)  # noqa: E731
        slow(dev)
        out = zeros(size * k)
        op = c.all_gather(out, data(dev, k, rank))
        gc.collect()
        op.wait()
        joined = torch.cat([data(dev, k, r) for r in range(size)])
        same("all_gather", out, joined)

        out.zero_()
        out[rank * k:(rank + 1) * k].copy_(data(dev, k, rank))
        c.all_gather(out, out[rank * k:(rank + 1) * k]).wait()
        same("all_gather in place", out, joined)

        outs = [zeros(k + r) for r in range(size)]
        slow(dev)
        c.all_gather_v(outs, data(dev, k + rank, rank)).wait()
        for r in range(size):
            same("all_gather_v", outs[r], data(dev, k + r, r))

        outs = [zeros(k + r + rank) for r in range(size)]
        slow(dev)
        c.all_to_all(outs, [data(dev, k + r + rank, 10 * rank + r) for r in range(size)]).wait()
        for r in range(size):
            same("all_to_all", outs[r], data(dev, k + r + rank, 10 * r + rank))

        for root in range(size):
            x = data(dev, k, 50 + root) if rank == root else zeros(k)
            slow(dev)
            c.broadcast(x, root).wait()
            same("broadcast", x, data(dev, k, 50 + root))
            whole = zeros(size * k) if rank == root else None
            c.gather(whole, data(dev, k, rank), root=root).wait()
            if rank == root:
                same("gather", whole, joined)
            part = zeros(k)
            c.scatter(part, whole, root=root).wait()
            same("scatter", part, data(dev, k, rank))


def values_worker(n):
    f, dev = n.f, device(n)
    for i, k in enumerate(SIZES):
        every_call(f, n.instance, 2, dev, k, torch.cuda.Stream(dev) if i % 2 else torch.cuda.current_stream(dev))
        torch.cuda.empty_cache()  # the peer still has the freed memory mapped
    x = torch.zeros(8, device=dev)
    with n.raises(f.ValueError, "NCCL"):
        f.all_reduce(x, x)
    with n.raises(f.ValueError, "all tensors of a call"):
        f.all_gather(torch.zeros(16), x)
    # Many in flight, waited for in another order.
    outs = [torch.zeros(2 * 4096, dtype=torch.uint8, device=dev) for _ in range(30)]
    ops = [f.all_gather(out, data(dev, 4096, 100 * i + n.instance)) for i, out in enumerate(outs)]
    for i in reversed(range(30)):
        ops[i].wait()
        assert torch.equal(outs[i], torch.cat([data(dev, 4096, 100 * i + r) for r in range(2)])), ("in flight", i)
    works(dev)
    f.barrier(True, True)


def both(c, worker, gpus, variables=None):
    """A group of two workers and one of two servers, which do nothing."""
    c.spawn("scheduler", scheduler)
    for i in range(2):
        spawn(c, "server", idle, instance=i, gpu=gpus[i])
    return [spawn(c, "worker", worker, instance=i, gpu=gpus[i], variables=variables) for i in range(2)]


def idle(n):
    n.f.barrier(True, True)


@pytest.mark.parametrize("memory", [None, EXPANDABLE], ids=["ordinary", "expandable"])
@pytest.mark.parametrize("ipc", ["1", "0"], ids=["shm", "zmq"])
def test_values(cluster, ipc, memory):
    c = gpu_cluster(cluster, env={"BYTEPS_ENABLE_IPC": ipc}, group=2)
    both(c, values_worker, (0, 1 % GPUS), memory)
    c.finish(180)


def killed_worker(n):
    """A rank is killed inside a call: the call fails on the other ranks, which continue without it."""
    f, dev = n.f, device(n)
    ranks, k = list(range(n.workers)), 1 << 20
    c = f.Communicator(ranks, timeout_ms=60000)
    x, out = data(dev, k, n.rank), torch.zeros(n.workers * k, dtype=torch.uint8, device=dev)
    want = torch.cat([data(dev, k, r) for r in ranks])
    n.tell("made")
    while True:
        out.zero_()
        begin = time.monotonic()
        try:
            c.all_gather(out, x).wait()
            assert torch.equal(out, want)
        except f.Error as e:
            n.tell([type(e).__name__, str(e), time.monotonic() - begin])
            break
    c.close()
    works(dev)
    rest = f.Communicator([0, 1], id=2)
    every_call(rest, rest.rank, rest.size, dev, 65_537, torch.cuda.current_stream(dev))
    n.tell("went on")
    time.sleep(60)


@pytest.mark.parametrize("ipc", ["1", "0"], ids=["shm", "zmq"])
def test_killed(cluster, ipc):
    c = gpu_cluster(cluster, env={"BYTEPS_ENABLE_IPC": ipc}, workers=3)
    c.spawn("scheduler", scheduler)
    spawn(c, "server", idle)
    workers = [spawn(c, "worker", killed_worker, rank=r, gpu=r % GPUS) for r in range(3)]
    for w in workers:
        hear(c, w, "made")
    time.sleep(0.5)
    workers[2].kill()
    for w in workers[:2]:
        kind, text, took = w.hear()
        assert "worker 2" in text and took < 30, (kind, text, took)
        hear(c, w, "went on")
