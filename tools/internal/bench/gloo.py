# One rank of torch.distributed over gloo. It makes the calls that lines of its standard input ask
# for, "OP - BYTES ITERATIONS", and prints the nanoseconds of each. stepaf bench collective starts it.
import json
import sys
import time


def say(**what):
    print(json.dumps(what), flush=True)


try:
    import torch
    import torch.distributed as dist
except ImportError as e:
    say(error=str(e))
    sys.exit()


def calls(op, count, n):
    one, many, out = torch.ones(count), torch.ones(count * n), torch.ones(count * n)
    parts = list(out.chunk(n)) if count else []
    return {
        "AllGather": lambda: dist.all_gather(parts, one),
        "AllToAll": lambda: dist.all_to_all_single(out, many),
        "Broadcast": lambda: dist.broadcast(one, 0),
        "ReduceScatter": lambda: dist.reduce_scatter(one, parts),
        "AllReduce": lambda: dist.all_reduce(one),
        "Barrier": dist.barrier,
    }[op]


def main():
    rank, n, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=n)
    say(ns=[])
    for line in sys.stdin:
        op, _, size, iters = line.split()
        ns = []
        try:
            call = calls(op, int(size) // 4, n)
            for _ in range(int(iters)):
                start = time.perf_counter_ns()
                call()
                ns.append(time.perf_counter_ns() - start)
        except RuntimeError as e:  # gloo lacks some calls
            say(error=str(e))
            continue
        say(ns=ns)


main()
