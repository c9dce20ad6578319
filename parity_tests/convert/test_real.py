"""Models of transformers at their true number of layers, by maps that small ones proved.

Each is equal to a port in examples/, converted to it and back, and both programs give the same.
"""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lockstep.cli import commands
from lockstep.convert.containers import open_checkpoint
from lockstep.process import ROOT
from parity_tests.check.recorders import forked_programs as forked_programs
from parity_tests.tiers import tier


def save_moved(program: Path, out: Path, shard: str) -> int:
    """Writes a program's model as its library does, all of its tensors moved.

    Returns:
        How many parameters it has.
    """
    spec = importlib.util.spec_from_file_location("program", program)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.build(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in [*model.parameters(), *model.buffers()]:
            if x.is_floating_point():
                x.add_(0.05 * torch.rand(x.shape, generator=generator))
    if out.suffix == ".pt":
        torch.save(model.state_dict(), out)
    else:
        model.save_pretrained(out, max_shard_size=shard)
    return sum(x.numel() for x in model.parameters())


@dataclass(frozen=True)
class Pair:
    reference: str
    port: str
    full: str  # the environment in which both are large
    out: str
    parameters: float  # at least
    sizes: tuple[str, ...] = ()  # what shapes do not tell of the port
    back: tuple[str, ...] = ()  # ... and of the reference
    shard: str = "5GB"
    model: str = "model"  # transformers saves ViT under other names than its modules have
    modules: tuple[tuple[str, str], ...] = ()  # some of the port's, and the reference's


LLAMA = "model.layers.1.self_attn.o_proj"
STAGE = "resnet.encoder.stages.1"
FULL_SIZE = "gpt2 in its own size"
PAIRS = {
    "gpt2 to nnx": Pair("gpt/gpt2_transformers.py", "gpt/gpt_nnx.py", "GPT2=layers",
                        "port.safetensors", 88e3, shard="100KB"),
    FULL_SIZE: Pair("gpt/gpt2_transformers.py", "gpt/gpt_nnx.py", "GPT2=full",
                    "port.safetensors", 124e6, shard="200MB"),
    "gpt2 to linen": Pair("gpt/gpt2_transformers.py", "gpt/gpt_linen.py", "GPT2=layers",
                          "port.msgpack", 88e3,
                          modules=(
                              ("blocks.LayerNorm_0", "transformer.h.0.ln_1"),
                              ("blocks.attn.qkv#1", "transformer.h.1.attn.c_attn"),
                              ("blocks.proj#1", "transformer.h.1.mlp.c_proj"),
                          )),
    "llama to equinox": Pair("llama/llama_transformers.py", "llama/llama_equinox.py",
                             "LLAMA=full", "port.eqx", 1e6,
                             modules=(("layers.1.attn", LLAMA),)),
    "llama to plain jax": Pair("llama/llama_transformers.py", "llama/llama_jax.py", "LLAMA=full",
                               "port.safetensors", 1e6, sizes=("n6=12",),
                               modules=(("layers.1.attn", LLAMA),)),
    "bert to nnx": Pair("bert/bert_transformers.py", "bert/bert_nnx.py", "BERT=full",
                        "port.orbax", 0.9e6, sizes=("n4=8",)),
    "vit to nnx": Pair("vit/vit_transformers.py", "vit/vit_nnx.py", "VIT=full", "port.npz", 0.9e6,
                       model="model.pt"),
    "resnet to nnx": Pair("resnet/resnet_transformers.py", "resnet/resnet_nnx.py", "RESNET=layers",
                          "port.safetensors", 5e3, back=("layer=3,4,6,3",),
                          modules=(
                              ("blocks.2", f"{STAGE}.layers.1"),  # not the Sequential in it
                              ("blocks.2.middle.norm", f"{STAGE}.layers.1.layer.1.normalization"),
                          )),
}  # fmt: skip


def lockstep(*words: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *map(str, words)],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@tier("rest", guard="rules of the same kinds, in test_rules.py")
@tier("full", guard="its layers, and 8 GB in test_large.py", where=lambda name: name == FULL_SIZE)
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("name", PAIRS)
def test_a_model_is_converted_at_its_true_depth(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = PAIRS[name]
    reference, port = (ROOT / "examples" / file for file in (pair.reference, pair.port))
    map_, model, out = tmp_path / "map.json", tmp_path / pair.model, tmp_path / pair.out
    report = tmp_path / "report.json"
    words = ("--steps", "3", "--save-map", map_, "--json", report)
    assert commands.main(["check", *map(str, (reference, port, *words))]) == 0
    told = json.loads(report.read_text())
    rungs = {rung["rung"]: rung for rung in told["rungs"]}
    assert min(rungs[number]["compared"] for number in ("2i", "3i")) >= 14
    missing = {number: rung["not_run"] for number, rung in rungs.items() if rung["not_run"]}
    assert all(number == "5" or "no optimizer" in why for number, why in missing.items())
    assert {*pair.modules} <= told["mapping"]["modules"].items()
    key, _, value = pair.full.partition("=")
    full = {key: value}
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv(key, value)
        assert save_moved(reference, model, pair.shard) >= pair.parameters
    assert (model / "model.safetensors.index.json").exists() == (pair.shard != "5GB")
    program: list[str | Path] = ["--program", port] if out.suffix == ".eqx" else []
    sizes = [word for size in pair.sizes for word in ("--size", size)]
    verify: list[str | Path] = ["--verify", reference, port]
    said = lockstep("convert", model, "--map", map_, "-o", out, *sizes, *program, *verify, **full)
    assert "EQUAL forward" in said and "loss of batch 1" in said
    back = tmp_path / "back.safetensors"
    sizes = [word for size in pair.back for word in ("--size", size)]
    lockstep("convert", out, "--map", map_, "--back", "-o", back, *sizes, *program, **full)
    before, after = open_checkpoint(model), open_checkpoint(back)
    counters = {name for name in before.infos if name.endswith("num_batches_tracked")}
    assert before.infos.keys() - counters == after.infos.keys()
    for tensor in after.infos:
        assert before.read(tensor).tobytes() == after.read(tensor).tobytes(), tensor
