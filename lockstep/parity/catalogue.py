"""The planted bugs: each with its twin, the config that shows it, and the rung that catches it.

The bugs themselves stand in `mutants/`, under the same names. Most are mistakes that somebody has
made in code that trained; the graded ones take a size (`--bug norm-eps=2e-5`).
"""

from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import require
from lockstep.parity.toy import GROUPED


@dataclass(frozen=True, kw_only=True)
class Bug:
    name: str
    framework: str
    what: str
    rung: int  # the one that must catch it
    flags: dict[str, Any] = field(default_factory=dict)  # where it shows, over matrix.SMALL
    size: float | None = None  # of a graded bug: what it takes unless one is given


GPT2: dict[str, Any] = {"model": "gpt2"}
BF16: dict[str, Any] = {"policy": "bf16", "dropout": 0.0}
FP16: dict[str, Any] = {"policy": "fp16", "dropout": 0.0, "n_layer": 1}
EVALUATED: dict[str, Any] = BF16 | {"n_layer": 1, "accum": 1, "eval_policy": "fp32"}
DDP: dict[str, Any] = {"mesh": "data=2", "dropout": 0.0}
FSDP: dict[str, Any] = {"mesh": "fsdp=2", "dropout": 0.0}
PACKED: dict[str, Any] = {"windows": "packed"}
MASKED: dict[str, Any] = {"windows": "masked"}
# JAX, the healthy side of torch's mutants, compiles by the program's size: the least in which one
# shows.
LEAN: dict[str, Any] = {"n_layer": 1, "accum": 1, "dropout": 0.0}
CLIPPED_FP16: dict[str, Any] = FP16 | LEAN | {"clip": 0.5}
# Three layers, of which the middle one has the format.
POLICY_FP8: dict[str, Any] = {"policy": "fp8", "accum": 1}
# In float64 a format's rounding is all that is left, and one layer shows it.
FP8: dict[str, Any] = LEAN | {"formats": "blocks=fp8"}
NVFP4: dict[str, Any] = LEAN | {"formats": "blocks=nvfp4"}
DELAYED: dict[str, Any] = LEAN | {"formats": "blocks=fp8-delayed"}
SCALED: dict[str, Any] = LEAN | {"policy": "fp16", "formats": "blocks=fp8-delayed"}
OWN: dict[str, Any] = LEAN | {"formats": "blocks=fp8,blocks.0.mlp=fp32,*.up=mxfp8"}
# A scale is a power of two: it shows in subnormals, and those in float64; not in each step.
OWN_ON_RANKS: dict[str, Any] = LEAN | {"formats": "blocks=fp8", "mesh": "data=2", "steps": 24}
GRADS: dict[str, Any] = LEAN | {
    "policy": "params=float32,compute=float32,output=float32,grads=float16"
}
DECODER: dict[str, Any] = GROUPED | LEAN
LORA: dict[str, Any] = {"n_layer": 1, "accum": 1, "dropout": 0.0, "lora_rank": 3}
FROZEN: dict[str, Any] = LEAN | {"freeze": "embed,*.norm1,*.qkv"}


def _bug(framework: str, rung: int, name: str, what: str, size: float | None = None,
         **flags: Any) -> Bug:  # fmt: skip
    return Bug(name=name, framework=framework, what=what, rung=rung, flags=flags, size=size)


