"""fserver.connectors: the two sides, which are the same for every engine."""

import os
import subprocess
import sys
import threading
import time
from unittest import mock

import harness
import pytest

if "torch" not in harness.libraries():
    pytest.skip("the connectors are for PyTorch, which this Python has not", allow_module_level=True)

import torch

import fserver
import fserver_lib as f
from fserver.connectors import FFN, Attention, Mismatch, channels, join, leave, pair, servers_of, share, workers_of

WIDTH, MOST, STAGES, LAYERS = 8, 12, 3, 2
WAIT = 180  # seconds


# The assignment of attention ranks to FFN ranks.

def test_layout():
    for attention in range(1, 12):
        for ffn in range(1, 12):
            pairs = [(a, s) for a in range(attention) for s in servers_of(a, attention, ffn)]
            assert pairs == [(a, s) for a in range(attention) for s in range(ffn) if a in workers_of(s, attention, ffn)]
            assert len(pairs) == max(attention, ffn)
            for sizes in ([len(servers_of(a, attention, ffn)) for a in range(attention)], [len(workers_of(s, attention, ffn)) for s in range(ffn)]):
                assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    assert [servers_of(a, 5, 2) for a in range(5)] == [[0], [0], [0], [1], [1]]
    assert [share(7, i, 3) for i in range(3)] == [(0, 2), (2, 4), (4, 7)]
    for call, word in ((lambda: servers_of(3, 3, 2), "attention rank 3"), (lambda: workers_of(-1, 3, 2), "ffn rank -1"), (lambda: servers_of(0, 0, 2), "attention is 0"),
                       (lambda: workers_of(0, 1, 0), "ffn is 0")):
        with pytest.raises(ValueError, match=word):
            call()
    for bad in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="rank"):
            servers_of(bad, 2, 2)


# Values, at ratios of one to eight.

def rows_of(rank, step, stage):
    return (5 * rank + 3 * step + 7 * stage) % (MOST + 1)  # also none


def hidden(rank, step, stage, layer):
    n = rows_of(rank, step, stage)
    return (torch.arange(n * WIDTH, dtype=torch.float32) * 0.25 + 1000 * rank + 100 * step + 10 * stage + layer).reshape(n, WIDTH)


def routing(rank, step, stage):
    return torch.arange(rows_of(rank, step, stage), dtype=torch.int32).reshape(-1, 1) + rank


STEPS = 4


def values_attention(n):
    side = Attention(n.rank, n.workers, n.servers, width=WIDTH, dtype=torch.float32, max_rows=MOST, stages=STAGES, layers=LAYERS)
    for step in range(STEPS):
        for layer in range(LAYERS):
            for stage in range(STAGES):  # three micro-batches in flight
                x, ids = hidden(n.rank, step, stage, layer), routing(n.rank, step, stage)
                side.send(stage, [x, ids] if layer else x, layer)
                x.fill_(-1)  # send() has copied it
            for stage in range(STAGES):
                x, ids = hidden(n.rank, step, stage, layer), routing(n.rank, step, stage)
                want = x * 2 + layer + (ids if layer else 0)
                out = torch.empty_like(x) if stage == 1 else None
                got = side.recv(stage, out=out)
                assert out is None or got is out
                assert got.shape == want.shape and torch.equal(got, want), (step, layer, stage)
    n.f.barrier(True, True)


def values_ffn(n):
    side = FFN(n.rank, n.workers, n.servers, width=WIDTH, dtype=torch.float32, stages=STAGES, layers=LAYERS, together=n.args["together"])
    each = 1 if n.args["together"] else len(side.peers)
    sizes, answers = set(), []
    for i in range(STEPS * LAYERS * STAGES * each):
        batch = side.recv() if n.rank % 2 or not n.args["together"] else side.recv(i % STAGES)
        assert batch.ranks == side.peers if n.args["together"] else len(batch.ranks) == 1
        assert len(batch.tensors[0]) == sum(batch.rows) and len(batch.tensors) == 1 + batch.layer
        out = batch.tensors[0] * 2 + batch.layer
        if batch.layer:
            out += batch.tensors[1]
        answers.append(batch.respond(out))
        sizes.update(batch.rows)
    for a in answers:
        a.wait(20000)
        assert a.done()
    assert len(sizes) > 2
    n.f.barrier(True, True)


@pytest.mark.parametrize("attention, ffn, together", [(1, 1, True), (1, 2, True), (3, 2, True), (5, 2, True), (8, 1, True), (2, 3, True), (3, 1, False)])
def test_ratios(cluster, attention, ffn, together):
    cluster(workers=attention, servers=ffn, env={"PS_VERBOSE": "-1"}).run(values_attention, values_ffn, args=dict(together=together), timeout=300)


@pytest.mark.parametrize("env", [{"BYTEPS_ENABLE_IPC": "0"}, {"PS_RESEND": "1"}], ids=["zmq", "resend"])
def test_transports(cluster, env):
    cluster(workers=2, servers=2, env=env).run(values_attention, values_ffn, args=dict(together=True), timeout=WAIT)


