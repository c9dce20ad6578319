"""Decides if a policy runs here natively, emulated or not at all: pure functions of facts.

On NVIDIA's devices the compute capability decides, never a name, nor what a framework claims.
On a CPU the time of a matmul decides: neither the instruction set nor the dtype in a
compiled program says whether a matmul in half precision is one.
"""

import re
from typing import NamedTuple

from lockstep.compile.targets import PASSES, Tpu
from lockstep.config.kinds import NO_FLOAT64
from lockstep.config.policy import POLICIES, Roles, resolve
from lockstep.devices import SINCE, Capabilities
from lockstep.doctor.facts import Facts, Framework

NATIVE, EMULATED, UNSUPPORTED, UNKNOWN = "native", "emulated", "unsupported", "unknown"
# Half precision that is converted and multiplied in float32 cannot be faster than float32. Native
# it takes 0.2 to 0.6 of float32's time; emulated as long (XLA) to 150 times as long (torch).
FASTER = 0.8


class Ability(NamedTuple):
    """A framework's way to run a policy here."""

    state: str
    why: str = ""


def table(facts: Facts, asked: str = "") -> dict[str, dict[str, Ability]]:
    """Maps policy -> framework -> ability, for every named policy and the given one."""
    wanted = {policy: resolve(policy) for policy in dict.fromkeys([*POLICIES, asked]) if policy}
    off = facts.machine.environment.get("NVIDIA_TF32_OVERRIDE") == "0"
    return {
        policy: {f.name: ability(roles, f, tf32_off=off) for f in facts.frameworks.values()}
        for policy, roles in wanted.items()
    }


def ability(roles: Roles, framework: Framework, *, tf32_off: bool = False) -> Ability:
    """Args: tf32_off: NVIDIA's libraries are told to leave TF32 alone."""
    device = framework.device
    if device is None:
        return Ability(UNSUPPORTED, "it does not start, or finds no device")
    if device.platform == "cpu":
        return _on_cpu(roles, framework.matmul_seconds)
    wide = "float64" in (roles.param, roles.compute)
    if wide and device.platform in NO_FLOAT64:
        return Ability(UNSUPPORTED, f"a {device.platform} has no float64")
    if device.platform == "tpu":
        return _on_tpu(roles)
    if device.capability is None:
        return Ability(UNKNOWN, f"not tried on the platform {device.platform}")
    if lacks_kernels(framework):
        return Ability(UNSUPPORTED, "this build has no kernels for the device")
    if roles.tf32 and tf32_off:
        return Ability(EMULATED, "NVIDIA_TF32_OVERRIDE=0 switches TF32 off: float32")
    return _on_cuda(roles, device.capability)


BY_HAND = Ability(EMULATED, "operands are rounded to it, and multiplied in float32")


def _on_cpu(roles: Roles, seconds: dict[str, float]) -> Ability:
    if roles.recipe:
        return BY_HAND
    if roles.tf32:
        return Ability(EMULATED, "a CPU has no TF32: operands are rounded to it")
    if not roles.compute.endswith("16"):
        return Ability(NATIVE)
    if "float32" not in seconds:
        return Ability(UNKNOWN, "no matmul could be timed")
    if roles.compute not in seconds:
        return Ability(UNSUPPORTED, f"it cannot compile {roles.compute} for this CPU")
    ratio = seconds[roles.compute] / seconds["float32"]
    if ratio < FASTER:
        return Ability(NATIVE)
    return Ability(EMULATED, f"its matmuls take {ratio:.1f} times as long as float32's")


def _on_tpu(roles: Roles) -> Ability:
    if roles.recipe:
        return BY_HAND
    units = Tpu.multiplies(roles.compute, roles.tf32)
    if units == roles.compute == "bfloat16":
        return Ability(NATIVE)
    return Ability(EMULATED, f"as {PASSES[units]} products of bfloat16")


def _on_cuda(roles: Roles, capability: tuple[int, int]) -> Ability:
    able = Capabilities.of_cuda(capability)
    if roles.recipe:
        return Ability(NATIVE) if roles.recipe in able.recipes else BY_HAND
    kind = "TF32" if roles.tf32 else roles.compute
    if kind not in SINCE or kind in multiplied(able):
        return Ability(NATIVE)
    why = f"capability {version_text(capability)} has no {kind}; {version_text(SINCE[kind])} has"
    return Ability(EMULATED, why)


def multiplied(able: Capabilities) -> list[str]:
    """Lists the kinds of `SINCE` that a device multiplies."""
    return [kind for kind in SINCE if kind in able.half or (kind == "TF32" and able.tf32)]


def lacks_kernels(framework: Framework) -> bool:
    """Says if torch has neither a binary for its device nor PTX to compile for it."""
    device, kernels = framework.device, framework.cuda.get("kernels")
    if device is None or device.capability is None or not kernels:
        return False
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)\b", " ".join(kernels)):
        made_for = (int(major), int(minor))
        same = kind == "compute" or made_for[0] == device.capability[0]
        if same and made_for <= device.capability:
            return False
    return True


def tensor_cores(capability: tuple[int, int]) -> str:
    """Lists the dtypes that tensor cores of a compute capability multiply."""
    able = Capabilities.of_cuda(capability)
    return ", ".join(multiplied(able)) if able.tensor_cores else "none"


def version_text(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)
