"""Finds products of a compiled program that are added to something before they are rounded."""

from collections.abc import Iterator

from lockstep.compile.hlo import Instruction, Module

HALF = {"bf16", "f16"}
CUBLAS = "__cublas"
SUMS = {"add", "subtract"}
# What a value goes through on its way to a sum; a conversion to half precision ends the way.
PASSING = {
    "bitcast", "reshape", "transpose", "copy", "slice", "convert", "multiply", "negate", "reduce",
    "get-tuple-element", "tuple", "pad", "concatenate", "dynamic-slice",
}  # fmt: skip


def find_sums(module: Module) -> list[str]:
    """Names the sums of products that were not rounded to half precision.

    A call of cuBLAS with beta has a sum. So has a product of half precision, kept in float32, that
    an addition reads. A bias may be added first: `torch.addmm` does that.
    """
    found = []
    for body in module.computations.values():
        for each in body.values():
            if each.attribute("custom_call_target").startswith(CUBLAS):
                found += [each.name] if float(each.attribute("beta") or 0) else []
            elif each.opcode == "dot" and _operand_dtypes(body, each) <= HALF:
                found += _follow(module, each, set())
    return sorted(set(found))


def _operand_dtypes(body: dict[str, Instruction], each: Instruction) -> set[str]:
    return {body[name].shapes[0].dtype for name in each.operands if name in body}


def _follow(module: Module, value: Instruction, seen: set[str]) -> Iterator[str]:
    """Yields the sums that read a value, or what passes it on, in any computation."""
    if value.name in seen or value.shapes[0].dtype in HALF:
        return
    seen.add(value.name)
    users = module.users(value)
    if value.root:  # of a fusion: whoever reads the fusion reads it
        users += [
            user
            for body in module.computations.values()
            for fusion in body.values()
            if fusion.opcode == "fusion" and fusion.called == value.computation
            for user in module.users(fusion)
        ]
    for user in users:
        if user.opcode == "fusion":
            yield from _follow_into(module, value, user, seen)
        elif user.opcode in SUMS and not _adds_bias(module, user):
            yield user.name
        elif user.opcode in PASSING or user.opcode in SUMS:
            yield from _follow(module, user, seen)


def _follow_into(
    module: Module, value: Instruction, fusion: Instruction, seen: set[str]
) -> Iterator[str]:
    """Goes on with the parameters of a fusion that are the value, or the fusion that it ends."""
    inside = module.computations[fusion.called].values()
    callers = {value.name} | {
        each.name
        for body in module.computations.values()
        for each in body.values()
        if value.root and each.opcode == "fusion" and each.called == value.computation
    }
    places = {str(at) for at, name in enumerate(fusion.operands) if name in callers}
    for each in inside:
        if each.opcode == "parameter" and each.operands[0] in places:
            yield from _follow(module, each, seen)


def _adds_bias(module: Module, addition: Instruction) -> bool:
    """Says if one of two addends is a vector, broadcast."""
    body = module.computations[addition.computation]
    return any(_is_vector(body, body[name]) for name in addition.operands if name in body)


def _is_vector(body: dict[str, Instruction], value: Instruction) -> bool:
    if value.opcode == "broadcast":
        source = body.get(value.operands[0])
        return source is not None and len(source.shapes[0].dims) <= 1
    if value.opcode in ("convert", "bitcast", "reshape", "copy") and value.operands[0] in body:
        return _is_vector(body, body[value.operands[0]])
    return False
