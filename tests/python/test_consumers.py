"""The calls of real programs: SGLang's dispatcher for attention and FFN apart, and
vLLM's connector. Both with two servers, two workers and three microbatches in
flight."""

import time

import arrays
from harness import by_hand

MICROBATCHES = 3
LAYERS = 6
HIDDEN = 64
TOPK = 4


# SGLang. Keys are ranges that begin at rank << 24; each shape has tensors and keys
# of its own, which are used again and again.

def hidden(rank, layer, mb, tokens):
    return arrays.pattern((rank << 20) + (layer << 8) + mb, "bfloat16", (tokens, HIDDEN))




class Shapes:
    """The tensors and keys for a number of tokens in a microbatch."""

    def __init__(self, lib, key, tokens, servers):
        bf16 = "bfloat16" if "bfloat16" in lib.dtypes else "int16"
        if tokens == 0:
            self.push = [lib.make("int32", (5,), arrays.pattern(1, "int32", (5,)))]
            self.pull = [lib.zeros("int32", (5,)) for _ in range(servers)]
        else:
            self.push = [lib.zeros(bf16, (tokens, HIDDEN)), lib.zeros("float32", (tokens, TOPK)),
                         lib.zeros("int32", (tokens, TOPK)), lib.zeros("float32", (tokens, 16))]
            self.pull = [lib.zeros(bf16, (tokens, HIDDEN)) for _ in range(servers)]
        self.push_keys = range(key, key + len(self.push))
        self.pull_keys = range(key + len(self.push), key + len(self.push) + servers)
        self.next = self.pull_keys.stop


def write(n, tensor, data):
    import ctypes

    ctypes.memmove(n.lib.pointer(tensor), data, len(data))


def tokens_of(layer, mb):
    return (layer * 7 + mb * 5) % 4 * 3  # 0 among them


def sglang_worker(n):
    f, cache, key = n.f, {}, n.rank << 24
    for layer in range(LAYERS):
        flying = []
        for mb in range(MICROBATCHES):
            tokens = tokens_of(layer, mb)
            if (tokens, mb) not in cache:
                cache[tokens, mb] = Shapes(n.lib, key, tokens, n.servers)
                key = cache[tokens, mb].next
            s = cache[tokens, mb]
            if tokens:
                write(n, s.push[0], hidden(n.rank, layer, mb, tokens))
            flying.append((f.push_pull(s.push, s.push_keys, s.pull, s.pull_keys), s, tokens))
        for mb, (h, s, tokens) in enumerate(flying):
            f.wait(h)
            for server, got in enumerate(s.pull):
                want = hidden(n.rank, layer, mb, tokens) if tokens else arrays.pattern(1, "int32", (5,))
                assert n.lib.bytes(got) == bytes(b ^ server for b in want), (layer, mb, server)


def sglang_server(n):
    f, kept = n.f, []
    for layer in range(LAYERS):
        for mb in range(MICROBATCHES):
            b = f.get_batch()
            while not b:
                b = f.get_batch()
            assert len(b) == n.workers
            for rank in range(n.workers):
                id, tensors = b[rank][0], b[rank][1]
                assert len(tensors) == (4 if tokens_of(layer, mb) else 1)
                assert b[rank][2][0] >> 24 == rank
                data = bytes(x ^ n.rank for x in n.lib.bytes(tensors[0]))
                t = n.lib.make(n.lib.dtype(tensors[0]), n.lib.shape(tensors[0]), data)
                f.respond([t], id, True)
                kept.append(t)
                if len(kept) > 100:
                    kept.pop(0)


def test_sglang(cluster):
    cluster(workers=2, servers=2).run(sglang_worker, sglang_server)


@by_hand
def forever(n):
    """A scheduler like SGLang's: a child that sleeps forever."""
    n.f.init()
    n.tell("up")
    while True:
        time.sleep(3600)


@by_hand
def leaves(n):
    """A node like SGLang's: it never calls stop."""
    n.f.init()
    if n.role == "worker":
        sglang_worker(n)
        n.tell("done")
        n.listen()
    else:
        sglang_server(n)
        n.tell("done")
        n.listen()


def test_sglang_without_stop(cluster):
    """The scheduler starts last, and no node calls stop."""
    c = cluster()
    nodes = [c.spawn("worker", leaves), c.spawn("server", leaves)]
    scheduler = c.spawn("scheduler", forever, env={"STEPMESH_GPU": "0"})
    assert scheduler.hear() == "up"
    assert [p.hear() for p in nodes] == ["done", "done"]
    for p in nodes:
        p.tell("leave")
        assert p.wait() == 0, p.report()
    assert scheduler.popen.poll() is None, scheduler.report()


