"""Tensors and signals on GPUs. Without a GPU, a PyTorch that uses it and a module built
with CUDA, the tests that need them are skipped and say why; the errors are tested anywhere."""

import gc

import pytest

torch = pytest.importorskip("torch", reason="the tests on GPUs use PyTorch")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_not():
    """Why the tests on a GPU cannot run here, or None."""
    import fserver_lib

    if not torch.version.cuda:
        return "this PyTorch (%s) is built without CUDA" % torch.__version__
    if GPUS == 0:
        return "PyTorch sees no GPU"
    try:
        fserver_lib.map_pinned_tensor(torch.zeros(1).pin_memory(), 0)
    except fserver_lib.Error as e:
        return "fserver_lib: %s" % e
    return None


WHY_NOT = why_not()
on_gpu = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
vans = pytest.mark.parametrize("ipc", ["0", "1"], ids=["zmq", "local"])


def gpu_cluster(cluster, ipc="1", **options):
    return cluster(lib="torch", env={"STEPMESH_BAKCEND": "GPU", "BYTEPS_ENABLE_IPC": ipc}, **options)


def slow(stream_of):
    """Work that keeps the current stream busy for some milliseconds."""
    torch.cuda._sleep(20_000_000)
    return stream_of


SIZES = (1, 9, 1024, 4099, 458_752, 4 << 20)  # of float32


# Values, of tensors that streams are still computing at both ends, at odd offsets.

def sums_worker(n):
    f, dev = n.f, torch.device("cuda", n.instance)
    big = torch.zeros(2 * max(SIZES) + 64, device=dev)
    for i, size in enumerate(SIZES * 3):
        stream = torch.cuda.Stream(dev) if i % 2 else torch.cuda.current_stream(dev)
        with torch.cuda.stream(stream):
            push = big[1 + i: 1 + i + size]  # at a new address, inside an allocation
            push2 = torch.empty(size, device=dev)
            pull = torch.full((size + 3,), -1.0, device=dev)[3:]
            slow(push)
            push.copy_(torch.arange(size, device=dev) + i)
            push2.fill_(i)
            h = f.push_pull([push, push2], [1, 2], [pull], [3])
            f.wait(h)
            assert torch.equal(pull, torch.arange(size, device=dev) + 2 * i), (i, size)
        torch.cuda.synchronize()


def sums_server(n):
    dev = torch.device("cuda", n.instance)
    for i, size in enumerate(SIZES * 3):
        (handler, tensors, keys), = n.f.get_batch()
        assert keys == [1, 2] and all(t.device == dev and t.shape == (size,) for t in tensors), tensors
        with torch.cuda.stream(torch.cuda.Stream(dev)):
            slow(tensors)
            n.f.respond([tensors[0] + tensors[1]], handler, True)
            del tensors


@on_gpu
@vans
def test_sums(cluster, ipc):
    gpu_cluster(cluster, ipc).run(sums_worker, sums_server)


@on_gpu
def test_group(cluster):
    if GPUS < 2:
        pytest.skip("one GPU: a group wants one for each instance")
    gpu_cluster(cluster, group=2).run(sums_worker, sums_server)


# A prepared exchange: each round waits for the stream that is current at its start.

def rounds_worker(n):
    f, dev = n.f, torch.device("cuda", n.instance)
    push, pull = torch.empty(64, 1024, device=dev), torch.empty(64, 1024, device=dev)
    x = f.prepare([push], [1], [pull], [2])
    for i, rows in enumerate((None, 3, 64, 0, 1, None) * 5):
        stream = torch.cuda.Stream(dev) if i % 2 else torch.cuda.current_stream(dev)
        with torch.cuda.stream(stream):
            pull.fill_(-1)
            slow(push)
            push.fill_(i)
            x.start(rows)
            x.wait()
            cut = 64 if rows is None else rows
            assert bool((pull[:cut] == i + 1).all()) and bool((pull[cut:] == -1).all()), (i, rows)
        torch.cuda.synchronize()


def rounds_server(n):
    for i, rows in enumerate((None, 3, 64, 0, 1, None) * 5):
        (handler, (t,), _), = n.f.get_batch()
        assert t.shape == (64 if rows is None else rows, 1024), (i, t.shape)
        n.f.respond([t + 1], handler, True)