# fmt: off
BUGS: list[Bug] = [
    # accumulation and the order of the recipe
    _bug("torch", 5, "loss-not-divided", "N micro-batches add up to N times the gradient"),
    _bug("torch", 5, "last-micro-batch-only", "gradients are zeroed before each backward pass"),
    _bug("torch", 5, "clip-per-micro-batch", "each micro-batch is clipped, not the window"),
    _bug("torch", 5, "accumulate-in-bfloat16", "the accumulator is bfloat16"),
    _bug("torch", 8, "zero-grad-forgotten", "gradients are never zeroed"),
    _bug("jax", 4, "multisteps-in-float32", "MultiSteps' default accumulator, under float64"),
    _bug("jax", 5, "mean-of-means", "the loss is divided by N, and MultiSteps averages again"),
    # clipping
    _bug("torch", 4, "no-clip", "the gradient is not clipped"),
    _bug("torch", 4, "no-clip-in-half", "under bf16 nothing is clipped", **BF16 | LEAN, clip=0.5),
    _bug("jax", 4, "no-clip-in-half-jax", "under bf16 nothing is clipped",
         **BF16 | LEAN, clip=0.5),
    _bug("torch", 4, "clip-per-tensor", "every tensor is clipped by itself"),
    _bug("torch", 4, "clip-by-value", "elements are clipped, not the norm"),
    _bug("torch", 4, "grad-norm-after-clip", "the norm is reported after clipping"),
    _bug("jax", 4, "optax-clip", "optax's clipping, which has no 1e-6 in its denominator", **LEAN),
    # the loss scale
    _bug("torch", 8, "clip-before-unscale", "scaled gradients are clipped, then unscaled",
         **CLIPPED_FP16),
    _bug("torch", 4, "no-unscale", "the optimizer gets scaled gradients", **FP16),
    _bug("torch", 7, "fp16-without-scaling", "float16 gradients without a loss scale", **FP16),
    _bug("torch", 7, "scale-per-micro-batch", "the scale moves within a window", **FP16),
    _bug("torch", 7, "growth-one-late", "the scale grows one step late, as in flax", **FP16),
    _bug("torch", 7, "overflow-not-looked-for", "no gradient is looked at for overflow", **FP16),
    _bug("torch", 7, "overflow-in-one-tensor", "one tensor alone is looked at", **FP16),
    _bug("torch", 7, "skipped-step-counts", "a skipped step advances Adam's count", **FP16),
    _bug("torch", 7, "skipped-step-schedule", "a skipped step advances the schedule", **FP16),
    _bug("torch", 7, "skipped-step-decays", "a skipped step decays the weights", **FP16),
    _bug("jax", 7, "plain-multisteps", "MultiSteps with nothing said of overflows", **FP16),
    _bug("jax", 7, "overflow-ignored", "gradients that are not finite go in", **FP16),
    _bug("jax", 7, "overflow-in-head", "the head's gradient alone is looked at", **FP16),
    _bug("jax", 7, "loss-scale-floor", "jmp's floor of 1 under the scale", **FP16),
    _bug("torch", 8, "grad-norm-logged-scaled", "the logged norm is the scaled gradient's",
         **CLIPPED_FP16),
    _bug("jax", 8, "grad-norm-logged-scaled-in-jax", "the logged norm is the scaled gradient's",
         **CLIPPED_FP16),
    # the optimizer
    _bug("torch", 4, "no-bias-correction", "Adam without bias correction"),
    _bug("torch", 4, "adam-eps", "Adam's epsilon 1e-6 for 1e-8", size=1e-6),
    _bug("torch", 4, "betas-swapped", "beta1 for beta2"),
    _bug("torch", 4, "coupled-decay", "decay added to the gradient, as in Adam"),
    _bug("torch", 4, "decay", "weight decay a tenth too strong", size=0.1),
    _bug("torch", 4, "learning-rate", "a rate a tenth too high, logged as the right one", size=0.1),
    _bug("torch", 4, "decay-on-norms", "norms decay"),
    _bug("torch", 4, "decay-on-embeddings", "embeddings decay"),
    _bug("torch", 4, "decay-of-all", "matrices decay that no pattern names", **DECODER),
    _bug("torch", 4, "decay-not-times-lr", "decay is not multiplied by the learning rate"),
    _bug("torch", 4, "moments-in-bfloat16", "Adam's moments are bfloat16"),
    _bug("torch", 4, "bfloat16-master-weights", "weights are rounded to bfloat16 after each step"),
    _bug("jax", 4, "eps-inside-root", "Adam's epsilon under the square root", **LEAN),
    _bug("jax", 4, "nesterov", "Nesterov's momentum", **LEAN),
    _bug("jax", 4, "decay-everywhere", "no decay mask", **LEAN),
    # adapters and frozen parameters
    *(
        _bug(framework, rung, f"{name}{suffix}", what, **flags)
        for framework, suffix in (("torch", ""), ("jax", "-in-jax"))
        for name, rung, what, flags in (
            ("lora-unscaled", 2, "an adapter is added without alpha / rank", LORA),
            ("lora-scaled-twice", 2, "alpha / rank on both matrices of an adapter", LORA),
            ("lora-b-frozen", 3, "of an adapter A alone is trained", LORA),
            ("base-trained", 1, "the weights under the adapters are trained too", LORA),
        )
    ),
    _bug("jax", 2, "lora-scale-rounded", "alpha / rank is rounded before it multiplies",
         **BF16 | LORA),
    _bug("torch", 4, "frozen-in-norm", "gradients of frozen parameters count in the clip norm",
         **FROZEN),
    _bug("torch", 1, "frozen-decay", "frozen matrices decay", **FROZEN),
    # the schedule and the data
    _bug("torch", 1, "schedule-off-by-one", "each update takes the next one's rate"),
    _bug("torch", 1, "schedule-in-float32", "the rates are rounded to float32, under float64"),
    _bug("torch", 8, "rate-doubles-late", "from update 31 on the rate is a millionth too high",
         steps=40, **LEAN),
    _bug("torch", 10, "schedule-by-steps-after-resume",
         "a resumed run's rate is that of its steps, not of its updates", **FP16),
    _bug("jax", 10, "schedule-by-steps-after-resume-in-jax",
         "a resumed run's rate is that of its steps, not of its updates, and logged as right",
         **FP16),
    _bug("torch", 2, "targets-shifted", "targets are one token off"),
    _bug("torch", 2, "last-token-dropped", "the last target of each row does not count"),
    _bug("torch", 2, "label-smoothing", "labels are smoothed by a thousandth", size=1e-3),
    _bug("torch", 8, "batches-differ", "from the 11th step on, the former window again"),
    # the model
    _bug("torch", 2, "norm-eps", "the norms' epsilon 1e-6 for 1e-5", size=1e-6),
    _bug("torch", 2, "erf-gelu", "GELU's erf form for the tanh form", **GPT2),
    _bug("torch", 2, "softmax-scale", "scores a tenth too large", size=0.1),
    _bug("torch", 2, "query-for-key", "queries and keys change places"),
    _bug("torch", 2, "values-of-next-head", "each head takes the next one's values"),
    _bug("torch", 2, "causal-mask-off-by-one", "each token sees the one after it"),
    _bug("torch", 2, "rope-base", "RoPE with base 500,000"),
    _bug("torch", 2, "rope-interleaved", "RoPE turns neighbours, not halves"),
    _bug("torch", 2, "swiglu-swapped", "SwiGLU's gate and up change places"),
    _bug("torch", 2, "rope-unscaled", "Llama 3's scaling of RoPE is left out", **DECODER),
    _bug("torch", 2, "kv-heads-tiled", "heads share keys in turn, not with neighbours", **DECODER),
    _bug("torch", 2, "norm-after-rotation", "queries and keys turn, then are normalised",
         **DECODER),
    _bug("torch", 2, "norm-eps-by-default", "epsilon is 1e-5 whatever the config says", **DECODER),
    _bug("torch", 2, "qkv-bias-dropped", "queries, keys and values without their bias", **DECODER),
    _bug("torch", 2, "padding-counts", "padding of the vocabulary is in the softmax", **DECODER),
    _bug("torch", 2, "positions-from-one", "positions count from one", **GPT2),
    _bug("torch", 3, "untied-head", "the tied head gives no gradient to the embedding", **GPT2),
    _bug("torch", 3, "embedding-by-frequency", "gradients divided by how often a token comes"),
    _bug("jax", 3, "gradient-stopped-at-norm", "the norms' statistics have no gradient", **LEAN),
    _bug("jax", 2, "untransposed-kernel", "square kernels are copied untransposed", **LEAN),
    # precision
    _bug("torch", 2, "rope-in-float32", "RoPE turns in float32, under float64"),
    _bug("torch", 2, "norms-in-bfloat16", "norms in bfloat16", **BF16 | LEAN),
    _bug("torch", 2, "residual-in-bfloat16", "the residual stream in bfloat16", **BF16 | LEAN),
    _bug("torch", 2, "logits-in-float32", "the head is not cast: better than allowed",
         **GPT2, **BF16 | LEAN),
    _bug("torch", 3, "whole-tree-cast", "all parameters are cast at once", **BF16 | LEAN),
    *(
        _bug(framework, 2, f"{name}-rounded-forward{suffix}", what, **GPT2, **BF16 | LEAN)
        for framework, suffix in (("torch", ""), ("jax", "-in-jax"))
        for name, what in (
            ("embedding", "the embedding is rounded in the forward pass, under bf16"),
            ("positions", "positions are rounded in the forward pass, under bf16"),
            ("norm-gains", "gains of norms are rounded in the forward pass, under bf16"),
            ("norm-biases", "biases of norms are rounded in the forward pass, under bf16"),
        )
    ),
    _bug("torch", 2, "island-under-autocast", "an island is widened, and narrowed by autocast",
         fp32_islands="blocks.*.mlp", **BF16 | LEAN),
    _bug("torch", 2, "island-in-float32", "islands are float32, under float64",
         fp32_islands="blocks.*.mlp", **LEAN),
    _bug("jax", 2, "attention-island-forgotten", "scores and values of an island in bfloat16",
         fp32_islands="blocks.*.attn", **BF16 | LEAN),
    _bug("jax", 2, "tied-head-island-forgotten", "a tied head is no island",
         fp32_islands="head", **GPT2, **BF16 | LEAN),
    _bug("jax", 2, "islands-of-first-block", "all blocks have the first one's islands",
         fp32_islands="blocks.0", accum=1, **BF16),
    _bug("jax", 2, "fast-variance", "E[x^2] - E[x]^2", **GPT2 | LEAN),
    _bug("jax", 2, "bias-rounded-twice", "a matmul rounds before its bias goes in",
         **GPT2, **BF16 | LEAN),
    _bug("jax", 2, "softmax-in-compute", "softmax in bfloat16", **BF16 | LEAN),
    _bug("jax", 2, "activations-in-compute", "GELU in bfloat16", **GPT2, **BF16 | LEAN),
    _bug("jax", 3, "loss-in-compute", "cross-entropy in bfloat16", **BF16 | LEAN),
    _bug("jax", 3, "excess-precision", "XLA skips roundings in strict numerics", **BF16 | LEAN),
    _bug("torch", 2, "tf32-left-on", "TF32 under fp32", policy="fp32", **LEAN),
    _bug("jax", 2, "tf32-by-default", "JAX's default matmul precision under fp32", policy="fp32",
         **LEAN),
    _bug("torch", 3, "tf32-forward-only", "the backward pass does not round to TF32", policy="tf32",
         **LEAN),
    # narrow formats
    *(
        _bug(framework, rung, f"{name}{suffix}", what, **flags)
        for framework, suffix in (("torch", ""), ("jax", "-in-jax"))
        for name, rung, what, flags in (
            ("e4m3-gradients", 3, "gradients in e4m3, whose range is short", FP8),
            ("scale-of-another-tensor", 2, "x, weight and gradient change their scales", DELAYED),
            ("output-not-scaled", 2, "a product is not multiplied by its scales", FP8),
            ("copy-with-another-scale", 3, "the weight's transposed copy has another scale",
             POLICY_FP8),
            ("first-layer-in-fp8", 2, "the first layer is rounded, too", POLICY_FP8),
            ("block-rounded-to-zero", 2, "all blocks have the largest one's scale", NVFP4),
            ("never-rounded-up", 3, "stochastic rounding is biased: always down", NVFP4),
            ("draws-of-zero", 3, "all draws are zero: always up", NVFP4),
            ("drawn-without-micro-step", 4, "all micro-batches are rounded by the same draws",
             NVFP4 | {"accum": 2}),
            ("amaxes-recorded-twice", 4, "what is recomputed updates the history again",
             DELAYED | {"remat": "block"}),
            ("amaxes-of-last-micro-batch", 5, "the history has the last micro-batch alone",
             DELAYED | {"accum": 2}),
            ("amaxes-of-skipped-step", 7, "a step that is skipped moves the history", SCALED),
            ("amaxes-of-scaled-loss", 4, "the history has the loss scale in it", SCALED),
            ("amaxes-lost", 1, "a resumed run forgets its history", DELAYED),
        )
    ),
    _bug("torch", 11, "amaxes-of-one-rank", "each rank has a history of its own", **DELAYED | DDP),
    _bug("torch", 11, "draws-of-one-rank", "all ranks' rows are rounded by the first one's draws",
         **NVFP4 | DDP),
    _bug("torch", 11, "scales-of-one-rank", "a tensor's scale is that of one rank's numbers",
         **OWN_ON_RANKS),
    # formats of modules
    *(
        _bug(framework, 2, f"{name}{suffix}", what, **OWN)
        for framework, suffix in (("torch", ""), ("jax", "-in-jax"))
        for name, what in (
            ("formats-ignored", "all modules have the policy's format"),
            ("format-of-next-module", "each module has the format of the one before it"),
            ("first-pattern-wins", "of two patterns that fit a module the first counts"),
        )
    ),
    # gradients in a dtype of their own
    *(
        _bug(framework, rung, f"{name}{suffix}", what, **GRADS)
        for framework, suffix in (("torch", ""), ("jax", "-in-jax"))
        for name, rung, what in (
            ("gradients-in-compute", 3, "the backward pass computes in float32, too"),
            ("forward-in-gradients-dtype", 2, "the forward pass computes in float16, too"),
        )
    ),
    _bug("torch", 11, "gradients-in-compute-on-ranks", "on a mesh the policy's grads are forgotten",
         **GRADS | DDP),
    # evaluation and sampling
    _bug("torch", 2, "evaluation-drops", "dropout is on in evaluation"),
    _bug("torch", 2, "logits-one-late", "the logits are those of one token before"),
    _bug("torch", 2, "whole-context-cut", "the model never sees its whole context", **LEAN),
    _bug("torch", 2, "evaluation-mean-in-compute", "a validation loss is rounded to bfloat16",
         **BF16 | LEAN),
    _bug("jax", 2, "evaluation-mean-in-compute-jax", "a validation loss is rounded to bfloat16",
         **BF16 | LEAN),
    *(
        _bug(framework, 2, f"{name}{suffix}", what, **EVALUATED)
        for framework, suffix in (("torch", ""), ("jax", "-jax"))
        for name, what in (
            ("stale-evaluation-weights", "later evaluations are of the first one's weights"),
            ("sampled-under-training-policy", "logits are computed under the training policy"),
        )
    ),
    # dropout and remat
    _bug("torch", 8, "mask-without-micro-step", "all micro-batches share their masks"),
    _bug("torch", 8, "mask-without-layer", "all layers share their masks"),
    _bug("torch", 8, "dropout-not-rescaled", "what is kept is not scaled up"),
    _bug("torch", 8, "mask-probability", "masks keep a hundredth more", size=0.01),
    _bug("jax", 8, "masks-of-64-bits", "masks from 64-bit uniforms under x64"),
    _bug("jax", 8, "one-mask-for-all-layers", "a scanned layer's index does not reach its mask"),
    _bug("torch", 6, "dropout-redrawn", "the recomputed forward draws other masks",
         remat="block"),
    _bug("torch", 6, "sqrt-runs-block", "remat sqrt runs block", remat="sqrt"),
    _bug("torch", 6, "remat-does-nothing", "nothing is recomputed", remat="block"),
    _bug("jax", 6, "block-input-in-compute-jax", "a block keeps its input in bfloat16",
         **BF16 | LEAN | {"remat": "block"}),
    _bug("jax", 6, "dots-recomputes-affine", "remat dots recomputes matmuls with a bias",
         model="gpt2", remat="dots"),
    # several devices; in JAX one program stands for all of them
    _bug("torch", 11, "sum-over-devices", "gradients are added, not averaged", **DDP),
    _bug("torch", 11, "mean-over-devices-twice", "gradients are averaged twice", **FSDP),
    _bug("torch", 11, "reduced-every-micro-batch", "the sum so far is reduced N times", **DDP),
    _bug("torch", 11, "last-micro-batch-not-reduced", "no_sync stays on", **DDP),
    _bug("torch", 11, "finite-on-one-rank", "each rank looks for overflows alone",
         **FP16 | LEAN | DDP),
    _bug("torch", 11, "norm-of-one-shard", "each rank clips by its shard's norm", **FSDP),
    _bug("torch", 11, "same-rows-on-every-rank", "all ranks train on one rank's rows", **DDP),
    _bug("torch", 11, "rows-twice-on-four-devices", "of four ranks two and two train on one's rows",
         **LEAN | {"mesh": "data=4"}),
    _bug("torch", 11, "reads-the-first-rank-s-rows", "all ranks read the first one's rows", **DDP),
    _bug("jax", 11, "fsdp-gradient-of-own-rows-jax", "where weights are shared, each device's "
         "gradient is that of its own rows", **LEAN | {"mesh": "fsdp=4"}),
    _bug("torch", 11, "rows-shifted-on-a-rank", "one rank's rows begin one too early", **FSDP),
    _bug("torch", 11, "same-masks-on-every-rank", "all ranks drop alike", mesh="data=2"),
    _bug("torch", 11, "moments-of-one-shard", "one shard's moments move", **FSDP),
    _bug("torch", 11, "scale-of-one-rank", "one rank's scale moves twice", **FP16 | LEAN | FSDP),
    _bug("torch", 11, "weights-not-broadcast", "each rank begins with its own weights", **DDP),
    _bug("torch", 11, "weights-of-the-wrong-rank", "the last rank's weights are broadcast", **DDP),
    _bug("torch", 11, "reduced-in-bfloat16", "gradients travel in bfloat16, under float32",
         **LEAN | DDP | {"policy": "fp32"}),
    _bug("torch", 11, "mean-of-rank-means", "a rank's mean over its own targets", **MASKED, **DDP),
    _bug("torch", 11, "evaluated-on-one-rank", "an evaluation is one rank's", **DDP),
    _bug("torch", 11, "evaluation-told-by-rank", "all but one rank report their own rows' loss",
         **DDP),
    _bug("jax", 11, "same-rows-on-every-device", "all devices train on one's rows", **LEAN | DDP),
    _bug("jax", 11, "rows-shifted-in-a-process", "one process's rows begin one too early",
         **LEAN | DDP | {"mesh": "data=2,fsdp=2"}),
    # chunks of the loss
    _bug("jax", 3, "last-chunk-dropped", "rows that fill no chunk do not count",
         loss_chunks="3", **LEAN),
    _bug("torch", 3, "mean-of-chunks", "chunks count alike, the smaller last one too",
         loss_chunks="3", **LEAN),
    _bug("torch", 3, "head-of-one-chunk", "the head's weights get one chunk's gradient",
         loss_chunks="3", **GPT2 | LEAN),
    _bug("torch", 3, "chunks-added-in-compute", "the head's gradient is added up in bfloat16",
         loss_chunks="32", **GPT2, **BF16 | LEAN),
    # targets that do not count, and several documents a row: the same mistakes in both
    *(
        _bug(framework, rung, f"{name}{suffix}", what, **{**lean, **flags})
        for framework, suffix, lean in (("torch", "", {"n_layer": 1}), ("jax", "-in-jax", LEAN))
        for name, rung, what, flags in (
            ("mean-of-micro-batch-means", 5, "a micro-batch's mean over its own targets",
             {**MASKED, "accum": 4}),
            ("mean-over-padding", 3, "the loss is divided by all targets, ignored ones too",
             MASKED),
            ("mask-shifted", 3, "the mask is that of the tokens, not of the targets", MASKED),
            ("ignored-token-counted", 3, "an ignored target counts in its chunk",
             {**MASKED, "loss_chunks": "3"}),
            ("documents-seen", 2, "a token sees those of the document before", PACKED),
            ("positions-not-restarted", 2, "positions count through all documents of a row",
             {**PACKED, **GPT2}),
        )
    ),
    _bug("torch", 9, "fused-sees-documents", "a fused kernel sees all documents", **PACKED),
    # fast numerics
    _bug("jax", 9, "blocks-forget-their-place", "each causal block is masked as if it stood first",
         **BF16),
    _bug("torch", 9, "blocks-masked-as-first", "each causal block is masked as if it stood first",
         **BF16),
    _bug("torch", 9, "fused-sees-all", "fused attention without its causal mask"),
    # resuming
    _bug("torch", 1, "moments-lost", "a resumed run forgets Adam's second moments"),
    _bug("torch", 1, "adam-count-lost", "a resumed run starts Adam's count anew"),
    _bug("torch", 1, "growth-tracker-lost", "a resumed run forgets its good steps", **FP16),
]
# fmt: on