# Forks of SGLang: groups of one on GPU k with an offset, one scheduler each, and a
# buffer registered right after init.

def offset_worker(n):
    n.f.barrier(True, True)
    pull = n.lib.zeros("uint8", (8,))
    for i in range(3):
        n.f.wait(n.f.push_pull([n.lib.make("uint8", (8,), bytes([i] * 8))], [0], [pull], [1]))
        assert n.lib.bytes(pull) == bytes([i] * 8)


def offset_server(n):
    y = n.lib.zeros("uint8", (8,))
    n.f.register_recv_buffer(y, [0], [0])
    n.f.barrier(True, True)
    for i in range(3):
        (handler, (t,), _), = n.f.get_batch()
        assert n.lib.pointer(t) == n.lib.pointer(y)
        n.f.respond([n.lib.make("uint8", (8,), n.lib.bytes(y))], handler)


def test_rank_offset(cluster):
    """DMLC_RANK_OFFSET=-gpu with groups of one, and stop() works."""
    c = cluster(env={"STEPMESH_GPU": "3", "DMLC_RANK_OFFSET": "-3"}, lib="torch" if "torch" in libraries() else "numpy")
    c.run(offset_worker, offset_server)


def libraries():
    import harness

    return harness.libraries()


# vLLM. Fixed buffers of which a batch uses the first rows; keys stage + rank * 1e6
# and stage + 1000; the answers are slices of one buffer, all from row 0.

STAGES, MAX_ROWS = 3, 16


def vllm_rows(layer, stage):
    return MAX_ROWS - (layer + stage) % 5


def vllm_worker(n):
    f, lib = n.f, n.lib
    send = [lib.zeros("int16", (MAX_ROWS, HIDDEN)) for _ in range(STAGES)]
    recv = [[lib.zeros("int16", (MAX_ROWS, HIDDEN)) for _ in range(n.servers)] for _ in range(STAGES)]
    for layer in range(LAYERS):
        flying = []
        for stage in range(STAGES):
            rows = vllm_rows(layer, stage)
            write(n, send[stage], arrays.pattern((n.rank << 16) + (layer << 8) + stage, "int16", (rows, HIDDEN)))
            handler = f.push_pull([send[stage][:rows]], [stage + int(n.rank * 1e6)],
                                  [r[:rows] for r in recv[stage]], [stage + 1000] * n.servers)
            flying.append((handler, f.get_all_handlers(handler)))
        for stage, (handler, handlers) in enumerate(flying):
            rows = vllm_rows(layer, stage)
            f.wait(handler, timeout_ms=50000)
            for h in handlers:
                trace = f.fetch_trace(h)
                assert trace == sorted(trace) and trace[0] > 0
            # Every worker gets the first rows, which worker 0 has sent.
            want = arrays.pattern((layer << 8) + stage, "int16", (rows, HIDDEN))
            for server, r in enumerate(recv[stage]):
                assert lib.bytes(r[:rows]) == bytes(b ^ (server + 1) for b in want), (layer, stage, server)


def vllm_server(n):
    f, lib = n.f, n.lib
    ret_buffer = [lib.zeros("int16", (n.workers * MAX_ROWS, HIDDEN)) for _ in range(8)]
    for layer in range(LAYERS):
        for stage in range(STAGES):
            ids, outputs, parts = [], [], b""
            for rank, (handler, tensors, keys) in enumerate(f.get_batch()):
                assert keys == [stage + rank * 1000000]
                ids.append(handler)
                outputs.append(tensors[0])
                parts += lib.bytes(tensors[0])
            # The port sends the contents of the buffer at the time of the send: not one buffer
            # for all stages in flight.
            buffer = ret_buffer[(layer * STAGES + stage) % len(ret_buffer)]
            write(n, buffer, bytes(b ^ (n.rank + 1) for b in parts))
            f.respond_vec(buffer, outputs, ids)


def test_vllm(cluster):
    lib = "torch" if "torch" in libraries() else "numpy"
    cluster(workers=2, servers=2, lib=lib).run(vllm_worker, vllm_server)


# The scheduler of vLLM's connector: python -c, init(); stop().

@by_hand
def environment_after_import(n):
    """Variables set by os.environ and by os.putenv, after the import."""
    n.f.init()
    n.f.stop()


def test_variables_after_import(cluster):
    c = cluster()
    for role in ("scheduler", "server", "worker"):
        c.spawn(role, environment_after_import)
    c.finish()
