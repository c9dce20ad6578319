"""The doctor's report, as text within 80 columns and as JSON."""

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from lockstep.config.kinds import PROOF
from lockstep.doctor.facts import DeviceReport, Facts, Framework, Machine
from lockstep.doctor.policies import Ability, tensor_cores, version_text
from lockstep.doctor.rules import ERROR, WARNING, Problem
from lockstep.process import SPINS, WAITING
from lockstep.train.autotune import choose

WIDTH = 80
Table = dict[str, dict[str, Ability]]


def as_json(facts: Facts, table: Table, findings: list[Problem]) -> dict[str, Any]:
    policies = {p: {f: a._asdict() for f, a in row.items()} for p, row in table.items()}
    return dataclasses.asdict(facts) | {
        "kinds": PROOF,
        "policies": policies,
        "findings": [finding._asdict() for finding in findings],
    }


def as_text(facts: Facts, table: Table, findings: list[Problem]) -> str:
    lines = list(_machine(facts.machine))
    for framework in facts.frameworks.values():
        lines += ["", *_framework(framework)]
    lines += ["", *_table(table), "", *_kinds(list(facts.frameworks)), ""]
    lines += [*_autotuned(facts.autotuned), *_findings(findings)]
    return "\n".join(lines)


def _machine(m: Machine) -> Iterator[str]:
    yield f"{m.system}, {m.cores} cores, Python {m.python}"
    yield from _line("NVIDIA", f"driver {m.driver}" if m.driver else "no driver")
    for gpu in m.gpus:
        yield from _line("", _device(gpu))
    wheels = [
        f"{name} {v}" for name, v in m.packages.items() if name.startswith(("jax-", "nvidia"))
    ]
    yield from _line("packages", ", ".join(wheels))
    for name, value in m.environment.items():
        yield from _line("environment", f"{name}={value}")
    if not m.environment.keys() & WAITING:
        (said,) = map("=".join, SPINS.items())
        yield from _line("threads", f"{said}, set by torch_ref.train: they sleep sooner")


def _framework(f: Framework) -> Iterator[str]:
    names = ", ".join(f"{name} {version}" for name, version in f.versions.items())
    yield (names or f.name) + (": does not start" if f.fault else "")
    for device in f.devices:
        yield from _line("device", _device(device))
    cuda = (f"{k} {' '.join(v) if isinstance(v, list) else v}" for k, v in f.cuda.items())
    yield from _line("CUDA", ", ".join(cuda))
    through = ", ".join(f.collectives or [])
    yield from _line("processes", through and f"talk through {through}")
    switches = ", ".join(f"{name}={value}" for name, value in f.float32.items())
    yield from _line("float32", switches and f"{switches}; --policy sets it")


def _device(d: DeviceReport) -> str:
    parts = [d.name if d.name == d.platform else f"{d.platform}: {d.name}"]
    if d.capability:
        cores = tensor_cores(d.capability)
        parts.append(f"capability {version_text(d.capability)}, tensor cores: {cores}")
    if d.total is not None:
        parts.append(f"{_gib(d.free)} of {_gib(d.total)} free")
    return "; ".join(parts)


def _table(table: Table) -> Iterator[str]:
    names = list(next(iter(table.values())))
    wide = max(map(len, ["policy", *table]))
    yield "  ".join(["policy".ljust(wide), *(name.ljust(11) for name in names)]).rstrip()
    for policy, row in table.items():
        states = (ability.state.ljust(11) for ability in row.values())
        yield "  ".join([policy.ljust(wide), *states]).rstrip()
    for name in names:
        column = {policy: row[name].why for policy, row in table.items()}
        for why in filter(None, dict.fromkeys(column.values())):
            same = ", ".join(policy for policy in column if column[policy] == why)
            yield from _line(name, f"{same}: {why}")


def _kinds(names: list[str]) -> Iterator[str]:
    """Shows the developers' evidence that the twins work on each kind of device."""
    wide = max(len(text) for row in PROOF.values() for text in row.values())
    yield "  ".join(["--device", *(name.ljust(wide) for name in names)]).rstrip()
    for kind, row in PROOF.items():
        yield "  ".join([kind.ljust(8), *(row[name].ljust(wide) for name in names)]).rstrip()


def _autotuned(found: list[dict[str, Any]]) -> Iterator[str]:
    """Lists the speeds that trainers have measured on this CPU, relative to the default."""
    if not found:
        return
    yield "--autotune: measured here; speeds, the framework's own way being 1"
    for each in found:
        of, speeds = each["of"], each["speeds"]
        model = of["model"]
        shape = f"width {model['d_model']}, {of['rows']} x {model['context']} tokens"
        said = (
            f"{way} {speed['speed']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})"
            for way, speed in speeds.items()
        )
        yield from textwrap.wrap(
            f"{of['framework']} {of['policy']}, {shape}: takes {choose(speeds)}; {', '.join(said)}",
            WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False,
        )  # fmt: skip
    yield ""


def _findings(findings: list[Problem]) -> Iterator[str]:
    if not findings:
        yield "no problems found"
    for severity in (ERROR, WARNING):
        for finding in findings:
            if finding.severity == severity:
                yield from textwrap.wrap(f"{severity}: {finding.what}", WIDTH,
                                         subsequent_indent="  ")  # fmt: skip
                yield from textwrap.wrap(f"-> {finding.remedy}", WIDTH, initial_indent="  ",
                                         subsequent_indent="     ")  # fmt: skip


def _line(head: str, text: str) -> list[str]:
    """Wraps a line behind its head; returns nothing for an empty text."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {head:<11} ", break_on_hyphens=False,
                         subsequent_indent=" " * 14)  # fmt: skip


def _gib(number: int | None) -> str:
    return "?" if number is None else f"{number / 2**30:.1f} GiB"
