"""Markdown tables and pictures from a suite's rows alone: `python -m benchmarks.report FILE`.

Cells stand in one table only if they ran on one device under the same versions, and if those that
had the same work to do reached the same loss.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import laws, matmul, plot, speed
from benchmarks.cells import CONTENDERS, workload
from benchmarks.measure import throughput, tokens_per_step
from benchmarks.process import words
from benchmarks.tables import markdown
from benchmarks.tolerances import final_loss
from lockstep import results as stored
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
    "parity": "Verdicts of the rungs", "failures": "What has no result",
}  # fmt: skip
HEAD = ["framework", "policy", "N x B", "T", "remat", "tokens/s", "quartiles, tokens/s", "ms/step",
        "MFU", "peak, MiB", "reserved, MiB", "predicted, MiB", "compile, s",
        "final loss, nats"]  # fmt: skip
MFU = ("MFU = (6 P + 12 L Q T) x tokens/s over the device's dense peak for the policy's matmuls, P "
       "without position embeddings, Q the width of the queries (arXiv:2204.02311).")  # fmt: skip
WHAT = ("N x B: micro-batches in a step x rows in each. Peak: what the first steps add to the "
        "process's resident set on a CPU, the allocator's peak on CUDA. Predicted: the framework's "
        "own account of a step (XLA's of the compiled program; torch's live storages), on "
        "CUDA with weights and moments. Compile: with the first step.")  # fmt: skip


def load(file: Path) -> list[Result]:
    """The cells' rows."""
    return [row for row in stored.read(file).values() if "cell" in row]


def extras(file: Path) -> dict[str, str]:
    """Table name -> Markdown of what is no grid of cells."""
    rows, found = stored.read(file), {}
    of_framework: dict[str, Callable[[Result], str]] = {
        "matmul": matmul.markdown, "growth": laws.table,
    }  # fmt: skip
    for kind, make in of_framework.items():
        for framework in ("jax", "torch"):
            if row := rows.get(f"{kind} {framework}"):
                found[f"{kind}_{framework}"] = make(row)
    if rungs := [row for row in rows.values() if "rung" in row]:
        found["parity"] = markdown(["policy", "rung", "verdict", "cases", "of its bound, or why"], [
            [row["policy"], str(row["rung"]), row["verdict"], str(row["cases"]), _figure(row)]
            for row in rungs
        ])  # fmt: skip
    if failed := [row for row in rows.values() if row.get("status", "ok") != "ok"]:
        found["failures"] = markdown(["job", "ended", "why"], [
            [row["name"], row["status"], row["why"].replace("|", " ")] for row in failed
        ])  # fmt: skip
    if races := [row for name, row in rows.items() if name.startswith("race ")]:
        found["speed"] = speed.markdown(races)
    return found


def _figure(row: Result) -> str:
    if "worst" not in row or row["verdict"] == "failed":
        return row["why"]
    return f"{row['worst']['figure']:.3g} of {row['worst']['bound']:.3g}: {row['worst']['rule']}"


def merge_rounds(results: Iterable[Result]) -> list[Result]:
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
    devices = {
        (r["measured"]["device"], r["about"]["device"]) for r in results if r["status"] == "ok"
    }
    if len(devices) > 1:
        return f"its cells ran on different devices: {', '.join(sorted(map(str, devices)))}"
    versions = {json.dumps(r["measured"]["versions"]) for r in results}
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


def tables(file: Path) -> dict[str, str]:
    """Table name -> Markdown, or why it is refused.

    Raises:
        UserError: a cell there is no result of `benchmarks.measure`.
    """
    groups: dict[str, list[Result]] = {}
    try:
        for result in merge_rounds(load(file)):
            groups.setdefault(result["cell"]["table"], []).append(result)
        return {name: table(results) for name, results in groups.items()} | extras(file)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problem = f"a cell there is no result of `benchmarks.measure` ({error!r})"
        raise UserError(f"{file}: {problem}; measure it again") from None


