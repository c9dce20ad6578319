"""The tables of the documents, made from committed rows, and where these come from."""

import io
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from benchmarks import (
    claims,
    cuda_grid,
    emulation,
    estimators,
    exported,
    fit,
    optimizer_state,
    plan,
    report,
    startup,
    worlds,
)
from benchmarks.experiments.run import EXPERIMENTS, load_arms, unmeasured
from evidence import h200, ladder, lesson
from evidence.parts import BY_NAME
from lockstep import results
from lockstep.cli import commands
from lockstep.devices import CPU
from lockstep.files.untrusted import read_json
from lockstep.plan.memory import CONSTANTS
from lockstep.process import ROOT
from lockstep.results import Row

WRITTEN = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
DOCUMENTS = tuple(path for path in WRITTEN if "<!-- table " in path.read_text(encoding="utf-8"))
BLOCK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.S)
SHOWN = 2, 120  # so many commands, of so many characters; else the one that measures all
DOCS, BENCHMARKS = ROOT / "docs" / "results", ROOT / "benchmarks" / "results"


def listed(values: Iterable[Hashable]) -> str:
    """Each value, with how many rows have it where there are several; None is unknown."""
    counts = Counter("unknown" if value is None else str(value) for value in values)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} ({count})" for value, count in counts.items())


def origin(command: str, rows: Iterable[Row]) -> str:
    """Where rows come from. How many commits ago that is, `python -m evidence status` says."""
    measured = [row["measured"] for row in rows]
    cpus, devices = listed(map(_cpu, measured)), listed(each["device"] for each in measured)
    dates = sorted({each["date"] for each in measured if each["date"]}) or ["unknown"]
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    commits = listed(each["commit"] for each in measured)
    software = listed(map(_software, measured))
    return f"`{command}` on {devices} ({cpus}), {when}; commit {commits}; {software}."


def _cpu(measured: Row) -> str:
    cpu = measured["cpu"]
    cores = "" if cpu["cores"] is None else f", {cpu['cores']} cores"
    flags = "".join(f" {flag}" for flag in cpu["flags"] or ())
    family = f" {cpu['family']}" if cpu.get("family") else ""  # older rows have none
    return f"{cpu['model'] or 'model unknown'}{family}{flags}{cores}"


def _software(measured: Row) -> str:
    if measured["versions"] is None:
        return "versions unknown"
    versions = (f"{name} {version}" for name, version in measured["versions"].items())
    return ", ".join([f"Python {measured['python']}", *versions])


LADDER: dict[str, tuple[str, Callable[[dict[str, Row]], str]]] = {  # table -> part, maker
    "policies": ("parity", ladder.policies), "status": ("parity", ladder.status),
    "power": ("power", ladder.power), "smallest": ("smallest", ladder.smallest),
    "specificity": ("specificity", ladder.specificity),
    "sensitivity": ("sensitivity", ladder.sensitivity), "fuzz": ("fuzz", ladder.fuzz),
    "worlds": ("worlds", worlds.table),
}  # fmt: skip


def of_ladder(name: str) -> str:
    """One of `LADDER`, on the CPU."""
    part, make = LADDER[name]
    rows, call = results.read(DOCS / f"{part}.jsonl", "cpu"), BY_NAME[part].call()
    if not rows:
        return f"On cpu: not measured yet. `{call}` does it."
    table = ladder.with_remark(make(rows), rows)
    if name == "policies":
        return table
    commands = sorted({row["measured"]["command"] or "" for row in rows.values()})
    few = len(commands) <= SHOWN[0] and len(max(commands, key=len)) <= SHOWN[1]
    whole = all(BY_NAME[part].file in each for each in commands)
    ran = "` and `".join(commands) if few and whole else call
    return f"{table}\n\n{origin(ran, rows.values())}"


def on_h200(part: str, make: Callable[[dict[str, Row]], str]) -> str:
    """All rows of a part; its command, or the one by which all were measured."""
    rows = results.read(ROOT / BY_NAME[part].file)
    commands = {row["measured"]["command"] for row in rows.values()}
    ran = commands.pop() if len(commands) == 1 else BY_NAME[part].call()
    return f"{ladder.with_remark(make(rows), rows)}\n\n{origin(ran, rows.values())}"


