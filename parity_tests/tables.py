"""The tables of the documents, made from the results that are committed beside them.

pytest parity_tests/test_ladder.py --full --status docs/results/parity-cpu.json
lockstep power --grade --out docs/results/power-cpu.json
lockstep specificity --out docs/results/specificity-cpu.json
python -m parity_tests.tables      # writes every table anew
"""

import json
import re
from pathlib import Path
from typing import Any

from lockstep.parity.bugs import BY_NAME
from lockstep.parity.ladder import RUNGS
from lockstep.parity.matrix import FACTORS
from lockstep.parity.power import mark as power_marks

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "parity.md")
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
    figure = f"{worst['figure']:.2g} of {worst['bound']:.2g}; " if worst["bound"] else ""
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
    return f"{sizes[policy]:.1e}" if sizes[policy] else "not seen at 0.25"


def specificity(content: dict[str, Any]) -> str:
    """False alarms and climbs, and the figure of each rule that came nearest to its bound."""
    rows = []
    for rung in RUNGS:
        for policy, cell in content["rungs"].get(str(rung.number), {}).items():
            worst = "; ".join(
                f"{rule} {held['figure']:.2g} of {held['bound']:.2g}"
                for rule, held in cell["worst"].items()
                if held["bound"]
            )
            alarms = f"{cell['false_alarms']} of {cell['climbs']}"
            rows.append([str(rung), policy, alarms, worst])
    return markdown(["rung", "policy", "false alarms", "worst figure of its bound"], rows)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


TABLES = {
    "status": ("parity", "pytest parity_tests --device {device} --status {file}",
               lambda content: status(content["rungs"])),
    "power": ("power", "lockstep power --out {file}", power),
    "smallest": ("smallest", "lockstep power --grade --out {file}", smallest),
    "specificity": ("specificity", "lockstep specificity --out {file}", specificity),
}  # fmt: skip


def render(name: str) -> str:
    """The table, and where its figures come from; for the rungs, one for each device."""
    stem, command, make = TABLES[name]
    parts = []
    for device in ("cpu", "cuda") if name == "status" else ("cpu",):
        file = RESULTS / f"{stem}-{device}.json"
        if not file.exists():
            call = command.format(device=device, file=file.relative_to(ROOT))
            parts.append(f"On {device}: not measured yet. `{call}` does it.")
            continue
        content = json.loads(file.read_text())
        versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        parts += [make(content), f"`{content['command']}` on {content['device']}, "
                  f"{content['date']}, commit {content['commit']}, Python {content['python']}, "
                  f"{versions}."]  # fmt: skip
    return "\n" + "\n\n".join(parts) + "\n\n"


def written(text: str) -> str:
    """A document with every table rendered anew."""
    return BLOCK.sub(lambda block: block[1] + render(block[2]) + block[4], text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(written(document.read_text()))
