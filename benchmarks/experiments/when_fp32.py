"""Where bfloat16 fails and float32 does not: small updates to master weights, and long sums."""

from benchmarks.experiments.frame import TOY, Arm, Experiment, both, named
from benchmarks.measure import Result
from benchmarks.plot import STEP, Panel, steps
from benchmarks.tables import markdown

RATE = 1e-5  # of a fine-tuning, or of a schedule's end
SPECS = {"fp32 weights": "bf16",
         "bf16 weights": "params=bfloat16,compute=bfloat16,output=float32"}  # fmt: skip
SUMS = "sums"


def arms(scale: str, device: str) -> list[Arm]:
    length, model = (500, {}) if scale == "full" else (300, TOY)
    flags = {**model, "lr": RATE, "min_lr": RATE, "warmup": 0}
    listed = []
    for label, policy in SPECS.items():
        chosen = {**flags, "policy": policy}
        listed += both(label, work="updates", steps=length, flags=chosen, device=device)
    return listed + both(SUMS, work="sums", device=device)


def learned(result: Result, base: Result | None) -> str:
    before, after = result["validation_losses"]
    return f"{before - after:.5f}"


def table_of_sums(results: list[Result]) -> str:
    """The relative error of each kind of sum, by length."""
    lengths = results[0]["lengths"] if results else []
    head = ["relative error of", "framework", *(f"n = {n:,}" for n in lengths)]
    return markdown(head, [
        [kind, result["framework"], *(f"{x:.2g}" for x in off)]
        for result in results
        for kind, off in result["errors"].items()
    ])  # fmt: skip


def panels(results: list[Result]) -> list[Panel]:
    errors = {
        f"{r['framework']} {kind}": (r["lengths"], [max(x, 1e-9) for x in off])  # zero has a place
        for r in named(results, SUMS).values()
        for kind, off in r["errors"].items()
    }
    lost = {name: steps(r["lost"]) for name, r in named(results, *SPECS).items()}
    return [
        Panel("updates that change nothing", STEP, "share of the weights", lost),
        Panel("long sums", "numbers", "relative error", errors, scale="log"),
    ]


EXPERIMENT = Experiment(
    what="master weights at a small rate, and long sums: bf16 or fp32", arms=arms, panels=panels,
    label="master weights", apart=SUMS, more=table_of_sums,
    columns={
        "steps": lambda result, _: str(result["steps"]),
        "updates that change nothing": lambda result, _: f"{result['lost_share']:.1%}",
        "validation loss before, nats": lambda result, _: f"{result['validation_losses'][0]:.5f}",
        "after, nats": lambda result, _: f"{result['validation_losses'][1]:.5f}",
        "learned, nats": learned,
    },
)  # fmt: skip