# Semantics-preserving variants, by twin: the ladder must call none of them different.
REWRITES: dict[str, tuple[str, ...]] = {
    "jax": (
        "qkv-split", "linear-by-einsum", "linear-in-halves", "plain-affine", "attention-by-vmap",
        "rotation-by-complex-numbers", "norms-by-division", "activations-written-out",
        "loss-by-logsumexp", "layers-swapped", "window-unrolled", "norm-by-dot-products",
        "adamw-written-out", "without-ynnpack",
    ),
    "torch": (
        "qkv-split", "linear-transposed", "embedding-by-index", "attention-by-einsum",
        "additive-mask", "rotation-by-complex-numbers", "norms-written-out",
        "activations-written-out", "loss-by-logsumexp", "micro-batches-backwards", "norm-by-loop",
        "foreach-adamw", "single-tensor-adamw", "adamw-written-out",
        "two-threads", "without-onednn",
    ),
}  # fmt: skip

BY_NAME = {bug.name: bug for bug in BUGS}
GRADED = [bug.name for bug in BUGS if bug.size is not None]


def find(text: str) -> Bug:
    """Finds the bug of NAME or, if it is graded, of NAME=SIZE.

    Raises:
        UserError: there is none, or its size is no number.
    """
    name, equals, size = text.partition("=")
    require(name in BY_NAME, "--bug", name, "unknown; `lockstep power --list` names them all")
    bug = BY_NAME[name]
    if equals:
        require(bug.size is not None, "--bug", text, f"has no size; use {', '.join(GRADED)}")
        try:
            float(size)
        except ValueError:
            require(False, "--bug", text, "its size is not a number; give one")
    return bug
