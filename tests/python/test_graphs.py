"""Prepared exchanges in CUDA graphs: start() and wait() are captured, and replayed with
other contents. Without a GPU these tests are skipped and say why."""

import time

import harness
import pytest

torch = pytest.importorskip("torch", reason="the tests on GPUs use PyTorch")
from harness import scheduler  # noqa: E402, F401
from test_gpu import GPUS, on_gpu  # noqa: E402

vans = pytest.mark.parametrize("ipc", ["0", "1"], ids=["zmq", "local"])
ROWS, COLUMNS = 16, 1024
PARTS = 3  # micro-batches in flight
REPLAYS = 1000

# Replays that are queued before the stream is waited for. 100 are more than the queue takes, so launches wait for
# room; copies by the library through host memory do not get on then.
AHEAD = 100
AHEAD_THROUGH_HOST = 5
LIMIT = 20.0  # seconds in which a stream must go on


def start(cluster, worker, server, ipc="1"):
    """A worker on GPU 0, and a server on GPU 1 if there is one: two processes take turns on
    one GPU. Returns the cluster and these two."""
    c = cluster(lib="torch", env={"STEPMESH_BAKCEND": "GPU", "BYTEPS_ENABLE_IPC": ipc})
    c.spawn("scheduler", scheduler)
    other = min(GPUS - 1, 1)
    return c, c.spawn("worker", worker), c.spawn("server", server, env={"STEPMESH_GPU": str(other), "DMLC_RANK_OFFSET": str(-other)})


def run(cluster, worker, server, ipc="1", timeout=harness.LIMIT):
    """The result of the worker."""
    return start(cluster, worker, server, ipc)[0].finish(timeout)[0]


