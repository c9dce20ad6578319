"""`lockstep batch`: the decoded batch of a step, with its masks."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.data import batches, decoding
from lockstep.data.batch import Batch
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import printable, require_range
from lockstep.exits import DONE
from lockstep.flags import add_command, add_optional, add_text, reader
from lockstep.run import directory
from lockstep.train import trainer
from lockstep.weights import about


def add(commands: Any) -> None:
    """Adds the subcommand."""
    sub = add_command(
        commands, "batch", _batch,
        "Shows the rows of a step's batch: [[...]] counts as targets; without\n"
        "brackets all but the first token do.",
        "lockstep batch runs/jax-tiny-bf16 120 --micro-batch 1",
    )  # fmt: skip
    sub.add_argument("run", metavar="RUN", help="the run's directory")
    sub.add_argument("step", metavar="STEP", type=reader(int), help="the optimizer step, from 1")
    add_optional(sub, "--micro-batch", "N", "show only this one, from 1 (default: all)", int)
    about = "show only this device of the mesh, from 0 (default: all)"
    add_optional(sub, "--rank", "N", about, int)
    add_text(sub, "--tokenizer", "DIR", "a folder with a tokenizer.json (default: the run's)")


def _batch(given: argparse.Namespace) -> int:
    run = Path(given.run)
    config = directory.read_record(run).config
    require_range("STEP", given.step, 1, config.optim.steps)
    accum, size = config.optim.accum, config.mesh.size
    require_range("--micro-batch", given.micro_batch or 1, 1, accum)
    require_range("--rank", given.rank or 0, 0, size - 1)
    words = decoding.of_run(config.data, run / about.FOLDER, given.tokenizer)
    data = trainer.load_data(config, run)
    window = batches.of_step(config, data.train, given.step - 1)
    for number, batch in enumerate(window.split(), 1):
        if given.micro_batch in (None, number):
            print(f"micro-batch {number} of {accum}")
            print(*_rows(config, batch, words, given.rank), sep="\n")
    return DONE


def _rows(config: Config, batch: Batch, words: Tokenizer | None, rank: int | None) -> Iterator[str]:
    """Show one micro-batch, (B, T): device and row, then each document."""
    size = config.optim.batch_size
    tokens, targets, _, segments = batch
    counts = batch.expand_counts()
    for row in range(len(tokens)):
        device, place = divmod(row, size)
        if rank not in (None, device):
            continue
        counted = int(counts[row].sum())
        yield f"rank {device}, row {place}: {counted} of {targets.shape[1]} targets count"
        parts = np.ones(targets.shape[1], int) if segments is None else segments[row]
        for document in range(1, parts.max() + 1):
            here = row, parts == document
            yield f"  | {_decode(tokens[here], targets[here], counts[here], words)}"


def _decode(
    tokens: np.ndarray, targets: np.ndarray, counts: np.ndarray, words: Tokenizer | None
) -> str:
    """Decodes the tokens and the last target, which is no row's token."""
    whole = np.append(tokens, targets[-1:][counts[-1:]])
    counts = np.append(False, counts)[: len(whole)]
    if words is None:
        return " ".join(map(str, whole.tolist()))
    if counts[1:].all():
        return printable(words.decode(whole))
    return printable(mark(whole, counts, words))


def mark(tokens: np.ndarray, counts: np.ndarray, words: Tokenizer) -> str:
    """Decode tokens, what counts in [[...]]."""
    edges = np.flatnonzero(np.diff(counts)) + 1
    runs = zip(np.split(tokens, edges), np.split(counts, edges))
    return "".join(f"[[{words.decode(t)}]]" if c[0] else words.decode(t) for t, c in runs)
