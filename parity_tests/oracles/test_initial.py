"""Initial values and decay: transformers' and PEFT's own, statistics by formula, and sets by hand.

A standard deviation of n normal numbers has an error of 1 / sqrt(2 n): bounds are five of them.
"""

import math
from typing import Any

import ml_dtypes
import numpy as np
import peft
import pytest
import torch

from lockstep.model.state import initial_state
from lockstep.plan.layers import scans_layers
from parity_tests import hf_model
from parity_tests.pair import FRAMEWORKS, perturbed, start, toy, window

SIGMAS = 5.0
SHAPE: dict[str, Any] = {"n_layer": 3, "n_head": 2, "d_model": 64, "context": 32, "vocab": 256}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"family": "tiny", "n_kv_head": 1, "qkv_bias": True, "qk_norm": True},
    "gpt2": {"family": "gpt2"},
    "lora": {"family": "tiny", "lora_rank": 4},
}
RESIDUAL = ("attn.proj.weight", "mlp.down.weight")  # what they give is added to the stream


def config_of(model: str, **flags: Any) -> Any:
    return toy(**{**SHAPE, **MODELS[model], **flags})


@pytest.mark.parametrize("model", MODELS)
def test_initial_values(model: str) -> None:
    """GPT-2's recipe (Radford et al. 2019): N(0, 0.02), over sqrt(2 L) where a branch ends."""
    config = config_of(model)
    for name, x in initial_state(config).params.items():
        assert x.dtype == np.float32
        if name.endswith((".bias", ".lora_b")):
            assert not x.any(), name
        elif x.ndim == 1:
            assert (x == 1).all(), name
        elif not name.endswith(".lora_a"):
            std = 0.02 / (math.sqrt(2 * 3) if name.endswith(RESIDUAL) else 1)
            error = SIGMAS * std / math.sqrt(x.size)
            assert abs(x.std() - std) < error / math.sqrt(2), (name, x.std(), std)
            assert abs(x.mean()) < error, name
            beyond = (np.abs(x) > 2 * std).mean()  # 0.0455 of a normal distribution
            assert np.mean(x == x.astype(ml_dtypes.bfloat16)) < 0.1, name  # not rounded
            assert abs(beyond - 0.0455) < SIGMAS * 0.2084 / math.sqrt(x.size), name


def test_initial_values_match_transformers() -> None:
    """Each tensor of our GPT-2 is as wide as transformers' own."""
    config = config_of("gpt2")
    torch.manual_seed(0)
    theirs = dict(hf_model.build(config.model).named_parameters())
    for name, ours in hf_model.translate(config.model, initial_state(config).params).items():
        other = theirs[name].detach().numpy()
        bound = SIGMAS * other.std() / math.sqrt(ours.size)
        assert abs(ours.std() - other.std()) <= bound, name
        assert abs(ours.mean() - other.mean()) <= 2 * bound, name


def test_adapters_match_peft() -> None:
    """Our adapters begin as PEFT's do: A is uniform, as far as PEFT's; B is zero."""
    torch.manual_seed(0)
    params, found = initial_state(config_of("lora")).params, 0
    for name, ours in params.items():
        if not name.endswith(".lora_a"):
            continue
        other = name.replace("_a", "_b")
        layer = torch.nn.Linear(ours.shape[1], len(params[other]))
        net = peft.get_peft_model(
            torch.nn.Sequential(layer), peft.LoraConfig(r=len(ours), target_modules=["0"])
        )
        theirs = {n: p.detach().numpy() for n, p in net.named_parameters() if "lora" in n}
        a, b = theirs.values()
        assert (ours.shape, params[other].shape) == (a.shape, b.shape)
        assert np.array_equal(params[other], b)
        assert abs(ours.std() / a.std() - 1) < SIGMAS / math.sqrt(ours.size), name
        assert abs(np.abs(ours).max() / np.abs(a).max() - 1) < 20 / ours.size, name
        assert abs(ours.mean()) < SIGMAS * a.std() / math.sqrt(ours.size), name
        found += 1
    assert found == 3 * 5


