"""Finds problems of this machine and their remedies: a rule for each problem."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from lockstep.devices import Capabilities
from lockstep.doctor.ask import probe
from lockstep.doctor.facts import Facts, Framework
from lockstep.doctor.machine import RANKS
from lockstep.doctor.policies import NATIVE, UNSUPPORTED, Ability, lacks_kernels, version_text
from lockstep.process import module_command

ERROR, WARNING = "error", "warning"
SUPPORTED = {"jax": ((0, 10), (0, 13)), "torch": ((2, 9), (3, 0))}  # from, and below
ANEW = "in an empty virtual environment: pip install -e '.[cuda12]', or '.[cuda13]'"
REMEDIES = {
    "missing": "pip install 'lockstep-gpt[train]'; lockstep check needs none here",
    "libraries": "unset LD_LIBRARY_PATH; if it still fails, its CUDA libraries are missing or "
    "another package's: pip install --force-reinstall {name}",
    "flags": "unset XLA_FLAGS, or leave out the flag that this version does not know",
    "import": "pip install --force-reinstall {name}",
    "crash": "reinstall {name} in an empty virtual environment: its native code is probably of "
    "another version",
    "hang": "if nvidia-smi hangs too, reboot; CUDA_VISIBLE_DEVICES=-1 leaves the GPU out",
    "no facts": "look at PYTHONPATH: another module ends the process",
}
SLOW = 3  # times float32's: what is merely emulated takes 1.2


class Problem(NamedTuple):
    """A problem: an error cannot work; a warning works, but not as expected."""

    severity: str
    what: str
    remedy: str


def findings(facts: Facts) -> list[Problem]:
    """Collects the findings of every rule."""
    found = [finding for rule in OF_MACHINE for finding in rule(facts)]
    for framework in facts.frameworks.values():
        found += [finding for rule in OF_FRAMEWORK for finding in rule(framework, facts)]
    return found


def of_policy(policy: str, abilities: dict[str, Ability]) -> Iterator[Problem]:
    """Explains why a policy is not native in each framework."""
    for name, (state, why) in abilities.items():
        if state != NATIVE:
            severity = ERROR if state == UNSUPPORTED else WARNING
            remedy = "take a policy that is native in the table above"
            yield Problem(severity, f"--policy {policy} is {state} in {name}: {why}", remedy)


def supported_version(name: str, facts: Facts) -> str:
    """Returns the command that installs a supported version; "" if one is installed."""
    (least, below), found = SUPPORTED[name], facts.machine.packages.get(name)
    if found is None or least <= _numbers(found) < below:
        return ""
    return f"pip install '{name}>={version_text(least)},<{version_text(below)}'"


def versions(facts: Facts) -> Iterator[Problem]:
    packages = facts.machine.packages
    for name in SUPPORTED:
        if remedy := supported_version(name, facts):
            what = f"{name} {packages[name]} is not a version that the twins support"
            yield Problem(WARNING, what, f"{remedy}; lockstep check takes others")


def driver(facts: Facts) -> Iterator[Problem]:
    machine = facts.machine
    if machine.driver_error:
        remedy = "reboot after an update of the driver; start a container with --gpus all"
        yield Problem(WARNING, f"nvidia-smi fails: {machine.driver_error}", remedy)


def environment(facts: Facts) -> Iterator[Problem]:
    """Finds environment variables that change what a policy computes."""
    given, jax = facts.machine.environment, facts.frameworks.get("jax")
    if "NVIDIA_TF32_OVERRIDE" in given and _has_gpu(facts):
        what = f"NVIDIA_TF32_OVERRIDE={given['NVIDIA_TF32_OVERRIDE']} overrides the trainers' "
        what += "switches: with 0 policy tf32 computes in float32, with 1 policy fp32 may in TF32"
        yield Problem(WARNING, what, "unset NVIDIA_TF32_OVERRIDE")
    if jax and jax.on("cpu") and "onednn" in given.get("XLA_FLAGS", ""):
        what = "with the oneDNN flags in XLA_FLAGS, jax 0.11 and 0.12 compute wrong gradients"
        yield Problem(WARNING, what, "unset XLA_FLAGS")


def starts(f: Framework, facts: Facts) -> Iterator[Problem]:
    if f.fault:
        remedy = supported_version(f.name, facts) or REMEDIES[f.fault].format(name=f.name)
        yield Problem(
            ERROR, f"{f.name} does not start: {f.error}", f"{remedy}; {_probe_command(f)}"
        )


def reports_facts(f: Framework, facts: Facts) -> Iterator[Problem]:
    if "devices" in f.unread:  # and then the others for the same reason
        hidden = f.name == "jax" and "JAX_PLATFORMS" in facts.machine.environment
        remedy = supported_version(f.name, facts) or REMEDIES["import"].format(name=f.name)
        remedy = "unset JAX_PLATFORMS" if hidden else remedy
        yield Problem(ERROR, f"{f.name} finds no device: {f.unread['devices']}", remedy)
    else:
        for fact, why in f.unread.items():
            yield Problem(WARNING, f"{f.name} does not report its {fact}: {why}", _probe_command(f))


def sees_gpu(f: Framework, facts: Facts) -> Iterator[Problem]:
    """Finds a framework that does not see a GPU which the driver or the other one sees."""
    if not _has_gpu(facts) or not f.on("cpu"):
        return
    given = facts.machine.environment
    visible, platforms = given.get("CUDA_VISIBLE_DEVICES"), given.get("JAX_PLATFORMS", "")
    why, remedy = f.stderr or "it gives no reason", _probe_command(f)
    if visible in ("", "-1"):
        why, remedy = f"CUDA_VISIBLE_DEVICES={visible} hides it", "unset CUDA_VISIBLE_DEVICES"
    elif f.name == "jax" and platforms:
        why, remedy = f"JAX_PLATFORMS={platforms} hides it", "unset JAX_PLATFORMS"
    elif not f.cuda:
        why, remedy = "it is installed without CUDA", ANEW
    yield Problem(WARNING, f"{f.name} runs on the CPU beside an NVIDIA GPU: {why}", remedy)


def has_kernels(f: Framework, facts: Facts) -> Iterator[Problem]:
    if lacks_kernels(f):
        what = f"{f.name} is compiled for {', '.join(f.cuda['kernels'])} and not for its GPU"
        remedy = "install the extra for another CUDA; 13 leaves out what is below 7.5"
        yield Problem(ERROR, what, remedy)


def bfloat16(f: Framework, facts: Facts) -> Iterator[Problem]:
    capability = f.device.capability if f.device else None
    if capability is None or "bfloat16" in Capabilities.of_cuda(capability).half:
        return
    if f.cuda.get("claims_bfloat16"):
        what = f"{f.name} claims bfloat16, but capability {version_text(capability)} emulates it"
        yield Problem(WARNING, what, "use --policy fp16")


def matmuls(f: Framework, facts: Facts) -> Iterator[Problem]:
    for dtype, seconds in f.matmul_seconds.items():
        times = seconds / f.matmul_seconds["float32"]
        if times > SLOW:
            what = f"{f.name} multiplies {dtype} {times:.0f} times slower than float32"
            yield Problem(WARNING, what, "use another policy on this CPU")


def network(facts: Facts) -> Iterator[Problem]:
    if facts.machine.network:
        remedy = "allow connections on 127.0.0.1, add the name to /etc/hosts, or for PyTorch set "
        what = f"several processes cannot meet: {facts.machine.network}"
        yield Problem(WARNING, what, f"{remedy}GLOO_SOCKET_IFNAME=lo")


def ranks(facts: Facts) -> Iterator[Problem]:
    """Finds an incomplete set of a launcher's variables in the environment."""
    found = facts.machine.environment
    for count, others in RANKS.items():
        missing = [name for name in others if name not in found]
        several = found.get(count, "1") != "1"
        if several and missing:
            what = f"{count}={found[count]} without {', '.join(missing)}: a trainer would wait"
            yield Problem(WARNING, what, f"unset {count}; torchrun and --coordinator set it")


def talks(f: Framework, facts: Facts) -> Iterator[Problem]:
    wanted = ["gloo", *(["nccl"] if f.on("cuda") else [])]
    for name in wanted if f.collectives is not None else ():
        if name not in (f.collectives or ()):
            what = f"{f.name} has no {name}, which its processes talk through"
            yield Problem(WARNING, what, f"pip install --force-reinstall {f.name}, or one device")


OF_MACHINE = (versions, driver, environment, network, ranks)
OF_FRAMEWORK = (starts, reports_facts, sees_gpu, has_kernels, bfloat16, matmuls, talks)


def _has_gpu(facts: Facts) -> bool:
    seen = (f.on("cuda") for f in facts.frameworks.values())
    return bool(facts.machine.driver or facts.machine.gpus) or any(seen)


def _probe_command(f: Framework) -> str:
    return f"{shlex.join(module_command(probe(f.name)))} shows the whole error"


def _numbers(version: str) -> tuple[int, ...]:
    """Parses the leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))