def table(results: list[Result]) -> str:
    if why := refusal(results):
        return f"Refused: {why}."
    order = list(CONTENDERS)
    results = sorted(results, key=lambda r: (_rows(r), order.index(r["cell"]["contender"])))
    return markdown(HEAD, map(_row, results))


FRAMEWORKS = {"JAX": ("jax", "bare-jax"), "PyTorch": ("torch", "torch-compiled", "nanogpt")}
SHORT_HEAD = ["trainer", "policy", "tokens/s", "MFU", "peak, GiB", "its own account, GiB",
              "compile, s", "steps", "final loss, nats"]  # fmt: skip


def side_by_side(rows: dict[str, Result]) -> str:
    """A table for each framework, of cells that were measured once, and why they are not one."""
    parts = []
    for framework, trainers in FRAMEWORKS.items():
        own = [row for row in rows.values() if row["cell"]["contender"] in trainers]
        why = refusal(own)
        text = f"Refused: {why}." if why else markdown(SHORT_HEAD, map(_short_row, own))
        parts += [f"{framework}:", text]
    why = refusal([*rows.values()])
    return "\n\n".join([*parts, f"One table of both is refused: {why}."] if why else parts)


def _short_row(row: Result) -> list[str]:
    steps = str(row["config"]["optim"]["steps"])
    named = [row["cell"]["contender"], row["config"]["precision"]["policy"]]
    if row["status"] != "ok":
        return [*named, f"{row['status']}: {row['why']}", "", "", "", "", steps, ""]
    seconds = row["seconds"]
    return [
        *named, f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}",
        gibibytes(row["peak_bytes"]), gibibytes(row["predicted_bytes"]),
        f"{seconds['compile'] + seconds['first step']:.1f}", steps, f"{row['final_loss']:.4f}",
    ]  # fmt: skip


def gibibytes(count: int | None) -> str:
    return "n/a" if count is None else f"{count / 2**30:.2f}"


def _rows(result: Result) -> tuple:
    config = result["config"]
    policies = ("bf16", "fp16", "tf32", "fp32", "fp64")
    policy = config["precision"]["policy"]
    rank = policies.index(policy) if policy in policies else len(policies)
    return rank, policy, config["optim"]["accum"], config["execution"]["remat"] != "none"


def _policy(result: Result) -> str:
    policy = result["config"]["precision"]["policy"]
    emulated = result.get("about", {}).get("emulated") == policy
    return f"{policy} (emulated)" if emulated else policy


def _row(result: Result) -> list[str]:
    config = result["config"]
    shape = f"{config['optim']['accum']} x {config['optim']['batch_size']}"
    row = [result["cell"]["contender"], _policy(result), shape,
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


def write(file: Path) -> Path:
    """report.md and a picture for each table of cells, in the folder of the file's name."""
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    parts = [f"# {file.stem}", MFU, WHAT]
    for name, text in tables(file).items():
        parts += [f"## {TITLES.get(name, name)}", text]
        if not text.startswith("Refused") and draw(name, file, folder):
            parts.append(f"![tokens/s]({name}.png)")
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def draw(name: str, file: Path, folder: Path) -> bool:
    """Bars of tokens/s; False where there are none, or no matplotlib."""
    results = [r for r in merge_rounds(load(file)) if r["cell"]["table"] == name]
    done = {_name(r): r["tokens_per_second"] for r in results if r["status"] == "ok"}
    return bool(done) and plot.bars(done, folder / f"{name}.png")


def _name(result: Result) -> str:
    return " ".join(_row(result)[:3]) + f" {result['config']['execution']['remat']}"


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    (file,) = words(argv, "benchmarks.report", "FILE", about=__doc__)
    path = Path(file)
    if not load(path):
        raise UserError(f"{file}: holds no cells; name the --out of `benchmarks.run`")
    print(write(path))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
