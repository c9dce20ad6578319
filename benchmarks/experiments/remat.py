"""The 30m model with remat and without: is its price worth it here?

The other way to the same memory is a smaller micro-batch, accumulated. Remat is worth its price
where it beats that, or where nothing else fits.
"""

from benchmarks.experiments.frame import (
    MEMORY,
    Arm,
    Experiment,
    both,
    memory,
    milliseconds,
    named,
    ratio,
    shape,
)
from benchmarks.measure import Result
from benchmarks.plot import Panel


def arms(scale: str, device: str) -> list[Arm]:
    full = scale == "full"
    rows, length = (8 if device == "cpu" else 64, 20) if full else (4, 6)
    # Layers scanned: unrolled, XLA's CPU backend frees nothing (docs/benchmarks.md).
    base = {"model": "30m", "policy": "bf16", "batch_size": rows, "layers": "scan"}
    base |= {} if full else {"context": 128}
    variants = {
        "none": base, "block": base | {"remat": "block"},
        "two halves": base | {"accum": 2, "batch_size": rows // 2},
    }  # fmt: skip
    return [
        arm
        for label, flags in variants.items()
        for arm in both(label, steps=length, flags=flags, device=device)
    ]


def panels(results: list[Result]) -> list[Panel]:
    points = {
        name: ([space / 2**20], [milliseconds(each)])
        for name, each in named(results).items()
        if (space := memory(each)) is not None
    }
    return [Panel("what remat buys", "MiB", "ms/step", points)]


EXPERIMENT = Experiment(
    what="the 30m model with it, without, and with half the micro-batch", arms=arms, panels=panels,
    label="remat", base="none",
    columns={
        "N x B": shape,
        "ms/step": lambda result, _: f"{milliseconds(result):,.4g}",
        "time over none's": ratio(milliseconds),
        "memory, MiB": MEMORY["memory, MiB"],
        "memory over none's": ratio(memory),
        "peak, MiB": MEMORY["peak, MiB"],
    },
)  # fmt: skip
