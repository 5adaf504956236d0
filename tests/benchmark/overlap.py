"""How much matrix products slow down while tensors go to another GPU and back.

One process on each of two GPUs. The first multiplies matrices all the time, and a thread of
it exchanges tensors with the second: by NCCL (send and recv of torch.distributed) as fast
as it goes, by push_pull at as many bytes per second as NCCL has reached, and by push_pull as
fast as it goes. These take turns, with products alone in between. Received tensors are
checked. Without two GPUs it says what is missing, and the status is 0.

    PYTHONPATH=bin/python python3 tests/benchmark/overlap.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(1, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "python"))
from harness import free_port  # noqa: E402

MIB = 1 << 20
ALONE, NCCL, EQUAL, FULL = "alone", "NCCL", "ours at NCCL's rate", "ours at full rate"
GOAL = 2.5  # per cent, at NCCL's rate


def missing():
    """The missing requirement of this machine, or None."""
    try:
        import torch
    except ImportError:
        return "PyTorch"
    n = torch.cuda.device_count()
    if n < 2:
        return "two GPUs (PyTorch sees %d)" % n
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return "NCCL in PyTorch"
    try:
        import fserver_lib  # noqa: F401
    except ImportError as e:
        return "fserver_lib (%s)" % e
    return None


class End:
    """One of the two processes."""

    def __init__(self, args, rank):
        import fserver_lib as f
        import torch
        import torch.distributed as dist

        self.args, self.rank, self.f, self.torch, self.dist = args, rank, f, torch, dist
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:%d" % args.nccl_port, rank=rank, world_size=2)
        f.init()
        make = lambda: torch.empty(args.bytes, dtype=torch.uint8, device="cuda")
        self.push, self.pull = make(), make()

    def nccl(self, i):
        """A tensor there and back."""
        dist = self.dist
        if self.rank == 0:
            dist.send(self.push, 1)
            dist.recv(self.pull, 1)
        else:
            dist.recv(self.pull, 0)
            dist.send(self.pull, 0)
        self.torch.cuda.current_stream().synchronize()


class Worker(End):
    def __init__(self, args):
        super().__init__(args, 0)
        torch = self.torch
        self.exchange = self.f.prepare([self.push], [1], [self.pull], [1])
        self.a = torch.randn(args.n, args.n, dtype=torch.bfloat16, device="cuda")
        self.b = torch.randn(args.n, args.n, dtype=torch.bfloat16, device="cuda")
        self.c = torch.empty_like(self.a)

    def ours(self, i):
        self.exchange.start()
        self.exchange.wait()

    def leg(self, trip, rounds, rate):
        """Microseconds of a product, and bytes per second each way, while `rounds` round
        trips go on, not more than `rate` bytes of a second."""
        torch, done, took = self.torch, threading.Event(), []
        errors = []

        def go():
            torch.cuda.set_device(0)
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    start = time.perf_counter()
                    for i in range(rounds):
                        if rate:
                            time.sleep(max(start + i * self.args.bytes / rate - time.perf_counter(), 0))
                        trip(i)
                    took.append(time.perf_counter() - start)
            except Exception as e:
                errors.append(e)
            done.set()

        self.push.random_(0, 256)
        self.pull.zero_()
        torch.cuda.synchronize()
        if trip is None:
            threading.Timer(0.5, done.set).start()
        else:
            threading.Thread(target=go, daemon=True).start()
        times = []
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(20):
                    torch.matmul(self.a, self.b, out=self.c)
                end.record()
                while not end.query():
                    time.sleep(0.0002)  # leaves the interpreter to the other thread
                times.append(begin.elapsed_time(end) * 1000 / 20)
        if errors:
            raise errors[0]
        torch.cuda.synchronize()
        if trip is not None:
            assert torch.equal(self.push, self.pull), "wrong bytes came back"
        return statistics.median(times), rounds * self.args.bytes / took[0] if took else 0.0

    def run(self):
        args, legs = self.args, {k: [] for k in (ALONE, NCCL, EQUAL, FULL)}
        for name in (ALONE, NCCL, FULL):  # warms up
            self.leg({ALONE: None, NCCL: self.nccl, FULL: self.ours}[name], args.rounds, 0)
        for _ in range(args.repeats):
            for name in (ALONE, NCCL, EQUAL, FULL):
                rate = legs[NCCL][-1][1] if name == EQUAL else 0
                legs[name].append(self.leg({ALONE: None, NCCL: self.nccl}.get(name, self.ours), args.rounds, rate))
        self.f.wait(self.f.push_pull([self.push[:1]], [2], [self.pull[:1]], [2]))  # the end
        alone = statistics.median(t for t, _ in legs[ALONE])
        result = {}
        for name, got in legs.items():
            t = statistics.median(t for t, _ in got)
            result[name] = dict(us=t, slower=100 * (t / alone - 1), rate=statistics.median(r for _, r in got) / 1e9)
        print("RESULT " + json.dumps(result), flush=True)


def server(args):
    end = End(args, 1)

    def serve():
        end.torch.cuda.set_device(1)
        # A stream of its own: a received tensor is used again after the work of its stream,
        # and the default one waits for NCCL.
        with end.torch.cuda.stream(end.torch.cuda.Stream()):
            last = False
            while not last:
                for handler, tensors, keys in end.f.get_batch():
                    end.f.respond(tensors, handler)
                    last = keys == [2]
                del tensors

    t = threading.Thread(target=serve)
    t.start()
    for i in range(args.rounds * (1 + args.repeats)):
        end.nccl(i)
    t.join()
    return end


def child(args):
    if args.role == "scheduler":
        import fserver_lib as f

        f.init()
        f.stop()
        return
    if args.role == "worker":
        end = Worker(args)
        end.run()
    else:
        end = server(args)
    end.f.stop()
    end.dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bytes", type=int, default=16 * MIB, help="of a tensor, each way")
    p.add_argument("--rounds", type=int, default=2000, help="round trips of a leg")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("-n", type=int, default=4096, help="the matrices are n x n, of bfloat16")
    p.add_argument("--timeout", type=int, default=100, help="seconds")
    p.add_argument("--check", action="store_true", help="exit with 1 when the goal is missed")
    p.add_argument("--role", help=argparse.SUPPRESS)
    p.add_argument("--nccl-port", type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.role:
        return child(args)
    lacking = missing()
    if lacking:
        print("overlap: not measured, missing: " + lacking)
        return 0
    environ = dict(os.environ, DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_NODE_HOST="127.0.0.1",
                   DMLC_PS_ROOT_PORT=str(free_port()), DMLC_GROUP_SIZE="1", DMLC_NODE_RANK="0", STEPMESH_BAKCEND="GPU")
    port, nodes = str(free_port()), []
    for role, gpu in (("scheduler", None), ("server", 1), ("worker", 0)):
        env = dict(environ, DMLC_ROLE=role)
        env.update({"STEPMESH_BAKCEND": "CPU"} if gpu is None else {"STEPMESH_GPU": str(gpu), "DMLC_RANK_OFFSET": str(-gpu)})
        nodes.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--role", role, "--nccl-port", port, "--bytes", str(args.bytes),
                                       "--rounds", str(args.rounds), "--repeats", str(args.repeats), "-n", str(args.n)], env=env, stdout=subprocess.PIPE, text=True))
    try:
        out, _ = nodes[-1].communicate(timeout=args.timeout)
    except subprocess.TimeoutExpired:
        out = ""
        print("overlap: not finished after %d s" % args.timeout)
    finally:
        for n in nodes:
            if n is not nodes[-1] and out:
                try:
                    n.wait(10)
                except subprocess.TimeoutExpired:
                    pass
            n.kill()
    lines = [l for l in out.splitlines() if l.startswith("RESULT ")]
    if not lines:
        print(out + "overlap: no result")
        return 1
    result = json.loads(lines[0][len("RESULT "):])
    print("%d x %d x %d in bfloat16, while %.1f MiB go there and back:" % (args.n, args.n, args.n, args.bytes / MIB))
    for name, r in result.items():
        print("  %-20s %8.1f us a product, %5.1f %% slower, %6.1f GB/s each way" % (name, r["us"], r["slower"], r["rate"]))
    missed = result[EQUAL]["slower"] > GOAL or result[EQUAL]["rate"] < 0.9 * result[NCCL]["rate"]
    print("goal: at NCCL's rate at most %.1f %%: %s" % (GOAL, "missed" if missed else "reached"))
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
