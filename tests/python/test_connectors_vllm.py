"""The connector for vLLM's afd-plugin, driven as the plugin's model runners drive it.

It runs on the plugin itself where AFD_PLUGIN is the directory that has afd_plugin (a
checkout; of vLLM it needs one class, which stands in here), and else on the stand-in.
"""

import itertools
import os
import sys
import time
import types

import harness
import pytest

if "torch" not in harness.libraries():
    pytest.skip("the connectors are for PyTorch, which this Python has not", allow_module_level=True)

import torch

import fserver_lib as f

WIDTH, LAYERS, STEPS, EXPERTS = 8, 3, 4, 4
WAIT = 180  # seconds
STANDINS = os.path.join(harness.HERE, "standins")


def plugin():
    """Makes afd_plugin importable, and registers the connector as vLLM does."""
    real = os.environ.get("AFD_PLUGIN")
    sys.path.insert(0, real or STANDINS)
    if real:
        vllm, context = types.ModuleType("vllm"), types.ModuleType("vllm.forward_context")
        context.DPMetadata = type("DPMetadata", (), {})
        vllm.forward_context = context
        sys.modules.update({"vllm": vllm, "vllm.forward_context": context})
    from fserver.connectors import vllm_plugin

    vllm_plugin.register()
    vllm_plugin.register()  # repeated calls are allowed
    import afd_plugin.connectors

    return afd_plugin.connectors


def engine(n, stages=2, extra=None, **changes):
    """The parts of an engine's process: a configuration, and its connector."""
    connectors = plugin()
    from afd_plugin import config

    port = int(n.env["DMLC_PS_ROOT_PORT"])
    for name in list(os.environ):
        if name.startswith(("DMLC_", "STEPMESH_")):
            del os.environ[name]
    afd = dict(connector="StepMeshAFDConnector", role="attention" if n.role == "worker" else "ffn", host="127.0.0.1", port=port,
               num_attention_ranks=n.workers, num_ffn_ranks=n.servers, connector_extra_config=dict(dict(timeout_ms=20000), **(extra or {})))
    afd.update(changes)
    some = types.SimpleNamespace
    vllm = some(additional_config={"afd": afd}, model_config=some(hf_config=some(hidden_size=WIDTH, num_hidden_layers=LAYERS), dtype=torch.float32, enforce_eager=True),
                scheduler_config=some(max_num_batched_tokens=32), parallel_config=some(use_ubatching=stages > 1, num_ubatches=stages))
    parsed = config.parse_afd_config(vllm)
    cls = connectors.AFDConnectorFactory.get_connector_class(parsed.connector)
    assert issubclass(cls, connectors.AFDConnectorBase)
    return connectors, cls(n.rank, 0, vllm, parsed, n.rank)


def tokens(step, stage, rank):
    return 1 + (3 * step + 2 * stage + rank) % 5


def payload(connectors, step, stages, ranks):
    counts = {s: connectors.AFDDPMetadata(torch.tensor([tokens(step, s, r) for r in range(ranks)])) for s in range(stages)}
    return connectors.AFDControlPayload(dp_metadata_list=counts, is_graph_capturing=False, is_warmup=step == 0)


