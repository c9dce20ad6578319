"""`python -m benchmarks.memory jax|torch|fit`: measures, then fits, what `lockstep plan` knows.

Bytes are the framework's own account of one step (`Twin.step_bytes`). Shapes are drawn, each with
rows enough for some hundred MB. Every second cell is fitted; the others say how far the fit is off,
and so do fresh ones (`--fresh`), wider and longer, that were drawn when the terms stood.
"""

import json
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
from lockstep.config.policy import BYTES, resolve
from lockstep.errors import UserError, require
from lockstep.files import durable
from lockstep.flags import Parser
from lockstep.model.state import initial_state
from lockstep.parity.pair import GPT
from lockstep.plan import memory, shape
from lockstep.plan.setting import Setting

RESULTS = Path(__file__).parent / "results" / "memory.jsonl"
FAMILIES = ("gpt2", "tiny")
POLICIES = ("fp32", "bf16")
SPLITS = (1, 1, 2, 1)  # micro-batches, in turn
EACH, FRESH = 16, 3  # cells of a group, half of them fitted; fresh ones, none of them
STARTS, WEIGHT = 40, 0.1  # of a fit; how much what is expected counts
# Bytes a number that are expected: of torch reasoned, a logit with its softmax and its gradient, a
# residual and its gradient; of JAX counted in XLA's buffer assignment of shapes that are not here.
EXPECTED = {
    "torch": {"stream": 8.0, "logits": 10.0, "copies": 2.0, "inside": 16.0},
    "jax": {"stream": 16.0, "logits": 8.0, "copies": 4.0, "inside": 18.0, "attended": 40.0},
}
EXPECTED_BLOCKS = {"none": 25.0, "dots": 14.0, "sublayer": 8.0, "block": 4.0, "sqrt": 4.0}
COUNTED = 200e6  # bytes of state and step, from which a cell's error counts


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

Given = tuple[shape.Shape, Setting]


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
    d, heads = among.widths[random.integers(len(among.widths))]
    layers, context, vocab = (
        int(random.choice(x)) for x in (among.layers, among.contexts, among.vocabularies)
    )
    segments = math.isqrt(layers)
    depth = layers - segments * (segments - 2) if group["remat"] == "sqrt" else layers
    token = d * (ROUGH[group["remat"]] * depth + 150) + 10 * vocab
    rows = random.uniform(*among.bytes) / (token * context)
    layout = "unroll" if group["remat"] == "none" else "scan"  # see docs/benchmarks.md, Remat
    return {**group, "n_layer": layers, "n_head": heads, "d_model": d, "context": context,
            "vocab": vocab, "batch_size": max(1, round(rows)), "layers": layout}  # fmt: skip


def measure(framework: str, flags: Flags) -> dict[str, Any]:
    config = from_flags({**flags, "device": "cpu", "steps": 1}, accelerator=False)
    built = twin.load(framework, config)
    built.load(initial_state(config))
    return {**flags, "step_bytes": built.step_bytes(GPT.window(config, 0))}


def setting(framework: str, flags: Flags) -> Given:
    given = {name: value for name, value in flags.items() if name != "step_bytes"}
    config = from_flags({**given, "steps": 1}, accelerator=False)
    return shape.of_model(config.model), Setting(
        framework=framework, account=framework, roles=resolve(flags["policy"]),
        remat=flags["remat"], rows=flags["batch_size"], accum=flags["accum"],
    )  # fmt: skip


def step_bytes(framework: str, flags: Flags) -> float:
    """As measured, with JAX's accumulators."""
    return with_accumulators(framework, flags["step_bytes"], *setting(framework, flags))


def with_accumulators(framework: str, step: float, given: shape.Shape, how: Setting) -> float:
    """JAX has them between the steps too: what is measured of one step does not show them."""
    beside = framework == "jax" and how.accum > 1
    return step + BYTES[how.roles.param] * given.weights * beside


def fit(framework: str, cells: list[Flags]) -> dict[str, float]:
    """Constants of one group: least squares of the relative error, none below zero.

    Which moment a cell's peak is at is not known before: each cell is fitted at the moment that the
    last constants give, until none moves. That depends on where it begins, so it begins at several
    places. A term that decides no cell's peak stays near what is expected of it.
    """
    random = np.random.Generator(np.random.Philox(1))
    expected = EXPECTED[framework] | {"blocks": EXPECTED_BLOCKS[cells[0]["remat"]]}
    starts = [expected, *(
        dict(zip(expected, random.uniform(0, 60, len(expected)))) for _ in range(STARTS)
    )]  # fmt: skip
    settings = [setting(framework, cell) for cell in cells]
    peaks = np.array([step_bytes(framework, cell) for cell in cells])
    prior = np.array(list(expected.values()))

    def cost(constants: dict[str, float]) -> float:
        found = np.array([memory.step_bytes(*given, constants) for given in settings])
        away = np.array([constants[name] for name in expected]) / prior - 1
        return float(((found / peaks - 1) ** 2).sum() + WEIGHT**2 * (away**2).sum())

    best = min((settle(settings, peaks, prior, start) for start in starts), key=cost)
    return {name: float(f"{value:.4g}") for name, value in best.items()}


