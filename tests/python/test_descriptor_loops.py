"""Programs with an event loop: fileno(), poll() and get_batch(timeout_ms=0) with asyncio, select and epoll."""

import asyncio
import os
import select
import threading

import pytest
from harness import by_hand, within

SIZE = (16,)
SOON = within(20)  # seconds: a wake-up that takes longer was lost
SHARED, TCP = {}, {"BYTEPS_ENABLE_IPC": "0"}
PATHS = pytest.mark.parametrize("env", [SHARED, TCP], ids=["memory", "tcp"])


def ask(n, number, to=None):
    """Begins a request. Returns its handler and its pull tensors."""
    count = len(to) if to is not None else n.servers
    pull = [n.lib.zeros("uint8", SIZE) for _ in range(count)]
    push = [n.lib.make("uint8", SIZE, bytes([number] * 16))]
    return n.f.push_pull(push, [1], pull, [2] * count, servers=to), pull


def answer(n, batches):
    for handler, tensors, keys in batches:
        n.f.respond([n.lib.make("uint8", SIZE, bytes([n.lib.bytes(tensors[0])[0] ^ 1] * 16))], handler)


def check(n, pull, number):
    for t in pull:
        assert n.lib.bytes(t) == bytes([number ^ 1] * 16), (number, n.lib.bytes(t))


def readable(fd, limit=0.0):
    return select.select([fd], [], [], limit)[0] == [fd]


# asyncio at both ends: the server serves, and each worker asks from several tasks. No thread waits in the library.

ROUNDS, TASKS = 60, 4


def loop_server(n):
    loop = asyncio.new_event_loop()
    served = []

    def serve():
        try:
            batches = n.f.get_batch(timeout_ms=0, any=n.args)
        except n.f.TimeoutError:
            return
        except n.f.Finished:
            loop.stop()
            return
        assert n.args or len(batches) == n.workers
        answer(n, batches)
        served.append(len(batches))

    loop.add_reader(n.f.fileno(any=n.args), serve)
    loop.run_forever()
    loop.close()
    return sum(served)


class Requests:
    """The requests of a worker that tasks wait for."""

    def __init__(self, n, loop):
        self.n, self.loop, self.flying = n, loop, {}
        loop.add_reader(n.f, self.look)  # the module has a fileno(), so it can stand for its descriptor

    def look(self):
        for handler in list(self.flying):
            try:
                if self.n.f.poll(handler):
                    self.flying.pop(handler).set_result(None)
            except self.n.f.Error as e:
                self.flying.pop(handler).set_exception(e)

    async def ask(self, number):
        handler, pull = ask(self.n, number)
        self.flying[handler] = self.loop.create_future()
        await self.flying[handler]
        check(self.n, pull, number)


def loop_worker(n):
    loop = asyncio.new_event_loop()
    requests = Requests(n, loop)

    async def task(number):
        for i in range(ROUNDS):
            await asyncio.wait_for(requests.ask((number * ROUNDS + i) % 256), SOON)

    async def all_tasks():
        await asyncio.gather(*[task(number) for number in range(TASKS)])

    loop.run_until_complete(all_tasks())
    assert not readable(n.f.fileno()), "all requests were polled"
    loop.remove_reader(n.f)
    loop.close()


@PATHS
@pytest.mark.parametrize("each", [True, False], ids=["each", "any"])
def test_asyncio(cluster, lib, env, each):
    got = cluster(workers=2, lib=lib, env=env).run(loop_worker, loop_server, args=not each)
    assert got[-1] == 2 * TASKS * ROUNDS


# epoll, level- and edge-triggered, and a program that reads the descriptor.

def epoll_server(n):
    edge, reads = n.args
    poller, fd, left = select.epoll(), n.f.fileno(), 50
    poller.register(fd, select.EPOLLIN | (select.EPOLLET if edge else 0))
    while left:
        assert poller.poll(SOON) == [(fd, select.EPOLLIN)]
        if reads:
            os.read(fd, 8)
        try:
            answer(n, n.f.get_batch(timeout_ms=0))
            left -= 1
        except n.f.TimeoutError:
            pass
    assert poller.poll(0) == [] or edge or readable(fd), "another batch, or the end"


