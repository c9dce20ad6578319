"""Mixed precision holds a ResNet-50 in little more than half of float32's memory."""

import json
import subprocess
import sys

from lockstep.compile.ask import Compiler
from lockstep.process import ROOT


def test_amp_takes_twice_the_batch(compilers: dict[str, Compiler]) -> None:
    assert compilers["torch"]  # else skipped
    words = [sys.executable, "-m", "parity_tests.cuda.resnet"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = map(json.loads, done.stdout.splitlines())
    found = {(row["batch"], row["compute"]): row["bytes"] for row in rows}
    for half in ("float16", "bfloat16"):
        assert 0.5 < found[64, half] / found[64, "float32"] < 0.6
        assert found[128, half] / found[64, "float32"] < 1.05