class Exchange:
    """An exchange of prepare_streams, of two processes without GPUs. Each end writes its tensors, and then the number of its
    round, into a file that both map."""

    WORKER, SERVER, OVER = 0, 1, 2
    made, before = {}, 0  # how often each was prepared, here and by the process that this one replaces

    def __init__(self, folder, role, rank, push, keys, pull, pull_keys, *, peers, timeout_ms, round_timeout_ms):
        assert len(peers) == 1 and pull_keys == keys[:1] and len(push) == len(keys)
        pair_ = (rank, peers[0]) if role == "worker" else (peers[0], rank)
        name = "%s-%s" % (pair_, keys[0])
        self.made[name] = self.made.get(name, self.before) + 1
        self.out, self.into = (push, pull) if role == "worker" else (pull, push)
        self.own, self.round = self.WORKER if role == "worker" else self.SERVER, 0
        self.sends = role == "worker"  # whether the next call is send
        path = os.path.join(folder, "%s-%d" % (name, self.made[name]))
        self.rounds = torch.from_file(path, True, 3, dtype=torch.int64)
        size = lambda t: t.numel() * t.element_size()
        self.sent = torch.from_file(path + "-%d" % self.own, True, sum(map(size, self.out)), dtype=torch.uint8)
        self.came = torch.from_file(path + "-%d" % (1 - self.own), True, sum(map(size, self.into)), dtype=torch.uint8)

    def turn(self, sends):
        self.check()
        assert self.sends == sends, "sends and receives do not alternate"
        self.sends = not sends

    def send(self):
        self.turn(True)
        self.sent.copy_(torch.cat([t.reshape(-1).view(torch.uint8) for t in self.out]))
        self.rounds[self.own] += 1

    def receive(self):
        self.turn(False)
        self.round += 1
        while self.rounds[1 - self.own] < self.round:
            self.check()
            time.sleep(0)
        parts = self.came.split([t.numel() * t.element_size() for t in self.into])
        for t, part in zip(self.into, parts):
            t.copy_(part.clone().view(t.dtype).view(t.shape))

    def check(self):
        if self.rounds[self.OVER]:
            raise f.ConnectionError("the exchange is over")

    def close(self):
        self.rounds[self.OVER] = 1


def streamed(n):
    """Lets the connectors of this process exchange in streams, by Exchange, if n.args is a folder for its files."""
    if not n.args:
        return False
    from fserver.connectors import channels

    channels.stream_host = lambda device: "here"
    channels.f.prepare_streams = lambda *args, **kw: Exchange(n.args, n.role, n.rank, *args, **kw)
    channels.Channels._event = lambda self: types.SimpleNamespace(query=lambda: True)
    return True


@harness.by_hand
def attention(n):
    """Makes the calls of the attention runner and the model's layers."""
    streams = streamed(n)
    connectors, c = engine(n)
    assert not c.is_initialized and (c.attn_size, c.ffn_size) == (n.workers, n.servers)
    with pytest.raises(RuntimeError, match="init_afd_connector"):
        c.recv_ffn_output(torch.zeros(1, WIDTH))
    c.init_afd_connector()
    c.init_afd_connector()
    assert c.is_initialized and c.control_plane is not None
    for step in range(STEPS):
        p = payload(connectors, step, 2, n.workers)
        c.control_plane.update_state_from_dp_metadata(p)
        c.control_plane.send_dp_metadata_list(p)
        h = [torch.full((tokens(step, s, n.rank), WIDTH), 100.0 * n.rank + 10 * s + step) for s in range(2)]
        want = [t.clone() for t in h]
        for layer in range(LAYERS):
            for s in range(2):  # two micro-batches in flight
                metadata = connectors.AFDTransferMetadata.create_attention_metadata(layer_idx=layer, stage_idx=s, seq_len=len(h[s]))
                routed = dict(router_logits=torch.full((len(h[s]), EXPERTS), float(n.rank))) if layer == 1 else {}
                c.send_attn_output(h[s], connectors.AFDTransferContext(metadata=metadata), **routed)
            for s in range(2):
                got = c.recv_ffn_output(ref_tensor=h[s], ubatch_idx=s)
                assert got is h[s]
                want[s] = want[s] * 2 + layer + (n.rank if layer == 1 else 0)
                assert torch.equal(got, want[s]), (step, layer, s)
    assert c.side.streams == (streams and n.workers >= n.servers)  # with several FFN ranks only if they are configured
    metadata = connectors.AFDTransferMetadata.create_attention_metadata(layer_idx=0, stage_idx=0, seq_len=3)
    with pytest.raises(ValueError, match=r"attention %d: hidden_states has shape \(2, 8\), the metadata 3 tokens" % n.rank):
        c.send_attn_output(torch.zeros(2, WIDTH), connectors.AFDTransferContext(metadata=metadata))
    with pytest.raises(RuntimeError, match="ffn side"):
        c.recv_attn_output()
    c.close()
    c.close()
    assert not c.is_initialized
    with pytest.raises(RuntimeError, match="closed"):
        c.init_afd_connector()


