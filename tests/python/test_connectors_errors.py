"""fserver.connectors: errors in the middle of a call leave both sides usable."""

import os
from unittest import mock

import harness
import pytest

if "torch" not in harness.libraries():
    pytest.skip("the connectors are for PyTorch, which this Python has not", allow_module_level=True)

import torch

import fserver
import fserver_lib as f
from fserver.connectors import FFN, Attention, cluster, pair, sglang

WIDTH = 8
ERRORS = (f.Error, f.ValueError, MemoryError, KeyboardInterrupt)


class Exchange:
    """A prepared exchange with one FFN rank. It fails as often as Exchange.failing tells."""

    failing = []

    def __init__(self, servers):
        self.server, self.under_way = servers[0], False

    def start(self, rows):
        if self.server == 1 and Exchange.failing:
            raise Exchange.failing.pop()("mine")
        if self.under_way:
            raise f.Error("started already")
        self.under_way = True

    def wait(self, timeout_ms):
        if not self.under_way:
            raise f.Error("not started")
        self.under_way = False
        if timeout_ms == 1:
            raise f.TimeoutError("canceled")


@pytest.fixture
def attention(monkeypatch):
    """An attention rank with two FFN ranks that always answer."""
    monkeypatch.setattr(pair.f, "push_pull", lambda *args, **kw: 1)
    monkeypatch.setattr(pair.f, "wait", lambda *args, **kw: None)
    monkeypatch.setattr(pair.f, "prepare", lambda *args, servers: Exchange(servers))
    monkeypatch.setattr(Exchange, "failing", [])
    monkeypatch.setattr(pair, "_compared", lambda reply: "")
    side = Attention(0, 1, 2, width=WIDTH, dtype=torch.float32, max_rows=4, layers=2)
    side._greeted = True
    return side


@pytest.mark.parametrize("error", ERRORS)
def test_send_fails(attention, error):
    """After an error of send the stage is not under way: the next send begins a new round."""
    x = torch.ones(4, WIDTH)
    for _ in range(2):
        Exchange.failing = [error]
        with pytest.raises(error, match="mine"):
            attention.send(0, x)
        with pytest.raises(ValueError, match="stage 0 is not under way"):
            attention.recv(0)
        attention.send(0, x)
        assert attention.recv(0).shape == x.shape


@pytest.mark.parametrize("streams", [False, True])
def test_wrong_out(attention, streams):
    """recv refuses a wrong out before it takes the answer, so it can be called again."""
    x = torch.ones(4, WIDTH)
    attention.send(0, x)
    if streams:
        attention.streams, attention._rounds[0] = True, pair._Queued(0, [(None, 4)])
    for out in (torch.zeros(3, WIDTH), torch.zeros(4, WIDTH, dtype=torch.int32), [0.0]):
        with pytest.raises((TypeError, ValueError), match="attention 0: out is"):
            attention.recv(0, out=out)
    if not streams:
        assert attention.recv(0, out=torch.zeros(4, WIDTH)).shape == x.shape


def test_interrupted_cancel(attention, monkeypatch):
    """After a second Ctrl-C, while a failed send cancels its round, one send is refused, and the next ones are not."""
    x = torch.ones(4, WIDTH)
    attention.send(0, x)
    attention.recv(0)
    with monkeypatch.context() as m:
        m.setattr(Exchange, "wait", mock.Mock(side_effect=KeyboardInterrupt("second")))
        Exchange.failing = [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt, match="second"):
            attention.send(0, x)
    with pytest.raises(f.Error, match="started already"):
        attention.send(0, x)
    for _ in range(2):
        attention.send(0, x)
        assert attention.recv(0).shape == x.shape


@pytest.mark.parametrize("error", ERRORS)
def test_prepare_fails(attention, monkeypatch, error):
    """After an error while a layer's exchanges are prepared, the next send prepares all of them."""
    failing = [error]

    def prepare(*args, servers):
        if servers == [1] and failing:
            raise failing.pop()("mine")
        return Exchange(servers)

    monkeypatch.setattr(pair.f, "prepare", prepare)
    x = torch.ones(4, WIDTH)
    with pytest.raises(error, match="mine"):
        attention.send(0, x)
    attention.send(0, x)
    assert attention.recv(0).shape == x.shape


