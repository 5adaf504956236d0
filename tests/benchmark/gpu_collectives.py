"""AllGather and AllToAll of two GPUs of this machine, from Python, beside NCCL in one run.

Each of two processes does both, block by block in turns: fserver_lib's call and wait, and
torch.distributed's (NCCL) up to the end of the stream's work. A call's time is the longer of the two
processes', which begin each call together. The floor is a copy of what a rank gets
from the other GPU, and of its own part beside it, up to the end of both streams' work. Every byte is checked in calls that are not timed, before
and after each block, with other contents. --check exits with 1 when a goal is missed; --kernels counts what
the GPUs do instead. Without two GPUs it says so, and the status is 0.

    PYTHONPATH=bin/python python3 tests/benchmark/gpu_collectives.py
"""

import argparse
import datetime
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from device_latency import Profile, free_port, quantiles, say, why_not, MARK, MIB  # noqa: E402

SIZES = [1024, 917504, 1835008, 256 * MIB]
CALLS = ("all_gather", "all_to_all")
OURS, NCCL, FLOOR = "fserver_lib", "NCCL", "copy"

# p50 at most so many times that of another row.
GOALS = {917504: [(NCCL, 0.6)], 1835008: [(NCCL, 0.6)], 256 * MIB: [(NCCL, 0.9), (FLOOR, 1.05)]}


def node(args):
    """A process of the cluster; workers measure."""
    role = os.environ["DMLC_ROLE"]
    rank = int(os.environ.get("STEPMESH_GPU", 0))
    if role == "worker":
        import torch

        torch.cuda.set_device(rank)
    import fserver_lib as f

    f.init()
    if role == "worker":
        measure(f, torch, rank, args)
    if role != "scheduler":
        f.barrier(True, True)
    f.stop()


class Meeting:
    """Lets two processes go on at the same time, to a microsecond: a larger difference would be in the times."""

    def __init__(self, path, rank):
        with open(path, "r+b") as file:
            self.turns = memoryview(mmap.mmap(file.fileno(), 4096)).cast("q")
        self.mine, self.other, self.turn = 8 * rank, 8 * (1 - rank), 0  # in cache lines of their own

    def __call__(self):
        self.turn += 1
        self.turns[self.mine] = self.turn
        while self.turns[self.other] < self.turn:
            pass


