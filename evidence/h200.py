"""What was measured on one NVIDIA H200: GPT-2's cells, and the verdicts of the ladder."""

from benchmarks import report
from benchmarks.tables import markdown
from evidence import ladder
from lockstep.results import Row

Rows = dict[str, Row]  # by name

GIB = 2**30
HEAD = ["trainer", "policy", "tokens/s", "MFU", "peak, GiB", "its own account, GiB", "compile, s",
        "steps", "final loss, nats"]  # fmt: skip
FRAMEWORKS = {"JAX": ("jax", "bare-jax"), "PyTorch": ("torch", "torch-compiled", "nanogpt")}


def cells(rows: Rows) -> str:
    """A table for each framework, and why they are not one."""
    parts = []
    for framework, trainers in FRAMEWORKS.items():
        own = [row for row in rows.values() if row["cell"]["contender"] in trainers]
        why = report.refusal(own)
        parts += [f"{framework}:", f"Refused: {why}." if why else markdown(HEAD, map(_cell, own))]
    why = report.refusal([*rows.values()])
    return "\n\n".join([*parts, f"One table of both is refused: {why}."] if why else parts)


def _cell(row: Row) -> list[str]:
    steps = str(row["config"]["optim"]["steps"])
    named = [row["cell"]["contender"], row["config"]["precision"]["policy"]]
    if row["status"] != "ok":
        return [*named, f"{row['status']}: {row['why']}", "", "", "", "", steps, ""]
    seconds = row["seconds"]
    return [
        *named, f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}", _gib(row["peak_bytes"]),
        _gib(row["predicted_bytes"]), f"{seconds['compile'] + seconds['first step']:.1f}", steps,
        f"{row['final_loss']:.4f}",
    ]  # fmt: skip


def _gib(count: int | None) -> str:
    return "n/a" if count is None else f"{count / GIB:.2f}"


def verdicts(rows: Rows) -> str:
    """The table of `ladder.status`, how many are equal, and what is not: figure and place."""
    policies = dict.fromkeys(row["policy"] for row in rows.values())
    lines = []
    for policy in policies:
        own = [row for row in rows.values() if row["policy"] == policy]
        other = [row for row in own if row["verdict"] != "equal"]
        cases, equal = sum(row["cases"] for row in own), len(own) - len(other)
        said = "; ".join(_difference(row) for row in other)
        lines.append(
            [f"`{ladder.title(policy, rows)}`", str(cases), f"{equal} of {len(own)}", said]
        )
    head = ["policy", "cases", "rungs equal, of those climbed", "not equal"]
    return "\n\n".join([ladder.status(rows), markdown(head, lines)])


def _difference(row: Row) -> str:
    worst = row["worst"]
    return f"rung {row['rung']}: {worst['rule']} {ladder.figure(worst)} at {worst['where']}"