@pytest.mark.parametrize("wrong", [1.0, "1", None, True])
def test_wrong_type(attention, wrong):
    """An argument of a wrong type is named, with its value."""
    for name, call in (("rank", lambda: cluster.environment("ffn", wrong, 2, 2, "10.0.0.1", 8123)),
                       ("attention", lambda: cluster.environment("ffn", 0, wrong, 2, "10.0.0.1", 8123)),
                       ("port", lambda: cluster.environment("ffn", 0, 2, 2, "10.0.0.1", wrong)),
                       ("device", lambda: cluster.environment("ffn", 0, 2, 2, "10.0.0.1", 8123, wrong)),
                       ("layer", lambda: attention.send(0, torch.ones(4, WIDTH), layer=wrong)),
                       ("stage", lambda: attention.send(wrong, torch.ones(4, WIDTH)))):
        with pytest.raises(TypeError, match="%s is %r, want" % (name, wrong)):
            call()


def test_no_limit():
    """The FFN side has a limit for the rest of a batch. A side without one is refused when it is made."""
    with pytest.raises(TypeError, match="timeout_ms is None, want an int"):
        FFN(0, 1, 1, width=WIDTH, dtype=torch.float32, timeout_ms=None)


def batch_of(rank, handler, kind=pair.DATA, stage=0):
    tensor = torch.full((2, WIDTH), float(rank)) if kind == pair.DATA else torch.ones(1, dtype=torch.uint8)
    return handler, [tensor], [pair._key(kind, rank, stage)]


@pytest.mark.parametrize("error", ERRORS)
def test_receive_fails(monkeypatch, error):
    """An error about one of several batches, or Ctrl-C while it is examined, does not lose the batches received with it."""
    received, answered = [[batch_of(0, 1), batch_of(1, 2, pair.CONTROL), batch_of(1, 3)]], []

    def respond(tensors, handler, need_event=False):
        answered.append(handler)
        if handler == 2:
            raise error("mine")

    monkeypatch.setattr(pair.f, "get_batch", lambda **kw: received.pop())
    monkeypatch.setattr(pair.f, "respond", respond)
    side = FFN(0, 2, 1, width=WIDTH, dtype=torch.float32, layers=2)
    with pytest.raises(error, match="mine"):
        side.recv()
    batch = side.recv()
    assert batch.ranks == [0, 1] and batch.tensors[0].tolist() == [[0.0] * WIDTH] * 2 + [[1.0] * WIDTH] * 2
    batch.respond(batch.tensors[0])
    assert answered == [2, 1, 3]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("stored", [False, True])
def test_examination_fails(monkeypatch, error, stored):
    """A batch whose examination is interrupted is examined again, unless it is stored already."""
    monkeypatch.setattr(pair.f, "get_batch", mock.Mock(side_effect=[[batch_of(0, 1), batch_of(1, 2)], [batch_of(0, 3), batch_of(1, 4)]]))
    side = FFN(0, 2, 1, width=WIDTH, dtype=torch.float32, layers=2)
    receive, failing = FFN._receive, [error]

    def interrupted(self, *args):
        if stored:
            receive(self, *args)
        if failing:
            raise failing.pop()("mine")
        if not stored:
            receive(self, *args)

    monkeypatch.setattr(FFN, "_receive", interrupted)
    with pytest.raises(error, match="mine"):
        side.recv()
    assert [i.handler for i in side._slots.values()] == [1] * stored
    for handlers in ([1, 2], [3, 4]):
        assert side.recv()._handlers == handlers


@pytest.mark.parametrize("joined", [False, True])
def test_interrupted_join(monkeypatch, joined):
    """Ctrl-C when f.init() has just succeeded leaves the scheduler that join has started: other ranks have joined, too."""
    child = mock.Mock()
    monkeypatch.setattr(cluster, "listening", lambda *args: False)
    monkeypatch.setattr(cluster, "start_scheduler", lambda: child)
    monkeypatch.setattr(fserver, "init", mock.Mock(side_effect=KeyboardInterrupt("mine")))
    monkeypatch.setattr(fserver, "stats", mock.Mock(side_effect=None if joined else f.Error("not initialized")))
    with mock.patch.dict(os.environ), pytest.raises(KeyboardInterrupt, match="mine"):
        cluster.join("ffn", 0, 1, 1)
    assert child.kill.called != joined


