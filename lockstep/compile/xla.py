"""The facts of a step that XLA compiled, from its text and XLA's dumped files."""

import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

from lockstep.compile.convolution import conv_size
from lockstep.compile.hlo import NAMES, Instruction, Module
from lockstep.compile.program import (
    BACKWARD,
    FORWARD,
    RECOMPUTED,
    AttentionCall,
    Buffer,
    Matmul,
    Operation,
    attention_flops,
    gather_matmuls,
    matmul_size,
)
from lockstep.compile.targets import Target, Tpu

# Their dtype decides accuracy: softmax, norms, activations, the loss.
PRECISE = {
    "exponential": "exp", "log": "log", "tanh": "tanh", "rsqrt": "rsqrt", "sqrt": "sqrt",
    "logistic": "logistic", "power": "power", "exponential-minus-one": "exp", "reduce": "sum",
    "log-plus-one": "log", "erf": "erf",
}  # fmt: skip
TENSOR_CORE = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync)\S*?\.(tf32|bf16|f16|f64)\b")
ATOMIC = re.compile(r"^\s*(?:@!?\S+\s+)?((?:atom|red)\.\S+)", re.M)
PADDED = 8  # rows and columns, of which cuBLAS gets a multiple in half precision
# By the precision that a matmul asks for; the default is one product of operands that are rounded.
TPU_FLOAT32 = {"highest": "float32", "high": "bfloat16x3", "default": "bfloat16", "": "bfloat16"}
STATE = (("params", "weights"), ("mu", "moments"), ("nu", "moments"), ("acc_grads", "accumulators"))


def phase(op_name: str) -> str:
    """Finds an operation's phase by the transformations in its JAX name; "" without a name."""
    if "rematted_computation" in op_name:
        return RECOMPUTED
    return BACKWARD if "transpose(" in op_name else FORWARD if op_name else ""


def _phase(module: Module, kernel: Instruction, inner: Instruction) -> str:
    """Finds an instruction's phase; if XLA created it, the phase of its users.

    What feeds it says nothing: a weight's gradient is made of an activation.
    """
    for name in (inner.op_name, kernel.op_name):
        if name:
            return phase(name)
    fed, seen = [kernel], {kernel.name}
    while fed:
        for user in module.users(fed.pop(0)):
            if user.op_name:
                return phase(user.op_name)
            if user.name not in seen:
                seen.add(user.name)
                fed.append(user)
    return BACKWARD  # a gradient that leaves a loop


def phase_of_kernel(module: Module, kernel: Instruction) -> str:
    return _phase(module, kernel, kernel)


# --- matmuls and attention


def matmuls(module: Module, target: Target) -> Iterator[Matmul]:
    for kernel, times in module.kernels():
        for inner in module.inner(kernel).values():
            if size := dot_size(module, inner):
                dtype, units = multiplied(module, target, inner)
                yield Matmul(units, dtype, size, _phase(module, kernel, inner), times)


def multiplied(module: Module, target: Target, dot: Instruction) -> tuple[str, str]:
    """Returns the dtype of a matmul's operands in memory, and the units."""
    operand = module.computations[dot.computation][dot.operands[0]].shapes[0].dtype
    dtype = NAMES.get(operand, operand)
    if isinstance(target, Tpu) and dtype == "float32":
        return dtype, TPU_FLOAT32[dot.attribute("operand_precision").strip("{}").partition(",")[0]]
    return dtype, target.units(dtype, tf32=allows_tf32(dot))


def dot_size(module: Module, dot: Instruction) -> tuple[int, int, int] | None:
    """Returns (m, n, k) of a matmul; None for any other instruction."""
    if dot.opcode == "convolution":
        m, n, k = conv_size(module, dot)
        return matmul_size(m, n, k)
    library = dot.attribute("custom_call_target")
    if dot.opcode != "dot" and "cublas" not in library:
        return None
    scope = module.computations[dot.computation]
    left, right = (unpadded(module, scope[name]) for name in dot.operands[:2])
    dims = "dims" if dot.opcode == "dot" else "dimensions"
    contracted, batched = (dot.numbers(f"lhs_{axes}_{dims}") for axes in ("contracting", "batch"))
    k, batch = (prod(left[axis] for axis in axes) for axes in (contracted, batched))
    m, n = prod(left) // (k * batch), prod(right) // (k * batch)
    return matmul_size(m, n, k, batch)


def unpadded(module: Module, operand: Instruction) -> tuple[int, ...]:
    """Returns an operand's dims without the zeros that XLA adds behind it for cuBLAS.

    In half precision it pads each side to a multiple of 8.
    """
    dims, made = operand.shapes[0].dims, module.root_of(operand)
    if made.opcode != "pad":
        return dims
    inner = module.computations[made.computation][made.operands[0]].shapes[0].dims
    behind = all(each.startswith("0_") for each in made.attribute("padding").split("x"))
    own = len(inner) == len(dims) and dims == tuple(n + -n % PADDED for n in inner)
    return inner if behind and own else dims


