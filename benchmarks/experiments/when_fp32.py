"""Where bfloat16 fails and float32 does not: small updates to master weights, and long sums."""

from benchmarks.experiments.frame import TOY, Arm, Experiment, both
from benchmarks.measure import Result
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


def learned(result: Result) -> str:
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


EXPERIMENT = Experiment(
    what="master weights at a small rate, and long sums: bf16 or fp32", arms=arms,
    label="master weights", apart=SUMS, more=table_of_sums,
    columns={
        "steps": lambda result: str(result["steps"]),
        "updates that change nothing": lambda result: f"{result['lost_share']:.1%}",
        "validation loss before, nats": lambda result: f"{result['validation_losses'][0]:.5f}",
        "after, nats": lambda result: f"{result['validation_losses'][1]:.5f}",
        "learned, nats": learned,
    },
)  # fmt: skip
