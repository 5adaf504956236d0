"""Round trips between two GPUs of this machine, each beside the others in one run:

- floor: a copy from GPU to GPU each way with a word written behind it, by stepaf bench;
- Go: push_pull and Wait, by stepaf bench, in turns with the floor;
- Python: push_pull + wait with PyTorch's tensors, with need_event=True (the default)
  and with need_event=False; the same prepared (start + wait); and prepared in a CUDA graph
  that is replayed, up to the end of the stream's work; with both ends prepared
  (prepare_streams), by their hosts; and in their streams, queued and in graphs, up to there, too;
- NCCL: send and recv of torch.distributed, up to the end of the stream's work. Its
  other end is never waited for by a CPU: there, all is queued in advance.

Python and NCCL take turns, block by block. Every byte is checked in round trips that
are not timed, before and after each block. --check exits with 1 when a goal is missed.
--expandable compares, instead, PyTorch's memory with expandable_segments:True, which is
mapped piece by piece, and its ordinary memory. Without two GPUs it says so, and the status is 0.

    PYTHONPATH=bin/python PATH=$PWD/bin:$PATH python3 tests/benchmark/device_latency.py
"""

import argparse
import collections
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(1, os.path.join(ROOT, "tests/python"))
from harness import free_port  # noqa: E402
KIB, MIB = 1 << 10, 1 << 20
SMALL, ATTENTION, LARGE = (KIB, KIB), (917504, 1835008), (256 * MIB, 256 * MIB)

EVENT, COMPLETE, PREPARED, GRAPH = "Python", "Python, need_event=False", "Python, prepared", "Python, in a CUDA graph"
# By both hosts: with send(), and with send(need_event=False). The server says that of each timed answer, as respond() does.
HOSTS, HOSTS_COMPLETE = "Python, by both hosts", "Python, hosts, no event"
STREAMS, STREAMS_GRAPH = "Python, in both streams", "Python, in both graphs"
BY_HOST = HOSTS, HOSTS_COMPLETE
BOTH = *BY_HOST, STREAMS, STREAMS_GRAPH

# (way, percentile, reference, factor): the way's percentile is at most factor times the reference's. Goals for Go are stepaf's.
GOALS = {
    SMALL: [(EVENT, "p50", "floor", 2.5), (EVENT, "p50", "NCCL", 0.65), (PREPARED, "p50", "floor", 1.4), (HOSTS, "p50", "floor", 1.4), (STREAMS, "p50", "floor", 1.4)],
    ATTENTION: [(EVENT, "p50", "floor", 2), (EVENT, "p50", "NCCL", 0.7), (EVENT, "p99", "NCCL", 0.7),
                (PREPARED, "p50", "floor", 1.3), (PREPARED, "p50", "NCCL", 0.5), (PREPARED, "p99", "NCCL", 0.6),
                (HOSTS, "p50", "floor", 1.3), (HOSTS, "p50", "NCCL", 0.5), (HOSTS, "p99", "NCCL", 0.6),
                (STREAMS, "p50", "floor", 1.3), (STREAMS, "p50", "NCCL", 0.5), (STREAMS, "p99", "NCCL", 0.6), (STREAMS_GRAPH, "p50", "floor", 1.2)],
    LARGE: [(EVENT, "p50", "floor", 1.05), (HOSTS, "p50", "floor", 1.03)],
}

# With --expandable: its p50 has to be at most so many times that of ordinary memory.
EXPANDABLE_GOALS = {ATTENTION: 1.05, (16 * MIB, 16 * MIB): 1.05}
ALLOC_CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the latter is the newer name

# A push's key is KEYS * payload + one of these, a pull's the next one. After the last
# payload's keys follow the keys of commands to the server.
KEYS, TIMED, CHECKED, IN_STREAMS, BY_HOSTS = 8, 0, 2, 4, 6
END, PROFILE, REPORT, ROUNDS = 0, 1, 2, 3
AHEAD = 8  # rounds that the server queues before it waits for its stream

SERVER, WORKER = 1, 2  # among the library's processes
MARK = "@@ "  # of lines for the parent: libraries print, too


def say(what):
    print(MARK + json.dumps(what), flush=True)


def answer_to(push, out):
    """The answer to a checked request: it depends on every byte of it."""
    import torch

    for at in range(0, out.numel(), push.numel()):
        n = min(push.numel(), out.numel() - at)
        torch.add(push[:n], 1, out=out[at: at + n])
    return out


