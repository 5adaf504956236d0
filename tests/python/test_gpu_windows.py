"""Windows on GPUs (open_window): puts and signals in the streams of two workers, on two GPUs if there are
as many. Without a GPU these tests are skipped and say why."""

import os
import sys
import time

import pytest

torch = pytest.importorskip("torch", reason="the tests on GPUs use PyTorch")
from harness import scheduler  # noqa: E402
from test_gpu import GPUS, on_gpu  # noqa: E402
from test_graphs import own_stream, settle  # noqa: E402

SIZES = (16, 4096, 917_504, 1_835_008, (5 << 20) + 16)
ROUNDS = 200


sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "benchmark"))
from device_latency import Profile  # noqa: E402


def idle(n):
    """A server without requests."""


def start(cluster, function, count=2, args=None):
    """Workers on the GPUs in turn."""
    c = cluster(lib="torch", workers=count, servers=1, env={"STEPMESH_BAKCEND": "GPU"})
    c.spawn("scheduler", scheduler)
    c.spawn("server", idle, env={"STEPMESH_BAKCEND": "CPU"})
    workers = []
    for rank in range(count):
        gpu = rank % max(min(GPUS, 2), 1)
        workers.append(c.spawn("worker", function, rank, args=args, env={"STEPMESH_GPU": str(gpu), "DMLC_RANK_OFFSET": str(-gpu), "CUDA_MODULE_LOADING": "EAGER"}))
    return c, workers


def opened(n, size, signals=1):
    """A communicator of all workers, and its window; this process's GPU is the current one."""
    gpu = int(n.env["STEPMESH_GPU"])
    torch.cuda.set_device(gpu)
    c = n.f.Communicator(list(range(n.workers)), timeout_ms=30000)
    return c, c.open_window(size, signals), "cuda:%d" % gpu


def ping(n):
    """Round trips, all queued without synchronization. Each put depends on the data received before."""
    c, w, dev = opened(n, max(SIZES) + 64, 2)
    other, first = 1 - n.rank, n.rank == 0
    streams = [torch.cuda.Stream(dev) for _ in range(2)]
    wrong = torch.zeros((), dtype=torch.int64, device=dev)
    for size in SIZES:
        x, want = torch.zeros(size, dtype=torch.uint8, device=dev), torch.zeros(size, dtype=torch.uint8, device=dev)
        got = w.tensor[48:48 + size]
        one = torch.ones_like(x)
        places = torch.arange(size, device=dev).to(torch.uint8)
        with own_stream():
            wrong.add_((x != want).sum())  # allocations are made before a stream waits
            x.copy_(places)
            torch.add(places, one, out=want)
            if not first:
                want.copy_(places)
            settle()
            c.barrier()
            for _ in range(ROUNDS):
                if first:
                    w.put_signal(other, 48, x, 1)
                    w.wait_signal(other, 1)
                else:
                    w.wait_signal(other, 1)
                wrong.add_((got != want).sum())
                torch.add(got, one, out=x)
                want.add_(2)
                if not first:
                    w.put_signal(other, 48, x, 1)
            settle()
        w.check()
        assert int(wrong) == 0, (size, int(wrong))
        c.barrier()
    # Two streams keep the order of the calls, and flush() that of reads of the source.
    x = torch.zeros(1 << 20, dtype=torch.uint8, device=dev)
    for s in streams:
        with torch.cuda.stream(s):
            x.fill_(0)
            wrong.add_((x != 0).sum())
    torch.cuda.synchronize()
    c.barrier()
    if first:
        for i in range(40):
            with torch.cuda.stream(streams[i % 2]):
                if i > 0:
                    w.wait_signal(other, 0)  # the other rank has read its data; this stream waits for nothing else from it
                w.flush(other)  # the other stream has read x
                x.fill_(i)
                w.put(other, 0, x)
                w.signal(other, 0)
        with torch.cuda.stream(streams[0]):
            w.wait_signal(other, 0)
    else:
        for i in range(40):
            with torch.cuda.stream(streams[i % 2]):
                w.wait_signal(other, 0)
                wrong.add_((w.tensor[:1 << 20] != i).sum())
                w.signal(other, 0)
    for s in streams:
        settle(s)
    w.check()
    assert int(wrong) == 0, int(wrong)
    c.barrier()
    w.close()
    with n.raises((), "closed"):
        w.put(other, 0, x)
    c.close()


