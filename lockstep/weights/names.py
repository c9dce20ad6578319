"""transformers' names and layouts of the canonical parameters.

In Llama and its like queries, keys and values are apart; in GPT-2 matrices are in x out (Conv1D).
RoPE needs no permutation: there and here channel j turns with channel j + K/2.
"""

import re
from collections.abc import Callable
from itertools import accumulate

import numpy as np

from lockstep.config import ModelConfig
from lockstep.config.huggingface import family_of
from lockstep.model.params import shapes

GPT2 = {
    r"^embed": "transformer.wte",
    r"^position": "transformer.wpe",
    r"^blocks": "transformer.h",
    r"^norm": "transformer.ln_f",
    r"^head": "lm_head",
    r"\.norm(\d)": r".ln_\1",
    r"attn\.qkv": "attn.c_attn",
    r"attn\.proj": "attn.c_proj",
    r"mlp\.up": "mlp.c_fc",
    r"mlp\.down": "mlp.c_proj",
}
LLAMA = {
    r"^embed": "model.embed_tokens",
    r"^blocks": "model.layers",
    r"^norm": "model.norm",
    r"^head": "lm_head",
    r"\.norm1": ".input_layernorm",
    r"\.norm2": ".post_attention_layernorm",
    r"attn\.qkv": "self_attn.{}_proj",
    r"attn\.proj": "self_attn.o_proj",
    r"attn\.([qk])_norm": r"self_attn.\1_norm",
    r"mlp\.(gate|up|down)": r"mlp.\1_proj",
}


def theirs(model: ModelConfig, name: str) -> list[str]:
    """The tensors that make up a canonical one, one below the other."""
    for ours, other in (GPT2 if family_of(model) == "gpt2" else LLAMA).items():
        name = re.sub(ours, other, name)
    return [name.format(letter) for letter in "qkv"] if "{}" in name else [name]


def table(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """transformers' name -> shape, in the order of the forward pass."""
    return {
        part: shape[::-1] if is_turned(model, name) else shape
        for name, whole in shapes(model).items()
        for part, shape in zip(theirs(model, name), _split_shape(model, name, whole))
    }


def is_turned(model: ModelConfig, name: str) -> bool:
    matrix = name.startswith("blocks") and name.endswith(".weight") and "norm" not in name
    return matrix and family_of(model) == "gpt2"


def join(model: ModelConfig, name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """A canonical tensor, of what `read` has by transformers' names."""
    parts = [read(part) for part in theirs(model, name)]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole.T if is_turned(model, name) else whole


def split(model: ModelConfig, name: str, whole: np.ndarray) -> dict[str, np.ndarray]:
    """The inverse: views of a canonical tensor by transformers' names."""
    rows = [shape[0] for shape in _split_shape(model, name, whole.shape)]
    parts = np.split(whole, list(accumulate(rows))[:-1])
    turned = (part.T for part in parts) if is_turned(model, name) else parts
    return dict(zip(theirs(model, name), turned))


def _split_shape(model: ModelConfig, name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(theirs(model, name)) == 1:
        return [shape]
    keys = model.kv_heads * model.d_head
    return [(rows, *shape[1:]) for rows in (model.d_queries, keys, keys)]