def test_seeds_draw_other_weights() -> None:
    """Every drawn tensor is another one under another seed, and no two of a run are alike."""
    zero, one = (initial_state(config_of("lora", seed=seed)).params for seed in (0, 1))
    again = initial_state(config_of("lora", seed=0)).params
    drawn = {f"{seed} {name}": x for seed, params in enumerate((zero, one))
             for name, x in params.items() if x.std() > 0}  # fmt: skip
    assert len(drawn) == 2 * (2 + 3 * 5 + 3 * 5)
    for name, x in drawn.items():
        for other, y in drawn.items():
            n = min(x.size, y.size)
            likeness = abs(np.corrcoef(x.ravel()[:n], y.ravel()[:n])[0, 1])
            assert name == other or likeness < SIGMAS / math.sqrt(n), (name, other)
    assert all(np.array_equal(zero[name], x) for name, x in again.items())


def test_adapters_beside_given_weights() -> None:
    """Beside given weights, adapters are those of the run's seed: the same as without, and others
    under another seed."""
    for seed in (0, 1, 7):
        config = config_of("lora", seed=seed)
        drawn = initial_state(config).params
        base = {name: x + 1 for name, x in drawn.items() if "lora" not in name}
        begun = initial_state(config, base).params
        assert all(np.array_equal(begun[name], x) for name, x in base.items())
        adapters = {name for name in drawn if name.endswith("lora_a")}
        assert len(adapters) == 3 * 5
        assert all(np.array_equal(begun[name], drawn[name]) for name in adapters)
        assert all(drawn[name].std() > 0 for name in adapters)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_twin_starts_from_initial_weights(framework: str) -> None:
    """A run of a seed begins with these weights, and a larger model keeps what it shares."""
    config = config_of("tiny", seed=1, policy="fp32")
    wanted, loaded = initial_state(config).params, start(framework, config).state().params
    assert all(np.array_equal(loaded[name], x) for name, x in wanted.items())
    deeper = initial_state(config_of("tiny", seed=1, n_layer=4)).params
    same = [np.array_equal(deeper[name], x) for name, x in wanted.items()
            if not name.endswith(RESIDUAL)]  # fmt: skip
    assert all(same)


# --- decay

WIDE = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
DECAYING = {  # model and --decay -> what decays, in each layer and beside the layers
    ("tiny", ""): ([f"{name}.weight" for name in (*WIDE, "mlp.gate")], ["head.weight"]),
    ("gpt2", ""): ([f"{name}.weight" for name in WIDE], []),  # its head is the embedding
    ("lora", ""): ([f"{name}.lora_{x}" for name in (*WIDE, "mlp.gate") for x in "ab"], []),
    ("tiny", "blocks.*.mlp,head"): (["mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"],
                                    ["head.weight"]),
}  # fmt: skip


SMALL: dict[str, Any] = {"n_layer": 2, "d_model": 16, "context": 8, "policy": "fp64"}
DECAYS = [
    *(("torch", *which, "unroll") for which in DECAYING),
    ("jax", "lora", "", "unroll"),
    *(("jax", "tiny", "blocks.*.mlp,head", layers) for layers in ("unroll", "scan")),
]


@pytest.mark.parametrize(("framework", "model", "patterns", "layers"), DECAYS)
def test_decay(framework: str, model: str, patterns: str, layers: str) -> None:
    """A step with a decay of 0.5 differs from one with none by -0.5 times rate times weight, in
    the tensors that decay, and by nothing elsewhere."""
    flags = {**SMALL, "warmup": 0, "lr": 0.25, "decay": patterns, "layers": layers}
    after = []
    for decay in (0.0, 0.5):
        config = config_of(model, **flags, weight_decay=decay)
        state = perturbed(config)
        twin = start(framework, config, state)
        twin.step(twin.place(window(config, 0)))()
        after.append(twin.state().params)
    inside, beside = DECAYING[model, patterns]
    decaying = {f"blocks.{i}.{name}" for i in range(2) for name in inside} | {*beside}
    assert decaying <= state.params.keys()
    for name, x in state.params.items():
        expected = -0.5 * 0.25 * x if name in decaying else np.zeros_like(x)
        assert np.abs(after[1][name] - after[0][name] - expected).max() < 1e-15, name


