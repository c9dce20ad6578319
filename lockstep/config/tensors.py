"""A model's parameters: their canonical names, their shapes, and which of them a run trains."""

from lockstep.config import islands
from lockstep.config.model import ModelConfig

ADAPTERS = (".lora_a", ".lora_b")  # of a linear layer W: W + alpha / rank * B A


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Maps canonical names to shapes, in the order of the forward pass."""
    d, f, v, k = model.d_model, model.d_mlp, model.d_vocab, model.d_head
    out: dict[str, tuple[int, ...]] = {"embed.weight": (v, d)}
    if model.position == "learned":
        out["position.weight"] = (model.context, d)

    def norm(name: str) -> None:
        out[f"{name}.weight"] = (d,)
        if model.norm == "layernorm" and model.bias:
            out[f"{name}.bias"] = (d,)

    def linear(name: str, d_out: int, d_in: int, bias: bool = model.bias) -> None:
        out[f"{name}.weight"] = (d_out, d_in)
        if bias:
            out[f"{name}.bias"] = (d_out,)
        if rank := model.adapter_rank(name):
            out[f"{name}.lora_a"], out[f"{name}.lora_b"] = (rank, d_in), (d_out, rank)

    for i in range(model.n_layer):
        norm(f"blocks.{i}.norm1")
        linear(f"blocks.{i}.attn.qkv", model.d_qkv, d, model.bias or model.qkv_bias)
        if model.qk_norm:
            out |= {f"blocks.{i}.attn.{each}_norm.weight": (k,) for each in "qk"}
        linear(f"blocks.{i}.attn.proj", d, model.d_queries)
        norm(f"blocks.{i}.norm2")
        if model.mlp == "swiglu":
            linear(f"blocks.{i}.mlp.gate", f, d)
        linear(f"blocks.{i}.mlp.up", f, d)
        linear(f"blocks.{i}.mlp.down", d, f)
    norm("norm")
    if not model.tied:
        out["head.weight"] = (v, d)
    return out


def trains(name: str, model: ModelConfig, freeze: str = "") -> bool:
    """Say if a run trains a parameter: none that `freeze` names; with adapters, only those."""
    frozen = freeze and islands.match(freeze, name)
    return not frozen and (not model.lora_rank or name.endswith(ADAPTERS))