@harness.by_hand
def ffn(n):
    """Makes the calls of the FFN worker's loop."""
    streamed(n)
    connectors, c = engine(n)
    c.init_afd_connector()
    empty = 0
    for step in range(STEPS):
        p = c.control_plane.recv_dp_metadata_list()
        assert p.is_warmup == (step == 0)
        assert {s: m.num_tokens_across_dp_cpu.tolist() for s, m in p.dp_metadata_list.items()} == {
            s: [tokens(step, s, r) for r in range(n.workers)] for s in range(2)}
        c.control_plane.update_state_from_dp_metadata(p)
        for layer in range(LAYERS):
            spec = connectors.AFDExpertRoutingSpec(EXPERTS, torch.float32) if layer == 1 else None
            for s in sorted(p.dp_metadata_list):
                got = c.recv_attn_output(ubatch_idx=s, routing_spec=spec)
                context, x = got.context, got.hidden_states
                context.metadata.layer_idx, context.metadata.stage_idx = layer, s
                assert context.metadata.validate_tensor_shape(tuple(x.shape))
                empty += not sum(context.states.batch.rows)
                out = x * 2 + layer
                if layer == 1:
                    out = out + got.router_logits[:, :1]
                with pytest.raises(ValueError, match="ffn_output has shape"):
                    c.send_ffn_output(torch.cat([out, out]), context)
                c.send_ffn_output(out, context)
    assert (empty > 0) == (n.servers > n.workers and n.rank == 0)  # a row for two FFN ranks
    c.close()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("attentions, ffns", [(1, 1), (3, 2), (1, 2)])
def test_steps(cluster, tmp_path, attentions, ffns, streams):
    c = cluster(workers=attentions, servers=ffns)
    folder = str(tmp_path) if streams else ""
    for i in range(attentions):
        c.spawn("worker", attention, rank=i, args=folder)
    for i in range(ffns):
        c.spawn("server", ffn, rank=i, args=folder)
    c.finish(WAIT)


# With streams, the exchanges end if the attention side cancels a step. The FFN rank raises an error, and the next step
# prepares new exchanges. If the FFN rank is killed, the next step prepares them with its replacement.

@harness.by_hand
def failing_attention(n):
    streamed(n)
    connectors, c = engine(n, stages=1, extra=dict(streams=True, replace_ms=1000 * WAIT))
    c.init_afd_connector()
    for step, layers in enumerate((LAYERS, 1, LAYERS, LAYERS)):
        p = payload(connectors, 0, 1, 1)  # the same rows in each step: the same exchange
        c.control_plane.send_dp_metadata_list(p)
        h = torch.full((tokens(0, 0, 0), WIDTH), float(step))
        for layer in range(layers):
            metadata = connectors.AFDTransferMetadata.create_attention_metadata(layer_idx=layer, stage_idx=0, seq_len=len(h))
            context = connectors.AFDTransferContext(metadata=metadata)
            if step == 2 and layer == 1:  # the FFN rank is killed now
                n.tell("kill")
                n.listen()
                for channel in c.side._channels._all.values():
                    channel.exchange.close()  # the library does so when a peer is lost
                with pytest.raises(f.ConnectionError):
                    c.send_attn_output(h, context)
                    c.recv_ffn_output(h)
                break
            c.send_attn_output(h, context)
            c.recv_ffn_output(h)
        if step in (0, 3):
            assert bool((h == step + LAYERS).all()), h
    c.close()


@harness.by_hand
def failing_ffn(n):
    steps, Exchange.before = n.args[1:]
    streamed(types.SimpleNamespace(args=n.args[0], role=n.role, rank=n.rank))
    connectors, c = engine(n, stages=1, extra=dict(streams=True))
    c.init_afd_connector()
    for step in steps:
        c.control_plane.update_state_from_dp_metadata(c.control_plane.recv_dp_metadata_list())
        try:
            for _ in range(LAYERS):
                got = c.recv_attn_output(ubatch_idx=0)
                c.send_ffn_output(got.hidden_states + 1, got.context)
            assert step in (0, 3)
        except f.ConnectionError:
            assert step == 1
    c.close()


