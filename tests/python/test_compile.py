"""torch.ops.stepaf: prepared exchanges inside torch.compile, without a break in its graph."""

import importlib.util
import os
import shutil
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="torch.compile is PyTorch's")
from torch import library  # noqa: E402

new = pytest.mark.skipif(not hasattr(library, "register_fake"), reason="PyTorch %s is too old: fserver.ops needs 2.4" % torch.__version__)

import fserver_lib as f  # noqa: E402

ROUNDS = 4


def compiled_worker(n):
    from fserver import ops

    def buffers():
        return torch.zeros(6, 8), torch.full((6, 8), -1.0)

    (push, pull), (push2, pull2) = buffers(), buffers()
    x, y = ops.prepare([push], [1], [pull], [2]), ops.prepare([push2], [3], [pull2], [4])

    def layer(h):
        push.copy_(h * 2)
        x.start()
        push2.copy_(h - 1)
        y.start()
        other = torch.sin(h)
        x.wait()
        push.copy_(h * 5)  # must not run before the wait
        y.wait()
        return pull + other, pull2 * 2, push + 1

    def some(h):
        push.copy_(h)
        pull.fill_(7)
        torch.ops.stepaf.start(x.number, [push], [pull], 2)
        torch.ops.stepaf.wait(x.number, [push], [pull])
        return pull * 1

    found = torch._dynamo.explain(layer)(torch.ones(6, 8))
    assert (found.graph_count, found.graph_break_count) == (1, 0), found
    for backend in n.args:
        torch._dynamo.reset()
        compiled, cut = torch.compile(layer, fullgraph=True, backend=backend), torch.compile(some, fullgraph=True, backend=backend)
        for i in range(ROUNDS):
            h = torch.arange(48.0).reshape(6, 8) + i
            a, b, c = compiled(h)
            assert torch.equal(a, h * 2 + 100 + torch.sin(h)), (backend, i)
            assert torch.equal(b, (h + 99) * 2) and torch.equal(c, h * 5 + 1), (backend, i)
            assert torch.equal(push, h * 5) and torch.equal(pull, h * 2 + 100) and torch.equal(pull2, h + 99), (backend, i)
            r = cut(h)
            assert torch.equal(r[:2], h[:2] + 100) and bool((r[2:] == 7).all()) and torch.equal(r, pull), (backend, i)
    with n.raises(ValueError, "no exchange 999"):
        torch.ops.stepaf.start(999, [push], [pull])
    with n.raises(ValueError, "push tensor 0", "was prepared"):
        torch.ops.stepaf.start(x.number, [push[:3]], [pull])
    with n.raises((), "not started"):
        x.wait()
    push.fill_(3)
    x.start()
    with n.raises(ValueError, "timeout_ms is -1"):
        x.wait(-1)
    with n.raises((), "started already"):  # and the tensors in flight are not changed
        torch.ops.stepaf.start(x.number, [torch.zeros_like(push)], [pull])
    assert bool((push == 3).all())
    x.wait()
    assert bool((pull == 103).all())
    square, answer = torch.arange(9.0).reshape(3, 3), torch.zeros(3, 3)
    z = ops.prepare([square], [5], [answer], [6])
    with pytest.raises(RuntimeError, match="memory location"):  # its values are others, and copying would overwrite them
        torch.ops.stepaf.start(z.number, [square.t()], [answer])
    z.start()
    z.wait()
    assert torch.equal(answer, torch.arange(9.0).reshape(3, 3) + 100)
    x.check()
    x.close()
    with n.raises((), "closed"):
        x.start()
    n.f.wait(n.f.push_pull([torch.zeros(0)], [999], [], []))


def adding_server(n):
    while True:
        for handler, (t,), keys in n.f.get_batch():
            if keys == [999]:
                n.f.respond([], handler)
                return
            n.f.respond([t + 100], handler)


@new
@pytest.mark.still(170)  # the C++ compiler, which PyTorch calls, reads its headers: 80 s from a cold disk
def test_compile(cluster):
    backends = ["eager", "aot_eager"]
    if shutil.which("g++") or shutil.which("clang++"):
        backends.append("inductor")
    c = cluster(lib="torch", env={"STEPAF_START_TIMEOUT": "120"})  # its import takes long
    c.run(compiled_worker, adding_server, args=backends, timeout=400)


