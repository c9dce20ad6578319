"""model.onnx: the twins' logits and text, in a process without the twins; int8 within its gap."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from lockstep.cli import commands
from lockstep.config import Config
from lockstep.train import sampling
from lockstep.weights import onnx_graph
from lockstep.weights.onnx_export import FILE, export_onnx
from parity_tests.pair import FRAMEWORKS, perturbed, start, toy
from parity_tests.weights.folders import FAMILIES, run_of

TOLERANCE = 1e-6  # of the largest logit, in float32; 2.5e-7 seen
GAP = 0.02  # nats on held-out text that int8 may cost; 0.0006 seen
LENGTH = 8
READER = """
import json, sys
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
tokens = list(b"def ")
for _ in range(int(sys.argv[2])):
    logits = session.run(None, {"tokens": np.array([tokens[-12:]], np.int64)})[0]
    tokens.append(int(logits[0, -1].argmax()))
ours = [name for name in sys.modules if name.startswith(("lockstep", "jax", "torch"))]
print(json.dumps([tokens[4:], ours]))
"""


def small(name: str) -> Config:
    family, flags = FAMILIES[name]
    return toy(family, policy="fp32", **flags)


def logits(graph: onnx.ModelProto, tokens: np.ndarray) -> np.ndarray:
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=providers)
    return session.run(None, {"tokens": tokens[None].astype(np.int64)})[0][0, -1]


def gap(name: str, framework: str, **changes: Any) -> float:
    """Of the twin's logits, relative to the largest, to those of a graph with changes."""
    config = small(name)
    state = perturbed(config)
    tokens = np.random.default_rng(0).integers(256, size=config.model.context).astype(np.int32)
    twin = start(framework, config, state).logits(tokens)
    graph = onnx_graph.build(replace(config.model, **changes), state.params)
    return float(np.abs(logits(graph, tokens) - twin).max() / np.abs(twin).max())


@pytest.mark.parametrize(
    ("name", "framework"),
    [("gpt2", "torch"), ("llama3", "torch"), ("qwen3", "torch"), ("qwen3", "jax")],
)
def test_the_graph_has_the_twins_logits(name: str, framework: str) -> None:
    assert gap(name, framework) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama3", {"rope": "base=500"}),
        ("gpt2", {"mlp": "gelu-erf"}),
        ("qwen3", {"norm_eps": 1e-3}),
    ],
)
def test_another_model_is_seen(name: str, changes: dict[str, Any]) -> None:
    assert gap(name, "torch", **changes) > TOLERANCE


def test_a_process_without_the_twins_writes_their_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run, to = small("qwen3"), tmp_path / "run", tmp_path / "onnx"
    state = run_of(run, "torch", config)
    assert commands.main(["export", str(run), "--to", str(to), "--format", "onnx"]) == 0
    assert f"{to / FILE}: 0.1 MB, validation loss 5." in capsys.readouterr().out
    read = [sys.executable, "-I", "-c", READER, str(to / FILE), str(LENGTH)]
    done = subprocess.run(read, cwd=tmp_path, capture_output=True, text=True, check=True)
    twins = {
        framework: sampling.sample(
            start(framework, config, state), b"def ", length=LENGTH, context=12, temperature=0
        )
        for framework in FRAMEWORKS
    }
    written, ours = json.loads(done.stdout)
    assert twins == dict.fromkeys(FRAMEWORKS, written) and ours == []


def test_int8_costs_little_and_weighs_a_third(tmp_path: Path) -> None:
    config = toy("gpt2", policy="fp32", n_layer=2, d_model=96)
    run_of(tmp_path / "run", "torch", config)
    to = tmp_path / "int8"
    found = export_onnx(tmp_path / "run", to, step=None, int8=True, warn=pytest.fail)
    assert 0 < abs(found.loss - found.float32_loss) <= GAP
    assert found.bytes < found.float32_bytes / 2
    kinds = {
        each.name: onnx.TensorProto.DataType.Name(each.data_type)
        for each in onnx.load(to / FILE).graph.initializer
    }
    int8 = [name for name, kind in kinds.items() if kind == "INT8" and "transposed" in name]
    assert len([name for name in int8 if "zero_point" not in name]) == len(config.model.matmuls) - 2
