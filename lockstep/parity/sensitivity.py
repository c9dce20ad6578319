"""`lockstep sensitivity`: each module's error in half precision, and its time in float32.

One at a time, in each framework: the error of the gradient against float64 when only this module
is in half precision (alone), and when only it is not (without); of all layers' modules of one kind
also the time of a step with them as islands, over that with none.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from lockstep import results
from lockstep.config import Config, islands
from lockstep.errors import require
from lockstep.model.params import Arrays
from lockstep.parity.case import Case
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side, closing_all
from lockstep.parity.toy import require_devices

DEFAULTS: dict[str, Any] = {
    "model": "tiny",
    "batch_size": 8,
    "accum": 1,
    "remat": "none",
    "loss_scale_init": 2.0**13,
}
BATCHES = 8
ROUNDS, WINDOWS = 5, 4  # of interleaved timings; steps in each turn, of which the first may compile
# An island is worth its time where it removes so much of the gradient's error, for so much of the
# step's time.
REMOVED, SLOWER = 0.1, 0.1

Errors = dict[str, float]  # of the gradient and of the loss
Row = dict[str, Any]  # of a module or a kind: alone, without; of a kind also time
Say = Callable[[str], None]


def run(config: Config, frameworks: list[str], out: Path | None, say: Say) -> None:
    """Prints each framework's ranking and puts its row as soon as it is measured."""
    sides = [Side(framework, GPT.modules[framework], remember=False) for framework in frameworks]
    with closing_all(sides):
        require_devices(sides, config.run.device)
        case = strict_case(sides[0], sides[-1], config)
        for side in sides:
            began = perf_counter()
            result = measure(side, case, config)
            seconds = perf_counter() - began
            for line in report(side.framework, config, result):
                say(line)
            if out:
                own = side.place(config)
                row = {"config": own.to_json(), **result}
                results.put(out, [results.row(side.framework, own.run.device, seconds, **row)])
                say(f"written: {out}")


def strict_case(a: Side, b: Side, config: Config) -> Case:
    """Makes the configuration in which errors are measured.

    Raises:
        UserError: the policy has nothing to keep in float32.
    """
    narrow = any(r.mixed or r.tf32 or r.recipe or r.grads for r in config.precision.all_roles)
    require(narrow, "--policy", config.precision.policy, "has nothing to keep in float32")
    scale = min(config.precision.loss_scale_init, DEFAULTS["loss_scale_init"])
    plain = {"remat": "none", "layers": "unroll", "accum": 1, "dropout": 0.0}
    strict = config.replace(numerics="strict", attention="auto", loss_scale_init=scale, **plain)
    return Case(pair=GPT, a=a, b=b, config=strict)


def error_of(side: Side, case: Case) -> Callable[[list[str]], Errors]:
    """Measures the errors with these modules as islands."""
    batches = case.batches(BATCHES)
    truth = side.loss_and_grads(case.exactly(case.config), case.trained, batches)

    def error(wide: list[str]) -> Errors:
        some = case.config.replace(fp32_islands=",".join(wide))
        return errors(side.loss_and_grads(some, case.trained, batches), truth)

    return error


def measure(side: Side, case: Case, config: Config) -> dict[str, Any]:
    """`case` has the config of the errors, strict numerics; `config` is the one that is timed."""
    names = config.model.matmuls
    kinds = islands.by_kind(names)
    error = error_of(side, case)

    def row(label: str, group: list[str]) -> Row:
        print(f"{side.framework}: {label}", file=sys.stderr)
        others = [name for name in names if name not in group]
        return {"alone": error(others), "without": error(group)}

    of_kinds = {kind: row(kind, group) for kind, group in kinds.items()}
    of_modules = {name: of_kinds.get(name) or row(name, [name]) for name in names}
    for kind, time in times(side, case, config, list(kinds)).items():
        of_kinds[kind]["time"] = time
    result = {"all": error([]), "none": error(names), "kinds": of_kinds, "modules": of_modules}
    return result | {"together": {"without": error(worth(result))}}


