"""The programs and commands of the documents do what they say."""

import importlib.util
import os
import re
import subprocess
import sys

import harness
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


PAGES = ["docs/python.md", "docs/getting-started.md", "README.md"]


def blocks(page):
    """(language, text) of each block of code of the page that names its language."""
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        return [b for b in re.findall(r"^```(\w*)\n(.*?)^```$", file.read(), re.M | re.S) if b[0]]


def runs(page):
    """(commands, wanted output, {name: program}) of each block of commands."""
    programs, all_runs = {}, []
    for language, text in blocks(page):
        if language == "python":
            programs[re.match(r"# (\w+\.py)\n", text).group(1)] = text
        elif language == "bash":
            all_runs.append([text, "", programs])
        elif language == "text":
            all_runs[-1][1] = text
        elif language != "go":
            raise ValueError(f"{page}: a block of {language}: this test does not know what to do with it")
    return all_runs


def numberless(line):
    """The line without the parts that differ between runs."""
    for changing, fixed in ((r"-?\d+\.\d+ us", "N us"), (r"after \d+ms", "after N ms"), (r"handler \d+", "handler N"), (r"(127\.0\.0\.1):\d+", r"\1:N"), (r"\s+", " ")):
        line = re.sub(changing, fixed, line)
    return line.strip()


def name(run):
    return " ".join(re.findall(r"\w+\.py|stepaf", run[0])[-2:])


@pytest.mark.parametrize("run", [run for page in PAGES for run in runs(page)], ids=name)
def test_run(run, tmp_path):
    commands, wanted, programs = run
    program = programs[re.search(r"\w+\.py", commands).group()]
    if "import torch" in program and importlib.util.find_spec("torch") is None:
        pytest.skip("this program of the page uses PyTorch, which this Python has not")
    if "import torch" not in program and importlib.util.find_spec("numpy") is None:
        pytest.skip("this program of the page uses NumPy, which this Python has not")
    for file, text in programs.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(harness.OURS)}
    environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.path.join(ROOT, "bin"), environ["PATH"]])
    commands = "set -eu\n" + commands.replace("8123", str(harness.free_port()))
    done = subprocess.run(
        ["timeout", "170", "bash", "-c", commands], cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = f"{commands}\nstatus {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    got = sorted(numberless(line) for line in done.stdout.splitlines() if line.strip())
    want = sorted(numberless(line) for line in wanted.splitlines())
    assert want and got == want, said


@pytest.mark.parametrize("page", PAGES)
def test_every_program_runs(page):
    programs = {p for run in runs(page) for p in run[2]}
    started = {p for run in runs(page) for p in re.findall(r"\w+\.py", run[0])}
    assert programs == started


def test_every_function_is_mentioned():
    import fserver_lib

    with open(os.path.join(ROOT, "docs", "python.md"), encoding="utf-8") as page:
        text = page.read()
    functions = [n for n, v in vars(fserver_lib).items() if callable(v) and not isinstance(v, type) and not n.startswith("_")]
    assert len(functions) == 35
    missing = [n for n in functions if n not in text]
    assert not missing