@on_gpu
@vans
def test_prepared(cluster, ipc):
    gpu_cluster(cluster, ipc).run(rounds_worker, rounds_server)


# Memory of a push is not reused while kernels read it.

def reuse_worker(n):
    x = torch.empty(1 << 20, device="cuda")
    for i in range(50):
        x.fill_(i)
        n.f.wait(n.f.push_pull([x], [1], [], []))


def reuse_server(n):
    sums = []
    for i in range(50):
        (handler, (x,), _), = n.f.get_batch()
        n.f.respond([], handler)
        slow(x)
        sums.append(x.sum())
        del x
        gc.collect()
    got = [float(s) / (1 << 20) for s in sums]
    assert got == list(range(50)), got


@on_gpu
@vans
def test_received_memory(cluster, ipc):
    gpu_cluster(cluster, ipc).run(reuse_worker, reuse_server)


# Host and device tensors in one request, registered buffers, respond_vec.

def mixed_worker(n):
    f = n.f
    f.barrier(True, True)
    host, dev = torch.arange(1000.0), torch.arange(1000.0, device="cuda")
    for i in range(5):
        pulls = torch.zeros(1000), torch.zeros(1000, device="cuda")
        f.wait(f.push_pull([host + i, dev + 2 * i], [1, 2], list(pulls), [3, 4]))
        assert torch.equal(pulls[0], host + i) and torch.equal(pulls[1], dev + 2 * i)
    rows = torch.zeros(2, 8, device="cuda")
    f.wait(f.push_pull([rows], [5], [rows], [6]))
    assert torch.equal(rows, torch.ones_like(rows))


def mixed_server(n):
    f = n.f
    buffer = torch.zeros(1000, device="cuda")
    f.register_recv_buffer(buffer, [0], [2])
    f.barrier(True, True)
    for i in range(5):
        (handler, (host, dev), _), = f.get_batch()
        assert host.device.type == "cpu" and dev.data_ptr() == buffer.data_ptr()
        f.respond([host, dev.clone()], handler, True)
    (handler, (rows,), _), = f.get_batch()
    out = torch.empty(4, 8, device="cuda")
    slow(out)
    out.fill_(1)
    f.respond_vec(out, [rows], [handler])


@on_gpu
@vans
def test_mixed(cluster, ipc):
    gpu_cluster(cluster, ipc).run(mixed_worker, mixed_server)


# A captured graph hands over to a thread that makes the request, and waits for it.

ROUNDS = 20


def graph_worker(n):
    f = n.f
    pinned = torch.zeros(2, dtype=torch.int64).pin_memory()
    mapped = f.map_pinned_tensor(pinned, 0)
    ready, done = mapped[0:1], mapped[1:2]
    seq = torch.zeros(1, dtype=torch.int64, device="cuda")
    x, y, z = (torch.zeros(4096, device="cuda") for _ in range(3))
    f.write_flag(ready, seq)  # loads the kernels outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        f.seq_add_one(seq)
        f.write_flag(ready, seq)
        f.wait_flag(done, seq)
        z.copy_(y * 2)
    assert pinned.tolist() == [0, 0], "the capture has run"
    for i in range(1, ROUNDS + 1):
        graph.replay()
        while int(pinned[0]) < i:
            pass
        f.wait(f.push_pull([x], [1], [y], [2], need_event=False))
        pinned[1] = i
        torch.cuda.synchronize()
        assert torch.equal(z, torch.full_like(z, 2.0 * (i + 1))), (i, z[0])


def graph_server(n):
    for _ in range(ROUNDS):
        (handler, (x,), _), = n.f.get_batch()
        n.f.respond([x + 1], handler, True)


@on_gpu
def test_graph(cluster):
    gpu_cluster(cluster).run(graph_worker, graph_server)


# SimpleNotify: the streams wait, the threads do not.

# CUDA loads a kernel when it is first launched, and may wait for all streams then, also
# for a stream that waits for later work: kernels are used once before.

def notify_worker(n):
    f = n.f
    notify = f.SimpleNotify()
    notify.init()
    x, y = torch.zeros(4096, device="cuda"), torch.zeros(4096, device="cuda")
    float((y.fill_(0) + 1)[17])
    for i in range(ROUNDS):
        x.fill_(i)
        notify.stream_wait_event(f.push_pull([x], [1], [y], [2]))
        z = y + 1
        notify.wait_event_done()
        assert float(z[17]) == i + 2, (i, z)


