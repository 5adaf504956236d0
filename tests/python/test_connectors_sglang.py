"""The dispatcher for SGLang, driven as its layers drive theirs, with stand-ins for the parts
of SGLang that it uses."""

import os
import sys

import harness
import pytest

if "torch" not in harness.libraries():
    pytest.skip("the connectors are for PyTorch, which this Python has not", allow_module_level=True)

import torch

WIDTH, LAYERS, STEPS, TOPK = 8, 2, 3, 2
WAIT = 180  # seconds


class Group:
    """The methods of a GroupCoordinator that the dispatcher uses, over gloo."""

    def __init__(self, rank, size, port):
        self.rank_in_group, self.world_size = rank, size
        self.objects = 0
        if size > 1:
            torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:%d" % port, rank=rank, world_size=size)

    def all_gather(self, t, dim):
        assert dim == 0
        out = [torch.empty_like(t) for _ in range(self.world_size)]
        torch.distributed.all_gather(out, t.contiguous())
        return torch.cat(out)

    def all_reduce(self, t):
        torch.distributed.all_reduce(t)
        return t

    def all_gather_object(self, one):
        self.objects += 1
        out = [None] * self.world_size
        torch.distributed.all_gather_object(out, one)
        return out


def setup(n, layers=LAYERS):
    from fserver.connectors import sglang

    port = int(n.env["DMLC_PS_ROOT_PORT"])
    for name in list(os.environ):
        if name.startswith(("DMLC_", "STEPMESH_")):
            del os.environ[name]
    sglang.setup("attention" if n.role == "worker" else "ffn", n.rank, attention=n.workers, ffn=n.servers, port=port,
                 width=WIDTH, dtype=torch.float32, max_rows=16, layers=layers, timeout_ms=20000)
    sglang.setup("neither", 99, width=1, dtype=None, max_rows=0, layers=0)  # a second call does nothing
    return sglang


def tokens(step, rank):
    return (2 * step + 3 * rank) % 5  # also none


def batch(step, layer, rank, micro):
    n = tokens(step, rank)
    x = torch.arange(n * WIDTH, dtype=torch.float32).reshape(n, WIDTH) + 100 * rank + 10 * step + layer + 0.5 * micro
    return dict(hidden_states=x, topk_weights=torch.full((n, TOPK), 0.25 + rank), topk_ids=torch.full((n, TOPK), rank, dtype=torch.int32),
                router_logits=torch.full((n, 4), float(step)))


@harness.by_hand
def attention(n):
    sglang = setup(n)
    layers = [sglang.StepMeshATTN(i, None) for i in range(LAYERS)]
    with pytest.raises(RuntimeError, match="nothing is under way"):
        layers[0].recv()
    for step in range(STEPS):
        for i, layer in enumerate(layers):
            for micro in range(2):
                layer.send(batch(step, i, n.rank, micro))
            with pytest.raises(RuntimeError, match="2 micro-batches are under way"):
                layer.send(batch(step, i, n.rank, 0))
            kept = [layer.recv() for _ in range(2)]
            for micro, got in enumerate(kept):
                p = batch(step, i, n.rank, micro)
                want = p["hidden_states"] * n.servers + p["topk_weights"][:, :1] + n.rank + step
                assert got.shape == want.shape and torch.equal(got, want), (step, i, micro)
    sglang.close()
    with pytest.raises(RuntimeError, match="setup"):
        layers[0].recv()


@harness.by_hand
def ffn(n):
    sys.path.insert(0, os.path.join(harness.HERE, "standins"))
    group = Group(n.rank, n.servers, n.args)  # before the attention ranks join: it may take long, and their answers have a limit
    sglang = setup(n)
    layers = [sglang.StepMeshFFN(i, group) for i in range(LAYERS)]
    for step in range(STEPS):
        for i, layer in enumerate(layers):
            for micro in range(2):
                x, topk = layer.recv()
                assert len(x) == sum(tokens(step, r) for r in range(n.workers)) == len(topk.topk_ids)
                if n.rank == 0:  # each rank of the group has some of the experts; the answer is the sum of their results
                    x = x + topk.topk_weights[:, :1] + topk.topk_ids[:, :1] + topk.router_logits[:, :1]
                layer.send(x)
    assert group.objects == (STEPS * 2 if n.servers > 1 else 0), "token counts are exchanged in a step's first layer"
    sglang.close()


# One micro-batch at a time, and experts in layers 1, 2 and 3 only: token counts are those
# of the step all the same.

@harness.by_hand
def alone_attention(n):
    sglang = setup(n, 4)
    layers = [sglang.StepMeshATTN(i, None) for i in (1, 2, 3)]
    for step in range(STEPS):
        for layer in layers:
            p = batch(step, layer.layer_id, n.rank, 0)
            layer.send(p)
            assert torch.equal(layer.recv(), p["hidden_states"] * n.servers), (step, layer.layer_id)
    sglang.close()


@harness.by_hand
def alone_ffn(n):
    sys.path.insert(0, os.path.join(harness.HERE, "standins"))
    group = Group(n.rank, n.servers, n.args)
    sglang = setup(n, 4)
    layers = [sglang.StepMeshFFN(i, group) for i in (1, 2, 3)]
    for step in range(STEPS):
        for layer in layers:
            x, _ = layer.recv()
            assert len(x) == sum(tokens(step, r) for r in range(n.workers))
            layer.send(x)
    assert group.objects == STEPS
    sglang.close()


def test_one_micro_batch(cluster):
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    c, port = cluster(workers=2, servers=2), harness.free_port()
    for i in range(2):
        c.spawn("worker", alone_attention, rank=i)
        c.spawn("server", alone_ffn, rank=i, args=port)
    c.finish(WAIT)


@pytest.mark.parametrize("attentions, ffns", [(1, 1), (3, 2)])
def test_steps(cluster, attentions, ffns):
    if ffns > 1 and not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    c = cluster(workers=attentions, servers=ffns)
    for i in range(attentions):
        c.spawn("worker", attention, rank=i)
    port = harness.free_port()
    for i in range(ffns):
        c.spawn("server", ffn, rank=i, args=port)
    c.finish(WAIT)
