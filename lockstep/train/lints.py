"""Warnings about flags without effect, from what one program shows to a trainer.

`lockstep compile` asks a compiler about the same flags (`lockstep/compile/lints.py`). What is
predicted is predicted for GPUs, by the formulas of `lockstep plan`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lockstep import devices
from lockstep.config import Config
from lockstep.config.policy import BYTES
from lockstep.data.batch import Batch
from lockstep.model.attention import wants_fused
from lockstep.plan import memory, shape
from lockstep.plan.layers import MARGIN, as_told, is_predictable, scans_layers
from lockstep.plan.setting import Setting, counts_as_ampere
from lockstep.twin import Twin

FRAMEWORKS = ("jax", "torch")
ENOUGH = 0.01  # of a peak: by less nobody is helped
SURE = 1.5  # times what is predicted with remat: more than formulas are off by
SCORES = 6  # arrays of a block's scores at once, where attention is written out
GIB = 2**30


def before_training(config: Config, twin: Twin, window: Batch) -> list[str]:
    """Lists warnings before training; `window` is the one for which the twin is compiled."""
    about = twin.describe()
    found = [*_costly_loop(config, twin.framework)]
    if twin.framework in FRAMEWORKS and is_predictable(config):
        s = _setting(config, twin.framework, about["device"])
        if about["platform"] != "cpu" and wants_fused(config.precision):
            found += _predicted(config, s)
        if s.framework == "jax" and s.remat != "none":
            found += _useless_remat(config, s, twin.step_bytes(window))
    return [f"warning: {line}" for line in found]


def after_a_step(config: Config, twin: Twin) -> list[str]:
    """Warns after the first step if remat recomputed nothing."""
    remat = config.execution.remat
    if remat == "none" or twin.recomputed() is not False:
        return []
    return [f"warning: --remat {remat} recomputes nothing in this step; drop it"]


def _costly_loop(config: Config, framework: str) -> Iterator[str]:
    """Warns of scanned layers, which stack all that they keep; unrolled, XLA recomputes some."""
    execution = config.execution
    if framework == "jax" and execution.layers == "scan" and execution.remat == "none":
        yield ("--layers scan without remat keeps more than unrolled layers; "
               "use --layers unroll, or --remat block")  # fmt: skip


def _setting(config: Config, framework: str, device: str) -> Setting:
    known = devices.find_reported(device)
    able = known.capabilities if known else None
    ampere = known is None or counts_as_ampere(known)
    return as_told(config, framework, ampere=ampere, scanned=scans_layers(config, able))


def _predicted(config: Config, s: Setting) -> Iterator[str]:
    """Warns of remat that lowers no peak, and of logits that chunks would reduce."""
    model = shape.of_model(config.model)
    state, needed = memory.state_bytes(model, s.roles), memory.step_bytes(model, s)

    def total(**changes: Any) -> float:
        return state + memory.step_bytes(model, replace(s, **changes))

    if s.remat != "none" and (1 - ENOUGH) * total(remat="none") <= state + needed:
        yield (f"--remat {s.remat} does not lower the peak, {_gib(state + needed)} (predicted); "
               "drop it")  # fmt: skip
    parts = vars(memory.parts(model, s))
    count = replace(s, loss_chunks="auto").chunks(model)
    if s.chunks(model) > 1 or count == 1 or parts["logits"] < max(parts.values()):
        return
    less = total(loss_chunks=str(count))
    if less < (1 - MARGIN) * (state + needed):
        yield (f"logits are {_gib(parts['logits'])} of the peak: --loss-chunks {count} lowers it "
               f"from {_gib(state + needed)} to {_gib(less)} (predicted)")  # fmt: skip


def _useless_remat(config: Config, s: Setting, needed: int) -> Iterator[str]:
    """Warns of remat that XLA has undone: the step needs as much as one without.

    Args:
        needed: bytes beside the state; on any device, a CPU too, where without remat a step needs
            more than is predicted.
    """
    model = shape.of_model(config.model)
    scores = SCORES * BYTES[s.roles.output] * s.rows * model.n_head * model.context**2
    without = memory.step_bytes(model, replace(s, remat="none"))
    if needed >= max(without, SURE * (memory.step_bytes(model, s) + scores)):
        remedy = "drop it" if s.scanned else "add --layers scan, or drop it"
        yield (f"--remat {s.remat} does not lower the peak: as compiled, the step needs "
               f"{_gib(needed)} beside its state, and --remat none at least {_gib(without)} "
               f"(predicted); {remedy}")  # fmt: skip


def _gib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB"
