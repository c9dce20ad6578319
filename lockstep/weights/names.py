"""Other programs' names and layouts of the canonical parameters.

RoPE needs no permutation: in transformers as here channel j turns with channel j + K/2.
"""

import re
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from lockstep.config import ModelConfig
from lockstep.model.params import Arrays, shapes

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


class Layout(NamedTuple):
    """The names and layouts that another program has for the parameters of one model."""

    model: ModelConfig
    renamed: dict[str, str]
    turned: bool = False  # the blocks' matrices are in x out

    def names(self, name: str) -> list[str]:
        """Name the tensors of a canonical one: Llama has queries, keys and values apart."""
        for ours, theirs in self.renamed.items():
            name = re.sub(ours, theirs, name)
        return [name.format(letter) for letter in "qkv"] if "{}" in name else [name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of the forward pass."""
        empty = {name: np.broadcast_to(np.int8(0), s) for name, s in shapes(self.model).items()}
        parts = [self.split(name, array) for name, array in empty.items()]
        return {name: part.shape for each in parts for name, part in each.items()}

    def rows(self, name: str) -> dict[str, slice]:
        """Find the rows of a canonical tensor that each of the other program's tensors has."""
        names, model = self.names(name), self.model
        if len(names) == 1:
            return {names[0]: slice(None)}
        keys = model.kv_heads * model.d_head
        ends = list(accumulate([model.d_queries, keys, keys]))
        return dict(zip(names, map(slice, [0, *ends], ends)))

    def split(self, name: str, whole: np.ndarray) -> Arrays:
        """Make views of a canonical tensor, by the other program's names."""
        parts = {theirs: whole[rows] for theirs, rows in self.rows(name).items()}
        return {theirs: x.T for theirs, x in parts.items()} if self._turns(name) else parts

    def join(
        self, name: str, dtype: np.dtype, fill: Callable[[str, np.ndarray], None]
    ) -> np.ndarray:
        """Make a canonical tensor; `fill` writes the other program's into a contiguous array."""
        shape = shapes(self.model)[name]
        whole = np.empty(shape[::-1], dtype).T if self._turns(name) else np.empty(shape, dtype)
        for part, view in self.split(name, whole).items():
            fill(part, view)
        return whole

    def _turns(self, name: str) -> bool:
        matrix = name.startswith("blocks") and name.endswith(".weight") and "norm" not in name
        return self.turned and matrix


def of_transformers(model: ModelConfig) -> Layout:
    """Make the layout of transformers; its Conv1D, of GPT-2, is in x out."""
    gpt2 = model.position == "learned"
    return Layout(model, GPT2 if gpt2 else LLAMA, turned=gpt2)