def epoll_worker(n):
    edge, reads = n.args
    poller, fd, flying, sent = select.epoll(), n.f.fileno(), {}, 0
    poller.register(fd, select.EPOLLIN | (select.EPOLLET if edge else 0))
    while sent < 50 or flying:
        while sent < 50 and len(flying) < 4:
            handler, pull = ask(n, sent)
            flying[handler] = (pull, sent)
            sent += 1
        assert poller.poll(SOON) == [(fd, select.EPOLLIN)]
        if reads:
            os.read(fd, 8)
        for handler in list(flying):
            if n.f.poll(handler):
                check(n, *flying.pop(handler))


@pytest.mark.parametrize("edge,reads", [(False, False), (True, False), (False, True)], ids=["level", "edge", "read"])
def test_epoll(cluster, edge, reads):
    cluster(workers=2).run(epoll_worker, epoll_server, args=[edge, reads])


# The states of the descriptor, one after the other.

def states_worker(n):
    f = n.f
    fd = f.fileno()
    assert f.fileno() == f.fileno(any=False) == fd > 2
    with n.raises(ValueError, "any=True", "worker 0"):
        f.fileno(any=True)
    with n.raises(TypeError, "handler"):
        f.poll("1")
    with n.raises(ValueError, "handler 5"):
        f.poll(5)
    with n.raises(f.Error, "init"):
        f.init()  # a second one changes nothing
    n.listen()
    h, pull = ask(n, 1)
    assert f.poll(h) is False and f.poll(h + 1) is False and not readable(fd)
    n.tell("asked")
    assert readable(fd, SOON)
    assert readable(fd), "it stays readable until the result was fetched"
    assert f.poll(h) is True
    check(n, pull, 1)
    assert not readable(fd)
    assert f.poll(h) is True and f.wait(h) is None
    n.listen()
    h, pull = ask(n, 2)
    n.tell("asked")
    f.wait(h)
    check(n, pull, 2)
    assert f.poll(h) is True and not readable(fd), "wait has fetched it"
    n.listen()
    h, pull = ask(n, 3)
    n.tell("asked")
    assert readable(fd, SOON)
    for _ in range(2):
        with n.raises(f.Error, "not today"):
            f.poll(h)
        assert not readable(fd)
    x = f.prepare([n.lib.make("uint8", SIZE, bytes([5] * 16))], [1], pull, [2])
    with n.raises(f.Error, "not started"):
        x.poll()
    for _ in range(3):
        n.listen()
        x.start()
        assert x.poll() is False
        n.tell("asked")
        assert readable(fd, SOON)
        assert x.poll() is True and not readable(fd)
        check(n, pull, 5)


def states_server(n):
    f = n.f
    fd = f.fileno()
    assert f.fileno() == fd != f.fileno(any=True)
    with n.raises(f.Error, "poll", "server 0"):
        f.poll(1)
    for reply in [True, True, False] + 3 * [True]:
        for _ in range(2):
            with n.raises(TimeoutError, "worker 0"):
                f.get_batch(timeout_ms=0)
        assert not readable(fd)
        n.tell("idle")
        n.listen()
        assert readable(fd, SOON) and readable(fd)
        batch = f.get_batch(timeout_ms=0)
        assert not readable(fd)
        if reply:
            answer(n, batch)
        else:
            f.refuse(batch[0][0], "not today")


def test_states(cluster, lib):
    c = cluster(lib=lib)
    (worker,), (server,) = c.start(states_worker, states_server)
    for _ in range(6):
        assert server.hear() == "idle"
        worker.tell("ask")
        assert worker.hear() == "asked"
        server.tell("serve")
    c.finish()


def cancels_worker(n):
    h, _ = ask(n, 1)
    with n.raises(TimeoutError):
        n.f.wait(h, 0)
    with n.raises(TimeoutError):
        n.f.poll(h)
    assert not readable(n.f.fileno())
    n.f.barrier(True, True)


