"""The tables of the documents, made from the results that are committed beside them.

pytest parity_tests/ladder/test_ladder.py --full --status docs/results/parity-cpu.json
lockstep power --grade --out docs/results/power-cpu.json
lockstep specificity --out docs/results/specificity-cpu.json
lockstep sensitivity --framework both --out docs/results/sensitivity-cpu.json
python -m parity_tests.input.fuzz --out docs/results/fuzz-cpu.json
python -m benchmarks.run cpu --out benchmarks/results/cpu
python -m evidence.lesson
python -m evidence.tables      # writes every table anew, and the notebook of docs/learn.md
"""

import io
import json
import re
import sys
from contextlib import redirect_stdout
from typing import Any

from benchmarks import laws, matmul, memory, optimizer_state, plan, report, speed
from benchmarks.claims import claim
from benchmarks.claims.listed import CLAIMS
from benchmarks.claims.results import Results
from benchmarks.experiments.outcome import Arms
from benchmarks.experiments.run import EXPERIMENTS
from evidence import lesson
from lockstep.cli import commands
from lockstep.cli.flags import Parser
from lockstep.devices import CPU
from lockstep.exits import exit_status
from lockstep.parity.catalogue import BY_NAME
from lockstep.parity.ladder import RUNGS
from lockstep.parity.matrix import FACTORS
from lockstep.parity.power import SMALLEST
from lockstep.parity.power import mark as power_marks
from lockstep.parity.sensitivity import ranked, removed, sentence
from lockstep.plan.memory import CONSTANTS
from lockstep.process import ROOT

RESULTS = ROOT / "docs" / "results"
WRITTEN = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
DOCUMENTS = tuple(path for path in WRITTEN if "<!-- table " in path.read_text())
BLOCK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.S)
ORDER = ("not run", "equal", "inconclusive", "different")
SHOWN = {"equal": "equal", "inconclusive": "inconclusive", "different": "**different**"}

Summary = dict[str, dict[str, dict[str, Any]]]  # rung -> policy -> how many, the worst of them


def summarise(outcomes: list[dict[str, Any]]) -> Summary:
    """Of each rung and policy: the worst verdict, the cases, the finding nearest its bound."""
    summary: Summary = {str(rung.number): {} for rung in RUNGS}
    for outcome in outcomes:
        cell = summary[str(outcome["rung"])].setdefault(
            outcome["policy"], {"verdict": "not run", "cases": 0}
        )
        if outcome["verdict"] == "not run":
            cell["why"] = outcome["why"]
            continue
        cell["cases"] += 1
        new = {"row": outcome["row"], **outcome["worst"]}
        if _rank(outcome["verdict"], new) > _rank(cell["verdict"], cell.get("worst")):
            cell |= {"verdict": outcome["verdict"], "worst": new}
    return summary


def _rank(verdict: str, worst: dict[str, Any] | None) -> tuple[int, float]:
    if worst is None:
        return ORDER.index(verdict), -1.0
    share = worst["figure"] / worst["bound"] if worst["bound"] else float(worst["figure"] > 0)
    return ORDER.index(verdict), share


def status(summary: Summary) -> str:
    """Rung by policy: the verdict, the figure nearest its bound, and how many cases."""
    policies = FACTORS["policy"]
    rows = []
    for rung in RUNGS:
        cells = summary[str(rung.number)]
        rows.append([str(rung), *(_cell(cells.get(policy)) for policy in policies)])
    return markdown(["rung", *policies], rows)


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if cell["verdict"] == "not run":
        return f"not run: {cell['why']}"
    worst = cell["worst"]
    figure = f"{worst['figure']:.4g} of {worst['bound']:.3g}; " if worst["bound"] else ""
    return f"{SHOWN[cell['verdict']]} ({figure}{cell['cases']})"


def power(content: dict[str, Any]) -> str:
    """Bug by rung: x caught, . not, empty where the rung cannot stand."""
    rows = []
    for name, bug in BY_NAME.items():
        result = content["bugs"][name]
        marks = []
        for rung in RUNGS:
            verdict = result["verdicts"].get(str(rung.number))
            mark = power_marks(verdict).replace(".", "·")
            marks.append(f"**{mark}**" if rung.number == bug.rung and mark == "x" else mark)
        what = bug.what + (f" ({result['why']})" if "why" in result else "")
        rows.append([f"`{name}`", bug.framework, what, *marks])
    return markdown(["bug", "in", "what is wrong", *(str(r.number) for r in RUNGS)], rows)


