"""Where two twins differ: `lockstep check` on the twins themselves, in float64 on the CPU."""

import json
import tempfile
from pathlib import Path

from lockstep.check import report
from lockstep.check.check import Result
from lockstep.check.compare import Options, compare_programs
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.model.params import shapes
from lockstep.parity.side import Side
from lockstep.process import ROOT

PROGRAM = """
import importlib, json, sys
sys.path.insert(0, {root!r})
from lockstep.config import Config
from lockstep.data import batches, corpus
from lockstep.parity.worker import plant

config = Config.from_json(json.loads({config!r}))
plant({module!r}, {variant!r})
program = importlib.import_module("mutants.{framework}_program")
globals().update(program.functions(config))
tokens = corpus.load(**vars(config.data)).train

def batch(step):
    fields = batches.of_step(config, tokens, step).select(0)._asdict()
    return {{name: x for name, x in fields.items() if x is not None}}
"""


def describe_difference(reference: Side, other: Side, config: Config) -> list[str]:
    """Lines: the roots of what differs, or that nothing does there."""
    if len(config.trained) < len(shapes(config.model)):  # each program trains all that it has
        return ["cannot be located: weights are frozen"]
    try:
        result = check_twins(reference, other, config)
    except UserError as error:
        return [f"cannot be located: {error}"]
    if result.verdict != "different":
        there = "" if config.run.device in ("auto", "cpu") else ", or of the device"
        return ["no module differs in float64: a matter of precision, accumulation, remat, dropout "
                f"or the loss scale{there}"]  # fmt: skip
    return report.roots(result)


def check_twins(reference: Side, other: Side, config: Config) -> Result:
    """One micro-batch without dropout and remat: what differs all the same is a module, its
    gradient, or the optimizer. Raises UserError."""
    plain = config.replace(
        policy="fp64", eval_policy="fp64", numerics="strict", remat="none", layers="unroll",
        accum=1, dropout=0.0, device="cpu",  # the recorder's, whatever the twins ran on
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="lockstep-place-") as folder:
        files = [str(_write(Path(folder), side, plain)) for side in (reference, other)]
        return compare_programs(files[0], files[1], Options(steps=2, initial=True))


def _write(folder: Path, side: Side, config: Config) -> Path:
    """Writes a program's file."""
    file = folder / f"twin_{side.name.replace(' ', '_')}.py"
    named = {"framework": side.framework, "module": side.module, "variant": side.variant}
    own = json.dumps(side.place(config).to_json())
    file.write_text(PROGRAM.format(root=str(ROOT), config=own, **named), encoding="utf-8")
    return file
