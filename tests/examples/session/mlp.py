"""A small sharded MLP: relu(x @ a) @ b, where each rank has some columns of a and as many rows of
b, so that its part of the result is a sum's. It is compared with the whole, computed here.

    bin/stepaf launch -n 1 -s 4 -- python3 tests/examples/session/mlp.py     # or make run-session
"""

import os

import fserver_lib as f
import numpy as np
from fserver import session

IN, HIDDEN, OUT, ROWS, STEPS = 64, 256, 32, 8, 5


def rank():
    """Functions of a rank, which has a part of the weights."""

    def load(a, b, ranks):
        own = int(os.environ["DMLC_NODE_RANK"])
        width = HIDDEN // ranks
        part = slice(own * width, (own + 1) * width)
        return a[:, part].copy(), b[part].copy()

    def forward(weights, x):
        a, b = weights
        return np.maximum(x @ a, 0) @ b

    session.serve({"load": load, "forward": forward})


def controller():
    random = np.random.default_rng(1)
    a, b = random.normal(size=(IN, HIDDEN)), random.normal(size=(HIDDEN, OUT))
    with session.open() as s:
        weights = s.call("load", s.broadcast(s.copy_to(a)), s.broadcast(s.copy_to(b)), s.ranks)
        x = random.normal(size=(ROWS, IN))
        for step in range(STEPS):
            parts = s.call("forward", weights, s.broadcast(s.copy_to(x)))
            y = sum(s.get(parts, r) for r in range(s.ranks))
            if not np.allclose(y, np.maximum(x @ a, 0) @ b):
                raise SystemExit("step %d: the ranks' sum differs from the whole" % step)
            x = x + 0.01 * y.mean()
        print("[session] %d steps on %d ranks, each with %d of %d hidden columns: as the whole" % (
            STEPS, s.ranks, HIDDEN // s.ranks, HIDDEN), flush=True)


f.init()
try:
    {"server": rank, "worker": controller}[os.environ["DMLC_ROLE"]]()
except BaseException:
    f._exit()  # the others hear of it at once
    raise
f.stop()
