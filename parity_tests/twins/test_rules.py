"""A plain configuration gets the core alone; a feature changes what `extra/rules.py` says of it.

And nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_impl.extra.cpu
import jax_impl.extra.packed
import jax_impl.extra.rules
import jax_impl.extra.scan
import jax_impl.functional
import jax_impl.model
import jax_impl.step
import torch_ref.extra.onednn
import torch_ref.extra.packed
import torch_ref.extra.rules
import torch_ref.model
import torch_ref.step
from jax_impl.extra.mesh.mesh import AXES
from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.devices import Capabilities
from parity_tests.pair import FAMILIES, FRAMEWORKS, toy

CPU = Capabilities(platform="cpu")
GPU = Capabilities(platform="cuda", fused_attention=lambda dtype, d_head: dtype == "bfloat16")
# Attention is written out under fast numerics, too, and no bias is rounded before it is added.
PLAIN: dict[str, Any] = {"policy": "bf16", "numerics": "fast", "attention": "reference"}
OTHERS = {
    id(jax_impl.extra.cpu.linear): "extra.cpu.linear",
    id(torch.nn.functional.linear): "functional.linear",
}


def build(framework: str, config: Config, device: Capabilities) -> Any:
    """A trainer, without weights."""
    if framework == "torch":
        return torch_ref.extra.rules.make_trainer(config, torch.device("cpu"), device)
    one = jax.devices("cpu")[0]
    mesh = jax.make_mesh((1, 1), AXES, devices=[one]) if config.mesh.size > 1 else None
    return jax_impl.extra.rules.make_trainer(config, one, device, mesh)


def name_of(made: Any) -> str:
    """Of a class, a function or what a function returns: such as "model.Linear"."""
    made = getattr(made, "func", made)  # a partial's
    name = made.__qualname__.partition(".<locals>")[0]
    return OTHERS.get(id(made), f"{made.__module__.partition('.')[2]}.{name}")


def modules_of(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Each module by its path, a scanned block once for each layer."""
    if isinstance(trainer.model, torch.nn.Module):
        yield from trainer.model.named_modules()
        return
    params = {name: jnp.zeros(x.shape, x.dtype) for name, x in trainer.model.shapes.items()}
    model = trainer.model(params)
    for path, module in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        scanned = isinstance(model, jax_impl.extra.scan.ScannedGPT) and name.startswith("blocks")
        for layer in range(model.config.n_layer if scanned else 1):
            yield name.replace("blocks", f"blocks.{layer}") if scanned else name, module


def parts(framework: str, config: Config, device: Capabilities = CPU) -> dict[str, str]:
    """What a configuration is made of: the trainer, and modules, products and attention by path."""
    trainer = build(framework, config, device)
    package = {"jax": jax_impl, "torch": torch_ref}[framework]
    kind, found = type(trainer), {}
    if kind is package.step.Trainer:
        found["trainer"] = name_of(kind)
    else:
        *features, last = kind.__bases__
        assert last is package.step.Trainer
        found["trainer"] = " ".join(map(name_of, features))
    for path, module in modules_of(trainer):
        if type(module).__module__.startswith(f"{package.__name__}."):  # a list of modules is not
            found[path] = name_of(type(module))
        for name in ("product", "attend"):
            function = getattr(module, name, None)
            if function is not None and not isinstance(function, nnx.Module | torch.nn.Module):
                found[f"{path}.{name}"] = name_of(function)
    return found


