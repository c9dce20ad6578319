"""The whole configuration of a run, as frozen dataclasses.

Each section is a group of the command line's flags, each field with a `help` is one flag: the
dataclass *is* the command line (`lockstep.cli` only reads it). The model's is in `model.py`.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.config import chunks, formats, islands, policy
from lockstep.config.fields import flag, flag_name, require_choices, require_fields
from lockstep.config.kinds import CHOICES
from lockstep.config.mesh import Mesh, parse_mesh
from lockstep.config.model import LARGEST, ModelConfig
from lockstep.config.policy import Dtypes, Roles
from lockstep.config.tensors import shapes, trains
from lockstep.errors import UserError, require, require_range
from lockstep.formats.table import RECIPES

MOST_STEPS = 10**7  # the learning rates of a whole run are one table
MOST_TOKENS = 2**26  # of a step or an evaluation, which are drawn at once
LARGEST_SCALE = 2.0**127  # a loss scale is a float32


def _rename_error(old: str, new: str, function: Any, *args: Any) -> None:
    try:
        function(*args)
    except UserError as error:
        raise UserError(str(error).replace(old, new)) from None


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """precision"""

    policy: str = flag(
        "bf16",
        "fp64, fp32, tf32, bf16, fp16, fp8, fp8-delayed, fp8-rowwise, mxfp8, nvfp4, or a jmp spec "
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
        "blocks.*.mlp=fp8,head=fp32; of several that fit a module the last counts",
        derived="none",
    )
    loss_scale_init: float = flag(2.0**16, "first loss scale, where compute is float16")
    loss_scale_factor: float = flag(2.0, "loss scale grows and backs off by this factor")
    loss_scale_interval: int = flag(2000, "the scale grows after so many good steps", unit="steps")

    @property
    def roles(self) -> Roles:
        return policy.resolve(self.policy)

    @property
    def eval_roles(self) -> Roles:
        return policy.resolve(self.eval_policy or self.policy)

    @property
    def kinds(self) -> list[Roles]:
        """All that some module may train as."""
        names = dict.fromkeys(name for _, name in formats.parse(self.formats))
        return [self.roles, *(policy.as_under(self.roles, name) for name in names)]

    @property
    def computes(self) -> set[str]:
        """What matrices are multiplied in, in training and in evaluation."""
        every = (*self.kinds, self.eval_roles)
        return {kind for roles in every for kind in (roles.compute, roles.grads) if kind}

    def require_one_float32(self) -> None:
        """Raises UserError where some of a run's float32 matmuls are to be in TF32 and some not: on
        CUDA that is one switch of the process."""
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
        if self.eval_policy:
            _rename_error("--policy", "--eval-policy", policy.resolve, self.eval_policy)
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
        "stdlib (this Python's own library source, as bytes); a .txt, .jsonl or .parquet file "
        "(rows of text or messages), nanoGPT's or llm.c's .bin, or a folder of them; or what "
        "`lockstep data` wrote",
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
    batch_size: int = flag(16, "sequences in a micro-batch of one device", unit="B")
    accum: int = flag(1, "micro-batches in an optimizer step", unit="N")
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
        "", "parameters that stay as they are: patterns such as embed,blocks.0,blocks.*.norm1",
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
        "none",
        "recompute in the backward pass: sublayer (attention and mlp each), "
        "block, sqrt (segments of blocks, each block inside again), dots (all but "
        "the weight matmuls)",
        choices=("none", "sublayer", "block", "sqrt", "dots"),
    )
    layers: str = flag(
        "auto",
        "JAX: unroll is faster, scan compiles faster and saves memory with "
        "remat; auto: scan from 24 layers; PyTorch always unrolls",
        choices=("auto", "unroll", "scan"),
    )
    loss_chunks: str = flag(
        "1",
        "head and loss over so many chunks of rows, recomputed in the backward pass, so that "
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
        "nanoGPT's ckpt.pt or llm.c's .bin",
        derived="none, weights are drawn",
    )
    eval_every: int = flag(100, "how often to evaluate; 0: only first and last", unit="steps")
    eval_batches: int = flag(20, "length of an evaluation", unit="micro-batches")
    save_every: int = flag(100, "how often to save; 0: only the last step", unit="steps")
    keep: int = flag(2, "how many checkpoints to keep, the newest; and the best evaluated one")
    max_skips: int = flag(50, "stop after so many steps in a row that the loss scale skipped")
    debug_nans: bool = flag(
        False, "if a run diverges, take the step again from the last checkpoint and name the layer"
    )
    device: str = flag("auto", "where to run", choices=CHOICES)

    def __post_init__(self) -> None:
        lowest = {"eval_every": 0, "eval_batches": 1, "save_every": 0, "keep": 1, "max_skips": 1}
        for name, low in lowest.items():
            require_range(flag_name(name), getattr(self, name), low, LARGEST)
        require_choices(self)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run's numbers, and where and how often it writes them."""

    model: ModelConfig = ModelConfig()  # noqa: RUF009  (frozen)
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    execution: ExecutionConfig = ExecutionConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        compiled_masks = self.execution.compile and self.precision.strict and self.model.dropout > 0
        remedy = "strict numerics draw dropout's masks with a generator that does not compile; "
        require(not compiled_masks, "--compile", True, f"{remedy}drop it or set --dropout 0")
        for name, on in (
            ("--compile", self.execution.compile),
            ("--debug-nans", self.run.debug_nans),
            ("--loss-chunks", self.execution.loss_chunks != "1" and self.execution.loss_chunks),
        ):
            remedy = f"is for one device, not for --mesh {self.mesh}; drop it or use --mesh data=1"
            require(not on or self.mesh.size == 1, name, on, remedy)
        rows, row = self.global_batch_size, self.model.context + 1
        for name, count in (("accum", self.optim.accum), ("eval-batches", self.run.eval_batches)):
            remedy = f"with --{name} {count} and --context {row - 1} are over {MOST_TOKENS} tokens"
            fits = rows * count * row <= MOST_TOKENS
            require(fits, "--batch-size", rows, f"{remedy}, drawn at once; use less")
        if self.precision.fp32_islands:
            islands.check(self.precision.fp32_islands, self.model.matmuls)
        if self.precision.formats:
            self._check_formats()
        if self.optim.decay:
            islands.check(self.optim.decay, self.model.matmuls, "--decay")
        if self.optim.freeze:
            islands.check(self.optim.freeze, list(shapes(self.model)), "--freeze", "parameter")
            require(len(self.trained) > 0, "--freeze", self.optim.freeze, "leaves nothing to train")
        for policy_flag, name in self.recipes.items():
            self._check_recipe(f"{policy_flag} {name}", RECIPES[name].block)
            remedy = "multiplies adapters in no narrow format; drop --lora-rank or use bf16"
            require(not self.model.lora_rank, policy_flag, name, remedy)
        unknown = set(self.eval_dtypes.histories) - set(self.dtypes.histories)
        remedy = "has scales of steps that were not trained in it; use fp8, or train in it, too"
        require(not unknown, "--eval-policy", self.precision.eval_policy, remedy)
        given = {name: text for name, (text, *_) in self._patterns.items()} | self.recipes
        patterns = " or ".join(f"{name} {text}" for name, text in given.items())
        remedy = f"is one program for all layers, but {patterns} is for some"
        fits = self.execution.layers != "scan" or self.alike
        require(fits, "--layers", "scan", f"{remedy}; use --layers unroll")

    def _check_formats(self) -> None:
        text, model, modules = self.precision.formats, self.model, self.dtypes.modules
        formats.check(text, model.matmuls)
        for module, name in formats.choose(text, model.matmuls).items():
            own, said = modules[module], f"{module}={name}"
            scaled = own.compute != "float16" or self.precision.roles.loss_scaling
            require(scaled, formats.FIELD, said, "has no loss scale; use --policy fp16, or bf16")
            remedy = "multiplies adapters in no narrow format; drop --lora-rank or use bf16"
            require(not (own.recipe and model.lora_rank), formats.FIELD, said, remedy)
            drawn = own.stochastic and module == "head"
            require(not drawn, formats.FIELD, said, "has no draws for the head; use another")
            chunked = own.delayed and module == "head"
            remedy = "has one product a step, and the head one for each chunk; use fp8"
            require(not chunked, formats.FIELD, said, remedy)
            weight = "embed" if module == "head" and model.tied else module
            block = RECIPES[own.recipe].block if own.recipe else 1
            for width in (*shapes(model).get(f"{weight}.weight", ()), self._rows) * (block > 1):
                remedy = f"has blocks of {block}, which do not divide {width}; use another"
                require(width % block == 0, formats.FIELD, said, remedy)

    def _check_recipe(self, policy: str, block: int) -> None:
        model, rows = self.model, self._rows
        remedy = f"{policy} leaves the first and the last layer in float32; use at least 3"
        require(model.n_layer > 2, "--n-layer", model.n_layer, remedy)
        remedy = f"{policy} has blocks of {block}; use a multiple of {block}"
        widths = {"--d-model": model.d_model, "heads times their width": model.d_queries,
                  "queries, keys and values": model.d_qkv, "mlp_dim": model.d_mlp,
                  "--batch-size times --context": rows}  # fmt: skip
        for name, width in widths.items():
            require(width % block == 0, name, width, remedy)

    @property
    def _rows(self) -> int:
        """Of a micro-batch on one device."""
        return self.optim.batch_size * self.model.context

    @property
    def recipes(self) -> dict[str, str]:
        """Of training and of evaluation, where they have one."""
        precision = self.precision
        named = {"--policy": precision.roles, "--eval-policy": precision.eval_roles}
        return {flag: roles.recipe for flag, roles in named.items() if roles.recipe}

    @property
    def mesh(self) -> Mesh:
        return parse_mesh(self.execution.mesh)

    @property
    def global_batch_size(self) -> int:
        """Rows of a micro-batch over all devices."""
        return self.optim.batch_size * self.mesh.size

    @property
    def dtypes(self) -> Dtypes:
        """What each module trains in."""
        return self._dtypes(self.precision.roles, self.precision.formats)

    @property
    def eval_dtypes(self) -> Dtypes:
        """The same of an evaluation: under a policy of its own it has no formats but that."""
        precision = self.precision
        return self._dtypes(precision.eval_roles, precision.formats * (not precision.eval_policy))

    def _dtypes(self, roles: Roles, text: str) -> Dtypes:
        modules, patterns = self.model.matmuls, self.precision.fp32_islands
        wide = [name for name in modules if patterns and islands.match(patterns, name)]
        own = formats.choose(text, modules) | dict.fromkeys(wide, "fp32")
        return policy.by_module(roles, own, modules)

    @property
    def chunks(self) -> int:
        """Of the rows of head and loss."""
        return chunks.count(self.execution.loss_chunks, self._rows, self.model.vocab)

    @property
    def alike(self) -> bool:
        """Whether all layers compute in the same formats, and are trained alike."""
        if self.recipes or any(roles.recipe for roles in self.precision.kinds):
            return False
        given = self._patterns.values()
        return all(islands.in_every_layer(choice, names) for _, names, choice in given)

    @property
    def trained(self) -> list[str]:
        """The parameters that training moves."""
        names, freeze = shapes(self.model), self.optim.freeze
        return [name for name in names if trains(name, self.model, freeze)]

    @property
    def _patterns(self) -> dict[str, tuple[str, list[str], Callable[[str], object]]]:
        """What may be for some layers alone: the patterns of a flag, the names they are of, and
        what they choose for each."""
        modules, own = self.model.matmuls, self.precision.formats
        given = {
            "--fp32-islands": (self.precision.fp32_islands, modules),
            "--decay": (self.optim.decay, modules),
            "--lora-targets": (self.model.lora_targets, modules),
            "--freeze": (self.optim.freeze, list(shapes(self.model))),
        }
        matched = {f: (text, of, partial(islands.match, text)) for f, (text, of) in given.items()}
        chosen = (own, modules, formats.choose(own, modules).get)
        return {f: each for f, each in (matched | {formats.FIELD: chosen}).items() if each[0]}

    def replace(self, **fields: Any) -> "Config":
        """The same with some fields of its sections replaced."""
        parts = {}
        for section in dataclasses.fields(self):
            old = getattr(self, section.name)
            mine = {name: fields.pop(name) for name in vars(old) if name in fields}
            parts[section.name] = dataclasses.replace(old, **mine)
        assert not fields, f"no section has {', '.join(fields)}"
        return Config(**parts)

    def to_json(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, sections: Any) -> "Config":
        """The inverse of `to_json`.

        Raises:
            UserError: a section or field is missing, unknown or of another type.
        """
        kinds = {f.name: f.type for f in dataclasses.fields(cls)}
        require_fields("config", sections, dict.fromkeys(kinds, dict))
        parts = {}
        for name, kind in kinds.items():
            types = {f.name: f.type for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
            require_fields(f"config {name}", sections[name], types)
            parts[name] = kind(**sections[name])  # type: ignore[operator]
        return cls(**parts)