FREEZE = {  # model and --freeze -> what is trained in each of three layers, and beside them
    ("tiny", "embed,blocks.*.attn,*.norm1"): (
        ["mlp.gate.weight", "mlp.up.weight", "mlp.down.weight", "norm2.weight"],
        ["norm.weight", "head.weight"]),
    ("lora", ""): DECAYING["lora", ""],
    ("lora", "*.mlp"): ([f"attn.{name}.lora_{x}" for name in ("qkv", "proj") for x in "ab"], []),
    ("lora", "head,*.lora_a"): ([f"{name}.lora_b" for name in (*WIDE, "mlp.gate")], []),
}  # fmt: skip


@pytest.mark.parametrize(("model", "patterns"), FREEZE)
def test_trained_parameters(model: str, patterns: str) -> None:
    """A run trains what no pattern of `--freeze` names and, with adapters, these alone."""
    flags = {"n_kv_head": 0, "qkv_bias": False, "qk_norm": False} if model == "tiny" else {}
    inside, beside = FREEZE[model, patterns]
    expected = {f"blocks.{i}.{name}" for i in range(3) for name in inside} | {*beside}
    assert {*config_of(model, freeze=patterns, **flags).trained} == expected


@pytest.mark.parametrize(
    ("layers", "framework"), [("unroll", "jax"), ("scan", "jax"), ("unroll", "torch")]
)
def test_frozen_parameters_stay(layers: str, framework: str) -> None:
    """A step moves what no pattern of `--freeze` names, in each layer, and logs the norms of these
    tensors' own gradients before they are clipped: after a first step a moment is a tenth of what
    clipping has left of them."""
    patterns, clip = "embed,blocks.*.attn,*.norm1", 0.1
    flags = {"n_kv_head": 0, "qkv_bias": False, "qk_norm": False, "layers": layers, "clip": clip}
    config = config_of("tiny", **SMALL, **flags, freeze=patterns, accum=2)
    state = perturbed(config)
    twin = start(framework, config, state)
    result = twin.step(twin.place(window(config, 0)))()
    norms, after = result.norms, twin.state()
    inside, beside = FREEZE["tiny", patterns]
    expected = {f"blocks.{i}.{name}" for i in range(2) for name in inside} | {*beside}
    moved = {n for n, x in state.params.items() if not np.array_equal(after.params[n], x)}
    assert moved == norms.keys() == expected
    left = clip / (result.grad_norm + 1e-6)
    for name, norm in norms.items():
        clipped = 10 * float(np.linalg.norm(after.mu[name]))
        assert left < 1 and math.isclose(norm * left, clipped, rel_tol=1e-12), name


SOME = {"decay": "blocks.1.mlp,head", "freeze": "embed,blocks.0", "lora_targets": "*.qkv,blocks.0"}
ALL = {"decay": "*.mlp,head", "freeze": "embed,*.mlp", "lora_targets": "*.qkv,blocks.*.mlp"}


@pytest.mark.parametrize("flag", SOME)
def test_layers_are_scanned_only_if_alike(flag: str) -> None:
    """Deep models' layers are one program, but where a pattern is for some of them alone."""
    flags = {"n_layer": 24, "remat": "block", "lora_rank": 3 * (flag == "lora_targets")}
    found = [scans_layers(config_of("gpt2", **flags, **{flag: of[flag]})) for of in (ALL, SOME)]
    assert found == [True, False]
