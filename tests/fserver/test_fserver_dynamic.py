"""Three stages whose tensors have another number of rows each time. The servers
echo. BENCHMARK_ITER replaces the 2000 iterations."""

import random

import torch
import fserver_lib as f
from test_utils import arguments, device, iterations, main, num_servers, rounds

STAGES = 3
ROWS, COLUMNS = 128, 7196


def server():
    f.barrier(True, False)
    for _ in rounds(iterations(2000) * STAGES):
        for handler, tensors, _ in f.get_batch():
            f.respond(tensors, handler, True)


def worker():
    f.barrier(False, True)

    def tensor():
        return torch.rand(ROWS, COLUMNS, device=device()).to(torch.bfloat16)

    push = [tensor() for _ in range(STAGES)]
    pull = [[torch.zeros_like(t) for _ in range(num_servers())] for t in push]
    for i in rounds(iterations(2000)):
        for stage in range(STAGES):
            # Some transports size their buffers by the first tensor of a key.
            rows = ROWS if i == 0 else random.randint(1, ROWS)
            out = push[stage][:rows]
            out.view(torch.int16).add_(1)  # other values than in the last round, all numbers
            into = [t[:rows] for t in pull[stage]]
            keys = [1000 + stage + s for s in range(num_servers())]
            handler = f.push_pull([out], [stage + 1000000], into, keys)
            f.wait(handler, 500000)
            f.fetch_trace(handler)
            for s, got in enumerate(into):
                same = torch.equal(out.view(torch.int16), got.view(torch.int16))
                assert same, f"iteration {i}, stage {stage}, server {s}: not what was pushed"
    print("worker test done")


if __name__ == "__main__":
    arguments()
    main(worker, server)
