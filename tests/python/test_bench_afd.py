"""The Python processes of stepaf bench afd. Without GPUs, messages make the exchanges of the forms that need GPUs."""

import collections
import json
import os
import runpy
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="the processes use PyTorch")
from harness import HERE, OURS, by_hand, within  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(HERE))
PROGRAM = os.path.join(ROOT, "tools/internal/bench/afd.py")
PUSH, PULL, MICRO_BATCHES, LAYERS = 5000, 9001, 2, 3
FORMS = "push_pull", "prepared", "hosts", "streams", "graphs"


class ByMessages:
    """An exchange of prepare_streams that messages make."""

    received = collections.defaultdict(dict)  # by key: the batch of each worker

    def __init__(self, n, push, push_keys, pull, pull_keys, spoiled, host, timeout_ms):
        self.n, self.push, self.pull, self.spoiled = n, push, pull, spoiled
        first = 10**8 * (n.rank + 1)
        self.keys, self.call = push_keys, (push, [first + push_keys[0]], pull, [first + k for k in pull_keys])

    def send(self):
        if self.n.role == "worker":
            self.handler = self.n.f.push_pull(*self.call)
            return
        for handler, out in zip(self.handlers, self.pull):
            if self.spoiled:
                out[-1] += 1
            self.n.f.respond([out], handler)

    def receive(self):
        if self.n.role == "worker":
            self.n.f.wait(self.handler)
            return
        batches = self.received[self.keys[0]]
        while len(batches) < self.n.workers:
            for handler, tensors, keys in self.n.f.get_batch(any=True):
                worker, key = divmod(keys[0], 10**8)
                self.received[key][worker - 1] = handler, tensors[0]
        self.handlers = []
        for worker, into in enumerate(self.push):
            into.copy_(batches[worker][1])
            self.handlers.append(batches[worker][0])
        batches.clear()

    def check(self):
        pass


def together(n, lines):
    """Yields lines. All nodes begin each at the same time, as those of stepaf do."""
    for line in lines:
        n.f.barrier(True, True)
        yield line


@by_hand
def node(n):
    lines, spoiled = n.args

    def prepare(*args, **named):
        return ByMessages(n, *args, spoiled=spoiled and n.role == "server", **named)

    n.f.prepare_streams = prepare
    sys.argv = [PROGRAM, "fserver_lib", "cpu", *map(str, (PUSH, PULL, MICRO_BATCHES, LAYERS, n.workers, n.servers)), "-", str(n.rank)]
    sys.stdin = together(n, lines)
    runpy.run_path(PROGRAM)


def test_forms(cluster):
    lines = ["alone - 1000 2"]
    for form in FORMS:
        for count in (1, 2, 5):
            lines.append(f"calls {form} 0 {count}")
        lines += [f"steps {form} 1000 2", f"steps {form} 1000 1"]
    c = cluster(lib="torch", workers=2, servers=2)
    workers, _ = c.start(node, node, [lines, False])
    c.finish()
    for p in workers:
        answers = [json.loads(line) for line in p.out]
        assert answers[0] == {} and len(answers) == 1 + len(lines), p.report()
        for line, got in zip(lines, answers[1:]):
            ns = got["ns"]
            assert len(ns) == int(line.split()[-1]) and min(ns) > 0, (line, ns)
            assert line.startswith("calls") or min(ns) >= 1000 * LAYERS * MICRO_BATCHES, (line, ns)


@pytest.mark.parametrize("line", ["calls hosts 0 2", "steps hosts 1000 2"])
def test_wrong_values(cluster, line):
    c = cluster(lib="torch", workers=1, servers=1)
    (worker,), _ = c.start(node, node, [[line], True])
    assert worker.wait() == 1
    assert "hosts: wrong values after " in worker.report()


@pytest.mark.long
@pytest.mark.still(160)  # many processes import PyTorch
def test_command(tmp_path):
    """The command measures processes in Go, in Python, and of torch.distributed."""
    stepaf = shutil.which("stepaf") or os.path.join(ROOT, "bin", "stepaf")
    if not os.path.exists(stepaf):
        pytest.skip("no bin/stepaf: make build")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    command = [stepaf, "bench", "afd", "--json", "--python", sys.executable, "--van", "local", "-n", "2", "-s", "2", "--push", str(PUSH), "--pull", str(PULL),
               "--iters", "20", "--rounds", "2", "--layers", "2", "--micro-batches", "2", "--steps", "2", "--compute", "20us"]
    with open(tmp_path / "progress", "w+") as progress:
        try:
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=progress, text=True, timeout=within(170))
        finally:
            progress.seek(0)
            print(progress.read())  # pytest shows it if the test fails
    assert done.returncode == 0
    report = json.loads(done.stdout)
    both = [(of, form) for of in ("Go", "Python") for form in ("push_pull", "prepared")] + [("PyTorch", "torch")]
    trips = [(x.get("from"), x["form"]) for x in report["round_trips"]]
    assert trips == [x for x in [(None, "floor"), *both] for _ in range(2)], done.stdout
    assert [(x["from"], x["form"]) for x in report["steps"]] == both, done.stdout
    assert report["checked"] and "no_python" not in report and "no_torch" not in report
