"""The order of calls that the original allows, and its vLLM pair with stand-ins for the
engine: one attention process, one FFN process, 61 layers of three micro-batches."""

import ctypes
import os
import subprocess
import sys
from collections import deque

import arrays
import harness
from harness import by_hand

LAYERS, STAGES, ROWS, HIDDEN = 61, 3, 4, 64


class Connector:
    """The calls of an engine's connector: a notify in the constructor, before the
    variables are set and before init()."""

    def __init__(self, n, role):
        self.n, self.f, self.lib = n, n.f, n.lib
        notify = n.f.SimpleNotify()
        try:
            notify.init()
        except n.f.Error as e:  # only if there is no GPU
            assert "backend not available" in str(e), e
        self.notify = notify
        self.events = deque(maxlen=STAGES)
        self.send = [self.lib.zeros("int16", (2 * ROWS, HIDDEN)) for _ in range(STAGES)]
        self.recv = [[self.lib.zeros("int16", (2 * ROWS, HIDDEN))] for _ in range(STAGES)]
        self.scheduler = None
        os.environ["DMLC_ROLE"] = role
        os.environ["STEPMESH_BIND_CPU_CORE"] = "1"
        if role == "server":
            self.scheduler = subprocess.Popen(
                [sys.executable, "-c", 'import fserver_lib as f, os; os.environ["DMLC_ROLE"] = "scheduler"; f.init(); f.stop()'],
                env=os.environ.copy())

    def send_attn_output(self, stage, data):
        write(self.n, self.send[stage], data)
        handler = self.f.push_pull([self.send[stage][:ROWS]], [stage + int(self.n.rank * 1e6)],
                                   [r[:ROWS] for r in self.recv[stage]], [stage + 1000])
        self.events.append((handler, stage))

    def recv_ffn_output(self):
        handler, stage = self.events.popleft()
        handlers = self.f.get_all_handlers(handler)
        assert len(handlers) == 2
        self.f.wait(handler, timeout_ms=50000)
        costs = [self.f.fetch_trace(h) for h in handlers]
        assert all(c == sorted(c) and c[0] > 0 for c in costs), costs
        return self.lib.bytes(self.recv[stage][0][:ROWS])


def write(n, tensor, data):
    ctypes.memmove(n.lib.pointer(tensor), data, len(data))


def rows(layer, stage):
    return arrays.pattern((layer << 8) + stage, "int16", (ROWS, HIDDEN))


@by_hand
def attention(n):
    c = Connector(n, "worker")
    n.f.init()
    for layer in range(LAYERS):
        for stage in range(STAGES):
            if layer > 0:
                assert c.recv_ffn_output() == bytes(b ^ 1 for b in rows(layer - 1, stage)), (layer, stage)
            c.send_attn_output(stage, rows(layer, stage))
    for stage in range(STAGES):
        assert c.recv_ffn_output() == bytes(b ^ 1 for b in rows(LAYERS - 1, stage)), stage
    n.f.stop()


@by_hand
def ffn(n):
    c = Connector(n, "server")
    n.f.init()
    answer = [n.lib.zeros("int16", (64, HIDDEN)) for _ in range(2 * STAGES)]
    for i in range(LAYERS * STAGES):
        batches = n.f.get_batch()
        assert len(batches) == 1
        ret = answer[i % len(answer)]  # a worker waits for a stage before it sends it again
        write(n, ret, bytes(b ^ 1 for b in n.lib.bytes(batches[0][1][0])))
        n.f.respond_vec(ret, [b[1][0] for b in batches], [b[0] for b in batches])
    n.f.stop()
    assert c.scheduler.wait() == 0


def host_lib():
    return "torch" if "torch" in harness.libraries() else "numpy"


def test_vllm_pair(cluster):
    c = cluster(lib=host_lib())
    c.spawn("worker", attention)
    c.spawn("server", ffn)
    c.finish(120)


# Every call, at each time at which the original allows it.

@by_hand
def worker(n):
    f = n.f
    early = f.get_nanosecond()
    kept = f.SimpleNotify()  # lives until after stop()
    del kept
    kept = f.SimpleNotify()
    for call, arguments in ((f.push_pull, ([], [], [], [])), (f.wait, (0,)), (f.get_all_handlers, (0,)), (f.fetch_trace, (0,)),
                            (f.barrier, (True, True)), (f.stop, ())):
        with n.raises((), "init"):
            call(*arguments)
    f.init()
    x = [n.lib.make("uint8", (8,), bytes([i] * 8)) for i in range(4)]
    y = [n.lib.zeros("uint8", (8,)) for _ in x]
    flying = [f.push_pull([t], [i], [p], [i]) for i, (t, p) in enumerate(zip(x, y))]
    assert [f.get_all_handlers(h) for h in flying] == [[h, h + 1] for h in flying]
    assert all(f.fetch_trace(h + 1) == [0] * 8 for h in flying)  # the server waits for the barrier
    f.barrier(True, True)
    for h in reversed(flying):  # in any order, from the middle, again
        f.wait(h + 1)
        f.wait(h)
        f.wait(h)
        assert f.get_all_handlers(h) == [h]
        assert f.fetch_trace(h)[0] > early
    for i, p in enumerate(y):
        assert n.lib.bytes(p) == bytes([i] * 8)
    f.barrier(True, True, False)
    f.wait(f.push_pull(x[1:2], [0], y[:1], [0]))  # after the registration
    assert n.lib.bytes(y[0]) == bytes([1] * 8)
    f.wait(f.push_pull(x[:1], [9], [], []))  # answered by an empty list
    f.stop()
    f.stop()
    assert f.get_nanosecond() > early
    del kept


@by_hand
def server(n):
    f = n.f
    for call, arguments in ((f.get_batch, ()), (f.respond, ([], 0)), (f.respond_vec, (n.lib.zeros("uint8", (8,)), [], [])),
                            (f.register_recv_buffer, (n.lib.zeros("uint8", (8,)), [0], [0]))):
        with n.raises((), "init"):
            call(*arguments)
    f.init()
    f.barrier(True, True)
    batches = [f.get_batch()[0] for _ in range(4)]  # before any of them is answered
    for handler, tensors, _ in reversed(batches[1:]):
        f.respond(tensors, handler)
    f.respond_vec(batches[0][1][0], batches[0][1], [batches[0][0]])
    buffer = n.lib.zeros("uint8", (8,))
    f.register_recv_buffer(buffer, [0], [0])  # late: from the next push on
    f.barrier(True, True, False)
    (handler, (t,), keys), = f.get_batch()
    assert keys == [0] and n.lib.pointer(t) == n.lib.pointer(buffer) and n.lib.bytes(buffer) == bytes([1] * 8)
    f.respond([t], handler)
    (handler, _, _), = f.get_batch()
    f.respond([], handler)
    f.stop()
    f.stop()


def test_every_call(cluster):
    cluster(lib=host_lib()).run(worker, server)
