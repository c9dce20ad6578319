"""The config.json of a Hugging Face decoder <-> the fields of a `ModelConfig`.

GPT-2; and Llama, Mistral, Qwen2 and Qwen3, which differ in biases, norms of queries and keys, and
defaults. What a config asks for and the twins have not is refused by name. transformers is not
needed (decision 31).
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lockstep.config.model import LARGEST, ModelConfig
from lockstep.config.presets import GPT2, LLAMA
from lockstep.config.rope import Rope, parse_rope
from lockstep.errors import UserError, require, why
from lockstep.files.untrusted import Refused, read_json

LARGEST_FILE = 2**20  # bytes; a config.json has a few thousand
GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu-erf"}
NULL: Any = None


class Key(NamedTuple):
    """A key of config.json.

    Args:
        name: theirs.
        field: of `ModelConfig`.
        default: where the key is absent or null; its type is the type of the value. None: a whole
            number that must be there. A whole number is from 1, unless the default is 0.
        written: the attribute of `ModelConfig` that is written; "": the field.
    """

    name: str
    field: str
    default: Any = None
    written: str = ""


class Family(NamedTuple):
    """A model_type.

    Args:
        switches: fields of `ModelConfig` that all its models have.
        only: keys that must have these values, if they are there.
    """

    architecture: str
    switches: dict[str, Any]
    keys: tuple[Key, ...]
    only: dict[str, Any]


_GPT2 = (
    Key("n_layer", "n_layer"), Key("n_head", "n_head"), Key("n_embd", "d_model"),
    Key("n_positions", "context"), Key("vocab_size", "vocab"),
    Key("n_inner", "mlp_dim", 0, "d_mlp"), Key("layer_norm_epsilon", "norm_eps", 1e-5),
    Key("tie_word_embeddings", "tied", True),
)  # fmt: skip
_QWEN2 = (
    Key("num_hidden_layers", "n_layer"), Key("num_attention_heads", "n_head"),
    Key("hidden_size", "d_model"), Key("max_position_embeddings", "context"),
    Key("vocab_size", "vocab"), Key("num_key_value_heads", "n_kv_head", None, "kv_heads"),
    Key("intermediate_size", "mlp_dim", None, "d_mlp"), Key("rms_norm_eps", "norm_eps", 1e-6),
    Key("tie_word_embeddings", "tied", False),
)  # fmt: skip
_QWEN3 = (*_QWEN2, Key("head_dim", "head_dim", 0, "d_head"))
_LLAMA = (
    *(key._replace(default=0) if key.field == "n_kv_head" else key for key in _QWEN3),
    Key("attention_bias", "bias", False),
)
_WINDOW = Key("sliding_window", "window", 4096)
_SILU = {"hidden_act": "silu"}
FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", GPT2, _GPT2,
                   {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
                    "add_cross_attention": False}),
    "llama": Family("LlamaForCausalLM", LLAMA, _LLAMA, _SILU),
    "mistral": Family("MistralForCausalLM", LLAMA, _QWEN3, _SILU),
    "qwen2": Family("Qwen2ForCausalLM", {**LLAMA, "qkv_bias": True}, _QWEN2, _SILU),
    "qwen3": Family("Qwen3ForCausalLM", {**LLAMA, "qk_norm": True}, _QWEN3,
                    {**_SILU, "attention_bias": False}),
}  # fmt: skip
ROPES = {"factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor",
         "original": "original_max_position_embeddings"}  # fmt: skip


def read(path: Path, field: str = "--model") -> dict[str, Any]:
    """Read the fields of a config.json's model; its context is the longest that the model has.

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
    """Convert the content of a config.json.

    Raises:
        UserError: the twins do not have such a model.
    """
    kind = content.get("model_type", "gpt2" if "n_embd" in content else "llama")
    known = type(kind) is str and kind in FAMILIES
    require(known, field, path, f"model_type {_short(kind)}; use one of {', '.join(FAMILIES)}")
    family, reader = FAMILIES[kind], _Reader(path, field, content)
    for name, value in family.only.items():
        found = content.get(name, value)
        remedy = f"{name} {_short(found)} is not here, only {_short(value)}"
        require(found == value and type(found) is type(value), field, path, remedy)
    fields = {key.field: reader.get(key) for key in family.keys}
    if kind == "gpt2":
        gelu = content.get("activation_function") or "gelu_new"
        if type(gelu) is not str or gelu not in GELUS:
            reader.refuse("activation_function", f"use {', '.join(GELUS)}")
        fields["mlp"] = GELUS[gelu]
    else:
        fields["rope"] = str(_read_rope(reader))
        fields |= _read_special(reader, kind, fields)
    name = path.name if path.name != "config.json" else path.resolve().parent.name
    return {**family.switches, **fields, "model": name}


