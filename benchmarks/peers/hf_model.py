"""transformers' GPT-2 and Llama for a `ModelConfig`: the model, and names and layouts both ways."""

import re
from typing import Any

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from lockstep.config import ModelConfig
from lockstep.config.presets import GPT2, LLAMA
from lockstep.errors import UserError
from lockstep.model.params import Arrays, shapes

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": {name: value for name, value in LLAMA.items() if name != "bias"},  # or with
}

NAMES = {
    "gpt2": {
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
    },
    "llama": {
        r"^embed": "model.embed_tokens",
        r"^blocks": "model.layers",
        r"^norm": "model.norm",
        r"^head": "lm_head",
        r"\.norm1": ".input_layernorm",
        r"\.norm2": ".post_attention_layernorm",
        r"attn\.qkv": "self_attn.{}_proj",
        r"attn\.proj": "self_attn.o_proj",
        r"mlp\.(gate|up|down)": r"mlp.\1_proj",
    },
}


def family(model: ModelConfig) -> str:
    """Raises UserError where neither family has these switches."""
    for name, switches in FAMILIES.items():
        if switches.items() <= vars(model).items():
            return name
    found = ", ".join(f"{name} {getattr(model, name)}" for name in GPT2)
    raise UserError(
        f"--model {model.model}: neither transformers' GPT-2 nor its Llama has {found}; "
        "use --model gpt2 or tiny"
    )


def build(model: ModelConfig, *, attention: str = "eager", **changed: Any) -> PreTrainedModel:
    """The model in float32, with weights of transformers' own; `changed` goes into its config."""
    if family(model) == "gpt2":
        options: dict[str, Any] = dict(
            n_embd=model.d_model, n_layer=model.n_layer, n_head=model.n_head
        )
        options |= dict(n_positions=model.context, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        make: Any = (GPT2LMHeadModel, GPT2Config)
    else:
        options = dict(hidden_size=model.d_model, intermediate_size=model.d_mlp)
        options |= dict(num_hidden_layers=model.n_layer, num_attention_heads=model.n_head)
        options |= dict(max_position_embeddings=model.context, rms_norm_eps=1e-5)
        options |= dict(attention_bias=model.bias, mlp_bias=model.bias)
        make = (LlamaForCausalLM, LlamaConfig)
    options |= dict(vocab_size=model.vocab, tie_word_embeddings=model.tied, use_cache=False)
    options |= dict(bos_token_id=None, eos_token_id=None) | changed
    net = make[0](make[1](attn_implementation=attention, **options))
    net.loss_type = "ForCausalLM"  # which it would fall back to with a warning
    return net


def names(model: ModelConfig, name: str) -> list[str]:
    """transformers' for a canonical one: in Llama queries, keys and values are apart."""
    for ours, theirs in NAMES[family(model)].items():
        name = re.sub(ours, theirs, name)
    return [name.format(letter) for letter in "qkv"] if "{}" in name else [name]


def translate(model: ModelConfig, arrays: Arrays) -> Arrays:
    """Canonical names and layouts -> transformers'."""
    out: Arrays = {}
    for name, array in arrays.items():
        theirs = names(model, name)
        out |= zip(theirs, np.split(_turn(model, name, array), len(theirs)))
    return out


def canonical(model: ModelConfig, arrays: Arrays) -> Arrays:
    """The inverse of `translate`, in the order of the forward pass."""
    joined = {n: np.concatenate([arrays[part] for part in names(model, n)]) for n in shapes(model)}
    return {name: _turn(model, name, array) for name, array in joined.items()}


def _turn(model: ModelConfig, name: str, array: np.ndarray) -> np.ndarray:
    """GPT-2's Conv1D is in x out."""
    conv1d = family(model) == "gpt2" and name.startswith("blocks") and array.ndim == 2
    return array.T if conv1d else array


@torch.no_grad()
def load(net: PreTrainedModel, model: ModelConfig, params: Arrays) -> None:
    """Copies canonical weights into the model, every one."""
    weights, named = translate(model, params), dict(net.named_parameters())
    assert named.keys() == weights.keys()
    for name, parameter in named.items():
        assert parameter.shape == weights[name].shape, name
        parameter.copy_(torch.from_numpy(np.array(weights[name])))
