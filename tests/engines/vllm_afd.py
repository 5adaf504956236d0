#!/usr/bin/env python3
"""vLLM with afd-plugin: the connector of this library beside the plugin's own.

A small DeepSeek-V2 of random weights decodes the same prompts, greedily: whole in one process, with its attention and FFN
ranks over the plugin's NCCL connector, and over StepMeshAFDConnector, in CUDA streams and by messages. "repaired" is the NCCL
connector without an import that fails at each layer (fserver/connectors/vllm_plugin.py). All must give the same tokens.

In each round every engine is started, measured and ended, one after the other: an idle FFN rank of the NCCL connector would
keep a kernel on the GPU of the others. The table has the time for each output token, and its ratio to that of one engine
(--over) in the same round. --replace kills an FFN rank in the middle of an answer, and starts another.

It needs vLLM 0.26, afd-plugin, this library's Python module, and GPUs. Where one is missing the status is 77, and the
output says what.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

PROGRAM = os.path.abspath(__file__)
MISSING = 77
VLLM = "0.26."
NAMES = {"whole": None, "nccl": "P2pNcclAFDConnector", "repaired": "P2pNcclAFDConnector", "streams": "StepMeshAFDConnector", "messages": "StepMeshAFDConnector"}
PLUGINS = {"whole": "", "nccl": "afd"}  # VLLM_PLUGINS; default: "afd,stepaf"
HALF, DONE = "engines: half", "engines: done"  # lines of an attention rank that the parent waits for
LAYERS, HIDDEN, EXPERTS, HEADS, VOCABULARY = 8, 2048, 16, 16, 4096
PROMPT = 24  # tokens
LONGEST = 1024
STOP = 20
REFUSALS = ("currently requires", "Duplicate GPU")  # of the plugin's NCCL connector: fewer attention than FFN ranks; two ranks of one GPU


# The requirements.


def missing(gpus):
    """Returns a line for each thing that a run needs and this machine has not."""
    lines = []

    def found(module, why):
        if importlib.util.find_spec(module) is None:
            lines.append("%s: no Python module of that name: %s" % (module, why))
            return False
        return True

    if found("vllm", "install vLLM 0.26"):
        version = _version("vllm")
        if not version.startswith(VLLM):
            lines.append("vllm: version %s, want %sx, for which afd-plugin is written" % (version, VLLM))
    found("afd_plugin", "install afd-plugin (vllm-project/afd-plugin)")
    ours = [found(name, "install this library's wheel, or run make fserver and set PYTHONPATH=bin/python") for name in ("fserver", "fserver_lib")]
    if all(ours):
        if "stepaf" not in _entry_points():
            lines.append("fserver: vLLM has no entry point of this library: install its wheel (make wheel)")
    found("safetensors", "install safetensors")
    if found("torch", "install PyTorch with CUDA"):
        import torch

        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if seen <= max(gpus):
            lines.append("GPUs: PyTorch sees %d, want %d (--gpus %s)" % (seen, max(gpus) + 1, ",".join(map(str, gpus))))
    return lines


def _entry_points():
    """The names of vLLM's plugins in this Python."""
    points = importlib.metadata.entry_points()
    group = "vllm.general_plugins"
    return [p.name for p in (points.select(group=group) if hasattr(points, "select") else points.get(group, []))]


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# The model.


