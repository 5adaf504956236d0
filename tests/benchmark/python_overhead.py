"""What Python costs beyond Go: push_pull + wait on a worker, get_batch to respond on
a server, in one run.

Three clusters run on the loopback: Go with Go, a Python worker with a Go server, a
Go worker with a Python server. They take turns, block by block, so that what the
machine does meanwhile hits all alike. --check exits with 1 when a limit is passed:
15 us at p50 for the worker, 10 us for the server.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIMITS = {"worker": 15, "server": 10}  # us at p50


def tensors(library, size):
    module = importlib.import_module(library)
    return module.zeros(size, dtype=module.uint8), module.zeros(size, dtype=module.uint8)


def serve(f):
    from fserver_lib import ConnectionError, Error

    try:
        while True:
            for handler, batch, _ in f.get_batch():
                f.respond(batch, handler)
    except (ConnectionError, Error):
        os._exit(0)  # the worker has left


def work(f, library, size):
    push, pull = tensors(library, size)
    now = f.get_nanosecond
    for line in sys.stdin:
        whole, server = [], []
        for _ in range(int(line)):
            start = now()
            h = f.push_pull([push], [1], [pull], [2])
            f.wait(h)
            whole.append(now() - start)
            trace = f.fetch_trace(h + 1)
            server.append(trace[4] - trace[3])
        print(json.dumps({"Whole": whole, "Server": server}), flush=True)
    os._exit(0)


def node(role, library, size):
    """One node in Python."""
    if library:
        importlib.import_module(library)
    import fserver_lib as f

    f.init()
    if role == "server":
        serve(f)
    elif role == "worker":
        work(f, library, size)


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    def __init__(self, name, go, python, roles):
        """roles: which of worker and server are Python."""
        self.name = name
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "STEPMESH_"))}
        env.update(DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=str(free_port()),
                   DMLC_NODE_HOST="127.0.0.1", STEPMESH_BAKCEND="CPU")
        env.setdefault("PS_VERBOSE", "-1")
        self.nodes = []
        for role in ("scheduler", "server", "worker"):
            command = python if role in roles else go
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) if role == "worker" else {}
            self.nodes.append(subprocess.Popen(command, env=dict(env, DMLC_ROLE=role), **pipes))
        self.whole, self.server = [], []

    def measure(self, count, keep=True):
        worker = self.nodes[-1]
        worker.stdin.write(f"{count}\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: the worker has ended")
        times = json.loads(line)
        if keep:
            self.whole += times["Whole"]
            self.server += times["Server"]

    def end(self):
        for p in self.nodes:
            p.kill()
            p.wait()


def p50(ns):
    return sorted(ns)[len(ns) // 2] / 1e3


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bytes", type=int, default=1024, help="bytes of the tensors (default: %(default)s)")
    p.add_argument("--blocks", type=int, default=20, help="turns of each cluster (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=500, help="round trips of a turn (default: %(default)s)")
    p.add_argument("--library", default="torch", choices=("torch", "numpy"), help="whose tensors (default: %(default)s)")
    p.add_argument("--go", default=os.path.join(ROOT, "bin", "python_overhead"), help="the Go program (default: %(default)s, built)")
    p.add_argument("--check", action="store_true", help="status 1 when a limit is passed")
    p.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.node:
        return node(os.environ["DMLC_ROLE"], args.library, args.bytes)
    if args.go == p.get_default("go"):
        subprocess.run(["go", "build", "-o", args.go, "./tests/benchmark/python_overhead"], cwd=ROOT, check=True)
    go = [args.go, "-bytes", str(args.bytes)]
    python = [sys.executable, os.path.abspath(__file__), "--node", "--library", args.library, "--bytes", str(args.bytes)]
    clusters = [Cluster("Go", go, python, ()), Cluster("Python worker", go, python, ("worker",)),
                Cluster("Python server", go, python, ("server",))]
    try:
        for c in clusters:
            c.measure(2 * args.rounds, keep=False)
        for _ in range(args.blocks):
            for c in clusters:
                c.measure(args.rounds)
    finally:
        for c in clusters:
            c.end()
    base, worker, server = clusters
    print(f"{args.library}, {args.bytes} bytes each way, {len(base.whole)} round trips each, p50 in us")
    print(f"{'':15s} round trip  of these, pull to answer in the server")
    for c in clusters:
        print(f"{c.name:15s} {p50(c.whole):10.1f}  {p50(c.server):10.1f}")
    extra = {"worker": p50(worker.whole) - p50(base.whole), "server": p50(server.server) - p50(base.server)}
    print(f"push_pull + wait from Python: {extra['worker']:+.1f} us (limit {LIMITS['worker']})")
    print(f"get_batch to respond in Python: {extra['server']:+.1f} us (limit {LIMITS['server']}), "
          f"{p50(server.whole) - p50(base.whole):+.1f} us in the round trip")
    if args.check and any(extra[k] > LIMITS[k] for k in LIMITS):
        sys.exit(1)


if __name__ == "__main__":
    main()
