"""One effective batch in N micro-batches, and the small batch taken directly, for equal tokens."""

from benchmarks.experiments.frame import (
    LOSS,
    MEMORY,
    TOY,
    Arm,
    Experiment,
    both,
    milliseconds,
    named,
    shape,
)
from benchmarks.measure import Result
from benchmarks.plot import NATS, Panel

ROWS, SPLITS = 128, (1, 4, 16)
SMALL = ROWS // SPLITS[-1]


def arms(scale: str, device: str) -> list[Arm]:
    length, model = (250, {}) if scale == "full" else (60, TOY)
    base = {**model, "policy": "bf16"}
    listed = []
    for n in SPLITS:
        flags = {**base, "accum": n, "batch_size": ROWS // n}
        listed += both(f"N={n}", steps=length, flags=flags, device=device)
    flags = {**base, "batch_size": SMALL}
    direct = f"{SMALL} rows directly"
    return listed + both(direct, steps=length * SPLITS[-1], flags=flags, device=device)


def seconds(result: Result, base: Result | None) -> str:
    """The time of all its steps, at the median window's rate."""
    return f"{milliseconds(result) * result['steps'] / 1e3:.3g}"


def panels(results: list[Result]) -> list[Panel]:
    curves = {}
    for name, each in named(results).items():
        millions, losses = each["tokens_per_step"] / 1e6, each["losses"]
        curves[name] = [millions * (step + 1) for step in range(len(losses))], losses
    return [Panel("loss", "million tokens", NATS, curves)]


EXPERIMENT = Experiment(
    what="128 rows in 1, 4, 16 micro-batches; and 8 rows directly", arms=arms, panels=panels,
    columns={
        "N x B": shape,
        "steps": lambda result, _: str(result["steps"]),
        "time of all steps, s": seconds,
        **MEMORY,
        "validation loss, nats": LOSS,
    },
)  # fmt: skip