@pytest.mark.parametrize("error", ERRORS)
def test_join_of_rows_fails(monkeypatch, error):
    """Without memory for the rows of all ranks, recv can be called again."""
    monkeypatch.setattr(pair.f, "get_batch", mock.Mock(side_effect=[[batch_of(0, 1), batch_of(1, 2)]]))
    monkeypatch.setattr(pair.torch, "cat", mock.Mock(side_effect=[error("mine"), torch.zeros(4, WIDTH)]))
    side = FFN(0, 2, 1, width=WIDTH, dtype=torch.float32, layers=2)
    with pytest.raises(error, match="mine"):
        side.recv()
    assert side.recv().ranks == [0, 1]


@pytest.mark.parametrize("error", ERRORS)
def test_side_cannot_be_made(monkeypatch, error):
    """A process that has joined, but whose side cannot be made, leaves the cluster at once."""
    joined = []
    monkeypatch.setattr(sglang.cluster, "join", lambda *args, **kw: joined.append(args))
    monkeypatch.setattr(fserver, "stop", lambda timeout_ms: joined.append(timeout_ms))
    for name, role in (("Attention", "attention"), ("FFN", "ffn")):
        monkeypatch.setattr(pair, name, mock.Mock(side_effect=error("mine")))
        with pytest.raises(error, match="mine"):
            sglang.setup(role, 0, width=WIDTH, dtype=torch.float32, max_rows=4, layers=2, device="cpu")
        assert joined == [(role, 0, 1, 1), 0]
        joined.clear()
    with pytest.raises(RuntimeError, match="setup.. was not called"):
        sglang.StepMeshATTN(0).recv()


def test_interrupted_layer(attention, monkeypatch):
    """After Ctrl-C at the end of a send, recv returns the answer; after one before a send begins its round, the stage is free."""
    monkeypatch.setattr(sglang, "_here", sglang._Context(attention, 1))
    layer, send, x = sglang.StepMeshATTN(0), attention.send, torch.ones(4, WIDTH)
    tensors = dict(hidden_states=x, topk_weights=x, topk_ids=x, router_logits=x)
    for begins in (True, False):
        def interrupted(*args, **kw):
            if begins:
                send(*args, **kw)
            raise KeyboardInterrupt("mine")

        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt, match="mine"):
            m.setattr(attention, "send", interrupted)
            layer.send(tensors)
        if not begins:
            layer.send(tensors)
        assert layer.recv().shape == x.shape


def test_wrong_answer(monkeypatch):
    """StepMeshFFN.send refuses a wrong answer before the ranks of the group add theirs, and can be called again."""
    monkeypatch.syspath_prepend(os.path.join(harness.HERE, "standins"))
    monkeypatch.setattr(pair.f, "get_batch", mock.Mock(side_effect=[[(7, [torch.ones(2, n) for n in (WIDTH, 1, 1, 1)], [pair._key(pair.DATA, 0)])]]))
    monkeypatch.setattr(pair.f, "respond", respond := mock.Mock())
    side = FFN(0, 1, 1, width=WIDTH, dtype=torch.float32, layers=2)
    monkeypatch.setattr(sglang, "_here", sglang._Context(side, 1))
    group = mock.Mock(world_size=2, rank_in_group=0, all_reduce=lambda x: x, all_gather=lambda x, dim: torch.cat([x, x]),
                      all_gather_object=lambda one: [one, one])
    layer = sglang.StepMeshFFN(0, group)
    x, _ = layer.recv()
    for wrong in (x[:1], x[:, :1], x.int()):
        with pytest.raises(ValueError, match="the answer is"):
            layer.send(wrong)
    layer.send(x)
    with pytest.raises(RuntimeError, match="no batch of layer 0"):
        layer.send(x)
    (sent,), handler, _ = respond.call_args[0]
    assert handler == 7 and torch.equal(sent, torch.ones(2, WIDTH))


def test_scheduler_does_not_start(monkeypatch):
    """The limit of an attempt that could not start the scheduler does not apply to later ones."""
    seen = []
    monkeypatch.setattr(cluster, "listening", lambda *args: False)
    monkeypatch.setattr(cluster, "start_scheduler", mock.Mock(side_effect=OSError("no processes left")))
    monkeypatch.setattr(fserver, "init", lambda timeout_ms: seen.append(os.environ.get("STEPAF_START_TIMEOUT")))
    with mock.patch.dict(os.environ):
        os.environ.pop("STEPAF_START_TIMEOUT", None)
        with pytest.raises(OSError, match="no processes left"):
            cluster.join("ffn", 0, 1, 1, timeout_ms=1000)
        cluster.join("ffn", 0, 1, 1, scheduler="no", timeout_ms=9000)
    assert seen == ["9"]
