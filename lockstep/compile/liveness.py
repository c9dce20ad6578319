"""The bytes that are live at the peak of a step that XLA scheduled for a TPU, by part.

libtpu writes no buffer assignment. Its instructions stand in the order of their schedule: a value
lives from where it is made to where it is last used. Views and updates in place make no value.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from lockstep.compile.hlo import STARTS, Instruction, Module, Shape
from lockstep.compile.program import PARTS, Buffer, Parts

VIEWS = {"bitcast", "opt-barrier", "while", "copy-done", "slice-done", "async-done"}
UPDATES = {"dynamic-update-slice", "scatter"}
NOT_MADE = -1


def live_parts(
    module: Module, state: Mapping[int, Buffer], parts: Parts, peak: int
) -> dict[str, int]:
    """`state` by the number of its parameter; `peak` less the values is workspace."""
    found: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
    for number, buffer in state.items():
        part = buffer.part if buffer.part in PARTS else "workspace"
        found[part] += module.parameters[number].shapes[0].allocated
    found.update(_at_peak(module, module.entry, parts))
    found["workspace"] += max(0, peak - found.total())
    return dict(found)


def _at_peak(module: Module, name: str, parts: Parts) -> Counter[str]:
    """Of the values that a computation makes, when most is live. What it is given and what it
    gives back stands where its caller has it."""
    change: dict[int, Counter[str]] = defaultdict(Counter)
    for born, dies, shape in _values(module, name):
        size = Counter({parts.of(shape.dims, shape.dtype): shape.allocated})
        change[born].update(size)
        change[dies + 1].subtract(size)
    for time, instruction in enumerate(module.computations[name].values()):
        if instruction.opcode in ("while", "call", "conditional"):
            called = [each for each in (instruction.called, *instruction.branches) if each]
            inner = max((_at_peak(module, each, parts) for each in called), key=Counter.total)
            change[time].update(inner)
            change[time + 1].subtract(inner)
    live: Counter[str] = Counter()
    best: Counter[str] = Counter()
    for time in sorted(change):
        live.update(change[time])
        best = max(best, Counter(live), key=Counter.total)
    return best


def _values(module: Module, name: str) -> Iterator[tuple[int, int, Shape]]:
    """When each is made and last used."""
    made: list[tuple[int, Shape]] = []
    last: dict[int, int] = {}
    held: dict[str, list[int]] = {}  # what each array of an instruction's result is, in `made`
    returned: set[int] = set()
    for time, i in enumerate(module.computations[name].values()):
        operands = [held[operand] for operand in i.operands if operand in held]
        last |= {value: time for each in operands for value in each}
        if i.opcode == "tuple":
            held[i.name] = [value for each in operands for value in each]
        elif i.opcode == "get-tuple-element":
            held[i.name] = [operands[0][int(i.attribute("index"))]]
        elif i.opcode in VIEWS:
            held[i.name] = operands[0]
        elif i.opcode in ("parameter", "constant"):
            held[i.name] = [NOT_MADE] * len(i.shapes)
        else:
            shapes = [i.shapes[STARTS[i.opcode]]] if i.opcode in STARTS else i.shapes
            taken = _updated(module, i)
            held[i.name] = []
            for result, shape in enumerate(shapes):
                if result in taken:
                    held[i.name].append(operands[taken[result]][0])
                else:
                    held[i.name].append(len(made))
                    made.append((time, shape))
        if i.root:
            returned = set(held[i.name])
    for value, (born, shape) in enumerate(made):
        if value not in returned:
            yield born, last.get(value, born), shape


def _updated(module: Module, i: Instruction) -> dict[int, int]:
    """Which results are an operand, updated in place."""
    if i.opcode in UPDATES:
        return {0: 0}
    if i.opcode != "fusion":
        return {}
    inner = module.computations[i.called]
    root = next(each for each in inner.values() if each.root)
    results = [inner[each] for each in root.operands] if root.opcode == "tuple" else [root]
    found = {}
    for number, result in enumerate(results):
        while result.opcode == "bitcast":
            result = inner[result.operands[0]]
        if result.opcode in UPDATES and inner[result.operands[0]].opcode == "parameter":
            found[number] = int(inner[result.operands[0]].operands[0])
    return found
