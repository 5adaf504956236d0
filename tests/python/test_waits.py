"""Calls that wait: their limits, threads that run meanwhile, and Ctrl-C."""

import os
import signal
import sys
import threading
import time

import pytest
from harness import by_hand, within

SIZE = (16,)


def request(n, size=SIZE):
    push = [n.lib.make("uint8", size, bytes(size[0]))]
    pull = [n.lib.zeros("uint8", size) for _ in range(n.servers)]
    return n.f.push_pull(push, [1], pull, [1] * n.servers)


def elapsed(since):
    return time.monotonic() - since


SOON = within(8)  # seconds: less than a wait takes that ignores its limit


# Time-outs

def limits_worker(n):
    f = n.f
    start = time.monotonic()
    h = request(n)
    with n.raises(TimeoutError, "server 0", "300ms") as e:
        f.wait(h, timeout_ms=300)
    assert 0.3 <= elapsed(start) < SOON, (elapsed(start), e.error)
    for again in h, h, h + 1:  # the failure is permanent: its tensors have no answer
        with n.raises(TimeoutError, f"handler {again} has failed", "server 0"):
            f.wait(again)
    # The clock starts at push_pull.
    took = []
    for _ in range(3):
        h = request(n)
        time.sleep(0.5)  # the time that is measured
        start = time.monotonic()
        with n.raises(TimeoutError, "400ms"):
            f.wait(h, 400)
        took.append(elapsed(start))
    assert min(took) < 0.3, took  # a machine that hangs does so in one
    start = time.monotonic()
    h = request(n)
    with n.raises(TimeoutError):
        f.wait(h, timeout_ms=0)
    assert elapsed(start) < SOON
    with n.raises(ValueError, "timeout_ms", "-5"):
        f.wait(h, timeout_ms=-5)
    # A tensor in the middle of a batch has the same limit as the batch.
    h = request(n)
    start = time.monotonic()
    with n.raises(TimeoutError, f"handler {h + 1} of batch {h}", "300ms"):
        f.wait(h + 1, timeout_ms=300)
    assert 0.29 <= elapsed(start) < SOON
    with n.raises(TimeoutError, "barrier"):
        f.barrier(True, True, timeout_ms=300)
    start = time.monotonic()
    with n.raises(TimeoutError, "barrier"):
        f.barrier(True, True, timeout_ms=0)
    assert elapsed(start) < SOON
    n.tell("done")


def limits_server(n):
    start = time.monotonic()
    with n.raises(TimeoutError, "get_batch", "worker 0", "200ms"):
        for _ in range(10):  # the worker's requests come first
            start = time.monotonic()
            n.f.get_batch(timeout_ms=200)
    assert 0.2 <= elapsed(start) < SOON
    with n.raises(ValueError, "timeout_ms", "-1"):
        n.f.get_batch(timeout_ms=-1)
    with n.raises(TimeoutError, "get_batch"):
        while True:
            n.f.get_batch(timeout_ms=0)
    n.listen()


def test_limits(cluster):
    c = cluster()
    (worker,), (server,) = c.start(limits_worker, limits_server)
    assert worker.hear() == "done"
    server.tell("stop")
    c.finish()


def late_worker(n):
    h = request(n)
    n.listen()  # the server has received it; it would not receive a request canceled earlier
    with n.raises(TimeoutError):
        n.f.wait(h, 100)
    n.tell("late")
    # The request is canceled. The late answer does not affect the next request.
    for _ in range(3):
        n.f.wait(request(n))


def late_server(n):
    (first, tensors, _), = n.f.get_batch()
    n.tell("got")
    n.listen()
    n.f.respond(tensors, first)
    for _ in range(3):
        (handler, tensors, _), = n.f.get_batch()
        n.f.respond(tensors, handler)


def test_late_answer(cluster):
    c = cluster()
    (worker,), (server,) = c.start(late_worker, late_server)
    assert server.hear() == "got"
    worker.tell("give up")
    assert worker.hear() == "late"
    server.tell("now")
    c.finish()


@by_hand
def alone(n):
    start = time.monotonic()
    with n.raises(TimeoutError, "start", "scheduler"):
        n.f.init(timeout_ms=1500)
    assert 1.4 < elapsed(start) < 1.5 + SOON


