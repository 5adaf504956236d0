"""Each worker pushes three tensors and pulls their sum from every server."""

import torch
import fserver_lib as f
from test_utils import arguments, device, main, num_servers

COLUMNS = 8192


def server():
    batches = []
    while not batches:
        batches = f.get_batch()
    print(batches)
    for handler, tensors, _ in batches:
        f.respond([sum(tensors)], handler)


def worker():
    push = [torch.rand(1, COLUMNS, device=device()) for _ in range(3)]
    pull = [torch.zeros(1, COLUMNS, device=device()) for _ in range(num_servers())]
    f.wait(f.push_pull(push, [0, 1, 2], pull, [0] * len(pull)))
    for i, got in enumerate(pull):
        assert torch.allclose(sum(push), got), f"server {i}: not the sum of what was pushed"
    print("worker test done")


if __name__ == "__main__":
    arguments()
    main(worker, server)
