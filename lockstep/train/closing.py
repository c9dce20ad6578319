"""The closing lines of a run: its losses, a sample, commands to try next."""

import contextlib
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lockstep.config import Config, to_flags
from lockstep.config.autotune import NONE
from lockstep.data import corpus
from lockstep.data.corpus import Corpus
from lockstep.files import durable
from lockstep.run import checkpoint, directory
from lockstep.run.runlog import clock
from lockstep.train import sampling
from lockstep.twin import MODULES, Twin, trainer_module


def text(
    config: Config, twin: Twin, run: Path, losses: Mapping[int, float], seconds: float,
    sample: Sequence[str],
) -> str:  # fmt: skip
    """Writes the closing lines.

    Args:
        losses: the validation losses by step, from the first evaluation to the last.
        sample: the lines of `sample_lines`.
    """
    out, steps = shlex.quote(str(run)), config.optim.steps
    first, *_, last = (losses[step] for step in (min(losses), max(losses)))
    lines = [
        f"validation loss {first:.4f} -> {last:.4f} nats a token after {steps} "
        f"steps, {clock(seconds)}"
    ]
    best = checkpoint.best_of(checkpoint.listing(run), losses)
    if best and checkpoint.step_of(best) != steps:
        step = checkpoint.step_of(best)
        lines.append(f"the best of its checkpoints is that of step {step}: {losses[step]:.4f}")
    lines += sample
    others = [trainer_module(name) for name in MODULES if name != twin.framework]
    lines += [
        f"the run is in {out}: config.json, log.jsonl, checkpoints/",
        "next:",
        f"  {_python()} -m lockstep sample {out} --prompt 'class '",
        *[f"  {_python()} -m lockstep export {out} --to {out}-hf"] * bool(config.run.init),
        "  # the same run in the other framework:",
        f"  {command(others[0], config.replace(autotune=NONE))}",  # it has ways of its own
    ]
    return "\n".join(lines)


def sample_lines(
    config: Config, twin: Twin, data: Corpus, losses: Mapping[int, float], run: Path | None
) -> list[str]:
    """Write a sample; [] unless the data is one stream of bytes, and the last loss finite.

    Every rank calls it, because all compute the logits.

    Args:
        run: its folder keeps the text, too, where the disk has room.
    """
    stream = isinstance(data.train, np.ndarray) and data.vocab <= corpus.BYTES
    if not (stream and math.isfinite(losses[max(losses)])):
        return []
    written = sample(config, twin, data)
    if run:
        with contextlib.suppress(OSError):
            durable.replace(run / directory.SAMPLE, written)
    return ["a sample:", *_quote(written), ""]


def sample(config: Config, twin: Twin, data: Corpus) -> str:
    prompt = b"def " if config.data.data == "stdlib" else bytes(data.val[:8])
    written = sampling.sample(twin, prompt, length=160, context=config.model.context)
    return sampling.to_terminal(prompt + bytes(written))


def _quote(text: str) -> list[str]:
    return [f"  | {line}" for line in text.split("\n")]


def command(module: str, config: Config) -> str:
    """Write the command that trains a config; PyTorch takes a process for each device."""
    ranks = f"torch.distributed.run --nproc-per-node {config.mesh.size} -m "
    alone = config.mesh.size == 1 or module != trainer_module("torch")
    return f"{_python()} -m {'' if alone else ranks}{module} {shlex.join(to_flags(config))}"


def _python() -> str:
    """Write this interpreter's path as one would type it: `make train` activates no environment."""
    path = Path(sys.executable)
    here = path.is_relative_to(Path.cwd())
    return shlex.quote(str(path.relative_to(Path.cwd()))) if here else "python"
