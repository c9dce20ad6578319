"""Reads the collectives of a compiled step, and the kernels that overlap with them."""

import math
import re
from collections.abc import Callable, Iterator
from itertools import takewhile

from lockstep.compile.hlo import NAMES, HloShape, Instruction, Module
from lockstep.compile.program import BACKWARD, COLLECTIVES, FORWARD, Collective
from lockstep.compile.xla import phase_of_kernel

GROUP = re.compile(
    r"replica_groups=(?:\{\{(?P<list>[\d,]+)\}|\[\d+,(?P<size>\d+)\]<=|"
    r"mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\(\S*\))? \{(?P<axes>[^}]*)\})"
)
AXIS = re.compile(r"'(\w+)'=(\d+)")
USED = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")


def collectives(module: Module, seconds: Callable[[Instruction], float]) -> Iterator[Collective]:
    """`seconds`: of an instruction that computes."""
    for instruction, times in module.kernels():
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            scope = module.computations[instruction.computation]
            sent = [shape for name in instruction.operands for shape in scope[name].shapes]
            got = list(_done(module, instruction).shapes)
            whole = max(sent, got, key=_bytes)
            meanwhile = sum(
                seconds(inner) * turns
                for other in _meanwhile(module, instruction)
                for inner, turns in module.kernels_in(other, 1)
                if inner.opcode.removesuffix("-start") not in COLLECTIVES
            )
            summed = kind == "reduce-scatter"  # of which XLA names a few together
            forward = not summed and phase_of_kernel(module, instruction) == FORWARD
            yield Collective(
                kind=kind, dtype="+".join(sorted({NAMES.get(s.dtype, s.dtype) for s in whole})),
                phase=FORWARD if forward else BACKWARD, bytes=_bytes(whole),
                elements=sum(shape.elements for shape in whole),
                devices=group_size(instruction.rest), times=times, meanwhile=meanwhile,
            )  # fmt: skip


def _bytes(shapes: list[HloShape]) -> int:
    return sum(shape.bytes for shape in shapes)


def _done(module: Module, start: Instruction) -> Instruction:
    """Returns the instruction where a collective ends; itself, if it waits."""
    users = module.users(start) if start.opcode.endswith("-start") else []
    return next((user for user in users if user.opcode.endswith("-done")), start)


def _meanwhile(module: Module, start: Instruction) -> list[Instruction]:
    """The instructions between its start and where its result is waited for, as scheduled."""
    done = _done(module, start)
    if done is start:
        return []
    scheduled = iter(module.computations[start.computation].values())
    for each in scheduled:
        if each is start:
            break
    return list(takewhile(lambda each: each is not done, scheduled))


def group_size(rest: str) -> int:
    """Counts the devices that talk to each other, in any of XLA's three notations."""
    found = GROUP.search(rest)
    if not found:
        return 0
    if found["list"]:
        return found["list"].count(",") + 1
    if found["size"]:
        return int(found["size"])
    axes = dict(AXIS.findall(found["mesh"]))
    return math.prod(int(part or axes[name]) for name, part in USED.findall(found["axes"]))