def errors(ours: tuple[np.ndarray, Arrays], truth: tuple[np.ndarray, Arrays]) -> Errors:
    """Computes relative errors, |ours - truth| / |truth|, of the gradients and the loss.

    All gradients are one vector, with the geometric mean over the batches. The loss may be right by
    chance, so its errors have the arithmetic mean.
    """
    (loss, grads), (true_loss, true_grads) = ours, truth
    gap = {name: np.subtract(grads[name], x, dtype=np.float64) for name, x in true_grads.items()}
    with np.errstate(divide="ignore"):
        gradient = np.exp(np.log(_norms(gap) / _norms(true_grads)).mean())
    return {"gradient": float(gradient), "loss": float(np.abs(loss / true_loss - 1).mean())}


def _norms(arrays: Arrays) -> np.ndarray:
    """Computes the norm over all tensors (..., K): (K,)."""
    columns = [np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in arrays.values()]
    return np.linalg.norm(np.concatenate(columns), axis=0)


def times(side: Side, case: Case, config: Config, kinds: list[str]) -> dict[str, float]:
    """Times a step with an island over one without, in turns; returns the median."""
    seconds: dict[str, list[float]] = {patterns: [] for patterns in ("", *kinds)}
    windows = case.windows(WINDOWS, config)
    for _ in range(ROUNDS):
        for patterns, medians in seconds.items():
            timed = config.replace(fp32_islands=patterns)
            medians.append(float(np.median(side.seconds(timed, case.trained, windows))))
    base = np.array(seconds[""])
    return {kind: float(np.median(np.array(seconds[kind]) / base)) for kind in kinds}


def removed_share(result: dict[str, Any], row: Row) -> float:
    """Returns the share of the gradient's error that an island removes; it may be negative."""
    return 1 - row["without"]["gradient"] / result["all"]["gradient"]


def worth(result: dict[str, Any]) -> list[str]:
    """Lists the kinds worth an island, or only those modules of a kind that remove enough."""
    chosen: list[str] = []
    for kind, row in rank(result["kinds"]):
        if removed_share(result, row) >= REMOVED and row["time"] <= 1 + SLOWER:
            modules = [name for name in result["modules"] if islands.kind(name) == kind]
            enough = [n for n in modules if removed_share(result, result["modules"][n]) >= REMOVED]
            chosen += enough or [kind]
    return chosen


def rank(rows: dict[str, Row]) -> list[tuple[str, Row]]:
    """Ranks modules by error, the largest first."""
    return sorted(rows.items(), key=lambda item: -item[1]["alone"]["gradient"])


def sentence(framework: str, result: dict[str, Any]) -> str:
    rule = f"at least {REMOVED:.0%} of the gradient's error for at most {SLOWER:.0%} more time"
    chosen = worth(result)
    if not chosen:
        return f"{framework}: no island is worth its time; none removes {rule}."
    together = f"{removed_share(result, result['together']):.0%}"
    return (
        f"{framework}: --fp32-islands {','.join(chosen)} is worth its time. "
        f"Each removes {rule}, together they remove {together}."
    )


def report(framework: str, config: Config, result: dict[str, Any]) -> list[str]:
    """Reports the rankings of kinds and of single modules, and a recommendation."""
    policy, model = config.precision.policy, config.model.model
    roles = config.precision.roles
    emulated = " (emulated)" * (roles.tf32 or bool(roles.recipe))  # with islands it is nothing else
    lines = [
        f"{framework}, {model} in {policy}{emulated}: error against float64, of {BATCHES} batches",
        f"{'':26} {'gradient':>9} {'loss':>9}",
    ]
    for label, which in ((f"everything in {policy}", "all"), ("everything in float32", "none")):
        lines.append(f"{label:26} {_figures(result[which])}")
    for title in ("kinds", "modules"):
        head = f"{title + f', alone in {policy}':26} {'gradient':>9} {'loss':>9}  "
        head += f"{'its island removes':>18} {'step time' * (title == 'kinds')}"
        lines += ["", head.rstrip()]
        for name, row in rank(result[title]):
            time = f"{row['time'] - 1:+9.1%}" if "time" in row and title == "kinds" else ""
            share = f"{removed_share(result, row):18.1%}"
            lines.append(f"{name:26} {_figures(row['alone'])}  {share} {time}".rstrip())
    return [*lines, "", sentence(framework, result)]


def _figures(found: Errors) -> str:
    return f"{found['gradient']:9.2e} {found['loss']:9.2e}"
