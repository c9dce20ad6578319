"""Each lint speaks where a program is no better than that of another setting, and only there."""

from typing import Any

import pytest

from benchmarks.cells import PLAIN
from lockstep.compile import lints, report, targets
from lockstep.compile.program import FORWARD, RECOMPUTED, Matmul, Program
from lockstep.config import Config, from_flags
from parity_tests.tiers import tier

pytestmark = tier("quick", guard="lockstep compile")

ONCE = Matmul("float32", "float32", (8, 8, 8), FORWARD, 1)
AGAIN = Matmul("float32", "float32", (8, 8, 8), RECOMPUTED, 1)
LOGITS = {"model": "gpt2", "batch_size": 8}  # of four chunks by auto


def make(peak: int, *matmuls: Matmul, framework: str = "jax", **parts: int) -> Program:
    how: dict[str, Any] = {"how": "", "versions": {}, "attention_asked": "", "seconds": 0.0}
    return Program(framework=framework, matmuls=list(matmuls), peak=peak, parts=parts, **how)


def find(flags: dict[str, Any], program: Program, other: Program | None = None) -> list[str]:
    """The lints of a program beside another one, which differs in a flag of execution alone."""
    config, asked = from_flags(PLAIN | flags, accelerator=True), []

    def ask(changed: Config) -> Program | None:
        assert changed.execution != config.execution
        assert lints.with_flags(changed, **vars(config.execution)) == config
        asked.append(changed)
        return other

    found = lints.find(program, config, ask)
    assert len(asked) <= 1
    return found


def test_remat_that_recomputes_nothing() -> None:
    kept = make(100, ONCE)
    (line,) = find({"remat": "block"}, make(50, ONCE), kept)
    assert line.startswith("--remat block recomputes nothing") and line.endswith("; drop it")
    assert find({"remat": "block"}, make(50, ONCE, AGAIN), kept) == []


@pytest.mark.parametrize(("peak", "said"), [(98, False), (100, True), (110, True)])
def test_remat_that_lowers_no_peak(peak: int, *, said: bool) -> None:
    found = find({"remat": "dots"}, make(peak * 10**9, ONCE, AGAIN), make(10**11, ONCE))
    line = f"--remat dots does not lower the peak: {peak}.00 GB, and 100.00 GB with --remat none"
    assert found == [f"{line}; drop it"] * said


@pytest.mark.parametrize(("peak", "said"), [(98, True), (100, False), (110, False)])
def test_a_loop_that_keeps_more(peak: int, *, said: bool) -> None:
    found = find({"layers": "scan"}, make(10**11), make(peak * 10**9))
    line = "--layers scan keeps more than unrolled layers: 100.00 GB, and 98.00 GB unrolled"
    assert found == [f"{line}; use --layers unroll"] * said


def test_layers_that_are_not_told_to_be_a_loop_are_not_held_against_unrolled_ones() -> None:
    assert find({}, make(100), make(1)) == []
    assert find({"layers": "scan"}, make(100, framework="torch"), make(1)) == []


def test_logits_that_chunks_would_cut() -> None:
    program = make(10**11, logits=60 * 10**9, weights=40 * 10**9)
    (line,) = find(LOGITS, program, make(55 * 10**9))
    chunked = "--loss-chunks 4 lowers it from 100.00 GB to 55.00 GB"
    assert line == f"logits are 60.00 GB of the peak: {chunked}, for one more matmul of the head"
    assert find(LOGITS, program, make(10**11)) == []  # something else is as large then
    assert find(LOGITS | {"loss_chunks": "auto"}, program, make(1)) == []
    assert find({"model": "tiny"}, program, make(1)) == []  # one chunk by auto
    assert find(LOGITS | {"mesh": "fsdp=2"}, program, make(1)) == []  # which has no chunks


def test_logits_that_are_not_the_largest_part() -> None:
    assert find(LOGITS, make(10**11, logits=40, weights=60), make(1)) == []


def test_no_lint_where_the_other_program_does_not_fit() -> None:
    assert find({"remat": "block"}, make(100, ONCE)) == []
    assert find({"layers": "scan"}, make(100)) == []
    assert find(LOGITS, make(100, logits=100)) == []


@pytest.mark.parametrize(("count", "said"), [(8_192, False), (8_193, True)])
def test_registers_that_spill(count: int, *, said: bool) -> None:
    program, target = make(100), targets.find("h200")
    program.spills["mha_backward"] = count
    found = report.warnings(program, from_flags({}, accelerator=True), target, [])
    assert [line.startswith("mha_backward spills 8,193 bytes") for line in found] == [True] * said


@pytest.mark.parametrize(
    ("flags", "device", "facts", "said"),
    [
        ({"policy": "bf16"}, "h200", {}, True),
        ({"policy": "tf32"}, "h200", {}, True),
        ({"model": "gpt2", "policy": "bf16"}, "h200", {}, False),  # it takes nothing else, here too
        ({"policy": "bf16"}, "t4", {}, False),  # cuBLAS's here too: they are counted twice
        ({"policy": "fp32"}, "h200", {}, False),
        ({"policy": "bf16", "numerics": "strict"}, "h200", {}, False),
        ({"policy": "bf16"}, "h200", {"logits": 10**7}, False),  # little of the peak
        ({"policy": "bf16"}, "h200", {"framework": "torch"}, False),
    ],
)
def test_logits_that_cublas_keeps(
    flags: dict[str, str], device: str, facts: dict[str, Any], *, said: bool
) -> None:
    config = from_flags(PLAIN | flags, accelerator=True)
    program = make(10**9, **{"logits": 5 * 10**8, **facts})
    found = report.warnings(program, config, targets.find(device), [])
    text = "on the device XLA may take cuBLAS for the head: 1.50 GB, logits twice"
    assert [line for line in found if "cuBLAS" in line] == [text] * said
