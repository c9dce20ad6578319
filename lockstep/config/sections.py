"""The sections of a run's configuration, as frozen dataclasses.

Each section is a group of the command line's flags, each field with a `help` is one flag: the
dataclass *is* the command line (`lockstep.cli` only reads it). The model's is in `model.py`,
the whole in `config.py`.
"""

import math
from dataclasses import dataclass

from lockstep.config import autotune, chunks, formats, policy
from lockstep.config.fields import flag, flag_name, require_choices
from lockstep.config.kinds import CHOICES
from lockstep.config.mesh import parse_mesh
from lockstep.config.model import LARGEST
from lockstep.config.policy import Roles
from lockstep.errors import require, require_range

MOST_STEPS = 10**7  # the learning rates of a whole run are one table
LARGEST_SCALE = 2.0**127  # a loss scale is a float32


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """precision"""

    policy: str = flag(
        "bf16",
        "fp64, fp32, tf32, bf16, bf16-stream (bf16 with a bfloat16 residual stream), fp16, fp8, "
        "fp8-delayed, or a jmp spec "
        "such as params=float32,compute=bfloat16,output=float32",
    )
    numerics: str = flag(
        "fast",
        "strict: written-out attention and deterministic kernels, for "
        "parity; fast: fused, compilers free",
        choices=("fast", "strict"),
    )
    attention: str = flag(
        "auto",
        "reference: written out; fused: cuDNN or flash; auto: fused "
        "where the device has it, never in strict",
        choices=("auto", "reference", "fused"),
    )
    eval_policy: str = flag("", "policy of the evaluation", derived="the training policy")
    fp32_islands: str = flag(
        "",
        "modules whose matmuls stay in float32 under a half-precision policy: patterns such as "
        "blocks.*.mlp.down,blocks.0,head; `lockstep sensitivity` says which are worth it; auto: "
        "a trainer chooses",
        derived="none",
    )
    formats: str = flag(
        "",
        "modules that compute as under another policy: PATTERN=FORMAT, such as "
        "blocks.*.mlp=fp8,head=fp32; the last one that matches a module counts",
        derived="none",
    )
    loss_scale_init: float = flag(2.0**16, "first loss scale; only float16 has one")
    loss_scale_factor: float = flag(2.0, "loss scale grows and backs off by this factor")
    loss_scale_interval: int = flag(2000, "good steps before the loss scale grows", unit="steps")

    @property
    def roles(self) -> Roles:
        return policy.resolve(self.policy)

    @property
    def eval_roles(self) -> Roles:
        return policy.resolve(self.eval_policy or self.policy)

    @property
    def all_roles(self) -> list[Roles]:
        """Lists all roles in which some module may train."""
        names = dict.fromkeys(name for _, name in formats.parse(self.formats))
        return [self.roles, *(policy.as_under(self.roles, name) for name in names)]

    @property
    def computes(self) -> set[str]:
        """Lists the dtypes of matrix products, in training and in evaluation."""
        every = (*self.all_roles, self.eval_roles)
        return {kind for roles in every for kind in (roles.compute, roles.grads) if kind}

    @property
    def all_float32(self) -> bool:
        """Says if all matrix products are of float32 operands, none in TF32."""
        return self.computes == {"float32"} and not self.roles.tf32

    def leaves_triton(self, biased: bool) -> bool:
        """Says if XLA multiplies by cuBLAS alone on a GPU, and not by Triton's kernels.

        The reasons: docs/decisions/speed-and-compilers.md.

        Args:
            biased: linear layers have biases.
        """
        half = bool(self.computes & {"float16", "bfloat16"})
        return self.all_float32 or (half and biased and not self.strict)

    def require_one_float32(self) -> None:
        """Raise UserError if only some of a run's float32 matmuls use TF32: CUDA has one switch."""
        tf32, evaluation = self.roles.tf32, self.eval_roles
        single = evaluation.compute == "float32" and evaluation.tf32 != tf32
        remedy = "TF32 is one switch of the process on CUDA"
        require(not single, "--eval-policy", self.eval_policy, f"{remedy}; use {self.policy}")
        for name in ("fp32_islands", "formats"):
            value = getattr(self, name)
            require(not (tf32 and value), flag_name(name), value, f"{remedy}; drop it or use bf16")

    @property
    def strict(self) -> bool:
        return self.numerics == "strict"

    def __post_init__(self) -> None:
        policy.resolve(self.policy)
        policy.resolve(self.eval_policy or self.policy, "--eval-policy")
        require_choices(self)
        allowed = not (self.strict and self.attention == "fused")
        remedy = "--numerics strict writes attention out; use --attention reference"
        require(allowed, "--attention", "fused", remedy)
        for name, low in (("loss_scale_init", 0.0), ("loss_scale_factor", 1.0)):
            value = getattr(self, name)
            within = low < value <= LARGEST_SCALE
            remedy = f"must be above {low:g} and at most 2**127"
            require(within, flag_name(name), value, remedy)
            # Any other scale would round what it scales, and differently in the two frameworks.
            require(math.frexp(value)[0] == 0.5, flag_name(name), value, "must be a power of two")
        require_range("--loss-scale-interval", self.loss_scale_interval, 1, LARGEST)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """data"""

    data: str = flag(
        "stdlib",
        "stdlib (this Python's own library source, as bytes); a .txt file; a .jsonl file (rows of "
        "text or messages); a .bin file of raw uint16 tokens, or a folder with nanoGPT's train.bin "
        "and val.bin",
    )
    tokenizer: str = flag(
        "", "a folder with a tokenizer.json, and a chat template", derived="bytes", metavar="DIR"
    )
    rows: str = flag(
        "auto",
        "stream: windows anywhere in the text; pack: whole documents, several a row, which do not "
        "see each other; pad: one a row; auto: pack for messages, else stream",
        choices=("auto", "stream", "pack", "pad"),
    )

    def __post_init__(self) -> None:
        require_choices(self)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """optimization"""

    steps: int = flag(500, "length of the whole run", unit="optimizer steps")
    batch_size: int = flag(4, "sequences in a micro-batch of one device", unit="B")
    accum: int = flag(4, "micro-batches in an optimizer step", unit="N")
    lr: float = flag(2e-3, "peak learning rate")
    min_lr: float = flag(2e-4, "learning rate at the end", derived="a tenth of --lr")
    warmup: int = flag(
        50, "linear warm-up", unit="updates", derived="a tenth of --steps, at most 100"
    )
    schedule: str = flag(
        "cosine",
        "after the warm-up: cosine or linear down to --min-lr, or constant",
        choices=("cosine", "linear", "constant"),
    )
    weight_decay: float = flag(0.1, "decoupled decay of matrices; never norms, biases, embeddings")
    decay: str = flag(
        "", "matrices that decay: patterns such as blocks.*.mlp,head", derived="all of them"
    )
    freeze: str = flag(
        "", "parameters that are not trained: patterns such as embed,blocks.0,blocks.*.norm1",
        derived="none",
    )  # fmt: skip
    beta1: float = flag(0.9, "Adam's decay of the first moment")
    beta2: float = flag(0.95, "Adam's decay of the second moment")
    clip: float = flag(1.0, "clip the gradient to this global norm")
    seed: int = flag(0, "seed of weights, batches and dropout")

    def __post_init__(self) -> None:
        require_choices(self)
        for name, high in (("steps", MOST_STEPS), ("batch_size", LARGEST), ("accum", LARGEST)):
            require_range(flag_name(name), getattr(self, name), 1, high)
        for name in ("lr", "clip"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, flag_name(name), value, "must be above 0")
        fits = 0 <= self.min_lr <= self.lr
        require(fits, "--min-lr", self.min_lr, f"must be from 0 to --lr {self.lr}")
        require_range("--warmup", self.warmup, 0, self.steps)
        require_range("--weight-decay", self.weight_decay, 0)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, flag_name(name), value, "must be at least 0 and below 1")
        require_range("--seed", self.seed, 0, LARGEST)


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """memory and compilation"""

    remat: str = flag(
        "block",
        "recompute in the backward pass: sublayer (attention and mlp each), "
        "block, sqrt (segments of blocks, each block inside again), dots (all but "
        "the weight matmuls)",
        choices=("none", "sublayer", "block", "sqrt", "dots"),
    )
    layers: str = flag(
        "auto",
        "JAX: unroll is faster, scan compiles faster and saves memory with "
        "remat; auto: scan with remat where unroll does not fit a GPU, and elsewhere from "
        "24 layers; PyTorch always unrolls",
        choices=("auto", "unroll", "scan"),
    )
    loss_chunks: str = flag(
        "1",
        "compute head and loss in this many chunks of rows, again in the backward pass, so that "
        "the logits of one chunk alone are in memory; auto: chunks of at most 2**27 logits",
        metavar="N|auto",
    )
    compile: bool = flag(False, "PyTorch: torch.compile the model and loss; JAX always compiles")
    mesh: str = flag(
        "data=1",
        "devices: data=N copies of the model, fsdp=M devices that share one, or data=N,fsdp=M; "
        "PyTorch: as many processes (torchrun)",
        derived="all devices on data",
    )

    def __post_init__(self) -> None:
        require_choices(self)
        parse_mesh(self.mesh)
        chunks.check(self.loss_chunks)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """run"""

    init: str = flag(
        "",
        "start from these weights, and their model: a folder with config.json and safetensors, "
        "or nanoGPT's ckpt.pt",
        derived="none, weights are drawn",
    )
    eval_every: int = flag(100, "how often to evaluate; 0: only first and last", unit="steps")
    eval_batches: int = flag(20, "length of an evaluation", unit="micro-batches")
    save_every: int = flag(100, "how often to save; 0: only the last step", unit="steps")
    keep: int = flag(2, "how many checkpoints to keep, the newest; and the best evaluated one")
    max_skips: int = flag(50, "stop after so many steps in a row that the loss scale skipped")
    device: str = flag("auto", "where to run", choices=CHOICES)
    autotune: str = flag(
        autotune.NONE,
        "ways that are faster than the framework's own, such as attention=blocks,matmul=onednn; "
        "auto: on a CPU they are measured, once for each shape, never in strict; none: no other "
        "way",
        derived="LOCKSTEP_AUTOTUNE, or auto",
        metavar="TEXT|auto|none",
    )

    @property
    def ways(self) -> dict[str, str]:
        """Returns the ways to take, by name."""
        return autotune.parse(self.autotune)

    def __post_init__(self) -> None:
        autotune.parse(self.autotune)
        lowest = {"eval_every": 0, "eval_batches": 1, "save_every": 0, "keep": 1, "max_skips": 1}
        for name, low in lowest.items():
            require_range(flag_name(name), getattr(self, name), low, LARGEST)
        require_choices(self)
