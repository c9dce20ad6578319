"""Markdown tables and pictures from the results' JSONs alone: `python -m benchmarks.report DIR`.

Cells stand in one table only if they ran on one device under the same versions, and if those that
had the same work to do reached the same loss.
"""

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.cells import CONTENDERS, workload
from benchmarks.measure import throughput, tokens_per_step
from benchmarks.process import read, words
from benchmarks.tolerances import final_loss
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.exits import exit_status

Result = dict[str, Any]

TITLES = {
    "smoke": "Does it run",
    "frameworks": "Frameworks side by side",
    "gpt2": "gpt2 (124M)", "10m": "10m", "30m": "30m",
    "accumulation": "Accumulation: the same rows in N micro-batches",
    "remat": "Recomputing in the backward pass",
    "plan": "What the plan knows of a CPU",
}  # fmt: skip
HEAD = ["trained by", "policy", "N x B", "T", "remat", "tokens/s", "quartiles", "ms/step", "MFU",
        "peak MiB", "reserved", "predicted", "compile s", "final loss"]  # fmt: skip
MFU = ("MFU = (6 P + 12 L d T) x tokens/s over the device's dense peak for the policy's matmuls, P "
       "without position embeddings (arXiv:2204.02311).")  # fmt: skip
WHAT = ("N x B: micro-batches in a step x rows in each. Peak: what the first steps add to the "
        "process's resident set on a CPU, the allocator's peak on CUDA. Predicted: the framework's "
        "own account of a step (XLA's of the compiled program; of torch the living storages), on "
        "CUDA with weights and moments. Compile: with the first step.")  # fmt: skip


def load(folder: Path) -> list[Result]:
    return [read(path) for path in sorted((folder / "cells").glob("*.json"))]


def merged(results: Iterable[Result]) -> list[Result]:
    """The rounds of one cell as one: every window of every round, the highest peak."""
    rounds: dict[str, list[Result]] = {}
    for result in results:
        rounds.setdefault(json.dumps(result["cell"], sort_keys=True), []).append(result)
    return [_merge(each) for each in rounds.values()]


def _merge(rounds: list[Result]) -> Result:
    done = [result for result in rounds if result["status"] == "ok"]
    if len(done) < len(rounds):  # what failed once is not reliable
        return next(result for result in rounds if result["status"] != "ok")
    first = done[0]
    seconds = [s for result in done for s in result["seconds_per_step"]]
    return first | {
        **throughput(Config.from_json(first["config"]), seconds, first["about"]["device"]),
        "peak_bytes": max((r["peak_bytes"] for r in done if r["peak_bytes"]), default=None),
    }  # fmt: skip


def refusal(results: list[Result]) -> str:
    """Why these cells may not stand in one table, or ""."""
    devices = {(r["device"], r["about"]["device"]) for r in results if r["status"] == "ok"}
    if len(devices) > 1:
        return f"its cells ran on different devices: {', '.join(sorted(map(str, devices)))}"
    versions = {json.dumps(r["versions"]) for r in results}
    if len(versions) > 1:
        return "its cells ran under different versions: " + " and ".join(sorted(versions))
    for same in by_workload(results).values():
        ranked = sorted(same, key=lambda r: (math.isnan(r["final_loss"]), r["final_loss"]))
        low, high = ranked[0], ranked[-1]
        allowed = final_loss(Config.from_json(low["config"]).precision.roles)
        gap = high["final_loss"] - low["final_loss"]
        if not gap <= allowed.bound:  # nor is NaN
            return (
                f"under {low['config']['precision']['policy']} the final losses of {label(low)} "
                f"and {label(high)}, {low['final_loss']:.6f} and {high['final_loss']:.6f}, part by "
                f"{gap:.2g}, more than {allowed.bound:g}: they did not compute the same"
            )
    return ""