@by_hand
def alone_without_scheduler(n):
    start = time.monotonic()
    with n.raises((TimeoutError, ConnectionError), "scheduler") as e:
        n.f.init(timeout_ms=1000)
    assert elapsed(start) < 1 + SOON, e.error


@by_hand
def only_scheduler(n):
    with n.raises(TimeoutError, "start", "waiting for", "1 of 1 servers"):
        n.f.init(timeout_ms=2500)


def test_init_limit(cluster):
    c = cluster()
    scheduler, worker = c.spawn("scheduler", only_scheduler), c.spawn("worker", alone)
    assert (worker.wait(), scheduler.wait()) == (0, 0), worker.report() + scheduler.report()
    p = cluster().spawn("worker", alone_without_scheduler)
    assert p.wait() == 0, p.report()


# STEPAF_START_TIMEOUT applies if init has no limit of its own.

MISSING = "waiting for 1 of 1 servers (rank 0)"


@by_hand
def scheduler_without_server(n):
    start = time.monotonic()
    with n.raises(TimeoutError, "start", MISSING, "limit 4s"):
        n.f.init()
    assert 3.9 < elapsed(start) < 4 + SOON


@by_hand
def worker_without_server(n):
    n.tell("here")
    with n.raises(n.f.Error, MISSING):  # the scheduler has timed out, and names the missing nodes
        n.f.init()


@by_hand
def worker_without_scheduler(n):
    start = time.monotonic()
    with n.raises(TimeoutError, "scheduler", "limit 1s"):
        n.f.init()
    assert 0.9 < elapsed(start) < 1 + SOON


def test_start_timeout(cluster):
    c = cluster(lib="")
    worker = c.spawn("worker", worker_without_server)
    assert worker.hear() == "here"
    scheduler = c.spawn("scheduler", scheduler_without_server, env={"STEPAF_START_TIMEOUT": "4"})
    lost = cluster(lib="").spawn("worker", worker_without_scheduler, env={"STEPAF_START_TIMEOUT": "1"})
    for p in worker, scheduler, lost:
        assert p.wait() == 0, worker.report() + scheduler.report() + lost.report()


@by_hand
def stop_worker(n):
    n.f.init()
    with n.raises(TimeoutError, "barrier"):
        n.f.stop(timeout_ms=500)
    n.f.stop()  # it has left
    n.tell("left")


@by_hand
def stop_server(n):
    n.f.init()
    n.listen()
    os._exit(0)


def test_stop_limit(cluster):
    c = cluster()
    (worker,), (server,) = c.start(stop_worker, stop_server)
    assert worker.hear() == "left"
    assert worker.wait() == 0, worker.report()


# A thread of Python runs while another waits.