# fp8 and packed types, with scales, bit for bit, and with no rows.

def kinds():
    names = ("bfloat16", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2")
    return [getattr(torch, name) for name in names if hasattr(torch, name)]


def bits(dtype, rows, seed):
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.tensor([(7 * i + seed) % 251 for i in range(rows * WIDTH * size)], dtype=torch.uint8)
    return raw.view(dtype).reshape(rows, WIDTH) if rows else torch.empty(0, WIDTH, dtype=dtype)


def types_attention(n):
    for i, dtype in enumerate(kinds()):
        side = Attention(n.rank, n.workers, n.servers, width=WIDTH, dtype=dtype, max_rows=4)
        for rows in (4, 0, 1):
            x, scales = bits(dtype, rows, i + n.rank), torch.full((rows, 1), 2.0 + n.rank)
            side.send(0, [x, scales])
            got = side.recv(0)
            assert got.dtype == dtype and got.shape == x.shape
            assert rows == 0 or torch.equal(got.view(torch.uint8), x.view(torch.uint8)), (dtype, rows)
        n.f.barrier(True, True)


def types_ffn(n):
    for dtype in kinds():
        side = FFN(n.rank, n.workers, n.servers, width=WIDTH, dtype=dtype)
        for rows in (4, 0, 1):
            batch = side.recv(0)
            assert batch.tensors[0].dtype == dtype and batch.rows == [rows] * len(side.peers)
            assert batch.tensors[1].flatten().tolist() == [2.0 + r for r in side.peers for _ in range(rows)]
            batch.respond(batch.tensors[0])
        n.f.barrier(True, True)


def test_types(cluster):
    cluster(workers=2).run(types_attention, types_ffn, timeout=WAIT)


# A lost rank, and its replacement.

QUICK = {"STEPAF_REPLACE_TIMEOUT": "60"}


def side_of(n, **options):
    options = dict(dict(width=WIDTH, dtype=torch.float32, stages=2, layers=4, timeout_ms=60000), **options)
    if n.role == "worker":
        return Attention(n.rank, n.workers, n.servers, **dict(dict(max_rows=MOST), **options))
    return FFN(n.rank, n.workers, n.servers, **options)


def serve(side, batches, stage=None):
    for _ in range(batches):
        batch = side.recv(stage)
        batch.respond(batch.tensors[0] + 10 * batch.layer + 1)


def replaced_ffn_attention(n):
    """The FFN rank is killed between a send and its recv. The attention rank gets no other notice."""
    side = side_of(n)
    x = torch.ones(3, WIDTH)
    side.send(0, x)
    assert torch.equal(side.recv(0), x + 1)
    side.send(0, x, layer=3)
    side.send(1, 2 * x, layer=2)
    n.tell("sent")
    assert torch.equal(side.recv(0), x + 31)
    assert torch.equal(side.recv(1), 2 * x + 21)
    side.send(0, 3 * x, layer=1)
    assert torch.equal(side.recv(0), 3 * x + 11)
    hurried = side_of(n, replace_ms=0)
    hurried.send(0, x)
    with n.raises(ConnectionError, "attention", "stage 0", "ffn 0"):
        hurried.recv(0)
    n.tell(n.wrong)
    time.sleep(300)  # without an FFN rank the cluster cannot stop together


@harness.by_hand
def replaced_ffn_ffn(n):
    n.f.init()
    side = side_of(n)
    if n.args == "first":
        serve(side, 1)
        n.tell("served")
        time.sleep(300)  # until it is killed
    serve(side, 3)
    side.recv(0)
    n.tell("held")
    time.sleep(300)


def test_replaced_ffn(cluster):
    c = cluster(workers=2, env=QUICK)
    workers, (first,) = c.start(replaced_ffn_attention, replaced_ffn_ffn, args="first")
    assert [w.hear(WAIT) for w in workers] == ["sent", "sent"] and first.hear(WAIT) == "served"
    first.kill()
    c.processes.remove(first)
    second = c.spawn("server", replaced_ffn_ffn, args="second")
    assert second.hear(WAIT) == "held"
    second.kill()
    assert [w.hear(WAIT) for w in workers] == [[], []]


@pytest.mark.parametrize("replace_ms", [0, 10000])
def test_no_replacement(monkeypatch, replace_ms):
    """recv and check wait for replace_ms from the first loss on, however often the connection fails again."""
    now = 1000.0

    def sleep(seconds):
        nonlocal now
        now += seconds
        assert now < 1001 + replace_ms / 500, "the limit begins again and again"

    class Exchange:
        def start(self, rows):
            pass

        def wait(self, timeout_ms):
            lost()

    def lost(*args, **kw):
        raise f.ConnectionError("it is lost")

    monkeypatch.setattr(pair, "time", mock.Mock(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(pair.f, "push_pull", lambda *args, **kw: 1)
    monkeypatch.setattr(pair.f, "wait", lambda *args, **kw: None)
    side = Attention(0, 1, 1, width=WIDTH, dtype=torch.float32, max_rows=MOST, layers=LAYERS, replace_ms=replace_ms)
    side._greeted = True
    monkeypatch.setattr(pair, "_compared", lambda reply: "ffn 0: streams is off")
    round_ = pair._Round(None, 1, [MOST], [Exchange()])
    with pytest.raises(ConnectionError, match="stage 2, layer 1, ffn 0: it is lost"):
        side._finish(2, round_, 0, 1)
    assert replace_ms <= (now - 1000) * 1000 < replace_ms + 100
    side, now = Attention(0, 1, 1, width=WIDTH, dtype=torch.float32, max_rows=MOST, layers=LAYERS, replace_ms=replace_ms), 1000.0
    monkeypatch.setattr(pair.f, "wait", lost)
    with pytest.raises(ConnectionError, match="it is lost"):
        side.check()
    assert replace_ms <= (now - 1000) * 1000 < replace_ms + 100


@pytest.mark.parametrize("name, came, stage, rows", [
    # came has (stage, rank): (layer, when). rows is the expected stage and ranks of a batch, or the limit and its reason.
    ("the limit counts from the first rank", {(0, 0): (0, 100), (0, 1): (0, 104)}, None, (110, "stage 0, layer 0 of attention 0, 1 has arrived, none of attention 2")),
    ("the earliest limit", {(0, 1): (0, 104), (1, 2): (1, 100), (2, 0): (0, 102)}, None, (110, "stage 1, layer 1 of attention 2 has arrived, none of attention 0, 1")),
    ("another stage is not awaited", {(0, 1): (0, 104), (1, 2): (1, 100)}, 0, (114, "stage 0, layer 0 of attention 1 has arrived, none of attention 0, 2")),
    ("a rank may be replaced, from the last one on", {(1, 0): (0, 99), (1, 1): (1, 100), (1, 2): (0, 104)}, None, (114, "")),
    ("it was not replaced", {(1, 0): (0, 90), (1, 1): (1, 91), (1, 2): (0, 95)}, None, (1, [0, 1, 2])),
    ("a complete one is not delayed", {(0, 0): (0, 1), **{(2, r): (1, 104) for r in range(3)}}, None, (2, [0, 1, 2])),
    ("the oldest one", {(s, r): (0, 104 - s) for s in (2, 1) for r in range(3)}, None, (2, [0, 1, 2])),
])
def test_limits_of_batches(monkeypatch, name, came, stage, rows):
    """An FFN rank waits for the rest of a batch until timeout_ms after its first part."""
    monkeypatch.setattr(pair, "time", mock.Mock(monotonic=lambda: 105.5))
    side = FFN(0, 3, 1, width=WIDTH, dtype=torch.float32, stages=STAGES, layers=LAYERS, timeout_ms=10000)
    for order, ((s, r), (layer, since)) in enumerate(came.items()):
        side._slots[s, r] = pair._Item(order, r, layer, order, [], since)
    found, items, late, missing = side._take(stage)
    assert ((late, missing) if items is None else (found, [i.rank for i in items])) == rows, name


@harness.by_hand
def replaced_attention_attention(n):
    n.f.init()
    side = side_of(n)
    x = torch.full((n.rank + 1, WIDTH), float(n.rank))
    if n.args == "first":
        side.send(0, x)
        assert torch.equal(side.recv(0), x + 1)
    if n.args == "first" and n.rank == 1:
        side.send(1, x - 5, layer=3)  # must not be mixed with the rows of the replacement
        n.tell("sent")
        time.sleep(300)  # until it is killed
    if n.rank == 0:
        n.listen()
    side.send(1, x, layer=2)
    assert torch.equal(side.recv(1), x + 21)
    n.f.stop()


def replaced_attention_ffn(n):
    side = side_of(n)
    serve(side, 1)
    with n.raises(TimeoutError, "get_batch"):
        side.recv(1, timeout_ms=300)  # of one rank only
    n.tell("one came")
    serve(side, 1, stage=1)


def test_replaced_attention(cluster):
    c = cluster(workers=2, env=QUICK)
    (w0, w1), (server,) = c.start(replaced_attention_attention, replaced_attention_ffn, args="first")
    assert w1.hear(WAIT) == "sent" and server.hear(WAIT) == "one came"
    w1.kill()
    c.processes.remove(w1)
    c.spawn("worker", replaced_attention_attention, rank=1, args="second")
    w0.tell("go on")
    c.finish(WAIT)


@harness.by_hand
def late_attention(n):
    """Rank 0 has sent. Rank 1 is lost, and its replacement arrives after the FFN rank's limit."""
    n.f.init()
    side = side_of(n)
    if n.args == "first" and n.rank == 1:
        side.check()
        n.tell("here")
        time.sleep(300)  # until it is killed
    x = torch.full((2, WIDTH), float(n.rank))
    side.send(0, x)
    assert torch.equal(side.recv(0), x + 1)
    n.f.stop()


def one_missing(side, stage, *words):
    """Calls recv() until the rows of the present ranks have arrived: the error then has the words."""
    end = time.monotonic() + 100
    while True:
        with pytest.raises(f.TimeoutError) as e:
            side.recv(stage)
        if all(w in str(e.value) for w in words):
            return
        assert time.monotonic() < end, e.value


def late_ffn(n):
    side = side_of(n, timeout_ms=500)
    one_missing(side, 0, "attention 0 has arrived", "none of attention 1")
    begun = time.monotonic()
    one_missing(side, 0, "attention 0 has arrived", "none of attention 1")
    assert time.monotonic() - begun >= 0.4  # a caller in a loop does not keep a CPU busy
    n.tell("late")
    end = time.monotonic() + 100
    while True:
        try:
            return serve(side, 1)
        except f.TimeoutError:  # until rank 1 has joined
            assert time.monotonic() < end
            time.sleep(0.05)


def test_recv_goes_on_after_a_timeout(cluster):
    c = cluster(workers=2, env=QUICK)
    (_, w1), (server,) = c.start(late_attention, late_ffn, args="first")
    assert w1.hear(WAIT) == "here" and server.hear(WAIT) == "late"
    w1.kill()
    c.processes.remove(w1)
    c.spawn("worker", late_attention, rank=1, args="second")
    c.finish(WAIT)


# The replacement of a lost FFN rank passes a handshake before it gets a round.

def other_type_attention(n):
    side = side_of(n)
    x = torch.ones(3, WIDTH)
    side.send(0, x)
    assert torch.equal(side.recv(0), x + 1)
    side.send(0, x)
    n.tell("sent")
    with n.raises(Mismatch, "out_dtype", "float32", "int32"):
        side.recv(0)
    n.tell(n.wrong)
    time.sleep(300)


@harness.by_hand
def other_type_ffn(n):
    n.f.init()
    if n.args == "first":
        serve(side_of(n), 1)
        n.tell("served")
        time.sleep(300)
    side = side_of(n, out_dtype=torch.int32)
    while True:
        try:
            batch = side.recv()
            batch.respond(batch.tensors[0].int())
        except Mismatch:
            pass


def test_replacement_of_another_type(cluster):
    c = cluster(env=QUICK)
    (w,), (first,) = c.start(other_type_attention, other_type_ffn, args="first")
    assert first.hear(WAIT) == "served" and w.hear(WAIT) == "sent"
    first.kill()
    c.processes.remove(first)
    c.spawn("server", other_type_ffn, args="second")
    assert w.hear(WAIT) == []


# A limit that is refused ends the round, not the stage.

def refused_limit_attention(n):
    side, x = side_of(n), torch.ones(3, WIDTH)
    for bad, word in ((1500.0, "1500.0"), (-1, "-1")):
        side.send(0, x)
        with n.raises((TypeError, ValueError), "attention 0: stage 0", "timeout_ms", word):
            side.recv(0, timeout_ms=bad)
        side.send(0, x + 1)
        assert torch.equal(side.recv(0), x + 2)


def refused_limit_ffn(n):
    side, answered = side_of(n), 0
    while answered < 2:
        batch = side.recv()
        if batch.tensors[0][0, 0] == 2:  # the other rounds are not answered: their limits are refused
            batch.respond(batch.tensors[0] + 1)
            answered += 1


def test_refused_limit(cluster):
    cluster().run(refused_limit_attention, refused_limit_ffn, timeout=WAIT)


# With layers=1 a round does not name its layer, so no round is sent again.

def uncounted_attention(n):
    side = side_of(n, layers=1)
    assert side.replace_ms == 0
    x = torch.ones(2, WIDTH)
    side.send(0, x)
    assert torch.equal(side.recv(0), x + 1)
    side.send(0, x)
    n.tell("sent")
    with n.raises(ConnectionError, "attention 0: stage 0", "ffn 0"):
        side.recv(0)
    n.tell("failed")
    n.listen()  # the replacement has joined
    side.send(0, 2 * x)
    assert torch.equal(side.recv(0), 2 * x + 1)


@harness.by_hand
def uncounted_ffn(n):
    n.f.init()
    side = side_of(n, layers=1)
    if n.args == "first":
        serve(side, 1)
        n.tell("served")
        time.sleep(300)
    n.tell("here")
    serve(side, 1)
    n.f.stop()


def test_no_second_sending_without_layers(cluster):
    c = cluster(env=QUICK)
    (w,), (first,) = c.start(uncounted_attention, uncounted_ffn, args="first")
    assert first.hear(WAIT) == "served" and w.hear(WAIT) == "sent"
    first.kill()
    c.processes.remove(first)
    assert w.hear(WAIT) == "failed"
    assert c.spawn("server", uncounted_ffn, args="second").hear(WAIT) == "here"
    w.tell("go on")
    c.finish(WAIT)


# The rows of a canceled round do not become part of a later batch.

def given_up_attention(n):
    side = side_of(n, timeout_ms=60000)
    x = torch.full((2, WIDTH), float(n.rank))
    if n.rank == 1:
        side.send(0, x - 100)
        with n.raises(TimeoutError, "stage 0"):
            side.recv(0, timeout_ms=300)
        n.tell("gave up")
    n.listen()
    side.send(0, x)
    assert torch.equal(side.recv(0), x + 1)
    n.f.barrier(True, True)


def given_up_ffn(n):
    side = side_of(n, timeout_ms=60000)
    with n.raises(TimeoutError):
        side.recv(timeout_ms=1500)  # receives the rows and their cancellation
    n.tell("waited")
    batch = side.recv()
    assert batch.tensors[0].tolist() == [[0.0] * WIDTH] * 2 + [[1.0] * WIDTH] * 2
    batch.respond(batch.tensors[0] + 1)
    n.f.barrier(True, True)


def test_given_up(cluster):
    c = cluster(workers=2)
    (w0, w1), (server,) = c.start(given_up_attention, given_up_ffn)
    assert w1.hear(WAIT) == "gave up" and server.hear(WAIT) == "waited"
    w0.tell("go on")
    time.sleep(1)  # together with the canceled rows, rank 0's would be a complete batch
    w1.tell("go on")
    c.finish(WAIT)


def uncounted_step_attention(n):
    side = side_of(n, layers=1, timeout_ms=60000)
    x = torch.full((1, WIDTH), float(n.rank))
    side.send(0, x)
    n.listen()  # the rows of both have arrived
    side.timeout_ms = 1000
    with n.raises(TimeoutError, "stage 0"):
        side.recv(0)
    for _ in range(30):  # a new step, until both ranks have begun one
        side.send(0, x + 5)
        try:
            assert torch.equal(side.recv(0), x + 6)
            break
        except f.TimeoutError:
            pass
    else:
        raise AssertionError("no step succeeded")
    n.f.barrier(True, True)


def uncounted_step_ffn(n):
    side = side_of(n, layers=1, timeout_ms=60000)
    assert len(side.recv(0).ranks) == 2  # and answers none
    n.tell("both")
    errors = 0
    while True:
        try:
            batch = side.recv(0)
            break
        except Mismatch as e:
            assert "begin a new step" in str(e), e
            errors += 1
    assert errors >= 1 and batch.tensors[0].tolist() == [[5.0] * WIDTH, [6.0] * WIDTH]
    batch.respond(batch.tensors[0] + 1)
    n.f.barrier(True, True)


def test_new_step_without_layers(cluster):
    c = cluster(workers=2)
    attentions, (server,) = c.start(uncounted_step_attention, uncounted_step_ffn)
    assert server.hear(WAIT) == "both"
    for p in attentions:
        p.tell("go on")
    c.finish(WAIT)


# A handshake that failed is repeated.

def compared_attention(n):
    side = side_of(n, width=WIDTH + 1)
    for _ in range(2):  # the FFN rank does not answer yet
        with n.raises(TimeoutError):
            side.check(timeout_ms=300)
    n.tell("failed twice")
    with n.raises(Mismatch, "width"):
        side.send(0, torch.zeros(1, WIDTH + 1))
    n.tell("compared")


def compared_ffn(n):
    n.listen()
    side = side_of(n)
    with n.raises(Mismatch, "width"):
        side.recv(timeout_ms=60000)
    # That may have been a canceled handshake whose cancellation was in flight.
    over = threading.Thread(target=n.listen)
    over.start()
    while over.is_alive():
        try:
            side.recv(timeout_ms=50)
        except (Mismatch, TimeoutError):
            pass
        except f.ConnectionError:  # the worker has received the end, and has left
            break
    over.join()


def test_comparison_is_made_again(cluster):
    c = cluster()
    (w,), (server,) = c.start(compared_attention, compared_ffn)
    assert w.hear(WAIT) == "failed twice"
    server.tell("go on")
    assert w.hear(WAIT) == "compared"
    server.tell("over")
    c.finish(WAIT)


# Configurations that differ are an error that names both sides, and nothing hangs.

def unlike_attention(n):
    side = side_of(n, timeout_ms=20000)
    with n.raises(Mismatch, "width: attention %d at" % n.rank, "has 8, ffn 0 at", "has 16", "stages", "float32", "float16", "pid %d" % os.getpid()):
        side.check()
    with n.raises(Mismatch, "width"):
        side.send(0, torch.zeros(1, WIDTH))


def unlike_ffn(n):
    side = side_of(n, width=16, dtype=torch.float16, stages=3)
    for _ in side.peers:
        with n.raises(Mismatch, "width: attention", "has 8, ffn 0 at", "has 16"):
            side.recv(timeout_ms=20000)


def test_unlike(cluster):
    cluster(workers=2).run(unlike_attention, unlike_ffn, timeout=WAIT)


# Both sides say how they exchange micro-batches, and why not in streams.

WAYS = (("here", "here", "streams"), ("here", "there", "messages, not streams: attention 0 and ffn 0 are on different hosts"),
        ("here", "", "messages, not streams: ffn 0: its tensors are on cpu, which cannot exchange in streams"), ("", "here", "messages, not streams: attention 0: its tensors are on cpu, which cannot exchange in streams"))


def path_attention(n):
    own, _, path = n.args
    channels.stream_host = lambda device: own
    side = side_of(n, streams=True, timeout_ms=1000 * WAIT)
    assert side.path == ""
    side.check()
    assert side.path == path and side.streams == (path == "streams"), side.path
    side.send_control(b"over")


def path_ffn(n):
    _, own, path = n.args
    channels.stream_host = lambda device: own
    side = side_of(n, streams=True)
    side.recv_control(timeout_ms=1000 * WAIT)
    assert side.path == path and side.streams == (path == "streams"), side.path


@pytest.mark.parametrize("way", WAYS, ids=["streams", "hosts", "server", "worker"])
def test_path(cluster, way):
    cluster().run(path_attention, path_ffn, args=way, timeout=WAIT)


# With streams, a rank with another configuration gets its error before the other ranks have created their sides.

def unlike_alone_attention(n):
    channels.stream_host = lambda device: "here"
    if n.rank > 0:
        n.listen()
        return
    side = side_of(n, streams=True, timeout_ms=1000 * WAIT)
    with n.raises(Mismatch, "width: attention 0 at", "has 8, ffn 0 at", "has 16"):
        side.check()
    n.tell("compared")


def unlike_alone_ffn(n):
    channels.stream_host = lambda device: "here"
    side = side_of(n, width=16, streams=True)
    with n.raises(Mismatch, "width: attention 0"):
        side.recv(0, timeout_ms=1000 * WAIT)


def test_unlike_alone(cluster):
    c = cluster(workers=2)
    (w, other), _ = c.start(unlike_alone_attention, unlike_alone_ffn)
    assert w.hear(WAIT) == "compared"
    other.tell("over")
    c.finish(WAIT)


def counts_attention(n):
    side = side_of(n, timeout_ms=60000)
    side.send_control(b"3 rows")
    side.send(0, torch.zeros(4, WIDTH))
    n.listen()  # the FFN rank has raised the error
    with n.raises(TimeoutError, "attention %d" % n.rank, "stage 0", "ffn 0"):
        side.recv(0, timeout_ms=300)
    side.send(1, torch.zeros(1, WIDTH), layer=n.rank)
    n.listen()
    with n.raises(TimeoutError, "attention %d" % n.rank, "stage 1, layer %d" % n.rank, "ffn 0"):
        side.recv(1, timeout_ms=300)
    if n.rank == 0:
        side.send(1, torch.zeros(1, WIDTH))
        n.listen()
        with n.raises(TimeoutError, "stage 1, layer 0, ffn 0"):
            side.recv(1, timeout_ms=300)
    n.f.barrier(True, True)


def counts_ffn(n):
    side = side_of(n, timeout_ms=60000)
    assert side.recv_control() == {0: b"3 rows", 1: b"3 rows"}
    side.expect({0: {0: 4, 1: 3}})
    with n.raises(Mismatch, "stage 0", "attention 1 sent 4 rows", "ffn 0 expects 3"):
        side.recv(0)
    n.tell("rows")
    side.timeout_ms = 5000  # within this time one of the two may be from a lost rank
    with n.raises(Mismatch, "attention 0 sent layer 0", "attention 1 layer 1", "ffn 0"):
        side.recv(1)
    n.tell("layers")
    side.timeout_ms = 500
    one_missing(side, 1, "ffn 0", "stage 1, layer 0 of attention 0 has arrived", "none of attention 1", "500 ms")
    n.tell("missing")
    n.f.barrier(True, True)


def test_counts(cluster):
    c = cluster(workers=2)
    attentions, (server,) = c.start(counts_attention, counts_ffn)
    for wrong in ("rows", "layers", "missing"):
        assert server.hear(WAIT) == wrong
        for p in attentions:
            p.tell("go on")
    c.finish(WAIT)


def stranger_attention(n):
    x, y = torch.zeros(4), torch.zeros(4)
    handler = n.f.push_pull([x], [1], [y], [1])
    n.listen()  # the FFN rank has received the batch
    with n.raises(TimeoutError, "server 0"):
        n.f.wait(handler, timeout_ms=1)
    wrong = Attention(n.rank, 2, 1, width=WIDTH, dtype=torch.float32, max_rows=MOST, timeout_ms=20000)
    with n.raises(Mismatch, "attention: attention 0", "has 2, ffn 0", "has 1"):
        wrong.check()


def stranger_ffn(n):
    side = side_of(n)
    with n.raises(Mismatch, "ffn 0", "keys [1]", "not sent by an Attention"):
        side.recv()
    n.tell("seen")
    with n.raises(Mismatch, "attention: attention 0", "has 2"):
        side.recv()


def test_stranger(cluster):
    c = cluster()
    (w,), (server,) = c.start(stranger_attention, stranger_ffn)
    assert server.hear(WAIT) == "seen"
    w.tell("go on")
    c.finish(WAIT)


# Wrong input.

def refused_attention(n):
    for options, classes, words in ((dict(width=0), ValueError, ("width", "0")), (dict(width=1.5), TypeError, ("width", "1.5")), (dict(stages=257), ValueError, ("stages", "256")),
                                    (dict(timeout_ms=1e4), TypeError, ("timeout_ms", "10000.0")), (dict(timeout_ms=0), ValueError, ("timeout_ms", "0")),
                                    (dict(layers=0), ValueError, ("layers",)), (dict(max_rows=0), ValueError, ("max_rows",)), (dict(dtype="float32"), TypeError, ("dtype", "torch.dtype"))):
        with pytest.raises(classes) as e:
            side_of(n, **options)
        assert all(w in str(e.value) for w in words), e.value
    side, x = side_of(n), torch.zeros(2, WIDTH)
    for args, classes, words in (
            ((2, x), ValueError, ("attention 0", "no stage 2", "0 to 1")),
            (("0", x), TypeError, ("stage", "'0'")),
            ((0, x, 4), ValueError, ("no layer 4", "0 to 3")),
            ((0, torch.zeros(MOST + 1, WIDTH)), ValueError, ("13 rows", "max_rows, 12")),
            ((0, torch.zeros(2, WIDTH + 1)), ValueError, ("float32 of shape (2, 9)", "8 columns")),
            ((0, torch.zeros(WIDTH)), ValueError, ("shape (8,)",)),
            ((0, x.double()), ValueError, ("float64", "want float32")),
            ((0, [x, torch.zeros(3, 1)]), ValueError, ("tensor 1 has 3 rows", "tensor 0 has 2")),
            ((0, []), ValueError, ("0 tensors",)),
            ((0, [x] * 17), ValueError, ("17 tensors",)),
            ((0, [x, 3]), TypeError, ("tensor 1 is int",)),
            ((0, [x, torch.tensor(1)]), TypeError, ("tensor 1",)),
            ((0, torch.zeros(2, WIDTH, device="meta")), ValueError, ("on meta", "want cpu"))):
        with pytest.raises(classes) as e:
            side.send(*args)
        assert all(w in str(e.value) for w in words), e.value
    with pytest.raises(ValueError, match="stage 0 is not under way"):
        side.recv(0)
    for bad in (b"", "text", None):
        with pytest.raises(TypeError, match="control message"):
            side.send_control(bad)
    side.send(0, x)
    with pytest.raises(ValueError, match=r"stage 0 is under way \(layer 0\)"):
        side.send(0, x)
    assert torch.equal(side.recv(0), x + 1)
    side.send(0, x)
    with pytest.raises(ValueError, match=r"out is float32 of shape \(3, 8\)"):
        side.recv(0, out=torch.zeros(3, WIDTH))
    assert torch.equal(side.recv(0), x + 1)


def refused_ffn(n):
    with pytest.raises(TypeError, match="timeout_ms is 10000.0"):  # otherwise the second batch of a stage raises it, in each recv
        side_of(n, timeout_ms=1e4)
    side = side_of(n)
    with pytest.raises(ValueError, match="no stage 2"):
        side.recv(2)
    batch = side.recv()
    for out in (torch.zeros(3, WIDTH), torch.zeros(2, WIDTH - 1), torch.zeros(2, WIDTH).double()):
        with pytest.raises(ValueError, match=r"ffn 0: stage 0, layer 0: the answer is float.*want float32 of shape \(2, 8\), for attention 0"):
            batch.respond(out)
    batch.respond(batch.tensors[0] + 1)
    with pytest.raises(ValueError, match="answered already"):
        batch.respond(batch.tensors[0])
    serve(side, 1)


def test_refused(cluster):
    cluster().run(refused_attention, refused_ffn, timeout=WAIT)


# Ranks join and leave as in an engine: FFN rank 0 starts the scheduler, which ends with the cluster.

def joined(n, role):
    port = int(n.env["DMLC_PS_ROOT_PORT"])
    for name in list(os.environ):
        if name.startswith(("DMLC_", "STEPMESH_")) and name != "DMLC_ENABLE_RDMA":
            del os.environ[name]
    join(role, n.rank, n.workers, n.servers, port=port, device=0, timeout_ms=150000)
    side = side_of(n)
    return side


@harness.by_hand
def join_attention(n):
    side = joined(n, "attention")
    x = torch.full((5, WIDTH), 1.0 + n.rank)
    side.send(1, x)
    assert torch.equal(side.recv(1), x + 1)
    leave()


@harness.by_hand
def join_ffn(n):
    side = joined(n, "ffn")
    serve(side, 1)
    leave()


def test_join(cluster):
    c = cluster(workers=3, servers=2)
    for i in range(3):
        c.spawn("worker", join_attention, rank=i)
    for i in range(2):
        c.spawn("server", join_ffn, rank=i)
    c.finish(WAIT)
    c.processes = []
    end = time.monotonic() + 20
    while listens(c.port):
        assert time.monotonic() < end, "the scheduler has not ended"
        time.sleep(0.1)


def listens(port):
    import fserver.connectors.cluster

    return fserver.connectors.cluster.listening("127.0.0.1", port)


@harness.by_hand
def join_alone(n):
    for name in ("STEPAF_START_TIMEOUT", "DMLC_ROLE", "DMLC_NODE_RANK"):
        del os.environ[name]
    with n.raises(TimeoutError):
        join("ffn", 0, 1, 1, port=int(n.env["DMLC_PS_ROOT_PORT"]), timeout_ms=2500)


def test_join_alone(cluster):
    """The scheduler of a failed start ends with it."""
    c = cluster()
    c.spawn("server", join_alone)
    c.finish(WAIT)
    assert not listens(c.port)


@pytest.mark.parametrize("before", [None, "", "7"])
def test_join_again(monkeypatch, before):
    """The limit of a failed attempt does not apply to later ones. A limit of the user stays."""
    seen = []

    def init(timeout_ms):
        seen.append(os.environ.get("STEPAF_START_TIMEOUT"))
        if len(seen) < 4:
            raise f.TimeoutError("nobody came")

    monkeypatch.setattr(fserver, "init", init)
    with mock.patch.dict(os.environ):
        os.environ.pop("STEPAF_START_TIMEOUT", None)
        if before is not None:
            os.environ["STEPAF_START_TIMEOUT"] = before
        for limit in (0, 2500, None):
            with pytest.raises(TimeoutError):
                join("ffn", 0, 1, 1, scheduler="no", timeout_ms=limit)
        join("ffn", 0, 1, 1, scheduler="no", timeout_ms=10**12)
    assert seen == (["7"] * 4 if before == "7" else ["1", "3", None, "604800"])


@harness.by_hand
def miscounted(n):
    n.workers = n.args["attention"]
    with pytest.raises(f.Error) as e:
        joined(n, n.args["role"])
    return str(e.value)


def test_counts_of_ranks_differ(cluster):
    """Some nodes expect 3 attention ranks, another one 2."""
    c = cluster(workers=2, servers=1)
    c.spawn("scheduler", harness.scheduler)
    w = c.spawn("worker", miscounted, rank=0, args=dict(role="attention", attention=3))
    text = w.hear(WAIT)
    w.wait(WAIT)
    assert "worker" in text and "scheduler" in text and "3" in text and "2" in text, text


@pytest.mark.parametrize("args, word", [
    (("both", 0, 1, 1), "role is 'both'"), (("attention", 1, 1, 1), "no attention rank 1"), (("ffn", -1, 1, 1), "no ffn rank -1")])
def test_join_refuses(args, word):
    with pytest.raises(ValueError, match=word):
        join(*args)
    for options, text in ((dict(host=""), "host is empty"), (dict(port=0), "port is 0"), (dict(port=65536), "port is 65536")):
        with pytest.raises(ValueError, match=text):
            join("ffn", 0, 1, 1, **options)


def test_imports():
    """The imports of docs/engines.md work, and need nothing of an engine."""
    code = "import sys, fserver.connectors as c; assert all(hasattr(c, n) for n in c.__all__); assert not {'vllm', 'sglang', 'afd_plugin'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import fserver.connectors.vllm_plugin as p; p.register()"  # without afd-plugin it does nothing
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("ascend", [False, True])
def test_import_of_ascend(tmp_path, ascend):
    """Without torch_npu, afd-plugin's module for Ascend devices is not loaded at each layer in vain."""
    if ascend:
        (tmp_path / "torch_npu.py").write_text("")
    code = "import sys, fserver.connectors.vllm_plugin as p; p.register(); print(p.ASCEND in sys.modules)"
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), os.path.join(harness.HERE, "standins"), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", code], env=environ, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "%s\n" % (not ascend)


def test_overlap_says_what_is_missing():
    """On GPUs it is run by hand; docs/engines.md."""
    program = os.path.join(os.path.dirname(os.path.dirname(harness.HERE)), "tests", "benchmark", "overlap.py")
    environ = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, program], env=environ, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "not measured, missing: two GPUs (PyTorch sees 0)" in done.stdout, done.stdout
