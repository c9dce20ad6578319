"""nanoGPT's ckpt.pt, written here as its program writes it."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.cli import trainers
from lockstep.data.batch import split_tokens
from lockstep.errors import UserError
from lockstep.exits import DONE, MISTAKE
from lockstep.judge.tolerances import CURVE, NORM
from lockstep.model.state import initial_state
from lockstep.weights import init
from lockstep.weights.init import open_source
from parity_tests import hf_model
from parity_tests.pair import FRAMEWORKS, norm_gap, start, toy
from parity_tests.tiers import tier
from parity_tests.weights.folders import config_of

SHAPE = dict(n_layer=2, n_head=2, d_model=24, context=12, vocab=50)
ARGUMENTS = dict(n_layer=2, n_head=2, n_embd=24, block_size=12, bias=True, vocab_size=50,
                 dropout=0.0)  # fmt: skip
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def net_of(**flags: Any) -> Any:
    torch.manual_seed(0)
    net: Any = hf_model.build(toy("gpt2", **{**SHAPE, **flags}).model)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return net


def linear_weights(net: Any) -> dict[str, torch.Tensor]:
    """transformers' GPT-2 by nanoGPT's names, which are the same, in nn.Linear's layout."""
    named = {name: p.data.clone() for name, p in net.named_parameters()}
    return {n: p.T.contiguous() if n.endswith(CONV1D) else p for n, p in named.items()}


def write_ckpt(path: Path, net: Any, *, bias: bool = True, **changes: Any) -> Path:
    weights = {f"_orig_mod.{name}": p for name, p in linear_weights(net).items()
               if bias or not name.endswith("bias")}  # fmt: skip
    weights["_orig_mod.lm_head.weight"] = weights["_orig_mod.transformer.wte.weight"]
    arguments = ARGUMENTS | {"bias": bias}
    content = {"model": weights, "model_args": arguments, "iter_num": 5, "config": {"lr": 1e-3}}
    torch.save(content | changes, path)
    return path


def assert_same_logits(path: Path, net: Any) -> None:
    """Bound 1e-10 in float64; seen: 1e-15."""
    config = config_of(path, policy="fp64")
    batch = np.random.Generator(np.random.Philox(7)).integers(50, size=(2, 13), dtype=np.int32)
    with torch.no_grad():
        theirs = net.double()(torch.from_numpy(batch[:, :-1]).long()).logits.numpy()
    weights = init.weights(config)
    for framework in FRAMEWORKS:
        twin = start(framework, config, initial_state(config, weights))
        assert norm_gap(twin.trace(split_tokens(batch)).activations["logits"], theirs) < NORM.bound


@pytest.mark.parametrize("bias", [True, False])
def test_a_nanogpt_computes_what_it_computed(bias: bool, tmp_path: Path) -> None:
    net = net_of(mlp="gelu-erf")
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias") and not bias:
                parameter.zero_()
    assert_same_logits(write_ckpt(tmp_path / "ckpt.pt", net, bias=bias), net)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_nanogpt_trains_as_by_torch_s_adamw(framework: str, tmp_path: Path) -> None:
    """A twin has the ten losses and the gradients of torch's AdamW on one batch, clipped, for
    transformers' GPT-2, in float64."""
    net = net_of(mlp="gelu-erf")
    config = config_of(write_ckpt(tmp_path / "ckpt.pt", net), policy="fp64")
    config = config.replace(steps=10, lr=1e-4, min_lr=1e-4, warmup=0, weight_decay=0.0, clip=1.0)
    twin = start(framework, config, initial_state(config, init.weights(config)))
    drawn = np.random.Generator(np.random.Philox(3)).integers(50, size=(2, 13), dtype=np.int32)
    batch = split_tokens(drawn)
    found = hf_model.translate(config.model, twin.loss_and_grads(batch)[1])
    tokens, targets = (torch.from_numpy(x).long() for x in batch[:2])
    net = net.double()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, (0.9, 0.95), weight_decay=0.0)
    for step in range(10):
        optimizer.zero_grad()
        logits = net(tokens).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
        loss.backward()
        for name, parameter in net.named_parameters() if step == 0 else ():
            assert norm_gap(found[name], parameter.grad.numpy()) < NORM.bound, name
        torch.nn.utils.clip_grad_norm_(net.parameters(), config.optim.clip)
        optimizer.step()
        result = twin.step(twin.place(batch.select(None)))()
        assert abs(result.loss - loss.item()) < CURVE.bound


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    path = tmp_path / "ckpt.pt"
    with path.open("wb") as file:
        pickle.dump({"model": Evil()}, file)
    with pytest.raises(UserError, match="^--init .*ckpt.pt: .*; name a ckpt.pt of nanoGPT$"):
        open_source(str(path))
    assert not (tmp_path / "ran").exists()


@tier("rest", guard="int64", where=lambda dtype: dtype is torch.bool)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_nanogpt_with_a_tensor_of_no_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    """A quantized one, say; safetensors have them, and its reader copies them."""
    net = net_of(mlp="gelu-erf")
    weights = linear_weights(net) | {"transformer.ln_f.bias": torch.zeros(24, dtype=dtype)}
    path = write_ckpt(tmp_path / "ckpt.pt", net, model=weights)
    says = r"^--init .*ckpt.pt: transformer.ln_f.bias is (int64|bool); only float64"
    with pytest.raises(UserError, match=says):
        init.weights(config_of(path))


def test_mistakes_are_named(tmp_path: Path) -> None:
    net = net_of(mlp="gelu-erf")
    (tmp_path / "none.xyz").write_bytes(b"")
    with pytest.raises(UserError, match="is neither a folder"):
        open_source(str(tmp_path / "none.xyz"))
    weights = linear_weights(net)
    del weights["transformer.h.1.ln_2.bias"]
    ckpt = write_ckpt(tmp_path / "ckpt.pt", net, model=weights)
    with pytest.raises(UserError, match="transformer.h.1.ln_2.bias is missing"):
        init.weights(config_of(ckpt))


def test_a_model_that_changed_is_refused(tmp_path: Path) -> None:
    path = write_ckpt(tmp_path / "ckpt.pt", net_of(mlp="gelu-erf"))
    config = config_of(path, policy="fp32")
    net = net_of(mlp="gelu-erf", n_layer=1)
    write_ckpt(path, net, model_args=ARGUMENTS | {"n_layer": 1})
    with pytest.raises(UserError, match="is not the model of the run any more"):
        init.weights(config)


@pytest.mark.parametrize(("text", "line"), [
    ("to be or not to be " * 20, "has token 116: beyond the 50 of --init .*; use the tok"),
    (bytes(range(50)).decode() * 20, ""),
])  # fmt: skip
def test_tokens_beyond_the_model_s_vocabulary_are_named(
    text: str, line: str, tmp_path: Path, capsys: Any
) -> None:
    """Not --vocab, which nobody may give beside --init."""
    path = write_ckpt(tmp_path / "ckpt.pt", net_of(mlp="gelu-erf"))
    (tmp_path / "text.txt").write_text(text)
    words = ["--init", path, "--data", tmp_path / "text.txt", "--out", tmp_path / "run", "--steps",
             1, "--batch-size", 1, "--eval-batches", 1, "--policy", "fp32"]  # fmt: skip
    assert trainers.train("torch", [str(word) for word in words]) == (MISTAKE if line else DONE)
    said = capsys.readouterr().err
    assert re.search(line, said) and said.count("\n") == bool(line)
    assert bool(line) != (tmp_path / "run").exists()