class Device:
    """Where the tensors of this process lie: a GPU, or with --device cpu the host."""

    def __init__(self, kind, index):
        import torch

        self.torch, self.gpu = torch, kind == "cuda"
        self.device = torch.device(kind, index) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)

    def empty(self, n):
        return self.torch.empty(n, dtype=self.torch.uint8, device=self.device)

    def finish(self):
        if self.gpu:
            self.torch.cuda.synchronize()

    def is_expandable(self):
        return self.gpu and any(s.get("is_expandable") for s in self.torch.cuda.memory_snapshot())


class Trips:
    """The end that asks and measures. way(payload, kind, push, pull, *how) is a function that does a round trip with the one of the other
    end's two buffers whose turn it is."""

    def __init__(self, device, sizes, way, now):
        self.device, self.sizes, self.way, self.now = device, sizes, way, now
        self.tensors = {}

    def of(self, payload):
        """Push and pull tensors, the contents of the other end's two buffers, and the buffer of the last turn."""
        if payload not in self.tensors:
            push, pull = self.sizes[payload]
            empty = self.device.empty
            self.tensors[payload] = [empty(push), empty(pull), [empty(pull), empty(pull)], 0]
        return self.tensors[payload]

    def block(self, payload, count, *how):
        """Times of so many round trips, in nanoseconds. Checks before and after."""
        t, finish = self.of(payload), self.device.finish
        push, pull, held, _ = t
        once = self.way(payload, CHECKED, push, pull, *how)
        for _ in held:
            push.random_(0, 256)
            pull.zero_()
            finish()
            t[3] ^= 1
            once(t[3])
            answer_to(push, held[t[3]])
            self.compare(payload, "checked")
        pull.zero_()
        finish()
        times = self.timed(payload, count, *how)
        self.compare(payload, "timed")
        finish()
        return times

    def timed(self, payload, count, *how):
        """The same, without checks."""
        t, now = self.of(payload), self.now
        push, pull, _, turn = t
        once, times = self.way(payload, TIMED, push, pull, *how), []
        for _ in range(count):
            turn ^= 1
            start = now()
            once(turn)
            times.append(now() - start)
        t[3] = turn
        return times

    def compare(self, payload, kind):
        _, pull, held, turn = self.of(payload)
        if not self.device.torch.equal(pull, held[turn]):
            sys.exit(f"payload {self.sizes[payload]}: after a {kind} round trip: wrong values")


class Answers:
    """The end that answers, from two buffers in turn."""

    def __init__(self, device, sizes):
        self.device, self.sizes, self.buffers, self.turn = device, sizes, {}, collections.Counter()

    def of(self, payload):
        """The two buffers."""
        if payload not in self.buffers:
            self.buffers[payload] = [self.device.empty(self.sizes[payload][1]) for _ in range(2)]
        return self.buffers[payload]

    def next(self, payload, push):
        """The next answer; push is the request of a checked round trip, else None."""
        self.of(payload)
        self.turn[payload] ^= 1
        out = self.buffers[payload][self.turn[payload]]
        return out if push is None else answer_to(push, out)


class BothEnds:
    """The server's end of exchanges of both ends: for each payload one for each of the two buffers, by hosts and in streams."""

    def __init__(self, f, answers):
        self.f, self.answers, self.exchanges, self.graphs = f, answers, {}, {}

    def rounds(self, payload, checked, timed, how):
        """Makes so many rounds, in streams a few ahead of them."""
        import torch

        f, answers, host, graph = self.f, self.answers, BOTH[how] in BY_HOST, BOTH[how] == STREAMS_GRAPH
        at = payload, host
        if at not in self.exchanges:
            push = answers.device.empty(answers.sizes[payload][0])
            key = KEYS * payload + (BY_HOSTS if host else IN_STREAMS)
            self.exchanges[at] = push, [f.prepare_streams([push], [key + i], [out], [key + i], host=host) for i, out in enumerate(answers.of(payload))]
        push, both = self.exchanges[at]
        if graph and payload not in self.graphs:
            self.graphs[payload] = []
            for x in both:
                self.graphs[payload].append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(self.graphs[payload][-1]):
                    x.receive()
                    x.send()
        events, turn = collections.deque(), answers.turn[payload]
        answers.turn[payload] ^= checked + timed & 1
        for i in range(checked + timed):
            turn ^= 1
            x = both[turn]
            if graph and i >= checked:
                self.graphs[payload][turn].replay()
            else:
                x.receive()
                if i < checked:
                    answer_to(push, answers.of(payload)[turn])
                x.send(not host or i < checked)
            if host:
                continue
            events.append(torch.cuda.Event())
            events[-1].record()
            if len(events) > AHEAD:
                events.popleft().synchronize()
        answers.device.finish()
        for x in both:
            x.check()