def test_failed_steps_in_streams(cluster, tmp_path):
    c = cluster()
    worker = c.spawn("worker", failing_attention, args=str(tmp_path))
    first = c.spawn("server", failing_ffn, args=(str(tmp_path), [0, 1, 2], 0))
    assert worker.hear(WAIT) == "kill"
    first.kill()
    worker.tell("go on")
    second = c.spawn("server", failing_ffn, args=(str(tmp_path), [3], 2))
    assert (worker.wait(WAIT), second.wait(WAIT)) == (0, 0)


# With streams, the values of a step are checked when vLLM reads its tokens, which may be after it has queued the next step.

@harness.by_hand
def checked_attention(n):
    class Tokens:  # of an asynchronous step
        def __init__(self, tokens):
            self.tokens = tokens

        def get_output(self):
            return self.tokens

    class Runner:
        asynchronous = True

        def execute_model(self):
            return None

        def sample_tokens(self, tokens):
            return Tokens(tokens) if self.asynchronous else tokens

    module = types.ModuleType("afd_plugin.v1.worker.attention_model_runner")
    module.AFDAttentionModelRunner = Runner
    sys.modules[module.__name__] = module
    streamed(n)
    torch.cuda.current_stream = lambda: types.SimpleNamespace(synchronize=lambda: None)
    connectors, c = engine(n, stages=1, extra=dict(streams=True))
    c.init_afd_connector()
    runner = Runner()
    runner.connector = c

    def step(number):
        c.control_plane.send_dp_metadata_list(payload(connectors, 0, 1, 1))
        h = torch.full((tokens(0, 0, 0), WIDTH), float(number))
        for layer in range(LAYERS):
            metadata = connectors.AFDTransferMetadata.create_attention_metadata(layer_idx=layer, stage_idx=0, seq_len=len(h))
            c.send_attn_output(h, connectors.AFDTransferContext(metadata=metadata))
            c.recv_ffn_output(h)
        assert runner.execute_model() is None and bool((h == number + LAYERS).all())
        return runner.sample_tokens(number)

    first = step(0)
    second = step(1)  # queued before the tokens of the first step are read
    assert c.side.deferred and (first.get_output(), second.get_output()) == (0, 1)
    third = step(2)
    for channel in c.side._channels._all.values():
        channel.exchange.close()  # the library does so when a peer is lost, perhaps before the device had its values
    with pytest.raises(f.ConnectionError):
        third.get_output()
    fourth = step(3)  # with other exchanges
    with pytest.raises(f.ConnectionError):
        third.get_output()
    assert fourth.get_output() == 3
    Runner.asynchronous = False
    assert step(4) == 4
    c.close()


@harness.by_hand
def checked_ffn(n):
    streamed(n)
    connectors, c = engine(n, stages=1, extra=dict(streams=True))
    c.init_afd_connector()
    for _ in range(5):
        c.control_plane.update_state_from_dp_metadata(c.control_plane.recv_dp_metadata_list())
        for _ in range(LAYERS):
            got = c.recv_attn_output(ubatch_idx=0)
            c.send_ffn_output(got.hidden_states + 1, got.context)
    c.close()


def test_tokens_of_a_failed_step(cluster, tmp_path):
    c = cluster()
    c.spawn("worker", checked_attention, args=str(tmp_path))
    c.spawn("server", checked_ffn, args=str(tmp_path))
    c.finish(WAIT)


# Counts that differ: the FFN rank raises an error, and the other side notices the end of its loop.

@harness.by_hand
def miscounting_attention(n):
    connectors, c = engine(n)
    c.init_afd_connector()
    p = payload(connectors, n.rank, 1, n.workers)  # another step's counts on rank 1
    c.control_plane.send_dp_metadata_list(p)
    metadata = connectors.AFDTransferMetadata.create_attention_metadata(layer_idx=0, stage_idx=0, seq_len=1)
    c.send_attn_output(torch.zeros(1, WIDTH), connectors.AFDTransferContext(metadata=metadata))
    n.listen()  # there will be no answer
    c.side.timeout_ms = 300
    with pytest.raises(f.Error, match="attention %d: stage 0, layer 0, ffn 0" % n.rank):
        c.recv_ffn_output(torch.zeros(1, WIDTH))
    c.close()


