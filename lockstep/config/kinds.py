"""The kinds of device that `--device` names, which framework has which, and what shows that it
works there."""

from lockstep.config.policy import Roles
from lockstep.errors import require

MEASURED = "measured"
COMPILED = "compiled for"  # XLA compiled our step for one
TRACED = "traced for"  # PyTorch's operations were recorded, on fake tensors
NOT_TRIED = "not tried"
NONE = "none"
# Gaudi is no kind of upstream PyTorch, and no kind of JAX.
PROOF = {
    "cpu": {"jax": MEASURED, "torch": MEASURED},
    "cuda": {"jax": COMPILED, "torch": TRACED},
    "rocm": {"jax": NOT_TRIED, "torch": NOT_TRIED},
    "tpu": {"jax": COMPILED, "torch": NONE},
    "mps": {"jax": NONE, "torch": NOT_TRIED},
    "xpu": {"jax": NONE, "torch": NOT_TRIED},
    "gaudi": {"jax": NONE, "torch": NONE},
}
KINDS = {
    framework: tuple(kind for kind, row in PROOF.items() if row[framework] != NONE)
    for framework in PROOF["cpu"]
}
CHOICES = ("auto", *(kind for kind, row in PROOF.items() if {*row.values()} != {NONE}))
NO_FLOAT64 = ("mps", "tpu")


def require_kind(framework: str, asked: str) -> None:
    """
    Raises:
        UserError: the framework has no such devices anywhere.
    """
    kinds = ("auto", *KINDS[framework])
    other = "".join(name for name, theirs in KINDS.items() if asked in theirs)
    remedy = f"{framework} has no such devices; use one of {', '.join(kinds)}, or {other}"
    require(asked in kinds, "--device", asked, remedy)


def require_float64(kind: str, policy: str, *roles: Roles) -> None:
    """
    Raises:
        UserError: a policy has it, and such devices have not.
    """
    wide = any("float64" in (each.param, each.compute, each.output) for each in roles)
    remedy = f"a device of the kind {kind} has no float64; use fp32"
    require(not wide or kind not in NO_FLOAT64, "--policy", policy, remedy)
