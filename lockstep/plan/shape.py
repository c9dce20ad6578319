"""The sizes of a model that memory and time depend on: of a preset, or of a Hugging Face config."""

from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.config import PRESETS, ModelConfig, huggingface
from lockstep.errors import require
from lockstep.model import params

CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's sizes: L layers, H heads, D model, F mlp, V vocabulary (padded), T context."""

    name: str
    n_layer: int
    n_head: int
    d_model: int
    d_queries: int  # of all heads together
    d_keys: int  # the same of the keys, which heads of queries may share
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
        """Counts the weights that are only looked up: positions, and an untied embedding."""
        return self.d_model * self.positions + (0 if self.tied else self.head_weights)

    @property
    def block_weights(self) -> int:
        """Counts the weights of all layers, without embeddings and head."""
        return self.weights - self.looked_up - self.head_weights

    @property
    def flops_per_token(self) -> int:
        """Counts model FLOPs, as MFU does (`lockstep/model/flops.py`)."""
        return (
            6 * (self.weights - self.looked_up) + 12 * self.n_layer * self.d_queries * self.context
        )


def of(name: str, context: int | None) -> Shape:
    """Reads the shape of a preset, of a folder as `--init` takes it, or of a config.json.

    Raises:
        UserError: neither; or a config that is no decoder of the two families.
    """
    if name in PRESETS:
        fields = PRESETS[name] if context is None else {**PRESETS[name], "context": context}
        return of_model(ModelConfig(model=name, **fields))
    path = Path(name) / CONFIG if Path(name).is_dir() else Path(name)
    remedy = f"neither a preset ({', '.join(PRESETS)}), nor a folder with {CONFIG}, nor its path"
    require(path.suffix == ".json", "--model", name, remedy)
    return of_huggingface(path, context)


def of_model(model: ModelConfig) -> Shape:
    return Shape(
        name=model.model, n_layer=model.n_layer, n_head=model.n_head, d_model=model.d_model,
        d_queries=model.d_queries, d_keys=model.kv_heads * model.d_head, d_mlp=model.d_mlp,
        vocab=model.d_vocab, context=model.context, gated=model.mlp == "swiglu",
        positions=model.context if model.position == "learned" else 0,
        weights=params.count(model), tied=model.tied,
    )  # fmt: skip


def of_huggingface(path: Path, context: int | None) -> Shape:
    """Reads the config.json of one of `huggingface.FAMILIES`."""
    fields = huggingface.read(path)
    longest = fields["context"]
    tokens = context or longest
    require(tokens <= longest, "--context", tokens, f"{path} has {longest} positions at most")
    # Learned positions are weights, of which a shorter sequence leaves some unused.
    model = ModelConfig(**{**fields, "context": tokens})
    whole = replace(model, context=longest, window=0)
    positions = longest if whole.position == "learned" else 0
    return replace(of_model(model), positions=positions, weights=params.count(whole))