def settle(settings: list[Given], peaks: np.ndarray, prior: np.ndarray,
           constants: dict[str, float]) -> dict[str, float]:  # fmt: skip
    amounts = [memory.terms(*given) for given in settings]
    before: list[str] = []
    for _ in range(30):
        chosen = []
        for given in settings:
            sums = {m: sum(t.values()) for m, t in memory.moments(*given, constants).items()}
            chosen.append(max(sums, key=lambda moment: sums[moment]))
        if chosen == before:
            break
        before = chosen
        rows = np.array([
            [a[name] if name in memory.MOMENTS[moment] else 0.0 for name in constants]
            for a, moment in zip(amounts, chosen)
        ])  # fmt: skip
        known = np.array([
            sum(memory.exact_bytes(*given, moment).values())
            for given, moment in zip(settings, chosen)
        ])  # fmt: skip
        found = nonnegative(
            np.concatenate([rows / peaks[:, None], WEIGHT * np.diag(1 / prior)]),
            np.concatenate([1 - known / peaks, np.full(len(prior), WEIGHT)]),
        )
        constants = dict(zip(constants, map(float, found)))
    return constants


def nonnegative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """x >= 0 with rows x near `wanted`: what would be negative is left out, the worst first."""
    x, used = np.zeros(rows.shape[1]), np.ones(rows.shape[1], bool)
    while used.any():
        found, *_ = np.linalg.lstsq(rows[:, used], wanted, rcond=None)
        if (found >= 0).all():
            x[used] = found
            break
        worst = (found * rows[:, used].max(axis=0)).argmin()
        used[np.flatnonzero(used)[worst]] = False
    return x


def groups(framework: str, cells: list[Flags]) -> dict[str, list[Flags]]:
    """Of each sorted, so that every second cell has every vocabulary and depth.

    Three layers are one segment, which is no sqrt.
    """
    found: dict[str, list[Flags]] = {}
    order = ("vocab", "n_layer", "context", "d_model", "accum", "batch_size")
    for cell in sorted(cells, key=lambda cell: [cell[name] for name in order]):
        if not (cell["remat"] == "sqrt" and cell["n_layer"] < 4):
            found.setdefault(memory.key(*setting(framework, cell)), []).append(cell)
    return found


def error(framework: str, cell: Flags, constants: dict[str, float]) -> float | None:
    """Of state and step together, relative; None where they are too small to count."""
    given, how = setting(framework, cell)
    held = memory.state_bytes(given, how.roles)
    total = held + step_bytes(framework, cell)
    predicted = held + memory.step_bytes(given, how, constants)
    return predicted / total - 1 if total >= COUNTED else None


def read(name: str) -> list[Flags]:
    return results.read(RESULTS)[name]["cells"]


def fit_all() -> dict[str, Any]:
    """The constants of every group; the errors on the cells that were not fitted, and on fresh."""
    fitted, errors, fresh = {}, {}, {}
    for framework in twin.MODULES:
        later = groups(framework, read(f"{framework}-fresh"))
        for name, group in groups(framework, read(framework)).items():
            fitted[name] = fit(framework, group[::2])
            errors[name] = off(framework, group[1::2], fitted[name])
            fresh[name] = off(framework, later[name], fitted[name])
    return {"groups": fitted, "errors": errors, "fresh": fresh}


def off(framework: str, cells: list[Flags], constants: dict[str, float]) -> list[float]:
    found = [error(framework, cell, constants) for cell in cells]
    return [round(e, 4) for e in found if e is not None]


def markdown(content: dict[str, Any]) -> str:
    """Of each group the errors on cells that were not fitted."""
    lines = [
        "| group | cells | median error | worst | fresh cells | worst |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, errors in content["errors"].items():
        fresh = content["fresh"][name]
        row = [name, str(len(errors)), f"{np.median(np.abs(errors)):.1%}", worst(errors),
               str(len(fresh)), worst(fresh)]  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def worst(errors: list[float]) -> str:
    return f"{max(errors, key=abs):+.1%}"


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("what", metavar="WHAT", help="jax, torch: measure; fit")
    parser.add_argument("--fresh", action="store_true", help="the cells that are never fitted")
    try:
        given = parser.parse_args(argv)
        names = (*twin.MODULES, "fit")
        require(given.what in names, "WHAT", given.what, f"unknown; use {', '.join(names)}")
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    if given.what != "fit":
        cells, measured, began = drawn(given.fresh), [], time.perf_counter()
        for number, cell in enumerate(cells):
            measured.append(measure(given.what, cell))
            print(f"[{number + 1}/{len(cells)}] {measured[-1]}", flush=True)
        name, seconds = given.what + "-fresh" * given.fresh, time.perf_counter() - began
        results.put(RESULTS, [results.row(name, "cpu", seconds, cells=measured)])
        return 0
    content = fit_all()
    durable.replace(memory.CONSTANTS, json.dumps(content, indent=1) + "\n")
    print(markdown(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