def smallest(content: dict[str, Any]) -> str:
    policies = ("fp64", "fp32", "bf16")
    rows = [
        [f"`{name}`", sizes["unit"], *(_size(sizes, policy) for policy in policies)]
        for name, sizes in content["smallest"].items()
    ]
    return markdown(["bug", "its size", *policies], rows)


def _size(sizes: dict[str, Any], policy: str) -> str:
    if policy not in sizes:
        return ""
    if not sizes[policy]:
        return "not seen at 0.25"
    floor = sizes[policy] <= 0.25 / 2**SMALLEST  # no smaller one was tried
    return f"{'at most ' * floor}{sizes[policy]:.1e}"


def specificity(content: dict[str, Any]) -> str:
    """False alarms and climbs, and the figure of each rule that came nearest to its bound."""
    rows = []
    for rung in RUNGS:
        for policy in FACTORS["policy"]:
            cells = [
                part["rungs"].get(str(rung.number), {}).get(policy) if part else None
                for part in (content["parts"].get(policy), content["parts"].get("rewrites"))
            ]
            if any(cells):
                rows.append([str(rung), policy, *map(_alarms, cells), _nearest(cells)])
    head = ["rung", "policy", "fresh seeds", "rewrites", "worst figure of its bound"]
    return markdown(head, rows)


def _alarms(cell: dict[str, Any] | None) -> str:
    return f"{cell['false_alarms']} of {cell['climbs']}" if cell else ""


def _nearest(cells: list[dict[str, Any] | None]) -> str:
    """Of each rule the figure nearest its bound, whichever part it is from."""
    worst: dict[str, dict[str, Any]] = {}
    for cell in filter(None, cells):
        for rule, held in cell["worst"].items():
            if rule not in worst or held["share"] > worst[rule]["share"]:
                worst[rule] = held
    return "; ".join(
        f"{rule} {held['figure']:.4g} of {held['bound']:.3g}"
        for rule, held in worst.items()
        if held["bound"]
    )


def sensitivity(content: dict[str, Any]) -> str:
    """Kinds, then modules: error alone, what the island removes of the whole error, its time."""
    results, policy = content["frameworks"], content["config"]["precision"]["policy"]
    first = next(iter(results.values()))
    least = first["all"]["gradient"] / 10  # of the single modules, those that matter
    whole = [f"{result['all']['gradient']:.2e}" for result in results.values()]
    rows = {"everything": [*whole, *[""] * 2 * len(results)]}
    for title in ("kinds", "modules"):
        for name, costly in ranked(first[title]):
            if title == "kinds" or costly["alone"]["gradient"] > least:
                found = [(result, result[title][name]) for result in results.values()]
                rows.setdefault(f"`{name}`", [
                    *(f"{row['alone']['gradient']:.2e}" for _, row in found),
                    *(f"{removed(result, row):.1%}" for result, row in found),
                    *(f"{row['time'] - 1:+.1%}" if "time" in row else "" for _, row in found),
                ])  # fmt: skip
    titles = (f"error of the gradient, alone in {policy}", "its island removes", "a step's time")
    head = ["modules", *(f"{title}: {name}" for title in titles for name in results)]
    said = "\n".join(f"- {sentence(name, result)}" for name, result in results.items())
    return markdown(head, [[name, *cells] for name, cells in rows.items()]) + "\n\n" + said


def fuzz(content: dict[str, Any]) -> str:
    """Of each reader: what was tried, how often, what came of it."""
    rows = [
        [name, each["tried"], *(f"{each[count]:,}" for count in ("cases", "accepted", "refused")),
         f"{each['slowest']:.2f}"]
        for name, each in content["readers"].items()
    ]  # fmt: skip
    total = (f"{sum(each['cases'] for each in content['readers'].values()):,}", "", "", "")
    head = ["reader", "tried", "cases", "read", "refused", "slowest, seconds"]
    return markdown(head, [*rows, ["all", "", *total]])


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


TABLES = {
    "status": ("parity", "pytest parity_tests --device {device} --status {file}",
               lambda content: status(content["rungs"])),
    "power": ("power", "lockstep power --out {file}", power),
    "smallest": ("smallest", "lockstep power --grade --out {file}", smallest),
    "specificity": ("specificity", "lockstep specificity --out {file}", specificity),
    "fuzz": ("fuzz", "python -m parity_tests.input.fuzz --out {file}", fuzz),
    "sensitivity": ("sensitivity", "lockstep sensitivity --framework both --out {file}",
                    sensitivity),
}  # fmt: skip