def model(path, layers):
    """Writes a DeepSeek-V2 of random weights in the form of Hugging Face. All parts of the model contribute to its output, so
    that a wrong row changes tokens."""
    import torch
    from safetensors.torch import save_file

    config = dict(
        architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", dtype="bfloat16", vocab_size=VOCABULARY, hidden_size=HIDDEN,
        intermediate_size=4096, moe_intermediate_size=704, num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        n_shared_experts=2, n_routed_experts=EXPERTS, num_experts_per_tok=4, first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=False,
        scoring_func="softmax", topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0, kv_lora_rank=512, q_lora_rank=None,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, hidden_act="silu", max_position_embeddings=2 * LONGEST, rms_norm_eps=1e-6,
        rope_theta=10000.0, tie_word_embeddings=False, attention_bias=False, bos_token_id=0, eos_token_id=1)
    os.makedirs(path, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(1), {}

    def matrix(name, rows, columns):
        tensors[name + ".weight"] = (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(torch.bfloat16)

    def norm(name, columns):
        tensors[name + ".weight"] = torch.ones(columns, dtype=torch.bfloat16)

    def mlp(name, width):
        matrix(name + ".gate_proj", width, HIDDEN)
        matrix(name + ".up_proj", width, HIDDEN)
        matrix(name + ".down_proj", HIDDEN, width)

    matrix("model.embed_tokens", VOCABULARY, HIDDEN)
    tensors["model.embed_tokens.weight"] *= math.sqrt(HIDDEN)
    for i in range(layers):
        at = "model.layers.%d." % i
        norm(at + "input_layernorm", HIDDEN)
        norm(at + "post_attention_layernorm", HIDDEN)
        matrix(at + "self_attn.q_proj", HEADS * (128 + 64), HIDDEN)
        matrix(at + "self_attn.kv_a_proj_with_mqa", 512 + 64, HIDDEN)
        norm(at + "self_attn.kv_a_layernorm", 512)
        matrix(at + "self_attn.kv_b_proj", HEADS * (128 + 128), 512)
        matrix(at + "self_attn.o_proj", HIDDEN, HEADS * 128)
        if i < config["first_k_dense_replace"]:
            mlp(at + "mlp", config["intermediate_size"])
            continue
        matrix(at + "mlp.gate", EXPERTS, HIDDEN)
        mlp(at + "mlp.shared_experts", 2 * config["moe_intermediate_size"])
        for e in range(EXPERTS):
            mlp(at + "mlp.experts.%d" % e, config["moe_intermediate_size"])
    norm("model.norm", HIDDEN)
    matrix("lm_head", VOCABULARY, HIDDEN)
    save_file(tensors, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(config, f, indent=1)


def prompts(count, rank=0):
    """Returns prompts as token numbers, each of its own length."""
    return [[(7919 * (i + 100 * rank) + 31 * j * j + 13 * j) % (VOCABULARY - 10) + 5 for j in range(PROMPT + i % 5)] for i in range(count)]


# The processes of an engine.


def kernels(spec):
    """How the engine launches its kernels: one by one, or decode steps in CUDA graphs, without torch.compile."""
    if not spec["graphs"]:
        return dict(enforce_eager=True)
    return dict(compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=sorted(set(spec["batches"]))))


def settings(spec):
    """The arguments of vLLM's engine."""
    afd = None
    if spec["connector"]:
        afd = {"afd": {
            "role": spec["role"], "connector": spec["connector"], "host": "127.0.0.1", "port": spec["port"],
            "num_attention_ranks": spec["attention"], "num_ffn_ranks": spec["ffn"], "connector_extra_config": spec["extra"]}}
    return dict(
        model=spec["model"], skip_tokenizer_init=True, **kernels(spec), enable_expert_parallel=True, dtype="bfloat16", seed=0,
        max_model_len=LONGEST, max_num_seqs=spec["most"], max_num_batched_tokens=LONGEST, enable_prefix_caching=False,
        gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 30, distributed_executor_backend="uni", async_scheduling=spec["asynchronous"],
        **({"additional_config": afd} if afd else {}))


def ffn(spec):
    """An FFN rank: vLLM's engine core with the plugin's FFN worker, until its input ends."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    load_general_plugins()
    config = EngineArgs(**settings(spec)).create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    core.model_executor.collective_rpc("start_ffn_server_loop")
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        core.model_executor.collective_rpc("raise_ffn_loop_error_if_any")
    core.shutdown()


def attention(spec):
    """An attention rank: decodes the prompts, and writes tokens and times as JSON."""
    from vllm import LLM, SamplingParams

    begin = time.monotonic()
    arguments = settings(spec)
    engine = LLM(**arguments).llm_engine
    result = dict(start=time.monotonic() - begin, runs=[])
    serial = [0]

    def decode(texts, count, half=None):
        """Returns the tokens of each answer, and the time of each step after the first."""
        ids = []
        for text in texts:
            serial[0] += 1
            ids.append("r%d" % serial[0])
            engine.add_request(ids[-1], {"prompt_token_ids": text}, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False))
        tokens, steps, last, had = {}, [], None, 0
        try:
            while engine.has_unfinished_requests():
                for out in engine.step():
                    tokens[out.request_id.split("-")[0]] = list(out.outputs[0].token_ids)
                now, have = time.perf_counter(), sum(map(len, tokens.values()))
                if have == had:
                    continue
                if last is not None and len(tokens) == len(texts):
                    steps.append(now - last)
                last, had = now, have
                if half and have >= len(texts) * count // 2:
                    half = half()
        except BaseException:
            engine.abort_request(ids)  # the engine goes on with the next answer
            raise
        return [tokens[i] for i in ids], steps

    def run(batch, half=None):
        begin = time.monotonic()
        tokens, steps = decode(prompts(batch, spec["rank"]), spec["tokens"], half)
        result["runs"].append(dict(batch=batch, tokens=tokens, steps=steps, time=time.monotonic() - begin))

    for batch in spec["batches"]:
        decode(prompts(batch, spec["rank"]), 8)  # kernels are compiled at their first use
    for _ in range(spec["repeat"]):
        for batch in spec["batches"]:
            run(batch)
    if spec["replace"]:
        replaced(spec, result, run)
    with open(spec["result"], "w") as f:
        json.dump(result, f)
    print(DONE, flush=True)
    engine.engine_core.shutdown()


def replaced(spec, result, run):
    """Decodes while the parent replaces an FFN rank. If the answer fails, it is asked for again until it succeeds."""
    begin, errors = time.monotonic(), []

    def half():
        print(HALF, flush=True)

    answer = None
    while True:
        try:
            run(spec["batches"][-1], half)
            answer = result["runs"].pop()
            break
        except Exception as e:
            errors.append("%.1f s: %s: %s" % (time.monotonic() - begin, type(e).__name__, e))
            print("engines: " + errors[-1], flush=True)
            half = None
            if time.monotonic() - begin > spec["limit"]:
                break
            time.sleep(0.5)
    result["replaced"] = dict(time=time.monotonic() - begin, errors=errors, answer=answer)


# The parent.


class Engine:
    """The processes of one engine: ranks of both sides, or the whole model in one process."""

    def __init__(self, options, name, shape, folder):
        self.options, self.name, self.shape, self.folder = options, name, shape, folder
        self.attention, self.ffn = shape if NAMES[name] else (1, 0)
        self.port, self.groups = port(4), {"attention": port(), "ffn": port()}
        self.children = []
        os.makedirs(folder, exist_ok=True)

    def start(self, role, rank, again=""):
        o = self.options
        extra = {}
        if NAMES[self.name] == NAMES["streams"]:
            extra = dict({"streams": self.name == "streams"}, **{"replace_ms": o.limit * 1000} if o.replace and self.name == "messages" else {})
            extra.update(json.loads(o.extra))
        place = rank if role == "attention" else self.attention + rank
        spec = dict(
            role=role, rank=rank, attention=self.attention, ffn=self.ffn, connector=NAMES[self.name], port=self.port, model=o.model,
            extra=extra, most=max(o.batches + [8]), asynchronous=not o.replace, batches=o.batches, graphs=o.graphs, cpus=self.cpus(place) if o.pin else [],
            tokens=o.tokens, repeat=o.repeat, replace=bool(o.replace and NAMES[self.name]), limit=o.limit, result=os.path.join(self.folder, "%s%d.json" % (role, rank)))
        env = dict(os.environ, VLLM_USE_V2_MODEL_RUNNER="0", VLLM_PLUGINS=PLUGINS.get(self.name, "afd,stepaf"), VLLM_ENABLE_V1_MULTIPROCESSING="0",
                   VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=str(o.gpus[place % len(o.gpus)]))
        if importlib.util.find_spec("flashinfer") is None:
            env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        size = self.attention if role == "attention" else self.ffn
        if size > 1:
            env.update(VLLM_DP_SIZE=str(size), VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL="0", VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(self.groups[role]))
        log = os.path.join(self.folder, "%s%d%s.log" % (role, rank, again))
        with open(log, "w") as f:
            process = subprocess.Popen([sys.executable, PROGRAM, "--child", json.dumps(spec)], env=env, stdout=f, stderr=subprocess.STDOUT,
                                       stdin=subprocess.PIPE, start_new_session=True)  # closed when this process ends
        process.log, process.name, process.result = log, "%s %d" % (role, rank), spec["result"]
        self.children.append(process)
        return process

    def cpus(self, place):
        """A rank's share of the processors, the same for each engine of a shape."""
        usable, ranks = sorted(os.sched_getaffinity(0)), sum(self.shape)
        share = max(len(usable) // ranks, 1)
        return usable[place % ranks * share:][:share] or usable

    def run(self, end):
        """Returns the results of the attention ranks. Raises Failed."""
        if not NAMES[self.name]:
            attentions = [self.start("attention", 0)]
        else:
            for i in range(self.ffn):
                self.start("ffn", i)
            attentions = [self.start("attention", i) for i in range(self.attention)]
        if self.options.replace and NAMES[self.name]:
            self.replace(end)
        while not all(DONE in lines(a.log) for a in attentions):
            self.check(end)
            time.sleep(0.1)
        results = []
        for a in attentions:
            with open(a.result) as f:
                results.append(json.load(f))
        return results

    def check(self, end):
        for c in self.children:
            if c.poll() is not None and DONE not in lines(c.log):
                raise Failed("%s ended with status %d: %s" % (c.name, c.returncode, last(c.log)))
        if time.monotonic() > end:
            raise Failed("the limit of %d s is over (--limit); %s" % (self.options.limit, "; ".join("%s: %s" % (c.name, last(c.log)) for c in self.children)))

    def replace(self, end):
        """Kills FFN rank 0 when the attention side is in the middle of an answer, and starts it again."""
        while not any(HALF in lines(c.log) for c in self.children):
            self.check(end)
            time.sleep(0.02)
        victim = next(c for c in self.children if c.name == "ffn 0")
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
        self.children.remove(victim)
        self.start("ffn", 0, "-again")

    def stop(self):
        """Ends all processes: the attention ranks end by themselves, and a second later the input of all ranks ends. After
        STOP seconds all get SIGKILL. Returns the names of those that did not end before."""
        end, hanging = time.monotonic() + STOP, []
        if self.ffn:
            time.sleep(1)
        for c in self.children:
            c.stdin.close()
        for c in self.children:
            try:
                c.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                hanging.append(c.name)
            try:
                os.killpg(c.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            c.wait()
        return hanging


class Failed(Exception):
    """An engine that did not run to its end."""


def lines(path):
    with open(path, errors="replace") as f:
        return f.read().splitlines()


def last(path):
    """The line of a log that tells most: the last error, or the last line."""
    all_ = [line.strip() for line in lines(path) if line.strip()]
    wrong = [line for line in all_ if "Error" in line and not line.startswith("File ")]
    return (wrong or all_ or ["no output"])[-1][-300:]


def port(count=1):
    """Returns a free port with free ones after it."""
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            first = s.getsockname()[1]
        try:
            for i in range(1, count):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", first + i))
            return first
        except (OSError, OverflowError):
            continue


def medians(rounds, batch):
    """The median time of a decode step of that batch, in milliseconds, of rank 0, for each round."""
    return [statistics.median(times([results], batch)) for results in rounds]


def times(rounds, batch):
    """The times of the decode steps of that batch, in milliseconds, of rank 0."""
    return [1000 * t for results in rounds for run in results[0]["runs"] if run["batch"] == batch for t in run["steps"][2:]]


def answers(rounds):
    """The answers of each attention rank."""
    return [[run["tokens"] for results in rounds for run in results[i]["runs"]] for i in range(len(rounds[0]))]


def measure(options, shape, entries):
    """Runs the engines of a shape in turns. Returns, for each engine that did not fail, its results of each round."""
    rounds = {name: [] for name in options.engines}
    for i in range(options.rounds):
        names = list(rounds)
        first = i % max(len(names), 1)
        for name in names[first:] + names[:first]:
            entry, begin, steps = entries[name], time.monotonic(), ""
            engine = Engine(options, name, shape, os.path.join(options.out, "%dA%dF-%s-%d" % (*shape, name, i)))
            try:
                rounds[name].append(engine.run(begin + options.limit))
                steps = "; median ms of a step: " + ", ".join("%.3f (%d rows)" % (medians(rounds[name][-1:], batch)[0], batch) for batch in options.batches)
            except Failed as e:
                refused = NAMES[name] == NAMES["nccl"] and any(r in "\n".join(lines(c.log)) for c in engine.children for r in REFUSALS)
                entry["refused" if refused else "failed"] = str(e)
                del rounds[name]
            finally:
                hanging = engine.stop()
            if hanging and name in rounds:
                entry["hanging"] = hanging
            print("engines: %dA%dF %s, round %d of %d: %.0f s%s" % (*shape, name, i + 1, options.rounds, time.monotonic() - begin, steps), file=sys.stderr, flush=True)
    return rounds


def compare(options):
    """Runs all engines, prints the tables, and returns the exit status."""
    status, report = 0, []
    print("model: DeepSeek-V2, %d layers, hidden size %d, %d experts, random weights; %s new tokens, greedy, %s" % (
        options.layers, HIDDEN, EXPERTS, options.tokens, "CUDA graphs" if options.graphs else "eager"))
    print("over %s: ratio of medians within a round: median, minimum and maximum of the rounds" % options.over)
    form = "%-6s %-8s %6s %10s %10s %9s %-20s %s"
    print(form % ("shape", "engine", "rows", "median ms", "p99 ms", "tokens/s", "over " + options.over, "tokens"))
    for shape in options.shapes:
        text = "%dA%dF" % tuple(shape)
        entries = {name: dict(shape=text, engine=name) for name in options.engines}
        report.extend(entries.values())
        rounds, first = measure(options, shape, entries), None
        for name, entry in entries.items():
            for word in ("refused", "failed"):
                if word in entry:
                    status = status if word == "refused" else 1
                    print("%-6s %-8s %s: %s" % (text, name, word, entry[word]), flush=True)
            if name not in rounds:
                continue
            # The whole model decodes what one attention rank decodes.
            got, same = answers(rounds[name]), "first"
            if first is not None:
                other = answers(rounds[first])
                equal = got[:len(other)] == other[:len(got)]
                same = ("same as " if equal else "not those of ") + first
                status = status if equal else 1
            first = first or name
            entry.update(same=same, start=rounds[name][0][0]["start"], rows=[])
            for batch in options.batches:
                t = sorted(times(rounds[name], batch))
                row = dict(rows=batch, median=statistics.median(t), p99=t[min(len(t) - 1, int(len(t) * 0.99))], mean=statistics.mean(t))
                ratio = ""
                if options.over in rounds and name != options.over:
                    row["ratios"] = sorted(a / b for a, b in zip(medians(rounds[name], batch), medians(rounds[options.over], batch)))
                    ratio = "%.2f, %.2f to %.2f" % (statistics.median(row["ratios"]), row["ratios"][0], row["ratios"][-1])
                entry["rows"].append(row)
                print(form % (text, name, batch, "%.3f" % row["median"], "%.3f" % row["p99"], "%.0f" % (1000 * batch / row["mean"]), ratio, same), flush=True)
            if entry.get("hanging"):
                print("%-6s %-8s did not end within %d s of the last answer: %s" % (text, name, STOP, ", ".join(entry["hanging"])), flush=True)
            for results in rounds[name]:
                if results[0].get("replaced"):
                    r = results[0]["replaced"]
                    equal = bool(r["answer"]) and r["answer"]["tokens"] == next(run["tokens"] for run in results[0]["runs"] if run["batch"] == options.batches[-1])
                    status = status if equal else 1
                    entry.setdefault("replaced", []).append(r)
                    print("%-6s %-8s FFN rank 0 killed and started again: answer %s after %.1f s; errors: %s" % (
                        text, name, "the same" if equal else "another", r["time"], "; ".join(r["errors"]) or "none"), flush=True)
    with open(os.path.join(options.out, "report.json"), "w") as f:
        json.dump(report, f, indent=1)
    print("logs and report.json: %s" % options.out)
    return status


# The command.


def _list(text, parse, good, want):
    """Parses a list with commas between its parts. want says what was expected."""
    try:
        parts = [parse(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if not parts or not good(parts):
        raise argparse.ArgumentTypeError("%r: want %s" % (text, want))
    return parts


def counts(text):
    return _list(text, int, lambda n: min(n) > 0, "positive numbers, such as 1,16")


def shapes(text):
    def one(part):
        return tuple(int(n) for n in part.split("x"))

    return _list(text, one, lambda s: all(len(n) == 2 and min(n) > 0 for n in s), "attention ranks x FFN ranks, such as 1x1,2x1")


def gpus(text):
    return _list(text, int, lambda n: min(n) >= 0 and len(set(n)) == len(n), "different indices of GPUs, such as 0,1")


def engines(text):
    return _list(text, str, lambda names: set(names) <= set(NAMES) and len(set(names)) == len(names), "different names of " + ",".join(NAMES))


def extra(text):
    try:
        good = isinstance(json.loads(text), dict)
    except ValueError:
        good = False
    if not good:
        raise argparse.ArgumentTypeError("%r: want a JSON object, such as %s" % (text, '{"timeout_ms": 5000}'))
    return text


def options(arguments):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", type=shapes, default=[(1, 1)], metavar="AxF,...", help="attention ranks x FFN ranks (1x1); ranks of different sides share GPUs if there are too few")
    p.add_argument("--engines", type=engines, default=list(NAMES), metavar="NAME,...", help="what to run, of %s (all)" % ", ".join(NAMES))
    p.add_argument("--over", choices=list(NAMES), default="nccl", help="the engine that times are divided by (nccl)")
    p.add_argument("--gpus", type=gpus, default=[0, 1], metavar="N,...", help="GPUs: attention ranks first, then FFN ranks (0,1)")
    p.add_argument("--batches", type=counts, default=[1, 16, 64], metavar="N,...", help="prompts decoded at a time by an attention rank (1,16,64)")
    p.add_argument("--tokens", type=int, default=64, metavar="N", help="new tokens of an answer (64)")
    p.add_argument("--repeat", type=int, default=3, metavar="N", help="measurements of each batch in a round (3)")
    p.add_argument("--rounds", type=int, default=3, metavar="N", help="starts of each engine (3)")
    p.add_argument("--layers", type=int, default=LAYERS, metavar="N", help="layers of the model (%d)" % LAYERS)
    p.add_argument("--graphs", action="store_true", help="decode in CUDA graphs; without it, kernels are launched one by one")
    p.add_argument("--pin", action="store_true", help="give each rank processors of its own, the same ones in each start")
    p.add_argument("--replace", action="store_true", help="kill FFN rank 0 in the middle of an answer, and start it again (by messages, replace_ms of the connector is --limit unless --extra has it)")
    p.add_argument("--extra", type=extra, default="{}", metavar="JSON", help="connector_extra_config of StepMeshAFDConnector ({})")
    p.add_argument("--limit", type=int, default=600, metavar="SECONDS", help="for each start of an engine (600)")
    p.add_argument("--out", metavar="DIRECTORY", help="for logs, results and the model (a new one in the temporary directory)")
    p.add_argument("--child", help=argparse.SUPPRESS)
    o = p.parse_args(arguments)
    for name, least in (("tokens", 8), ("repeat", 1), ("rounds", 1), ("layers", 2), ("limit", 1)):
        if getattr(o, name) < least:
            p.error("argument --%s: %d, want at least %d" % (name, getattr(o, name), least))
    if o.tokens + PROMPT + 5 > LONGEST:
        p.error("argument --tokens: %d, want at most %d" % (o.tokens, LONGEST - PROMPT - 5))
    return o


def main(arguments):
    o = options(arguments)
    if o.child:
        spec = json.loads(o.child)
        if spec["cpus"]:
            os.sched_setaffinity(0, spec["cpus"])
        return {"attention": attention, "ffn": ffn}[spec["role"]](spec)
    lacking = missing(o.gpus)
    if lacking:
        print("vLLM with afd-plugin cannot run here:\n" + "\n".join("  " + line for line in lacking))
        return MISSING
    o.out = os.path.abspath(o.out or tempfile.mkdtemp(prefix="engines-"))
    o.model = os.path.join(o.out, "model")
    model(o.model, o.layers)
    return compare(o)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
