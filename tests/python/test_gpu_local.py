"""Values between GPUs of one host: copied from device to device, where memory allows,
and right whatever happens to that memory, to a peer or to the time. Skipped without GPU.

SEED chooses other moments for kills and time-outs.
"""

import collections
import contextlib
import os
import queue
import random
import subprocess
import time
import warnings

import pytest

torch = pytest.importorskip("torch", reason="the tests on GPUs use PyTorch")
from harness import scheduler  # noqa: E402

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
SEED = int(os.environ.get("SEED") or 1)
DIRECT = '"values on the device"="from device to device"'
THROUGH_HOST = '"values on the device"="through host memory'
NOT_SHARED = "a value cannot be shared with its receiver as it lies"


# Nodes import this module, too, so a fixture checks for a GPU.

@pytest.fixture(scope="module")
def gpu():
    import fserver_lib

    if not torch.version.cuda:
        pytest.skip("this PyTorch (%s) is built without CUDA" % torch.__version__)
    if GPUS == 0:
        pytest.skip("PyTorch sees no GPU")
    try:
        fserver_lib.map_pinned_tensor(torch.zeros(1).pin_memory(), 0)
    except fserver_lib.Error as e:
        pytest.skip("fserver_lib: %s" % e)
    if GPUS > 1:
        # This process allocates its own memory before memory is measured.
        torch.cuda.can_device_access_peer(0, 1)


