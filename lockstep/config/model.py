"""The model's section of the configuration.

Shapes, everywhere in Lockstep: B batch, T time (context), D model, H heads, G heads of keys and
values, K head dim, F mlp, V vocabulary, L layers, N micro-batches in one optimizer step. What has
no help is no flag: a preset has it, or a config.json.
"""

import math
from dataclasses import dataclass, replace

from lockstep.config import islands
from lockstep.config.fields import flag, flag_name, require_choice
from lockstep.config.rope import parse_rope
from lockstep.errors import require, require_range

LARGEST = 2**31 - 1  # counts and shapes are int32 in JAX
# Limits of what takes memory before any file's size shows it: config.json may be untrusted.
DEEPEST = 2000  # layers; a checkpoint's record still holds their names
LONGEST = 2**20  # tokens of context; RoPE has a table of them
# What a run says of its model beside the weights that it starts from.
OF_A_RUN = ("context", "dropout", "lora_rank", "lora_alpha", "lora_targets")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """model"""

    model: str = flag("auto", "preset", choices=(), derived="tiny on a CPU, 10m on an accelerator")
    n_layer: int = flag(4, "transformer blocks", unit="L", derived="the preset's")
    n_head: int = flag(4, "attention heads", unit="H", derived="the preset's")
    d_model: int = flag(128, "width of the residual stream", unit="D", derived="the preset's")
    context: int = flag(128, "tokens a sequence", unit="T", derived="the preset's")
    vocab: int = flag(256, "tokens in the vocabulary", unit="V", derived="the preset's")
    dropout: float = flag(0.0, "probability of dropping, on the embedding and each sublayer")
    lora_rank: int = flag(
        0, "LoRA: adds a product of two matrices of this rank to linear layers; trains only those"
    )
    lora_alpha: float = flag(16.0, "LoRA: that product is multiplied by alpha / rank")
    lora_targets: str = flag(
        "", "LoRA: linear layers, by patterns such as blocks.*.attn", derived="all in the blocks"
    )
    position: str = "rope"
    norm: str = "rmsnorm"
    mlp: str = "swiglu"
    bias: bool = False
    tied: bool = False
    qkv_bias: bool = False  # on queries, keys and values alone
    qk_norm: bool = False  # of each head's queries and keys, before they are rotated
    norm_eps: float = 1e-5
    rope: str = "base=10000"  # see `lockstep.config.rope`
    window: int = 0  # tokens that one sees in the model this one is read as; 0: all
    # 0 stands for what `kv_heads`, `d_head`, `d_mlp` and `d_vocab` derive.
    n_kv_head: int = 0
    head_dim: int = 0
    mlp_dim: int = 0
    padded_vocab: int = 0

    @property
    def kv_heads(self) -> int:
        """G, heads of keys and values: each serves H / G heads of queries."""
        return self.n_kv_head or self.n_head

    @property
    def d_head(self) -> int:
        return self.head_dim or self.d_model // self.n_head

    @property
    def d_queries(self) -> int:
        """Computes H K, the width of all queries."""
        return self.n_head * self.d_head

    @property
    def d_qkv(self) -> int:
        """Computes (H + 2 G) K, the width of queries, keys and values."""
        return (self.n_head + 2 * self.kv_heads) * self.d_head

    @property
    def d_mlp(self) -> int:
        """4 D for GELU; for SwiGLU 8/3 D, the same cost, rounded up to a multiple of 64."""
        gated = self.mlp == "swiglu"
        return self.mlp_dim or (math.ceil(self.d_model / 24) * 64 if gated else 4 * self.d_model)

    @property
    def d_vocab(self) -> int:
        """Rows of embedding and head: those from V on are padding, and no token's."""
        return self.padded_vocab or self.vocab

    @property
    def biased(self) -> bool:
        """Says if some linear layer has a bias."""
        return self.bias or self.qkv_bias

    @property
    def matmuls(self) -> list[str]:
        """Lists the modules that multiply matrices, in the order of the forward pass."""
        mlp = ["mlp.gate"] * (self.mlp == "swiglu") + ["mlp.up", "mlp.down"]
        inside = ["attn.qkv", "attn.attend", "attn.proj", *mlp]
        return [*(f"blocks.{i}.{name}" for i in range(self.n_layer) for name in inside), "head"]

    @property
    def base(self) -> "ModelConfig":
        """Returns the model without adapters."""
        return replace(self, lora_rank=0, lora_targets="")

    @property
    def lora_scale(self) -> float:
        return self.lora_alpha / self.lora_rank if self.lora_rank else 0.0

    def adapter_rank(self, linear: str) -> int:
        """Return the rank of a linear layer's adapter; 0 if it has none."""
        targets = self.lora_targets or "blocks"
        chosen = self.lora_rank and linear != "head" and islands.match(targets, linear)
        return self.lora_rank if chosen else 0

    def __post_init__(self) -> None:
        for name, high in (("n_layer", DEEPEST), ("n_head", LARGEST), ("d_model", LARGEST),
                           ("context", LONGEST)):  # fmt: skip
            require_range(flag_name(name), getattr(self, name), 1, high)
        require_range("--vocab", self.vocab, 2, LARGEST)
        require(0 <= self.dropout < 1, "--dropout", self.dropout, "must be at least 0 and below 1")
        for name in ("n_kv_head", "head_dim", "mlp_dim", "padded_vocab", "window"):
            require_range(name, getattr(self, name), 0, LARGEST)
        if self.d_model % self.n_head and not self.head_dim:
            down = self.d_model - self.d_model % self.n_head
            near = " or ".join(str(d) for d in (down, down + self.n_head) if d > 0)
            remedy = f"not divisible by --n-head {self.n_head}; use {near}"
            require(False, "--d-model", self.d_model, remedy)
        remedy = f"is no divisor of --n-head {self.n_head}; use one"
        require(self.n_head % self.kv_heads == 0, "n_kv_head", self.n_kv_head, remedy)
        odd = self.position == "rope" and self.d_head % 2
        remedy = f"RoPE rotates pairs, but a head has {self.d_head} channels; make them even"
        require(not odd, "--n-head", self.n_head, remedy)
        remedy = f"below --vocab {self.vocab}; use 0 or more than that"
        require(self.d_vocab >= self.vocab, "padded_vocab", self.padded_vocab, remedy)
        require(0 < self.norm_eps < 1, "norm_eps", self.norm_eps, "must be above 0 and below 1")
        self._check_lora()
        parse_rope(self.rope)
        within = not self.window or self.context <= self.window
        remedy = f"beyond the model's sliding window of {self.window} tokens, which is not here"
        require(within, "--context", self.context, f"{remedy}; use at most {self.window}")
        require_choice("position", self.position, ("learned", "rope"))
        require_choice("norm", self.norm, ("layernorm", "rmsnorm"))
        require_choice("mlp", self.mlp, ("gelu", "gelu-erf", "swiglu"))

    def _check_lora(self) -> None:
        require_range("--lora-rank", self.lora_rank, 0, self.d_model)
        usable = math.isfinite(self.lora_alpha) and self.lora_alpha > 0
        require(usable, "--lora-alpha", self.lora_alpha, "must be above 0")
        if self.lora_targets:
            remedy = "needs adapters; give --lora-rank"
            require(self.lora_rank > 0, "--lora-targets", self.lora_targets, remedy)
            linears = [name for name in self.matmuls[:-1] if not name.endswith(".attend")]
            islands.check(self.lora_targets, linears, "--lora-targets")
