"""fp16 at a learning rate of 3e-3: the loss scale at work, and what happens without one."""

import math

from benchmarks.cells import Flags
from benchmarks.experiments.arm import TOY, Arm, both
from benchmarks.experiments.outcome import Arms, closing, failure_row
from benchmarks.plot import Curve, Panel, steps
from benchmarks.tables import markdown
from lockstep.config.model import LARGEST

WHAT = "fp16 at lr 3e-3: the loss scale at work, and none at all"
SINGLE, DYNAMIC, HIGH = "fp32", "from 2^16", "from 2^24"
NONE, QUICK, INJECTED, FLUSHED = "no scale", "growth every 5", "injected", "flushed"
KINDS = ("parameters", "activations")  # whose gradients
HEAD = ["arm", "framework", "steps", "steps skipped", "first scale", "lowest scale",
        "highest scale", "last scale", "first loss, nats", "last loss, nats"]  # fmt: skip
FLUSHED_HEAD = ["gradients that are zero, of those that float64 has not zero", "framework",
                "fp16, no scale", "fp16, scaled", "scale", "bf16"]  # fmt: skip


def arms(scale: str, device: str) -> list[Arm]:
    length, model = (1_000, {}) if scale == "full" else (200, TOY)
    base: Flags = {**model, "policy": "fp16", "lr": 3e-3}
    # A scale of 1 that never grows: the gradients are those of a program that has none.
    fixed = {"loss_scale_init": 1.0, "loss_scale_interval": LARGEST}
    short = {"loss_scale_init": 2.0**10, "loss_scale_interval": 5}
    variants: dict[str, Flags] = {
        SINGLE: {"policy": "fp32"}, DYNAMIC: {}, HIGH: {"loss_scale_init": 2.0**24}, NONE: fixed,
        QUICK: short,
    }  # fmt: skip
    listed = [
        arm
        for label, flags in variants.items()
        for arm in both(label, steps=length, flags=base | flags, device=device)
    ]
    calm = base | {"loss_scale_init": 2.0**10}  # from where nothing overflows by itself
    listed += both(INJECTED, work="injected", steps=20, flags=calm, device=device)
    return listed + both(FLUSHED, work="flushed", steps=length, flags=base, device=device)


def table(arms: Arms) -> str:
    rows = [_trace(result) for result in arms.all if result["label"] != FLUSHED]
    flushed = [row for result in arms.all if result["label"] == FLUSHED for row in _shares(result)]
    return f"{markdown(HEAD, rows)}\n\n{markdown(FLUSHED_HEAD, flushed)}"


def _trace(result: dict) -> list[str]:
    row = [result["label"], result["framework"], str(result["steps"])]
    if why := failure_row(result, HEAD, len(row)):
        return row + why
    scales, losses = result["loss_scales"], result["losses"]
    traced = (scales[0], min(scales), max(scales), result["loss_scale"])
    scaled = result["label"] != SINGLE
    return [
        *row, str(len(result["skipped_steps"])) if scaled else "",
        *(f"{value:,.0f}" if scaled else "" for value in traced),
        f"{losses[0]:.4f}", f"{losses[-1]:.4f}",
    ]  # fmt: skip


def _shares(result: dict) -> list[list[str]]:
    if result["status"] != "ok":
        row = ["", result["framework"]]
        return [row + (failure_row(result, FLUSHED_HEAD, len(row)) or [])]
    return [
        [f"{kind}', {weights} weights", result["framework"], f"{lost['fp16, no scale']:.3%}",
         f"{lost['fp16, scaled']:.3%}", f"{of['scale']:,.0f}", f"{lost['bf16']:.3%}"]
        for weights, of in result["weights"].items()
        for kind in KINDS
        for lost in [of[kind]]
    ]  # fmt: skip


def describe_unscaled(none: dict, single: dict, flushed: dict) -> str:
    """What became of the run without a scale: NaN, a stall, or the share that was flushed."""
    trained = flushed["weights"]["trained"]
    parts = [f"{100 * trained[kind]['fp16, no scale']:.2g} % of the {kind}'" for kind in KINDS]
    share = f"{' and '.join(parts)} gradients were flushed to zero"
    bad = [step for step, loss in enumerate(none["losses"]) if not math.isfinite(loss)]
    if overflows := sorted({*bad, *none["skipped_steps"]}):
        return f"gradients became NaN or infinite at step {overflows[0] + 1}"
    learned = none["losses"][0] - none["validation_loss"]
    if learned < (single["losses"][0] - single["validation_loss"]) / 2:
        return f"training stalled, for {share}"
    gap = none["validation_loss"] / single["validation_loss"] - 1
    return f"training went on, though {share}, and ended {gap:+.2%} off fp32's validation loss"


def sentence(arms: Arms) -> str:
    parts = []
    needed = (SINGLE, DYNAMIC, NONE, QUICK, INJECTED, FLUSHED)
    for framework, found in arms.complete(*needed).items():
        single, dynamic, none, quick, injected, flushed = found
        parts.append(
            f"in {framework} {len(dynamic['skipped_steps'])} of {dynamic['steps']} steps were "
            f"skipped, with the scale at {spread(dynamic)}; without a scale "
            f"{describe_unscaled(none, single, flushed)}; {backoff(injected)}; growing every 5 "
            f"steps the scale rose from {quick['loss_scales'][0]:,.0f} to "
            f"{max(quick['loss_scales']):,.0f} and cost {len(quick['skipped_steps'])} steps"
        )
    return closing(parts, arms)


def spread(result: dict) -> str:
    low, high = min(result["loss_scales"]), max(result["loss_scales"])
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def backoff(injected: dict) -> str:
    at, scales = injected["at"], injected["loss_scales"]
    if at not in injected["skipped_steps"]:
        return "the injected overflow went unnoticed"
    moved = "left the weights as they were" if injected["unchanged"] else "moved the weights"
    return (f"the injected overflow took the scale from {scales[at]:,.0f} to {scales[at + 1]:,.0f} "
            f"and {moved}")  # fmt: skip


def panels(arms: Arms) -> list[Panel]:
    def named(*labels: str) -> dict[str, dict]:
        shown = [r for r in arms.good if r["label"] in labels]
        return {f"{r['framework']} {r['label']}": r for r in shown}

    def trace(title: str, *labels: str) -> Panel:
        found = named(*labels)
        scales = {name: steps(result["loss_scales"]) for name, result in found.items()}
        skipped = {name: crosses(result) for name, result in found.items()}
        return Panel(title, "optimizer step", "loss scale (x: skipped)", scales, skipped, "log2")

    losses = {name: steps(r["losses"]) for name, r in named(SINGLE, DYNAMIC, NONE).items()}
    return [
        trace("dynamic loss scale", DYNAMIC, HIGH), trace("growth every 5 good steps", QUICK),
        trace("one injected overflow", INJECTED),
        Panel("loss", "optimizer step", "nats a token", losses),
    ]  # fmt: skip


def crosses(result: dict) -> Curve:
    hit = result["skipped_steps"]
    return [step + 1 for step in hit], [result["loss_scales"][step] for step in hit]
