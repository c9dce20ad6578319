"""The experiments: what their arms do, and that tables are made from the rows."""

from typing import Any

import pytest

from benchmarks import report
from benchmarks.experiments import EXPERIMENTS, RECORDED, sums, when_fp32, work
from benchmarks.experiments.frame import FRAMEWORKS, SCALES, Arm
from lockstep import results
from lockstep.process import ROOT

QUICK: dict[str, Any] = {
    "model": "tiny", "n_layer": 1, "n_head": 1, "d_model": 8, "context": 8, "batch_size": 2,
}  # fmt: skip


def arm(framework: str = "torch", **fields: Any) -> Arm:
    flags = {**QUICK, "policy": "fp32", **fields.pop("flags", {})}
    return Arm(label="fp32", framework=framework, flags=flags, **{"steps": 4, **fields})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_arm_is_run_in_both_frameworks(name: str, scale: str, device: str) -> None:
    arms = EXPERIMENTS[name].arms(scale, device)
    assert {each.work for each in arms} <= set(work.WORKS)
    for each in arms:
        if each.steps:
            assert each.config.run.device == each.device == device
            assert each.config.optim.steps == each.steps
    labels = [{a.label for a in arms if a.framework == framework} for framework in FRAMEWORKS]
    if name == "formats":  # PyTorch's fp32 is a yardstick; the ladder compares the other policies
        labels[0] = {label for label in labels[0] if label.endswith(": fp32")}
    assert labels[0] == labels[1] != set()


# --- what an arm does


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_injected_overflow_shows_backoff_and_moves_nothing(framework: str) -> None:
    calm = {"policy": "fp16", "loss_scale_init": 2.0**8}
    result = work.inject_overflow(arm(framework, flags=calm))
    assert (result["at"], result["skipped_steps"], result["unchanged"]) == (2, [2], True)
    assert result["loss_scales"] == [256, 256, 256, 128] and result["loss_scale"] == 128


def test_small_updates_are_lost_in_bf16_weights() -> None:
    flat = {"lr": 1e-6, "min_lr": 1e-6, "warmup": 0}
    wide, narrow = (
        work.updates(arm(flags={**flat, "policy": policy})) for policy in when_fp32.SPECS.values()
    )
    assert narrow["lost_share"] > 0.9 > 0.5 > wide["lost_share"]
    assert all(len(each["losses"]) == len(each["lost"]) == 4 for each in (wide, narrow))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_long_sums(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "LENGTHS", (10, 2_000))
    result = work.sums(arm(framework))
    narrow, wide = (result["errors"][kind] for kind in (sums.NARROW, sums.WIDE))
    assert narrow[1] > 0.5 and wide[1] < 1e-5  # 256 + 0.5 is 256 in bfloat16


# --- tables


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_committed_arm_ran(name: str) -> None:
    kind = f"{name} {RECORDED[name]}"
    rows = report.split(results.read(ROOT / "benchmarks" / "results" / "experiments.jsonl"))[kind]
    assert {each["status"] for each in rows.values()} == {"ok"}
    assert len(rows) == len(EXPERIMENTS[name].arms(RECORDED[name], "cpu"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_arm_that_could_not_run_is_a_line_with_its_reason(name: str) -> None:
    kind = f"{name} {RECORDED[name]}"
    rows = report.split(results.read(ROOT / "benchmarks" / "results" / "experiments.jsonl"))[kind]
    first, *rest = rows.values()
    text = EXPERIMENTS[name].table([{**first, "status": "OOM", "why": "too large"}, *rest])
    assert "| OOM: too large | " in text.splitlines()[2]