class _Reader(NamedTuple):
    """Reads the values of one config.json."""

    path: Path
    field: str
    content: dict[str, Any]

    def get(self, key: Key) -> Any:
        value = self.content.get(key.name)
        value = key.default if value is None else value
        kind = int if key.default is None else type(key.default)
        low = int(key.default != 0)
        if kind is int and not (type(value) is int and low <= value <= LARGEST):
            self.refuse(key.name, f"use an integer from {low}")
        if kind is float and not (type(value) in (int, float) and 0 < value < math.inf):
            self.refuse(key.name, "use a number above 0")
        if kind is bool and type(value) is not bool:
            self.refuse(key.name, "use true or false")
        return kind(value)

    def refuse(self, name: str, why: str) -> NoReturn:
        found = _short(self.content.get(name))
        raise UserError(f"{self.field} {self.path}: {name} is {found}; {why}")


def _read_special(reader: _Reader, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Read what only some families have: a bias that all layers share, and a sliding window."""
    if kind == "llama":
        mlp_bias = reader.get(Key("mlp_bias", "", False))
        if mlp_bias != fields["bias"]:
            reader.refuse("mlp_bias", "use the value of attention_bias")
        return {}
    windowed = kind == "mistral" or reader.get(Key("use_sliding_window", "", False))
    none = "sliding_window" in reader.content and reader.content["sliding_window"] is None
    return {"window": 0 if none else reader.get(_WINDOW)} if windowed else {}


def _read_rope(reader: _Reader) -> Rope:
    """Read `rope_parameters` of transformers 5, or the two keys of its forerunners."""
    given = reader.content.get("rope_parameters") or reader.content.get("rope_scaling") or {}
    if type(given) is not dict:
        reader.refuse("rope_scaling", "use an object or null")
    inner = reader._replace(content={"rope_theta": reader.content.get("rope_theta"), **given})
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "llama3"):
        inner.refuse("rope_type", "only default and llama3 are here")
    base = Rope(base=inner.get(Key("rope_theta", "base", 1e4)))
    if kind == "default":
        return base
    scaled = {name: inner.get(Key(key, name, math.nan)) for name, key in ROPES.items()}
    return parse_rope(str(base._replace(**scaled)))


def family_of(model: ModelConfig) -> str:
    """Find the family of a model.

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
    """Make a config.json that transformers 4 and 5 read; its vocabulary is not padded."""
    kind = family_of(model)
    family = FAMILIES[kind]
    content: dict[str, Any] = {
        "model_type": kind,
        "architectures": [family.architecture],
        "torch_dtype": dtype,
        **{key.name: getattr(model, key.written or key.field) for key in family.keys},
    }
    if kind == "gpt2":
        gelus = {ours: theirs for theirs, ours in reversed(GELUS.items())}
        return content | {"activation_function": gelus[model.mlp]}
    rope = parse_rope(model.rope)
    scaling = {"rope_type": "llama3"} | {key: getattr(rope, name) for name, key in ROPES.items()}
    content |= {
        "hidden_act": "silu",
        "rope_theta": rope.base,
        "rope_scaling": scaling if rope.factor != 1 else NULL,
    }
    if kind == "llama":
        return content | {"mlp_bias": model.bias}
    window = {"sliding_window": model.window or NULL}
    return content | window | ({"use_sliding_window": model.window > 0} if "q" in kind else {})


def _short(value: Any) -> str:
    return json.dumps(value)[:40]
