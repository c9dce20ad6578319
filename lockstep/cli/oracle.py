"""`lockstep oracle`: both twins against what llm.c's authors computed."""

import argparse
import math
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import twin
from lockstep.config.kinds import require_exact
from lockstep.errors import require
from lockstep.exits import DONE, FAILED
from lockstep.flags import add_device, read_device
from lockstep.judge.tolerances import FLOOR, NOISE
from lockstep.judge.verdict import Finding, Outcome, Verdict, locate
from lockstep.parity import oracle
from lockstep.parity.side import Side
from lockstep.parity.toy import require_devices
from lockstep.weights import llmc, llmc_state


def add(commands: Any) -> None:
    """The subcommand."""
    sub = commands.add_parser(
        "oracle",
        description="Holds both twins, in float64, against llm.c's debug state: logits, loss,\n"
        "the gradient of every tensor, and the losses of its first steps; by bounds\n"
        "derived from the lengths of float32 sums.",
        epilog="example:\n  lockstep oracle gpt2_124M.bin gpt2_124M_debug_state.bin",
    )
    sub.add_argument("weights", metavar="WEIGHTS", help="llm.c's checkpoint, such as gpt2_124M.bin")
    sub.add_argument("state", metavar="STATE", help="its debug state, gpt2_124M_debug_state.bin")
    sub.add_argument("--losses", default="", metavar="X,X,...",
                     help="what llm.c's train_gpt2.py prints for the first steps on that batch; "
                     "its test_gpt2.cu has ten (default: not compared)")  # fmt: skip
    add_device(sub, "where the twins run")
    sub.set_defaults(command=_oracle)


def _oracle(given: argparse.Namespace) -> int:
    require_exact(given.device, "use one of")
    device = read_device(given)
    losses = [text.strip() for text in given.losses.split(",")] if given.losses else []
    right = len(losses) <= 100 and all(map(_is_loss, losses))
    require(right, "--losses", given.losses, "are no losses; give up to 100 numbers, 5.27,4.06")
    source = llmc.open_file(Path(given.weights), "WEIGHTS")
    state = llmc_state.read(Path(given.state), source.model)
    steps = len(losses) or oracle.STEPS
    rows, length = state.tokens.shape
    config = oracle.config_of(source.model, (rows, length), steps, device)
    stored = source.weights(config.model)
    dtype = next(iter(stored.values())).dtype.name
    weights = {name: stored.pop(name).astype(np.float64) for name in list(stored)}
    with ExitStack() as stack:
        jax, torch = (
            stack.enter_context(closing(Side(name, module, remember=False)))
            for name, module in twin.MODULES.items()
        )
        require_devices((jax, torch), device)
        truth = oracle.derive(torch, config, weights, state, rounded=dtype == "bfloat16")
        other = oracle.ask(jax, config, weights, state)
    print(f"{source.model.model}: {rows} rows of {length} tokens; weights in {dtype}")
    print(*_bounds(truth), sep="\n")
    return _say([
        locate("torch", oracle.judge(truth, state, losses)),
        locate("jax", oracle.judge(truth._replace(answer=other), state, losses)),
        locate("jax against torch", oracle.compare_twins(other, truth.answer)),
    ])  # fmt: skip


def _is_loss(text: str) -> bool:
    try:
        return len(text) < 40 and math.isfinite(float(text)) and "e" not in text.lower()
    except ValueError:
        return False


def _bounds(truth: oracle.Truth) -> list[str]:
    """What a difference must be to be seen."""
    allowed = {name: NOISE.bound * (noise + FLOOR) for name, noise in truth.noise.items()}
    loss, logits, *grads = allowed.values()
    lines = [f"called different, relative: loss {loss:.1g}, logits {logits:.1g}, "
             f"gradients {min(grads):.1g} to {max(grads):.1g}"]  # fmt: skip
    losses = " ".join(f"{loss:.6f}" for loss in truth.answer.losses)
    return [*lines, f"losses of {len(truth.answer.losses)} steps: {losses}"]


def _say(compared: list[list[Finding]]) -> int:
    """Whatever differs; of a comparison in which nothing does, what comes nearest to it."""
    status = DONE
    for findings in compared:
        wrong = [finding for finding in findings if finding.verdict is Verdict.DIFFERENT]
        print(*(wrong or [Outcome(findings).worst]), sep="\n")
        status = FAILED if wrong else status
    return status
