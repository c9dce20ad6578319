"""`lockstep export`: a run's weights, as transformers loads them."""

import argparse
import re
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
    sub.add_argument("--max-shard-size", default="", metavar="SIZE",
                     help="several files, none larger, such as 5GB (default: one)")  # fmt: skip
    sub.add_argument("--adapters", action="store_true",
                     help="LoRA's alone, for PEFT (default: merged with the weights)")  # fmt: skip
    sub.set_defaults(command=_export)


def _export(given: argparse.Namespace) -> int:
    known = given.dtype in ("", *DTYPES)
    require(known, "--dtype", given.dtype, f"unknown; use {', '.join(DTYPES)}")
    require(given.to != "", "--to", "''", "is empty; name a folder")

    def warn(problem: str) -> None:
        print(problem, file=sys.stderr)

    to = Path(given.to)
    done = export(
        Path(given.run), to, step=given.step, dtype=given.dtype, warn=warn,
        shard_bytes=_bytes(given.max_shard_size), only_adapters=given.adapters,
    )  # fmt: skip
    load = "AutoPeftModelForCausalLM" if given.adapters else "AutoModelForCausalLM"
    print(f"{done} is in {to}: {load}.from_pretrained({str(to)!r})")
    return DONE


def _bytes(size: str) -> int | None:
    """As transformers reads them: 5GB is 5 * 10^9. None for no limit."""
    if not size:
        return None
    match = re.fullmatch(r"([0-9]{1,15})([KMGT]?)B?", size.upper())
    count = int(match[1]) * 1000 ** " KMGT".index(match[2] or " ") if match else 0
    require(count > 0, "--max-shard-size", size, "is no size; use one such as 5GB")
    return count