def measure(f, torch, rank, args):
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{args.port}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=60), device_id=device)
    meet = Meeting(args.meeting, rank)
    stream, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    now = f.get_nanosecond

    for kind in CALLS:
        for size in args.sizes:
            give = 1 if kind == "all_gather" else 2
            x = torch.empty(give * size, dtype=torch.uint8, device=device)
            out = torch.empty(2 * size, dtype=torch.uint8, device=device)
            xs, outs = list(x.split(size)), list(out.split(size))
            other = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", 1 - rank))

            def ours():
                if kind == "all_gather":
                    f.all_gather(out, x).wait()
                else:
                    f.all_to_all(outs, xs).wait()

            def nccl():
                if kind == "all_gather":
                    dist.all_gather_into_tensor(out, x)
                else:
                    dist.all_to_all_single(out, x)
                stream.synchronize()

            def copy():
                with torch.cuda.stream(beside):
                    outs[rank].copy_(xs[rank % give], non_blocking=True)
                outs[1 - rank].copy_(other, non_blocking=True)
                stream.synchronize()
                beside.synchronize()

            def check(call):
                seed = [7 * i + 1 for i in range(2 * give)]
                at = torch.arange(size, device=device, dtype=torch.int32)
                made = [((at * 7919 + s * 31 + args.turn) % 251).to(torch.uint8) for s in seed]
                for i, part in enumerate(xs):
                    part.copy_(made[rank * give + i])
                out.zero_()
                call()
                want = made if give == 1 else [made[r * 2 + rank] for r in range(2)]
                for got, w in zip(outs, want):
                    if not torch.equal(got, w):
                        sys.exit(f"{kind} of {size} bytes: wrong values")
                args.turn += 1

            def block(call, count):
                times = []
                for _ in range(count):
                    meet()
                    start = now()
                    call()
                    times.append(now() - start)
                return times

            if args.kernels:
                for _ in range(20):
                    ours()
                profile = Profile()
                for _ in range(100):
                    ours()
                say([kind, size, "kernels", profile.stop()])
                continue
            count = args.calls or min(max((1 << 34) // (size + (1 << 22)), 10), 200)
            for turn in range(-1, args.blocks):
                for name, call in ((OURS, ours), (NCCL, nccl), (FLOOR, copy)):
                    if name != FLOOR:
                        check(call)
                    t = block(call, count)
                    if name != FLOOR:
                        check(call)
                    if turn >= 0:
                        say([kind, size, name, t])
    dist.destroy_process_group()


def start(args, meeting):
    common = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "STEPMESH_"))}
    common.update(DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1", DMLC_GROUP_SIZE="2", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=str(free_port()),
                  DMLC_NODE_HOST="127.0.0.1", DMLC_ENABLE_RDMA="zmq", BYTEPS_ENABLE_IPC="1", STEPMESH_BAKCEND="CPU")
    command = [sys.executable, os.path.abspath(__file__), "--node", "--port", str(free_port()), "--meeting", meeting, "--blocks", str(args.blocks), "--calls", str(args.calls),
               "--sizes", *map(str, args.sizes)] + ["--kernels"] * args.kernels
    nodes = [{"DMLC_ROLE": "scheduler"}]
    for role, backend in (("server", "CPU"), ("worker", "GPU")):
        nodes += [{"DMLC_ROLE": role, "STEPMESH_BAKCEND": backend, "STEPMESH_GPU": str(i)} for i in range(2)]
    return [subprocess.Popen(command, env=dict(common, **n), stdout=subprocess.PIPE if n["DMLC_ROLE"] == "worker" else None, text=True) for n in nodes]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES", help="for each rank (default: %(default)s)")
    p.add_argument("--blocks", type=int, default=5, help="turns of each (default: %(default)s)")
    p.add_argument("--calls", type=int, default=0, help="calls in a block; 0 chooses by size (default: %(default)s)")
    p.add_argument("--check", action="store_true", help="status 1 when a goal is missed")
    p.add_argument("--kernels", action="store_true", help="instead: what the GPUs do in 100 calls; the goal is no kernel")
    p.add_argument("--timeout", type=int, default=500, help="give up after so many seconds (default: %(default)s)")
    p.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--meeting", help=argparse.SUPPRESS)
    p.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = p.parse_args()
    args.turn = 0
    if args.node:
        return node(args)
    why = why_not()
    if why:
        print("SKIPPED:", why)
        return None
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("--timeout has passed"))
    signal.alarm(args.timeout)
    with tempfile.NamedTemporaryFile() as meeting:
        meeting.truncate(4096)
        rows = run(start(args, meeting.name))
    missed = report(args, rows)
    if args.check and missed:
        sys.exit(1)


def run(processes):
    """The output of the two workers."""
    try:
        rows = [[], []]
        workers = processes[-2:]

        def read(i):
            rows[i] += [json.loads(line[len(MARK):]) for line in workers[i].stdout if line.startswith(MARK)]

        readers = [threading.Thread(target=read, args=(i,)) for i in range(2)]
        for t in readers:
            t.start()
        for t in readers:
            t.join()
        for w in processes:
            if w.wait(60) != 0:
                sys.exit("a process has not ended well")
    finally:
        for w in processes:
            w.kill()
    return rows


def report(args, rows):
    missed = False
    if args.kernels:
        for rank, r in enumerate(rows):
            for kind, size, _, seen in r:
                n = sum(x[2] for x in seen if x[0] == "kernel")
                missed |= n > 0
                print(f"rank {rank}: {kind} of {size} bytes: {n} kernels in 100 calls (goal: none){', MISSED' if n else ''}")
                for what, name, times in sorted(seen):
                    print(f"    {times:6d} {what}: {name}")
        return missed
    times = {}
    for (kind, size, name, a), (_, _, _, b) in zip(*rows):
        times.setdefault((kind, size), {}).setdefault(name, []).extend(map(max, a, b))
    for (kind, size), of in times.items():
        print(f"{kind}, {size} bytes for each rank, {len(of[OURS])} calls of each; microseconds")
        print(f"{'':14s}{'p50':>10s}{'p90':>10s}{'p99':>10s}{'max':>10s}{'p50/NCCL':>12s}{'p50/copy':>12s}")
        q = {name: quantiles(t) for name, t in of.items()}
        for name, r in q.items():
            print(f"{name:14s}" + "".join(f"{r[c]:10.1f}" for c in ("p50", "p90", "p99", "max")) + f"{r['p50'] / q[NCCL]['p50']:12.2f}{r['p50'] / q[FLOOR]['p50']:12.2f}")
        for than, limit in GOALS.get(size, ()):
            ratio = q[OURS]["p50"] / q[than]["p50"]
            missed |= ratio > limit
            print(f"goal: p50 at most {limit:g} times that of {than}: {ratio:.2f}{', MISSED' if ratio > limit else ''}")
        print()
    return missed


if __name__ == "__main__":
    main()