def benchmark(name: str) -> str:
    """A table of a suite's rows: SUITE_TABLE."""
    suite, _, table = name.partition("_")
    file = BENCHMARKS / f"{suite}.jsonl"
    command = f"python -m benchmarks.run {suite} --out {file.relative_to(ROOT)}"
    text = report.tables(file).get(table)
    if not text:
        return f"Not measured yet. `{command}` does it."
    rows = results.read(file)
    kind = table.replace("_", " ").replace("speed", "race")
    shown = [
        row
        for name, row in rows.items()
        if name.startswith(kind) or row.get("cell", {}).get("table") == table
    ]
    own = {row["measured"]["command"] for row in shown}
    return f"{text}\n\n{origin(own.pop() if len(own) == 1 else command, shown)}"


def experiment(name: str) -> str:
    """An experiment's table and closing sentence, experiment_NAME; or state_FRAMEWORK."""
    kind, _, which = name.partition("_")
    which, file = which.replace("_", "-"), BENCHMARKS / "experiments.jsonl"
    part = f"optimizer-state-{which}" if kind == "state" else which
    call, rows = BY_NAME[part].call(), results.read(file)
    if kind == "state":
        row = rows[f"optimizer-state {which}"]
        return f"{optimizer_state.markdown(row)}\n\n{origin(call, [row])}"
    made, arms = EXPERIMENTS[which], load_arms(which, file)
    if not arms.all:
        return f"Not measured yet. `{call}` does it."
    lacking = ", ".join(unmeasured(which, file))
    note = f"Not measured yet: {lacking}.\n\n" if lacking else ""
    return f"{made.table(arms)}\n\n{made.sentence(arms)}\n\n{note}{origin(call, arms.all)}"


def learn(name: str) -> str:
    """What a cell of docs/learn.md printed, learn_CELL; or `learn`, where all of it comes from."""
    rows = results.read(lesson.RESULT)
    _, _, cell = name.partition("_")
    if not cell:
        return origin(BY_NAME["learn"].call(), rows.values())
    return lesson.table(cell, rows, lesson.PAGE.read_text(encoding="utf-8"))


def of_part(name: str, make: Callable[[dict[str, Row]], str]) -> str:
    """All rows of a part, and where they come from."""
    part = BY_NAME[name]
    rows = results.read(ROOT / part.file)
    return f"{make(rows)}\n\n{origin(part.call(), rows.values())}"


def example() -> str:
    """A command of the plan's, and what it prints."""
    words = "plan --model gpt2 --device t4 --framework torch --tokens 1e9 --price 0.35"
    printed = io.StringIO()
    with redirect_stdout(printed):
        commands.main(words.split())
    lines = [f"$ lockstep {words}", *printed.getvalue().splitlines()]
    return "\n".join(f"    {line}".rstrip() for line in lines)


OTHERS: dict[str, Callable[[], str]] = {
    "memory": lambda: fit.markdown(read_json(CONSTANTS, limit=10**6)),
    "cuda_grid": lambda: cuda_grid.markdown(results.read(cuda_grid.FILE)),
    "estimators": lambda: estimators.markdown(results.read(estimators.FILE)),
    "plan_cpu": lambda: of_part("calibration", lambda rows: plan.markdown(CPU)),
    "plan_example": example,
    "startup": partial(of_part, "startup", startup.markdown),
    "exported": partial(of_part, "exported", exported.markdown),
    "emulation": partial(of_part, "emulation", emulation.table),
    "claims": lambda: claims.table(claims.Results()),
    "h200": partial(on_h200, "h200", h200.cells),
    "parity_h200": partial(on_h200, "parity-h200", h200.verdicts),
}  # fmt: skip
KINDS: dict[str, Callable[[str], str]] = {
    "learn": learn, "experiment": experiment, "state": experiment,
}  # fmt: skip


def render(name: str) -> str:
    """The table of a block, and where its figures come from."""
    if name in OTHERS:
        return OTHERS[name]()
    if name in LADDER:
        return of_ladder(name)
    return KINDS.get(name.partition("_")[0], benchmark)(name)


def render_blocks(text: str) -> str:
    """A document with every table made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{render(block[2])}\n\n{block[4]}", text)


def write() -> list[Path]:
    """Makes every table anew, and the notebook of docs/learn.md; the documents that changed."""
    changed = []
    texts = {path: render_blocks(path.read_text(encoding="utf-8")) for path in DOCUMENTS}
    texts[lesson.NOTEBOOK] = lesson.text(lesson.notebook(lesson.PAGE.read_text(encoding="utf-8")))
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed
