"""The cost of Python beyond Go, in one run:

- push_pull + wait on a worker, against the same server in Go;
- the same of an exchange that is prepared, start + wait;
- get_batch to respond on a server that has batches waiting, so that its own
  work is measured, and not that of the goroutines that receive for it.

Clusters on the loopback take turns, block by block, so that other work of the machine
affects all alike. --check exits with 1 when a limit is passed: at p50, 15 us
for the worker, 8 us for its prepared exchange, 10 us for the server.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(1, os.path.join(ROOT, "tests/python"))
import harness  # noqa: E402
LIMITS = {"worker": 15, "prepared": 8, "server": 10}  # us at p50


def tensors(library, size):
    module = importlib.import_module(library)
    return module.zeros(size, dtype=module.uint8), module.zeros(size, dtype=module.uint8)


def serve(f, hold):
    now = f.get_nanosecond
    try:
        while not hold:
            for handler, batch, _ in f.get_batch():
                f.respond(batch, handler)
    except f.Error:
        os._exit(0)  # the worker has left
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = now()
            for handler, batch, _ in f.get_batch():
                f.respond(batch, handler)
            times.append(now() - start)
        print(json.dumps(times), flush=True)
    os._exit(0)


def work(f, library, size, prepared):
    push, pull = tensors(library, size)
    now = f.get_nanosecond
    x = f.prepare([push], [1], [pull], [2])
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = now()
            if prepared:
                x.start()
                x.wait()
            else:
                f.wait(f.push_pull([push], [1], [pull], [2]))
            times.append(now() - start)
        print(json.dumps(times), flush=True)
    os._exit(0)


def node(role, library, size, hold, prepared):
    """One node in Python."""
    if library:
        importlib.import_module(library)
    import fserver_lib as f

    f.init()
    if role == "server":
        serve(f, hold)
    elif role == "worker":
        work(f, library, size, prepared)


class Cluster:
    def __init__(self, name, commands):
        """commands: of scheduler, server and worker."""
        self.name = name
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "STEPMESH_"))}
        env.update(DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=str(harness.free_port()),
                   DMLC_NODE_HOST="127.0.0.1", STEPMESH_BAKCEND="CPU")
        env.setdefault("PS_VERBOSE", "-1")
        self.nodes = [subprocess.Popen(command, env=dict(env, DMLC_ROLE=role), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True, bufsize=1)
                      for role, command in zip(("scheduler", "server", "worker"), commands)]
        self.server, self.worker = self.nodes[1:]
        self.times = []

    def tell(self, node, count):
        """Has a node do something so many times. Returns how long each took."""
        node.stdin.write(f"{count}\n")
        node.stdin.flush()
        line = node.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: a node has ended")
        return json.loads(line)

    def round_trips(self, count):
        return self.tell(self.worker, count)

    def answers(self, count):
        self.tell(self.worker, -count)
        time.sleep(0.05)  # until all have arrived
        times = self.tell(self.server, count)
        self.tell(self.worker, 0)
        return times

    def end(self):
        for p in self.nodes:
            p.kill()
        for p in self.nodes:
            p.wait()


def p50(ns):
    return sorted(ns)[len(ns) // 2] / 1e3


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bytes", type=int, default=1024, help="bytes of the tensors (default: %(default)s)")
    p.add_argument("--blocks", type=int, default=20, help="turns of each cluster (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=500, help="round trips of a turn (default: %(default)s)")
    p.add_argument("--library", dest="arrays", default="torch", choices=("torch", "numpy"), help="whose tensors (default: %(default)s)")
    p.add_argument("--go", default=os.path.join(ROOT, "bin", "python_overhead"), help="the Go program (default: %(default)s, built)")
    p.add_argument("--check", action="store_true", help="status 1 when a limit is passed")
    p.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--prepared", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.node:
        return node(os.environ["DMLC_ROLE"], args.arrays, args.bytes, args.hold, args.prepared)
    if args.go == p.get_default("go"):
        subprocess.run(["tools/go.sh", "build", "-o", args.go, "./tests/benchmark/python_overhead"], cwd=ROOT, check=True)
    go = [args.go, "-bytes", str(args.bytes)]
    python = [sys.executable, os.path.abspath(__file__), "--node", "--library", args.arrays, "--bytes", str(args.bytes)]
    pairs = {"worker": (Cluster("Go worker", (go, go, go)), Cluster("Python worker", (go, go, python))),
             "prepared": (Cluster("Go prepared", (go, go, go + ["-prepared"])), Cluster("Python prepared", (go, go, python + ["--prepared"]))),
             "server": (Cluster("Go server", (go, go + ["-hold"], go)), Cluster("Python server", (go, python + ["--hold"], go)))}
    measure = {"worker": lambda c: c.round_trips(args.rounds), "prepared": lambda c: c.round_trips(args.rounds), "server": lambda c: c.answers(args.rounds)}
    try:
        for block in range(-2, args.blocks):  # two to warm up
            for kind, clusters in pairs.items():
                for c in clusters:
                    times = measure[kind](c)
                    c.times += times if block >= 0 else []
    finally:
        for clusters in pairs.values():
            for c in clusters:
                c.end()
    print(f"{args.arrays}, {args.bytes} bytes each way, {args.blocks * args.rounds} times each, p50 in us")
    passed = False
    for kind, what in (("worker", "push_pull + wait"), ("prepared", "start + wait"), ("server", "get_batch to respond")):
        base, own = (p50(c.times) for c in pairs[kind])
        passed = passed or own - base > LIMITS[kind]
        print(f"{what:20s} Go {base:6.1f}  Python {own:6.1f}  {own - base:+5.1f} (limit {LIMITS[kind]})")
    if args.check and passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