@on_gpu
def test_values(cluster):
    start(cluster, ping)[0].finish(100)


def launched(n):
    """The work of the GPU in a hundred rounds, recorded by PyTorch's profiler."""
    c, w, dev = opened(n, 917_504)
    x = torch.zeros(917_504, dtype=torch.uint8, device=dev)
    torch.cuda.synchronize()
    c.barrier()
    profile = Profile()
    for _ in range(100):
        w.put_signal(1 - n.rank, 0, x)
        w.wait_signal(1 - n.rank)
    settle()
    seen = profile.stop()
    w.check()
    c.barrier()
    w.close()
    c.close()
    return seen


@on_gpu
def test_no_kernels(cluster):
    c, _ = start(cluster, launched)
    for seen in c.finish(100)[1:]:  # without the server's
        print(seen)
        assert not [s for s in seen if s[0] == "kernel"], seen
        assert sum(count for kind, _, count in seen if kind == "gpu_memcpy") == 100, seen


# Ends.

def killed(n):
    c, w, dev = opened(n, 1 << 20)
    x = torch.zeros(1000, dtype=torch.uint8, device=dev)
    w.put_signal(1 - n.rank, 0, x)
    w.wait_signal(1 - n.rank)
    settle()
    w.check()
    n.tell("ready")
    if n.rank == 1:
        while True:
            time.sleep(1)
    begun = time.monotonic()
    with own_stream():
        here = torch.cuda.Event()
        here.record()
        w.wait_signal(1)  # there is no signal
        here.synchronize()
        n.tell("waits")  # the stream is at the wait, or reaches it next; that cannot be observed
        settle()
    assert time.monotonic() - begun < 15
    with n.raises((ConnectionError,), "worker 1"):
        w.check()
    with n.raises((ConnectionError,), "worker 1"):
        w.put(1, 0, x)
    w.close()
    assert not n.wrong, n.wrong
    os._exit(0)  # without the barrier of stop(), for which a worker is missing


@on_gpu
def test_killed(cluster):
    _, (a, b) = start(cluster, killed)
    assert a.hear() == b.hear() == "ready"
    assert a.hear() == "waits"
    b.kill()
    assert a.wait(60) == 0, a.report()


def closing(n):
    c, w, dev = opened(n, 1 << 20)
    x = torch.zeros(1000, dtype=torch.uint8, device=dev)
    if n.rank == 0:
        w.close()
    else:
        begun = time.monotonic()
        w.wait_signal(0)
        settle()
        assert time.monotonic() - begun < 15
        with n.raises((), "worker 0"):
            w.check()
        w.close()
    again = c.open_window(1 << 20)
    if n.rank == 0:
        again.put_signal(1, 5, x + 7)
        settle()
    else:
        again.wait_signal(0)
        settle()
        assert int(again.tensor[4]) == 0 and bool((again.tensor[5:1005] == 7).all())
    again.check()
    c.barrier()
    again.close()
    with n.raises((ValueError,), "another device"):
        again.put(0, 0, torch.zeros(4))
    last = c.open_window(64, 2)
    with n.raises((ValueError,), "beyond the 64"):
        last.put(0, 61, x[:4])
    with n.raises((ValueError,), "signal 2"):
        last.signal(0, 2)
    with n.raises((ValueError,), "rank 2"):
        last.flush(2)
    with n.raises((), "is being captured"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            last.signal(0)
    last.check()
    c.barrier()
    last.close()
    with n.raises((), "bytes on the device"):
        c.open_window(64 + n.rank)
    c.close()


@on_gpu
def test_closing(cluster):
    start(cluster, closing)[0].finish(100)