def core(framework: str, family: str) -> dict[str, str]:
    """What a plain model of three layers is made of."""
    norm, linears = {
        "tiny": ("model.RMSNorm", ("gate", "up", "down")),
        "gpt2": ("model.LayerNorm", ("up", "down")),
    }[family]
    found = {"trainer": "step.Trainer", "": "model.GPT", "embed": "model.Embedding", "norm": norm}
    if family == "gpt2":
        found["position"] = "model.Embedding"
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        found |= {block: "model.Block", f"{block}.norm1": norm, f"{block}.norm2": norm}
        found |= {f"{block}.attn": "model.Attention", f"{block}.attn.attend": "model.attend"}
        found[f"{block}.mlp"] = "model.MLP"
        for linear in ("attn.qkv", "attn.proj", *(f"mlp.{name}" for name in linears)):
            found[f"{block}.{linear}"] = "model.Linear"
            found[f"{block}.{linear}.product"] = "functional.linear"
    joined = "extra.head.join_gradients" if framework == "jax" else "functional.linear"
    tied = toy(family).model.tied
    return found | {"head": "model.TiedHead" if tied else "model.Linear", "head.product": joined}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_plain_configuration_is_the_core(framework: str, family: str) -> None:
    assert parts(framework, toy(family, **PLAIN)) == core(framework, family)
    tied = not toy(family).model.tied
    other = parts(framework, toy(family, tied=tied, **PLAIN))
    changed = {"head": "model.TiedHead" if tied else "model.Linear"}
    assert other == core(framework, family) | changed


DELAYED, STOCHASTIC = "extra.formats.delayed", "extra.formats.stochastic"
EVALUATION, CHUNKS, SCAN = "extra.evaluation.OtherPolicy", "extra.chunks.InChunks", "extra.scan"
MESH, GATHER, RULES = "extra.mesh.mesh.OnMesh", "extra.mesh.gather", "extra.rules"
ATTENTION, GRADIENTS = "extra.attention", "extra.formats.gradients"
GRADS = "params=float32,compute=bfloat16,output=float32,grads=float32"
BOTH = {
    "eval-policy": ({"eval_policy": "fp32"}, {"trainer": EVALUATION}),
    "loss-chunks": ({"loss_chunks": "2"}, {"trainer": CHUNKS}),
    "both": ({"eval_policy": "fp32", "loss_chunks": "2"}, {"trainer": f"{EVALUATION} {CHUNKS}"}),
    "lora": (
        {"lora_rank": 2, "lora_targets": "*.qkv"},
        {"blocks.*.attn.qkv": "extra.lora.LoRALinear"},
    ),
    "fp8": (
        {"policy": "fp8"},
        {"blocks.1.*.product": "extra.formats.products.rounded_product"},
    ),
    "fp8-delayed": (
        {"policy": "fp8-delayed"},
        {"trainer": f"{DELAYED}.Delayed", "blocks.1.*.product": f"{DELAYED}.DelayedProduct"},
    ),
    "nvfp4": (
        {"policy": "nvfp4"},
        {
            "trainer": f"{STOCHASTIC}.Stochastic",
            "blocks.1.*.product": f"{STOCHASTIC}.StochasticProduct",
        },
    ),
}
FSDP = {
    "trainer": MESH,
    "embed": f"{GATHER}.SharedEmbedding",
    "blocks.*.product": f"{GATHER}.gathered",
}


def linears(kind: str) -> dict[str, str]:
    return dict.fromkeys(["blocks.*.attn.[qp]*", "blocks.*.mlp.*"], kind)


