"""`python -m benchmarks.exported RUN`: what a run's exports weigh, cost and gain on a CPU.

Each contender computes the logits of the same tokens, in a process of its own on one core, in turns
with the others: both twins' forward pass in float32, model.jax, and model.onnx in float32 and in
int8. A row has its bytes, the seconds of each turn, the validation loss, and the text that it
writes greedily.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.process import say
from lockstep import results, twin
from lockstep.data import batches, corpus
from lockstep.data.batch import Batch
from lockstep.errors import UserError, require_range
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser, reader
from lockstep.process import ONE_THREAD, ROOT, ask, start_module
from lockstep.results import Row
from lockstep.run import checkpoint, directory
from lockstep.weights.onnx_export import FILE as ONNX
from lockstep.weights.onnx_export import export_onnx, mean_loss, run_file
from lockstep.weights.stablehlo import PROGRAM, WEIGHTS, export_stablehlo, forward_config

FILE = ROOT / "benchmarks" / "results" / "exported.jsonl"
TWINS = {"JAX twin": "jax", "PyTorch twin": "torch"}
EXPORTS = {"model.jax": "stablehlo", "model.onnx": "onnx", "model.onnx in int8": "int8"}
CONTENDERS = (*TWINS, *EXPORTS)
PROMPT, LENGTH = b"def ", 48  # bytes
Logits = Callable[[np.ndarray], np.ndarray]  # tokens (B, T) -> (B, T, V)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.exported", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's directory, of bytes")
    parser.add_argument("--turns", type=reader(int), default=60, metavar="N", help="(default: 60)")
    parser.add_argument("--out", default=str(FILE), metavar="FILE", help="(default: the recorded)")
    given = parser.parse_args(argv)
    require_range("--turns", given.turns, 1)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(given.run), Path(folder), given.turns)
    results.put(Path(given.out), measured)
    print(markdown({row["name"]: row for row in measured}))
    return DONE


def measure(run: Path, folder: Path, turns: int) -> list[Row]:
    """One row for each contender; the first turn is not counted."""
    for name, kind in EXPORTS.items():
        say(f"exporting {name}")
        if kind == "stablehlo":
            export_stablehlo(run, folder / kind, step=None, warn=say)
        else:
            export_onnx(run, folder / kind, step=None, int8=kind == "int8", warn=say)
    workers = {
        name: start_module("benchmarks.exported", "--worker", name, str(run), str(folder),
                           changes=ONE_THREAD, text=True, stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE)
        for name in CONTENDERS
    }  # fmt: skip
    figures = {name: json.loads(_answer(name, worker)) for name, worker in workers.items()}
    for turn in range(turns + 1):
        order = CONTENDERS if turn % 2 else CONTENDERS[::-1]
        for name in order:
            seconds = float(_answer(name, workers[name]))
            if turn:
                figures[name].setdefault("seconds", []).append(seconds)
    for worker in workers.values():
        worker.communicate()
    return [results.row(name, "cpu", None, **found) for name, found in figures.items()]


def _answer(name: str, worker: subprocess.Popen[str]) -> str:
    line = ask(worker, "")
    if not line:
        raise UserError(f"{name}: ended with status {worker.wait()}; see above")
    return line


def work(name: str, run: Path, folder: Path) -> int:
    """Answers the first line with what it is, each other with the seconds of a turn."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # for what a library prints
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config = directory.read_record(run).config
    held_out = batches.validation(config, corpus.load(**vars(config.data)).val)
    logits, size = open_contender(name, run, folder)
    tokens = held_out.tokens[0]
    about = {"bytes": size, "loss": mean_loss(logits, held_out),
             "text": write(logits, config.model.context), "model": config.model.model,
             "tokens": list(tokens.shape)}  # fmt: skip
    sys.stdin.readline()
    print(json.dumps(about), file=out)
    for _ in sys.stdin:
        began = time.perf_counter()
        logits(tokens)
        print(time.perf_counter() - began, file=out)
    return DONE


def open_contender(name: str, run: Path, folder: Path) -> tuple[Logits, int]:
    """Its logits, and the bytes of what is loaded for them."""
    if name in TWINS:
        config = forward_config(directory.read_record(run).config.model).replace(numerics="fast")
        state = checkpoint.latest(run, say)
        runner: Any = twin.load(TWINS[name], config)
        runner.load(state)
        size = sum(array.nbytes for array in state.params.values())

        def twin_logits(tokens: np.ndarray) -> np.ndarray:
            return np.asarray(runner.trainer.logits(runner.place(Batch(tokens, tokens)).tokens))

        return twin_logits, size
    kind = folder / EXPORTS[name]
    if name != PROGRAM:
        return run_file(kind / ONNX), (kind / ONNX).stat().st_size
    import jax
    from jax import export
    from safetensors.numpy import load_file

    program = jax.jit(export.deserialize(bytearray((kind / PROGRAM).read_bytes())).call)
    weights = jax.device_put(load_file(kind / WEIGHTS))
    size = sum((kind / file).stat().st_size for file in (PROGRAM, WEIGHTS))
    return lambda tokens: np.asarray(program(weights, tokens.astype(np.int32))), size


def write(logits: Logits, context: int) -> str:
    """Greedily, behind the prompt; what stands behind the text does not matter."""
    tokens = np.zeros((1, context), np.int32)
    tokens[0, : len(PROMPT)] = list(PROMPT)
    for i in range(len(PROMPT), len(PROMPT) + LENGTH):
        tokens[0, i] = logits(tokens)[0, i - 1].argmax()
    return bytes(tokens[0, len(PROMPT) : len(PROMPT) + LENGTH].tolist()).decode("latin-1")


def markdown(rows: dict[str, Row]) -> str:
    """The least time of all turns, which other load disturbs least."""
    head = ["", "MB", "validation loss", "text as PyTorch's", "ms, least", "of PyTorch's time"]
    base, lines = rows["PyTorch twin"], []
    for name, row in rows.items():
        least = min(row["seconds"])
        same = sum(a == b for a, b in zip(row["text"], base["text"]))
        lines.append([
            name, f"{row['bytes'] / 1e6:.1f}", f"{row['loss']:.5f}", f"{same} of {LENGTH} bytes",
            f"{least * 1e3:.1f}", f"{least / min(base['seconds']):.2f}",
        ])  # fmt: skip
    return tables.markdown(head, lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(work(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])))
    sys.exit(exit_status(main))