class Counter(threading.Thread):
    """Counts how often it gets to run, until it is stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.count, self.on = 0, True

    def run(self):
        while self.on:
            self.count += 1
            time.sleep(0.002)

    def during(self, call, *args, **named):
        """Returns how many times per second it ran during a call."""
        before, start = self.count, time.monotonic()
        call(*args, **named)
        return (self.count - before) / max(elapsed(start), 1e-9), elapsed(start)


WAIT = 1


@by_hand
def gil_worker(n):
    c, size = Counter(), (n.args,)
    c.start()
    n.tell("here")
    rates = {"init": c.during(n.f.init)}
    h = request(n, size)
    rates["wait"] = c.during(n.f.wait, h)
    rates["barrier"] = c.during(n.f.barrier, True, True)
    n.tell("batch")
    n.listen()
    n.f.wait(request(n, size))
    rates["stop"] = c.during(n.f.stop)
    c.on = False
    n.tell(rates)


@by_hand
def gil_server(n):
    n.listen()
    time.sleep(WAIT)  # here and below: the time for which other nodes wait for this node
    n.f.init()
    c = Counter()
    c.start()
    (handler, tensors, _), = n.f.get_batch()
    time.sleep(WAIT)
    n.f.respond(tensors, handler)
    time.sleep(WAIT)
    n.f.barrier(True, True)

    def batch():
        (handler, tensors, _), = n.f.get_batch()
        n.f.respond(tensors, handler)

    rates = {"get_batch": c.during(batch)}
    time.sleep(WAIT)
    n.f.stop()
    n.tell(rates)


# Values of 16 bytes are copied into messages, those of 1 MiB are not. Nodes that use PyTorch
# are copies of one process by default.
@pytest.mark.parametrize("size,copies", [(SIZE[0], None), (1 << 20, False)], ids=["copied", "not copied"])
def test_other_threads_run(cluster, size, copies):
    c = cluster(copies=copies)
    (worker,), (server,) = c.start(gil_worker, gil_server, args=size)
    assert worker.hear() == "here"
    server.tell("go")
    assert worker.hear() == "batch"
    time.sleep(WAIT)
    worker.tell("go")
    rates = {}
    for got in c.finish():
        rates.update(got)
    assert set(rates) == {"init", "wait", "barrier", "get_batch", "stop"}
    for call, (rate, seconds) in rates.items():
        assert seconds > WAIT / 10, f"{call} did not wait: {seconds} s"  # a machine may have hung when it began
        assert rate > 50, f"during {call} another thread ran {rate:.0f} times per second, want about 400"


# Ctrl-C ends every waiting call within a second, and later calls work.

@by_hand
def ctrl_c_worker(n):
    n.interrupted(n.f.init)
    n.listen()
    end = time.monotonic() + 20
    while True:
        try:
            n.f.init()
            break
        except n.f.Error as e:
            # The scheduler has not yet noticed that the first one has gone.
            assert "rank 0" in str(e) and time.monotonic() < end, e
    h = request(n)
    n.interrupted(n.f.wait, h, 60000)
    n.interrupted(n.f.wait, h + 1, 60000)
    n.interrupted(n.f.barrier, True, True)
    n.listen()
    n.f.wait(h, 60000)
    n.interrupted(n.f.stop)
    n.f.stop()


@by_hand
def ctrl_c_server(n):
    n.listen()
    n.f.init()
    (handler, tensors, _), = n.f.get_batch()
    n.interrupted(n.f.get_batch)
    n.listen()
    n.f.respond(tensors, handler)
    n.listen()
    n.f.stop()


def strike(p, times=1):
    """Ctrl-C for a process that says that it waits now. Returns how long each took to notice."""
    took = []
    for _ in range(times):
        assert p.hear() == "waiting"
        start = time.monotonic()
        p.signal(signal.SIGINT)
        assert p.hear(30) == "interrupted"
        took.append(elapsed(start))
    return took


def test_ctrl_c(cluster):
    c = cluster()
    (worker,), (server,) = c.start(ctrl_c_worker, ctrl_c_server)
    took = strike(worker)
    worker.tell("init again")
    time.sleep(0.4)  # until the scheduler has noticed that the first one has gone: an earlier server would get that event
    server.tell("init")
    took += strike(server) + strike(worker, 3)
    server.tell("respond")
    worker.tell("wait")
    took += strike(worker)
    server.tell("stop")
    assert worker.wait() == 0, worker.report()
    took.sort()
    assert took[-3] < 1, took  # a machine that hangs does so in one or two


@pytest.mark.parametrize("call", ["init", "get_batch"])
def test_ctrl_c_ends_a_program(cluster, call):
    """Ctrl-C as typed by a user: KeyboardInterrupt, and the process ends soon."""
    c = cluster()
    if call == "init":
        p = c.spawn("worker", uncaught_init)
    else:
        _, (p,) = c.start(nothing, uncaught_get_batch)
    assert p.hear() == "waiting"
    start = time.monotonic()
    p.signal(signal.SIGINT)
    status = p.wait()
    assert elapsed(start) < SOON
    assert status in (-signal.SIGINT, 1, 130) and "KeyboardInterrupt" in p.report(), p.report()


@by_hand
def uncaught_init(n):
    n.announce()
    n.f.init()


def uncaught_get_batch(n):
    n.announce()
    n.f.get_batch()


def nothing(n):
    n.listen()


# A signal handler may call the module, and raise any exception.

class Rang(Exception):
    pass


def alarm_server(n):
    def ring(number, frame):
        raise Rang

    signal.signal(signal.SIGALRM, ring)
    took = []
    for _ in range(3):
        start = time.monotonic()
        with pytest.raises(Rang):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            n.f.get_batch()
        took.append(elapsed(start))
    assert min(took) < 1.2, took  # a machine that hangs does so in one
    calls = []
    signal.signal(signal.SIGALRM, lambda *_: calls.append(n.f.get_nanosecond()))
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    for _ in range(20):  # of signals that arrive while a machine hangs, one is left
        with n.raises(TimeoutError):
            n.f.get_batch(timeout_ms=600)
        if len(calls) >= 3:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(calls) >= 3 and calls == sorted(calls)
    n.f.barrier(True, True)


def alarm_worker(n):
    n.f.barrier(True, True)


def test_other_signals(cluster):
    cluster().run(alarm_worker, alarm_server)


def large_worker(n):
    # Without this, threads would take turns also where nothing lets them.
    sys.setswitchinterval(1000)
    push = [n.lib.make("uint8", (32 << 20,), bytes(32 << 20))]
    small = [n.lib.zeros("uint8", SIZE)]
    others = 0
    for _ in range(20):
        gate, ran = threading.Lock(), []
        gate.acquire()
        thread = threading.Thread(target=lambda: (gate.acquire(), ran.append(1)))
        thread.start()
        gate.release()
        ran.clear()
        h = n.f.push_pull(push, [1], small, [1])
        others += len(ran)
        n.f.wait(h)
        thread.join()
    assert others > 0, "no other thread has run while a large tensor was handed over"


def large_server(n):
    for _ in range(20):
        (handler, _, _), = n.f.get_batch()
        n.f.respond([n.lib.make("uint8", SIZE, bytes(16))], handler)


def test_large_tensors_let_others_run(cluster):
    cluster(lib="numpy").run(large_worker, large_server)


# The first message to a peer waits for a connection, here to a process that is stopped. Other threads run meanwhile.

def others_run(call):
    """Makes a call. Returns its result, and whether another thread has worked for many switches of Python's lock meanwhile."""
    gate, ran = threading.Lock(), []
    gate.acquire()

    def work():
        with gate:
            for _ in range(1000000):
                pass
        ran.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    gate.release()
    result = call()
    end = time.monotonic()
    thread.join()
    return result, ran[0] < end


