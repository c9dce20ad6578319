"""model.onnx writes the twins' text in a process without them; what int8 weighs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from lockstep.cli import commands
from lockstep.train import sampling
from lockstep.weights.onnx_export import FILE
from parity_tests.pair import FRAMEWORKS, start, toy
from parity_tests.tiers import tier
from parity_tests.weights.exporters import kept_exporter as kept_exporter
from parity_tests.weights.folders import FAMILIES, run_of

LENGTH = 8
READER = """
import json, sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(
    sys.argv[1] + "/model.onnx", providers=["CPUExecutionProvider"])
tokens = list(b"def ")
for _ in range(int(sys.argv[2])):
    logits = session.run(None, {"tokens": np.array([tokens[-12:]], np.int64)})[0]
    tokens.append(int(logits[0, -1].argmax()))
ours = [name for name in sys.modules if name.startswith(("lockstep", "jax", "torch"))]
print(json.dumps([tokens[4:], ours]))
"""


@tier("rest", guard="its logits, in oracles/test_exports.py")
def test_a_process_without_the_twins_writes_their_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, to = tmp_path / "run", tmp_path / "to"
    family, flags = FAMILIES["qwen3"]
    config = toy(family, policy="fp32", **flags)
    state = run_of(run, "torch", config)
    assert commands.main(["export", str(run), "--to", str(to), "--format", "onnx"]) == 0
    said = rf"{to}/{FILE}: 0\.\d MB, validation loss 5\.\d+\n"
    assert re.fullmatch(said, capsys.readouterr().out)
    assert [file.name for file in to.iterdir()] == [FILE]
    read = [sys.executable, "-I", "-c", READER, str(to), str(LENGTH)]
    done = subprocess.run(read, cwd=tmp_path, capture_output=True, text=True, check=True)
    twins = {
        framework: sampling.sample(
            start(framework, config, state), b"def ", length=LENGTH, context=12, temperature=0
        )
        for framework in FRAMEWORKS
    }
    written, ours = json.loads(done.stdout)
    assert twins == dict.fromkeys(FRAMEWORKS, written) and ours == []


@tier("rest", guard="int8 by the formula, in oracles/test_exports.py")
@pytest.mark.usefixtures("kept_exporter")
def test_int8_weighs_less_than_a_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that are multiplied with rows are int8, and a tied embedding with them."""
    config = toy("gpt2", policy="fp32", n_layer=2, d_model=96)
    run_of(tmp_path / "run", "torch", config)
    to = tmp_path / "int8"
    words = ["export", str(tmp_path / "run"), "--to", str(to), "--format", "onnx"]
    assert commands.main([*words, "--dtype", "int8"]) == 0
    said = re.search(r"in int8: (\S+) MB, .* loss (\S+); in .* (\S+) MB, (\S+)$",
                     capsys.readouterr().out.strip())  # fmt: skip
    assert said
    small, loss, whole, float32_loss = map(float, said.groups())
    assert loss != float32_loss  # how much: parity_tests/oracles/test_exports.py
    assert small < whole / 2
    kinds = {
        each.name: onnx.TensorProto.DataType.Name(each.data_type)
        for each in onnx.load(to / FILE).graph.initializer
    }
    int8 = {name.removesuffix("_quantized") for name, kind in kinds.items() if kind == "INT8"}
    linears = {f"{name}.weight" for name in config.model.matmuls if not name.endswith(".attend")}
    assert {name for name in int8 if "zero_point" not in name} == linears - {"head.weight"} | {
        "embed.weight"
    }
