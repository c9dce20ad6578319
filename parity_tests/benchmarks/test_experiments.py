"""The experiments: what they run, and that what they say follows from the figures."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import plot
from benchmarks import run as command
from benchmarks.experiments import (
    accumulation,
    expected,
    formats,
    overflow,
    policies,
    remat,
    run,
    sums,
    when_fp32,
    work,
)
from benchmarks.experiments.arm import FRAMEWORKS, Arm, both
from benchmarks.experiments.outcome import Arms
from benchmarks.experiments.run import EXPERIMENTS, SCALES
from benchmarks.measure import Result
from lockstep import results
from lockstep.model import params
from lockstep.process import ROOT
from parity_tests.tiers import tier

QUICK: dict[str, Any] = {
    "model": "tiny", "n_layer": 1, "n_head": 1, "d_model": 8, "context": 8, "batch_size": 2,
}  # fmt: skip


def arm(framework: str = "torch", label: str = "fp32", **fields: Any) -> Arm:
    flags = {**QUICK, "policy": "fp32", **fields.pop("flags", {})}
    return Arm(label=label, framework=framework, flags=flags, **{"steps": 4, **fields})


# --- arms


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_arm_is_run_in_both_frameworks(name: str, scale: str, device: str) -> None:
    arms = EXPERIMENTS[name].arms(scale, device)
    assert {each.work for each in arms} <= set(work.WORKS)
    assert len({each.name for each in arms}) == len(arms)
    for each in arms:
        if each.steps:
            assert each.config.run.device == each.device == device
            assert each.config.optim.steps == each.cell.total == each.steps
    labels = [{a.label for a in arms if a.framework == framework} for framework in FRAMEWORKS]
    if name == "formats":  # PyTorch's fp32 is a yardstick; the ladder compares the other policies
        labels[0] = {label for label in labels[0] if label.endswith(": fp32")}
    assert labels[0] == labels[1] != set()


def test_full_is_the_auto_model_of_the_device() -> None:
    for device, model in (("cpu", "tiny"), ("cuda", "10m")):
        for each in policies.arms("full", device):
            assert (each.config.model.model, each.steps) == (model, 1_000)


def test_accumulation_has_one_effective_batch_and_equal_tokens() -> None:
    for scale in SCALES:
        arms = accumulation.arms(scale, "cpu")
        rows = {each.steps * each.config.optim.accum * each.config.optim.batch_size
                for each in arms}  # fmt: skip
        assert len(rows) == 1
        split = [each for each in arms if each.label != accumulation.DIRECT]
        assert {e.config.optim.accum * e.config.optim.batch_size for e in split} == {128}


# --- what an arm does


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_train(framework: str) -> None:
    result = work.train(arm(framework, flags={"policy": "fp16", "loss_scale_init": 2.0**24}))
    assert len(result["losses"]) == len(result["loss_scales"]) == 4
    assert result["skipped_steps"] == list(range(result["skipped"])) != []
    assert result["loss_scales"][1] == 2.0**23
    assert result["validation_loss"] == pytest.approx(math.log(256), abs=0.3)  # hardly trained
    assert result["tokens_per_step"] == 16
    assert result["state_bytes"] == 12 * params.count(arm(framework).config.model)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_injected_overflow_shows_backoff_and_moves_nothing(framework: str) -> None:
    calm = {"policy": "fp16", "loss_scale_init": 2.0**8}
    result = work.WORKS["injected"](arm(framework, work="injected", flags=calm))
    assert (result["at"], result["skipped_steps"], result["unchanged"]) == (2, [2], True)
    assert result["loss_scales"] == [256, 256, 256, 128] and result["loss_scale"] == 128


@tier("full", guard="torch", where=lambda framework: framework == "jax")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_flushed_gradients(framework: str) -> None:
    flags = {"policy": "fp16", "batch_size": 64, "context": 32}  # the mean of many: small gradients
    result = work.WORKS["flushed"](arm(framework, work="flushed", flags=flags))
    for of in result["weights"].values():
        assert math.frexp(of["scale"])[0] == 0.5
        for lost in (of["parameters"], of["activations"]):
            assert lost["fp16, no scale"] > lost["fp16, scaled"]
            assert lost["bf16"] < 0.01


@tier("full", guard="torch", where=lambda framework: framework == "jax")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_small_updates_are_lost_in_bf16_weights(framework: str) -> None:
    flat = {"lr": 1e-6, "min_lr": 1e-6, "warmup": 0}
    lost = {
        label: work.WORKS["updates"](arm(framework, flags={**flat, "policy": policy}))
        for label, policy in when_fp32.SPECS.items()
    }
    assert lost[when_fp32.HALF]["lost_share"] > 0.9 > 0.5 > lost[when_fp32.SINGLE]["lost_share"]
    assert all(len(each["losses"]) == len(each["lost"]) == 4 for each in lost.values())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_long_sums(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "LENGTHS", (10, 2_000))
    result = work.WORKS["sums"](arm(framework))
    narrow, wide = (result["errors"][kind] for kind in (sums.NARROW, sums.WIDE))
    assert narrow[1] > 0.5 and wide[1] < 1e-5  # 256 + 0.5 is 256 in bfloat16


# --- the run


def in_this_process(monkeypatch: pytest.MonkeyPatch, stop_after: int = 10**9) -> list[str]:
    """Arms do nothing; after so many somebody presses Ctrl-C. `policies` has two of them."""
    performed: list[str] = []

    def perform(name: str, each: Arm, out: Path, scale: str) -> str:
        if len(performed) == stop_after:
            raise KeyboardInterrupt
        performed.append(each.name)
        content = {**make_result(each.label, each.framework), **vars(each)}
        results.put(out, [results.row(name, each.device, **content)])
        return "done"

    monkeypatch.setattr(run, "perform", perform)
    monkeypatch.setattr(expected, "seconds", lambda arms, environment: 61.0)
    monkeypatch.setattr(policies, "arms", lambda scale, device: both("fp32", steps=3))
    return performed


def test_an_experiment_says_its_time_first_and_ends_with_its_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    in_this_process(monkeypatch)
    out = tmp_path / "a.jsonl"
    assert command.main(["policies", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "expected time: about 1:01, by a step of each arm"
    assert lines[3].startswith("[1/2] jax fp32: ")
    assert lines[-1] == policies.sentence(run.load_arms("policies", out))
    assert list(results.read(out)) == ["policies smoke jax fp32", "policies smoke torch fp32"]
    assert (tmp_path / "a" / "policies.png").exists()


def test_an_interrupted_experiment_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    first = in_this_process(monkeypatch, stop_after=1)
    out = str(tmp_path / "a.jsonl")
    assert command.main(["policies", "--out", out]) == command.STOPPED
    assert "goes on where it stopped" in capsys.readouterr().out
    second = in_this_process(monkeypatch)
    assert command.main(["policies", "--out", out]) == 0
    assert (first, second) == (["jax fp32"], ["torch fp32"])
    assert command.main(["policies", "--out", out, "--again"]) == 0
    assert second[1:] == ["jax fp32", "torch fp32"]


@tier("rest", guard="each work, in this process")
def test_an_arm_runs_in_a_process_and_its_time_is_known_before(tmp_path: Path) -> None:
    out = tmp_path / "arms.jsonl"
    known = expected.seconds([arm()], {})
    assert known and 1 < known < 60
    assert run.perform("it", arm(), out, "smoke").startswith("done, ")
    assert results.read(out)["it"]["status"] == "ok"
    said = run.perform("no", arm(work="no such"), out, "smoke")
    assert said.startswith("failed: KeyError")
    assert list(results.read(out)) == ["it", "no"]


# --- what is said follows from the figures


def make_result(label: str, framework: str = "torch", **changed: Any) -> Result:
    """A result, by default of a run like any other."""
    return {
        "label": label, "framework": framework, "steps": 3, "flags": {"batch_size": 8},
        "status": "ok", "about": {"platform": "cpu"}, "predicted_bytes": 2**20,
        "state_bytes": 2**20, "peak_bytes": 2**21, "tokens_per_second": 1e3,
        "tokens_per_step": 100, "losses": [5.0, 4.0, 3.0], "validation_loss": 3.0, "skipped": 0,
        "skipped_steps": [], "loss_scales": [4.0, 4.0, 4.0], "loss_scale": 4.0, **changed,
    }  # fmt: skip


def test_policies_are_compared_with_fp32() -> None:
    half: Result = {"tokens_per_second": 2e3, "predicted_bytes": 0, "validation_loss": 3.03}
    arms = Arms([make_result("fp32"), make_result("bf16", **half), make_result("fp16")])
    assert policies.sentence(arms) == (
        "In torch bf16 took 0.50 of fp32's time and 0.50 of its memory and ended +1.00% off its "
        "validation loss and fp16 took 1.00 of fp32's time and 1.00 of its memory and ended "
        "+0.00% off its validation loss."
    )
    assert "| bf16 | torch | 50 | 0.50 | 1.0 | 2.0 | 3.0300 | +1.00% |  |  |" in policies.table(
        arms
    )


def test_nan_is_said_as_nan_and_what_could_not_run_by_name() -> None:
    nan = make_result("bf16", validation_loss=math.nan)
    assert "ended +nan% off" in policies.sentence(
        Arms([make_result("fp32"), nan, make_result("fp16")])
    )
    died = {"label": "fp16", "framework": "jax", "status": "OOM", "why": "exit status -9"}
    arms = Arms([make_result("fp32", "jax"), make_result("bf16", "jax"), died])
    assert policies.sentence(arms) == "Not measured: jax fp16: OOM (exit status -9)."
    assert "| fp16 | jax | OOM: exit status -9 |" in policies.table(arms)
    assert policies.sentence(Arms([])) == "Nothing was measured."


def test_accumulation_says_who_ended_lower() -> None:
    whole, most = make_result(accumulation.WHOLE), make_result(accumulation.MOST, predicted_bytes=0)
    for loss, said in ((2.5, "0.5000 nats lower"), (3.25, "0.2500 nats higher")):
        direct = make_result(accumulation.DIRECT, validation_loss=loss, tokens_per_second=500.0)
        words = accumulation.sentence(Arms([whole, most, direct]))
        assert said in words
        assert "N=16 took 1.00 of N=1's time and 0.50 of its memory" in words
        assert "8 rows directly took 2.00 of N=16's time" in words


@pytest.mark.parametrize(
    ("block", "halves", "said"),
    [
        ((1.3, 0.99), (1.0, 0.5), "not worth it: it frees next to nothing"),
        ((0.9, 0.5), (1.1, 0.4), "worth it: it costs nothing"),
        ((1.3, 0.8), (1.2, 1.1), "worth it where memory is short: two halves free next to nothing"),
        ((1.3, 0.7), (1.1, 0.6), "not worth it: two halves need no more"),
        ((1.1, 0.6), (1.3, 0.7), "worth it: two halves need no less"),
        ((1.3, 0.4), (1.1, 0.6), "worth it only where two halves do not fit"),
        ((1.1, 0.6), (1.3, 0.5), "worth it where its memory suffices"),
        ((1.1, None), (1.3, 0.5), "its memory is not known"),
    ],
)
def test_whether_remat_is_worth_its_price(block: Any, halves: Any, said: str) -> None:
    assert remat.verdict(block, halves).startswith(said)


def test_remat_that_alone_fits_is_worth_it() -> None:
    died = {"label": remat.PLAIN, "framework": "torch", "status": "OOM", "why": "no memory",
            "flags": {"batch_size": 8}}  # fmt: skip
    arms = Arms([died, make_result(remat.BLOCK), make_result(remat.HALVES)])
    assert remat.sentence(arms).startswith("In torch remat block ran where none did not: worth it")
    assert "OOM: no memory" in remat.table(arms)


LOST = {"fp16, no scale": 0.25, "fp16, scaled": 0.0, "bf16": 0.0}
FLUSHED: Result = {"weights": {"trained": {"parameters": LOST, "activations": LOST, "scale": 8.0}}}


@pytest.mark.parametrize(
    ("none", "said"),
    [
        ({"losses": [5.0, math.nan]}, "gradients became NaN or infinite at step 2"),
        ({"skipped_steps": [0]}, "gradients became NaN or infinite at step 1"),
        ({"validation_loss": 4.5}, "training stalled, for 25 % of the parameters' and"),
        (
            {"validation_loss": 3.03},
            "training went on, though 25 % of the parameters' and",
        ),
    ],
)
def test_without_a_scale_whichever_happens_is_said(none: Any, said: str) -> None:
    run = make_result(overflow.NONE, **none)
    assert overflow.describe_unscaled(run, make_result(overflow.SINGLE), FLUSHED).startswith(said)


def test_overflow_reports_backoff_and_growth() -> None:
    scales = [4.0, 4.0, 2.0]
    injected = make_result(
        overflow.INJECTED, at=1, skipped_steps=[1], loss_scales=scales, unchanged=True
    )
    quick = make_result(overflow.QUICK, loss_scales=[4.0, 8.0, 16.0])
    flushed = make_result(overflow.FLUSHED, **FLUSHED)
    plain = [make_result(label) for label in (overflow.SINGLE, overflow.DYNAMIC, overflow.NONE)]
    arms = Arms([*plain, quick, injected, flushed])
    words = overflow.sentence(arms)
    assert "the injected overflow took the scale from 4 to 2 and left the weights as" in words
    assert "the scale rose from 4 to 16 and cost 0 steps" in words
    assert (
        "| activations', trained weights | torch | 25.000% | 0.000% | 8 | 0.000% |"
        in overflow.table(arms)
    )
    assert "moved the weights" in overflow.backoff({**injected, "unchanged": False})
    assert "went unnoticed" in overflow.backoff({**injected, "skipped_steps": []})


def test_when_fp32_says_what_was_lost() -> None:
    errors = {sums.NARROW: [0.5], sums.WIDE: [1e-6]}
    single = make_result(when_fp32.SINGLE, lost_share=0.1, lost=[0.1], validation_losses=[3.0, 2.9])
    half = make_result(when_fp32.HALF, lost_share=0.9, lost=[0.9], validation_losses=[3.0, 3.1])
    arms = Arms([single, half, make_result(when_fp32.SUMS, lengths=[1_000], errors=errors)])
    words = when_fp32.sentence(arms)
    assert "90.0% of the updates to bf16 weights changed nothing, 10.0% of those to fp32" in words
    assert "by -0.10000 against 0.10000 nats" in words
    assert "of 1,000 numbers was 50.00% off, a running sum in float32 1e-06" in words
    assert "| bf16 weights | torch | 3 | 90.0% | 3.00000 | 3.10000 | -0.10000 |" in (
        when_fp32.table(arms)
    )


def test_formats_are_told_apart_seed_by_seed() -> None:
    """Each seed's gap counts, and not how far seeds lie apart."""
    seeds = np.array([2.0, 2.5, 3.0, 3.5, 4.0])
    noise = 1e-3 * np.array([1, -1, 0, 1, -1])
    losses = {formats.SINGLE: seeds, formats.HALF: seeds + noise, "fp8": seeds + noise + 0.01}
    arms = Arms([
        make_result(f"toy: {label}", "jax", validation_losses=list(found))
        for label, found in losses.items()
    ])  # fmt: skip
    assert formats.sentence(arms) == (
        "After 3 steps of toy the loss is told from fp32's, seed by seed, under fp8 (+0.0100 ± "
        "0.0021 nats), and is not under bf16 (+0.0000 ± 0.0021 nats), where fp32's own standard "
        "deviation over seeds is 0.7906 nats."
    )
    assert "| toy | fp8 | jax | 3.0100 | 0.7903 | +0.0100 | 0.0021 | +0.01 |" in formats.table(arms)


