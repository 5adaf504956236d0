"""The connector for vLLM's AFD plugin.

Written against vllm-project/afd-plugin of 2026-08-08 (commit 2e4378f, for vLLM 0.26). The
classes used here had not changed at commit a915ce8. The plugin's list of connector names is
fixed. register() of fserver.connectors.vllm_plugin adds this connector's name; vLLM calls it
through the entry point of the installed package.

Each attention or FFN rank of the plugin is one node. Either side may have any number of
ranks; with fewer attention than FFN ranks, each FFN rank gets a share of the rows. Tensors
stay on the devices of the plugin's ranks, and no token count is read back from a device.
"""

import functools
import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Dict, Optional

import torch
from torch import library
from afd_plugin.connectors import (
    AFDA2FTransferPayload,
    AFDConnectorBase,
    AFDControlPlane,
    AFDDPMetadata,
    AFDTransferContext,
    AFDTransferMetadata,
    AFDTransferState,
    ConnectorExtraInfo,
)
from afd_plugin.connectors.metadata import decode_control_payload, encode_control_payload

from . import cluster, layout

NAME = "StepMeshAFDConnector"


def _pair():
    """Returns the module of the two sides. It imports fserver_lib, so it is imported at its
    first use, after an engine has forked."""
    from . import pair

    return pair


@dataclass(frozen=True)
class StepMeshExtraInfo(ConnectorExtraInfo):
    """The settings in connector_extra_config, with their defaults."""

    transport: Optional[str] = None  # DMLC_ENABLE_RDMA: zmq or ibverbs; None leaves the environment's
    scheduler: str = "auto"  # "no": another program starts it at host:port
    timeout_ms: int = 15000  # for an answer; on the FFN side for the other ranks of a batch after the first
    init_timeout_ms: int = 600000  # until all ranks have joined, which load their weights first
    stop_timeout_ms: int = 10000
    replace_ms: int = 0  # attention: for the replacement of a lost FFN rank; 0: the step fails at once
    streams: Optional[bool] = None  # CUDA streams exchange the micro-batches; None: if replace_ms is 0
    environment: Dict[str, str] = field(default_factory=dict)  # variables of docs/env.md

    @classmethod
    def from_mapping(cls, raw):
        if raw is not None and not isinstance(raw, Mapping):
            raise TypeError("connector_extra_config is %s, want a mapping" % type(raw).__name__)
        known = {f.name: f for f in fields(cls)}
        for name, value in (raw or {}).items():
            if name not in known:
                raise ValueError("connector_extra_config has %r, %s knows %s" % (name, NAME, ", ".join(known)))
            least = 0 if name == "replace_ms" else 1
            if name.endswith("_ms") and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError("connector_extra_config: %s is %r, want milliseconds, at least %d" % (name, value, least))
        if (raw or {}).get("streams") not in (None, True, False):
            raise ValueError("connector_extra_config: streams is %r, want true, false or null" % (raw["streams"],))
        environment = (raw or {}).get("environment", {})
        if not isinstance(environment, Mapping):
            raise ValueError("connector_extra_config: environment is %r, want a mapping" % (environment,))
        for name, value in environment.items():
            if not isinstance(value, str):
                raise ValueError("connector_extra_config: environment: %s is %r, want a string" % (name, value))
        return cls(**(raw or {}))

    def to_mapping(self):
        return {f.name: getattr(self, f.name) for f in fields(self)}


class _Received(AFDTransferState):
    """Links an answer to its batch; None for a layer that another process has computed."""

    def __init__(self, batch):
        self.batch = batch


_connectors = {}  # by number, for the custom ops
_numbers = itertools.count()


