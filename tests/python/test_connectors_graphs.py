"""CUDA graphs that contain exchanges of the connectors, without a GPU: a stand-in says when a capture is under way."""

import sys
import threading
import types

import harness
import pytest

if "torch" not in harness.libraries():
    pytest.skip("the connectors are for PyTorch, which this Python has not", allow_module_level=True)

import torch

import fserver_lib as f
from fserver.connectors import FFN, channels, pair

sys.path.insert(0, harness.HERE)
import test_connectors_vllm as vllm

ROWS = ((torch.float32, (4,)),)


class Exchange:
    def __init__(self, *args, **settings):
        self.over = False

    def receive(self):
        self.check()

    def check(self):
        if self.over:
            raise f.ConnectionError("the exchange is over")

    def close(self):
        self.over = True


@pytest.fixture
def capture(monkeypatch):
    """Its attribute on tells whether a capture is under way."""
    state = types.SimpleNamespace(on=False, recorded=0)

    def event(self):
        assert not state.on, "an event is recorded in a capture"
        state.recorded += 1

        def query():
            assert not state.on, "an event is queried in a capture"
            return True

        return types.SimpleNamespace(query=query)

    monkeypatch.setattr(channels, "capturing", lambda device: state.on)
    monkeypatch.setattr(channels.f, "prepare_streams", Exchange)
    monkeypatch.setattr(channels.Channels, "_event", event)
    return state


@pytest.fixture
def some():
    return channels.Channels(torch.device("cpu"), 4, torch.float32, 1000, lambda peer, stage, most, tensors: [most])


def test_ended_exchanges_in_graphs(capture, some):
    some.receive([some.get(0, 0, ROWS, 3)])
    some.close()
    assert not some.stale()  # no graph contains that one
    for _ in range(channels.AHEAD + 1):
        some.receive([some.get(0, 0, ROWS, 3)])
    capture.on = True
    some.receive([some.get(0, 0, ROWS, 3)])
    some.settle()
    capture.on = False
    assert not some.stale()
    some.close()
    assert some.stale()
    some.receive([some.get(0, 0, ROWS, 3)])  # without a graph
    some.settle()
    assert some.stale() and not some.failed()


def test_first_use_in_a_capture(capture, some):
    capture.on = True
    with pytest.raises(f.ValueError, match="stage 1: .*captured with 3 rows for rank 7, .*run the step once"):
        some.get(7, 1, ROWS, 3)


def test_replays_end_before_memory_is_mapped(capture, some):
    channel = some.get(0, 0, ROWS, 1)
    capture.on = True
    some.receive([channel])
    capture.on = False
    before = capture.recorded
    some.get(0, 0, ROWS, 8)
    assert capture.recorded == before + 1


def test_exchanges_end_together(capture, some, monkeypatch):
    all_wait = threading.Barrier(3, timeout=60)
    monkeypatch.setattr(Exchange, "close", lambda self: all_wait.wait())
    for rows in (1, 2, 4):
        some.get(0, 0, ROWS, rows)
    some.close()
    assert not all_wait.broken


def test_failed_answer_ends_all_exchanges(capture, some):
    def send():
        raise f.ConnectionError("the exchange is over")

    parts = [(rank, some.get(rank, 0, ROWS, 1), 1) for rank in (0, 1)]
    parts[0][1].exchange.send = send
    batch = pair.QueuedBatch(types.SimpleNamespace(_channels=some, width=4, out_dtype=torch.float32), 0, parts)
    with pytest.raises(f.ConnectionError, match="is over"):
        batch.respond(torch.zeros(2, 4))
    assert parts[1][1].exchange.over and some.ended == 1


def test_messages_in_a_capture(capture):
    capture.on = True
    side = FFN.__new__(FFN)
    side.streams, side.stages, side.role, side.rank, side.device = False, 1, "ffn", 3, torch.device("cpu")
    with pytest.raises(f.ValueError, match="ffn 3: a CUDA graph is being captured"):
        side.recv(0)


class Control:
    """The control plane of an FFN rank with attention ranks 0 and 1."""

    def __init__(self, eager=False):
        self.connectors = vllm.plugin()
        from fserver.connectors import vllm_afd

        some = types.SimpleNamespace
        self.side = some(recv_control=lambda: {r: self.sent for r in (0, 1)}, resumes=False, streams=True, _channels=some(ended=0))
        self.plane = vllm_afd.StepMeshAFDControlPlane(some(
            attn_size=4, ffn_size=2, peers=(0, 1), role_rank=0, last={}, turns={}, resumes=False, side=self.side, _open=lambda role: self.side,
            vllm_config=some(parallel_config=some(data_parallel_size=2), model_config=some(enforce_eager=eager))))

    def receive(self, counts, capturing=False):
        """Returns whether the step runs without a graph."""
        from fserver.connectors import vllm_afd

        stages = {0: self.connectors.AFDDPMetadata(torch.tensor(counts, dtype=torch.int32))}
        self.sent = vllm_afd.encode_control_payload(self.connectors.AFDControlPayload(dp_metadata_list=stages, is_graph_capturing=capturing, is_warmup=False))
        return self.plane.recv_dp_metadata_list().is_warmup


def test_graphs_that_fit():
    control = Control()
    assert not control.receive([24, 24, 24, 24])  # no graph of these counts
    assert not control.receive([24, 24, 24, 24], capturing=True)
    assert not control.receive([24, 24, 24, 24])
    assert control.receive([20, 28, 20, 28])  # each FFN rank has 48 rows in both
    assert not control.receive([24, 24, 24, 24])
    control.side._channels.ended += 1  # an attention rank was replaced
    assert control.receive([24, 24, 24, 24])
    assert not control.receive([24, 24, 24, 24], capturing=True)
    assert not control.receive([24, 24, 24, 24])


def test_graphs_on_one_side():
    with pytest.raises(pair.Mismatch, match=r"ffn 0: attention \(0, 1\) captures CUDA graphs, and this rank has enforce_eager"):
        Control(eager=True).receive([24, 24, 24, 24], capturing=True)


def test_streams_with_tensor_parallelism():
    vllm.plugin()
    from fserver.connectors import vllm_afd

    some = types.SimpleNamespace

    def offers(ranks, **extra):
        c = some(vllm_config=some(parallel_config=some(tensor_parallel_size=ranks)), attn_size=2, ffn_size=1, extra_info=vllm_afd.StepMeshExtraInfo(**extra))
        return vllm_afd.StepMeshAFDConnector._in_streams(c)

    assert offers(1) and offers(1, streams=True) and not offers(1, streams=False) and not offers(1, replace_ms=1)
    assert not offers(2) and not offers(2, streams=False)
    with pytest.raises(ValueError, match="streams is true with tensor_parallel_size 2, want 1"):
        offers(2, streams=True)
