"""The example of a mixture-of-experts model whose experts run in processes of their own: it decodes the tokens of the whole model."""

import os
import subprocess
import sys

import pytest
from harness import within

pytest.importorskip("torch")
pytest.importorskip("transformers")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.mark.long
@pytest.mark.still(110)  # the processes import transformers
@pytest.mark.parametrize("options", [[], ["--kill"]], ids=["undisturbed", "killed"])
def test_same_tokens(options):
    run = subprocess.run([sys.executable, os.path.join(ROOT, "tests/examples/moe/moe.py"), "--tokens", "16", *options],
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=within(110))
    assert run.returncode == 0, run.stdout
    assert "8 of 8 prompts: the same 16 tokens as the whole model" in run.stdout
    assert ("killed expert process 1" in run.stdout) == bool(options), run.stdout
