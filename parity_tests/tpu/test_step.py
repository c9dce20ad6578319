"""On a TPU our JAX step does what policy, remat and numerics say; planted bugs are seen in it."""

import re
from typing import Any, NamedTuple

import pytest

from lockstep import devices
from lockstep.compile import expected, rules, targets
from lockstep.compile.ask import Compiler
from lockstep.compile.program import gather_matmuls
from lockstep.errors import UserError
from lockstep.parity.matrix import Row
from parity_tests.cuda.cells import FACTORS, config, covering
from parity_tests.ladder.rows import label

CELLS = covering(FACTORS | {"device": devices.TPUS})
BF16 = {"policy": "bf16", "n_layer": 1}
STRICT = {"numerics": "strict"}


@pytest.mark.parametrize("row", CELLS, ids=label)
def test_cell(row: Row, compiler: Compiler) -> None:
    cell, target = config(row), targets.find(row["device"])
    program = compiler.program(cell, row["device"])
    assert rules.violations(program, cell, target) == []
    assert not program.attention and not program.atomics
    if row["model"] == "gpt2":  # of tiny's, XLA makes one matmul of gate and up
        wanted = gather_matmuls(expected.matmuls(cell, target, ()))
        assert [(m.units, m.size, m.phase, m.times) for m in program.matmuls] == [
            (m.units, m.size, m.phase, m.times) for m in wanted
        ]


@pytest.mark.parametrize(
    "flags",
    [
        {"policy": "bf16", "fp32_islands": "blocks.0.attn,head"},
        {"policy": "bf16", "remat": "block", "layers": "scan", "accum": 2},
        {"policy": "fp32", "remat": "block", "context": 256},
        {"policy": "fp8", "n_layer": 3},
        {"model": "tiny", "policy": "tf32", "n_kv_head": 1},
    ],
    ids=["islands", "scan", "blocks", "fp8", "grouped"],
)
def test_other_settings(flags: Row, compiler: Compiler) -> None:
    cell = config(flags)
    found = rules.violations(compiler.program(cell, "tpu-v5e"), cell, targets.find("tpu-v5e"))
    assert found == []


def test_memory_is_the_state_and_what_a_step_needs_beside_it(compiler: Compiler) -> None:
    """It is too large for the vector memory, where all of a toy's activations stay."""
    flags = {"n_layer": 3, "d_model": 1024, "context": 64, "batch_size": 32, "policy": "bf16"}
    kept, again = (compiler.program(config(flags | {"remat": remat}), "tpu-v5e")
                   for remat in ("none", "block"))  # fmt: skip
    for program in (kept, again):
        assert sum(program.parts.values()) == program.peak
        assert program.parts["moments"] == 2 * program.parts["weights"] > 0
    assert again.parts["workspace"] < 0.75 * kept.parts["workspace"]


def test_what_does_not_fit_is_one_line(compiler: Compiler) -> None:
    large = {"batch_size": 64, "context": 1024, "vocab": 2**17, "n_layer": 1, "d_model": 512}
    with pytest.raises(UserError, match=r"jax for tpu-v5e: .*needs \S+ GiB .*has 15.75; use "):
        compiler.program(config(large | {"policy": "fp32"}), "tpu-v5e")


class Bug(NamedTuple):
    name: str
    flags: dict[str, Any]
    shows: str  # in a violation, as a regular expression
    planted: str = ""  # with others


# They hide no line of each other's: one program has all, and each shows in its own line.
TOGETHER = {
    "norms-in-half": r"rsqrt in bfloat16", "activations-in-compute": r"tanh in bfloat16",
    "loss-in-compute": r"log in bfloat16", "moments-narrowed": r"moments in bfloat16",
    "donation-lost": r"state buffers are not donated",
}  # fmt: skip
BUGS = [
    Bug("tf32-by-default", {"policy": "fp32", "n_layer": 1}, r"matmuls in bfloat16, not"),
    Bug("head-in-float32", BF16, r"matmuls in float32"),
    Bug("attention-island-forgotten", BF16 | {"fp32_islands": "blocks.*.attn"},
        r"forward: .* FLOPs of matmuls in float32"),
    Bug("softmax-in-compute", BF16 | STRICT, r"exp in bfloat16"),
    *(Bug(name, BF16, shows, ",".join(TOGETHER)) for name, shows in TOGETHER.items()),
    Bug("scores-kept", {"policy": "fp32", "n_layer": 1, "context": 256}, r"recomputed: 0 FLOPs"),
    Bug("accumulator-narrowed", BF16 | {"accum": 2}, r"accumulators in bfloat16"),
    Bug("recomputed-twice", BF16 | {"remat": "block"}, r"recomputed: .* FLOPs"),
    Bug("nothing-recomputed", BF16 | {"remat": "block"}, r"recomputed: 0 FLOPs"),
    Bug("chunks-kept", BF16 | {"loss_chunks": "3"}, r"recomputed: 0 FLOPs"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_seen(bug: Bug, compiler: Compiler) -> None:
    cell = config(bug.flags)
    program = compiler.program(cell, "tpu-v5e", variant=bug.planted or bug.name)
    found = rules.violations(program, cell, targets.find("tpu-v5e"))
    assert any(re.search(bug.shows, line) for line in found), found


@pytest.mark.parametrize("name", ["attention-by-vmap", "norms-by-division", "plain-affine"])
def test_a_variant_is_not_called_wrong(name: str, compiler: Compiler) -> None:
    """Wide sums are not wide products: XLA folds the casts in; for CUDA it does not."""
    cell = config(BF16 | STRICT)
    program = compiler.program(cell, "tpu-v5e", variant=name)
    assert rules.violations(program, cell, targets.find("tpu-v5e")) == []
