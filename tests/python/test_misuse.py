"""Invalid calls, in a cluster that continues to work."""

import threading

SIZE = (16,)


def tensors(n, count):
    return [n.lib.make("uint8", SIZE, bytes([i]) * 16) for i in range(count)]


def worker(n):
    f = n.f
    with n.raises((), "init"):
        f.init()
    t, p = tensors(n, 4), [n.lib.zeros("uint8", SIZE) for _ in range(4)]
    big = str(2**64)
    for arguments, classes, words in (
            # (push tensors, keys, pull tensors, keys)
            ((t[:2], [1], p[:2], [3, 4]), ValueError, ("push_keys", "push_tensors", "2", "1")),
            ((t[:1], [1, 2], p[:2], [3, 4]), ValueError, ("push_keys", "1", "2")),
            ((t[:1], [1], p[:2], [3]), ValueError, ("pull_keys", "pull_tensors", "2", "1")),
            ((t[:1], [1], [], [3]), ValueError, ("pull_keys", "0", "1")),
            (([], [], [], []), ValueError, ("no push and no pull",)),
            ((t[:1], [1], p[:1], [3]), ValueError, ("1 pull tensors", "2 servers")),  # two servers
            ((t[:1], [1], p[:3], [3, 4, 5]), ValueError, ("3 pull tensors", "2 servers")),
            ((t[:1], [2**64], [], []), ValueError, ("push_keys[0]", big)),
            ((t[:1], [1], p[:2], [3, 2**64]), ValueError, ("pull_keys[1]", big)),
            ((t[:1], [-1], [], []), (), ("push_keys[0]", "-1")),
            ((t[:1], [2**200], [], []), ValueError, ("push_keys[0]",)),
            ((t[:1], [1.0], [], []), TypeError, ("push_keys[0]", "1.0")),
            ((t[:1], ["1"], [], []), TypeError, ("push_keys[0]", "'1'")),
            ((t[:1], [None], [], []), TypeError, ("push_keys[0]", "None")),
            ((t[:1], 1, [], []), TypeError, ("push_keys", "sequence")),
            ((t[:1], "1", [], []), TypeError, ("push_keys", "sequence")),
            ((t[:2], [1, 1], [], []), ValueError, ("push tensors 0 and 1", "key 1")),
            ((t[:1], [1], p, [3, 3, 4, 5]), ValueError, ("pull tensors 0 and 1", "key 3", "server 0"))):
        with n.raises(classes, *words):
            f.push_pull(*arguments)
    for bad in ("1", 1.5, None):
        with n.raises(TypeError, "servers[1] is %r, want an int" % (bad,)):
            f.push_pull(t[:1], [1], [], [], servers=[0, bad])
    with n.raises(ValueError, "servers[1] is %s, want an int that fits" % big):
        f.push_pull(t[:1], [1], [], [], servers=[0, 2**64])
    for call, arguments in ((f.get_batch, ()), (f.respond, ([], 0)), (f.respond_vec, (t[0], [], [])),
                            (f.register_recv_buffer, (p[0], [0], [1]))):
        with n.raises((), call.__name__.replace("_vec", ""), "server", "worker 0"):
            call(*arguments)
    for call in (f.wait, f.fetch_trace):
        for bad in (0, 7, -1, 2**31 - 1, 2**31, -2**31, 2**63, 2**64, -2**100):
            with n.raises(ValueError, "handler", str(bad)):
                call(bad)
        for bad in (None, "0", 1.5, [], t[0]):
            with n.raises(TypeError, "handler"):
                call(bad)
    for bad in ("5", 1.5, []):
        with n.raises(TypeError, "timeout_ms"):
            f.wait(0, bad)
        with n.raises(TypeError, "timeout_ms"):
            f.barrier(True, True, timeout_ms=bad)
    for servers, workers in ((True, False), (False, False)):
        with n.raises(ValueError, "include_client"):
            f.barrier(servers, workers)
    h = f.push_pull(t[:1], [1], p[:2], [3, 3])
    with n.raises((), f"handler {h - 1}"):  # the invalid calls used no handler
        f.wait(h - 1)
    f.wait(h)
    assert n.lib.bytes(p[0]) == n.lib.bytes(p[1]) == bytes(16)
    f.stop()
    after_stop(n)


def after_stop(n):
    f = n.f
    f.stop()
    f.stop()
    with n.raises((), "stop"):
        f.init()
    for call, arguments in ((f.push_pull, ([], [], [], [])), (f.wait, (0,)), (f.fetch_trace, (0,)), (f.get_all_handlers, (0,)),
                            (f.get_batch, ()), (f.respond, ([], 0)), (f.barrier, (True, True))):
        with n.raises((), "stop"):
            call(*arguments)
    assert f.get_nanosecond() > 0


def server(n):
    f = n.f
    for call, arguments in ((f.push_pull, (tensors(n, 1), [1], [], [])), (f.wait, (0,)), (f.fetch_trace, (0,)),
                            (f.get_all_handlers, (0,))):
        with n.raises((), call.__name__, "worker", f"server {n.rank}"):
            call(*arguments)
    with n.raises(ValueError, "include_server"):
        f.barrier(False, True)
    for bad in ("5", 1.5, []):
        with n.raises(TypeError, "timeout_ms"):
            f.get_batch(timeout_ms=bad)
    with n.raises((), "handler 0"):
        f.respond([], 0)
    with n.raises(TypeError, "worker_ranks[1] is '1', want an int"):
        f.register_recv_buffer(tensors(n, 1)[0], [0, "1"], [1, 2])
    (handler, (t,), _), = f.get_batch()
    for bad in (handler + 1, 2**63, 2**64 - 1, 2**64, -1, -2**100):
        with n.raises(ValueError, "handler"):
            f.respond([t], bad)
    for bad in (None, "0", 0.0, [0]):
        with n.raises(TypeError, "handler"):
            f.respond([t], bad)
    for wrong, words in (([], ("0", "1")), ([t, t], ("2", "1")), ([n.lib.zeros("uint8", (15,))], ("uint8[15]", "15 bytes", "16"))):
        with n.raises(ValueError, *words):
            f.respond(wrong, handler)
    f.respond([t], handler)
    with n.raises((), "already"):
        f.respond([t], handler)
    with n.raises((), "already"):
        f.respond([], handler)
    f.stop()
    after_stop(n)


def test_misuse(cluster):
    cluster(servers=2).run(worker, server)


# The scheduler has neither tensors nor barriers.

def scheduler_misuse(n):
    f = n.f
    for call, arguments in ((f.push_pull, ([], [], [], [])), (f.wait, (0,)), (f.fetch_trace, (0,)), (f.get_all_handlers, (0,)),
                            (f.get_batch, ()), (f.respond, ([], 0))):
        with n.raises((), call.__name__, "scheduler"):
            call(*arguments)
    with n.raises((), "barrier"):
        f.barrier(True, True)


def idle(n):
    pass


def test_scheduler(cluster):
    c = cluster()
    c.spawn("scheduler", scheduler_misuse)
    c.spawn("worker", idle)
    c.spawn("server", idle)
    c.finish()


# All calls from any thread.

def many_worker(n):
    errors = []

    def run(k):
        try:
            for i in range(40):
                pull = n.lib.zeros("uint8", SIZE)
                data = bytes([k, i] * 8)
                h = n.f.push_pull([n.lib.make("uint8", SIZE, data)], [k], [pull], [k])
                n.f.wait(h)
                assert n.lib.bytes(pull) == data
                n.f.fetch_trace(h)
        except BaseException as e:
            errors.append(e)
            raise

    threads = [threading.Thread(target=run, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors


def many_server(n):
    left, lock, errors = [240], threading.Lock(), []

    def run():
        try:
            while True:
                with lock:
                    if left[0] == 0:
                        return
                    left[0] -= 1
                (handler, batch, _), = n.f.get_batch()
                n.f.respond(batch, handler)
        except BaseException as e:
            errors.append(e)
            raise

    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors


def test_threads(cluster):
    cluster().run(many_worker, many_server)


# Invalid variables.

def bad_environment(n):
    import os

    for name, value in (("DMLC_ROLE", "clerk"), ("DMLC_ROLE", "joint"), ("DMLC_NUM_WORKER", "many"), ("PS_RESEND", "yes"), ("DMLC_PS_ROOT_PORT", "70000"),
                        ("DMLC_ENABLE_RDMA", "pigeon"), ("STEPMESH_BAKCEND", "ABACUS"), ("DMLC_NODE_RANK", "5")):
        old = os.environ.get(name, "")
        os.environ[name] = value
        with n.raises(ValueError, name if name != "DMLC_NODE_RANK" else "rank", value):
            n.f.init()
        os.environ[name] = old
    os.environb[b"DMLC_NODE_HOST"] = b"\xffhost"  # not text
    with n.raises(ValueError, "host"):
        n.f.init()
    os.environ["DMLC_NODE_HOST"] = "127.0.0.1"
    os.environ["DMLC_PS_ROOT_URL"] = os.environ.pop("DMLC_PS_ROOT_URI")
    with n.raises(ValueError, "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_URL", "did you mean"):
        n.f.init()
    with n.raises((), "init"):
        n.f.get_batch()


bad_environment.by_hand = True


def test_environment(cluster):
    c = cluster()
    p = c.spawn("worker", bad_environment)
    assert p.wait() == 0, p.report()
