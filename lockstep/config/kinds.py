"""The device kinds of `--device`: which framework supports each, with the evidence."""

from collections.abc import Iterable

from lockstep.config.policy import Roles
from lockstep.errors import require

MEASURED = "measured"
ON_HOPPER = "measured on an H100 and H200s"  # and compiled, or traced, for others
COMPILED = "compiled for"  # XLA compiled our step for one
NOT_TRIED = "not tried"
NONE = "none"
# Gaudi is no kind of upstream PyTorch, and no kind of JAX.
PROOF = {
    "cpu": {"jax": MEASURED, "torch": MEASURED},
    "cuda": {"jax": ON_HOPPER, "torch": ON_HOPPER},
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
COMPARED = CHOICES[1:]  # for programs that are compared: auto may be another kind for each
NO_FLOAT64 = ("mps", "tpu")


def require_kind(framework: str, asked: str) -> None:
    """Require that a framework has such devices somewhere.

    Raises:
        UserError: the framework has no such devices anywhere.
    """
    kinds = ("auto", *KINDS[framework])
    other = "".join(name for name, theirs in KINDS.items() if asked in theirs)
    remedy = f"{framework} has no such devices; use one of {', '.join(kinds)}, or {other}"
    require(asked in kinds, "--device", asked, remedy)


def place(framework: str, asked: str, *roles: Roles) -> str:
    """Choose a framework's device kind in a comparison: the CPU if it lacks the kind or a dtype."""
    has = asked in ("auto", *KINDS.get(framework, (asked,)))
    return asked if has and not (asked in NO_FLOAT64 and _are_wide(*roles)) else "cpu"


def name_places(asked: str, frameworks: Iterable[str]) -> list[str]:
    """Say which parts of a comparison on this kind run on a CPU, a line each."""
    lacking = [framework for framework in frameworks if place(framework, asked) != asked]
    lines = [f"{framework} has no {asked}: it runs on the CPU" for framework in lacking]
    wide = f"{asked} has no float64: what is computed in it is on the CPU"
    return [*lines, wide] if asked in NO_FLOAT64 else lines


def require_exact(asked: str, remedy: str) -> None:
    """Require a kind with float64, in which everything is compared.

    Raises:
        UserError: all is compared in float64, and such devices have none.
    """
    able = ", ".join(kind for kind in COMPARED if kind not in NO_FLOAT64)
    require(asked not in NO_FLOAT64, "--device", asked, f"has no float64; {remedy} {able}")


def require_float64(kind: str, policy: str, *roles: Roles) -> None:
    """Require a kind with the dtypes in which a policy computes.

    Raises:
        UserError: a policy has it, and such devices have not.
    """
    remedy = f"a device of the kind {kind} has no float64; use fp32"
    require(not _are_wide(*roles) or kind not in NO_FLOAT64, "--policy", policy, remedy)


def _are_wide(*roles: Roles) -> bool:
    return any("float64" in (each.param, each.compute, each.output) for each in roles)
