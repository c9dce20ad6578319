# ruff: noqa: E501  (tables of shapes)
"""Whose tensor is whose where one side fuses, stacks, numbers or names in its own way."""

from collections.abc import Mapping

import pytest

from lockstep.check import mapping
from lockstep.check.layout import Shape
from parity_tests.check.test_comparisons import tensors

D, F, H, K = 16, 32, 4, 4
Shapes = Mapping[str, Shape]


def fused(name: str) -> dict[str, Shape]:
    """torch's attention."""
    return {f"{name}.in_proj_weight": (3 * D, D), f"{name}.in_proj_bias": (3 * D,),
            f"{name}.out_proj.weight": (D, D), f"{name}.out_proj.bias": (D,)}  # fmt: skip


def by_heads(name: str, *layers: int) -> dict[str, Shape]:
    """Flax's, with an axis of layers where these are stacked."""
    parts = {f"{name}.{part}.{leaf}": (*layers, *shape) for part in ("query", "key", "value")
             for leaf, shape in (("kernel", (D, H, K)), ("bias", (H, K)))}  # fmt: skip
    return parts | {f"{name}.out.kernel": (*layers, H, K, D), f"{name}.out.bias": (*layers, D)}


def haiku(name: str, *layers: int) -> dict[str, Shape]:
    """Whose output projection is called linear."""
    return {f"{name}.{part}.{leaf}": (*layers, *shape)
            for part in ("key", "linear", "query", "value")
            for leaf, shape in (("w", (D, D)), ("b", (D,)))}  # fmt: skip


def expected(ours: str, theirs: str, out: str = "out") -> set[tuple[str, str]]:
    """Of an attention: the module of each, and where its tensors are in it."""
    cuts = {"query": "[0:16]", "key": "[16:32]", "value": "[32:48]"}
    whole = {
        (f"{ours}.{out}", f"{theirs}.out_proj.weight"),
        (f"{ours}.{out}", f"{theirs}.out_proj.bias"),
    }
    return whole | {(f"{ours}.{part}", f"{theirs}.in_proj_{leaf}{cut}")
                    for part, cut in cuts.items() for leaf in ("weight", "bias")}  # fmt: skip


def found(reference: Shapes, port: Shapes) -> set[tuple[str, str]]:
    """(module of the port, piece of the reference), with the layer's number in both."""
    made = mapping.propose(tensors(reference, "torch"), tensors(port, "jax"))
    assert not made.only_port and not made.only_reference
    pairs = set()
    for entry in made.entries:
        module, layer = entry.port.name.rpartition(".")[0], entry.port.layer
        pairs.add((module if layer is None else f"{module}@{layer}", str(entry.reference)))
    return pairs


LAYERS = {
    "stacked": ("layers.attn@{}", lambda n: by_heads("layers.attn", n) | {"layers.norm.scale": (n, D), "layers.norm.bias": (n, D)}, "layers.norm@{}"),
    "scanned, with numbers that are no layers'": ("Scan_0.Attention_0@{}", lambda n: by_heads("Scan_0.Attention_0", n) | {"Scan_0.LayerNorm_0.scale": (n, D), "Scan_0.LayerNorm_0.bias": (n, D)}, "Scan_0.LayerNorm_0@{}"),
    "numbered twice": ("Layer_{}.Attention_0", lambda n: {name: shape for i in range(n) for name, shape in (by_heads(f"Layer_{i}.Attention_0") | {f"Layer_{i}.LayerNorm_0.scale": (D,), f"Layer_{i}.LayerNorm_0.bias": (D,)}).items()}, "Layer_{}.LayerNorm_0"),
    "Haiku's": ("layers.attn@{}", lambda n: haiku("layers.attn", n) | {"layers.norm.scale": (n, D), "layers.norm.offset": (n, D)}, "layers.norm@{}"),
}  # fmt: skip


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_fused_attention_beside_layers(kind: str, layers: int) -> None:
    """Three layers of a query are as large as one layer's query, key and value."""
    ours, port, norm = LAYERS[kind]
    reference: dict[str, Shape] = {}
    pairs = set()
    for i in range(layers):
        reference |= fused(f"layers.{i}.self_attn")
        reference |= {f"layers.{i}.norm1.weight": (D,), f"layers.{i}.norm1.bias": (D,)}
        pairs |= {(norm.format(i), f"layers.{i}.norm1.{leaf}") for leaf in ("weight", "bias")}
        out = "linear" if kind == "Haiku's" else "out"
        module = ours.format(i)
        for part, piece in expected("", f"layers.{i}.self_attn", out):
            name, _, layer = module.partition("@")
            pairs.add((f"{name}{part}" + (f"@{layer}" if layer else ""), piece))
    assert found(reference, port(layers)) == pairs


def test_two_attentions_of_a_layer_are_told_by_their_names() -> None:
    reference = fused("layers.0.self_attn") | fused("layers.0.multihead_attn")
    port = by_heads("Layer_0.multihead_attn") | by_heads("Layer_0.self_attn")
    pairs = [
        expected(f"Layer_0.{name}", f"layers.0.{name}") for name in ("self_attn", "multihead_attn")
    ]
    assert found(reference, port) == pairs[0] | pairs[1]


def test_a_module_called_in_another_s_arguments_is_numbered_after_it() -> None:
    reference: Shapes = {
        "linear1.weight": (F, D),
        "linear1.bias": (F,),
        "linear2.weight": (D, F),
        "linear2.bias": (D,),
    }
    port: Shapes = {
        "Dense_0.kernel": (F, D),
        "Dense_0.bias": (D,),
        "Dense_1.kernel": (D, F),
        "Dense_1.bias": (F,),
    }
    assert ("Dense_1", "linear1.weight") in found(reference, port)


def test_the_members_of_a_sequential_are_no_layers() -> None:
    of_one: Shapes = {"0.weight": (F, D), "0.bias": (F,), "3.weight": (D, F), "3.bias": (D,)}
    reference = {
        f"blocks.{i}.mlp.{name}": shape for i in range(2) for name, shape in of_one.items()
    }
    port: Shapes = {
        "blocks.up.kernel": (2, D, F),
        "blocks.up.bias": (2, F),
        "blocks.down.kernel": (2, F, D),
        "blocks.down.bias": (2, D),
    }
    assert found(reference, port) == {
        (f"blocks.{name}@{i}", f"blocks.{i}.mlp.{at}.{leaf}")
        for i in range(2) for name, at in (("up", 0), ("down", 3)) for leaf in ("weight", "bias")
    }  # fmt: skip
