"""The programs of tests/fserver and tests/benchmark, as the launch scripts run them."""

import os
import re
import subprocess
import sys

import harness
import pytest
from harness import within

TESTS = os.path.dirname(harness.HERE)
ROOT = os.path.dirname(TESTS)

pytest.importorskip("torch", reason="the programs use PyTorch")
pytestmark = pytest.mark.still(120)  # a script waits for other builds, and its programs import PyTorch


def run(command, timeout=180, **env):
    environ = {k: v for k, v in os.environ.items() if not k.startswith(harness.OURS)}
    # The scripts take the first python3: let it be this one.
    environ.update(PYTHON=sys.executable, PS_VERBOSE="0", DMLC_PS_ROOT_PORT=str(harness.free_port()), STEPMESH_BIND_CPU_CORE="0")
    environ.update(env)
    p = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=within(timeout))
    return p.returncode, p.stdout, p.stderr


def script(name, *arguments, **env):
    env.setdefault("ROLE", "joint")
    status, out, err = run(["bash", os.path.join(TESTS, "fserver", name), *arguments], **env)
    assert status == 0, f"status {status}\n{out}\n{err}"
    assert "running the Go program" not in err, err
    return out


long = pytest.mark.long  # each of these programs is several processes that import PyTorch


@pytest.mark.parametrize("name,lines", [pytest.param("test_fserver", 0, marks=long), pytest.param("test_fserver_diff_stage", 12, marks=long), pytest.param("test_fserver_dynamic", 0, marks=long)])
def test_single(name, lines):
    out = script("run_single_gpu.sh", BIN=name, BENCHMARK_ITER="4")
    assert "worker test done" in out
    assert len(re.findall(r"iter: \d+, stage: \d, handler: \d+", out)) == lines


def test_default_program():
    assert "worker test done" in script("run_single_gpu.sh")


@pytest.mark.parametrize("name", [pytest.param("test_fserver", marks=long), pytest.param("test_fserver_diff_stage", marks=long), "test_fserver_dynamic"])
def test_multi(name):
    out = script("run_multi_gpu.sh", BIN=name, GROUP_SIZE="2", NUM_WORKER="1", NUM_SERVER="2", BENCHMARK_ITER="3")
    assert out.startswith("Run scheduler, server, and worker jointly\n")
    assert out.count("worker test done") == 2


LEGS = ("python_req", "req_send", "req_recv", "process  ", "rsp_send", "rsp_recv", "python_rsp", "net_cost")


def test_benchmark():
    out = script("run_single_gpu.sh", "--rows", "2", "--cols", "64", "--rounds", "25", "--report", "10",
                 BIN="../benchmark/bmk_comm_latency_multiserver")
    lines = [re.sub(r"^\[.*?\] ?", "", line) for line in out.splitlines()]
    number = r"-?\d+\.\d{3}"
    heads = [line for line in lines if re.search(f"comm bmk gpu=0: mean={number}ms, p50={number}ms, p99={number}ms, max={number}ms$", line)]
    assert len(heads) == 3, out  # of 10, 10 and 5 rounds
    for part in ("push 1", "push 2", "pull 1"):
        assert sum(line.endswith(f"\t gpu=0 {part}:") for line in lines) == 3, out
    for leg in LEGS:
        found = re.findall(rf"^.*\t\t{leg}\t{number}\t{number}\t{number}\t{number} {number} {number}$", out, re.M)
        assert len(found) == 9, (leg, out)
    # The legs measured by one clock are times; they cover everything but the network.
    assert not re.search(r"\t\t(?:req_send|req_recv|process  |rsp_send|rsp_recv)\t-", out), out


@long
def test_benchmark_options():
    program = os.path.join(TESTS, "benchmark", "bmk_comm_latency_multiserver.py")
    status, out, _ = run([sys.executable, program, "--help"])
    assert status == 0 and all(o in out for o in ("--rows", "--cols", "--rounds", "--report"))
    for bad in (["--rows", "0"], ["--rounds", "-1"], ["--cols", "x"], ["what"]):
        status, _, err = run([sys.executable, program, *bad])
        assert status == 2 and "usage" in err, err


# Runs a program that gets SIGINT in its fourth wait.
FOURTH_WAIT = """
import os, runpy, signal, sys
import fserver_lib
wait, calls = fserver_lib.wait, []
def counted(handler):
    wait(handler)
    calls.append(handler)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGINT)
fserver_lib.wait = counted
signal.signal(signal.SIGINT, signal.default_int_handler)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_benchmark_stops_on_ctrl_c():
    program = os.path.join(TESTS, "benchmark", "bmk_comm_latency_multiserver.py")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(harness.OURS)}
    environ.update(DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_NODE_HOST="127.0.0.1",
                   DMLC_PS_ROOT_PORT=str(harness.free_port()), STEPMESH_BAKCEND="CPU", PS_VERBOSE="-1", PYTHONUNBUFFERED="1")
    nodes = [subprocess.Popen([sys.executable, "-c", FOURTH_WAIT, program, "--rows=1", "--cols=8", "--rounds=0", "--report=2"],
                              env=dict(environ, DMLC_ROLE=role), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
             for role in ("scheduler", "server", "worker")]
    try:
        worker = nodes[2]
        out = worker.communicate(timeout=harness.LIMIT)[0]
        assert worker.returncode == 130
        assert out.startswith("start to run 0\n") and out.count("comm bmk gpu=0") == 2, f"want a report of two rounds, and one of the third:\n{out}"
    finally:
        for p in nodes:
            p.kill()
            p.communicate()


def test_keys():
    code = """if True:
        import os, test_utils as t
        assert t.gen_push_key(255, 3, 2) == 255 + (3 << 8) + (2 << 16)
        assert t.gen_push_key(0) == 0 and t.gen_pull_key(7) == 7 + (1 << 24)
        os.environ["DMLC_NODE_RANK"] = "5"
        assert t.gen_push_key(1) == 1 + (5 << 16)
        assert t.gen_pull_key(1, 2) == 1 + (2 << 8) + (5 << 16) + (1 << 24)
        for make in (t.gen_push_key, t.gen_pull_key):
            key = make(9, 1, 200)
            assert t.get_worker_rank(key) == 200 and type(t.get_worker_rank(key)) is int
            for bad in ((256,), (-1,), (0, 256), (0, -1), (0, 0, 256)):
                try:
                    make(*bad)
                except AssertionError:
                    continue
                raise SystemExit(f"{bad} was taken")
    """
    path = os.pathsep.join([os.path.join(TESTS, "fserver"), os.environ.get("PYTHONPATH", "")])
    status, _, err = run([sys.executable, "-c", code], PYTHONPATH=path)
    assert status == 0, err


@long
def test_overhead_program():
    """The program runs. Its figures are meaningful only on an idle machine."""
    status, out, err = run([sys.executable, os.path.join(TESTS, "benchmark", "python_overhead.py"), "--blocks", "1", "--rounds", "50"])
    assert status == 0, err
    number = r" +-?\d+\.\d"
    for what, limit in (("push_pull \\+ wait", 15), ("start \\+ wait", 8), ("get_batch to respond", 10)):
        assert re.search(rf"^{what} +Go{number}  Python{number}  +[-+]\d+\.\d \(limit {limit}\)$", out, re.M), out
