"""`lockstep export`: write a run's model as transformers or onnxruntime loads it."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from lockstep.config.fields import require_choice
from lockstep.errors import require
from lockstep.exits import DONE
from lockstep.flags import add_command, add_optional, add_text
from lockstep.weights.export import export
from lockstep.weights.onnx_export import export_onnx

FORMATS = {  # and the dtypes of weights that each has
    "safetensors": ("float32", "bfloat16", "float16"),
    "onnx": ("float32", "int8"),
}


def add(commands: Any) -> None:
    """Add the subcommand."""
    sub = add_command(
        commands, "export", _export,
        "Writes config.json, model.safetensors and the tokenizer's files,\n"
        "if the run began with some, for transformers to load; or model.onnx for\nonnxruntime.",
        "lockstep export runs/mine --to mine-onnx --format onnx --dtype int8",
    )  # fmt: skip
    sub.add_argument("run", metavar="RUN", help="the run's directory")
    add_optional(sub, "--to", "DIR", "a new folder", required=True)
    add_optional(sub, "--step", "N", "the checkpoint of this step (default: the newest)", int)
    about = "for transformers or for onnxruntime"
    add_text(sub, "--format", "|".join(FORMATS), about, "safetensors")
    add_text(
        sub,
        "--dtype",
        "float32|bfloat16|float16|int8",
        "dtype of the weights; onnx has float32 and int8 (default: the run's own; onnx's: float32)",
    )
    about = "split into files of at most this size, such as 5GB (default: one file)"
    add_text(sub, "--max-shard-size", "SIZE", about)
    sub.add_argument("--adapters", action="store_true",
                     help="LoRA's matrices only, for PEFT (default: merged weights)")  # fmt: skip


def _export(given: argparse.Namespace) -> int:
    require_choice("--format", given.format, tuple(FORMATS))
    dtypes = FORMATS[given.format]
    known = given.dtype in ("", *dtypes)
    remedy = f"--format {given.format} has none; use {', '.join(dtypes)}"
    require(known, "--dtype", given.dtype, remedy)
    require(given.to != "", "--to", "''", "is empty; name a folder")

    def warn(problem: str) -> None:
        print(problem, file=sys.stderr)

    run, to = Path(given.run), Path(given.to)
    if given.format != "safetensors":
        others = {"--max-shard-size": given.max_shard_size, "--adapters": given.adapters}
        for flag, value in others.items():
            require(not value, flag, value, "needs --format safetensors; drop it")
    if given.format == "onnx":
        int8 = given.dtype == "int8"
        print(export_onnx(run, to, step=given.step, int8=int8, warn=warn).text(to))
        return DONE
    done = export(
        run, to, step=given.step, dtype=given.dtype, warn=warn,
        shard_bytes=_bytes(given.max_shard_size), only_adapters=given.adapters,
    )  # fmt: skip
    load = "AutoPeftModelForCausalLM" if given.adapters else "AutoModelForCausalLM"
    print(f"{done} is in {to}: {load}.from_pretrained({str(to)!r})")
    return DONE


def _bytes(size: str) -> int | None:
    """Read a size as transformers does: 5GB is 5 * 10^9. None for no limit."""
    if not size:
        return None
    match = re.fullmatch(r"([0-9]{1,15})([KMGT]?)B?", size.upper())
    count = int(match[1]) * 1000 ** " KMGT".index(match[2] or " ") if match else 0
    require(count > 0, "--max-shard-size", size, "is no size; use one such as 5GB")
    return count
