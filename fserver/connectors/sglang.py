"""The communication layer of SGLang's attention/FFN disaggregation.

Written against python/sglang/srt/layers/moe/token_dispatcher/stepmesh.py of
sgl-project/sglang PR #36258 (read at commit 0153775): StepMeshATTN and StepMeshFFN have
the constructors and methods of the classes there, and replace them:

    from fserver.connectors import sglang as stepaf
    stepaf.setup("attention", rank, attention=3, ffn=2, host=..., width=..., dtype=..., max_rows=...)
    from fserver.connectors.sglang import StepMeshATTN, StepMeshFFN

Any number of attention and FFN ranks is possible. Batches without rows and fp8 tensors are
sent unchanged. The number of tokens is never read back from a device.
"""

import collections
import os

import torch

from . import cluster

_here = None  # the one _Context of the process


def _pair():
    """Returns the module of the two sides. It imports fserver_lib, so it is imported at its
    first use, after an engine has forked."""
    from . import pair

    return pair


class _Context:
    def __init__(self, side, inflight):
        self.side = side
        self.free = set(range(inflight))  # free stages, on the attention side
        self.counts = {}  # by stage: the tokens of each FFN rank of the group
        self.last = {}  # by stage: the layer of its latest batch


def setup(role, rank, *, attention=None, ffn=None, host="127.0.0.1", port=8123, width, dtype, max_rows, layers, inflight=2, device=None, transport=None, scheduler="auto", timeout_ms=15000, init_timeout_ms=600000):
    """Joins the cluster as attention or FFN rank `rank`. The default numbers of ranks are
    DMLC_NUM_WORKER and DMLC_NUM_SERVER. device is the device of the tensors: by default the
    current CUDA device, or the CPU. inflight is the largest number of micro-batches under
    way. A second call does nothing."""
    global _here
    if _here is not None:
        return
    attention = int(os.environ.get("DMLC_NUM_WORKER", 1)) if attention is None else attention
    ffn = int(os.environ.get("DMLC_NUM_SERVER", 1)) if ffn is None else ffn
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    cluster.join(role, rank, attention, ffn, host=host, port=port, device=(device.index or 0) if device.type == "cuda" else 0,
                 transport=transport, scheduler=scheduler, timeout_ms=init_timeout_ms)
    common = dict(width=width, dtype=dtype, stages=inflight, layers=layers, timeout_ms=timeout_ms)
    try:
        if role == "attention":
            side = _pair().Attention(rank, attention, ffn, max_rows=max_rows, device=device, **common)
        else:
            side = _pair().FFN(rank, attention, ffn, device=device, **common)
    except BaseException:
        cluster.leave(0)  # the other ranks would wait for this one
        raise
    _here = _Context(side, inflight)


def close(timeout_ms=10000):
    """Leaves the cluster."""
    global _here
    if _here is not None:
        _here = None
        cluster.leave(timeout_ms)


def _context(role):
    if _here is None:
        raise RuntimeError("fserver.connectors.sglang: setup() was not called, or close() was")
    if _here.side.role != role:
        raise RuntimeError("%s: this is of the %s side" % (_here.side, role))
    return _here


class StepMeshATTN:
    """The attention side of a layer."""

    def __init__(self, layer_id, group=None):
        self.layer_id = layer_id
        self.waits = collections.deque()

    def send(self, p):
        """Sends the experts' input: hidden_states, topk_weights, topk_ids, router_logits."""
        c = _context("attention")
        if not c.free:
            raise RuntimeError("%s: layer %d: %d micro-batches are under way, want recv() first, or a larger inflight" % (c.side, self.layer_id, c.side.stages))
        stage = min(c.free)  # if one micro-batch is sent at a time, all its layers have the same stage
        try:
            c.free.remove(stage)
            self.waits.append(stage)
            c.side.send(stage, [p["hidden_states"], p["topk_weights"], p["topk_ids"], p["router_logits"]], layer=self.layer_id)
        except BaseException:
            if not c.side.under_way(stage):  # else KeyboardInterrupt was raised after the round has begun
                if stage in self.waits:
                    self.waits.remove(stage)
                c.free.add(stage)
            raise

    def recv(self):
        """Returns the experts' output for the oldest send: a new tensor."""
        c = _context("attention")
        if not self.waits:
            raise RuntimeError("%s: layer %d: nothing is under way, want send() first" % (c.side, self.layer_id))
        stage = self.waits[0]
        try:
            return c.side.recv(stage).clone()
        finally:
            self.waits.popleft()
            c.free.add(stage)