def notify_server(n):
    notify = n.f.SimpleNotify()
    notify.init()
    float((torch.ones(4096, device="cuda") + torch.ones(4096, device="cuda"))[17])
    for i in range(ROUNDS):
        notify.block_now_stream_and_get_batch()
        one = torch.ones(4096, device="cuda")
        (handler, (x,), keys), = notify.get_future_batch_data()
        assert keys == [1]
        n.f.respond([x + one], handler, True)


@on_gpu
def test_notify(cluster):
    gpu_cluster(cluster).run(notify_worker, notify_server)


@on_gpu
def test_mapped_memory_stays():
    """A tensor that gets other memory ("t.data = ...") does not take the mapped memory with it."""
    import fserver_lib

    pinned = torch.ones(4, dtype=torch.int64).pin_memory()
    mapped = fserver_lib.map_pinned_tensor(pinned, 0)
    pinned.data = torch.zeros(4, dtype=torch.int64)
    others = [torch.zeros(4, dtype=torch.int64).pin_memory() for _ in range(4)]  # PyTorch would use freed memory for them
    assert mapped.tolist() == [1] * 4 and len(others) == 4


# Refused calls.

def wrong_worker(n):
    f = n.f
    here = torch.ones(4, device="cuda:0")
    if GPUS > 1:
        with n.raises(ValueError, "push tensor 0", "gpu:1", "gpu:0", "STEPMESH_GPU"):
            f.push_pull([torch.ones(4, device="cuda:1")], [1], [here], [2])
        flag, seq = (torch.zeros(1, dtype=torch.int64, device=d) for d in ("cuda:0", "cuda:1"))
        for call in (f.write_flag, f.wait_flag):
            with n.raises(ValueError, "seq is on cuda:1", "cuda:0", "flag"):
                call(flag, seq)
    with n.raises(ValueError, "push_tensors[0]", "contiguous"):
        f.push_pull([torch.ones(4, 4, device="cuda").t()], [1], [here], [2])
    with n.raises(ValueError, "flag", "int64"):
        f.write_flag(here, here)
    with n.raises((), "pinned"):
        f.map_pinned_tensor(torch.zeros(4), 0)
    f.wait(f.push_pull([here], [1], [here], [2]))


def one_server(n):
    (handler, tensors, _), = n.f.get_batch()
    n.f.respond(tensors, handler, True)


@on_gpu
def test_wrong(cluster):
    gpu_cluster(cluster).run(wrong_worker, one_server)


def cpu_worker(n):
    with n.raises(ValueError, "tensor on gpu:0 but this node's backend is CPU", "STEPMESH_BAKCEND"):
        n.f.push_pull([torch.ones(4, device="cuda")], [1], [torch.zeros(4)], [2])
    x = torch.ones(4)
    n.f.wait(n.f.push_pull([x], [1], [x], [2]))


@on_gpu
def test_backend_cpu(cluster):
    cluster(lib="torch").run(cpu_worker, one_server)


class OnGPU:
    """An array that claims to be on a GPU."""

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, stream=None):
        raise BufferError("asked with stream %r" % stream)


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
def test_errors_without_gpu():
    import fserver_lib as f

    def made():
        f.SimpleNotify().init()

    one = torch.zeros(1, dtype=torch.int64)
    for call in (made, lambda: f.map_pinned_tensor(one, 0), lambda: f.write_flag(one, one), lambda: f.wait_flag(one, one), lambda: f.seq_add_one(one)):
        with pytest.raises(f.Error, match="backend not available: (built without CUDA; build with|.*no GPU|.*no driver)"):
            call()
    for method in ("wait_event_done", "block_now_stream", "block_now_stream_and_get_batch", "get_future_batch_data"):
        with pytest.raises(f.Error, match=r"call init\(\) of this SimpleNotify first"):
            getattr(f.SimpleNotify(), method)()
    with pytest.raises(f.Error, match=r"push_tensors\[0\]"):
        f.push_pull([OnGPU()], [1], [one], [2])
    for call in (lambda: f.map_pinned_tensor(one), lambda: f.write_flag(one), lambda: f.seq_add_one(), lambda: f.SimpleNotify().stream_wait_event()):
        with pytest.raises(TypeError):
            call()