class Profile:
    """The GPU's work for this process, by PyTorch's profiler."""

    def __init__(self):
        from torch.profiler import ProfilerActivity, profile

        self.profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self.profile.start()

    def stop(self):
        """[kind, name, count] of kernels, copies and sets. One kernel of its own shows
        that it sees any."""
        import torch

        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        self.profile.stop()
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "trace.json")
            self.profile.export_chrome_trace(path)
            with open(path) as f:
                events = json.load(f)["traceEvents"]
        seen = collections.Counter((e["cat"], e["name"]) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
        own = [k for k in seen if k[0] == "kernel" and "spin_kernel" in k[1]]
        if not own:
            sys.exit("the profiler does not see kernels here")
        return [[kind, name, n] for (kind, name), n in seen.items() if (kind, name) not in own]


def node(kind, sizes):
    """A node of fserver_lib, of the role DMLC_ROLE."""
    role = os.environ["DMLC_ROLE"]
    device = Device(kind, int(os.environ.get("STEPMESH_GPU", 0))) if role != "scheduler" else None
    import fserver_lib as f

    f.init()
    if role == "server":
        serve(f, device, sizes)
    elif role == "worker":
        work(f, device, sizes)
    f.stop()
    if device is not None and device.gpu and device.is_expandable() != os.environ[ALLOC_CONF[0]].endswith("True"):
        sys.exit(f"{role}: PyTorch's memory is not of the kind that {ALLOC_CONF[0]}={os.environ[ALLOC_CONF[0]]} asks for")


def serve(f, device, sizes):
    answers, profile, more = Answers(device, sizes), None, True
    both = BothEnds(f, answers)
    while more:
        for handler, tensors, keys in f.get_batch():
            payload, kind = divmod(keys[0], KEYS)
            if payload < len(sizes):
                out = answers.next(payload, tensors[0] if kind == CHECKED else None)
                f.respond([out], handler, kind == CHECKED)
            else:
                if kind == PROFILE:
                    profile = Profile()
                elif kind == REPORT:
                    say(profile.stop())
                more = kind != END
                f.respond([], handler)
                if kind == ROUNDS:
                    both.rounds(*tensors[0].tolist())
            del tensors


def work(f, device, sizes):
    exchanges, graphs, both = {}, {}, {}

    def way(payload, kind, push, pull, how):
        if how in BOTH:
            return by_both(both[payload, how in BY_HOST], how, how == STREAMS_GRAPH and kind == TIMED)
        keys = [KEYS * payload + kind], [KEYS * payload + kind + 1]
        if how in (EVENT, COMPLETE):
            return lambda turn: f.wait(f.push_pull([push], keys[0], [pull], keys[1], how == EVENT))
        at = payload, kind
        if at not in exchanges:
            exchanges[at] = f.prepare([push], keys[0], [pull], keys[1])
        x = exchanges[at]
        if how == GRAPH and at not in graphs:
            graphs[at] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[at]):
                x.start()
                x.wait()

        def prepared(turn):
            x.start()
            x.wait()

        def in_graph(turn):
            graphs[at].replay()
            torch.cuda.current_stream().synchronize()
            x.check()

        return in_graph if how == GRAPH else prepared

    def by_both(pair, how, replayed):
        def hosts(turn):
            x = pair[turn][0]
            x.send(how == HOSTS)
            x.receive()

        def in_streams(turn):
            x, graph = pair[turn]
            if replayed:
                graph.replay()
            else:
                x.send()
                x.receive()
            torch.cuda.current_stream().synchronize()
            x.check()

        return hosts if how in BY_HOST else in_streams

    def tell(what, *words):
        f.wait(f.push_pull([torch.tensor(words, dtype=torch.int64)], [KEYS * len(sizes) + what], [], []), 60000)

    def both_ends(payload, count, how):
        """Lets the server make the rounds of a block."""
        tell(ROUNDS, payload, 2, count, BOTH.index(how))
        host = how in BY_HOST
        if (payload, host) in both:
            return
        push, pull = trips.of(payload)[:2]
        both[payload, host] = []
        key = KEYS * payload + (BY_HOSTS if host else IN_STREAMS)
        for i in range(2):
            x, graph = f.prepare_streams([push], [key + i], [pull], [key + i], host=host), None
            if not host:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    x.send()
                    x.receive()
            both[payload, host].append((x, graph))

    import torch

    trips = Trips(device, sizes, way, f.get_nanosecond)
    for c in map(json.loads, sys.stdin):  # until the parent has enough
        if c["do"] == "block":
            if c["how"] in BOTH:
                both_ends(c["payload"], c["count"], c["how"])
            say(trips.block(c["payload"], c["count"], c["how"]))
        else:
            tell(PROFILE)
            profile = Profile()
            trips.timed(c["payload"], c["count"], EVENT)
            say(profile.stop())
            tell(REPORT)
    tell(END)