def first_worker(n):
    f, x, y = n.f, n.lib.zeros("uint8", SIZE), n.lib.zeros("uint8", SIZE)
    call = {"push_pull": lambda: f.push_pull([x], [1], [y], [2]), "start": f.prepare([x], [1], [y], [2]).start}
    n.tell(os.getpid())
    n.listen()
    handler, ran = others_run(call.get(n.args, call["push_pull"]))
    n.tell("sent")
    f.wait(handler, timeout_ms=60000)
    assert ran or n.args not in call, "no other thread has run while the first request was sent"


def first_server(n):
    f = n.f
    n.tell(os.getpid())
    (handler, tensors, keys), = f.get_batch()
    if n.args == "respond":
        n.tell("received")
        n.listen()
        _, ran = others_run(lambda: f.respond(tensors, handler))
        n.tell("answered")
        assert ran, "no other thread has run while the first answer was sent"
    else:
        f.respond(tensors, handler)


def stopped(pid):
    """Stops a process. Returns when all of its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    tasks = f"/proc/{pid}/task"
    while any(open(f"{tasks}/{task}/stat").read().rpartition(")")[2].split()[0] != "T" for task in os.listdir(tasks)):
        os.sched_yield()


@pytest.mark.parametrize("call", ["push_pull", "start", "respond"])
def test_other_threads_run_while_a_connection_is_made(cluster, call):
    c = cluster(lib="numpy")
    (worker,), (server,) = c.start(first_worker, first_server, args=call)
    caller, peer = (server, worker) if call == "respond" else (worker, server)
    pids = {p: p.hear() for p in (worker, server)}
    if caller is server:
        worker.tell("send")
        assert (worker.hear(), server.hear()) == ("sent", "received")
    stopped(pids[peer])
    try:
        caller.tell("go")
        caller.hear()
    finally:
        os.kill(pids[peer], signal.SIGCONT)
    c.finish()
