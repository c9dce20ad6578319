"""Policy name or jmp-style spec -> the dtype of every role in a training step.

| role                                                              | dtype   |
|-------------------------------------------------------------------|---------|
| parameters, optimizer moments, accumulated gradients              | param   |
| matmul inputs and outputs (qkv, scores, projections, mlp, logits) | compute |
| embedding look-up, norms, softmax, RoPE, loss                     | output  |
| residual stream: the embedding's sum, and what each block returns | stream  |
| what comes back to a matmul, and what is made of it               | grads   |

That is what `torch.autocast` does on CUDA, made explicit so that CPU and CUDA, JAX and torch
agree; grads is compute and stream is output unless a policy says otherwise. jmp's own shorthand
`bf16` makes the parameters bf16 too; the names here never do.
A policy with a recipe (`lockstep.formats`) rounds the operands of linear layers to narrower
formats, and sums in compute. A module that has a format of its own (`lockstep.config.formats`; an
island, `lockstep.config.islands`, is one in fp32) computes as under the policy of that name.
`Config.dtypes` resolves a policy once, to the dtypes of each module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from lockstep.errors import require
from lockstep.formats.table import find_recipe

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ALIASES = {
    "f64": "float64",
    "f32": "float32",
    "full": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
}
KEYS = {"p": "params", "c": "compute", "o": "output", "g": "grads", "s": "stream"}
OPTIONAL = ("grads", "stream")


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The dtypes of one policy, as numpy/ml_dtypes names."""

    param: str
    compute: str
    output: str
    grads: str = ""  # "": compute's
    stream: str = ""  # "": output's
    tf32: bool = False
    recipe: str = ""  # of `lockstep.formats`, of linear layers but those of `outside`

    @property
    def spec(self) -> str:
        """Writes the roles as `jmp.get_policy` reads them."""
        return f"params={self.param},compute={self.compute},output={self.output}"

    @property
    def residual(self) -> str:
        """Returns the dtype of the residual stream."""
        return self.stream or self.output

    @property
    def loss_scaling(self) -> bool:
        """Says if gradients need a loss scale: only in float16, whose smallest normal is 6e-5."""
        return "float16" in (self.compute, self.grads)

    @property
    def mixed(self) -> bool:
        return self.compute != self.output

    @property
    def delayed(self) -> bool:
        """Says if scales come from an amax history, which is state."""
        return bool(self.recipe and find_recipe(self.recipe).delayed)

    @property
    def scales_tensors(self) -> bool:
        """Says if scales come from the tensors themselves, so that a row's product knows others."""
        return bool(self.recipe) and not self.delayed


POLICIES = {
    "fp64": Roles(param="float64", compute="float64", output="float64"),
    "fp32": Roles(param="float32", compute="float32", output="float32"),
    "tf32": Roles(param="float32", compute="float32", output="float32", tf32=True),
    "bf16": Roles(param="float32", compute="bfloat16", output="float32"),
    "bf16-stream": Roles(param="float32", compute="bfloat16", output="float32", stream="bfloat16"),
    "fp16": Roles(param="float32", compute="float16", output="float32"),
    **{
        name: Roles(param="float32", compute="float32", output="float32", recipe=name)
        for name in ("fp8", "fp8-delayed")
    },
}


@dataclass(frozen=True, kw_only=True)
class Dtypes(Roles):
    """The roles of a model, and of each module in it that multiplies matrices."""

    modules: Mapping[str, Roles]  # by name, such as "blocks.0.attn.qkv"

    @property
    def policy(self) -> Roles:
        """Returns the roles of the model itself."""
        return Roles(**{field.name: getattr(self, field.name) for field in fields(Roles)})

    def at(self, name: str) -> Roles:
        """Returns the roles of a module; those of the model if it has none of its own."""
        return self.modules.get(name, self.policy)

    @property
    def all_roles(self) -> set[Roles]:
        """Lists all roles that the model or a module has."""
        return {self.policy, *self.modules.values()}

    @property
    def histories(self) -> list[str]:
        """Lists the modules whose operands have an amax history."""
        return [name for name, roles in self.modules.items() if roles.delayed]


