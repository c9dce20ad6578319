"""model.jax: the twins' text, in a process that has JAX and neither twin."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jax_impl.io import stablehlo
from lockstep.cli import commands
from lockstep.train import sampling
from lockstep.weights.forward import WEIGHTS
from lockstep.weights.stablehlo import PROGRAM, TEXT
from parity_tests.pair import FRAMEWORKS, start, toy
from parity_tests.tiers import tier
from parity_tests.weights.folders import FAMILIES, run_of

LENGTH = 8
READER = """
import json, sys
import jax, numpy as np
from safetensors.numpy import load_file
program = jax.export.deserialize(bytearray(open(sys.argv[1] + "/model.jax", "rb").read()))
weights = load_file(sys.argv[1] + "/model.safetensors")
tokens = list(b"def ")
for _ in range(int(sys.argv[2])):
    logits = program.call(weights, np.array([tokens[-12:]], np.int32))
    tokens.append(int(logits[0, -1].argmax()))
ours = [name for name in sys.modules if name.startswith(("lockstep", "jax_impl", "torch"))]
print(json.dumps([tokens[4:], ours, sorted(program.platforms)]))
"""


@tier("rest", guard="its logits, in oracles/test_exports.py")
def test_a_process_with_jax_alone_writes_the_twins_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, flags = FAMILIES["gpt2"]
    config, run, to = toy(family, policy="bf16", **flags), tmp_path / "run", tmp_path / "hlo"
    state = run_of(run, "torch", config)
    assert commands.main(["export", str(run), "--to", str(to), "--format", "stablehlo"]) == 0
    assert capsys.readouterr().out.startswith(f"{to / PROGRAM} with its weights: 0.1 MB")
    assert sorted(file.name for file in to.iterdir()) == [PROGRAM, TEXT, WEIGHTS]
    text = (to / TEXT).read_text()
    assert "stablehlo.dot_general" in text and "tensor<?x?x256xf32>" in text
    read = [sys.executable, "-I", "-c", READER, str(to), str(LENGTH)]
    done = subprocess.run(read, cwd=tmp_path, capture_output=True, text=True, check=True)
    exact = config.replace(policy="fp32")
    twins = {
        framework: sampling.sample(
            start(framework, exact, state), b"def ", length=LENGTH, context=12, temperature=0
        )
        for framework in FRAMEWORKS
    }
    written, ours, platforms = json.loads(done.stdout)
    assert twins == dict.fromkeys(FRAMEWORKS, written) and ours == []
    assert platforms == sorted(stablehlo.PLATFORMS)
