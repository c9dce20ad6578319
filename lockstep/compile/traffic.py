"""Reads each kernel of a compiled XLA step, and the bytes that it reads and writes."""

import re
from collections.abc import Iterator

from lockstep.compile.hlo import BYTES, NAMES, STARTS, Instruction, Module
from lockstep.compile.program import Kernel
from lockstep.compile.targets import Target
from lockstep.compile.xla import dot_size, fused_attention, fused_flops, multiplied

SLICES = {"dynamic-slice", "slice", "gather"}
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # and which operand is written
# They need more of an operand than the elements that are asked of them.
GATHER = {"reduce", "dot", "scatter", "custom-call", "fusion", "reduce-window", "sort", "tuple",
          "concatenate", "dynamic-update-slice", "broadcast"}  # fmt: skip


def kernels(module: Module, target: Target, tf32: bool = False) -> Iterator[Kernel]:
    for instruction, times in module.kernels():
        yield kernel(module, target, instruction, times, tf32)


def kernel(
    module: Module, target: Target, run: Instruction, times: int = 1, tf32: bool = False
) -> Kernel:
    """Counts what one instruction computes and moves."""
    flops, units = 0, ""
    for inner in module.inner(run).values():
        if size := dot_size(module, inner):
            m, n, k = size
            flops += 2 * m * n * k
            units = multiplied(module, target, inner)[1]
    if fused_attention(run):
        units = target.units(NAMES.get(run.shapes[0].dtype, ""), tf32)
        flops = fused_flops(module, run)
    group = "attention" if fused_attention(run) else "matmuls" if flops else "rest"
    return Kernel(_name(run), group, flops, units, moved(module, run), times)


def _name(kernel: Instruction) -> str:
    """Returns an instruction's name in the JAX program, without its layer's number."""
    return kernel.op_name.partition("/")[2] or re.sub(r"[.\d]+$", "", kernel.name)


def moved(module: Module, kernel: Instruction) -> int:
    """Counts bytes read and written; a slice reads its result, an update writes its input."""
    scope = module.computations[kernel.computation]
    if kernel.opcode == "fusion":
        inner = module.computations[kernel.called]
        parameters = [i for i in inner.values() if i.opcode == "parameter"]
        root = next(i for i in inner.values() if i.root)
        return sum(_read(module, p) for p in parameters) + _written(inner, root)
    if kernel.opcode == "dynamic-update-slice":
        return 2 * scope[kernel.operands[1]].shapes[0].bytes
    written = sum(shape.bytes for shape in kernel.shapes)
    if kernel.opcode in STARTS:  # from one memory of a TPU to another
        copy, (source,) = kernel.shapes[STARTS[kernel.opcode]], scope[kernel.operands[0]].shapes
        size = int(copy.elements * BYTES[copy.dtype])
        return size * ((not copy.on_chip) + (not source.on_chip))
    if kernel.opcode in SLICES:
        return 2 * written
    return written + sum(s.bytes for o in kernel.operands if o in scope for s in scope[o].shapes)


def _read(module: Module, parameter: Instruction) -> int:
    """Counts the bytes read of a fusion's parameter: no more than its users need."""
    size, elements = (sum(getattr(shape, what) for shape in parameter.shapes)
                      for what in ("bytes", "elements"))  # fmt: skip
    return min(size, _needed(module, parameter, {}) * size // max(1, elements))


def _needed(module: Module, value: Instruction, known: dict[str, int]) -> int:
    """Counts the needed elements of a value inside a fusion, which computes only those.

    `known` has the counts of other values. It is kept because a random generator's users fork and
    meet again, and have too many paths to follow each.
    """
    if value.name not in known:
        known[value.name] = _count_needed(module, value, known)
    return known[value.name]


def _count_needed(module: Module, value: Instruction, known: dict[str, int]) -> int:
    total = 0
    for user in module.users(value):
        first = user.operands[0] == value.name and value.name not in user.operands[1:]
        if first and user.opcode in SLICES:
            total += sum(shape.elements for shape in user.shapes)
        elif first and user.opcode == "dynamic-update-slice":
            continue
        elif first and user.opcode == "scatter":  # in place: what it adds to
            total += module.computations[user.computation][user.operands[2]].shapes[0].elements
        elif user.root or user.opcode in GATHER:
            return sum(shape.elements for shape in value.shapes)
        else:
            total += _needed(module, user, known)
    return total


def _written(inner: dict[str, Instruction], root: Instruction) -> int:
    if root.opcode == "tuple":
        return sum(_written(inner, inner[name]) for name in root.operands)
    if root.opcode == "bitcast":
        return _written(inner, inner[root.operands[0]])
    if root.opcode in IN_PLACE:
        return inner[root.operands[IN_PLACE[root.opcode]]].shapes[0].bytes
    return sum(shape.bytes for shape in root.shapes)
