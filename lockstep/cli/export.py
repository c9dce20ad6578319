"""`lockstep export`: a run's weights, as transformers loads them."""

import argparse
import sys
from pathlib import Path
from typing import Any

from lockstep.errors import require
from lockstep.exits import DONE
from lockstep.flags import reader
from lockstep.weights.export import export

DTYPES = ("float32", "bfloat16", "float16")


def add(commands: Any) -> None:
    """The subcommand."""
    sub = commands.add_parser("export", description="Writes config.json, "
                              "model.safetensors and the tokenizer's files,\nif the run began with "
                              "some, for transformers to load.")  # fmt: skip
    sub.add_argument("run", metavar="RUN", help="the run's directory")
    sub.add_argument("--to", metavar="DIR", required=True, help="a new folder")
    sub.add_argument("--step", type=reader(int), metavar="N",
                     help="the checkpoint of this step (default: the newest)")  # fmt: skip
    sub.add_argument("--dtype", default="", metavar="|".join(DTYPES),
                     help="of the weights (default: the run's own)")  # fmt: skip
    sub.set_defaults(command=_export)


def _export(given: argparse.Namespace) -> int:
    known = given.dtype in ("", *DTYPES)
    require(known, "--dtype", given.dtype, f"unknown; use {', '.join(DTYPES)}")
    require(given.to != "", "--to", "''", "is empty; name a folder")

    def warn(problem: str) -> None:
        print(problem, file=sys.stderr)

    to = Path(given.to)
    done = export(Path(given.run), to, step=given.step, dtype=given.dtype, warn=warn)
    print(f"{done} is in {to}: AutoModelForCausalLM.from_pretrained({str(to)!r})")
    return DONE
