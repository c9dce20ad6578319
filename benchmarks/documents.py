"""Write the tables of the documents from recorded rows: `python -m benchmarks.documents`.

A block `<!-- table NAME --> ... <!-- end -->` of README or of a page in `docs/` holds the table
NAME of `TABLES`, and under it where its rows were measured, at which release and by which command.
Nothing is measured here. The notebook of docs/learn.md is made, too.
"""

import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import frameworks, ladder, lesson, programs, published, rates, report, speed
from benchmarks.jobs import relative_path, say
from lockstep import results
from lockstep.cli import commands
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.process import ROOT
from lockstep.results import Row

Rows = dict[str, Row]  # by name

WRITTEN = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
DOCUMENTS = tuple(path for path in WRITTEN if "<!-- table " in path.read_text(encoding="utf-8"))
BLOCK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.S)
RELEASE = "0.1.0"  # of rows that do not name theirs: all that were recorded before it


class Table(NamedTuple):
    """A table that is made from the rows of a file, or from those of one kind (`report.kind_of`).

    `command` measures them; {file} stands for the file. Without a command the document names none.
    """

    file: str
    command: str
    make: Callable[[Rows], str]
    kind: str = ""

    @property
    def rows(self) -> Rows:
        found = results.read(ROOT / self.file)
        return report.split(found).get(self.kind, {}) if self.kind else found

    def text(self) -> str:
        if not self.rows:
            return f"Not measured yet. `{self.command.format(file=self.file)}` does it."
        return "\n\n".join(filter(None, [self.make(self.rows), self.command and self.origin()]))

    def origin(self) -> str:
        command = self.command.format(file=self.file)
        return f"{describe_origin(self.rows.values())} Command: `{command}`"


def list_values(values: Iterable[Hashable]) -> str:
    """Each value, with how many rows have it where there are several; None is unknown."""
    counts = Counter("unknown" if value is None else str(value) for value in values)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} ({count})" for value, count in counts.items())


def describe_origin(rows: Iterable[Row]) -> str:
    """The release, commit, date, machine and versions at which rows were measured."""
    measured = [row["measured"] for row in rows]
    releases = list_values(each.get("release", RELEASE) for each in measured)
    commits = list_values(each["commit"] for each in measured)
    cpus, devices = (
        list_values(map(_cpu, measured)),
        list_values(each["device"] for each in measured),
    )
    dates = sorted({each["date"] for each in measured if each["date"]}) or ["unknown"]
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    software = list_values(map(_software, measured))
    return f"Release {releases} (commit {commits}), {when}, on {devices} ({cpus}); {software}."


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


LADDER = "pytest parity_tests/ladder/test_ladder.py"


def _of_ladder(name: str, command: str, make: Callable[[Rows], str]) -> Table:
    return Table(f"docs/results/{name}.jsonl", command, lambda rows: ladder.with_remark(make, rows))


def _benchmark(file: str, name: str, kind: str) -> Table:
    path, command = f"benchmarks/results/{file}.jsonl", f"python -m benchmarks.run {name}"
    return Table(path, f"{command} --out {{file}}", partial(report.make, kind), kind)


def _by_model(rows: Rows) -> str:
    """A table for each model, whose rows alone are compared."""
    models: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows.values():
        config = row["config"]["model"]
        key = config["model"], config["n_layer"], config["d_model"]
        models.setdefault(key, []).append(row)
    return "\n\n".join(
        f"`{name}`, {layers} layers, D {width}:\n\n{report.table(report.merge_rounds(own))}"
        for (name, layers, width), own in models.items()
    )