@harness.by_hand
def miscounting_ffn(n):
    from fserver.connectors import Mismatch

    connectors, c = engine(n, extra=dict(stop_timeout_ms=20000))
    c.init_afd_connector()
    with pytest.raises(Mismatch, match=r"ffn 0: attention 0 announced \{0: \[1, 2\]\} tokens.*attention 1 \{0: \[4, 5\]\}"):
        c.control_plane.recv_dp_metadata_list()
    c.control_plane.update_state_from_dp_metadata(payload(connectors, 1, 1, n.workers))
    with pytest.raises(Mismatch, match="attention 0 sent 1 rows, ffn 0 expects 4"):
        c.recv_attn_output(0)
    n.tell("raised")
    c.close()


def test_miscounting(cluster):
    c = cluster(workers=2)
    attentions = [c.spawn("worker", miscounting_attention, rank=i) for i in range(2)]
    assert c.spawn("server", miscounting_ffn).hear(WAIT) == "raised"
    for p in attentions:
        p.tell("go on")
    c.finish(WAIT)


# A step ends early on the attention side, and the FFN rank waits for its next layer. The next
# step's first layer arrives, which is not computed with that layer's weights.

@harness.by_hand
def early_attention(n):
    connectors, c = engine(n)
    c.init_afd_connector()
    h = torch.ones(2, WIDTH)
    for layers in (2, 1):
        c.control_plane.send_dp_metadata_list(connectors.AFDControlPayload(
            dp_metadata_list={0: connectors.AFDDPMetadata(torch.tensor([2]))}, is_graph_capturing=False, is_warmup=False))
        for layer in range(layers):
            metadata = connectors.AFDTransferMetadata.create_attention_metadata(layer_idx=layer, stage_idx=0, seq_len=2)
            c.send_attn_output(h, connectors.AFDTransferContext(metadata=metadata))
            if layers == 2:
                c.recv_ffn_output(h)
    n.listen()  # there will be no answer
    c.side.timeout_ms = 300
    with pytest.raises(f.Error, match="stage 0, layer 0, ffn 0"):
        c.recv_ffn_output(h)
    c.close()


@harness.by_hand
def early_ffn(n):
    from fserver.connectors import Mismatch

    connectors, c = engine(n, extra=dict(stop_timeout_ms=20000))
    c.init_afd_connector()
    c.control_plane.update_state_from_dp_metadata(c.control_plane.recv_dp_metadata_list())
    for _ in range(2):
        got = c.recv_attn_output(ubatch_idx=0)
        c.send_ffn_output(got.hidden_states, got.context)
    with pytest.raises(Mismatch, match="sent layer 0 after layer 1 of the same step"):
        c.recv_attn_output(ubatch_idx=0)
    n.tell("raised")
    c.close()


def test_step_that_ended_early(cluster):
    c = cluster()
    attention = c.spawn("worker", early_attention)
    assert c.spawn("server", early_ffn).hear(WAIT) == "raised"
    attention.tell("go on")
    c.finish(WAIT)


# The FFN rank is killed in the middle of a step. Its replacement runs the plugin's loop, which begins with layer 0, and goes on
# with the layer in flight: the attention side notices nothing.

@harness.by_hand
def surviving_attention(n):
    connectors, c = engine(n, extra=dict(replace_ms=WAIT * 1000, timeout_ms=WAIT * 1000))
    c.init_afd_connector()
    for step in range(STEPS):
        p = payload(connectors, step, 2, 1)
        c.control_plane.update_state_from_dp_metadata(p)
        c.control_plane.send_dp_metadata_list(p)
        h = [torch.full((tokens(step, s, 0), WIDTH), 10.0 * s + step) for s in range(2)]
        want = [t.clone() for t in h]
        for layer in range(LAYERS):
            for s in range(2):
                metadata = connectors.AFDTransferMetadata.create_attention_metadata(layer_idx=layer, stage_idx=s, seq_len=len(h[s]))
                c.send_attn_output(h[s], connectors.AFDTransferContext(metadata=metadata))
            for s in range(2):
                want[s] = want[s] * 2 + layer
                assert torch.equal(c.recv_ffn_output(ref_tensor=h[s], ubatch_idx=s), want[s]), (step, layer, s)
        if n.args == step:
            n.tell("between")
            n.listen()  # the FFN rank is killed between two steps
    c.close()


