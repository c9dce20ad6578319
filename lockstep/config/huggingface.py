"""The config.json of a Hugging Face decoder <-> the fields of a `ModelConfig`.

GPT-2; and Llama, Mistral, Qwen2 and Qwen3, which differ in biases, norms of queries and keys, and
defaults. What a config asks for and the twins have not is refused by name.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.model import LARGEST, ModelConfig
from lockstep.config.presets import GPT2, LLAMA
from lockstep.config.rope import Rope, parse_rope
from lockstep.errors import UserError, require, why
from lockstep.files.untrusted import Refused, read_json

LARGEST_FILE = 2**20  # bytes; a config.json has a few thousand
GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu-erf"}
NULL: Any = None


class Family(NamedTuple):
    architecture: str
    switches: dict[str, Any]  # fields of `ModelConfig`
    defaults: dict[str, Any]  # of keys that may be absent from a config.json
    only: dict[str, Any]  # keys that must have these values, if they are there


_SIZES = {"head_dim": 0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4}
_MISTRAL = {**_SIZES, "sliding_window": 4096}
_QWEN = {**_MISTRAL, "use_sliding_window": False}
_SILU = {"hidden_act": "silu"}
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel", GPT2,
        {"n_inner": 0, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
         "tie_word_embeddings": True},
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
         "add_cross_attention": False},
    ),
    "llama": Family(
        "LlamaForCausalLM", LLAMA,
        {**_SIZES, "num_key_value_heads": 0, "attention_bias": False, "mlp_bias": False}, _SILU,
    ),
    "mistral": Family("MistralForCausalLM", LLAMA, _MISTRAL, _SILU),
    "qwen2": Family("Qwen2ForCausalLM", {**LLAMA, "qkv_bias": True}, _QWEN, _SILU),
    "qwen3": Family("Qwen3ForCausalLM", {**LLAMA, "qk_norm": True}, _QWEN,
                    {**_SILU, "attention_bias": False}),
}  # fmt: skip
ROPES = {"factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor",
         "original": "original_max_position_embeddings"}  # fmt: skip


def read(path: Path, field: str = "--model") -> dict[str, Any]:
    """The fields of a config.json's model; its context is the longest that the model has.

    Raises:
        UserError: it cannot be read, or is that of another model.
    """
    return fields_of(load(path, field), path, field)


def load(path: Path, field: str) -> dict[str, Any]:
    try:
        return read_json(path, limit=LARGEST_FILE, links=True)
    except (OSError, Refused) as error:
        what = "is " * isinstance(error, Refused) + why(error)
        raise UserError(f"{field} {path}: {what}; name a config.json") from None


def fields_of(content: dict[str, Any], path: Path, field: str) -> dict[str, Any]:
    """Raises UserError where the twins do not have such a model."""
    kind = content.get("model_type", "gpt2" if "n_embd" in content else "llama")
    known = type(kind) is str and kind in FAMILIES
    require(known, field, path, f"model_type {_short(kind)}; use one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    reader = _Reader(path, field, content, family.defaults)
    for name, value in family.only.items():
        found = content.get(name, value)
        remedy = f"{name} {_short(found)} is not here, only {_short(value)}"
        require(found == value and type(found) is type(value), field, path, remedy)
    found = _gpt2(reader) if kind == "gpt2" else _llama(reader, kind)
    name = path.name if path.name != "config.json" else path.resolve().parent.name
    return {**family.switches, **found, "model": name}


class _Reader(NamedTuple):
    """Of one config.json; what is absent or null takes its default."""

    path: Path
    field: str
    content: dict[str, Any]
    defaults: dict[str, Any]

    def get(self, name: str) -> Any:
        value = self.content.get(name)
        return self.defaults.get(name) if value is None else value

    def refuse(self, name: str, value: Any, why: str) -> UserError:
        return UserError(f"{self.field} {self.path}: {name} is {_short(value)}; {why}")

    def count(self, name: str) -> int:
        value, low = self.get(name), int(self.defaults.get(name) != 0)
        if type(value) is not int or not low <= value <= LARGEST:
            raise self.refuse(name, value, f"use an integer from {low}")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if type(value) not in (int, float) or not (0 < value < math.inf):
            raise self.refuse(name, value, "use a number above 0")
        return float(value)

    def switch(self, name: str) -> bool:
        value = self.get(name)
        if type(value) is not bool:
            raise self.refuse(name, value, "use true or false")
        return value


def _gpt2(reader: _Reader) -> dict[str, Any]:
    gelu = reader.get("activation_function")
    if type(gelu) is not str or gelu not in GELUS:
        raise reader.refuse("activation_function", gelu, f"use {', '.join(GELUS)}")
    return {
        "n_layer": reader.count("n_layer"),
        "n_head": reader.count("n_head"),
        "d_model": reader.count("n_embd"),
        "context": reader.count("n_positions"),
        "vocab": reader.count("vocab_size"),
        "mlp_dim": reader.count("n_inner"),
        "mlp": GELUS[gelu],
        "norm_eps": reader.number("layer_norm_epsilon"),
        "tied": reader.switch("tie_word_embeddings"),
    }


def _llama(reader: _Reader, kind: str) -> dict[str, Any]:
    found = {
        "n_layer": reader.count("num_hidden_layers"),
        "n_head": reader.count("num_attention_heads"),
        "d_model": reader.count("hidden_size"),
        "context": reader.count("max_position_embeddings"),
        "vocab": reader.count("vocab_size"),
        "n_kv_head": reader.count("num_key_value_heads"),
        "head_dim": reader.count("head_dim") if kind != "qwen2" else 0,
        "mlp_dim": reader.count("intermediate_size"),
        "norm_eps": reader.number("rms_norm_eps"),
        "tied": reader.switch("tie_word_embeddings"),
        "rope": str(_rope(reader)),
    }
    if kind == "llama":
        bias, mlp_bias = reader.switch("attention_bias"), reader.switch("mlp_bias")
        if bias != mlp_bias:
            raise reader.refuse("mlp_bias", mlp_bias, "use the value of attention_bias")
        found["bias"] = bias
    if kind == "mistral" or (kind != "llama" and reader.switch("use_sliding_window")):
        found["window"] = _window(reader)
    return found


def _window(reader: _Reader) -> int:
    """0 where null says that there is none."""
    absent = "sliding_window" in reader.content and reader.content["sliding_window"] is None
    return 0 if absent else reader.count("sliding_window")


def _rope(reader: _Reader) -> Rope:
    """Of transformers 5, in `rope_parameters`; of its forerunners, in two keys."""
    given = reader.content.get("rope_parameters") or reader.content.get("rope_scaling") or {}
    if type(given) is not dict:
        raise reader.refuse("rope_scaling", given, "use an object or null")
    inner = reader._replace(content={"rope_theta": reader.get("rope_theta"), **given})
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise reader.refuse("rope_type", kind, "only default and llama3 are here")
    base = Rope(base=inner.number("rope_theta"))
    if kind == "default":
        return base
    scaled = base._replace(**{name: inner.number(key) for name, key in ROPES.items()})
    return parse_rope(str(scaled))


def family_of(model: ModelConfig) -> str:
    """
    Raises:
        UserError: transformers has no decoder with these switches.
    """
    if GPT2 | {"mlp": model.mlp} == {name: getattr(model, name) for name in GPT2} and not (
        model.mlp == "swiglu" or model.qkv_bias or model.qk_norm or model.head_dim
    ):
        return "gpt2"
    rotating = {name: getattr(model, name) for name in LLAMA if name != "bias"}
    special = model.qkv_bias + model.qk_norm + model.bias
    if rotating.items() <= LLAMA.items() and special <= 1 and not (model.bias and model.window):
        kinds = {"qwen2": model.qkv_bias, "qwen3": model.qk_norm, "mistral": model.window > 0}
        found = next((name for name, is_it in kinds.items() if is_it), "llama")
        if found != "qwen2" or model.d_queries == model.d_model:
            return found
    names = (*GPT2, "qkv_bias", "qk_norm")
    switches = ", ".join(f"{name} {getattr(model, name)}" for name in names)
    families = ", ".join(FAMILIES)
    raise UserError(f"--model {model.model}: none of {families} has {switches}; use another model")


def config_json(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of a config.json that transformers 4 and 5 read; its vocabulary is not padded."""
    kind = family_of(model)
    content: dict[str, Any] = {
        "model_type": kind,
        "architectures": [FAMILIES[kind].architecture],
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "torch_dtype": dtype,
    }
    if kind == "gpt2":
        gelu = {ours: theirs for theirs, ours in reversed(GELUS.items())}[model.mlp]
        return content | {
            "n_layer": model.n_layer,
            "n_head": model.n_head,
            "n_embd": model.d_model,
            "n_positions": model.context,
            "n_inner": model.d_mlp,
            "activation_function": gelu,
            "layer_norm_epsilon": model.norm_eps,
        }
    rope = parse_rope(model.rope)
    scaling = {"rope_type": "llama3"} | {key: getattr(rope, name) for name, key in ROPES.items()}
    content |= {
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": model.kv_heads,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_mlp,
        "max_position_embeddings": model.context,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": rope.base,
        "rope_scaling": scaling if rope.factor != 1 else NULL,
    }
    if kind != "qwen2":
        content["head_dim"] = model.d_head
    if kind == "llama":
        content |= {"attention_bias": model.bias, "mlp_bias": model.bias}
    if kind != "llama":
        content["sliding_window"] = model.window or NULL
    if kind.startswith("qwen"):
        content["use_sliding_window"] = model.window > 0
    return content


def _short(value: Any) -> str:
    return json.dumps(value)[:40]