JAX = BOTH | {
    "scan": (
        {"layers": "scan"},
        {"trainer": f"{SCAN}.Stacked", "": f"{SCAN}.ScannedGPT"},
    ),
    "mesh": (
        {"mesh": "data=2"},
        {"trainer": MESH, "blocks.*.product": "functional.affine_by"},
    ),
    "fsdp": ({"mesh": "fsdp=2"}, linears(f"{GATHER}.RegatheringLinear") | FSDP),
    "fsdp-remat": ({"mesh": "fsdp=2", "remat": "block"}, FSDP),
    "fsdp-lora": (
        {"mesh": "fsdp=2", "lora_rank": 2, "lora_targets": "blocks"},
        linears(f"{RULES}.RegatheringLoRALinear") | FSDP,
    ),
    "grads": ({"policy": GRADS}, {"blocks.*.product": f"{GRADIENTS}.backward_in"}),
    "island": ({"fp32_islands": "blocks.1"}, {}),  # another policy of the same product
    "strict": ({"numerics": "strict"}, {"blocks.*.product": f"{RULES}.round_bias"}),
    "fused": ({"attention": "fused"}, {}),
}
TORCH = BOTH | {
    "scan": ({"layers": "scan"}, {}),
    "grads": (
        {"policy": GRADS},
        dict.fromkeys(["*.product", "blocks.*.attend"], f"{RULES}.outside_autocast"),
    ),
    "island": (
        {"fp32_islands": "blocks.1"},
        dict.fromkeys(["blocks.1.*.product", "blocks.1.*.attend"], f"{RULES}.outside_autocast"),
    ),
    "strict": ({"numerics": "strict"}, {}),
    "fused": ({"attention": "fused"}, {"blocks.*.attend": f"{ATTENTION}.attend_fused"}),
}
FEATURES = [
    pytest.param(framework, *row, id=f"{framework}-{name}")
    for framework, table in (("jax", JAX), ("torch", TORCH))
    for name, row in table.items()
]


def require_change(
    framework: str, found: dict[str, str], changed: dict[str, str], family: str = "tiny"
) -> None:
    """What fits a pattern, the last that does, is changed; all else is the core."""
    wanted = core(framework, family)
    for pattern, new in changed.items():
        fitting = [path for path in wanted if fnmatch(path, pattern)]
        assert fitting, pattern
        wanted |= dict.fromkeys(fitting, new)
    assert found == wanted


@pytest.mark.parametrize(("framework", "flags", "changed"), FEATURES)
def test_a_feature_changes_its_parts_alone(
    framework: str, flags: dict[str, Any], changed: dict[str, str]
) -> None:
    require_change(framework, parts(framework, toy(**PLAIN | flags)), changed)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_device_with_a_kernel_of_attention_has_other_parts(framework: str) -> None:
    config = toy("gpt2", policy="bf16", numerics="fast")
    changed = {"blocks.*.attend": f"{ATTENTION}.attend_fused"}
    if framework == "jax":
        changed |= {"*norm": "extra.gpu.FusedLayerNorm", "*norm[12]": "extra.gpu.FusedLayerNorm"}
    require_change(framework, parts(framework, config, GPU), changed, "gpt2")


@pytest.mark.parametrize(
    ("framework", "policy", "library", "product"),
    [
        ("jax", "bf16", "ynnpack", "extra.cpu.linear"),
        ("torch", "fp32", "onednn", "extra.onednn.linear"),
    ],
)
def test_a_cpu_with_a_library_has_other_products(
    framework: str, policy: str, library: str, product: str
) -> None:
    config = toy(**PLAIN | {"policy": policy})
    require_change(framework, parts(framework, config), {})
    changed = {"blocks.*.product": product}
    if framework == "torch":
        changed["head.product"] = product
    told = config.replace(autotune=f"matmul={library}")
    require_change(framework, parts(framework, told), changed)
    other = told.replace(policy={"bf16": "fp32", "fp32": "bf16"}[policy])
    require_change(framework, parts(framework, other), {})
    gpu = replace(CPU, platform="cuda")
    assert parts(framework, told, gpu) == parts(framework, config, gpu)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_places_are_the_core_s_unless_rows_are_packed(framework: str) -> None:
    package: Any = {"jax": jax_impl, "torch": torch_ref}[framework]
    as_array: Any = {"jax": jnp.asarray, "torch": torch.from_numpy}[framework]
    tokens = as_array(np.zeros((2, 16), np.int32))
    trainer = build(framework, toy(**PLAIN), CPU)
    model: Any = dict(modules_of(trainer))[""]
    assert type(model.places(Batch(tokens, tokens))) is package.model.Places
    packed = model.places(Batch(tokens, tokens, segments=tokens))
    assert type(packed) is package.extra.packed.Segments