class StepMeshAFDConnector(AFDConnectorBase):
    """Attention and FFN ranks of afd-plugin over fserver_lib."""

    @classmethod
    def parse_extra_config(cls, raw):
        return StepMeshExtraInfo.from_mapping(raw)

    def __init__(self, rank, local_rank, vllm_config, afd_config, role_rank):
        super().__init__(rank, local_rank, vllm_config, afd_config, role_rank)
        self.attn_size, self.ffn_size = afd_config.num_attention_ranks, afd_config.num_ffn_ranks
        peers = layout.servers_of if afd_config.role == "attention" else layout.workers_of
        self.peers = peers(role_rank, self.attn_size, self.ffn_size)
        self.control_plane = StepMeshAFDControlPlane(self)
        self.side = None
        self.last = {}  # FFN: the layer of each stage's latest batch in this step
        self.turns = {}  # FFN: the calls of recv_attn_output for each stage in this step
        self.held = {}  # FFN: by stage: a batch that waits for its turn
        self.resumes = False  # FFN: whether this process has joined in the middle of this step
        self.closed = False
        self.number = next(_numbers)

    def init_afd_connector(self):
        if self.is_initialized:
            return
        if self.closed:
            raise RuntimeError("%s rank %d: the connector is closed, and a process can join only once: start the process again" % (self.afd_config.role, self.role_rank))
        config, extra, device = self.afd_config, self.extra_info, self._device()
        os.environ.update(extra.environment)
        cluster.join(config.role, self.role_rank, self.attn_size, self.ffn_size, host=config.host, port=config.port,
                     device=self.local_rank if device.type == "cuda" else 0, transport=extra.transport,
                     scheduler=extra.scheduler, timeout_ms=extra.init_timeout_ms)
        try:
            self._make_side(device)
        except BaseException:
            self._leave(0)  # the other ranks would wait for this one
            raise

    def _in_streams(self):
        """Whether this side offers to exchange in streams."""
        ranks, asked = int(getattr(self.vllm_config.parallel_config, "tensor_parallel_size", 1)), self.extra_info.streams
        if asked and ranks > 1:
            raise ValueError("connector_extra_config: streams is true with tensor_parallel_size %d, want 1: vLLM reads the output of one of these ranks, so nobody would notice that the exchange of another one has failed" % ranks)
        return self.extra_info.replace_ms == 0 and self.attn_size >= self.ffn_size and ranks == 1 if asked is None else asked

    def _make_side(self, device):
        config, extra, model = self.afd_config, self.extra_info, self.vllm_config.model_config
        common = dict(width=int(model.hf_config.hidden_size), dtype=model.dtype, stages=self._stages(),
                      layers=int(model.hf_config.num_hidden_layers), timeout_ms=extra.timeout_ms,
                      streams=self._in_streams())
        if config.role == "attention":
            self.side = _pair().Attention(self.role_rank, self.attn_size, self.ffn_size, device=device, replace_ms=extra.replace_ms,
                                  max_rows=int(self.vllm_config.scheduler_config.max_num_batched_tokens), **common)
        else:
            self.side = _pair().FFN(self.role_rank, self.attn_size, self.ffn_size, device=device, **common)
        _connectors[self.number] = self
        _register_ops()
        if config.role == "attention":
            self.side.deferred = _check_outputs()

    def _device(self):
        """Returns the device of the rank's tensors; the CPU if PyTorch sees no GPU."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def _stages(self):
        parallel = self.vllm_config.parallel_config
        return int(getattr(parallel, "num_ubatches", 1) or 1) if getattr(parallel, "use_ubatching", False) else 1

    @property
    def is_initialized(self):
        return self.side is not None

    def close(self):
        if self.side is not None:
            self._leave(self.extra_info.stop_timeout_ms)

    def _leave(self, timeout_ms):
        self.side, self.closed = None, True
        _connectors.pop(self.number, None)
        cluster.leave(timeout_ms)

    def _open(self, role):
        if self.side is None:
            raise RuntimeError("%s rank %d: init_afd_connector() was not called, or close() was" % (self.afd_config.role, self.role_rank))
        if self.afd_config.role != role:
            raise RuntimeError("%s rank %d: this is of the %s side" % (self.afd_config.role, self.role_rank, role))
        return self.side

    # The attention side.

    def send_attn_output(self, hidden_states, context, **kwargs):
        metadata, router_logits = context.metadata, kwargs.get("router_logits")
        if _compiling():
            torch.ops.stepaf_afd.send(hidden_states, router_logits, self.number, metadata.stage_idx, metadata.layer_idx)
            return
        if not metadata.validate_tensor_shape(tuple(hidden_states.shape)):
            raise ValueError("attention %d: hidden_states has shape %s, the metadata %d tokens (layer %d, stage %d)" % (
                self.role_rank, tuple(hidden_states.shape), metadata.total_tokens, metadata.layer_idx, metadata.stage_idx))
        self._send(hidden_states, router_logits, metadata.stage_idx, metadata.layer_idx)

    def _send(self, hidden_states, router_logits, stage, layer):
        side = self._open("attention")
        if not side.streams and _pair().channels.capturing(side.device):
            raise RuntimeError("%s: CUDA graphs need streams, and micro-batches go in %s: set enforce_eager, or remove that reason" % (side, side.path))
        side.send(stage, [hidden_states] if router_logits is None else [hidden_states, router_logits], layer=layer)

    def recv_ffn_output(self, ref_tensor, ubatch_idx=0, **kwargs):
        if _compiling():
            torch.ops.stepaf_afd.recv(ref_tensor, self.number, ubatch_idx)
            return ref_tensor
        return self._open("attention").recv(ubatch_idx, out=ref_tensor)

    # The FFN side.

    def recv_attn_output(self, ubatch_idx=0, **kwargs):
        spec, turn = kwargs.get("routing_spec"), self.turns.get(ubatch_idx, 0)
        self.turns[ubatch_idx] = turn + 1
        more = () if spec is None else ((spec.router_logits_dtype, (spec.router_logits_width,)),)
        batch = self._resumed(ubatch_idx, turn) if self.resumes else self._open("ffn").recv(ubatch_idx, more=more)
        if batch is None:
            some = next(iter(self.held.values())).tensors[0]
            return self._payload(some.new_zeros((1,) + tuple(some.shape[1:])), None, ubatch_idx, [1], None)
        if len(batch.tensors) != (1 if spec is None else 2):
            raise _pair().Mismatch("stage %d: attention %s sent %d tensors, ffn %d wants %s" % (
                ubatch_idx, batch.ranks, len(batch.tensors), self.role_rank, "the hidden states only" if spec is None else "router_logits with them"))
        # The plugin does not name the layer that it wants; its layers rise within a step. If the step has
        # failed on another rank, a batch of the next step would have the wrong layer.
        last = self.last.get(ubatch_idx, -1)
        if batch.layer is None:  # streams: the calls of both sides have the same order
            pass
        elif batch.layer <= last:
            raise _pair().Mismatch("stage %d: attention %s sent layer %d after layer %d of the same step: the step has failed there, ffn %d must begin a new one" % (
                ubatch_idx, batch.ranks, batch.layer, last, self.role_rank))
        else:
            self.last[ubatch_idx] = batch.layer
        hidden, logits = batch.tensors[0], None
        if spec is not None:
            logits = batch.tensors[1]
            if logits.dim() != 2 or logits.shape[1] != spec.router_logits_width or logits.dtype != spec.router_logits_dtype:
                raise _pair().Mismatch("stage %d: the router_logits of attention %s are %s of shape %s, ffn %d wants %s and %d columns" % (
                    ubatch_idx, batch.ranks, logits.dtype, tuple(logits.shape), self.role_rank, spec.router_logits_dtype, spec.router_logits_width))
        lengths = [n for n in batch.rows if n]
        if not lengths:  # the plugin has no empty batches: the model gets one row, whose result is not sent
            lengths = [1]
            hidden = hidden.new_zeros((1,) + tuple(hidden.shape[1:]))
            logits = None if logits is None else logits.new_zeros((1,) + tuple(logits.shape[1:]))
        return self._payload(hidden, logits, ubatch_idx, lengths, batch)

    def _resumed(self, stage, turn):
        """Returns the stage's batch of this layer, or None if the lost process has answered it. The
        plugin's loop begins with layer 0 and the first stage; the attention side sends the oldest
        batch in flight again, and the next one when that is answered."""
        if self.afd_config.compute_gate_on_attention:  # the loop passes over dense layers, so the calls do not tell the layer
            raise _pair().Mismatch("ffn %d: with compute_gate_on_attention no process can replace a lost one in the middle of a step" % self.role_rank)
        while not self.held:
            batch = self._open("ffn").recv()
            self.held[batch.stage] = batch
        batch = self.held.get(stage)
        if batch is None or batch.layer > turn:
            return None
        if batch.layer < turn:
            raise _pair().Mismatch("ffn %d: stage %d: attention %s sent layer %d, want layer %d" % (self.role_rank, stage, batch.ranks, batch.layer, turn))
        return self.held.pop(stage)

    @staticmethod
    def _payload(hidden, logits, stage, lengths, batch):
        metadata = AFDTransferMetadata.create_ffn_metadata(layer_idx=0, stage_idx=stage, seq_lens=lengths)
        return AFDA2FTransferPayload(hidden_states=hidden, context=AFDTransferContext(metadata=metadata, states=_Received(batch)), router_logits=logits)

    def send_ffn_output(self, ffn_output, context, **kwargs):
        self._open("ffn")
        if not isinstance(context.states, _Received):
            raise RuntimeError("ffn %d: the context is not that of recv_attn_output" % self.role_rank)
        if not context.metadata.validate_tensor_shape(tuple(ffn_output.shape)):
            raise ValueError("ffn %d: ffn_output has shape %s, the metadata %d tokens (layer %d, stage %d)" % (
                self.role_rank, tuple(ffn_output.shape), context.metadata.total_tokens, context.metadata.layer_idx, context.metadata.stage_idx))
        batch = context.states.batch
        if batch is None:
            return
        batch.respond(ffn_output[:sum(batch.rows)])


class StepMeshAFDControlPlane(AFDControlPlane):
    """Token counts of a step, from each attention rank to its FFN ranks. They are sent as
    host bytes, and both sides compare batches with them."""

    def __init__(self, connector):
        self.connector = connector
        self._announced = {}  # FFN: by stage: what the model got, and the metadata of the attention ranks
        self._graphs = {}  # FFN: by the counts that the model got: what its graph depends on, see _graph

    def update_state_from_dp_metadata(self, payload):
        c = self.connector
        if c.afd_config.role != "ffn":
            return
        expected = {}
        for stage, metadata in payload.dp_metadata_list.items():
            given, announced = self._announced.get(stage, (None, None))
            counts = _counts(announced if metadata is given else metadata, c.attn_size)
            if counts is not None:
                expected[stage] = {r: self._rows(counts[r], r, c.role_rank) for r in c.peers}
        c._open("ffn").expect(expected)

    def _rows(self, count, rank, server):
        """Returns the number of an attention rank's rows for an FFN rank."""
        c = self.connector
        servers = layout.servers_of(rank, c.attn_size, c.ffn_size)
        begin, end = layout.share(max(count, 1), servers.index(server), len(servers))
        return end - begin

    def _of_ffn(self, metadata):
        """Returns the token counts of the FFN ranks. The experts exchange rows between FFN ranks by
        these counts; the plugin has the counts of as many attention ranks."""
        c = self.connector
        groups, counts = int(getattr(c.vllm_config.parallel_config, "data_parallel_size", 1)), _counts(metadata, c.attn_size)
        if groups == 1 or c.attn_size == c.ffn_size or counts is None:
            return metadata
        rows = [max(1, sum(self._rows(counts[r], r, j) for r in layout.workers_of(j, c.attn_size, c.ffn_size))) for j in range(c.ffn_size)]
        return AFDDPMetadata(torch.tensor(rows[::c.ffn_size // groups], dtype=torch.int32))

    def send_dp_metadata_list(self, payload):
        self.connector._open("attention").send_control(encode_control_payload(payload))

    def recv_dp_metadata_list(self):
        c = self.connector
        received = {r: decode_control_payload(text) for r, text in c._open("ffn").recv_control().items()}
        c.last.clear()
        c.turns.clear()
        c.resumes, c.side.resumes = c.side.resumes and not c.side.streams, False  # with streams the step begins again
        first = received[c.peers[0]]
        for rank, payload in received.items():
            mine, other = _all_counts(first), _all_counts(payload)
            if mine != other:
                raise _pair().Mismatch("ffn %d: attention %d announced %s tokens (stage: counts), attention %d %s" % (c.role_rank, c.peers[0], mine, rank, other))
        self._announced = {stage: (self._of_ffn(m), m) for stage, m in first.dp_metadata_list.items()}
        counts = _all_counts(first)
        first.dp_metadata_list = {stage: given for stage, (given, _) in self._announced.items()}
        self._graph(first, counts)
        return first

    def _graph(self, payload, counts):
        """Prevents the replay of a graph that does not fit this step. The plugin's runner finds graphs by the counts that the model
        got. A graph also depends on the rows of each attention rank, and on exchanges that have not ended since its capture."""
        c = self.connector
        name = str(sorted(_all_counts(payload).items()))
        depends = counts, c.side._channels.ended
        if payload.is_graph_capturing:
            if getattr(c.vllm_config.model_config, "enforce_eager", False):
                raise _pair().Mismatch("ffn %d: attention %s captures CUDA graphs, and this rank has enforce_eager: set the same on both sides" % (c.role_rank, c.peers))
            self._graphs[name] = depends
        elif self._graphs.get(name, depends) != depends:
            payload.is_warmup = True  # the step runs without a graph


def _counts(metadata, attention):
    """Returns the tokens of each attention rank, or None if the counts do not tell. The count
    of a data-parallel rank applies to each of its tensor-parallel ranks."""
    counts = metadata.num_tokens_across_dp_cpu.flatten().tolist()  # a CPU tensor
    if not counts or attention % len(counts):
        return None
    return [counts[i * len(counts) // attention] for i in range(attention)]


def _all_counts(payload):
    return {stage: m.num_tokens_across_dp_cpu.flatten().tolist() for stage, m in payload.dp_metadata_list.items()}


# With streams, the values of a step are checked when vLLM has waited for its tokens. So the CPU can queue the next step meanwhile
# (vLLM's async scheduling).


def _check_outputs():
    """Makes the plugin's runner check the output of each step. Returns whether that is possible."""
    runner = getattr(sys.modules.get("afd_plugin.v1.worker.attention_model_runner"), "AFDAttentionModelRunner", None)
    if runner is None or not all(hasattr(runner, name) for name in ("execute_model", "sample_tokens")):
        return False
    for name in ("execute_model", "sample_tokens"):
        method = getattr(runner, name)
        if not hasattr(method, "_checks_outputs"):
            setattr(runner, name, _checking(method))
    return True


def _checking(method):
    @functools.wraps(method)
    def call(runner, *args, **kwargs):
        out, side = method(runner, *args, **kwargs), getattr(runner.connector, "side", None)
        if out is None or not getattr(side, "streams", False):  # None: the step is not complete
            return out
        check = side.checker()
        if hasattr(out, "get_output"):
            out.get_output = _checked(out.get_output, check)
        else:
            torch.cuda.current_stream().synchronize()  # vLLM has waited for the tokens
            check()
        return out

    call._checks_outputs = True
    return call


def _checked(get_output, check):
    @functools.wraps(get_output)
    def call():
        output = get_output()  # waits for the tokens
        check()
        return output

    return call


# torch.compile: the two calls of the attention side are ops that it treats as opaque.

_ops = None


def _compiling():
    compiler = getattr(torch, "compiler", None)
    return compiler is not None and hasattr(compiler, "is_compiling") and compiler.is_compiling()


def _register_ops():
    global _ops
    if _ops is not None or not hasattr(getattr(torch, "compiler", None), "is_compiling"):
        return
    _ops = library.Library("stepaf_afd", "DEF")
    # send does not change its argument; the declaration keeps the order of the ops.
    _ops.define("send(Tensor(a!) hidden, Tensor? router_logits, int connector, int stage, int layer) -> ()")
    _ops.define("recv(Tensor(a!) out, int connector, int stage) -> ()")

    def send(hidden, router_logits, connector, stage, layer):
        _connectors[connector]._send(hidden, router_logits, stage, layer)

    def recv(out, connector, stage):
        _connectors[connector]._open("attention").recv(stage, out=out)

    _ops.impl("send", send, "CompositeExplicitAutograd")
    _ops.impl("recv", recv, "CompositeExplicitAutograd")
    _ops.impl("send", lambda *a: None, "Meta")
    _ops.impl("recv", lambda *a: None, "Meta")