def test_canceled(cluster):
    """wait(handler, 0) cancels a request that poll() reports as not complete."""
    cluster().run(cancels_worker, barrier_server)


def barrier_server(n):
    n.f.barrier(True, True)


@by_hand
def no_node(n):
    for call, args in ((n.f.fileno, ()), (n.f.poll, (1,))):
        with n.raises(n.f.Error, "init"):
            call(*args)
    n.f.init()
    with n.raises(n.f.Error, "fileno", "scheduler"):
        n.f.fileno()
    n.f.stop()
    with n.raises(n.f.Error, "stop"):
        n.f.fileno()


def goes_on(n):
    pass


def test_roles_and_stages(cluster):
    c = cluster(lib="")
    for role, function in (("scheduler", no_node), ("worker", goes_on), ("server", goes_on)):
        c.spawn(role, function)
    c.finish()


# Losses

@by_hand
def loss_worker(n):
    n.f.init()
    fd = n.f.fileno()
    if n.rank == 1:
        n.tell("there")
        n.listen()
    h, _ = ask(n, 1)
    n.tell("asked")
    assert readable(fd, SOON)
    for _ in range(2):
        with n.raises(ConnectionError, "server 0"):
            n.f.poll(h)
        assert not readable(fd)
    n.tell("lost")


@by_hand
def loss_server(n):
    n.f.init()
    fd = n.f.fileno()
    assert readable(fd, SOON)
    with n.raises(ConnectionError, "worker 1"):
        n.f.get_batch(timeout_ms=0)
    n.tell("lost")
    n.listen()


def test_lost_peers(cluster):
    c = cluster(workers=2, env={"STEPAF_REPLACE_TIMEOUT": "1"})
    workers, (server,) = c.start(loss_worker, loss_server)
    assert workers[0].hear() == "asked" and workers[1].hear() == "there"
    workers[1].kill()
    assert server.hear() == "lost"
    server.kill()
    assert workers[0].hear() == "lost"
    assert workers[0].wait() == 0, workers[0].report()


# stop() while another thread waits for the descriptor

@by_hand
def stops(n):
    f = n.f
    f.init()
    fds, woken = [f.fileno()], []
    if n.role == "worker":
        h, _ = ask(n, 1)
        f.wait(h)
    else:
        fds.append(f.fileno(any=True))
        answer(n, f.get_batch())

    def wait(fd):
        while True:
            assert readable(fd, SOON)
            try:
                if n.role == "worker":
                    f.poll(h)
                else:
                    f.get_batch(timeout_ms=0)
            except f.Finished:
                pass  # the workers are in stop(), and this node has not left yet
            except f.Error as e:
                woken.append(str(e))
                return

    threads = [threading.Thread(target=wait, args=(fd,)) for fd in fds]
    for t in threads:
        t.start()
    f.stop()
    for t in threads:
        t.join(SOON)
    assert len(woken) == len(fds), woken
    for fd in fds:
        assert readable(fd), "it stays readable"


def test_stop_while_a_thread_waits(cluster):
    cluster().run(stops, stops)


# Forks: a child has the descriptor closed, and cannot disturb the parent.

def fork_server(n):
    fds = [n.f.fileno(), n.f.fileno(any=True)]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for fd in fds:
                with pytest.raises(OSError):
                    os.fstat(fd)
            with n.raises((), "fork"):
                n.f.fileno()
            with n.raises((), "fork"):
                n.f.poll(1)
            status = 1 if n.wrong else 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    n.tell("forked")
    assert readable(fds[0], SOON) and readable(fds[1], SOON)
    answer(n, n.f.get_batch(timeout_ms=0))


def fork_worker(n):
    n.listen()
    h, pull = ask(n, 7)
    n.f.wait(h)
    check(n, pull, 7)


def test_fork(cluster):
    c = cluster()
    (worker,), (server,) = c.start(fork_worker, fork_server)
    assert server.hear() == "forked"
    worker.tell("ask")
    c.finish()