class StepMeshFFN:
    """The FFN side of a layer. group has the FFN ranks that compute together. Each has the
    tokens of the attention ranks that it serves."""

    def __init__(self, layer_id, group):
        self.layer_id, self.group = layer_id, group
        self.comms = collections.deque()

    def recv(self):
        """Returns the tokens of all ranks of the group: hidden states and top-k choices."""
        batch = _context("ffn").side.recv()
        if batch.layer != self.layer_id:
            raise _pair().Mismatch("%s: attention %s sent layer %d, layer %d is next here" % (_here.side, batch.ranks, batch.layer, self.layer_id))
        if len(batch.tensors) != 4:
            raise _pair().Mismatch("%s: attention %s sent %d tensors, want hidden_states, topk_weights, topk_ids and router_logits" % (_here.side, batch.ranks, len(batch.tensors)))
        counts = self._counts(batch)
        self.comms.append((batch, counts))
        tensors = batch.tensors if len(counts) == 1 else [self._gather(t, counts) for t in batch.tensors]
        return tensors[0], _topk(*tensors[1:])

    def send(self, x):
        """Answers the oldest batch of recv with the sum of the results of the group's ranks."""
        if not self.comms:
            raise RuntimeError("%s: send: no batch of layer %d has been received that is not answered" % (_context("ffn").side, self.layer_id))
        batch, counts = self.comms[0]
        begin = sum(counts[:self.group.rank_in_group])
        own = slice(begin, begin + counts[self.group.rank_in_group])
        if len(counts) > 1:
            x = self.group.all_reduce(x)  # before the check: the other ranks wait for this one
        batch._check(x[own])
        self.comms.popleft()
        batch.respond(x[own])

    def _counts(self, batch):
        """Returns the number of tokens of each rank of the group. It is the same for all layers
        of a step; the hosts exchange it in the first layer."""
        if self.group.world_size == 1:
            return [sum(batch.rows)]
        c, stage, layer, own = _here, batch.stage, batch.layer, sum(batch.rows)
        last, c.last[stage] = c.last.get(stage), layer
        if last is None or layer <= last:  # layer numbers rise within a step; the first layer with experts may be above 0
            c.counts.pop(stage, None)
            said = self.group.all_gather_object((stage, layer, own))
            if any(one[:2] != (stage, layer) for one in said):
                raise _pair().Mismatch("%s: the FFN ranks of the group have batches of different stages or layers: %s (stage, layer, tokens)" % (c.side, said))
            c.counts[stage] = [one[2] for one in said]
        counts = c.counts.get(stage)
        if counts is None or counts[self.group.rank_in_group] != own:
            c.last.pop(stage, None)  # the next batch begins with an exchange
            raise _pair().Mismatch("%s: stage %d, layer %d: attention %s sent %d tokens, the group counts with %s since the first layer of this step" % (
                c.side, stage, layer, batch.ranks, own, counts))
        return counts

    def _gather(self, t, counts):
        """Gathers the rows of t of all ranks. The numbers of rows may differ."""
        most, raw = max(counts), _pair()._raw(t)
        if most == 0:
            return t
        if len(raw) < most:
            raw = torch.cat([raw, raw.new_zeros((most - len(raw),) + tuple(raw.shape[1:]))])
        raw = self.group.all_gather(raw, dim=0)
        if min(counts) < most:
            raw = torch.cat([raw[i * most:i * most + n] for i, n in enumerate(counts)])
        return raw.view(t.dtype) if raw.dtype != t.dtype else raw


def _topk(weights, ids, logits):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(weights, ids, logits)
