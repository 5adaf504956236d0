"""fserver.session: a controller and ranks, with everything that can be an argument, failing functions,
and the example."""

import os
import signal
import subprocess
import sys

import pytest
from harness import within

pytest.importorskip("numpy")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Object:
    """An object that a rank may keep, but that cannot be copied."""

    count = 0

    def __init__(self):
        Object.count += 1

    def __del__(self):
        Object.count -= 1


def rank(n):
    from fserver import session

    def fail(on):
        if on == n.rank:
            raise KeyError("no such thing")
        return n.rank

    def strange():
        raise OSError("\udcff\0")

    def leave(on):
        if on == n.rank:
            sys.exit("over")

    made = []

    def join():
        made.append(n.f.Communicator([0, 1, 2]))

    def total(x):
        out = x * (n.rank + 1)
        made[0].all_reduce(out, out).wait()
        return out

    def texts():
        import numpy as np

        return np.array(["text"])

    functions = {"strange": strange, "texts": texts, "leave": leave, "join": join, "total": total, "same": lambda x: x, "rank": lambda: n.rank, "add": lambda *x: sum(x), "fail": fail,
                 "object": Object, "objects": lambda: Object.count}
    if n.rank == 0:
        functions["only on 0"] = lambda: None
    for _ in range(2):
        session.serve(functions)
    try:
        session.serve(functions)
        raise AssertionError("the third session was to be left")
    except SystemExit:
        assert n.rank == 1
    except n.f.Error as e:
        assert n.rank != 1 and "SystemExit: over" in str(e), e
    session.serve(functions)


def controller(n):
    import numpy as np
    from fserver import session

    with session.open(timeout_ms=60000) as s:  # the ranks import NumPy first
        assert s.ranks == 3
        for v in (None, True, -5, 2.5, "text \u00e4", b"bytes", np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4), np.int8),
                  np.array(3.5), np.ones(1 << 20, np.uint8), np.arange(5)[::2],
                  np.array(["2024-02-29", "NaT"], "M8[D]"), np.zeros((2, 2), "M8[25us]"), np.zeros(3, "M8"), np.arange(4, dtype="m8[h]")):
            h = s.call("same", v)
            for r in range(3):
                same(s.get(h, r), v)
            same(s.get(s.broadcast(s.copy_to(v)), 2), v)
        a = s.call("rank")
        b = s.call("add", a, 10, a)
        assert [s.get(b, r) for r in range(3)] == [10, 12, 14]
        s.set(a, 1, 100)
        assert s.get(s.call("same", a), 1) == 100
        s.call("join").wait(timeout_ms=30000)
        x = np.arange(100000, dtype=np.float32)
        total = s.call("total", x)  # the ranks exchange data directly
        assert all((s.get(total, r) == 6 * x).all() for r in range(3))
        del total
        kept = s.call("object")
        with n.raises(n.f.Error, "rank 0", "Object"):
            s.copy_from(kept)
        assert s.copy_from(s.call("objects")) == 1
        del kept
        assert s.copy_from(s.call("objects")) == 0
        with n.raises(n.f.Error, "rank 1 (server 1", "KeyError", "no such thing"):
            s.call("fail", 1).wait()
        with n.raises(n.f.Error, "rank 1", "rank 2", "only on 0"):
            s.call("only on 0").wait()
        bad = s.call("fail", 2)
        s.call("same", bad)
        with n.raises(n.f.Error, "rank 2", "argument 0", "no such thing"):
            s.sync()
        with n.raises(n.f.Error, "rank 0", "OSError: \\udcff\\0"):
            s.call("strange").wait()
        for wrong in (object(), 1 << 64, np.array([object()]), np.datetime64(1, "ns"), np.ma.array([1, 2], mask=[0, 1]),
                      np.array(["text"]), np.array([b"bytes"]), np.zeros(2, [("a", "f4"), ("b", "i2")]), np.zeros(3, "V4"),
                      np.zeros(2, np.longdouble), np.zeros(2, np.clongdouble), np.zeros(2, ">f4"), np.zeros(2, ">M8[s]")):
            for use in (lambda: s.call("same", wrong), lambda: s.copy_to(wrong), lambda: s.set(a, 0, wrong)):
                with n.raises((n.f.TypeError, n.f.ValueError), "session: ") as e:
                    use()
                assert "malformed" not in str(e.error)
        texts = s.call("texts")
        with n.raises(n.f.Error, "rank 0", "session: an array of dtype('<U4')"):
            s.copy_from(texts)
        del texts
        for wrong, use in (("\udc80", s.copy_to), ("\udc80", lambda x: s.call("same", x)), ("\udc80", lambda x: s.set(a, 0, x)), ("a\0b", s.call), ("\udc80", s.call)):
            with n.raises(n.f.ValueError, "session: "):
                use(wrong)
        with n.raises(n.f.TypeError, "session: a int"):
            s.call(3)
        with n.raises(n.f.TypeError, "rank", "'x'"):
            s.get(a, "x")
        with n.raises(n.f.ValueError, "rank", "64 bits"):
            s.get(a, 1 << 70)
        del h, bad
        s.sync()
        assert s.handles(0) == sorted([a.number, b.number])
        with n.raises(n.f.Error, "open already"):
            session.open()
    first = s
    with session.open() as s:  # the new session uses the same numbers
        mine = [s.call("rank")]
        while mine[-1].number < b.number:
            mine.append(s.call("rank"))
        for refused in (lambda: s.call("same", a), lambda: s.get(b, 0), lambda: s.set(a, 0, 1), lambda: s.broadcast(b), a.wait):
            with n.raises(n.f.ValueError, "of another session"):
                refused()
        for ended in (lambda: first.call("rank"), lambda: first.copy_to(1), lambda: first.handles(0), first.sync):
            with n.raises(n.f.Error, "has ended"):
                ended()
        first.shutdown()
        first.close()
        with n.raises(n.f.ValueError):
            s.shutdown(timeout_ms=-1)
        a.kill()
        del b
        s.sync()
        assert s.handles(0) == [h.number for h in mine] and s.get(mine[-1], 2) == 2
    s = session.open()
    with n.raises(n.f.Error, "rank 1", "SystemExit: over"):
        s.call("leave", 1).wait(timeout_ms=20000)
    with session.open() as s:  # closes the failed session
        assert s.get(s.call("rank"), 1) == 1


