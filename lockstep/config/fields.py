"""Fields of a configuration: a flag with its help, a choice, a value of a type."""

from dataclasses import field, fields
from typing import Any

from lockstep.errors import require


def flag(default: Any, help: str, *, choices: tuple = (), unit: str = "", derived: str = "",
         metavar: str = "") -> Any:  # fmt: skip
    """Make a dataclass field that is a flag; `derived` says how an unset one is made."""
    metadata = {"help": help, "choices": choices, "unit": unit, "derived": derived,
                "metavar": metavar}  # fmt: skip
    return field(default=default, metadata=metadata)


def flag_name(name: str) -> str:
    """Names the flag of a field: min_lr -> --min-lr."""
    return "--" + name.replace("_", "-")


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises UserError unless a flag's value is one of its choices."""
    require(value in choices, name, value, f"unknown; use {', '.join(choices)}")


def require_choices(section: Any) -> None:
    """Raises UserError unless each flag of a dataclass that has choices is one of them."""
    for each in fields(section):
        if each.metadata.get("choices"):
            name, choices = flag_name(each.name), each.metadata["choices"]
            require_choice(name, getattr(section, each.name), choices)


def require_fields(what: str, values: Any, types: dict[str, Any]) -> None:
    """Raises UserError unless `values` is a dict of exactly these fields and types.

    An int is no float and no bool: what we wrote ourselves never has one for the other.
    """
    found = {name: type(value) for name, value in values.items()} if type(values) is dict else {}
    missing = ", ".join(sorted(types.keys() - found.keys()))
    require(not missing, what, missing, "missing; this version writes it")
    wrong = sorted({name for name, _ in found.items() ^ types.items()})
    require(not wrong, what, ", ".join(wrong), "not as this version writes it")