@tier("rest", guard="the recorded rows")
def test_nvfp4_s_gradients_are_rounded_to_the_nearest(tmp_path: Path) -> None:
    flags = {"policy": "nvfp4", "n_layer": 3, "d_model": 16, "context": 16}
    random = work.train_seeds(arm(steps=2, flags=flags, work="seeds"))["losses"]
    apart = arm(steps=2, flags=flags, work="seeds to nearest")
    assert run.perform("it", apart, tmp_path / "a.jsonl", "smoke").startswith("done")
    nearest = results.read(tmp_path / "a.jsonl")["it"]["losses"]
    assert nearest[0] == random[0]  # before any gradient
    # One update at the warm-up's rate moves the loss less than that, however gradients are rounded.
    assert nearest[1] == pytest.approx(random[1], abs=0.1) and nearest[1] != random[1]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_committed_arm_ran(name: str) -> None:
    scale = run.RECORDED[name]
    arms = run.load_arms(name, ROOT / "benchmarks" / "results" / "experiments.jsonl", scale)
    assert {each["status"] for each in arms.all} == {"ok"}
    assert len(arms.all) == len(EXPERIMENTS[name].arms(scale, "cpu"))


def test_every_experiment_draws(tmp_path: Path) -> None:
    errors = {sums.NARROW: [0.5, 0.0], sums.WIDE: [1e-6, 0.0]}
    summed = make_result(when_fp32.SUMS, lengths=[10, 1_000], errors=errors)
    labels = [overflow.DYNAMIC, overflow.NONE, overflow.QUICK, overflow.INJECTED, overflow.SINGLE]
    toys = [f"toy: {label}" for label in (formats.SINGLE, formats.HALF)]
    drawn = Arms([summed, *(
        make_result(label, "jax" if label in toys else "torch", lost=[0.1], skipped_steps=[1])
        for label in labels + toys
    )])  # fmt: skip
    for name, experiment in EXPERIMENTS.items():
        shown = [result for result in drawn.all if name == "when-fp32" or result is not summed]
        assert plot.panels(experiment.panels(Arms(shown)), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
