"""Each planted bug is seen in the program of its twin, and no semantics-preserving variant is."""

import re
from typing import Any, NamedTuple

import pytest

from lockstep.compile import rules, targets
from lockstep.compile.ask import Compiler
from lockstep.parity.catalogue import REWRITES
from parity_tests.cuda.cells import config

STRICT = {"numerics": "strict"}
BF16 = {"policy": "bf16", "n_layer": 1}
FLASH = {"policy": "tf32", "n_layer": 1, "context": 256}
CHUNKS = {"loss_chunks": "3"}
BLOCK = {"policy": "bf16", "remat": "block"}
FSDP = BF16 | {"mesh": "fsdp=2"}
FP8 = {"policy": "fp8", "n_layer": 3}
TWICE, LOST = r"recomputed: .* FLOPs|attention kernels", r"state buffers are not donated"

# They sum in float32 and leave the derivative to autodiff, whose cotangents are then float32: right
# to the last bit, and on CUDA the backward pass multiplies in float32; qkv-split the forward, too.
# plain-affine does so no more: in half precision on CUDA a bias is added in the compute dtype.
WIDENING = ("linear-by-einsum", "linear-in-halves", "qkv-split")


# Of bugs that hide no line of each other's, one program has all: each shows in its own line.
PLAIN = {
    "norms-in-half": r"rsqrt in bfloat16", "activations-in-compute": r"tanh in bfloat16",
    "loss-in-compute": r"log in bfloat16", "moments-narrowed": r"moments in bfloat16",
    "donation-lost": LOST, "cudnn-lost": r"wanted and possible, but not there",
}  # fmt: skip
IN_STRICT = {
    "softmax-in-compute": r"exp in bfloat16",
    "nondeterministic-strict": r"add in any order: .*atom",
}
ON_MESH = {
    "whole-weights-kept": r"backward: elements gathered: 0, not",
    "devices-summed-in-compute": r"sums over devices in bfloat16",
}


class Bug(NamedTuple):
    framework: str
    name: str
    flags: dict[str, Any]
    shows: str  # in a violation, as a regular expression
    device: str = "h100"
    planted: str = ""  # with others


