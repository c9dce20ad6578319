"""Warnings about flags without effect: a program compared with that of another setting."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lockstep.compile.program import Program
from lockstep.compile.report import bytes_text
from lockstep.config import Config

Ask = Callable[[Config], Program | None]  # the program of another setting; None: there is none
ENOUGH = 0.01  # of a peak: XLA places buffers anew, and by less nobody is helped


def find(program: Program, config: Config, ask: Ask) -> list[str]:
    """Lists the costs of remat, of scanned layers and of whole logits, each with a remedy.

    Args:
        ask: compiles or traces the same step with other flags; asked only where a flag is in doubt.
    """
    lints = (useless_remat, costly_loop, large_logits)
    return [line for lint in lints for line in lint(program, config, ask)]


def useless_remat(program: Program, config: Config, ask: Ask) -> Iterator[str]:
    """Warns of remat that recomputes nothing, or needs as much as the step without."""
    remat = config.execution.remat
    if remat == "none" or not (without := ask(with_flags(config, remat="none"))):
        return
    if program.flops <= without.flops:
        yield f"--remat {remat} recomputes nothing: it has the FLOPs of --remat none; drop it"
    elif not _lower(program, without):
        both = f"{bytes_text(program.peak)}, and {bytes_text(without.peak)} with --remat none"
        yield f"--remat {remat} does not lower the peak: {both}; drop it"


def costly_loop(program: Program, config: Config, ask: Ask) -> Iterator[str]:
    """Warns of scanned layers that keep more than unrolled layers; PyTorch has no scan."""
    if program.framework != "jax" or config.execution.layers != "scan":
        return
    unrolled = ask(with_flags(config, layers="unroll"))
    if unrolled and _lower(unrolled, program):
        both = f"{bytes_text(program.peak)}, and {bytes_text(unrolled.peak)} unrolled"
        yield f"--layers scan keeps more than unrolled layers: {both}; use --layers unroll"


def large_logits(program: Program, config: Config, ask: Ask) -> Iterator[str]:
    """Warns of logits that are the largest part of the peak, if chunks lower it; not on a mesh."""
    if config.mesh.size > 1:
        return
    logits, cut = program.parts.get("logits", 0), with_flags(config, loss_chunks="auto")
    largest = logits >= max(program.parts.values(), default=0)
    if not largest or config.chunks > 1 or cut.chunks == 1:
        return
    less = ask(cut)
    if less and _lower(less, program):
        peaks = f"{bytes_text(program.peak)} to {bytes_text(less.peak)}"
        yield (
            f"logits are {bytes_text(logits)} of the peak: --loss-chunks {cut.chunks} lowers it "
            f"from {peaks}, for one more matmul of the head"
        )


def with_flags(config: Config, **flags: Any) -> Config:
    return replace(config, execution=replace(config.execution, **flags))


def _lower(program: Program, other: Program) -> bool:
    return program.peak < (1 - ENOUGH) * other.peak
