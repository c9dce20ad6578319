"""On CUDA both programs do what policy, remat and numerics say, and multiply the same matrices."""

from dataclasses import replace
from itertools import combinations, product

import jax
import pytest

from benchmarks.cells import PLAIN
from lockstep import results
from lockstep.compile import expected, report, rules, targets
from lockstep.compile.ask import Compiler
from lockstep.compile.program import Matmul, Program, gather_matmuls
from lockstep.config import from_flags
from lockstep.errors import UserError
from lockstep.parity.matrix import Row
from lockstep.process import ROOT
from parity_tests.cuda.cells import FACTORS, config, covering
from parity_tests.ladder.rows import label

CELLS = covering()


def test_the_cells_are_few_and_meet() -> None:
    """Every value of a factor with every one of each other factor."""
    assert 20 <= len(CELLS) <= 30
    for (a, values), (b, others) in combinations(FACTORS.items(), 2):
        assert {(cell[a], cell[b]) for cell in CELLS} == set(product(values, others)), (a, b)


@pytest.mark.parametrize("row", CELLS, ids=label)
def test_cell(row: Row, compilers: dict[str, Compiler]) -> None:
    cell, target = config(row), targets.find(row["device"])
    uneven = (row["numerics"], row["loss_chunks"]) == ("strict", "3")
    if jax.__version_info__ >= (0, 12) and uneven and cell.precision.roles.mixed:
        pytest.skip("XLA pads the 20 and 22 rows of chunks to 24 for cuBLAS: more FLOPs")
    programs = [each.program(cell, row["device"]) for each in compilers.values()]
    for program in programs:
        assert rules.violations(program, cell, target) == [], program.framework
        assert not program.collectives  # one device sends nothing
        if row["model"] == "gpt2":  # of tiny's, XLA makes one matmul of gate and up
            fused = {a.dtype for a in program.attention}
            assert sizes(program.matmuls) == sizes(expected.matmuls(cell, target, fused))
    if len({bool(program.attention) for program in programs}) == 1:
        assert all(flops(program) == flops(programs[0]) for program in programs)
        assert all(attention(program) == attention(programs[0]) for program in programs)


@pytest.mark.parametrize(
    "flags",
    [
        {"policy": "bf16", "fp32_islands": "blocks.0.attn,head", "device": "b200"},
        {"policy": "fp16", "remat": "block", "layers": "scan", "accum": 2, "device": "rtx-5090"},
        {"policy": "params=bfloat16,compute=bfloat16,output=float32"},
        {"policy": "fp64"},
        {"policy": "fp32", "remat": "block", "context": 256},
        {"policy": "tf32", "remat": "block", "context": 256},
        {"policy": "tf32", "model": "tiny", "n_kv_head": 1, "context": 64, "device": "a100-80"},
    ],
    ids=["islands", "scan", "spec", "fp64", "blocks", "flash", "flash-grouped"],
)
def test_other_settings(flags: Row, compilers: dict[str, Compiler]) -> None:
    """A loop recomputes the matmul that its last turn would not need; no other count may differ."""
    device = flags.get("device", "h100")
    cell, target = config(flags), targets.find(device)
    for compiler in compilers.values():
        assert rules.violations(compiler.program(cell, device), cell, target) == []


@pytest.mark.parametrize(
    ("policy", "device", "units"),
    [
        ("fp8", "b200", {"float8"}),
        ("fp8-delayed", "h100", {"float8"}),
        ("fp8-delayed", "a100-80", set()),
    ],
)
def test_a_narrow_format_has_units_of_its_own(
    policy: str, device: str, units: set[str], compilers: dict[str, Compiler],
) -> None:  # fmt: skip
    """In the middle layer; on devices before them it is emulated, and said to be."""
    cell = config({"policy": policy, "n_layer": 3, "numerics": "strict"})
    target = targets.find(device)
    for compiler in compilers.values():
        program = compiler.program(cell, device)
        assert rules.violations(program, cell, target) == []
        assert sizes(program.matmuls) == sizes(expected.matmuls(cell, target, ()))
        own = [m for m in program.matmuls if m.units == "float8"]
        assert {m.units for m in own} == units
        assert sum(m.times for m in own) == (4 * 3 if units else 0)
        said = any("emulated" in line for line in report.warnings(program, cell, target, []))
        assert said == (not units)


def test_float8_takes_rows_that_are_no_multiple_of_16(compilers: dict[str, Compiler]) -> None:
    cell = config({"policy": "fp8", "n_layer": 3, "batch_size": 3, "context": 20})
    for each in compilers.values():
        program = each.program(cell, "h100")
        assert sum(m.times for m in program.matmuls if m.units == "float8") == 4 * 3


def test_no_logits_live_while_blocks_are_recomputed(compilers: dict[str, Compiler]) -> None:
    """Left to itself, XLA keeps their gradient for the weight of an untied head until the end."""
    flags = {"model": "tiny", "remat": "sublayer", "layers": "scan", "policy": "bf16", "n_layer": 8,
             "d_model": 1024, "n_head": 8, "context": 2048, "batch_size": 47,
             "vocab": 8192}  # fmt: skip
    parts = compilers["jax"].program(config(flags), "h100").parts
    assert parts["activations"] > 10**10 and not parts["logits"]


def test_peak_of_traced_gpt2_is_what_an_h200_allocated(compilers: dict[str, Compiler]) -> None:
    """Allocator rounding and cuBLAS's workspace are the rest: 0.3 % when the run was recorded."""
    (row,) = (
        row
        for row in results.read(ROOT / "benchmarks/results/h200.jsonl").values()
        if row["cell"]["contender"] == "torch" and row["cell"]["flags"]["policy"] == "bf16"
    )
    cell = from_flags(PLAIN | row["cell"]["flags"], accelerator=True)
    peak = compilers["torch"].program(cell, "h200").peak
    assert peak == pytest.approx(row["peak_bytes"], rel=0.005)


def test_compiled_torch_step_is_refused(compilers: dict[str, Compiler]) -> None:
    with pytest.raises(UserError, match="--compile.*traced, not compiled.*--framework jax"):
        compilers["torch"].program(config({"policy": "bf16", "compile": True}), "h100")


def sizes(matmuls: list[Matmul]) -> list[Matmul]:
    """Gathers matmuls by all but `operands`: on a T4 XLA widens what torch leaves to the kernel."""
    return gather_matmuls(replace(m, operands="") for m in matmuls)


def flops(program: Program) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for m in program.matmuls:
        found[m.units, m.phase] = found.get((m.units, m.phase), 0) + m.flops
    return found


def attention(program: Program) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for a in program.attention:
        found[a.dtype, a.phase] = found.get((a.dtype, a.phase), 0) + a.times
    return found
