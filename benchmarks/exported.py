"""What a run's exports weigh, cost and gain on a CPU.

Each contender computes the logits of the same tokens on one core, in turns with the others: both
twins' forward pass in float32, model.jax, and model.onnx in float32 and in int8. A row has its
bytes, the seconds of each turn, the validation loss, and the text that it writes greedily.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.jobs import say
from lockstep import twin
from lockstep.data import batches, corpus
from lockstep.data.batch import Batch
from lockstep.results import Row
from lockstep.run import checkpoint, directory
from lockstep.weights.onnx_export import FILE as ONNX
from lockstep.weights.onnx_export import export_onnx, mean_loss, run_file
from lockstep.weights.stablehlo import PROGRAM, WEIGHTS, export_stablehlo, forward_config

RUN = "runs/torch-tiny-fp32"  # of `python -m torch_ref.train --policy fp32`
TWINS = {"JAX twin": "jax", "PyTorch twin": "torch"}
EXPORTS = {"model.jax": "stablehlo", "model.onnx": "onnx", "model.onnx in int8": "int8"}
BASE = "PyTorch twin"
TURNS = 60
PROMPT, LENGTH = b"def ", 48  # bytes
Logits = Callable[[np.ndarray], np.ndarray]  # tokens (B, T) -> (B, T, V)


def measure(contender: str, run: str) -> dict[str, Any]:
    """One contender beside the PyTorch twin, in turns; the first turn is not counted."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config = directory.read_record(Path(run)).config
    held_out = batches.validation(config, corpus.load(**vars(config.data)).val)
    tokens = held_out.tokens[0]
    with tempfile.TemporaryDirectory() as folder:
        opened = {name: open_contender(name, Path(run), Path(folder)) for name in (contender, BASE)}
        times: dict[str, list[float]] = {name: [] for name in opened}
        for turn in range(TURNS + 1):
            for name in sorted(opened, reverse=bool(turn % 2)):
                began = time.perf_counter()
                opened[name][0](tokens)
                times[name].append(time.perf_counter() - began)
        logits, size = opened[contender]
        return {
            "bytes": size, "loss": mean_loss(logits, held_out), "seconds": times[contender][1:],
            "base_seconds": times[BASE][1:], "text": write(logits, config.model.context),
            "model": config.model.model, "tokens": list(tokens.shape),
        }  # fmt: skip


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
    if name != PROGRAM:
        export_onnx(run, folder, step=None, int8=EXPORTS[name] == "int8", warn=say)
        return run_file(folder / ONNX), (folder / ONNX).stat().st_size
    import jax
    from jax import export
    from safetensors.numpy import load_file

    export_stablehlo(run, folder, step=None, warn=say)
    program = jax.jit(export.deserialize(bytearray((folder / PROGRAM).read_bytes())).call)
    weights = jax.device_put(load_file(folder / WEIGHTS))
    size = sum((folder / file).stat().st_size for file in (PROGRAM, WEIGHTS))
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
    lines = []
    for name, row in rows.items():
        base, least = rows.get(BASE, row), min(row["seconds"])
        beside = row["base_seconds"] if "base_seconds" in row else base["seconds"]
        same = sum(a == b for a, b in zip(row["text"], base["text"]))
        lines.append([
            name, f"{row['bytes'] / 1e6:.1f}", f"{row['loss']:.5f}", f"{same} of {LENGTH} bytes",
            f"{least * 1e3:.1f}", f"{least / min(beside):.2f}",
        ])  # fmt: skip
    return tables.markdown(head, lines)
