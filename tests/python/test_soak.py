"""Many push_pulls of random shapes: every value is right, and memory stays flat.

COUNT is how many (2000). FULL=1 is COUNT=100000.
"""

import gc
import os
import random

import arrays

COUNT = int(os.environ.get("COUNT") or (100000 if os.environ.get("FULL") == "1" else 2000))
WARM = COUNT // 4
GROWTH = 8 << 20  # bytes between the warm-up and the end


def resident():
    gc.collect()
    with open("/proc/self/statm") as s:
        return int(s.read().split()[1]) * 4096


POOL = arrays.pattern(0, "uint8", (1 << 18,))


def batch(i):
    """The pushes of round i: dtype, shape and bytes of each. The answers are these in
    reverse order."""
    r = random.Random(i)
    out = []
    for _ in range(r.choice((1, 1, 2, 3, 4))):
        dtype = r.choice(("uint8", "int32", "float32", "int64"))
        shape = tuple(r.choice((0, 1, 3, 8, 17, 64)) if r.random() < 0.1 else r.randint(1, 20) for _ in range(r.randrange(4)))
        n = arrays.size(dtype, shape)
        at = r.randrange(1024) * 8
        if n > len(POOL) - at:
            shape, n = (5,), arrays.size(dtype, (5,))
        out.append((dtype, shape, POOL[at : at + n]))
    return out


def worker(n):
    seen = []
    for i in range(n.args):
        if i in (WARM, WARM + (n.args - WARM) // 2):
            seen.append(resident())
        what = batch(i)
        push = [n.lib.make(*w) for w in what]
        pull = [n.lib.zeros(d, s) for d, s, _ in what[::-1]] * 1
        keys = [i * 10 % 70 + k for k in range(len(what))]
        n.f.wait(n.f.push_pull(push, keys, pull, keys))
        for got, (_, _, data) in zip(pull, what[::-1]):
            assert n.lib.bytes(got) == data, f"round {i}"
    seen.append(resident())
    return seen


def server(n):
    seen = []
    for i in range(n.args):
        if i in (WARM, WARM + (n.args - WARM) // 2):
            seen.append(resident())
        (handler, tensors, _), = n.f.get_batch()
        for t, (dtype, shape, data) in zip(tensors, batch(i)):
            assert n.lib.shape(t) == shape and n.lib.bytes(t) == data, f"round {i}"
        n.f.respond(tensors[::-1], handler)
    seen.append(resident())
    return seen


def test_soak(cluster, lib, capfd):
    if lib == "jax":
        lib = "numpy"  # they differ in how the tensors are made
    results = cluster(lib=lib).run(worker, server, COUNT, timeout=60 + COUNT // 50)
    with capfd.disabled():
        print(f"\n{lib}, {COUNT} rounds: resident MiB after {WARM}, half of the rest, all:")
        for name, seen in zip(("worker", "server"), results):
            print(f"  {name} {' '.join(f'{s / 2**20:.1f}' for s in seen)}")
    for name, seen in zip(("worker", "server"), results):
        assert seen[-1] - seen[0] < GROWTH, f"{name} grew from {seen[0]} to {seen[-1]} bytes"
