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
from lockstep.train import autotune


def add(commands: Any) -> None:
    """The subcommand."""
    sub = commands.add_parser(
        "doctor",
        description="Asks each framework, in a process of its own, what it sees. Reports which\n"
        "policies are native here, emulated (in other arithmetic) or unsupported, the\nproblems "
        "and their remedies. Exit status 1 if something cannot work.",
        epilog="example:\n  lockstep doctor --policy bf16",
    )
    about = "can this one run? Exit status 1 if it is unsupported in a framework; that it is "
    about += "emulated is a warning (default: not asked)"
    sub.add_argument("--policy", default="", metavar="NAME|SPEC", help=about)
    about = "ask this one alone (default: both)"
    sub.add_argument("--framework", metavar="|".join(twin.MODULES), help=about)
    sub.add_argument("--json", action="store_true", help="print all of it as JSON (default: off)")
    sub.set_defaults(command=_doctor)


def _doctor(given: argparse.Namespace) -> int:
    if given.policy:
        resolve(given.policy)
    names = list(twin.MODULES) if given.framework is None else [given.framework]
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