def allows_tf32(dot: Instruction) -> bool:
    """Reads from a dot's algorithm, or else its precision, whether it may use TF32.

    The default may; "high" may not in XLA's own kernels.
    """
    algorithm = dot.attribute("algorithm").lower()
    if "dot_" in algorithm:
        return "tf32" in algorithm
    return "high" not in dot.attribute("operand_precision").lower()


def attention(module: Module, target: Target, tf32: bool) -> Iterator[AttentionCall]:
    """Lists the calls of fused attention kernels."""
    for kernel, times in module.kernels():
        if name := fused_attention(kernel):
            when = BACKWARD if gives_gradients(kernel) else phase_of_kernel(module, kernel)
            flops = fused_flops(module, kernel) * times
            dtype = kernel.shapes[0].dtype
            dtype = NAMES.get(dtype, dtype)
            yield AttentionCall(name, dtype, when, times, flops, target.units(dtype, tf32))


def fused_attention(kernel: Instruction) -> str:
    """Returns the library of a fused attention kernel, cudnn or triton; "" for anything else."""
    target = kernel.attribute("custom_call_target")
    if "fmha" in target:
        return "cudnn"
    # One that prepares the backward pass has one result.
    return "triton" if target.endswith("triton") and len(kernel.shapes) > 1 else ""


def gives_gradients(kernel: Instruction) -> bool:
    """Says if a fused kernel is a backward one: its results have the shape of queries.

    A forward kernel's second result is statistics.
    """
    first, second = kernel.shapes[:2]
    return first.elements == second.elements


def fused_flops(module: Module, kernel: Instruction) -> int:
    """Counts the FLOPs of a fused attention kernel."""
    b, h, t, d = attention_shape(module, kernel)
    return attention_flops(b, h, t, t, d, BACKWARD if gives_gradients(kernel) else FORWARD)


def attention_shape(module: Module, kernel: Instruction) -> tuple[int, ...]:
    """Reads batch, heads, length and head width of a fused attention kernel.

    Forward results are (B, H, T, K) and statistics (B, H, T); backward the statistics are an
    operand.
    """
    scope = module.computations[kernel.computation]
    wide = kernel.shapes[0].dims
    shapes = [*kernel.shapes, *(s for o in kernel.operands for s in scope[o].shapes)]
    b, h, t = next(s.dims for s in shapes if s.dtype == "f32" and len(s.dims) == 3)
    return b, h, t, prod(wide) // (b * h * t)


def operations(asked: Module) -> list[Operation]:
    """Lists operations of JAX's own program, before XLA widens and narrows."""
    found: Counter[tuple[str, str]] = Counter()
    for instruction, times in asked.kernels():
        name = PRECISE.get(instruction.opcode)
        dtype = NAMES.get(instruction.shapes[0].dtype) if instruction.shapes else None
        if name and dtype:
            found[name, dtype] += times
    return [Operation(name, dtype, n) for (name, dtype), n in sorted(found.items())]


# --- state and memory


def state(module: Module) -> dict[int, Buffer]:
    """Lists the state's tensors, which the step takes and returns, by parameter number."""
    found = {}
    for number, parameter in sorted(module.parameters.items()):
        name = parameter.op_name.replace("\\'", "'")
        if name.startswith("state"):
            shape = parameter.shapes[0]
            dtype = NAMES.get(shape.dtype, shape.dtype)
            parts = (part for field, part in STATE if re.search(rf"\.{field}\b", name))
            part = next(parts, "counters")
            found[number] = Buffer(name, part, dtype, shape.bytes, number in module.aliased)
    return found


def atomics(ptx: str) -> dict[str, int]:
    """Counts atomic additions in XLA's own kernels; libraries' kernels are not visible."""
    return dict(Counter(name.rstrip(";") for name in ATOMIC.findall(ptx)))


def tensor_cores(ptx: str) -> dict[str, int]:
    """Counts matrix instructions by the dtype of their operands."""
    names = {**NAMES, "tf32": "tf32"}
    return dict(Counter(names[dtype] for dtype in TENSOR_CORE.findall(ptx)))


def switches(module: Module) -> dict[str, str]:
    """Counts the matmuls that XLA leaves to cuBLAS."""
    targets = [kernel.attribute("custom_call_target") for kernel, _ in module.kernels()]
    count = sum("cublas" in target for target in targets)
    return {"matmuls by a library": str(count)} if count else {}


def facts(
    module: Module, asked: Module, ptx: str, target: Target, tf32: bool = False
) -> dict[str, Any]:
    """Reads the fields of `Program` from XLA's text; a fused kernel's does not say `tf32`."""
    return {
        "matmuls": gather_matmuls(matmuls(module, target)),
        "attention": [*attention(module, target, tf32)],
        "operations": operations(asked), "state": [*state(module).values()],
        "atomics": atomics(ptx), "tensor_cores": tensor_cores(ptx),
        "switches": switches(module),
    }  # fmt: skip
