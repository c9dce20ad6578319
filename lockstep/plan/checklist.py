"""The classic checklist of mixed precision, beside what the formulas say."""

from typing import Any, NamedTuple

from lockstep import devices
from lockstep.plan import shape
from lockstep.plan.recommend import Choice, choices, rank

TOKENS = 2**15  # a step, where the checklist does not say


class Advice(NamedTuple):
    model: str
    device: str
    policy: str
    splits: tuple[int, int]  # micro-batches, from and to
    remat: bool

    @property
    def text(self) -> str:
        low, high = self.splits
        steps = f"N = {low}" if low == high else f"N = {low} to {high}"
        return f"{self.policy}, {steps}, {'remat' if self.remat else 'no remat'}"


CHECKLIST = (
    Advice("10m", "m2", "bf16", (1, 1), remat=False),
    Advice("10m", "t4", "fp16", (1, 1), remat=False),
    Advice("10m", "a100-40", "bf16", (1, 1), remat=False),
    Advice("30m", "t4", "fp16", (2, 4), remat=False),
    Advice("125m", "t4", "fp16", (4, 8), remat=True),
    Advice("125m", "a100-40", "bf16", (1, 1), remat=False),
)


def verdict(advice: Advice, framework: str) -> tuple[bool, str]:
    """Says whether the recommendation agrees, and the assumption that decides."""
    device = devices.find(advice.device)
    ordered = rank(choices(shape.of(advice.model, None), device, framework, TOKENS))
    if not ordered:
        return False, f"nothing fits in {device.memory / 1e9:.0f} GB"
    best = ordered[0]
    against, s = _differences(advice, best, device), best.setting
    remat = "no remat" if s.remat == "none" else f"remat {s.remat}"
    ours = f"{s.policy}, N = {s.accum}, {remat}"
    return not against, f"{ours}: {'; '.join(against)}" if against else ours


def _differences(advice: Advice, best: Choice, device: devices.Device) -> list[str]:
    found, s = [], best.setting
    if advice.policy != s.policy:
        half, single = device.half / 1e12, device.single / 1e12
        found.append(f"its 16-bit units do {half:.3g} TFLOP/s, float32 {single:.3g}")
    low, high = advice.splits
    if not low <= s.accum <= high:
        share = best.bytes / device.memory
        found.append(f"{s.rows} rows take {share:.0%} of {device.memory / 1e9:.0f} GB")
    if advice.remat != (s.remat != "none"):
        found.append("memory is left without remat" if advice.remat else "it does not fit without")
    return found


def rows(frameworks: list[str]) -> list[dict[str, Any]]:
    """The checklist beside our recommendation, by the first framework that its device runs."""
    found = []
    for advice in CHECKLIST:
        able = [name for name in frameworks if name in devices.find(advice.device).frameworks]
        if able:
            agrees, ours = verdict(advice, able[0])
            found.append({"model": advice.model, "device": advice.device, "framework": able[0],
                          "checklist": advice.text, "agrees": agrees, "ours": ours})  # fmt: skip
    return found


def text(found: list[dict[str, Any]]) -> str:
    lines = [f"The classic checklist, at {TOKENS:,} tokens a step, and this recommendation:"]
    for row in found:
        where = f"  {row['model']} on {row['device']}: {row['checklist']}".ljust(50)
        verdict = "agree" if row["agrees"] else "disagree"
        lines.append(f"{where} {verdict}, {row['framework']}: {row['ours']}")
    return "\n".join(lines)
