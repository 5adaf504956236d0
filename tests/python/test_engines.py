"""tests/engines/vllm_afd.py on a machine without vLLM: its list of what is missing, its arguments, and its report on processes that stand in for engines."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "engines", "vllm_afd.py")

# The program of an engine's processes in these tests. An attention rank writes the result that answers.json has for its connector.
CHILD = """
import json, os, signal, sys, time
spec = json.loads(sys.argv[2])
if spec["role"] == "ffn":
    sys.stdin.read()
    sys.exit()
with open(os.path.join(os.path.dirname(__file__), "answers.json")) as f:
    do = json.load(f)[spec["connector"] or "whole"]
if "error" in do:
    sys.exit(do["error"])
tokens = [do["tokens"]] * spec["batches"][0]
result = dict(start=1.0, runs=[dict(batch=b, tokens=tokens, steps=[0.5, 0.5] + [do.get("step", 0.002)] * 3, time=1.0) for b in spec["batches"]])
if spec["replace"]:
    print("engines: half", flush=True)
    result["replaced"] = dict(time=2.0, errors=[], answer=result["runs"][-1])
with open(spec["result"], "w") as f:
    json.dump(result, f)
print("engines: done", flush=True)
"""


@pytest.fixture
def program():
    spec = importlib.util.spec_from_file_location("vllm_afd_engines", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments):
    return subprocess.run([sys.executable, "-S", PROGRAM] + list(arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=dict(os.environ, PYTHONPATH=""), timeout=120)


def test_missing():
    """Without packages (-S) the status is 77, and each missing thing has its line."""
    got = run("--gpus", "0,3")
    assert got.returncode == 77, got.stdout
    assert got.stdout.startswith("vLLM with afd-plugin cannot run here:\n")
    for name in ("vllm", "afd_plugin", "fserver", "fserver_lib", "safetensors", "torch"):
        assert "\n  %s: no Python module of that name: " % name in got.stdout, got.stdout


def test_missing_gpus(program, monkeypatch):
    """With all packages, but a vLLM of another version, no entry point, and one GPU."""
    import types

    cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(program, "_version", lambda name: "0.27.1")
    monkeypatch.setattr(program, "_entry_points", lambda: ["afd"])
    lines = program.missing([0, 1])
    assert [line.split(":")[0] for line in lines] == ["vllm", "fserver", "GPUs"]
    assert "version 0.27.1, want 0.26." in lines[0] and "PyTorch sees 1, want 2 (--gpus 0,1)" in lines[2]
    monkeypatch.setattr(program, "_version", lambda name: "0.26.0")
    monkeypatch.setattr(program, "_entry_points", lambda: ["afd", "stepaf"])
    assert program.missing([0]) == []


def test_help():
    got = run("--help")
    assert got.returncode == 0 and "status is 77" in got.stdout and "--replace" in got.stdout


@pytest.mark.parametrize("arguments, word", [
    ("--shapes 1", "--shapes: '1': want attention ranks x FFN ranks"), ("--shapes 1x0", "'1x0': want attention ranks"), ("--shapes 1x1x1", "'1x1x1': want"),
    ("--shapes axb", "'axb': want"), ("--engines gloo", "--engines: 'gloo': want different names of whole,nccl,repaired,streams,messages"), ("--over gloo", "--over: invalid choice: 'gloo'"), ("--gpus 0,0", "--gpus: '0,0': want different indices"),
    ("--gpus=-1", "--gpus: '-1': want"), ("--batches 0", "--batches: '0': want positive numbers"), ("--batches 1,", "'1,': want"),
    ("--tokens 7", "--tokens: 7, want at least 8"), ("--tokens 1000", "--tokens: 1000, want at most 995"), ("--repeat 0", "--repeat: 0, want at least 1"), ("--rounds 0", "--rounds: 0, want at least 1"), ("--engines nccl,nccl", "'nccl,nccl': want different names of"),
    ("--layers 1", "--layers: 1, want at least 2"), ("--limit 0", "--limit: 0, want at least 1"), ("--extra [1]", "--extra: '[1]': want a JSON object"),
    ("--extra {", "--extra: '{': want a JSON object"), ("more", "unrecognized arguments: more"),
])
def test_bad_arguments(arguments, word):
    got = run(*arguments.split())
    assert got.returncode == 2 and word in got.stdout, got.stdout


NCCL, OURS = "P2pNcclAFDConnector", "StepMeshAFDConnector"
SAME = {"whole": dict(tokens=[1, 2]), NCCL: dict(tokens=[1, 2]), OURS: dict(tokens=[1, 2], step=0.001)}


@pytest.mark.parametrize("answers, arguments, status, words", [
    (SAME, ["--rounds", "2"], 0, ["1A1F   whole         3      2.000      2.000      1500 1.00, 1.00 to 1.00   first", "1A1F   nccl          3",
                   "1A1F   streams       3      1.000      1.000      3000 0.50, 0.50 to 0.50   same as whole", "1A1F   messages      3"]),
    (SAME, ["--replace", "--engines", "whole,messages"], 0, ["messages FFN rank 0 killed and started again: answer the same after 2.0 s; errors: none"]),
    (dict(SAME, **{OURS: dict(tokens=[1, 3])}), [], 1, ["1A1F   streams", "not those of whole"]),
    (dict(SAME, **{OURS: dict(error="fserver_lib.TimeoutError: late")}), [], 1, ["streams  failed: attention 0 ended with status 1: fserver_lib.TimeoutError: late"]),
    (dict(SAME, **{NCCL: dict(error="ValueError: P2pNcclAFDConnector currently requires num_attention_ranks >= num_ffn_ranks")}), [], 0,
     ["nccl     refused: attention 0", "3      1.000      1.000      3000                      same as whole"]),
], ids=["same", "replaced", "other tokens", "failed", "refused"])
def test_results(program, tmp_path, monkeypatch, capsys, answers, arguments, status, words):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    monkeypatch.setattr(program, "PROGRAM", str(child))
    o = program.options(["--batches", "3", "--rounds", "1", "--out", str(tmp_path / "out")] + arguments)
    o.model = ""
    assert program.compare(o) == status, capsys.readouterr().out
    out = capsys.readouterr().out
    assert all(w in out for w in words), out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [e["engine"] for e in report] == o.engines and all(e.get("hanging", []) == [] for e in report)