def benchmark(name: str) -> str:
    """A table of a suite's results: SUITE_TABLE."""
    suite, _, table = name.partition("_")
    folder = ROOT / "benchmarks" / "results" / suite
    command = f"python -m benchmarks.run {suite} --out {folder.relative_to(ROOT)}"
    missing = f"Not measured yet. `{command}` does it."
    if table in COMMANDS:
        file, make = COMMANDS[table]
        path = folder / f"{file}.json"
        if not path.exists():
            return missing
        content = json.loads(path.read_text())
        return f"{make(content)}\n\n{origin(content)}"
    text = report.tables(folder).get(table)
    return f"{text}\n\n`{command}`" if text else missing


def experiment(name: str) -> str:
    """An experiment's table and closing sentence, experiment_NAME; or state_FRAMEWORK."""
    kind, _, which = name.partition("_")
    which = which.replace("_", "-")
    file = f"optimizer-state-{which}" if kind == "state" else which
    path = ROOT / "benchmarks" / "results" / "experiments" / f"{file}.json"
    if not path.exists():
        return "Not measured yet."
    content = json.loads(path.read_text())
    if kind == "state":
        return f"{optimizer_state.markdown(content)}\n\n{origin(content)}"
    made, arms = EXPERIMENTS[which], Arms(content["arms"])
    return f"{made.table(arms)}\n\n{made.sentence(arms)}\n\n{origin(content)}"


def learn(name: str) -> str:
    """What a cell of docs/learn.md printed, learn_CELL; or `learn`, where all of it comes from."""
    content = json.loads(lesson.RESULT.read_text())
    _, _, cell = name.partition("_")
    return lesson.table(cell, content, lesson.PAGE.read_text()) if cell else origin(content)


def matmul_table(content: dict[str, Any]) -> str:
    return matmul.markdown(content["framework"], content["size"], content["rows"])


def speed_table(content: dict[str, Any]) -> str:
    return speed.markdown(content["races"])


def growth_table(content: dict[str, Any]) -> str:
    return laws.markdown([laws.Law.from_json(law) for law in content["laws"]])


COMMANDS = {
    "speed": ("speed", speed_table),
    "growth_jax": ("growth-jax", growth_table),
    "growth_torch": ("growth-torch", growth_table),
    "matmul_jax": ("matmul-jax", matmul_table),
    "matmul_torch": ("matmul-torch", matmul_table),
}


def example() -> str:
    """A command of the plan's, and what it prints."""
    words = "plan --model gpt2 --device t4 --framework torch --tokens 1e9 --price 0.35"
    printed = io.StringIO()
    with redirect_stdout(printed):
        commands.main(words.split())
    lines = [f"$ lockstep {words}", *printed.getvalue().splitlines()]
    return "\n".join(f"    {line}".rstrip() for line in lines)


def origin(content: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return (f"`{content['command']}` on {content['device']}, {content['date']}, commit "
            f"{content['commit']}, Python {content['python']}, {versions}.")  # fmt: skip


def render(name: str) -> str:
    """The table, and where its figures come from; for the rungs, one for each device."""
    if name == "memory":
        return f"\n{memory.markdown(json.loads(CONSTANTS.read_text()))}\n\n"
    if name == "plan_cpu":
        return f"\n{plan.markdown(CPU)}\n\n"
    if name == "plan_example":
        return f"\n{example()}\n\n"
    if name == "claims":
        return f"\n{claim.markdown(CLAIMS, Results())}\n\n"
    if name.startswith("learn"):
        return f"\n{learn(name)}\n\n"
    if name.startswith(("experiment_", "state_")):
        return f"\n{experiment(name)}\n\n"
    if name not in TABLES:
        return f"\n{benchmark(name)}\n\n"
    stem, command, make = TABLES[name]
    parts = []
    for device in ("cpu", "cuda") if name == "status" else ("cpu",):
        file = RESULTS / f"{stem}-{device}.json"
        if not file.exists():
            call = command.format(device=device, file=file.relative_to(ROOT))
            parts.append(f"On {device}: not measured yet. `{call}` does it.")
            continue
        content = json.loads(file.read_text())
        parts += [make(content), origin(content)]
    return "\n" + "\n\n".join(parts) + "\n\n"


def written(text: str) -> str:
    """A document with every table rendered anew."""
    return BLOCK.sub(lambda block: block[1] + render(block[2]) + block[4], text)


def main(argv: list[str] | None = None) -> int:
    """The command line, which takes no words: every table is written."""
    Parser(prog="python -m evidence.tables", description=__doc__).parse_args(argv)
    for document in DOCUMENTS:
        document.write_text(written(document.read_text()))
    lesson.NOTEBOOK.write_text(lesson.file(lesson.made(lesson.PAGE.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
