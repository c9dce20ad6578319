"""XLA's text of a compiled program: computations, instructions, and how often each one runs."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1,
    "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8,
    "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
NAMES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16",
         "f8e4m3fn": "float8", "f8e5m2": "float8"}  # fmt: skip
SHAPE = re.compile(r"([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")
PLACED = re.compile(SHAPE.pattern + r"(?:\{([^}]*)\})?")
HEAD = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
OPERAND = re.compile(r"%([\w.\-]+)")
TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')
CALLED = re.compile(r"\b(?:calls|to_apply|body|called_computations)=\{?%([\w.\-]+)")
BRANCHES = re.compile(
    r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+))"
)


@dataclass(frozen=True)
class HloShape:
    dtype: str  # XLA's name
    dims: tuple[int, ...]
    on_chip: bool = False  # in a TPU's vector memory, not in the device's

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Counts bytes in the device's memory, without the padding of a TPU's tiles."""
        return 0 if self.on_chip else self.elements * BYTES.get(self.dtype, 0)


@dataclass
class Instruction:
    name: str
    shapes: tuple[HloShape, ...]  # of its results: several for a tuple
    opcode: str
    operands: tuple[str, ...]
    rest: str  # the attributes, as text
    computation: str
    root: bool = False

    def attribute(self, name: str) -> str:
        """Returns `name=...` or `"name":"..."` among the attributes; "" if there is none."""
        found = re.search(rf'\b{name}=(\{{[^}}]*\}}|"[^"]*"|[^\s,]+)', self.rest)
        found = found or re.search(rf'"{name}":\s*(\[[^\]]*\]|"[^"]*"|\w+)', self.rest)
        return found[1].strip('"') if found else ""

    def numbers(self, name: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", self.attribute(name))))

    @cached_property
    def op_name(self) -> str:
        """Returns the instruction's name in the JAX program."""
        return self.attribute("op_name")

    @cached_property
    def called(self) -> str:
        found = CALLED.search(self.rest)
        return found[1] if found else ""

    @cached_property
    def branches(self) -> tuple[str, ...]:
        return tuple(
            OPERAND.findall(" ".join("".join(m.groups("")) for m in BRANCHES.finditer(self.rest)))
        )


@dataclass
class Module:
    """A compiled program."""

    header: str = ""
    entry: str = ""
    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)

    @cached_property
    def aliased(self) -> set[int]:
        """Lists the donated parameters, whose memory a result takes over."""
        table = self.header.partition("input_output_alias={")[2]
        return {int(n) for n in re.findall(r"\}: \((\d+), \{", table)}

    @property
    def parameters(self) -> Mapping[int, Instruction]:
        entry = self.computations[self.entry].values()
        return {int(i.operands[0]): i for i in entry if i.opcode == "parameter"}

    def kernels(self) -> Iterator[tuple[Instruction, int]]:
        """Yields the kernels that the device runs, and how many times; each branch counts."""
        yield from self._walk(self.entry, 1)

    def _walk(self, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations[name].values():
            yield from self.kernels_in(instruction, times)

    def kernels_in(self, instruction: Instruction, times: int) -> Iterator[tuple[Instruction, int]]:
        """Yields the kernels of one instruction; for a loop, those of all its iterations."""
        if instruction.opcode == "while":
            yield from self._walk(instruction.called, times * self.trips(instruction))
        elif instruction.opcode == "conditional":
            for branch in instruction.branches:
                yield from self._walk(branch, times)
        elif instruction.opcode in ("call", "async-start") and instruction.called:
            yield from self._walk(instruction.called, times)
        elif instruction.opcode not in FREE:
            yield instruction, times

    def trips(self, loop: Instruction) -> int:
        """Returns a loop's trip count; if XLA writes none, its counter's end (the start is 0)."""
        if found := TRIPS.search(loop.rest):
            return int(found[1])
        scope = self.computations.get(loop.attribute("condition").removeprefix("%"), {})
        test = next((i for i in scope.values() if i.root and i.opcode == "compare"), None)
        ends = [scope[name] for name in test.operands] if test else []
        return next((int(end.operands[0]) for end in ends if end.opcode == "constant"), 1)

    def inner(self, instruction: Instruction) -> dict[str, Instruction]:
        """Lists the instructions in a fusion and its inner fusions; another instruction itself."""
        if instruction.opcode != "fusion":
            return {instruction.name: instruction}
        held = self.computations[instruction.called].values()
        return {name: found for each in held for name, found in self.inner(each).items()}

    def root_of(self, instruction: Instruction) -> Instruction:
        """Returns what makes a value: for a fusion's result the instruction inside of it."""
        scope, index = self.computations[instruction.computation], 0
        if instruction.opcode == "get-tuple-element":
            index = int(instruction.attribute("index"))
            instruction = scope[instruction.operands[0]]
        if instruction.opcode != "fusion":
            return instruction
        scope = self.computations[instruction.called]
        root = next(each for each in scope.values() if each.root)
        return scope[root.operands[index]] if root.opcode == "tuple" else root

    def users(self, instruction: Instruction) -> list[Instruction]:
        inside = self.computations[instruction.computation].values()
        return [other for other in inside if instruction.name in other.operands]


STARTS = {"copy-start": 0, "slice-start": -2}  # and which of its results is the copy
# XLA of jax 0.11 and later starts some fusions asynchronously, those that slice out of stacked
# layers for one. The start names the computation that runs, and is read as a fusion; what waits
# for it moves nothing.
ASYNC_FUSION = "fusion-start"
# They move nothing: names, views and marks.
FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "async-done", "async-update", "copy-done", "slice-done",
    "domain", "fusion-update", "fusion-done",
    "all-gather-done", "reduce-scatter-done", "all-reduce-done", "collective-permute-done",
}  # fmt: skip


def read(text: str) -> Module:
    """Parses the text of `compiled.as_text()`."""
    lines = text.splitlines()
    module = Module(header=lines[0])
    body: dict[str, Instruction] = {}
    name = ""
    for line in lines[1:]:
        if head := HEAD.match(line):
            name, body = head[1], {}
            module.computations[name] = body
            if line.startswith("ENTRY"):
                module.entry = name
        elif " = " in line and line.startswith("  "):
            instruction = _instruction(line, name)
            body[instruction.name] = instruction
    return module


def _instruction(line: str, computation: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    end = _closing(right, 0) if right.startswith("(") else right.index(" ")
    opcode = OPCODE.match(right, end)
    assert opcode, line
    close = _closing(right, opcode.end() - 1)
    inside = right[opcode.end() : close - 1]
    operands = (
        (inside,) if opcode[1] in ("parameter", "constant") else tuple(OPERAND.findall(inside))
    )
    shapes = tuple(_shape(*found) for found in PLACED.findall(right[:end]))
    kind = "fusion" if opcode[1] == ASYNC_FUSION else opcode[1]
    root, name = left.startswith("ROOT "), left.removeprefix("ROOT ").removeprefix("%")
    return Instruction(name, shapes, kind, operands, right[close:], computation, root)


def _shape(dtype: str, dims: str, layout: str) -> HloShape:
    """`layout`: has S(1) of what is in a TPU's vector memory."""
    return HloShape(dtype, tuple(int(n) for n in dims.split(",") if n), "S(1)" in layout)


def _closing(text: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for mark in re.finditer(r"[()]", text[start:]):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return start + mark.end()
    raise ValueError(f"no closing parenthesis in {text[:80]}")
