"""fserver.connectors: errors in the middle of a call leave both sides usable."""

import harness
import pytest

if "torch" not in harness.libraries():
    pytest.skip("the connectors are for PyTorch, which this Python has not", allow_module_level=True)

import torch

import fserver_lib as f
from fserver.connectors import Attention, pair

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
        assert not self.under_way
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