def captured(step):
    """A graph of step, whose kernels are loaded: CUDA may wait for all streams then."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def own_stream():
    """Not the default one: a launch that waits there for room keeps everybody out of the driver (docs/gpu.md)."""
    torch.cuda.synchronize()
    return torch.cuda.stream(torch.cuda.Stream())


def settle(stream=None):
    """Waits for the stream, with a limit."""
    event = torch.cuda.Event()
    event.record(stream)
    end = time.monotonic() + LIMIT
    while not event.query():
        if time.monotonic() > end:
            import faulthandler
            import os

            faulthandler.dump_traceback()
            print("the stream waits for ever", flush=True)
            os._exit(3)  # the end of the process would wait for the stream
        time.sleep(0.0005)


def ints(n, value=0):
    return torch.full((ROWS, COLUMNS), value, dtype=torch.int32, device="cuda:%d" % n.instance)


class Part:
    """A micro-batch: it sends base + step, and counts wrong elements."""

    def __init__(self, n, index):
        self.base, self.push, self.pull, self.want = ints(n), ints(n), ints(n), ints(n)
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.push.device)
        self.x = n.f.prepare([self.push], [10 * index], [self.pull], [10 * index + 1])

    def send(self, step):
        torch.add(self.base, step, out=self.push)
        self.pull.fill_(-1)
        self.x.start()

    def receive(self, timeout_ms=10000):
        self.x.wait(timeout_ms)
        torch.mul(self.push, 3, out=self.want)
        self.wrong.add_((self.pull != self.want).sum())


def serve(n):
    """Answers each push with three times its values, until finish()."""
    while True:
        for handler, (t,), keys in n.f.get_batch():
            if keys == [999]:
                n.f.respond([], handler)
                return
            n.f.respond([t * 3], handler, True)


def finish(n):
    n.f.wait(n.f.push_pull([torch.zeros(0)], [999], [], []))


# Values, bit for bit.

def replay_worker(n):
    parts, step = [Part(n, i) for i in range(PARTS)], torch.zeros((), dtype=torch.int32, device="cuda:%d" % n.instance)

    def layer():
        step.add_(1)
        for p in parts:
            p.send(step)
        for p in parts:
            p.receive()

    graph = captured(layer)
    ahead = AHEAD if n.env["BYTEPS_ENABLE_IPC"] == "1" else AHEAD_THROUGH_HOST
    begun = time.perf_counter()
    with own_stream():
        for i in range(REPLAYS):
            if i % 50 == 0:
                for p in parts:
                    p.base.random_(-1 << 30, 1 << 29)
            graph.replay()
            if i % ahead == ahead - 1:
                settle()
            if i % 100 == 99:
                p = parts[i // 100 % PARTS]
                p.send(step)  # not of the graph
                p.receive()
        settle()
    took = time.perf_counter() - begun
    for p in parts:
        p.x.check()
        assert int(p.wrong) == 0, int(p.wrong)
        assert int(step) == REPLAYS + 1
    finish(n)
    return took / REPLAYS * 1e6


@on_gpu
@vans
def test_replays(cluster, ipc):
    took = run(cluster, replay_worker, serve, ipc, timeout=110)
    print("%.1f us for each replay of %d exchanges" % (took, PARTS))


# Streams of their own for micro-batches, joined in the graph; graphs for numbers of rows.

def streams_worker(n):
    parts, one = [Part(n, i) for i in range(PARTS)], torch.ones((), dtype=torch.int32, device="cuda:%d" % n.instance)
    streams = [torch.cuda.Stream() for _ in parts]

    def layer():
        here = torch.cuda.current_stream()
        for p, s in zip(parts, streams):
            s.wait_stream(here)
            with torch.cuda.stream(s):
                p.send(one)
                p.receive()
        for s in streams:
            here.wait_stream(s)

    graph = captured(layer)
    for i in range(100):
        for p in parts:
            p.base.fill_(i)
        graph.replay()
    settle()
    p = parts[0]
    graphs = {}
    for rows in (0, 1, 7, ROWS):
        def some():
            p.x.start(rows=rows)
            p.x.wait()
        graphs[rows] = captured(some)
    for i, rows in enumerate((7, 0, ROWS, 1, 7)):
        p.push.fill_(i)
        p.pull.fill_(-1)
        graphs[rows].replay()
        settle()
        assert bool((p.pull[:rows] == 3 * i).all()) and bool((p.pull[rows:] == -1).all()), (rows, p.pull)
    for p in parts:
        p.x.check()
        assert int(p.wrong) == 0
    finish(n)


@on_gpu
def test_streams_and_rows(cluster):
    run(cluster, streams_worker, serve)


# A timeout, misuse, and later rounds.

def late_worker(n):
    p = Part(n, 0)
    p.push.fill_(5)

    def ask(timeout_ms=300):
        p.x.start()
        p.x.wait(timeout_ms)

    ask(10000)  # the first one takes longer
    graph = captured(ask)
    graph.replay()
    settle()
    with n.raises(TimeoutError, "worker 0", "round 1 that a stream has started", "server 0", "limit 300ms"):
        p.x.start()
    graph.replay()
    settle()
    p.x.check()
    assert bool((p.pull == 15).all())
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        p.x.start()
        with n.raises((), "started already"):
            p.x.start()
    graph = captured(ask)
    p.x.start()
    graph.replay()  # during a round that is not of the graph
    settle()
    with n.raises((), "round 3", "started already"):
        p.x.check()
    p.x.wait()
    assert bool((p.pull == 15).all())
    p.x.check()
    with n.raises((), "not started"):
        p.x.wait()
    finish(n)


def late_server(n):
    kept = []
    for i in range(7):  # two to warm up, late, in time, warm-up, one during a replay, finish()
        for handler, tensors, keys in n.f.get_batch():
            if keys == [999]:
                n.f.respond([], handler)
                return
            if i == 2:
                kept.append(handler)  # not answered
            else:
                n.f.respond([tensors[0] * 3], handler, True)


@on_gpu
def test_late(cluster):
    run(cluster, late_worker, late_server)


# After close() and stop(): neither hangs, nor is memory used that is not there.

@harness.by_hand
def after_worker(n):
    n.f.init()
    p, q, other = Part(n, 0), Part(n, 1), Part(n, 2)

    def ask(p):
        def step():
            p.x.start()
            p.x.wait()
        return captured(step)

    graphs = [ask(p), ask(q), ask(other)]
    for graph in graphs:
        graph.replay()
    settle()
    p.x.close()
    graphs[0].replay()
    settle()
    deadline = time.monotonic() + LIMIT
    failed = None
    while failed is None and time.monotonic() < deadline:  # the library may not have noticed it yet
        try:
            p.x.check()
            graphs[0].replay()
            settle()
        except RuntimeError as e:
            failed = str(e)
    assert failed and "closed" in failed, failed
    graphs[1].replay()  # other graphs continue
    settle()
    q.x.check()
    finish(n)
    n.f.stop()
    for _ in range(3):
        for graph in graphs:
            graph.replay()
    settle()
    with n.raises((), "closed"):
        q.x.check()
    del other.x
    del p.x, p, other
    for graph in graphs:
        graph.replay()
    settle()
    with n.raises(()):
        q.x.start()
    return "done"


@on_gpu
def test_after(cluster):
    assert run(cluster, after_worker, serve) == "done"


# A server that is killed while graphs are replayed.

def survivor(n):
    parts = [Part(n, i) for i in range(PARTS)]
    one = torch.ones((), dtype=torch.int32, device="cuda:%d" % n.instance)

    def layer():
        for p in parts:
            p.send(one)
        for p in parts:
            p.receive()

    graph = captured(layer)
    n.tell("replaying")
    failed = None
    end = time.monotonic() + LIMIT
    while failed is None and time.monotonic() < end:
        graph.replay()
        settle()
        try:
            for p in parts:
                p.x.check()
        except ConnectionError as e:
            failed = str(e)
    assert failed and "server 0" in failed and "round" in failed, failed
    for _ in range(3):  # there is no server
        graph.replay()
    settle()
    with n.raises(ConnectionError, "server 0"):
        parts[0].x.close()
    n.tell(failed)
    import os

    os._exit(0)  # without the barrier of stop(), for which the server is missing


@on_gpu
@vans
def test_killed(cluster, ipc):
    _, worker, server = start(cluster, survivor, serve, ipc)
    assert worker.hear() == "replaying"
    time.sleep(0.3)
    server.kill()
    assert "server 0" in worker.hear()
    assert worker.wait() == 0, worker.report()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_check_without_gpu(cluster):
    """check() of an exchange that is in no graph raises nothing."""
    cluster(lib="torch").run(unused_worker, unused_server)


def unused_worker(n):
    x = n.f.prepare([torch.ones(3)], [1], [torch.zeros(3)], [2])
    x.check()
    n.f.wait(x.start())
    x.check()
    x.close()
    x.check()


def unused_server(n):
    (handler, tensors, _), = n.f.get_batch()
    n.f.respond(tensors, handler)
