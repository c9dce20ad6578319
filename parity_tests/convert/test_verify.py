"""Both programs run forward on the files, one after the other, in their own precision."""

import json
from pathlib import Path

import pytest
import torch

from lockstep.cli import commands
from lockstep.exits import DONE, FAILED, MISTAKE
from parity_tests.check.recorders import forked_programs as forked_programs
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

REFERENCE = """
import numpy as np, torch
from torch import nn
def build(seed):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    return made.to(torch.bfloat16)
def loss(model, batch):
    return (model(batch) ** 2).mean()
def batch(step):
    return np.random.default_rng(step).normal(size=(4, 5))
"""
PORT = """
import jax, jax.numpy as jnp
from flax import nnx
class Net(nnx.Module):
    def __init__(self, rngs):
        dims = [(5, 7), (7, 7), (7, 3)]
        made = [nnx.Linear(i, o, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)
                for i, o in dims]
        self.layers = nnx.List(made)
    def __call__(self, x):
        x = x.astype(jnp.bfloat16)
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)
def build(seed):
    return Net(nnx.Rngs(seed))
def loss(model, batch):
    return (model(batch) ** 2).mean()
"""
MAP = {
    "lockstep_map": 1,
    "rules": [
        {"reference": {"{2*layer}.weight": "a b"}, "port": {"layers.{layer}.kernel": "b a"}},
        {"reference": {"{2*layer}.bias": "a"}, "port": {"layers.{layer}.bias": "a"}},
    ],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ref.py").write_text(REFERENCE)
    (tmp_path / "port.py").write_text(PORT)
    (tmp_path / "map.json").write_text(json.dumps(MAP))
    generator = torch.Generator().manual_seed(1)
    dims = {"0": (7, 5), "2": (7, 7), "4": (3, 7)}
    weights = {f"{n}.weight": torch.randn(shape, generator=generator) for n, shape in dims.items()}
    weights |= {
        f"{n}.bias": torch.randn(shape[0], generator=generator) for n, shape in dims.items()
    }
    torch.save({name: x.bfloat16() for name, x in weights.items()}, tmp_path / "model.pt")
    return tmp_path


def convert(*words: str) -> int:
    verify = ["--verify", "ref.py", "port.py"]
    return commands.main(["convert", words[0], "--map", "map.json", "-o", *words[1:], *verify])


@tier("rest", guard="the conversion itself")
def test_right_weights_are_equal_and_others_different(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("model.pt", "port.safetensors") == DONE
    said = capsys.readouterr().out
    assert "EQUAL forward" in said and "loss of batch 1: " in said and "output" in said
    assert convert("port.safetensors", "back.pt", "--back") == DONE
    assert "EQUAL forward" in capsys.readouterr().out
    text = (folder / "map.json").read_text().replace('"b a"', '"-b a"')  # a kernel upside down
    (folder / "map.json").write_text(text)
    assert convert("model.pt", "wrong.safetensors") == FAILED
    assert "DIFFERENT forward" in capsys.readouterr().out


def test_a_program_of_another_size_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ref.py").write_text(REFERENCE.replace("nn.Linear(5, 7)", "nn.Linear(5, 8)"))
    assert convert("model.pt", "port.safetensors") == MISTAKE
    said = capsys.readouterr().err.splitlines()[-1]
    assert "0.weight is [8, 5], and in the file [7, 5]" in said
    (folder / "port.safetensors").unlink()
    (folder / "ref.py").write_text("def build(seed): ...")
    assert convert("model.pt", "port.safetensors") == MISTAKE
    assert "loss(model, batch)" in capsys.readouterr().err.splitlines()[-1]
