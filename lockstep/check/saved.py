"""Writes and reads the file of `--save-map`: rules to convert by, and the proved mapping."""

import itertools
import re
from pathlib import Path
from typing import Any

from lockstep.check.check import Result
from lockstep.check.pairing.tensors import Tensors
from lockstep.check.report import map_json, tensors_json
from lockstep.convert.derive import derive_rules
from lockstep.convert.map import Map

# Whole numbers in a torch model's state: no weights, and not compared.
COUNTERS = ("*num_batches_tracked", "*position_ids")


def make_map(result: Result, programs: tuple[str, str]) -> tuple[Map, list[str]]:
    """Makes the map of a check.

    Args:
        programs: the reference and the port, as the user named them.

    Returns:
        The map; what a user should know of it, in lines.
    """
    mapping = result.mapping
    reference, port = mapping.sides
    derived = derive_rules(tensors_json(mapping), (reference.shapes, port.shapes))
    abouts = {"reference": result.reference, "port": result.port}
    made = Map(
        rules=tuple(derived.rules),
        sizes=derived.sizes,
        tied={side: tensors.aliases for side, tensors in zip(abouts, mapping.sides)},
        unused={
            "reference": _constants(
                reference,
                {entry.reference.name for entry in mapping.entries} | {*mapping.only_reference},
            ),
            "port": _constants(
                port, {entry.port.name for entry in mapping.entries} | {*mapping.only_port}
            ),
        },
        undetermined=tuple(result.guessed),
        verdict=result.verdict,
        programs={
            side: {"program": Path(name).name, "framework": about["framework"]}
            for (side, about), name in zip(abouts.items(), programs)
        },
        proved=map_json(result)
        | {"shapes": {side: tensors.shapes for side, tensors in zip(abouts, mapping.sides)}},
    )
    lines = [f"no rule for {name}: {reason}" for name, reason in derived.without.items()]
    alone = [*mapping.only_reference, *mapping.only_port]
    lines += [f"no rule for {name}: it has no partner" for name in alone]
    return made, lines + made.warnings


def _constants(side: Tensors, paired: set[str]) -> tuple[str, ...]:
    """Lists buffers that are constants, with indices, and a torch model's counters."""
    names = {_with_indices(name) for name in side.shapes if name not in paired}
    return (*sorted(names), *(COUNTERS if side.framework == "torch" else ()))


def _with_indices(name: str) -> str:
    """Writes numbers as indices; * in a name with braces, which would be read as an index."""
    if {"{", "}"} & {*name}:
        return re.sub(r"[\d{}]+", "*", name)
    count = itertools.count()
    return re.sub(r"\d+", lambda _: f"{{i{next(count)}}}", name)


def read_proved(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the mapping in a map's file, or in JSON of its own."""
    return dict(content.get("proved", content))