PARITY = _of_ladder("parity", f"{LADDER} -n auto --full --status {{file}}", ladder.status)
TABLES: dict[str, Table] = {
    "status": PARITY,
    "policies": PARITY._replace(command="", make=partial(ladder.with_remark, ladder.policies)),
    "parity_h100": _of_ladder(
        "parity-h100", f"{LADDER} --device cuda -k test_rung --status {{file}}", ladder.verdicts
    ),
    "power": _of_ladder("power", "lockstep power --out {file}", ladder.power),
    "smallest": _of_ladder("smallest", "lockstep power --grade --out {file}", ladder.smallest),
    "specificity": _of_ladder(
        "specificity", "lockstep specificity --out {file}", ladder.specificity
    ),
    "sensitivity": _of_ladder(
        "sensitivity", "lockstep sensitivity --framework both --out {file}", ladder.sensitivity
    ),
    **{f"cpu_{name}": _benchmark("cpu", "cpu", name)
       for name in ("frameworks", "accumulation", "remat")},
    "xeon_frameworks": _benchmark("cpu-xeon", "frameworks", "frameworks"),
    "cpu_speed": _benchmark("cpu", "speed", "speed"),
    **{path.stem: _benchmark(path.stem, "speed", "speed")
       for path in sorted((ROOT / "benchmarks" / "results").glob("speed-*.jsonl"))},
    "cpu312_speed": _benchmark("cpu312", "speed --only jax", "speed"),
    "h100": _benchmark("h100", "frameworks --device cuda", "frameworks")._replace(make=_by_model),
    "public_ports": _benchmark("public_ports", "public-ports --root DIR", "public-ports"),
    "cuda_grid": _benchmark("cuda_grid", "cuda-grid", "cuda-grid"),
}  # fmt: skip
LEARN = Table("docs/results/learn.jsonl", "python -m benchmarks.lesson", lambda rows: "")


def print_plan() -> str:
    """A command of the plan's, and what it prints."""
    words = "plan --model gpt2 --device t4 --framework torch --tokens 1e9 --price 0.35"
    printed = io.StringIO()
    with redirect_stdout(printed):
        commands.main(words.split())
    lines = [f"$ lockstep {words}", *printed.getvalue().splitlines()]
    return "\n".join(f"    {line}".rstrip() for line in lines)


def races() -> str:
    """The races side by side, on each CPU that has a file speed-*.jsonl beside cpu.jsonl."""
    tables = [table for name, table in TABLES.items() if re.match("cpu_speed$|speed-", name)]
    columns = {_cpu(next(iter(table.rows.values()))["measured"]): table.rows for table in tables}
    return "\n\n".join([speed.side_by_side(columns), *(table.origin() for table in tables)])


# Tables that are not rows of one file.
MADE: dict[str, Callable[[], str]] = {
    "plan_example": print_plan,
    **frameworks.TABLES,
    "races": races,
    "plan_programs": programs.table,
    "plan_meshes": programs.table_of_meshes,
    "published_groups": rates.table,
    "published_worst": published.table_of_worst,
}


def render(name: str) -> str:
    """The text of a block: a table and its origin, or what a cell of the lesson printed."""
    if name in MADE:
        return MADE[name]()
    if name == "learn":
        return LEARN.origin()
    if name.startswith("learn_"):
        page = lesson.PAGE.read_text(encoding="utf-8")
        return lesson.table(name.removeprefix("learn_"), LEARN.rows, page)
    return TABLES[name].text()


def render_blocks(text: str) -> str:
    """A document with every table made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{render(block[2])}\n\n{block[4]}", text)


def write() -> list[Path]:
    """Makes every table anew, the picture, and the notebook of docs/learn.md.

    Returns:
        The documents that changed.
    """
    changed = []
    texts = {path: render_blocks(path.read_text(encoding="utf-8")) for path in DOCUMENTS}
    texts[frameworks.PICTURE] = frameworks.picture()
    texts[lesson.NOTEBOOK] = lesson.write_notebook(lesson.PAGE.read_text(encoding="utf-8"))
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def main(argv: list[str] | None = None) -> int:
    """The command line, which takes no words."""
    Parser(prog="python -m benchmarks.documents", description=__doc__).parse_args(argv)
    for path in write():
        say(f"written: {relative_path(path)}")
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