def by_workload(results: list[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result["status"] == "ok":
            groups.setdefault(workload(result["config"]), []).append(result)
    return groups


def label(result: Result) -> str:
    remat = result["config"]["execution"]["remat"]
    return result["cell"]["contender"] + (f" with remat {remat}" if remat != "none" else "")


def tables(folder: Path) -> dict[str, str]:
    """Table name -> Markdown, each with where it comes from or why it is refused.

    Raises:
        UserError: a cell there is no result of `benchmarks.measure`.
    """
    groups: dict[str, list[Result]] = {}
    try:
        for result in merged(load(folder)):
            groups.setdefault(result["cell"]["table"], []).append(result)
        return {name: table(results) for name, results in groups.items()}
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problem = f"a cell there is no result of `benchmarks.measure` ({error!r})"
        raise UserError(f"{folder}: {problem}; measure it again") from None


def table(results: list[Result]) -> str:
    if why := refusal(results):
        return f"Refused: {why}."
    order = list(CONTENDERS)
    results = sorted(results, key=lambda r: (_rows(r), order.index(r["cell"]["contender"])))
    lines = [HEAD, ["---"] * len(HEAD), *map(_row, results)]
    shown = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{shown}\n\n{provenance(results)}"


def _rows(result: Result) -> tuple:
    config = result["config"]
    policies = ("bf16", "fp16", "tf32", "fp32", "fp64")
    policy = config["precision"]["policy"]
    rank = policies.index(policy) if policy in policies else len(policies)
    return rank, policy, config["optim"]["accum"], config["execution"]["remat"] != "none"


def _row(result: Result) -> list[str]:
    config = result["config"]
    shape = f"{config['optim']['accum']} x {config['optim']['batch_size']}"
    row = [result["cell"]["contender"], config["precision"]["policy"], shape,
           str(config["model"]["context"]), config["execution"]["remat"]]  # fmt: skip
    if result["status"] != "ok":
        why = result["why"].partition(";")[0]
        return [*row, f"{result['status']}: {why}" if why else result["status"],
                *[""] * (len(HEAD) - len(row) - 1)]  # fmt: skip
    low, high = result["quartiles"]
    tokens = tokens_per_step(Config.from_json(config))
    peak, predicted = result["peak_bytes"], result["predicted_bytes"]
    off = f" ({predicted / peak - 1:+.0%})" if peak and predicted else ""
    return [
        *row, f"{result['tokens_per_second']:,.0f}", f"{low:,.0f}-{high:,.0f}",
        f"{1e3 * tokens / result['tokens_per_second']:.4g}",
        f"{result['mfu']:.1%}" if result["mfu"] else "n/a",
        mebibytes(peak), mebibytes(result["reserved_bytes"]), mebibytes(predicted) + off,
        f"{result['seconds']['compile'] + result['seconds']['first step']:.1f}",
        f"{result['final_loss']:.4f}",
    ]  # fmt: skip


def mebibytes(count: int | None) -> str:
    return "n/a" if count is None else f"{count / 2**20:,.0f}"


def provenance(results: list[Result]) -> str:
    first = results[0]
    dates = sorted({r["date"] for r in results})
    commits = sorted({r["commit"] for r in results})
    kinds = sorted({r["about"]["device"] for r in results if r["status"] == "ok"})
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return (f"On {first['device']} ({', '.join(kinds)}; {first['cores']} cores), "
            f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, commit {', '.join(commits)}, "
            f"Python {first['python']}, {versions}.")  # fmt: skip


def write(folder: Path) -> Path:
    """report.md and a picture for each table, from what is there."""
    parts = [f"# {folder.name}", MFU, WHAT]
    for name, text in tables(folder).items():
        parts += [f"## {TITLES.get(name, name)}", text]
        if not text.startswith("Refused") and draw(name, folder):
            parts.append(f"![tokens/s]({name}.png)")
    for extra in ("matmul-jax", "matmul-torch", "growth-jax", "growth-torch", "speed"):
        if (folder / f"{extra}.json").exists():
            parts += [f"## {extra}", read(folder / f"{extra}.json")["markdown"]]
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def draw(name: str, folder: Path) -> bool:
    """Bars of tokens/s; False where matplotlib is missing."""
    try:
        from benchmarks import plot
    except ImportError:
        return False
    results = [r for r in merged(load(folder)) if r["cell"]["table"] == name]
    done = [r for r in results if r["status"] == "ok"]
    plot.bars({_name(r): r["tokens_per_second"] for r in done}, folder / f"{name}.png")
    return bool(done)


def _name(result: Result) -> str:
    return " ".join(_row(result)[:3]) + f" {result['config']['execution']['remat']}"


def main(folder: str) -> int:
    path = Path(folder)
    if not (path / "cells").is_dir():
        raise UserError(f"{folder}: holds no cells; name the --out of `benchmarks.run`")
    print(write(path))
    return 0


def command(argv: list[str] | None = None) -> int:
    """The command line."""
    return exit_status(lambda: main(*words(argv, "benchmarks.report", "DIR")))


if __name__ == "__main__":
    sys.exit(command())