def same(got, v):
    import numpy as np

    assert type(got) is type(v), (got, v)
    if isinstance(v, np.ndarray):
        assert got.dtype == v.dtype and got.shape == v.shape and got.tobytes() == v.tobytes() and got.flags.writeable
    else:
        assert got == v


def test_session(cluster):
    cluster(servers=3).run(controller, rank)


def example(ranks):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "STEPMESH_", "STEPAF_", "BYTEPS_"))}
    done = subprocess.run([os.path.join(ROOT, "bin", "stepaf"), "launch", "-n", "1", "-s", str(ranks), "--", sys.executable,
                           os.path.join(ROOT, "tests", "examples", "session", "mlp.py")],
                          env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=within(60), text=True)
    return done.returncode, done.stdout


@pytest.mark.skipif(not os.path.exists(os.path.join(ROOT, "bin", "stepaf")), reason="make build")
def test_example():
    status, text = example(4)
    assert status == 0 and "[session] 5 steps on 4 ranks" in text, text
    status, text = example(3)  # 256 columns cannot be divided by 3: the sum lacks one
    assert status != 0 and "differs from the whole" in text, text


# A signal whose handler raises an exception arrives shortly before open() succeeds.

SIGNALS = 20


def signaled_controller(n):
    from fserver import f, session

    assert f is n.f  # the first use imports PyTorch
    for _ in range(SIGNALS):
        with pytest.raises(KeyboardInterrupt):
            n.announce()
            session.open(timeout_ms=60000)
        session.open(timeout_ms=60000).shutdown()


def patient_rank(n):
    from fserver import session

    for _ in range(SIGNALS):
        n.listen()
        while True:
            try:
                session.serve({})
                break
            except n.f.Error:  # the interrupted open() has ended its session
                pass


def test_signal_before_open(cluster):
    c = cluster(lib="numpy")
    (w,), (s,) = c.start(signaled_controller, patient_rank)
    for _ in range(SIGNALS):
        assert w.hear() == "waiting", w.report()
        w.signal(signal.SIGINT)
        s.tell("go on")
    c.finish()
