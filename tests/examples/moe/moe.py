"""A mixture-of-experts model of transformers (Mixtral, random weights) with attention and experts in processes of their own.

    python3 tests/examples/moe/moe.py           # or make run-moe: 2 attention processes, 2 expert processes
    python3 tests/examples/moe/moe.py --kill    # one expert process is killed in the middle, and started again

Without DMLC_ROLE the program is the driver: it decodes with the whole model, starts the cluster, and compares the tokens.
Each attention process (worker) decodes half of the prompts. It has all weights but those of the experts. In each layer
it pushes the hidden states and the router's choice to every expert process (server), and pulls a partial sum from each.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time

import torch
from transformers import DynamicCache, MixtralConfig, MixtralForCausalLM

PROMPTS, PROMPT, WORKERS, SERVERS = 8, 8, 2, 2
CONFIG = dict(vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
              num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=1024)


def model():
    """Makes the same model in every process."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    return MixtralForCausalLM(MixtralConfig(**CONFIG)).eval()


def prompts():
    return torch.randint(0, CONFIG["vocab_size"], (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(2))


def moe_of(layer):
    """Returns the mixture-of-experts block of a decoder layer; its name depends on the version of transformers."""
    return getattr(layer, "block_sparse_moe", None) or layer.mlp


def expert(moe, e, x):
    """Computes expert e of a block for the rows of x."""
    if hasattr(moe.experts, "gate_up_proj"):  # transformers 5: the weights of all experts in one tensor
        gate, up = torch.nn.functional.linear(x, moe.experts.gate_up_proj[e]).chunk(2, dim=-1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, moe.experts.down_proj[e])
    return moe.experts[e](x)


def partial_sum(moe, own, x, chosen, weights):
    """Returns the weighted sum of the experts in own, for each row of x; zero where the router chose others."""
    out = torch.zeros_like(x)
    for e in own:
        row, slot = torch.where(chosen == e)
        if len(row):
            out.index_add_(0, row, expert(moe, e, x[row]) * weights[row, slot, None])
    return out


def route(moe, x):
    """Returns the experts that the router chooses for each row, and their weights."""
    scores = torch.nn.functional.softmax(torch.nn.functional.linear(x, moe.gate.weight), dim=-1)
    weights, chosen = torch.topk(scores, CONFIG["num_experts_per_tok"], dim=-1)
    return chosen.to(torch.int32), weights / weights.sum(dim=-1, keepdim=True)


def replace_experts(m, run):
    """Makes the block of each layer call run(layer, moe, x, chosen, weights)."""
    for number, layer in enumerate(m.model.layers):
        moe = moe_of(layer)

        def forward(hidden, number=number, moe=moe, old=hasattr(layer, "block_sparse_moe")):
            x = hidden.reshape(-1, hidden.shape[-1]).contiguous()
            y = run(number, moe, x, *route(moe, x)).view_as(hidden)
            return (y, None) if old else y  # transformers 4 also returns the router's scores

        moe.forward = forward


def decode(m, ids, tokens, progress=lambda step: None):
    """Decodes so many tokens greedily for each row of ids. Returns them, and the seconds of all steps but the first."""
    out, past, step_ids = [], DynamicCache(), ids
    for step in range(tokens):
        r = m(input_ids=step_ids, past_key_values=past, use_cache=True)
        step_ids = r.logits[:, -1].argmax(dim=-1, keepdim=True)
        out.append(step_ids)
        progress(step)
        if step == 0:
            begun = time.perf_counter()
    return torch.cat(out, dim=1), time.perf_counter() - begun


def worker(f, rank, count):
    m, waited = model(), 0.0

    def remote(number, moe, x, chosen, weights):
        nonlocal waited
        begun = time.perf_counter()
        parts = [torch.empty_like(x) for _ in range(SERVERS)]
        for attempt in range(6000):
            try:
                f.wait(f.push_pull([x, chosen, weights], [3 * number, 3 * number + 1, 3 * number + 2], parts, [number] * SERVERS))
                break
            except ConnectionError as err:  # a server is lost: ask again until another process has its place
                if attempt == 0:
                    print(err, flush=True)
                time.sleep(0.01)
        else:
            raise SystemExit("no process has taken the place of the lost server within a minute")
        waited += time.perf_counter() - begun
        return sum(parts)

    def progress(step):
        nonlocal waited
        waited = waited if step else 0.0
        print("step", step, flush=True)

    replace_experts(m, remote)
    tokens, seconds = decode(m, prompts().chunk(WORKERS)[rank], count, progress)
    print("result", json.dumps({"rank": rank, "tokens": tokens.tolist(), "seconds": seconds, "waited": waited}), flush=True)


def server(f, rank, count):
    m, own = model(), range(rank, CONFIG["num_local_experts"], SERVERS)
    while True:  # get_batch ends the program when all workers are in stop()
        for handler, (x, chosen, weights), keys in f.get_batch(any=True):
            f.respond([partial_sum(moe_of(m.model.layers[int(keys[0]) // 3]), own, x, chosen, weights)], handler)


def node(count):
    import fserver_lib as f

    f.init()
    role = {"worker": worker, "server": server}.get(os.environ["DMLC_ROLE"])
    if role:
        role(f, int(os.environ["DMLC_NODE_RANK"]), count)
    f.stop()


def driver(kill, count):
    m = model()
    replace_experts(m, lambda number, moe, *args: partial_sum(moe, range(CONFIG["num_local_experts"]), *args))
    whole, seconds = decode(m, prompts(), count)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, DMLC_NUM_WORKER=str(WORKERS), DMLC_NUM_SERVER=str(SERVERS), DMLC_PS_ROOT_URI="127.0.0.1",
               DMLC_PS_ROOT_PORT=str(port), DMLC_NODE_HOST="127.0.0.1", DMLC_ENABLE_RDMA="zmq", STEPMESH_BAKCEND="CPU")
    nodes, results, lock = {}, {}, threading.Lock()

    def start(role, rank):
        p = subprocess.Popen([sys.executable, __file__, "--tokens", str(count)], stdout=subprocess.PIPE, text=True,
                             env=dict(env, DMLC_ROLE=role, DMLC_NODE_RANK=str(rank)))
        nodes[role, rank] = p
        return p

    def follow(rank, p):
        for line in p.stdout:
            word, _, rest = line.partition(" ")
            if word == "result":
                results[rank] = json.loads(rest)
            elif word == "step" and int(rest) == count // 2:
                with lock:
                    if kill and rank == 0:
                        nodes["server", 1].kill()
                        start("server", 1)
                        print("killed expert process 1 at token", count // 2, "and started another one in its place")
            elif word != "step":
                print("[worker %d] %s" % (rank, line), end="")

    start("scheduler", 0)
    followers = [threading.Thread(target=follow, args=(r, start("worker", r))) for r in range(WORKERS)]
    for r in range(SERVERS):
        start("server", r)
    for t in followers:
        t.start()
    for t in followers:
        t.join()
    status = [p.wait(timeout=60) for p in nodes.values()]
    if any(status) or len(results) < WORKERS:
        sys.exit("processes ended with status %s, results from %d of %d workers" % (status, len(results), WORKERS))
    split = [row for r in range(WORKERS) for row in results[r]["tokens"]]
    same = sum(a == b for a, b in zip(split, whole.tolist()))
    took, waited = (max(r[k] for r in results.values()) for k in ("seconds", "waited"))
    decoded = PROMPTS * (count - 1)
    print("one process:                 %7.1f tokens/s" % (decoded / seconds))
    print("2 attention, 2 expert procs: %7.1f tokens/s, %.0f %% of the time waiting for experts" % (decoded / took, 100 * waited / took))
    print("%d of %d prompts: the same %d tokens as the whole model" % (same, PROMPTS, count))
    sys.exit(same != PROMPTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", action="store_true", help="kill one expert process in the middle, and start another one in its place")
    parser.add_argument("--tokens", type=int, default=64, help="how many tokens to decode for each prompt")
    args = parser.parse_args()
    node(args.tokens) if "DMLC_ROLE" in os.environ else driver(args.kill, args.tokens)
