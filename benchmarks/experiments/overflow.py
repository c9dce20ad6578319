"""fp16 at a learning rate of 3e-3: the loss scale at work, and what happens without one."""

from collections.abc import Callable

from benchmarks.cells import Flags
from benchmarks.experiments.frame import TOY, Arm, Experiment, Text, both
from benchmarks.measure import Result
from benchmarks.tables import markdown
from lockstep.config.model import LARGEST

SINGLE, DYNAMIC, HIGH = "fp32", "from 2^16", "from 2^24"
NONE, QUICK, INJECTED, FLUSHED = "no scale", "growth every 5", "injected", "flushed"
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


def scaled(choose: Callable[[Result], float]) -> Text:
    """A column of what fp32 has not: a loss scale."""

    def text(result: Result) -> str:
        return f"{choose(result):,.0f}" if result["label"] != SINGLE else ""

    return text


def table_of_zeros(results: list[Result]) -> str:
    """The shares of the gradients' elements that became zero."""
    return markdown(FLUSHED_HEAD, [
        [f"{kind}', {weights} weights", result["framework"], f"{lost['fp16, no scale']:.3%}",
         f"{lost['fp16, scaled']:.3%}", f"{found['scale']:,.0f}", f"{lost['bf16']:.3%}"]
        for result in results
        for weights, found in result["weights"].items()
        for kind in ("parameters", "activations")
        for lost in [found[kind]]
    ])  # fmt: skip


EXPERIMENT = Experiment(
    what="fp16 at lr 3e-3: the loss scale at work, and none at all", arms=arms,
    apart=FLUSHED, more=table_of_zeros,
    columns={
        "steps": lambda result: str(result["steps"]),
        "steps skipped": scaled(lambda result: len(result["skipped_steps"])),
        "first scale": scaled(lambda result: result["loss_scales"][0]),
        "lowest scale": scaled(lambda result: min(result["loss_scales"])),
        "highest scale": scaled(lambda result: max(result["loss_scales"])),
        "last scale": scaled(lambda result: result["loss_scale"]),
        "first loss, nats": lambda result: f"{result['losses'][0]:.4f}",
        "last loss, nats": lambda result: f"{result['losses'][-1]:.4f}",
    },
)  # fmt: skip
