"""The sizes of a model that memory and time depend on: of a preset, or of a Hugging Face config."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import DEEPEST, PRESETS, ModelConfig
from lockstep.errors import UserError, require
from lockstep.files.untrusted import Refused, read_json
from lockstep.model import flops, params

LARGEST_FILE = 2**20  # bytes; a config.json has a few thousand


@dataclass(frozen=True, kw_only=True)
class Shape:
    """L layers, H heads, D model, F mlp, V vocabulary; T is the context."""

    name: str
    n_layer: int
    n_head: int
    d_model: int
    d_mlp: int
    vocab: int
    context: int
    gated: bool  # SwiGLU has two matrices where GELU has one
    positions: int  # learned position embeddings
    weights: int  # all parameters
    tied: bool

    @property
    def head_weights(self) -> int:
        return self.vocab * self.d_model

    @property
    def looked_up(self) -> int:
        """Weights that nothing is multiplied by: positions, and an embedding that is not the head
        too."""
        return self.d_model * self.positions + (0 if self.tied else self.head_weights)

    @property
    def block_weights(self) -> int:
        """All layers': without embeddings and head."""
        return self.weights - self.looked_up - self.head_weights

    @property
    def flops_per_token(self) -> int:
        """Of the matmuls. MFU's convention (`flops.per_token`) counts an untied embedding too; what
        is only looked up takes no time."""
        multiplied = self.weights - self.looked_up
        return flops.of(multiplied, self.n_layer, self.d_model, self.context)


def of(name: str, context: int | None) -> Shape:
    """Of a preset's name or the path of a config.json.

    Raises:
        UserError: neither; or a config that is no decoder of the two families.
    """
    if name in PRESETS:
        model = ModelConfig(model=name, **{**PRESETS[name], **_drop_none(context=context)})
        return of_model(model)
    remedy = f"neither a preset ({', '.join(PRESETS)}) nor the path of a config.json"
    require(name.endswith(".json"), "--model", name, remedy)
    return of_huggingface(Path(name), context)


def of_model(model: ModelConfig) -> Shape:
    return Shape(
        name=model.model, n_layer=model.n_layer, n_head=model.n_head, d_model=model.d_model,
        d_mlp=model.d_mlp, vocab=model.vocab, context=model.context, gated=model.mlp == "swiglu",
        positions=model.context if model.position == "learned" else 0,
        weights=params.count(model), tied=model.tied,
    )  # fmt: skip


def of_huggingface(path: Path, context: int | None) -> Shape:
    """Of the config.json of GPT-2, or of a model built as Llama is."""
    content = _read(path)
    if "n_embd" in content:
        names = ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions")
        layers, heads, d, vocab, longest = (_number(path, content, name) for name in names)
        f = _number(path, content, "n_inner", 4 * d)
        block = 4 * d * d + 4 * d + 2 * d * f + f + d + 4 * d
        weights = layers * block + (vocab + longest) * d + 2 * d
        gated, positions = False, longest
    else:
        names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size",
                 "max_position_embeddings")  # fmt: skip
        layers, heads, d, vocab, longest = (_number(path, content, name) for name in names)
        f = _number(path, content, "intermediate_size")
        groups = _number(path, content, "num_key_value_heads", heads)
        width = _number(path, content, "head_dim", d // heads)
        block = 2 * d * width * (heads + groups) + 3 * d * f + 2 * d
        weights = layers * block + vocab * d + d
        gated, positions = True, 0
    require(layers <= DEEPEST, "--model", path, f"{layers} layers; use one of up to {DEEPEST}")
    tied = bool(content.get("tie_word_embeddings", "n_embd" in content))
    tokens = context or longest
    require(tokens <= longest, "--context", tokens, f"{path} has {longest} positions at most")
    return Shape(
        name=path.name if path.name != "config.json" else path.resolve().parent.name,
        n_layer=layers, n_head=heads, d_model=d, d_mlp=f, vocab=vocab, context=tokens,
        gated=gated, positions=positions, weights=weights + (0 if tied else vocab * d), tied=tied,
    )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, limit=LARGEST_FILE, links=True)
    except (OSError, Refused) as error:
        why = error.strerror if isinstance(error, OSError) else f"is {error}"
        raise UserError(f"--model {path}: {why}; name a preset or a config.json") from None


def _number(path: Path, content: dict[str, Any], name: str, default: int | None = None) -> int:
    value = content.get(name)
    if value is None and default is not None:
        return default
    fits = type(value) is int and 1 <= value < 2**31
    known = "only GPT-2's config and those like Llama's are understood"
    require(fits, "--model", path, f"{name} is {json.dumps(value)[:40]}; {known}")
    assert isinstance(value, int)
    return value


def _drop_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
