"""Where bfloat16 fails and float32 does not: small updates to master weights, and long sums."""

from benchmarks.experiments.arm import TOY, Arm, both
from benchmarks.experiments.outcome import Arms, closing, failure_row
from benchmarks.experiments.sums import NARROW, WIDE
from benchmarks.plot import Panel, steps
from benchmarks.tables import markdown

WHAT = "master weights at a small rate, and long sums: bf16 or fp32"
SINGLE, HALF, SUMS = "fp32 weights", "bf16 weights", "sums"
RATE = 1e-5  # of a fine-tuning, or of a schedule's end
SPECS = {SINGLE: "bf16", HALF: "params=bfloat16,compute=bfloat16,output=float32"}
HEAD = ["master weights", "framework", "steps", "updates that change nothing",
        "validation loss before, nats", "after, nats", "learned, nats"]  # fmt: skip


def arms(scale: str, device: str) -> list[Arm]:
    length, model = (500, {}) if scale == "full" else (300, TOY)
    flags = {**model, "lr": RATE, "min_lr": RATE, "warmup": 0}
    listed = []
    for label, policy in SPECS.items():
        chosen = {**flags, "policy": policy}
        listed += both(label, work="updates", steps=length, flags=chosen, device=device)
    return listed + both(SUMS, work="sums", device=device)


def table(arms: Arms) -> str:
    rows, errors, lengths = [], [], []
    for result in arms.all:
        row = [result["label"], result["framework"], str(result["steps"])]
        if result["label"] != SUMS:
            rows.append(row + (failure_row(result, HEAD, len(row)) or _updates(result)))
        elif result["status"] == "ok":
            lengths = result["lengths"]
            errors += [
                [kind, result["framework"], *(f"{x:.2g}" for x in off)]
                for kind, off in result["errors"].items()
            ]
    head = ["relative error of", "framework", *(f"n = {n:,}" for n in lengths)]
    return f"{markdown(HEAD, rows)}\n\n{markdown(head, errors)}"


def _updates(result: dict) -> list[str]:
    before, after = result["validation_losses"]
    return [f"{result['lost_share']:.1%}", f"{before:.5f}", f"{after:.5f}", f"{before - after:.5f}"]


def gain_in_nats(result: dict) -> float:
    """Nats of the held-out loss."""
    before, after = result["validation_losses"]
    return before - after


def sentence(arms: Arms) -> str:
    parts = []
    for framework, (single, half, sums) in arms.complete(SINGLE, HALF, SUMS).items():
        longest, errors = sums["lengths"][-1], sums["errors"]
        parts.append(
            f"in {framework}, at a rate of {RATE:g}, {half['lost_share']:.1%} of the updates to "
            f"bf16 weights changed nothing, {single['lost_share']:.1%} of those to fp32 weights, "
            f"and {half['steps']} steps lowered the validation loss by {gain_in_nats(half):.5f} "
            f"against {gain_in_nats(single):.5f} nats; {NARROW} of {longest:,} numbers was "
            f"{errors[NARROW][-1]:.2%} off, {WIDE} {errors[WIDE][-1]:.2g}"
        )
    return closing(parts, arms)


def panels(arms: Arms) -> list[Panel]:
    trained = [r for r in arms.good if r["label"] != SUMS]
    summed = [r for r in arms.good if r["label"] == SUMS]
    errors = {
        f"{r['framework']} {kind}": (r["lengths"], [max(x, 1e-9) for x in off])  # zero has a place
        for r in summed
        for kind, off in r["errors"].items()
    }
    lost = {f"{r['framework']} {r['label']}": steps(r["lost"]) for r in trained}
    return [
        Panel("updates that change nothing", "optimizer step", "share of the weights", lost),
        Panel("long sums", "numbers", "relative error", errors, scale="log"),
    ]
