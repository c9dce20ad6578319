"""Markdown tables from rows alone.

Cells stand in one table only if they ran on one device under the same versions, and if those that
had the same work to do reached the same loss.
"""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import compiled, ladder, speed
from benchmarks.cells import CONTENDERS, GONE, workload
from benchmarks.measure import throughput, tokens_per_step
from benchmarks.public_ports import table as public_table
from benchmarks.tables import markdown
from lockstep import results as stored
from lockstep.config import Config
from lockstep.config.policy import Roles
from lockstep.errors import UserError
from lockstep.judge.tolerances import Tolerance

Result = dict[str, Any]
Rows = dict[str, Result]  # by name

HEAD = ["framework", "policy", "N x B", "T", "remat", "tokens/s", "quartiles, tokens/s", "ms/step",
        "MFU", "peak, MiB", "reserved, MiB", "predicted, MiB", "compile, s",
        "final loss, nats"]  # fmt: skip


# How far the final losses of one table's cells may part, in nats; `benchmarks.run drift` measures.
EXACT = Tolerance(bound=1e-9, reason="rounding alone")
SINGLE = Tolerance(
    bound=1e-4,
    reason="another order of sums, amplified by 45 steps; another optimizer parts by tenths",
)
HALF = Tolerance(
    bound=0.02,
    reason="each framework rounds half-precision and TF32 matmuls in its own order, and others at "
    "other places: 1e-2 to 1e-3 a number, which the mean over thousands of tokens brings down",
)


def final_loss(roles: Roles) -> Tolerance:
    if roles.compute == "float64":
        return EXACT
    return HALF if roles.mixed or roles.tf32 or roles.recipe else SINGLE


def kind_of(name: str, row: Result) -> str:
    """The kind of table that a row is of; empty if it is of none."""
    if "cell" in row:  # a program of the plan's has flags there
        return row["cell"].get("table", "")
    if "rung" in row:
        return "parity"
    if name.startswith("race "):
        return "speed"
    if "pair" in row:
        return "public-ports"
    return "cuda-grid" if "wrong" in row else ""


def split(rows: Rows) -> dict[str, Rows]:
    """Kind -> its rows."""
    found: dict[str, Rows] = {}
    for name, row in rows.items():
        if kind := kind_of(name, row):
            found.setdefault(kind, {})[name] = row
    return found


def make(kind: str, rows: Rows) -> str:
    """The table of a kind."""
    listed = list(rows.values())
    makers: dict[str, Callable[[], str]] = {
        "speed": lambda: speed.side_by_side({"speed": rows}),
        "cuda-grid": lambda: compiled.grid_table(rows),
        "parity": lambda: ladder.verdicts(rows),
        "public-ports": lambda: public_table.markdown(listed),
    }
    return makers[kind]() if kind in makers else table(merge_rounds(listed))


def describe(rows: Rows) -> str:
    """Every table that rows make, and what has no result."""
    found = {}
    for kind, own in split(rows).items():
        good = own if all("cell" in row for row in own.values()) else {
            name: row for name, row in own.items() if row.get("status", "ok") == "ok"
        }  # fmt: skip
        found[kind] = make(kind, good) if good else ""
    failed = [row for row in rows.values() if row.get("status", "ok") != "ok"]
    if failed:
        found["What has no result"] = markdown(["job", "ended", "why"], [
            [row["name"], row["status"], row["why"].replace("|", " ")] for row in failed
        ])  # fmt: skip
    return "\n\n".join(f"## {kind}\n\n{text}" for kind, text in found.items() if text)


def milliseconds(row: Result) -> float:
    """The time of a step, in the median window."""
    return 1e3 * tokens_per_step(Config.from_json(row["config"])) / row["tokens_per_second"]


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


def table(results: list[Result]) -> str:
    if why := refusal(results):
        return f"Refused: {why}."
    order = [*CONTENDERS, *GONE]
    results = sorted(results, key=lambda r: (_rows(r), order.index(r["cell"]["contender"])))
    return markdown(HEAD, map(_row, results))


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
    peak, predicted = result["peak_bytes"], result["predicted_bytes"]
    off = f" ({predicted / peak - 1:+.0%})" if peak and predicted else ""
    return [
        *row, f"{result['tokens_per_second']:,.0f}", f"{low:,.0f}-{high:,.0f}",
        f"{milliseconds(result):.4g}",
        f"{result['mfu']:.1%}" if result["mfu"] else "n/a",
        mebibytes(peak), mebibytes(result["reserved_bytes"]), mebibytes(predicted) + off,
        f"{result['seconds']['compile'] + result['seconds']['first step']:.1f}",
        f"{result['final_loss']:.4f}",
    ]  # fmt: skip


def mebibytes(count: int | None) -> str:
    return "n/a" if count is None else f"{count / 2**20:,.0f}"


def write(file: Path) -> Path:
    """Writes report.md into the folder of the file's name.

    Raises:
        UserError: the rows are not of `benchmarks.run`.
    """
    rows, folder = stored.read(file), file.with_suffix("")
    folder.mkdir(exist_ok=True)
    try:
        text = describe(rows)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problem = f"a row there is no result of `benchmarks.run` ({error!r})"
        raise UserError(f"{file}: {problem}; measure it again") from None
    path = folder / "report.md"
    path.write_text(f"# {file.stem}\n\n{text}\n", encoding="utf-8")
    return path
