"""Other programs' names and layouts of the canonical parameters, as rules of a map.

RoPE needs no permutation: in transformers as here channel j turns with channel j + K/2.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from lockstep.config import ModelConfig
from lockstep.convert.convert import make_array
from lockstep.convert.plan import Plan, TensorRule, make_plan
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
    r"attn\.qkv": "self_attn.*_proj",
    r"attn\.proj": "self_attn.o_proj",
    r"attn\.([qk])_norm": r"self_attn.\1_norm",
    r"mlp\.(gate|up|down)": r"mlp.\1_proj",
}


@dataclass(frozen=True)
class Naming:
    """The names and layouts that another program has for the parameters of one model.

    Attributes:
        renamed: expressions in canonical names -> theirs; * stands for each of q, k and v.
        turned: the blocks' matrices are in x out.
    """

    model: ModelConfig
    renamed: dict[str, str]
    turned: bool = False

    @cached_property
    def rules(self) -> list[TensorRule]:
        """Returns the rules of the map, from the other program's tensors to the canonical ones."""
        ours = (re.sub(r"^blocks\.\d+", "blocks.{layer}", name) for name in shapes(self.model))
        return [self._rule(name) for name in dict.fromkeys(ours)]

    def _rule(self, name: str) -> TensorRule:
        theirs = name
        for expression, words in self.renamed.items():
            theirs = re.sub(expression, words, theirs)
        parts = "qkv" if "*" in theirs else ("out",)
        matrix = name.endswith(".weight") and "norm" not in name
        axes = "{} in" if matrix else "{}"
        turned = self.turned and matrix and name.startswith("blocks")
        return TensorRule(
            {theirs.replace("*", part): "in out" if turned else axes.format(part)
             for part in parts},
            {name: axes.format("+".join(parts))},
        )  # fmt: skip

    def plan(self, source: dict[str, tuple[int, ...]], *, back: bool = False) -> Plan:
        """Plans the conversion of tensors of these shapes, all of them or some modules'.

        Args:
            back: from canonical names to the other program's.
        """
        side = "port" if back else "reference"
        rules = [rule for rule in self.rules
                 if any(pattern.match(name, {}) is not None
                        for pattern in rule.axes(side) for name in source)]  # fmt: skip
        keys = self.model.kv_heads * self.model.d_head
        sizes = {"q": self.model.d_queries, "k": keys, "v": keys}
        return make_plan(rules, source, back=back, sizes=sizes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of the forward pass."""
        return self.plan(shapes(self.model), back=True).shapes

    def split(self, arrays: Arrays) -> Arrays:
        """Converts canonical tensors, all of them or some modules'."""
        plan = self.plan({name: x.shape for name, x in arrays.items()}, back=True)
        return {name: make_array(plan, name, arrays.__getitem__) for name in plan.shapes}


def of_transformers(model: ModelConfig) -> Naming:
    """Returns the names of transformers; its Conv1D, of GPT-2, is in x out."""
    gpt2 = model.position == "learned"
    return Naming(model, GPT2 if gpt2 else LLAMA, turned=gpt2)
