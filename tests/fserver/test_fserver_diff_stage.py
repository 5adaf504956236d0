"""Three stages, each with a key and buffers of its own, one after the other. The
servers echo. BENCHMARK_ITER replaces the 100 iterations."""

import torch
import fserver_lib as f
from test_utils import arguments, device, iterations, main, num_servers, rounds

STAGES = 3
SHAPE = (128, 4)


def server():
    f.barrier(True, False)
    for _ in rounds(iterations(100) * STAGES):
        for handler, tensors, _ in f.get_batch():
            f.respond(tensors, handler, True)


def worker():
    f.barrier(False, True)

    def tensor():
        return torch.rand(SHAPE, dtype=torch.float32, device=device()).to(torch.bfloat16)

    push = [tensor() for _ in range(STAGES)]
    pull = [[tensor() for _ in range(num_servers())] for _ in range(STAGES)]
    for i in rounds(iterations(100)):
        for stage in range(STAGES):
            push[stage].copy_(tensor())
            handler = f.push_pull([push[stage]], [stage], pull[stage], [stage] * num_servers())
            print(f"iter: {i}, stage: {stage}, handler: {handler}")
            f.wait(handler)
            for s, got in enumerate(pull[stage]):
                assert torch.equal(push[stage], got), f"iteration {i}, stage {stage}, server {s}: not what was pushed"
    print("worker test done")


if __name__ == "__main__":
    arguments()
    main(worker, server)