@harness.by_hand
def dying_ffn(n):
    """Runs the plugin's loop. args are the step and the layer at which it waits to be killed, or None."""
    connectors, c = engine(n)
    c.init_afd_connector()
    for step in itertools.count():
        try:
            p = c.control_plane.recv_dp_metadata_list()
        except f.ConnectionError:  # the attention rank has left
            break
        c.control_plane.update_state_from_dp_metadata(p)
        for layer in range(LAYERS):
            for s in sorted(p.dp_metadata_list):
                got = c.recv_attn_output(ubatch_idx=s)
                if n.args == [step, layer] and s == 1:
                    n.tell("in the step")
                    time.sleep(WAIT)  # until it is killed
                got.context.metadata.layer_idx = layer
                assert got.context.metadata.validate_tensor_shape(tuple(got.hidden_states.shape))
                c.send_ffn_output(got.hidden_states * 2 + layer, got.context)
    c.close()


@pytest.mark.parametrize("where", [[1, 0], [1, 1], [0, LAYERS - 1]])
def test_replaced_in_a_step(cluster, where):
    c = cluster()
    c.spawn("worker", surviving_attention)
    first = c.spawn("server", dying_ffn, args=where)
    assert first.hear(WAIT) == "in the step"
    first.kill()
    c.processes.remove(first)
    c.spawn("server", dying_ffn)
    c.finish(WAIT)


def test_replaced_between_steps(cluster):
    c = cluster()
    attention = c.spawn("worker", surviving_attention, args=1)
    first = c.spawn("server", dying_ffn)
    assert attention.hear(WAIT) == "between"
    first.kill()
    c.processes.remove(first)
    attention.tell("go on")
    c.spawn("server", dying_ffn)
    c.finish(WAIT)


# The FFN worker closes the connector while its loop waits for the next step.

@harness.by_hand
def closing(n):
    import threading

    connectors, c = engine(n)
    c.init_afd_connector()
    if n.role == "worker":
        c.close()
        return
    ended = []

    def loop():
        try:
            c.control_plane.recv_dp_metadata_list()
        except Exception as e:
            ended.append(e)

    t = threading.Thread(target=loop)
    t.start()
    c.close()
    t.join(20)
    assert not t.is_alive() and isinstance(ended[0], (f.Error, RuntimeError)), ended


def test_close_while_waiting(cluster):
    c = cluster()
    c.spawn("worker", closing)
    c.spawn("server", closing)
    c.finish(WAIT)


# A process whose side cannot be made leaves the cluster, so the FFN rank need not wait for it.

@harness.by_hand
def without_side(n):
    connectors, c = engine(n)
    if n.role == "server":
        c.init_afd_connector()
        with n.raises(f.ConnectionError, "attention"):
            c.control_plane.recv_dp_metadata_list()
        c.close()
        return
    c.vllm_config.model_config.hf_config.hidden_size = 0
    with pytest.raises(ValueError, match="width is 0"):
        c.init_afd_connector()
    with pytest.raises(RuntimeError, match="closed"):
        c.init_afd_connector()
    assert not c.is_initialized
    n.listen()  # the process does not end


def test_side_cannot_be_made(cluster):
    c = cluster()
    worker = c.spawn("worker", without_side)
    server = c.spawn("server", without_side)
    assert server.wait(WAIT) == 0, server.report()
    worker.tell("end")
    c.finish(WAIT)


def run_python(code):
    import subprocess

    return subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0, %r); import test_connectors_vllm as t\n" % harness.HERE + code], check=True)


