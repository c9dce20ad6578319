"""`lockstep doctor`: its flags and its exit status."""

import argparse
import json
from typing import Any

from lockstep import twin
from lockstep.config.policy import resolve
from lockstep.doctor import machine, policies, report, rules
from lockstep.doctor.ask import ask
from lockstep.doctor.facts import Facts
from lockstep.exits import DONE, FAILED
from lockstep.flags import add_command, add_switch, add_text
from lockstep.train import autotune


def add(commands: Any) -> None:
    """Adds the subcommand."""
    sub = add_command(
        commands, "doctor", _doctor,
        "Asks each framework, in a separate process, for devices and libraries. Reports\n"
        "which policies are native here, emulated (in other arithmetic) or unsupported,\n"
        "problems and remedies. Exit status 1 if something cannot work.",
        "lockstep doctor --policy bf16",
    )  # fmt: skip
    about = "whether this one runs: exit status 1 if a framework does not support it; "
    add_text(sub, "--policy", "NAME|SPEC", f"{about}emulation is a warning (default: not asked)")
    add_text(sub, "--framework", "|".join(twin.MODULES), "ask only this one (default: both)")
    add_switch(sub, "--json", "print the report as JSON")


def _doctor(given: argparse.Namespace) -> int:
    if given.policy:
        resolve(given.policy)
    names = [given.framework] if given.framework else list(twin.MODULES)
    twin.require_known(names[0])
    # The machine first: the frameworks take memory.
    facts = Facts(
        machine=machine.read(),
        frameworks={name: ask(name) for name in names},
        autotuned=[found for found in autotune.answers() if found["of"]["framework"] in names],
    )
    table = policies.table(facts, given.policy)
    found = rules.findings(facts)
    if given.policy:
        found += rules.of_policy(given.policy, table[given.policy])
    if given.json:
        print(json.dumps(report.as_json(facts, table, found), indent=1))
    else:
        print(report.as_text(facts, table, found))
    return FAILED if any(finding.severity == rules.ERROR for finding in found) else DONE
