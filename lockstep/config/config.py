"""The whole configuration of a run: its sections, and the checks across sections."""
# ruff: noqa: RUF009 - the sections are frozen

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from lockstep.config import autotune, chunks, formats, islands, policy
from lockstep.config.fields import require_fields
from lockstep.config.mesh import Mesh, parse_mesh
from lockstep.config.model import ModelConfig
from lockstep.config.policy import Dtypes, Roles
from lockstep.config.sections import (
    DataConfig,
    ExecutionConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
)
from lockstep.config.tensors import shapes, trains
from lockstep.errors import require

ADDED = {"run": {"autotune": autotune.NONE}}  # by section, what release 0.1.0 did not write
REMOVED = {"run": {"debug_nans"}}  # by section, what release 0.2.0 wrote
MOST_TOKENS = 2**26  # of a step or an evaluation, which are drawn at once


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run's numbers, and where and how often it writes them."""

    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    execution: ExecutionConfig = ExecutionConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        compiled_masks = self.execution.compile and self.precision.strict and self.model.dropout > 0
        remedy = "strict numerics draw dropout's masks with a generator that does not compile; "
        require(not compiled_masks, "--compile", True, f"{remedy}drop it or set --dropout 0")
        measured = self.precision.strict and self.run.ways
        remedy = "strict numerics take no other way than the framework's own; use none"
        require(not measured, autotune.FLAG, self.run.autotune, remedy)
        for name, on in (
            ("--compile", self.execution.compile),
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
        for flag, name in self.recipes.items():
            self._check_recipe(flag, name)
        unknown = set(self.eval_dtypes.histories) - set(self.dtypes.histories)
        remedy = "needs amax histories, which only fp8-delayed training records; use fp8"
        require(not unknown, "--eval-policy", self.precision.eval_policy, remedy)
        given = {name: text for name, (text, *_) in self._patterns.items()} | self.recipes
        patterns = " or ".join(f"{name} {text}" for name, text in given.items())
        remedy = f"scanned layers must be identical, but {patterns} changes some"
        fits = self.execution.layers != "scan" or self.alike
        require(fits, "--layers", "scan", f"{remedy}; use --layers unroll")

    def _check_formats(self) -> None:
        text, model, modules = self.precision.formats, self.model, self.dtypes.modules
        formats.check(text, model.matmuls)
        for module, name in formats.choose(text, model.matmuls).items():
            own, said = modules[module], f"{module}={name}"
            scaled = own.compute != "float16" or self.precision.roles.loss_scaling
            require(scaled, formats.FIELD, said, "has no loss scale; use --policy fp16, or bf16")
            chunked = own.delayed and module == "head"
            remedy = "has one amax history, but the head is computed in chunks; use fp8"
            require(not chunked, formats.FIELD, said, remedy)
            if own.recipe:
                self._refuse_adapters(formats.FIELD, said)

    def _check_recipe(self, flag: str, name: str) -> None:
        """Check a policy that rounds operands in the layers but the first and the last."""
        layers = self.model.n_layer
        remedy = f"{flag} {name} leaves the first and the last layer in float32; use at least 3"
        require(layers > 2, "--n-layer", layers, remedy)
        self._refuse_adapters(flag, name)

    def _refuse_adapters(self, flag: str, value: str) -> None:
        remedy = "multiplies adapters in no narrow format; drop --lora-rank or use bf16"
        require(not self.model.lora_rank, flag, value, remedy)

    @property
    def _rows(self) -> int:
        """Counts the rows of a micro-batch on one device."""
        return self.optim.batch_size * self.model.context

    @property
    def recipes(self) -> dict[str, str]:
        """Lists the recipes of training and of evaluation, if they have one."""
        precision = self.precision
        named = {"--policy": precision.roles, "--eval-policy": precision.eval_roles}
        return {flag: roles.recipe for flag, roles in named.items() if roles.recipe}

    @property
    def mesh(self) -> Mesh:
        return parse_mesh(self.execution.mesh)

    @property
    def global_batch_size(self) -> int:
        """Counts the rows of a micro-batch over all devices."""
        return self.optim.batch_size * self.mesh.size

    @cached_property
    def dtypes(self) -> Dtypes:
        """Resolves the dtypes in which each module trains."""
        return self._dtypes(self.precision.roles, self.precision.formats)

    @cached_property
    def eval_dtypes(self) -> Dtypes:
        """Resolves the dtypes of an evaluation; its own policy drops `--formats`."""
        precision = self.precision
        return self._dtypes(precision.eval_roles, precision.formats * (not precision.eval_policy))

    def _dtypes(self, roles: Roles, text: str) -> Dtypes:
        modules, patterns = self.model.matmuls, self.precision.fp32_islands
        wide = [name for name in modules if patterns and islands.match(patterns, name)]
        own = formats.choose(text, modules) | dict.fromkeys(wide, "fp32")
        return policy.by_module(roles, own, modules)

    @property
    def chunks(self) -> int:
        """Counts the chunks of the rows of head and loss."""
        return chunks.count(self.execution.loss_chunks, self._rows, self.model.vocab)

    @property
    def alike(self) -> bool:
        """Says if all layers compute in the same formats and are trained alike."""
        if self.recipes or any(roles.recipe for roles in self.precision.all_roles):
            return False
        given = self._patterns.values()
        return all(islands.in_every_layer(choice, names) for _, names, choice in given)

    @property
    def trained(self) -> list[str]:
        """Lists the parameters that training changes."""
        names, freeze = shapes(self.model), self.optim.freeze
        return [name for name in names if trains(name, self.model, freeze)]

    @property
    def _patterns(self) -> dict[str, tuple[str, list[str], Callable[[str], object]]]:
        """Lists the flags whose patterns may match only some layers, with names and choices."""
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
        """Replace some fields of its sections."""
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
        """Reads a config that `to_json` wrote.

        Raises:
            UserError: a section or field is missing, unknown or of another type.
        """
        kinds = {f.name: f.type for f in dataclasses.fields(cls)}
        require_fields("config", sections, dict.fromkeys(kinds, dict))
        parts = {}
        for name, kind in kinds.items():
            types = {f.name: f.type for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
            fields = {**ADDED.get(name, {}), **sections[name]}
            fields = {k: v for k, v in fields.items() if k not in REMOVED.get(name, ())}
            require_fields(f"config {name}", fields, types)
            parts[name] = kind(**fields)  # type: ignore[operator]
        return cls(**parts)