# fmt: off
BUGS = [
    Bug("jax", "tf32-by-default", {"policy": "fp32", "n_layer": 1}, r"matmuls in tf32"),
    Bug("jax", "tf32-not-on", {"policy": "tf32", "n_layer": 1}, r"matmuls in float32"),
    Bug("jax", "head-in-float32", BF16, r"matmuls in float32"),
    Bug("jax", "attention-island-forgotten", BF16 | {"fp32_islands": "blocks.*.attn"},
        r"forward: .* FLOPs of matmuls in float32"),
    *(Bug("jax", name, flags, shows, planted=",".join(bugs))
      for flags, bugs in ((BF16, PLAIN), (BF16 | STRICT, IN_STRICT), (FSDP, ON_MESH))
      for name, shows in bugs.items()),
    *(Bug("jax", name, BF16, r"matmuls in float32") for name in WIDENING),
    Bug("torch", "qkv-split", BF16, r"matmuls in float32"),
    Bug("jax", "cudnn-lost", FLASH, r"attention in float32 is wanted and possible, but not there"),
    Bug("jax", "cudnn-unasked", BF16, r"cudnn attention needs", "t4"),
    Bug("jax", "cudnn-unasked", BF16 | STRICT, r"strict numerics run fused attention"),
    Bug("jax", "scores-kept", FLASH | {"policy": "fp32"}, r"recomputed: 0 FLOPs"),
    Bug("jax", "accumulator-narrowed", BF16 | {"accum": 2}, r"accumulators in bfloat16"),
    Bug("jax", "recomputed-twice", BF16 | BLOCK, TWICE),
    Bug("jax", "nothing-recomputed", BF16 | BLOCK, r"recomputed: 0 FLOPs"),
    Bug("jax", "dots-recomputes-affine", BF16 | {"remat": "dots"}, r"recomputed: .* FLOPs"),
    Bug("jax", "chunks-kept", BF16 | CHUNKS, r"recomputed: 0 FLOPs"),
    # From jax 0.12 on XLA counts what it gathers then as the forward pass's.
    Bug("jax", "weights-left-divided", FSDP, r"(forward|backward): elements gathered"),
    Bug("jax", "rows-left-to-xla", FSDP | {"vocab": 2**12}, r"elements (gathered|reduced)"),
    Bug("jax", "units-forgotten", FP8, r"0 FLOPs of matmuls in float8", "b200"),
    Bug("torch", "tf32-left-on", {"policy": "fp32"}, r"matmuls in tf32"),
    Bug("torch", "tf32-not-on", {"policy": "tf32"}, r"matmuls in float32"),
    Bug("torch", "autocast-off", {"policy": "bf16"}, r"matmuls in float32"),
    Bug("torch", "logits-in-float32", {"policy": "fp16"}, r"matmuls in float32"),
    Bug("torch", "island-under-autocast", BF16 | {"fp32_islands": "blocks.*.mlp"}, r"FLOPs"),
    Bug("torch", "softmax-in-half", BF16 | STRICT, r"softmax in bfloat16"),
    Bug("torch", "norms-in-half", BF16, r"norm in bfloat16"),
    Bug("torch", "loss-in-half", {"policy": "bf16"}, r"log_softmax in bfloat16"),
    Bug("torch", "sdpa-lost", {"policy": "fp16"}, r"wanted and possible, but not there"),
    Bug("torch", "sdpa-in-strict", BF16 | STRICT, r"strict numerics run fused attention"),
    Bug("torch", "fp16-without-scaling", {"policy": "fp16"}, r"the loss scale is off"),
    Bug("torch", "weights-moved", {"policy": "bf16"}, LOST),
    Bug("torch", "gradients-replaced", {"policy": "bf16", "accum": 2}, LOST),
    Bug("torch", "weights-narrowed", {"policy": "bf16"}, r"weights in bfloat16"),
    Bug("torch", "recomputed-twice", BLOCK, TWICE),
    Bug("torch", "remat-does-nothing", BLOCK, r"recomputed: 0 FLOPs"),
    Bug("torch", "sqrt-runs-block", {"policy": "bf16", "remat": "sqrt"}, r"recomputed: .* FLOPs"),
    Bug("torch", "chunks-kept", BF16 | CHUNKS, r"recomputed: 0 FLOPs"),
    Bug("torch", "whole-weights-kept", FSDP, r"backward: elements gathered: 0, not"),
    Bug("torch", "blocks-not-divided", FSDP, r"backward: elements gathered: 0, not"),
    Bug("torch", "reduced-every-time", FSDP | {"accum": 2}, r"elements reduced"),
    Bug("torch", "units-forgotten", FP8, r"0 FLOPs of matmuls in float8", "b200"),
    Bug("torch", "scatter-in-strict", BF16 | STRICT, r"add in any order: index_put"),
]
# fmt: on


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.framework}-{bug.name}-{bug.device}")
def test_a_bug_is_seen(bug: Bug, compilers: dict[str, Compiler]) -> None:
    cell = config(bug.flags)
    variant = bug.planted or bug.name
    program = compilers[bug.framework].program(cell, bug.device, variant=variant)
    found = rules.violations(program, cell, targets.find(bug.device))
    assert any(re.search(bug.shows, line) for line in found), found


VARIANTS = [
    pytest.param(framework, name, id=f"{framework}-{name}")
    for framework, names in REWRITES.items()
    for name in names
    if name not in WIDENING
]


@pytest.mark.parametrize(("framework", "name"), VARIANTS)
def test_a_variant_is_not_called_wrong(
    framework: str, name: str, compilers: dict[str, Compiler]
) -> None:
    rope, written_out = name.startswith("rotation"), "attention" in name or name == "additive-mask"
    flags = BF16 | ({"model": "tiny"} if rope else {}) | (STRICT if written_out else {})
    flags |= {"n_layer": 2} if name == "layers-swapped" else {}
    flags |= {"accum": 2} if name in ("window-unrolled", "micro-batches-backwards") else {}
    cell = config(flags)
    program = compilers[framework].program(cell, "h100", variant=name)
    assert rules.violations(program, cell, targets.find("h100")) == []
