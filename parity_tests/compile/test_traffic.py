"""Bytes are those that a kernel needs."""

import pytest

from lockstep.compile import hlo, report, targets, traffic
from lockstep.compile.program import GROUPS, Kernel, Program
from parity_tests.compile.test_hlo import TEXT

H100 = targets.find("h100")

# A loss that picks a logit of each row, a cast, a transpose, a norm and what nobody made.
STEP = """\
HloModule jit_step, is_scheduled=true

%pick (p.0: bf16[8,64], p.1: s32[8,2]) -> f32[8,1] {
  %p.0 = bf16[8,64]{1,0} parameter(0)
  %p.1 = s32[8,2]{1,0} parameter(1)
  %wide = f32[8,64]{1,0} convert(%p.0)
  ROOT %chosen = f32[8,1]{1,0} gather(%wide, %p.1), metadata={op_name="jit(f)/jvp()/gather"}
}

%whole (p.2: bf16[8,64]) -> f32[8] {
  %p.2 = bf16[8,64]{1,0} parameter(0)
  %wide.2 = f32[8,64]{1,0} convert(%p.2)
  %zero = f32[] constant(0)
  ROOT %sum = f32[8]{0} reduce(%wide.2, %zero), dimensions={1}, to_apply=%add
}

%narrow (p.3: f32[8,64]) -> bf16[64,8] {
  %p.3 = f32[8,64]{1,0} parameter(0)
  %turned = f32[64,8]{1,0} transpose(%p.3), dimensions={1,0}
  ROOT %half = bf16[64,8]{1,0} convert(%turned)
}

%added (p.4: f32[512,64], p.5: s32[8,1], p.6: f32[8,64]) -> f32[512,64] {
  %p.4 = f32[512,64]{1,0} parameter(0)
  %p.5 = s32[8,1]{1,0} parameter(1)
  %p.6 = f32[8,64]{1,0} parameter(2)
  ROOT %rows = f32[512,64]{1,0} scatter(%p.4, %p.5, %p.6), to_apply=%add
}

ENTRY %main (logits: bf16[8,64], places: s32[8,2], x: f32[8,64]) -> f32[8,1] {
  %logits = bf16[8,64]{1,0} parameter(0)
  %places = s32[8,2]{1,0} parameter(1)
  %x = f32[8,64]{1,0} parameter(2)
  %casted = bf16[64,8]{1,0} fusion(%x), kind=kLoop, calls=%narrow, metadata={op_name="jit(f)/cast"}
  %turned.2 = f32[64,8]{1,0} transpose(%x), dimensions={1,0}
  %means = f32[8]{0} fusion(%logits), kind=kInput, calls=%whole, metadata={op_name="jit(f)/jvp()/mean"}
  %means.2 = f32[8]{0} fusion(%logits), kind=kInput, calls=%whole, metadata={op_name="jit(f)/jvp()/mean"}
  %nobody = f32[8]{0} fusion(%logits), kind=kInput, calls=%whole
  ROOT %loss = f32[8,1]{1,0} fusion(%logits, %places), kind=kLoop, calls=%pick
}
"""  # noqa: E501


def test_bytes_of_slices_and_updates_in_place() -> None:
    module = hlo.read(TEXT)
    moved = {k.name: traffic.moved(module, k) for k, _ in module.kernels()}
    assert moved == {
        "y": 2 * 8 * 4 + 2 * 4 * 16 + 4 * 8 * 16,
        "row": 2 * 16,
        "mm": 2 * 4 * 256 + 4 * 64 * 64 + 1024,
        "new": 16 + 16,  # the row is read, and written into its place
    }


def test_a_scatter_adds_in_place() -> None:
    """Eight of 512 rows are read and written, and what is added is read; so are all indices."""
    scatter = "%added_rows = f32[512,64]{1,0} fusion(%w, %places, %x), kind=kInput, calls=%added"
    module = hlo.read(STEP.replace("  ROOT %loss", f"  {scatter}\n  ROOT %loss"))
    moved = {k.name: traffic.moved(module, k) for k, _ in module.kernels()}
    assert moved["added_rows"] == 3 * 8 * 64 * 4 + 8 * 4


def test_a_fusion_reads_what_is_asked_of_it() -> None:
    """Eight of 512 logits, though they are widened before one of each row is chosen."""
    module = hlo.read(STEP)
    moved = {k.name: traffic.moved(module, k) for k, _ in module.kernels()}
    assert moved["loss"] == 8 * 2 + 16 * 4 + 8 * 4
    assert moved["means"] == 8 * 64 * 2 + 8 * 4


@pytest.mark.parametrize(
    ("old", "new"), [("gather(%wide, %p.1)", "gather(%p.1, %wide)"), (", %p.1)", ", %wide)")]
)
def test_what_else_needs_all_of_it_reads_all(old: str, new: str) -> None:
    assert old in STEP
    module = hlo.read(STEP.replace(old, new))
    (kernel,) = (k for k, _ in module.kernels() if k.name == "loss")
    assert traffic.moved(module, kernel) >= 8 * 64 * 2


def test_groups_are_what_multiplies_and_the_rest() -> None:
    found = {k.name: k.group for k in traffic.kernels(hlo.read(STEP), H100)}
    assert found == dict.fromkeys(("cast", "turned", "jvp()/mean", "nobody", "loss"), "rest")
    assert [k.group for k in traffic.kernels(hlo.read(TEXT), H100)] == [
        "matmuls", "rest", "matmuls", "rest"
    ]  # fmt: skip


def test_the_report_adds_up_and_merges_layers() -> None:
    module = hlo.read(STEP)
    kernels = list(traffic.kernels(module, H100))
    program = Program(framework="jax", how="compiled for", versions={}, seconds=1.0,
                      attention_asked="", kernels=kernels)  # fmt: skip
    groups = program.moved_by_group()
    assert tuple(groups) == GROUPS and sum(groups.values()) == program.moved == groups["rest"]
    assert program.largest(1) == [Kernel("turned", "rest", 0, "", 2 * 8 * 64 * 4, 1)]
    (mean,) = (k for k in program.largest(9) if "mean" in k.name)
    assert mean.times == 2
    text = report.as_text(program, H100, [])
    assert "attention 0.00 MB" in text and "rest: turned" in text
    facts = report.as_json(program, H100, [])
    assert facts["bytes_by_group"] == groups and len(facts["largest"]) == 5


def test_asynchronous_fusion_counts_as_a_fusion_that_runs_once() -> None:
    """A start has its operands, its results and a token for shapes; -done has the results."""
    plain = "%casted = bf16[64,8]{1,0} fusion(%x), kind=kLoop, calls=%narrow"
    tuples = "((f32[8,64]{1,0}), bf16[64,8]{1,0}, u32[])"
    lines = [
        f"%casted-start = {tuples} fusion-start(%x), kind=kLoop, calls=%narrow",
        f"%casted-update = {tuples} fusion-update(%casted-start)",
        "%casted = bf16[64,8]{1,0} fusion-done(%casted-update)",
    ]
    text = STEP.replace(plain, "\n  ".join(lines))
    assert text != STEP

    def count(text: str) -> list[tuple[int, int]]:
        return [(k.bytes, k.times) for k in traffic.kernels(hlo.read(text), H100)]

    assert count(text.replace("metadata", "other")) == count(STEP.replace("metadata", "other"))
