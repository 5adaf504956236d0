"""Measures where the time of a push_pull goes: it pushes a matrix of bfloat16
numbers and one int32 to every server, pulls one matrix of the same size from each,
and takes the stamps of each message apart.

The defaults suit a CPU; the original's matrix is 1024 x 7168. The options are those
of the Go program of the same name. A report is printed every --report rounds and at
the end.
"""

import argparse
import os
import sys

import torch
import fserver_lib as f

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../fserver"))
from test_utils import device, gen_pull_key, gen_push_key, iterations, main, num_servers, rounds

MICROBATCHES = 3
SHOWN = ("push 1", "push 2", "pull 1")  # the handlers of a batch that are taken apart

# t are the stamps of fetch_trace; s and e the clock around the whole call. Both
# networks are in net_cost, where the offset between two hosts' clocks cancels. All
# others are differences of one clock.
LEGS = (
    ("python_req", lambda t, s, e: t[0] - s),
    ("req_send", lambda t, s, e: t[1] - t[0]),
    ("req_recv", lambda t, s, e: t[3] - t[2]),
    ("process  ", lambda t, s, e: t[4] - t[3]),
    ("rsp_send", lambda t, s, e: t[5] - t[4]),
    ("rsp_recv", lambda t, s, e: t[7] - t[6]),
    ("python_rsp", lambda t, s, e: e - t[7]),
    ("net_cost", lambda t, s, e: (t[6] - t[1]) - (t[5] - t[2])),
)


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def number(name, least, default, text):
        def parse(word):
            if int(word) < least:
                raise argparse.ArgumentTypeError(f"{word}: want at least {least}")
            return int(word)

        p.add_argument("--" + name, "-" + name, type=parse, default=default, help=text + " (default: %(default)s)")

    number("rows", 1, 128, "rows of the matrix")
    number("cols", 1, 7168, "columns of the matrix")
    number("rounds", 0, iterations(1000), "rounds to run, 0 is endless; BENCHMARK_ITER is the same")
    number("report", 1, 500, "rounds of each report")
    return p.parse_args()


def contents(args, rank):
    """The answer of the server with a node rank."""
    g = torch.Generator().manual_seed(rank)
    return torch.rand(args.rows, args.cols, generator=g).to(torch.bfloat16).to(device())


def server(args):
    f.barrier(True, False)
    buffer = contents(args, int(os.environ.get("DMLC_NODE_RANK") or 0))
    for _ in rounds(args.rounds):
        batches = f.get_batch()
        f.respond_vec(buffer, [tensors[0] for _, tensors, _ in batches], [handler for handler, _, _ in batches])


def worker(args):
    f.barrier(False, True)

    def matrix():
        return torch.rand(args.rows, args.cols, device=device()).to(torch.bfloat16)

    count = [torch.tensor([args.rows], dtype=torch.int32, device=device()) for _ in range(MICROBATCHES)]
    push = [[matrix(), n] for n in count]
    pull = [[torch.zeros_like(push[0][0]) for _ in range(num_servers())] for _ in push]
    push_keys = [[gen_push_key(i, mb) for i in range(2)] for mb in range(MICROBATCHES)]
    pull_keys = [[gen_pull_key(i, mb) for i in range(num_servers())] for mb in range(MICROBATCHES)]
    print(f"start to run {args.rounds}", flush=True)
    report = Report(int(os.environ.get("STEPMESH_GPU") or 0))
    try:
        for i in rounds(args.rounds):
            mb = i % MICROBATCHES
            start = f.get_nanosecond()
            handler = f.push_pull(push[mb], push_keys[mb], pull[mb], pull_keys[mb])
            handlers = f.get_all_handlers(handler)
            f.wait(handler)
            end = f.get_nanosecond()
            report.add([f.fetch_trace(h) for h in handlers[: len(SHOWN)]], start, end)
            if len(report.overall) == args.report:
                report.print()
    finally:
        report.print()
    # Each round would be most of its time.
    for s in range(num_servers()):
        want = contents(args, s)
        for mb in range(min(MICROBATCHES, args.rounds or MICROBATCHES)):
            assert torch.equal(pull[mb][s], want), f"micro-batch {mb}, server {s}: not what it holds"


class Report:
    """Collects nanoseconds, prints milliseconds."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.clear()

    def clear(self):
        self.overall = []
        self.parts = [[[] for _ in LEGS] for _ in SHOWN]

    def add(self, traces, start, end):
        self.overall.append(end - start)
        for part, trace in zip(self.parts, traces):
            for samples, (_, leg) in zip(part, LEGS):
                samples.append(leg(trace, start, end))

    def print(self):
        if not self.overall:
            return
        x = sorted(self.overall)
        print(f"comm bmk gpu={self.gpu}: mean={ms(sum(x) / len(x))}ms, p50={ms(percentile(x, 50))}ms, "
              f"p99={ms(percentile(x, 99))}ms, max={ms(x[-1])}ms")
        for name, part in zip(SHOWN, self.parts):
            print(f"\t gpu={self.gpu} {name}:")
            for (leg, _), samples in zip(LEGS, part):
                x = sorted(samples)
                print(f"\t\t{leg}\t{ms(sum(x) / len(x))}\t{ms(percentile(x, 50))}\t{ms(percentile(x, 99))}\t"
                      + " ".join(ms(v) for v in x[:-4:-1]))
        print(flush=True)
        self.clear()


def ms(ns):
    return f"{ns / 1e6:.3f}"


def percentile(x, p):
    """NumPy's: between two of the sorted samples it interpolates."""
    at = p / 100 * (len(x) - 1)
    i = int(at)
    return x[i] + (at - i) * (x[min(i + 1, len(x) - 1)] - x[i])


if __name__ == "__main__":
    arguments = options()
    try:
        main(lambda: worker(arguments), lambda: server(arguments))
    except KeyboardInterrupt:
        sys.exit(130)