def by_module(roles: Roles, formats: Mapping[str, str], modules: Sequence[str]) -> Dtypes:
    """Resolve a policy in a model of these modules, of which some have a format of their own."""
    wide = [name for name in modules if roles.recipe and outside(name, modules)]
    own = dict.fromkeys(wide, "fp32") | dict(formats)
    named = {name: as_under(roles, kind) for name, kind in own.items()}
    return Dtypes(**vars(roles), modules=dict.fromkeys(modules, roles) | named)


def as_under(roles: Roles, name: str) -> Roles:
    """Resolve a module's own format; in float64 it stays, so that only rounding is left."""
    other = POLICIES[name]
    compute = roles.compute if roles.compute == "float64" else other.compute
    return replace(roles, compute=compute, recipe=other.recipe, tf32=False, grads="")


def outside(name: str, modules: Sequence[str]) -> bool:
    """Say if a recipe leaves a module out: attention, the head, the first and the last layer.

    Narrow formats do most harm there.
    """
    layer, (first, *_, last) = name.split(".")[1:2], [m.split(".")[1:2] for m in modules[:-1]]
    return layer in ([], first, last) or name.endswith(".attend")


def resolve(policy: str, flag: str = "--policy") -> Roles:
    """Resolve a policy name, or a full jmp spec such as the one `Roles.spec` gives.

    Args:
        flag: what an error names.

    Raises:
        UserError: an unknown name, a malformed spec, or a mixture the twins cannot both run.
    """
    return POLICIES[policy] if policy in POLICIES else resolve_spec(policy, flag)


@lru_cache
def resolve_spec(policy: str, flag: str) -> Roles:
    remedy = f"unknown; use {', '.join(POLICIES)} or a spec such as {POLICIES['bf16'].spec}"
    require("=" in policy, flag, policy, remedy)
    dtypes = _parse(policy, flag)
    roles = Roles(param=dtypes["params"], compute=dtypes["compute"], output=dtypes["output"],
                  grads=dtypes.get("grads", ""), stream=dtypes.get("stream", ""))  # fmt: skip
    _check(policy, roles, flag)
    return roles


def _parse(spec: str, flag: str) -> dict[str, str]:
    dtypes: dict[str, str] = {}
    remedy = "give params=, compute= and output= once each"
    for part in spec.split(","):
        key, _, value = part.partition("=")
        key, value = KEYS.get(key, key), ALIASES.get(value, value)
        known = key in KEYS.values() and key not in dtypes
        require(known, flag, spec, f"key {key!r}; {remedy}")
        require(value in BYTES, flag, spec, f"dtype {value!r}; use one of {', '.join(BYTES)}")
        dtypes[key] = value
    for key in KEYS.values():
        require(key in (*dtypes, *OPTIONAL), flag, spec, f"no {key}=; {remedy}")
    return dtypes


def _check(spec: str, roles: Roles, flag: str) -> None:
    grads = roles.grads or roles.compute
    every = {roles.param, roles.compute, roles.output, roles.residual, grads}
    half = {"bfloat16", "float16"}
    for holds, remedy in (
        ("float64" not in every or every == {"float64"},
         "float64 mixes with nothing; use --policy fp64"),
        (roles.output not in half,
         f"output {roles.output} would put norms, softmax and loss into half precision; "
         "use output=float32; stream=bfloat16 is for the residual stream alone"),
        (roles.residual == roles.output or roles.residual == roles.compute == "bfloat16",
         f"stream {roles.residual} is for compute=bfloat16 alone, which it must be; drop it"),
        (roles.param != "float16",
         "GradScaler cannot unscale float16 gradients; use params=float32"),
        (roles.param != "bfloat16" or {roles.compute, grads} == {"bfloat16"},
         "params bfloat16 compute in bfloat16 only; use compute=bfloat16 or params=float32"),
    ):  # fmt: skip
        require(holds, flag, spec, remedy)
