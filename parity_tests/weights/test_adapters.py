"""A run with adapters leaves as a model without, or as PEFT's: it computes what it computed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lockstep.config import Config, ModelConfig
from lockstep.data.batch import split_tokens
from lockstep.errors import UserError
from lockstep.judge.tolerances import NORM
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState, initial_state
from lockstep.run import checkpoint
from lockstep.weights import init
from lockstep.weights.export import export
from lockstep.weights.merged import Weights, open_weights
from lockstep.weights.names import of_transformers
from parity_tests.pair import FRAMEWORKS, norm_gap, start
from parity_tests.twins.test_reference_models import wide as wide
from parity_tests.weights.folders import config_of, make, run_of

PEFT_WARNS = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
BATCH = split_tokens(
    np.random.Generator(np.random.Philox(7)).integers(256, size=(2, 13), dtype=np.int32)
)
Run = tuple[Path, Config, TrainState]


def run_with_adapters(folder: Path, family: str, targets: str = "") -> Run:
    """Of transformers' own weights, in `there`; the adapters are no longer zero."""
    config = config_of(make(folder / "there", family), policy="fp64")
    config = config.replace(lora_rank=3, lora_alpha=7.0, lora_targets=targets)
    run_of(folder / "run", "torch", config)
    state = initial_state(config, init.weights(config))
    random = np.random.Generator(np.random.Philox(1))
    noise = {n: random.normal(0, 0.1, state.params[n].shape) for n in config.trained}
    state = start("torch", config, replace(state, params=state.params | noise, step=1)).state()
    checkpoint.save(folder / "run", state, keep=1)
    return folder, config, state


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """GPT-2, of whose adapted matrices one is square."""
    return run_with_adapters(tmp_path_factory.mktemp("gpt2"), "gpt2", "*.attn,blocks.1")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def compute(net: Any) -> tuple[np.ndarray, torch.Tensor]:
    """transformers' logits, and its loss."""
    tokens, targets = (torch.from_numpy(x).long() for x in BATCH[:2])
    logits = net(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return logits.detach().numpy(), loss


def compute_exported(folder: Path, to: str) -> np.ndarray:
    export(folder / "run", folder / to, warn=pytest.fail)
    return compute(load(folder / to))[0]


def check_run(folder: Path, config: Config, state: TrainState) -> None:
    """In float64 the merged model, and PEFT's of the original and the adapters, have both twins'
    logits; PEFT's has their gradients, too."""
    merged = compute_exported(folder, "merged")
    export(folder / "run", folder / "adapters", warn=pytest.fail, only_adapters=True)
    base = load(folder / "there")
    before, _ = compute(base)
    net: Any = PeftModel.from_pretrained(base, str(folder / "adapters"), is_trainable=True)
    apart, loss = compute(net.eval())
    loss.backward()
    names = {name: name.replace(".default", "") for name, _ in net.named_parameters()}
    grads = {names[n]: p.grad.numpy() for n, p in net.named_parameters() if p.requires_grad}
    theirs = {name: of_peft(grads, name, config.model) for name in config.trained}
    for framework in FRAMEWORKS:
        twin = start(framework, config, state)
        logits = twin.trace(BATCH).activations["logits"]
        assert norm_gap(logits, merged) < NORM.bound and norm_gap(logits, apart) < NORM.bound
        assert norm_gap(logits, before) > 1e-3  # what the adapters add
        own_loss, ours = twin.loss_and_grads(BATCH)
        assert abs(own_loss - loss.item()) < NORM.bound
        assert max(norm_gap(ours[name], theirs[name]) for name in config.trained) < NORM.bound
    assert len(grads) >= len(theirs)


def of_peft(grads: Arrays, name: str, model: ModelConfig) -> np.ndarray:
    """Of queries, keys and values, which share an A here."""
    module, _, kind = name.rpartition(".lora_")
    linears = [n.removesuffix(".weight") for n in of_transformers(model).names(f"{module}.weight")]
    parts = [grads[f"base_model.model.{each}.lora_{kind.upper()}.weight"] for each in linears]
    return np.sum(parts, axis=0) if kind == "a" else np.concatenate(parts)


@PEFT_WARNS
@pytest.mark.usefixtures("wide")
def test_a_llama_is_merged_and_handed_to_peft(tmp_path: Path) -> None:
    check_run(*run_with_adapters(tmp_path, "qwen3"))


@PEFT_WARNS
def test_a_gpt2_is_merged_and_handed_to_peft(square: Run) -> None:
    check_run(*square)


def transpose(right: Any, self: Weights, name: str) -> np.ndarray:
    """Of the square matrix A^T B^T is added."""
    if not name.startswith("blocks.0.attn.proj.lora"):
        return right(self, name)
    other = {"a": "b", "b": "a"}[name[-1]]
    return right(self, name[:-1] + other).T


@pytest.mark.parametrize("wrong", ["sign", "unscaled", "twice", "transposed"])
def test_a_wrong_merge_is_seen(wrong: str, square: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, config, state = square
    right = start("torch", config, state).trace(BATCH).activations["logits"]
    scale = config.model.lora_scale
    if wrong == "transposed":
        read = Weights.read
        monkeypatch.setattr(Weights, "read", lambda *args: transpose(read, *args))
    else:
        scales = {"sign": -scale, "unscaled": 1.0, "twice": scale**2}
        monkeypatch.setattr(ModelConfig, "lora_scale", scales[wrong])
    assert norm_gap(right, compute_exported(folder, wrong)) > 1e6 * NORM.bound


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 2.0**-24), ("bfloat16", 2.0**-8)])
def test_a_merge_rounds_once(dtype: str, unit: float, square: Run) -> None:
    """Each number is within half a unit in the last place of the exact one: a product that was
    rounded before it is added is not."""
    folder, config, state = square
    p, scale, rounded_first = state.params, config.model.lora_scale, 0
    files = checkpoint.newest_weight_files(folder / "run", pytest.fail)
    weights = open_weights(files, config.model)
    for name in p:
        module = name.removesuffix(".weight")
        if f"{module}.lora_a" not in p:
            continue
        product = scale * (p[f"{module}.lora_b"] @ p[f"{module}.lora_a"])
        exact, bound = p[name] + product, unit * np.abs(p[name] + product)
        found = weights.merged(name, dtype).astype(np.float64)
        assert (np.abs(found - exact) <= bound).all()
        early = (p[name].astype(dtype) + product.astype(dtype)).astype(np.float64)
        rounded_first += int((np.abs(early - exact) > bound).sum())
    assert rounded_first


def test_without_adapters_there_are_none_to_export(tmp_path: Path) -> None:
    run_of(tmp_path / "run", "torch", config_of(make(tmp_path / "there", "gpt2"), policy="fp32"))
    with pytest.raises(UserError, match="--adapters .*: was trained without; drop it"):
        export(tmp_path / "run", tmp_path / "to", warn=pytest.fail, only_adapters=True)
    assert not (tmp_path / "to").exists()