def test_configuration():
    """Runs in a separate process, since it imports afd_plugin."""
    run_python("""
import pytest, torch
connectors = t.plugin()
cls = connectors.AFDConnectorFactory.get_connector_class("StepMeshAFDConnector")
info = cls.parse_extra_config({"transport": "ibverbs", "timeout_ms": 5})
assert (info.transport, info.timeout_ms, info.scheduler) == ("ibverbs", 5, "auto") and info.to_mapping()["timeout_ms"] == 5
assert cls.parse_extra_config(None).timeout_ms == 15000
for raw, kind, word in (({"timeout": 1}, ValueError, "'timeout'.*knows transport"), ({"timeout_ms": 0}, ValueError, "timeout_ms is 0"),
                        ({"stop_timeout_ms": "1"}, ValueError, "stop_timeout_ms is '1'"),
                        ({"replace_ms": -1}, ValueError, "replace_ms is -1, want milliseconds, at least 0"),
                        ({"environment": {"PS_VERBOSE": 2}}, ValueError, "environment: PS_VERBOSE is 2, want a string"), ({"environment": 5}, ValueError, "environment is 5, want a mapping"),
                        ([1], TypeError, "list, want a mapping")):
    with pytest.raises(kind, match=word):
        cls.parse_extra_config(raw)
""")


def test_counts_of_ffn_ranks():
    """With several FFN ranks in a data-parallel group their experts get the counts of FFN ranks."""
    run_python("""
import types, torch
connectors = t.plugin()
from fserver.connectors import vllm_afd as v
def plane(attention, ffn, groups, role_rank=0):
    c = types.SimpleNamespace(attn_size=attention, ffn_size=ffn, role_rank=role_rank, vllm_config=types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(data_parallel_size=groups)))
    return v.StepMeshAFDControlPlane(c)
for (attention, ffn, groups), counts, want in (
        ((1, 2, 2), [5], [2, 3]), ((1, 2, 2), [1], [1, 1]), ((2, 1, 1), [5, 6], [5, 6]), ((4, 2, 2), [1, 2, 3, 4], [3, 7]),
        ((2, 2, 2), [5, 0], [5, 0]), ((2, 4, 2), [4, 6], [2, 3]), ((3, 2, 2), [7], [14, 7])):
    got = plane(attention, ffn, groups)._of_ffn(connectors.AFDDPMetadata(torch.tensor(counts)))
    assert got.num_tokens_across_dp_cpu.tolist() == want, (attention, ffn, groups, counts, got.num_tokens_across_dp_cpu)
""")


@pytest.mark.skipif(not hasattr(getattr(torch, "compiler", None), "is_compiling"), reason="this PyTorch has no torch.compiler.is_compiling")
def test_compiled():
    """The two calls of a layer stay in one graph, in their order."""
    run_python("""
import types, torch
connectors = t.plugin()
from fserver.connectors import vllm_afd as v
v._register_ops()
calls = []
class Side:
    streams = True
    def send(self, stage, tensors, layer): calls.append(("send", stage, [x.clone() for x in tensors]))
    def recv(self, stage, out): calls.append(("recv", stage)); out.copy_(calls[-2][2][0] * 2); return out
c = object.__new__(v.StepMeshAFDConnector)
c.side, c.number, c.role_rank, c.afd_config = Side(), 77, 0, types.SimpleNamespace(role="attention")
v._connectors[77] = c
def layer(x):
    h = x + 1
    m = connectors.AFDTransferMetadata.create_attention_metadata(layer_idx=0, stage_idx=1, seq_len=4)
    c.send_attn_output(h, connectors.AFDTransferContext(metadata=m), router_logits=x)
    return c.recv_ffn_output(ref_tensor=h, ubatch_idx=1) + 0.5
for backend in ("eager", "aot_eager"):
    torch._dynamo.reset()
    calls.clear()
    x = torch.arange(8.0).reshape(4, 2)
    y = torch.compile(layer, fullgraph=True, backend=backend)(x)
    assert torch.equal(y, (x + 1) * 2 + 0.5), (backend, y)
    assert [k[:2] for k in calls] == [("send", 1), ("recv", 1)], calls
    assert torch.equal(calls[0][2][0], x + 1) and torch.equal(calls[0][2][1], x)
""")