def collective(kind, sizes, rank, port):
    """A process of torch.distributed."""
    import torch.distributed as dist

    device = Device(kind, rank)
    more = {"device_id": device.device} if device.gpu else {}
    dist.init_process_group("nccl" if device.gpu else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=60), **more)

    def finish():
        if device.gpu:
            device.torch.cuda.current_stream().synchronize()

    def way(payload, kind, push, pull):
        def once(turn):
            dist.send(push, 1)
            dist.recv(pull, 1)
            finish()

        return once

    trips, answers, requests = Trips(device, sizes, way, time.perf_counter_ns), Answers(device, sizes), {}
    for c in map(json.loads, sys.stdin):  # until the parent has enough
        payload, count = c["payload"], c["count"]
        if rank == 0:
            say(trips.block(payload, count))
            continue
        if payload not in requests:
            requests[payload] = device.empty(sizes[payload][0])
        push = requests[payload]
        for i in range(2 + count):
            dist.recv(push, 0)
            dist.send(answers.next(payload, push if i < 2 else None), 0)
        device.finish()
        say(count)
    dist.destroy_process_group()


class Children:
    """Processes of one kind, which carry out commands line by line."""

    def __init__(self, name, args, variables, options):
        self.name = name
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "STEPMESH_"))}
        command = [sys.executable, os.path.abspath(__file__), "--device", args.device, "--sizes", *map(written, args.sizes)]
        self.all = [subprocess.Popen(command + o, env=dict(env, **v), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
                    for v, o in zip(variables, options)]

    def tell(self, i, **what):
        self.all[i].stdin.write(json.dumps(what) + "\n")
        self.all[i].stdin.flush()

    def hear(self, i):
        for line in self.all[i].stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK):])
            sys.stderr.write(line)
        sys.exit(f"{self.name}: process {i} has ended, status {self.all[i].wait()}")

    def end(self):
        """Lets them leave. Returns whether they did so well."""
        for p in self.all:
            p.stdin.close()
        return all([p.wait(60) == 0 for p in self.all])

    def kill(self):
        for p in self.all:
            p.kill()
            p.wait()


def library(args, expandable=False):
    """Scheduler, server and worker of fserver_lib."""
    common = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()),
              "DMLC_NODE_HOST": "127.0.0.1", "DMLC_ENABLE_RDMA": "zmq", "BYTEPS_ENABLE_IPC": "1", "STEPMESH_BAKCEND": "CPU", **dict.fromkeys(ALLOC_CONF, f"expandable_segments:{expandable}")}
    variables = [dict(common, DMLC_ROLE=role) for role in ("scheduler", "server", "worker")]
    if args.device == "cuda":
        for i, gpu in ((WORKER, 0), (SERVER, 1)):
            variables[i].update(STEPMESH_BAKCEND="GPU", STEPMESH_GPU=str(gpu), DMLC_RANK_OFFSET=str(-gpu))
    return Children("fserver_lib", args, variables, [["--node"]] * 3)


def nccl(args):
    port = str(free_port())
    return Children("NCCL", args, [{}] * 2, [["--collective", str(rank), port] for rank in range(2)])


