"""The devices' facts, the matmuls of the model's definition, and a machine without the extra."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cells import PLAIN
from lockstep import devices, extras
from lockstep.compile import ask, expected, report, rules, targets
from lockstep.compile.program import AttentionCall, Buffer, Kernel, Matmul, Operation, Program
from lockstep.config import Config, from_flags
from lockstep.errors import UserError
from lockstep.model.segments import recomputed

H100, T4 = targets.find("h100"), targets.find("t4")


@pytest.mark.parametrize("name", devices.GPUS)
def test_a_target_is_the_device_of_the_data_sheet(name: str) -> None:
    target = targets.find(name)
    assert isinstance(target, targets.Gpu)
    assert target.capability == target.device.capability
    assert target.bandwidth == pytest.approx(target.device.bandwidth, rel=0.005)
    assert target.memory == pytest.approx(target.device.memory, rel=0.08)  # binary, less a reserve
    # Two operations a unit and cycle; the GPU Boost clock of the sheet.
    single = 2 * target.fpus * target.multiprocessors * target.clock * 1e9
    assert single == pytest.approx(target.device.single, rel=0.03)
    assert f"major: {target.capability[0]} minor: {target.capability[1]}" in target.text()


@pytest.mark.parametrize("name", devices.TPUS)
def test_a_tpu_multiplies_bfloat16(name: str) -> None:
    target = targets.find(name)
    assert target.bandwidth == target.device.bandwidth
    assert target.memory == pytest.approx(target.device.memory, rel=0.06)  # binary, less a reserve
    units = [target.units(d) for d in ("bfloat16", "float16", "float32")]
    assert units == ["bfloat16", "float32", "float32"]
    assert target.units("float32", tf32=True) == "bfloat16x3"
    assert target.rate("float32") == pytest.approx(target.device.single)


def test_names_are_found_without_their_hyphens() -> None:
    assert targets.find("RTX 4090") is not targets.find("rtx4090")
    assert targets.find("RTX 4090") == targets.find("rtx4090") == targets.find("rtx-4090")
    with pytest.raises(UserError, match="--device m2: unknown; use one of h100"):
        targets.find("m2")


def test_what_multiplies() -> None:
    assert [H100.units(d) for d in ("bfloat16", "float16", "float32")] == [
        "bfloat16", "float16", "float32"
    ]  # fmt: skip
    assert H100.units("float32", tf32=True) == "tf32"
    assert [T4.units(d, tf32=True) for d in ("bfloat16", "float16", "float32")] == [
        "float32", "float16", "float32"
    ]  # fmt: skip


def small(**flags: Any) -> Config:
    shape = dict(model="gpt2", n_layer=4, n_head=2, d_model=32, context=64, vocab=96)
    return from_flags(
        {**shape, **PLAIN, "batch_size": 2, "policy": "bf16", **flags}, accelerator=True
    )


@pytest.mark.parametrize("model", ["gpt2", "tiny"])
def test_the_definition_s_flops_are_those_of_the_papers(model: str) -> None:
    """6 P + 12 L D T a token, of the weights that multiply."""
    config = small(model=model)
    m = config.model
    weights = sum(a * b for a, b in expected.linears(m).values()) * m.n_layer + m.d_model * m.vocab
    tokens = config.optim.batch_size * m.context
    total = sum(expected.flops(config, H100, ()).values())
    assert total == (6 * weights + 12 * m.n_layer * m.d_model * m.context) * tokens


def test_what_each_remat_runs_again() -> None:
    """Two segments of two blocks: the first of each runs twice again, the last once."""
    again = {remat: [recomputed(remat, 4, i) for i in range(4)]
             for remat in ("none", "dots", "block", "sqrt")}  # fmt: skip
    assert again == {
        "none": [(0, 0, 0)] * 4, "dots": [(0, 1, 0)] * 4, "block": [(1, 1, 0)] * 4,
        "sqrt": [(2, 2, 1), (1, 1, 0)] * 2,
    }  # fmt: skip
    runs = expected.attention_runs(small(remat="sqrt", accum=2), {"bfloat16"})
    assert {phase: n for (_, phase), n in runs.items()} == {
        "forward": 8, "backward": 8, "recomputed": 12
    }  # fmt: skip


def right(config: Config, **changes: Any) -> Program:
    """A program by the definition."""
    runs = expected.attention_runs(config, {"bfloat16"})
    kernels = [AttentionCall("cudnn", *key, n, 10) for key, n in runs.items()]
    facts: dict[str, Any] = {
        "matmuls": expected.matmuls(config, H100, {"bfloat16"}), "attention": kernels,
        "operations": [Operation("exp", "float32", 1)],
        "state": [Buffer("w", "weights", "float32", 4, True)],
        "tensor_cores": {"bfloat16": 9}, "peak": 10**9, "parts": {"weights": 10**9},
        "attention_asked": "cudnn",
        "kernels": [Kernel("dot", "matmuls", 989 * 10**9, "bfloat16", 1, 2),
                    Kernel("add", "rest", 0, "", 335 * 10**7, 1)],
    }  # fmt: skip
    return Program(framework="jax", how="compiled for", versions={"jax": "0"}, seconds=1.0,
                   **{**facts, **changes})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "shows"),
    [
        ({}, None),
        ({"operations": [Operation("exp", "bfloat16", 2)]}, "exp in bfloat16, 2 times"),
        ({"state": [Buffer("m", "moments", "bfloat16", 4, True)]}, "moments in bfloat16"),
        ({"state": [Buffer("w", "weights", "float32", 4, False)]}, "not donated"),
        ({"attention": []}, "not there"),
        ({"tensor_cores": {"tf32": 1}}, "multiply tf32, not bfloat16"),
        ({"matmuls": [Matmul("float32", "float32", (1, 1, 1), "forward", 1)]}, "in float32"),
        ({"switches": {"loss scale": "True"}}, "the loss scale is on"),
    ],
)
def test_each_rule_fires(changes: dict[str, Any], shows: str | None) -> None:
    config = small(remat="block")
    found = rules.violations(right(config, **changes), config, H100)
    assert found == [] if shows is None else any(shows in line for line in found), found


def test_strict_numerics_have_no_atomics_and_no_fused_kernel() -> None:
    config = small(numerics="strict")
    found = rules.violations(right(config, atomics={"atom": 2}), config, H100)
    assert any("atom 2 times" in line for line in found)
    assert any("strict numerics run fused attention: cudnn" in line for line in found)


def test_report_and_json() -> None:
    """A kernel takes the longer of its bytes and its FLOPs: 2 ms, and 1 ms, on an H100."""
    config = small()
    program = right(config)
    assert report.roofline(program, H100) == pytest.approx({"matmuls": 2e-3, "rest": 1e-3})
    text = report.as_text(program, H100, ["mind"])
    assert "roofline 3 ms (matmuls 2, rest 1)" in text
    assert "compiled for h100" in text and "nothing was run" in text and "warning: mind" in text
    assert "measured" not in text and "peak 1.00 GB of 84.94 GB: weights 1.00 GB" in text
    facts = json.loads(json.dumps(report.as_json(program, H100, [])))
    assert facts["kernels"] == 2 and facts["bytes_moved"] == 335 * 10**7 + 2
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program


def test_warnings_of_a_t4() -> None:
    config = small()
    program = right(config, attention_asked="reference (no cuDNN attention for x)", peak=10**12)
    text = "\n".join(report.warnings(program, config, T4, []))
    for part in ("bf16 on a t4 multiplies in float32", "refuses this shape", "does not fit"):
        assert part in text


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ask.GPU_NEEDS, "jax", ("jax", "jax_plugins.none"))
    with pytest.raises(UserError, match=r"package jax_plugins.none; .*\[aot\]"):
        ask.Compiler("jax")


@pytest.mark.parametrize(
    ("framework", "says"),
    [("jax", r"needs the package libtpu; .*\[tpu-aot\]"), ("torch", "PyTorch has none; use jax")],
)
def test_a_tpu_needs_libtpu(framework: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: package != "libtpu")
    with pytest.raises(UserError, match=f"--framework {framework}: .*{says}"):
        ask.Compiler(framework, targets.Tpu)


def test_without_a_compiler_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch's traces need one, once for each version."""
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    compiler = ask.Compiler("torch")
    try:
        with pytest.raises(UserError, match="for h100: .*(/bin/false failed|CUDA build)") as said:
            compiler.program(small(), "h100")
        cache = tmp_path / "cache"  # where it would lie
        assert cache.is_dir() or "CUDA build" in str(said.value)
    finally:
        compiler.close()
