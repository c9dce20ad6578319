"""The 30m model with remat and without: is its price worth it here?

The other way to the same memory is a smaller micro-batch, accumulated. Remat is worth its price
where it beats that, or where nothing else fits.
"""

from benchmarks.experiments.arm import Arm, both
from benchmarks.experiments.outcome import (
    Arms,
    closing,
    failure_row,
    mebibytes,
    memory,
    milliseconds,
)
from benchmarks.plot import Panel
from benchmarks.tables import markdown

WHAT = "the 30m model with it, without, and with half the micro-batch"
PLAIN, BLOCK, HALVES = "none", "block", "two halves"
HEAD = ["remat", "framework", "N x B", "ms/step", "time over none's", "memory, MiB",
        "memory over none's", "peak, MiB"]  # fmt: skip
SAVES = 0.95  # of the memory: what keeps more than that saves nothing worth the name


def arms(scale: str, device: str) -> list[Arm]:
    full = scale == "full"
    rows, length = (8 if device == "cpu" else 64, 20) if full else (4, 6)
    # Layers scanned: unrolled, XLA's CPU backend frees nothing (docs/benchmarks.md).
    base = {"model": "30m", "policy": "bf16", "batch_size": rows, "layers": "scan"}
    base |= {} if full else {"context": 128}
    variants = {
        PLAIN: base, BLOCK: base | {"remat": "block"},
        HALVES: base | {"accum": 2, "batch_size": rows // 2},
    }  # fmt: skip
    return [
        arm
        for label, flags in variants.items()
        for arm in both(label, steps=length, flags=flags, device=device)
    ]


def table(arms: Arms) -> str:
    rows = []
    for result in arms.all:
        n = result["flags"].get("accum", 1)
        row = [result["label"], result["framework"], f"{n} x {result['flags']['batch_size']}"]
        if why := failure_row(result, HEAD, len(row)):
            rows.append(row + why)
            continue
        (plain,) = arms.complete(PLAIN).get(result["framework"], [None])
        time, space = ratios(result, plain) if plain else (None, None)
        rows.append([
            *row, f"{milliseconds(result):,.4g}", f"{time:.2f}" if time else "",
            mebibytes(memory(result)), f"{space:.2f}" if space else "",
            mebibytes(result["peak_bytes"]),
        ])  # fmt: skip
    return markdown(HEAD, rows)


def ratios(result: dict, plain: dict) -> tuple[float, float | None]:
    """Time and memory, over those of `plain`."""
    part, whole = memory(result), memory(plain)
    space = part / whole if part is not None and whole else None
    return milliseconds(result) / milliseconds(plain), space


def verdict(remat: tuple[float, float | None], halves: tuple[float, float | None]) -> str:
    """Of (time, memory) over those of a run that recomputes nothing and fits."""
    (time, space), (half_time, half_space) = remat, halves
    if space is None or half_space is None:
        return "its memory is not known here"
    if space > SAVES:
        return "not worth it: it frees next to nothing"
    if time <= 1:
        return "worth it: it costs nothing"
    if half_space > SAVES:
        return "worth it where memory is short: two halves free next to nothing"
    if half_space <= space and half_time <= time:
        return "not worth it: two halves need no more memory and no more time"
    if space <= half_space and time <= half_time:
        return "worth it: two halves need no less memory and no less time"
    if half_time <= time:
        return "worth it only where two halves do not fit: they are faster"
    return "worth it where its memory suffices: two halves need less, and more time"


def sentence(arms: Arms) -> str:
    parts = []
    for framework, (plain, block, halves) in arms.complete(PLAIN, BLOCK, HALVES).items():
        remat, half = ratios(block, plain), ratios(halves, plain)
        parts.append(
            f"in {framework} remat block took {describe_ratio(remat)}, and two halves of the "
            f"micro-batch {describe_ratio(half)}: {verdict(remat, half)}"
        )
    for framework in arms.complete(BLOCK).keys() - arms.complete(PLAIN).keys():
        parts.append(f"in {framework} remat block ran where none did not: worth it")
    return closing(parts, arms)


def describe_ratio(ratio: tuple[float, float | None]) -> str:
    time, space = ratio
    kept = "an unknown part" if space is None else f"{space:.2f}"
    return f"{time:.2f} of the time and {kept} of the memory of none"


def panels(arms: Arms) -> list[Panel]:
    points = {
        f"{r['framework']} {r['label']}": ([space / 2**20], [milliseconds(r)])
        for r in arms.good
        if (space := memory(r)) is not None
    }
    return [Panel("what remat buys", "MiB", "ms/step", points)]