def memory_used():
    """MiB in use on each GPU, by all processes; None without nvidia-smi."""
    try:
        out = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                             stdout=subprocess.PIPE, check=True, text=True, timeout=60).stdout
        return [int(line) for line in out.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


@pytest.fixture(autouse=True)
def nothing_left(gpu):
    """After a test and its killed nodes, the memory in use is as before."""
    files, used = set(os.listdir("/dev/shm")), memory_used()
    yield
    left = set(os.listdir("/dev/shm")) - files
    drivers = {name for name in left if name.startswith("cuda.shm.")}
    if drivers:
        warnings.warn("CUDA's driver left in /dev/shm: %s" % sorted(drivers))
    assert left == drivers, left
    end = time.monotonic() + 30
    while used is not None:
        now = memory_used()
        if now is None or all(n <= u + 100 for n, u in zip(now, used)):
            break
        assert time.monotonic() < end, "MiB used on the GPUs: %s before, %s after" % (used, now)
        time.sleep(0.5)


def gpu_cluster(cluster, env=None, **options):
    return cluster(lib="torch", env={"STEPMESH_BAKCEND": "GPU", "PS_VERBOSE": "1", "STEPAF_START_TIMEOUT": "120",
                                     "STEPAF_STOP_TIMEOUT": "90", **(env or {})}, **options)


@contextlib.contextmanager
def environ(variables):
    """os.environ with these, for a process that reads them before its first line."""
    before = {k: os.environ.get(k) for k in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for k, v in before.items():
            os.environ.pop(k, None) if v is None else os.environ.__setitem__(k, v)


def spawn(c, role, function, rank=0, instance=0, args=None, gpu=None, variables=None):
    """A node on the given GPU; servers are on the second one if there are two."""
    if gpu is None:
        gpu = 1 % GPUS if role == "server" else 0
    with environ(variables or {}):
        return c.spawn(role, function, rank, instance, args, {"STEPMESH_GPU": str(gpu), "DMLC_RANK_OFFSET": str(instance - gpu)})


def pair(c, worker, server, args=None, gpus=(None, None), variables=(None, None)):
    """Starts a scheduler, one worker and one server."""
    c.spawn("scheduler", scheduler)
    return (spawn(c, "worker", worker, args=args, gpu=gpus[0], variables=variables[0]),
            spawn(c, "server", server, args=args, gpu=gpus[1], variables=variables[1]))


def log(p):
    return "".join(p.err)


def reports(c):
    return "\n".join(p.report() for p in c.processes)


def hear(c, p, want, timeout=90):
    try:
        got = p.hear(timeout)
    except queue.Empty:
        got = "nothing in %s s" % timeout
    except AssertionError:
        time.sleep(1)  # time for the errors of the other nodes
        got = "its end"
    assert got == want, "from %s: %s, want %s\n%s" % (p.name, got, want, reports(c))


def device(n):
    """This node's GPU, which becomes PyTorch's current one."""
    dev = torch.device("cuda", int(n.env["STEPMESH_GPU"]))
    torch.cuda.set_device(dev)
    return dev


def works(dev):
    """Allocates, computes and copies in the context, to check that it works."""
    torch.cuda.synchronize()
    x = torch.arange(1 << 20, device=dev)
    assert int((x * 3).sum()) == 3 * (2**20 - 1) * 2**19
    assert torch.equal(x.cpu().to(dev), x)


# From device to device, and the values are right at odd addresses of memory that comes
# and goes.

SIZES = (1, 2, 3, 7, 255, 4097, 65_537, 1 << 20, (1 << 20) + 1, (5 << 20) + 3, (20 << 20) + 5, 64 << 20)
ROUNDS, BATCHES = 16, 2  # batches of a round are in flight together


def plan():
    """For each batch: the sizes of three pushes and two pulls."""
    r = random.Random(SEED)
    every = list(SIZES) * 2
    r.shuffle(every)
    return [[every.pop() if every else r.choice(SIZES) for _ in range(5)] for _ in range(ROUNDS * BATCHES)]


def pattern(base, batch, i, size):
    """Tensor i of a batch, other bytes for each; the result is new."""
    start = (batch * 131 + i * 17) % 1000
    return base[start:start + size] + (batch * 7 + i * 3) % 256


def base_of(dev):
    x = torch.arange(max(SIZES) + 1000, device=dev, dtype=torch.int64)
    return (x * 2_654_435_761 // 8192 % 256).to(torch.uint8)


def odd(dev, batch, i, size):
    """A tensor that begins and ends inside of an allocation."""
    start = 1 + 2 * ((batch * 5 + i) % 40)
    return torch.zeros(start + size + 3, dtype=torch.uint8, device=dev)[start:start + size]


def churn_worker(n):
    f, dev = n.f, device(n)
    base, batches, ballast = base_of(dev), plan(), []
    for first in range(0, len(batches), BATCHES):
        flying = []
        for b in range(first, first + BATCHES):
            push = [odd(dev, b, i, size) for i, size in enumerate(batches[b][:3])]
            pull = [odd(dev, b, i + 3, size) for i, size in enumerate(batches[b][3:])]
            for i, t in enumerate(push):
                t.copy_(pattern(base, b, i, len(t)))
            flying.append((f.push_pull(push, [b, b + 1, b + 2], pull, [b, b + 1]), b, push, pull))
        for h, b, push, pull in flying:
            f.wait(h, 30000)
            for i, t in enumerate(pull):
                want = pattern(base, b, i + 3, len(t)) + push[i][:1]
                assert torch.equal(t, want), ("batch", b, "pull", i, len(t), int((t != want).sum()), "bytes are wrong")
        del h, b, push, pull, flying, t, want
        torch.cuda.empty_cache()  # the peer still has the freed memory mapped
        if first % 3 == 1:
            ballast = [torch.empty(r, dtype=torch.uint8, device=dev) for r in (1 + first << 20, 3 << 20)]
        elif first % 3 == 2:
            ballast = []
    works(dev)
    return {"freed": torch.cuda.memory_stats(dev).get("num_device_free", 0)}


def churn_server(n):
    f, dev = n.f, device(n)
    base = base_of(dev)
    for b, sizes in enumerate(plan()):
        (handler, tensors, keys), = f.get_batch(timeout_ms=60000)
        assert keys == [b, b + 1, b + 2] and [len(t) for t in tensors] == sizes[:3] and all(t.device == dev for t in tensors), (b, keys, tensors)
        for i, t in enumerate(tensors):
            want = pattern(base, b, i, len(t))
            assert torch.equal(t, want), ("batch", b, "push", i, len(t), int((t != want).sum()), "bytes are wrong")
        answers = [odd(dev, b, i, size) for i, size in enumerate(sizes[3:])]
        for i, t in enumerate(answers):
            t.copy_(pattern(base, b, i + 3, len(t)) + tensors[i][:1])
        f.respond(answers, handler, True)
        del tensors, answers, t, want
        torch.cuda.empty_cache()
    works(dev)


def assert_direct(c, worker, server):
    for p, peer in ((worker, "server 0"), (server, "worker 0")):
        lines = [line for line in log(p).splitlines() if DIRECT in line]
        assert any(peer in line for line in lines), "no %s to %s\n%s" % (DIRECT, peer, reports(c))
        assert THROUGH_HOST not in log(p) and NOT_SHARED not in log(p), reports(c)


@pytest.mark.parametrize("gpus", [(0, 0), (0, 1), (1, 0)], ids=["same", "apart", "swapped"])
def test_device_to_device(cluster, gpus):
    if max(gpus) >= GPUS:
        pytest.skip("one GPU")
    if gpus[0] != gpus[1] and not torch.cuda.can_device_access_peer(*gpus):
        pytest.skip("GPUs 0 and 1 cannot reach each other's memory")
    c = gpu_cluster(cluster)
    worker, server = pair(c, churn_worker, churn_server, gpus=gpus)
    got = c.finish(180)
    assert got[0]["freed"] > 0, "no memory was given back meanwhile: %s" % got
    assert_direct(c, worker, server)


# Memory that PyTorch maps piece by piece, unmaps and maps anew.

ALLOC_CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the latter is the newer name
EXPANDABLE = dict.fromkeys(ALLOC_CONF, "expandable_segments:True")
MEMORIES = pytest.mark.parametrize("memory", [None, EXPANDABLE], ids=["ordinary", "expandable"])


def is_expandable():
    return any(s.get("is_expandable") for s in torch.cuda.memory_snapshot())


def expandable_worker(n):
    churn_worker(n)
    return is_expandable()


def expandable_server(n):
    churn_server(n)
    return is_expandable()


@pytest.mark.parametrize("who", ["both", "worker", "server"])
def test_expandable_segments(cluster, who):
    sides = [who in ("both", role) for role in ("worker", "server")]
    c = gpu_cluster(cluster)
    nodes = pair(c, expandable_worker, expandable_server, variables=[EXPANDABLE if s else None for s in sides])
    got = c.finish(180)
    assert got == sides, "expandable segments: %s, want %s" % (got, sides)
    assert_direct(c, *nodes)


TRIMS, PIECE = 40, 20 << 20  # the length of PyTorch's allocations in the large pool


def trimming(n, exchange):
    """Calls exchange(i, tensors) with tensors over several allocations, which it maps anew
    each time: the segment keeps its addresses, and its contents change."""
    dev, addresses = device(n), collections.Counter()
    base = torch.arange(5 * PIECE, device=dev, dtype=torch.int32).to(torch.uint8)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(dev)[0]
    for i in range(TRIMS):
        size = PIECE + (i * 7919 * 4099) % (3 * PIECE)
        x = torch.empty(size + 2, dtype=torch.uint8, device=dev)[1:-1]
        addresses[x.data_ptr()] += 1
        exchange(i, x, base)
        del x
        before = torch.cuda.memory_reserved(dev)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(dev) < before, "nothing was unmapped"
    assert is_expandable() and max(addresses.values()) > 2, "no address came twice: %s" % addresses
    works(dev)
    return dev, free


def trimming_worker(n):
    f = n.f

    def exchange(i, x, base):
        size = x.numel()
        x.copy_(base[i:i + size])
        pull = torch.zeros(size, dtype=torch.uint8, device=x.device)
        f.wait(f.push_pull([x], [1], [pull], [1]), 30_000)
        want = base[i:i + size] + (i + 1)
        assert torch.equal(pull, want), ("answer", i, size, int((pull != want).sum()), "bytes are wrong")

    dev, free = trimming(n, exchange)
    if GPUS > 1:
        # The unmapped memory, 2 GB in all, is free again: neither this library nor the peer keeps it.
        end = time.monotonic() + 60
        while torch.cuda.mem_get_info(dev)[0] < free - (256 << 20):
            assert time.monotonic() < end, "free on the device: %s before, %s now" % (free, torch.cuda.mem_get_info(dev)[0])
            time.sleep(0.2)


def trimming_server(n):
    f = n.f

    def exchange(i, x, base):
        (handler, (push,), _), = f.get_batch(timeout_ms=60_000)
        size = push.numel()
        want = base[i:i + size]
        assert torch.equal(push, want), ("push", i, size, int((push != want).sum()), "bytes are wrong")
        out = x if x.numel() == size else torch.empty(size, dtype=torch.uint8, device=x.device)
        torch.add(push, i + 1, out=out)
        f.respond([out], handler, True)

    trimming(n, exchange)


def test_expandable_trim(cluster):
    """PyTorch trims its cache after each exchange, and then maps other memory."""
    c = gpu_cluster(cluster)
    nodes = pair(c, trimming_worker, trimming_server, variables=(EXPANDABLE, EXPANDABLE))
    c.finish(240)
    assert_direct(c, *nodes)


# Memory that cannot be shared.

def test_pool_memory(cluster):
    """Values of cudaMallocAsync go through host memory; one warning says what to set."""
    pool = dict.fromkeys(ALLOC_CONF, "backend:cudaMallocAsync")
    c = gpu_cluster(cluster, copies=False)  # PyTorch reads the allocator's name when it is imported
    nodes = pair(c, churn_worker, churn_server, variables=(pool, pool))
    c.finish(180)
    for p in nodes:
        lines = [line for line in log(p).splitlines() if NOT_SHARED in line]
        assert len(lines) == 1 and ALLOC_CONF[0] + "=backend:native" in lines[0], "%s: %s\n%s" % (p.name, lines, reports(c))


def test_invisible_device(cluster):
    """Each process sees one GPU only. The driver decides whether they can share memory."""
    if GPUS < 2:
        pytest.skip("one GPU")
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    c = gpu_cluster(cluster)
    nodes = pair(c, churn_worker, churn_server, gpus=(0, 0), variables=[{"CUDA_VISIBLE_DEVICES": v} for v in visible[:2]])
    c.finish(180)
    for p in nodes:
        lines = [line for line in log(p).splitlines() if DIRECT in line or THROUGH_HOST in line]
        assert lines, "neither direct nor through host memory\n" + reports(c)
        print(p.name, *lines, sep="\n")


# Static tensors of a CUDA graph, and tensors in the memory of its pool.

REPLAYS, PRIME = 50, 1_000_003


def replay_worker(n):
    f, dev = n.f, device(n)
    x = torch.arange(300_001, device=dev)[1:]
    y = torch.zeros_like(x)

    def step():
        y.copy_(x * 2 % PRIME)
        return y + 1

    stream = torch.cuda.Stream(dev)
    stream.wait_stream(torch.cuda.current_stream(dev))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(dev).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = step()
    want = torch.arange(1, 300_001)
    for i in range(REPLAYS):
        graph.replay()
        f.wait(f.push_pull([y, z], [1, 2], [x], [1]))
        want = (want * 2 % PRIME * 2 + 1) % PRIME
        assert torch.equal(x.cpu(), want), ("replay", i)


def replay_server(n):
    f, dev = n.f, device(n)
    y, z = torch.zeros(300_000, dtype=torch.int64, device=dev), torch.zeros(300_000, dtype=torch.int64, device=dev)
    stream = torch.cuda.Stream(dev)
    stream.wait_stream(torch.cuda.current_stream(dev))
    with torch.cuda.stream(stream):
        (y + z) % PRIME
    torch.cuda.current_stream(dev).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = (y + z) % PRIME
    for _ in range(REPLAYS):
        (handler, tensors, _), = f.get_batch(timeout_ms=60000)
        y.copy_(tensors[0])
        z.copy_(tensors[1])
        graph.replay()
        f.respond([answer], handler, True)  # the next request comes when it has arrived


def test_graph(cluster):
    c = gpu_cluster(cluster)
    nodes = pair(c, replay_worker, replay_server)
    c.finish(120)
    for p in nodes:
        assert NOT_SHARED not in log(p), reports(c)


# Killed with large values in flight.

BIG, WINDOW, KILLS = 256 << 20, 3, 3
INT = {"dtype": torch.int32}


def fill(life, i):
    return (life * 53 + i) % 250


def is_all(t, value):
    return bool((t == value).all())


def pushing_worker(n):
    """Keeps requests under way until the server says that it is the last. args: which
    life of this node it is."""
    f, dev, life = n.f, device(n), n.args
    flying, i, last = collections.deque(), 0, False
    while flying or not last:
        while not last and len(flying) < WINDOW:
            tag, push = torch.tensor([life, i], device=dev, **INT), torch.full((BIG,), fill(life, i), dtype=torch.uint8, device=dev)
            told, pull = torch.zeros(3, device=dev, **INT), torch.zeros(BIG, dtype=torch.uint8, device=dev)
            flying.append((f.push_pull([tag, push], [10, 11], [told, pull], [20, 21]), i, told, pull))
            i += 1
        h, k, told, pull = flying.popleft()
        f.wait(h, 120_000)
        assert told.tolist()[:2] == [life, k], (told, life, k)
        assert is_all(pull, fill(life, k) + 1), (life, k, pull.unique())
        last = bool(told[2])
        if k == 0:
            n.tell("going")
    works(dev)


def bereaved_server(n):
    """Serves worker 0, and worker 1 and its replacements."""
    f, dev = n.f, device(n)
    told, good, left, deadline = 0, 0, None, None
    while left != 0:
        try:
            batch = f.get_batch(timeout_ms=90_000)
        except ConnectionError as e:
            assert "worker 1" in str(e) and "worker 0" not in str(e), e
            if deadline is None:
                works(dev)
                n.tell("lost")
                told, deadline = told + 1, time.monotonic() + 90
            assert time.monotonic() < deadline, e
            time.sleep(0.02)  # until a replacement has its place
            continue
        for rank, (handler, (tag, x), keys) in enumerate(batch):
            life, i = tag.tolist()
            assert keys == [10, 11] and x.device == dev and x.numel() == BIG, (rank, keys, x.device, x.shape)
            assert is_all(x, fill(life, i)), ("worker", rank, life, i, x.unique())
            try:
                f.respond([torch.tensor([life, i, left is not None], device=dev, **INT), x + 1], handler, True)
            except ConnectionError as e:
                assert rank == 1 and "worker 1" in str(e), e
            if rank == 1 and life == told:
                deadline = None
                good += life == n.args
        del batch, tag, x
        if left is not None:
            left -= 1
        elif good == 5:
            left = WINDOW  # the batches that both workers have in flight
    works(dev)


def patient_scheduler(n):
    """Is not in stop() while nodes are lost and replaced: that would end it."""
    n.listen()


def moments():
    r = random.Random(SEED)
    return [r.uniform(0, 0.4) for _ in range(KILLS)]


def kill(c, p):
    p.kill()
    c.processes.remove(p)
    for t in p.readers:
        t.join(5)
    for stream in (p.popen.stdin, p.popen.stdout, p.popen.stderr):
        stream.close()


@MEMORIES
def test_worker_killed(cluster, memory):
    c = gpu_cluster(cluster, workers=2)
    manager = c.spawn("scheduler", patient_scheduler)
    spawn(c, "worker", pushing_worker, args=0, variables=memory)
    server = spawn(c, "server", bereaved_server, args=KILLS, variables=memory)
    victim = spawn(c, "worker", pushing_worker, rank=1, args=0, variables=memory)
    for life, moment in enumerate(moments(), 1):
        hear(c, victim, "going")
        time.sleep(moment)
        kill(c, victim)
        hear(c, server, "lost", 30)
        victim = spawn(c, "worker", pushing_worker, rank=1, args=life, variables=memory)
    hear(c, victim, "going")
    manager.tell("stop")
    c.finish(120)
    assert DIRECT in log(server) and NOT_SHARED not in log(server), reports(c)


def serving_server(n):
    """Answers until a request says that it is the last. args: which life it is."""
    f, dev, last = n.f, device(n), False
    while not last:
        (handler, (tag, x), _), = f.get_batch(timeout_ms=120_000)
        i, value, last = tag.tolist()
        assert x.device == dev and is_all(x, value), (i, value, x.unique())
        f.respond([torch.tensor([n.args, i], device=dev, **INT), x + 1 + n.rank], handler, True)
        del tag, x
    works(dev)


def request(n, dev, i, last=False):
    """Pushes to both servers. Returns the argument of answers()."""
    value = fill(0, i)
    push = [torch.tensor([i, value, last], device=dev, **INT), torch.full((BIG,), value, dtype=torch.uint8, device=dev)]
    pull = [t for _ in range(n.servers) for t in (torch.zeros(2, device=dev, **INT), torch.zeros(BIG, dtype=torch.uint8, device=dev))]
    return n.f.push_pull(push, [10, 11], pull, [20, 21] * n.servers), i, pull


def answers(n, flying):
    """Waits and checks. Returns the life of the last server."""
    h, i, pull = flying
    n.f.wait(h, 60_000)
    for rank in range(n.servers):
        (life, k), got = pull[2 * rank].tolist(), pull[2 * rank + 1]
        assert k == i and is_all(got, fill(0, i) + 1 + rank), (rank, k, i, got.unique())
    return life


def bereaved_worker(n):
    """Outlives args lives of server 1."""
    dev = device(n)
    flying, stale, i, life, good, deadline = collections.deque(), [], 0, -1, 0, None
    while good < 5:
        current = None
        try:
            while len(flying) < WINDOW:
                flying.append(request(n, dev, i))
                i += 1
            current = flying.popleft()
            now = answers(n, current)
            if now != life:
                n.tell("going")
            life, deadline = now, None
            good += life == n.args
        except ConnectionError as e:
            assert "server 1" in str(e) and "server 0" not in str(e), e
            # Of the others each is answered, or has failed likewise; their memory is
            # this program's again.
            for x in flying:
                try:
                    answers(n, x)
                except ConnectionError as other:
                    assert "server 1" in str(other), other
            if deadline is None:  # otherwise they are not sent yet, and there would be too many of them
                for _, _, pull in list(flying) + ([current] if current else []):
                    stale += pull
            flying.clear()
            for t in stale:
                t.fill_(77)
            if deadline is None:
                works(dev)
                n.tell("lost")
                deadline = time.monotonic() + 90
            assert time.monotonic() < deadline, e
            time.sleep(0.02)  # until a replacement has its place
            continue
        for t in stale:
            assert is_all(t, 77), "an answer came after the request had failed"
        stale.clear()
    for x in flying:
        answers(n, x)
    answers(n, request(n, dev, i, last=True))
    works(dev)


@MEMORIES
def test_server_killed(cluster, memory):
    c = gpu_cluster(cluster, servers=2)
    manager = c.spawn("scheduler", patient_scheduler)
    worker = spawn(c, "worker", bereaved_worker, args=KILLS, variables=memory)
    spawn(c, "server", serving_server, args=0, variables=memory)
    victim = spawn(c, "server", serving_server, rank=1, args=0, variables=memory)
    for life, moment in enumerate(moments(), 1):
        hear(c, worker, "going")
        time.sleep(moment)
        kill(c, victim)
        hear(c, worker, "lost", 30)
        victim = spawn(c, "server", serving_server, rank=1, args=life, variables=memory)
    hear(c, worker, "going")
    manager.tell("stop")
    c.finish(120)
    assert DIRECT in log(worker) and NOT_SHARED not in log(worker), reports(c)


# Late answers.

def late_worker(n):
    f, dev = n.f, device(n)
    one = torch.ones(1, dtype=torch.uint8, device=dev)
    pull, freed = torch.full((BIG,), 7, dtype=torch.uint8, device=dev), torch.full((BIG,), 7, dtype=torch.uint8, device=dev)
    handlers = [f.push_pull([one], [1], [t], [1]) for t in (pull, freed)]
    for h in handlers:
        with n.raises(TimeoutError, "server 0"):
            f.wait(h, 300)
    pull.fill_(9)
    address = freed.data_ptr()
    del freed
    other = torch.full((BIG,), 9, dtype=torch.uint8, device=dev)  # most likely the same memory
    n.tell(other.data_ptr() == address)
    after = torch.zeros(BIG, dtype=torch.uint8, device=dev)
    f.wait(f.push_pull([one], [1], [after], [1]), 60_000)  # answered after the late ones
    assert is_all(after, 3)
    time.sleep(0.5)
    torch.cuda.synchronize()
    assert is_all(pull, 9) and is_all(other, 9), "a late answer was written to memory that was given back"


def late_server(n):
    f, dev = n.f, device(n)
    late = [f.get_batch(timeout_ms=60_000)[0] for _ in range(2)]
    n.listen()
    for k, (handler, _, _) in enumerate(late, 1):
        f.respond([torch.full((BIG,), k, dtype=torch.uint8, device=dev)], handler, True)
    (handler, _, _), = f.get_batch(timeout_ms=60_000)
    f.respond([torch.full((BIG,), 3, dtype=torch.uint8, device=dev)], handler, True)


def test_late_answer(cluster):
    c = gpu_cluster(cluster)
    worker, server = pair(c, late_worker, late_server)
    try:
        print("the freed memory was used again:", worker.hear(90))
    except (queue.Empty, AssertionError):
        raise AssertionError(reports(c)) from None
    server.tell("now")
    c.finish(90)


RACES = 60


def racing_worker(n):
    """Answers that arrive at about the time of the limit."""
    f, dev = n.f, device(n)
    r, late = random.Random(SEED), 0
    pull, check = torch.zeros(BIG, dtype=torch.uint8, device=dev), torch.zeros(1, dtype=torch.uint8, device=dev)
    for i in range(RACES):
        pause = torch.tensor([i, r.randrange(0, 5000)], device=dev, **INT)
        torch.cuda.synchronize()
        h = f.push_pull([pause], [1], [pull], [1], need_event=False)
        try:
            f.wait(h, r.randrange(1, 5))
            want = i + 1
        except TimeoutError:
            want = 200
            late += 1
        if want == 200:
            pull.fill_(want)
        torch.cuda.synchronize()
        assert is_all(pull, want), (i, want, pull.unique())
        f.wait(f.push_pull([pause[:1]], [1], [check], [1]), 60_000)  # answered after it
        assert is_all(pull, want), (i, want, "later", pull.unique())
    works(dev)
    return {"late": late}


def racing_server(n):
    f, dev = n.f, device(n)
    answer, small = torch.zeros(BIG, dtype=torch.uint8, device=dev), torch.zeros(1, dtype=torch.uint8, device=dev)
    i = 0
    while i < RACES:
        (handler, (pause,), _), = f.get_batch(timeout_ms=60_000)
        pause = pause.tolist()
        if len(pause) == 1:  # the check request; requests that were canceled before they arrived are not handed out
            f.respond([small], handler)
            i = pause[0] + 1
            continue
        answer.fill_(pause[0] + 1)
        torch.cuda.synchronize()
        end = time.perf_counter() + pause[1] * 1e-6
        while time.perf_counter() < end:
            pass
        f.respond([answer], handler)


def test_answers_at_the_limit(cluster):
    c = gpu_cluster(cluster)
    pair(c, racing_worker, racing_server)
    got = c.finish(120)
    assert 0 < got[0]["late"] < RACES, "%d of %d answers were late" % (got[0]["late"], RACES)


# Many processes on few GPUs.

def many_worker(n):
    f, dev = n.f, device(n)
    me = 100 * n.rank + n.instance
    for i in range(3):
        x = torch.arange(1000, device=dev) * (i + 1) + me
        pulls = [torch.zeros(1000, dtype=torch.int64, device=dev) for _ in range(n.servers)]
        f.wait(f.push_pull([x], [1], pulls, [1] * n.servers), 90_000)
        for s, got in enumerate(pulls):
            assert torch.equal(got, 2 * x + s), (i, s, me, got)


def many_server(n):
    f, dev = n.f, device(n)
    for _ in range(3):
        for rank, (handler, (x,), _) in enumerate(f.get_batch(timeout_ms=120_000)):
            assert x.device == dev and int(x[0]) == 100 * rank + n.instance, (rank, x)
            f.respond([2 * x + n.rank], handler, True)


@pytest.mark.parametrize("shape", [{"group": 8}, {"workers": 8, "servers": 8}], ids=["group", "nodes"])
def test_eight_and_eight(cluster, shape):
    c = gpu_cluster(cluster, env={"STEPAF_START_TIMEOUT": "200"}, **shape)
    c.spawn("scheduler", scheduler)
    nodes = [spawn(c, role, function, i // c.group, i % c.group, gpu=i % GPUS)
             for role, function in (("worker", many_worker), ("server", many_server)) for i in range(8)]
    c.finish(300)
    for p in nodes:
        lines = [line for line in log(p).splitlines() if DIRECT in line]
        assert len(lines) >= max(c.servers, c.workers), "%s: %d links from device to device\n%s" % (p.name, len(lines), log(p))