@pytest.fixture
def ops(monkeypatch):
    """The code of fserver.ops, without its operators. Any PyTorch will do."""
    monkeypatch.setattr(library, "register_fake", mock.Mock(), raising=False)
    monkeypatch.setattr(library, "Library", mock.Mock())
    monkeypatch.setattr(torch, "Tag", mock.Mock(), raising=False)
    import fserver

    spec = importlib.util.spec_from_file_location("ops", os.path.join(os.path.dirname(fserver.__file__), "ops.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OneRound:
    """A prepared exchange whose wait() waits for `then`, unless another call of it waits already."""

    def __init__(self):
        self.waits, self.then = False, lambda: None

    def start(self, rows):
        pass

    def wait(self, timeout_ms):
        if self.waits:
            raise f.ValueError("another thread waits")
        self.waits = True
        try:
            self.then()
        finally:
            self.waits = False


def test_wait_that_ends_no_round(ops):
    """While a round is in flight, start() with other tensors does not copy them to those that are being sent."""
    push, pull = torch.full((4,), 3.0), torch.zeros(4)
    x = ops.Exchange(OneRound(), [push], [pull])

    def in_flight():
        with pytest.raises(f.Error, match="started already"):
            ops._start(x.number, [torch.zeros(4)], [pull])
        assert bool((push == 3).all())

    def another_waits():
        in_flight()
        with pytest.raises(f.ValueError, match="another thread waits"):
            ops._wait(x.number, [push], [pull])
        in_flight()

    ops._start(x.number, [push], [pull])
    for bad in (-1, -1 << 63, (1 << 40) + 1):
        with pytest.raises(f.ValueError, match="timeout_ms is %d, want 0 to" % bad):
            ops._wait(x.number, [push], [pull], bad)
        in_flight()
    x.exchange.then = another_waits
    ops._wait(x.number, [push], [pull], 1 << 40)
    ops._start(x.number, [torch.zeros(4)], [pull])
    x.exchange.then = mock.Mock(side_effect=f.TimeoutError("late"))  # cancels the round
    with pytest.raises(f.TimeoutError, match="late"):
        ops._wait(x.number, [push], [pull])
    ops._start(x.number, [torch.ones(4)], [pull])
    assert bool((push == 1).all())


def test_wrong_pull_tensors(ops):
    """Pull tensors that do not fit are refused before the wait: the round stays in flight, and its result is not lost."""
    push, pull, other = torch.full((4,), 3.0), torch.zeros(4), torch.zeros(4)
    x = ops.Exchange(OneRound(), [push], [pull])
    x.exchange.then = lambda: pull.fill_(5)
    ops._start(x.number, [push], [pull])
    for bad, text in (([], "0 pull tensors, but 1"), ([torch.zeros(3)], "pull tensor 0 is torch.float32 \\(3,\\), but torch.float32 \\(4,\\) was prepared")):
        with pytest.raises(f.ValueError, match=text):
            ops._wait(x.number, [push], bad)
        assert x.started
    ops._wait(x.number, [push], [other])
    assert bool((other == 5).all())


def test_interrupted_start(ops):
    """A start that a signal interrupts may have begun the round; one that is refused leaves the round before as it was."""
    push, pull = torch.full((4,), 3.0), torch.zeros(4)
    x = ops.Exchange(OneRound(), [push], [pull])
    for error, started in ((f.ValueError, False), (KeyboardInterrupt, True), (f.ValueError, True)):
        x.exchange.start = mock.Mock(side_effect=error("mine"))
        with pytest.raises(error, match="mine"):
            ops._start(x.number, [push], [pull], 2)
        assert (x.started, x.rows) == (started, 2 if started else -1)


@pytest.mark.skipif(hasattr(library, "register_fake"), reason="this PyTorch has what fserver.ops needs")
def test_too_old():
    with pytest.raises(ImportError, match="needs PyTorch 2.4"):
        import fserver.ops  # noqa: F401


def test_lazy():
    """An import of fserver or fserver_lib does not define torch.ops.stepaf."""
    import subprocess
    import sys

    code = "import sys, fserver_lib\nassert 'torch' not in sys.modules\nimport fserver\nassert 'fserver.ops' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
