"""One effective batch in N micro-batches, and the small batch taken directly, for equal tokens."""

from benchmarks.experiments.arm import TOY, Arm, both
from benchmarks.experiments.outcome import (
    Arms,
    closing,
    failure_row,
    mebibytes,
    memory,
    milliseconds,
    share,
)
from benchmarks.plot import Panel
from benchmarks.tables import markdown

WHAT = "128 rows in 1, 4, 16 micro-batches; and 8 rows directly"
ROWS, SPLITS = 128, (1, 4, 16)
WHOLE, MOST, DIRECT = "N=1", f"N={SPLITS[-1]}", f"{ROWS // SPLITS[-1]} rows directly"
HEAD = ["arm", "framework", "N x B", "steps", "time of all steps, s", "memory, MiB",
        "peak, MiB", "validation loss, nats"]  # fmt: skip


def arms(scale: str, device: str) -> list[Arm]:
    length, model = (250, {}) if scale == "full" else (60, TOY)
    base = {**model, "policy": "bf16"}
    listed = []
    for n in SPLITS:
        flags = {**base, "accum": n, "batch_size": ROWS // n}
        listed += both(f"N={n}", steps=length, flags=flags, device=device)
    flags = {**base, "batch_size": ROWS // SPLITS[-1]}
    return listed + both(DIRECT, steps=length * SPLITS[-1], flags=flags, device=device)


def seconds(result: dict) -> float:
    """Of all its steps, at the median window's rate."""
    return milliseconds(result) * result["steps"] / 1e3


def table(arms: Arms) -> str:
    rows = []
    for result in arms.all:
        n = result["flags"].get("accum", 1)
        row = [result["label"], result["framework"], f"{n} x {result['flags']['batch_size']}",
               str(result["steps"])]  # fmt: skip
        rows.append(row + (failure_row(result, HEAD, len(row)) or [
            f"{seconds(result):.3g}", mebibytes(memory(result)), mebibytes(result["peak_bytes"]),
            f"{result['validation_loss']:.4f}",
        ]))  # fmt: skip
    return markdown(HEAD, rows)


def sentence(arms: Arms) -> str:
    parts = []
    for framework, (whole, most, direct) in arms.complete(WHOLE, MOST, DIRECT).items():
        gap = direct["validation_loss"] - most["validation_loss"]
        parts.append(
            f"in {framework} {MOST} took {seconds(most) / seconds(whole):.2f} of {WHOLE}'s time "
            f"and {share(most, whole)} of its memory, with validation losses "
            f"{abs(most['validation_loss'] - whole['validation_loss']):.4f} nats apart, and "
            f"{DIRECT} took {seconds(direct) / seconds(most):.2f} of {MOST}'s time for the same "
            f"tokens and ended {abs(gap):.4f} nats {'lower' if gap < 0 else 'higher'}"
        )
    return closing(parts, arms)


def panels(arms: Arms) -> list[Panel]:
    curves = {}
    for result in arms.good:
        millions = result["tokens_per_step"] / 1e6
        tokens = [millions * step for step in range(1, len(result["losses"]) + 1)]
        curves[f"{result['framework']} {result['label']}"] = tokens, result["losses"]
    return [Panel("loss", "million tokens", "nats a token", curves)]