def go(args, size):
    """The JSON line of stepaf bench latency."""
    program = shutil.which("stepaf") or os.path.join(ROOT, "bin", "stepaf")
    command = [program, "bench", "latency", "--van", "local", "--json", "--push", str(size[0]), "--pull", str(size[1])]
    if args.device == "cuda":
        command += ["--device", "gpu", "--gpus", "0,1"]
    if args.rounds:
        command += ["--iters", str(args.rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: status {done.returncode}")
    return json.loads(done.stdout)


def quantiles(ns):
    x = sorted(ns)
    row = {f"p{p}": x[min(len(x) * p // 100, len(x) - 1)] / 1e3 for p in (50, 90, 99)}
    return dict(row, max=x[-1] / 1e3)


def measure(args, python, other, payload):
    """All rows of a payload, and the output of stepaf."""
    size = args.sizes[payload]
    said = go(args, size)
    times = collections.defaultdict(list)
    count = trips(args, size)
    for block in range(-1, args.blocks):  # one to warm up
        for row in own(args):
            python.tell(WORKER, do="block", payload=payload, count=count, how=row)
            x = python.hear(WORKER)
            times[row] += x if block >= 0 else []
        for rank in (1, 0):
            other.tell(rank, payload=payload, count=count)
        x = other.hear(0)
        other.hear(1)
        times["NCCL"] += x if block >= 0 else []
    columns = ("p50", "p90", "p99", "max")
    rows = {"floor": {c: said[f"floor_{c}_us"] for c in columns}, "Go": {c: said[f"{c}_us"] for c in columns}}
    rows.update((name, quantiles(times[name])) for name in own(args) + ["NCCL"])
    return rows, said, len(times[EVENT])


def own(args):
    """The library's rows."""
    return [EVENT, COMPLETE, PREPARED] + ([GRAPH, *BOTH] if args.device == "cuda" else [])


def trips(args, size):
    """How many round trips are timed, and in each block."""
    total = args.rounds or min(max((1 << 36) // (sum(size) + (1 << 21)), 200), 5000)
    return max(total // args.blocks, 1)


def compare(args, plain, expandable, payload):
    """(text, missed): both kinds of memory, block by block."""
    size, times = args.sizes[payload], collections.defaultdict(list)
    for block in range(-1, args.blocks):  # one to warm up
        for name, children in (("ordinary", plain), ("expandable", expandable)):
            children.tell(WORKER, do="block", payload=payload, count=trips(args, size), how=EVENT)
            x = children.hear(WORKER)
            times[name] += x if block >= 0 else []
    rows = {name: quantiles(x) for name, x in times.items()}
    yield f"push {size[0]} bytes, pull {size[1]} bytes; {len(times['ordinary'])} round trips of each memory; microseconds", False
    yield f"{'':12s}{'p50':>10s}{'p90':>10s}{'p99':>10s}{'max':>10s}", False
    for name, r in rows.items():
        yield f"{name:12s}" + "".join(f"{r[c]:10.1f}" for c in ("p50", "p90", "p99", "max")), False
    ratio, limit = rows["expandable"]["p50"] / rows["ordinary"]["p50"], EXPANDABLE_GOALS.get(size)
    missed = limit is not None and ratio > limit
    goal = f" (goal: at most {limit:g})" if limit else ""
    yield f"p50 of expandable memory over ordinary: {ratio:.3f}{goal}{', MISSED' if missed else ''}", missed


def table(size, rows, said, count):
    """The lines of a payload's table."""
    yield f"push {size[0]} bytes, pull {size[1]} bytes; {said['iters']} round trips of floor and Go, {count} of the others; microseconds"
    yield f"{'':26s}{'p50':>10s}{'p90':>10s}{'p99':>10s}{'max':>10s}{'p50/floor':>12s}{'p50/NCCL':>12s}"
    for name, r in rows.items():
        yield (f"{name:26s}" + "".join(f"{r[c]:10.1f}" for c in ("p50", "p90", "p99", "max"))
               + f"{r['p50'] / rows['floor']['p50']:12.2f}{r['p50'] / rows['NCCL']['p50']:12.2f}")


def judge(size, rows, said):
    """(text, missed) of each goal of a payload."""
    goals = list(GOALS.get(size, ())) if said["device"] == "gpu" else []
    if "goal_ratio_p50" in said:
        goals.insert(0, ("Go", "p50", "floor", said["goal_ratio_p50"]))
    for row, column, of, limit in goals:
        ratio = rows[row][column] / rows[of][column]
        missed = ratio > limit
        yield f"goal: {column} of {row} at most {limit:g} times that of {of}: {ratio:.2f}{', MISSED' if missed else ''}", missed


def kernels(args, python, payload):
    """(text, missed): the GPUs' work in push_pulls of one payload."""
    count = 100
    python.tell(WORKER, do="block", payload=payload, count=count, how=EVENT)
    python.hear(WORKER)
    python.tell(WORKER, do="kernels", payload=payload, count=count)
    for name, i in (("worker", WORKER), ("server", SERVER)):
        seen = python.hear(i)
        n = sum(x[2] for x in seen if x[0] == "kernel")
        yield f"{name}: {n} kernels in {count} push_pulls of {written(args.sizes[payload])} bytes (goal: none){', MISSED' if n else ''}", n > 0
        for kind, what, times in sorted(seen):
            yield f"    {times:6d} {kind}: {what}", False


def why_not():
    """Why GPUs cannot be compared here, or None."""
    try:
        import torch
    except ImportError as e:
        return str(e)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < 2:
        return f"PyTorch {torch.__version__} sees {gpus} GPUs, and this needs 2"
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return f"PyTorch {torch.__version__} has no NCCL"
    return None


def size(text):
    """Reads PUSH/PULL, or one number for both; K and M are units."""
    def number(word):
        unit = {"K": KIB, "M": MIB}.get(word[-1:].upper(), 1)
        n = int(word[:-1] if unit > 1 else word) * unit
        if not 1 <= n < 1 << 31:
            raise ValueError
        return n

    try:
        numbers = tuple(map(number, text.split("/")))
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text}: want bytes, as in 917504/1835008 or 16M, from 1 to below 2 GiB")
    return numbers if len(numbers) == 2 else numbers * 2


def written(s):
    return f"{s[0]}/{s[1]}"


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sizes", type=size, nargs="+", default=[SMALL, ATTENTION, (16 * MIB, 16 * MIB), LARGE], metavar="PUSH/PULL",
                   help="bytes each way (default: 1K 917504/1835008 16M 256M)")
    p.add_argument("--blocks", type=int, default=10, help="turns of each (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=0, help="round trips of each; 0 chooses by size (default: %(default)s)")
    p.add_argument("--check", action="store_true", help="status 1 when a goal is missed")
    p.add_argument("--kernels", action="store_true", help="instead: what the GPUs do during 100 push_pulls; the goal is no kernel")
    p.add_argument("--expandable", action="store_true", help="instead: PyTorch's memory with expandable_segments:True beside ordinary memory")
    p.add_argument("--timeout", type=int, default=900, help="give up after so many seconds (default: %(default)s)")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                   help="cpu: host memory, and Gloo in NCCL's place, to try this program without GPUs")
    p.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--collective", nargs=2, type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.blocks < 1 or args.rounds < 0 or args.timeout < 1:
        p.error("--blocks and --timeout want at least 1, --rounds at least 0")
    if args.kernels and args.expandable:
        p.error("--kernels and --expandable: one at a time")
    if args.device == "cpu" and (args.check or args.kernels):
        p.error("--device cpu: there are no goals for host memory, and no kernels")
    return args


def main():
    args = options()
    if args.node:
        return node(args.device, args.sizes)
    if args.collective:
        return collective(args.device, args.sizes, *args.collective)
    why = why_not() if args.device == "cuda" else None
    if why:
        print("SKIPPED:", why)
        return None
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("--timeout has passed"))
    signal.alarm(args.timeout)
    goals, groups = [], []
    try:
        groups.append(library(args))
        if args.expandable:
            groups.append(library(args, expandable=True))
        elif not args.kernels:
            groups.append(nccl(args))
        for payload, s in enumerate(args.sizes):
            if args.kernels:
                judged = list(kernels(args, groups[0], payload))
            elif args.expandable:
                judged = list(compare(args, *groups, payload))
            else:
                rows, said, count = measure(args, *groups, payload)
                print(*table(s, rows, said, count), sep="\n")
                judged = list(judge(s, rows, said))
            goals += judged
            print(*(text for text, _ in judged), "", sep="\n", flush=True)
        if not all([g.end() for g in groups]):
            sys.exit("a process has not ended well")
    finally:
        for g in groups:
            g.kill()
    if args.check and any(missed for _, missed in goals):
        sys.exit(1)


if __name__ == "__main__":
    main()
