"""The rungs in order, the configs to which each applies, and the climb."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.judge.verdict import Finding, Outcome, Verdict
from lockstep.parity import automaton, rungs, trajectories, worlds
from lockstep.parity.case import Case

WORLDS = 11  # the rung of several devices


def _accumulates(case: Case) -> str:
    return "" if case.config.optim.accum > 1 else "one micro-batch a step"


def _recomputes(case: Case) -> str:
    return "" if case.config.execution.remat != "none" else "nothing is recomputed"


def _scales(case: Case) -> str:
    if not case.config.precision.roles.loss_scaling:
        return "this policy has no loss scale"
    return "" if case.pair.overflowing else "this pair has no way to overflow"


@dataclass(frozen=True, kw_only=True)
class Rung:
    number: int
    name: str
    proves: str
    climb: Callable[[Case], Iterator[Finding]]
    lacks: Callable[[Case], str] = lambda case: ""  # why it cannot stand here, or ""

    def not_run(self, case: Case) -> str:
        """Returns the reason why a rung does not apply here, or ""."""
        if (case.config.mesh.size > 1) != (self.number == WORLDS):
            return "one device" if self.number == WORLDS else f"several devices: rung {WORLDS}"
        return self.lacks(case)

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


# fmt: off
RUNGS = [
    Rung(number=1, name="contract", climb=rungs.contract,
         proves="states go in and come out unchanged, names in order; the rates are the table's"),
    Rung(number=2, name="activations", climb=rungs.activations,
         proves="every named intermediate, loss, evaluation, logits of prefixes up to the context"),
    Rung(number=3, name="gradients", climb=rungs.gradients,
         proves="every parameter's gradient and every intermediate's"),
    Rung(number=4, name="one step", climb=rungs.one_step,
         proves="parameters and both moments after one update; the size of the gradient"),
    Rung(number=5, name="accumulation", climb=rungs.accumulation, lacks=_accumulates,
         proves="N micro-batches are one batch of N times the rows"),
    Rung(number=6, name="remat", climb=rungs.remat, lacks=_recomputes,
         proves="what is recomputed is what was computed, dropout and all; less is kept"),
    Rung(number=7, name="loss scale", climb=automaton.loss_scale, lacks=_scales,
         proves="GradScaler's automaton, one decision a step"),
    Rung(number=8, name="curves", climb=trajectories.curves,
         proves="whole runs agree, in losses, norms, rates and the state at the end: in float64 to "
                "rounding, elsewhere within a program's own noise"),
    Rung(number=9, name="fast to strict", climb=trajectories.fast,
         proves="fast numerics stay within the strict ones' noise"),
    Rung(number=10, name="checkpoints", climb=trajectories.checkpoints,
         proves="either side goes on where the other stopped"),
    Rung(number=WORLDS, name="worlds", climb=worlds.worlds,
         proves="on a mesh of devices each side trains the curve of one device"),
]
# fmt: on


def climb(rung: Rung, case: Case) -> Outcome:
    return Outcome(list(rung.climb(case)))


def verdict(rung: Rung, case: Case) -> Verdict:
    """Computes the verdict, and stops at the first difference."""
    verdicts = set[Verdict]()
    for finding in rung.climb(case):
        verdicts.add(finding.verdict)
        if finding.verdict is Verdict.DIFFERENT:
            break
    return max(verdicts, key=list(Verdict).index)
