"""`python -m benchmarks.memory jax|torch [--fresh]`: steps measured on a CPU, for `benchmarks.fit`.

Bytes are the framework's own account of one step (`Twin.step_bytes`). Shapes are drawn, each with
rows enough for some hundred MB; fresh ones (`--fresh`) are wider and longer, and never fitted.
"""

import math
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cells import Flags
from benchmarks.suites import REMAT
from lockstep import results, twin
from lockstep.config import from_flags
from lockstep.config.policy import BYTES
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start
from lockstep.plan import shape
from lockstep.plan.setting import Setting

RESULTS = Path(__file__).parent / "results" / "memory.jsonl"
FAMILIES = ("gpt2", "tiny")
POLICIES = ("fp32", "bf16")
SPLITS = (1, 1, 2, 1)  # micro-batches, in turn
EACH, FRESH = 16, 3  # cells of a group, half of them fitted; fresh ones, none of them


class Range(NamedTuple):
    """What shapes are drawn from, and the bytes aimed at."""

    layers: tuple[int, ...] = (3, 4, 6, 8, 12)
    widths: tuple[tuple[int, int], ...] = ((128, 4), (192, 3), (256, 4), (384, 6))  # D and H
    contexts: tuple[int, ...] = (64, 128, 256)
    vocabularies: tuple[int, ...] = (256, 1024, 4096)
    bytes: tuple[float, float] = (220e6, 600e6)


DRAWN = Range()
DRAWN_FRESH = Range(
    layers=(4, 5, 9, 10), widths=((256, 4), (320, 5), (512, 8)), contexts=(128, 320, 512),
    vocabularies=(512, 8192), bytes=(400e6, 900e6),
)  # fmt: skip
# Rough bytes for each token: of a block, by remat, and of what is there once; only to draw rows by.
ROUGH = {"none": 150, "dots": 90, "sublayer": 12, "block": 5, "sqrt": 8}


def drawn(fresh: bool = False) -> list[Flags]:
    """The same cells for both frameworks."""
    random = np.random.Generator(np.random.Philox(int(fresh)))
    return [
        draw(random, DRAWN_FRESH if fresh else DRAWN,
             {"model": model, "policy": policy, "remat": remat,
              "accum": SPLITS[(number // 2 + 2 * fresh) % len(SPLITS)]})
        for model, policy, remat, number in product(
            FAMILIES, POLICIES, REMAT, range(FRESH if fresh else EACH)
        )
    ]  # fmt: skip


def draw(random: np.random.Generator, among: Range, group: Flags) -> Flags:
    flags = draw_shape(random, among, group)
    layers, remat = flags["n_layer"], group["remat"]
    segments = math.isqrt(layers)
    depth = layers - segments * (segments - 2) if remat == "sqrt" else layers
    token = flags["d_model"] * (ROUGH[remat] * depth + 150) + 10 * flags["vocab"]
    return with_rows(flags, random.uniform(*among.bytes), token)


def draw_shape(random: np.random.Generator, among: Range, group: Flags) -> Flags:
    """A group's cell without its rows."""
    d, heads = among.widths[random.integers(len(among.widths))]
    layers, context, vocab = (
        int(random.choice(x)) for x in (among.layers, among.contexts, among.vocabularies)
    )
    layout = "unroll" if group["remat"] == "none" else "scan"  # see docs/benchmarks.md, Remat
    return {**group, "n_layer": layers, "n_head": heads, "d_model": d, "context": context,
            "vocab": vocab, "layers": layout}  # fmt: skip


def with_rows(flags: Flags, size: float, token: float) -> Flags:
    """As many as take so many bytes, at `token` bytes a token."""
    return {**flags, "batch_size": max(1, round(size / (token * flags["context"])))}


def measure(framework: str, flags: Flags) -> dict[str, Any]:
    config = from_flags({**flags, "device": "cpu", "steps": 1}, accelerator=False)
    return {**flags, "step_bytes": start(framework, config).step_bytes(GPT.window(config, 0))}


def with_accumulators(framework: str, step: float, given: shape.Shape, how: Setting) -> float:
    """JAX has them between the steps too: what is measured of one step does not show them."""
    beside = framework == "jax" and how.accum > 1
    return step + BYTES[how.roles.param] * given.weights * beside


def read(name: str) -> list[Flags]:
    return results.read(RESULTS)[name]["cells"]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("framework", metavar="FRAMEWORK", help="jax, torch")
    parser.add_argument("--fresh", action="store_true", help="the cells that are never fitted")
    given = parser.parse_args(argv)
    twin.require_known(given.framework)
    cells, measured, began = drawn(given.fresh), [], time.perf_counter()
    for number, cell in enumerate(cells):
        measured.append(measure(given.framework, cell))
        print(f"[{number + 1}/{len(cells)}] {measured[-1]}", flush=True)
    name, seconds = given.framework + "-fresh" * given.fresh, time.perf_counter() - began
    results.put(RESULTS, [results.row(name, "cpu", seconds, cells=measured)])
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
