"""The tables of the parity ladder: its verdicts, its detection of mutants, its false positives.

Under each stands how many of its rows were judged by other bounds than today's code has.
"""

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.tables import markdown
from lockstep.config.policy import POLICIES
from lockstep.judge import tolerances
from lockstep.judge.tolerances import Tolerance
from lockstep.parity.catalogue import BY_NAME
from lockstep.parity.ladder import RUNGS
from lockstep.parity.matrix import FACTORS
from lockstep.parity.power import SMALLEST, mark
from lockstep.parity.sensitivity import rank, removed_share, sentence

Row = dict[str, Any]
Rows = dict[str, Row]  # by name

ORDER = ("", "equal", "inconclusive", "different", "failed")
SHOWN = {"equal": "equal", "inconclusive": "inconclusive", "different": "**different**"}
CURVES = 8


def summarise(outcomes: Iterable[Row]) -> Rows:
    """Gives each rung and policy its worst verdict, its cases and the finding nearest its bound."""
    rows: Rows = {}
    for outcome in outcomes:
        rung, policy = outcome["rung"], outcome["policy"]
        new: Row = {"rung": rung, "policy": policy, "emulated": outcome.get("emulated", False),
                    "verdict": "", "cases": 0, "seconds": 0}  # fmt: skip
        row = rows.setdefault(f"{policy} {rung}", new)
        row["seconds"] += outcome.get("seconds", 0)
        row["cases"] += 1
        if outcome["verdict"] == "failed":
            row |= {"verdict": "failed", "why": f"{outcome['row']}: {outcome['why']}"}
            continue
        found = {"row": outcome["row"], **outcome["worst"]}
        if _rank(outcome["verdict"], found) > _rank(row["verdict"], row.get("worst")):
            row |= {"verdict": outcome["verdict"], "worst": found}
    return rows


def _rank(verdict: str, worst: Row | None) -> tuple[int, float]:
    return ORDER.index(verdict), -1.0 if worst is None else share(worst)


def share(worst: Row) -> float:
    """How much of its bound a figure takes."""
    return worst["figure"] / worst["bound"] if worst["bound"] else float(worst["figure"] > 0)


def figure(worst: Row) -> str:
    return f"{worst['figure']:.3g} of {worst['bound']:.3g}"


def title(policy: str, rows: Rows) -> str:
    emulated = any(row.get("emulated") for row in rows.values() if row["policy"] == policy)
    return f"{policy} (emulated)" if emulated else policy


def status(rows: Rows) -> str:
    """Rung by policy: the verdict, the figure nearest its bound, and how many cases."""
    policies = FACTORS["policy"]
    cells = [
        [str(rung), *(_cell(rows.get(f"{policy} {rung.number}")) for policy in policies)]
        for rung in RUNGS
    ]
    return markdown(["rung", *(title(policy, rows) for policy in policies)], cells)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["verdict"] == "failed":
        return f"failed: {row['why']}"
    nearest = f"{figure(row['worst'])}; " if row["worst"]["bound"] else ""
    return f"{SHOWN[row['verdict']]} ({nearest}{row['cases']})"


def policies(rows: Rows) -> str:
    """A line for each policy."""
    lines = []
    for policy in FACTORS["policy"]:
        done = [row for row in rows.values() if row["policy"] == policy]
        if not done:
            lines.append([f"`{policy}`", "not measured yet", "", ""])
            continue
        equal = sum(row["verdict"] == "equal" for row in done)
        figures = [row for row in done if "worst" in row]
        gaps = [row for row in figures if not row["worst"]["rule"].startswith("bytes of ")]
        nearest = max(gaps, key=lambda row: share(row["worst"]), default=None)
        curves = next((row["worst"] for row in figures if row["rung"] == CURVES), None)
        lines.append([
            f"`{title(policy, rows)}`", f"{equal} of {len(done)}",
            f"{figure(nearest['worst'])}: {nearest['worst']['rule']}, "
            f"rung {RUNGS[nearest['rung'] - 1]}" if nearest else "",
            f"{figure(curves)}: {curves['rule']}" if curves else "",
        ])  # fmt: skip
    head = [
        "policy", "rungs equal, of those climbed",
        "largest figure of its tolerance, memory excluded", "gap of the loss curves",
    ]  # fmt: skip
    return markdown(head, lines)


def power(rows: Rows) -> str:
    """Mutant by rung: x caught, . not, empty where the rung cannot stand."""
    lines = []
    for name, bug in BY_NAME.items():
        row = rows.get(name, {"verdicts": {}})
        marks = []
        for rung in RUNGS:
            each = mark(row["verdicts"].get(str(rung.number))).replace(".", "·")
            marks.append(f"**{each}**" if rung.number == bug.rung and each == "x" else each)
        what = bug.what + (" (not measured yet)" if not row["verdicts"] else "")
        lines.append([f"`{name}`", bug.framework, what, *marks])
    rungs = (f"rung {rung.number}" for rung in RUNGS)
    return markdown(["mutant", "twin", "what is wrong", *rungs], lines)


def smallest(rows: Rows) -> str:
    shown = ("fp64", "fp32", "bf16")
    units = {row["bug"]: row["unit"] for row in rows.values()}
    lines = [
        [f"`{bug}`", unit, *(_size(rows.get(f"{bug} {policy}")) for policy in shown)]
        for bug, unit in units.items()
    ]
    return markdown(["mutant", "unit of its size", *(f"smallest in {p}" for p in shown)], lines)


def _size(row: Row | None) -> str:
    if row is None:
        return ""
    if not row["size"]:
        return "not caught at 0.25"
    floor = row["size"] <= 0.25 / 2**SMALLEST  # no smaller one was tried
    return f"{'at most ' * floor}{row['size']:.1e}"


def specificity(rows: Rows) -> str:
    """False positives and climbs, and the figure of each rule that came nearest to its bound."""
    lines = []
    for rung in RUNGS:
        for policy in FACTORS["policy"]:
            columns = [
                [rows[name]] if (name := f"{part} {rung.number} {policy}") in rows else []
                for part in (policy, "rewrites")
            ]
            if any(columns):
                nearest = _nearest([cell for column in columns for cell in column])
                lines.append([str(rung), policy, *map(_alarms, columns), nearest])
    tried = (f"false positives, {what}" for what in ("fresh seeds", "variants"))
    head = ["rung", "policy", *tried, "maximum, and its tolerance"]
    return markdown(head, lines)


def _alarms(cells: list[Row]) -> str:
    alarms, climbs = (sum(cell[each] for cell in cells) for each in ("false_alarms", "climbs"))
    return f"{alarms} of {climbs}" if cells else ""


def _nearest(cells: list[Row]) -> str:
    """Names for each rule the figure nearest its bound, whichever part it is from."""
    worst: Rows = {}
    for cell in cells:
        for rule, each in cell["worst"].items():
            if rule not in worst or each["share"] > worst[rule]["share"]:
                worst[rule] = each
    return "; ".join(f"{rule} {figure(each)}" for rule, each in worst.items() if each["bound"])


def sensitivity(rows: Rows) -> str:
    """Kinds, then modules: error alone, what the island removes of the whole error, its time."""
    first = next(iter(rows.values()))
    policy = first["config"]["precision"]["policy"]
    least = first["all"]["gradient"] / 10  # of the single modules, those that matter
    whole = [f"{row['all']['gradient']:.2e}" for row in rows.values()]
    lines = {"everything": [*whole, *[""] * 2 * len(rows)]}
    for title in ("kinds", "modules"):
        for name, costly in rank(first[title]):
            if title == "kinds" or costly["alone"]["gradient"] > least:
                found = [(row, row[title][name]) for row in rows.values()]
                lines.setdefault(f"`{name}`", [
                    *(f"{each['alone']['gradient']:.2e}" for _, each in found),
                    *(f"{removed_share(row, each):.1%}" for row, each in found),
                    *(f"{each['time'] - 1:+.1%}" if "time" in each else "" for _, each in found),
                ])  # fmt: skip
    titles = (f"gradient's error, alone in {policy}", "share that its island removes", "step time")
    head = ["modules", *(f"{title}: {name}" for title in titles for name in rows)]
    said = "\n".join(f"- {sentence(name, row)}" for name, row in rows.items())
    return markdown(head, [[name, *cells] for name, cells in lines.items()]) + "\n\n" + said


def verdicts(rows: Rows) -> str:
    """The table of `status`, and for each policy what is not equal: figure and place."""
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows.values()):
        own = [row for row in rows.values() if row["policy"] == policy]
        other = [row for row in own if row["verdict"] != "equal"]
        cases, equal = sum(row["cases"] for row in own), len(own) - len(other)
        said = "; ".join(_describe_difference(row) for row in other)
        lines.append([f"`{title(policy, rows)}`", str(cases), f"{equal} of {len(own)}", said])
    head = ["policy", "cases", "rungs equal, of those climbed", "not equal"]
    return "\n\n".join([status(rows), markdown(head, lines)])


def _describe_difference(row: Row) -> str:
    if row["verdict"] == "failed":
        return f"rung {row['rung']}: failed, {row['why']}"
    worst = row["worst"]
    return f"rung {row['rung']}: {worst['rule']} {figure(worst)} at {worst['where']}"


# --- bounds

# Rule -> its constant in `tolerances`.
NAMES = {
    "gap of the losses, in nats": "RUN", "gap of the gradient norms": "RUN_NORM",
    "gap over envelope": "ENVELOPE",
    "gap over envelope, of gradient norms": "ENVELOPE", "gap over noise, at the end": "ENVELOPE",
    "gap over noise": "NOISE", "noise over noise": "SENSITIVITY",
}  # fmt: skip
BY_POLICY = ("tapped against trained", "gap to what keeps everything")  # the norm rule, or noise


# Rung -> the constants of "relative gap".
RELATIVE = {2: ("NORM", "PASS"), 3: ("PASS",), 4: ("NORM",), 5: ("PASS",)}


def bounds_of(rule: str, policy: str, rung: int | None = None) -> set[float]:
    """The bounds by which today's code may judge a rule; any of its bounds if it is not listed."""
    if rule == "relative gap":
        names = RELATIVE.get(rung or 0, ("NORM", "PASS", "END"))
        return {getattr(tolerances, name).bound for name in names}
    if rule.startswith("bytes of "):
        return {tolerances.MEMORY[rule.split()[2]].bound}
    if rule in BY_POLICY:
        exact = POLICIES[policy].compute == "float64"
        return {(tolerances.PASS if exact else tolerances.NOISE).bound}
    if rule in NAMES:
        return {getattr(tolerances, NAMES[rule]).bound}
    known = [*vars(tolerances).values(), *tolerances.MEMORY.values()]
    return {0.0, *(each.bound for each in known if isinstance(each, Tolerance))}


def find_outdated(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Row -> the rules by which it was judged under another bound than today's, and both bounds."""
    found: dict[str, list[str]] = {}
    for row in rows:
        worst = row.get("worst", {})
        judged = {worst["rule"]: worst} if "rule" in worst else worst
        for rule, each in judged.items():
            today = bounds_of(rule, row["policy"], row.get("rung"))
            if each["bound"] not in today:
                now = " or ".join(f"{bound:g}" for bound in sorted(today))
                found.setdefault(row["name"], []).append(f"{rule} {each['bound']:g}, now {now}")
    return found


def with_remark(make: Callable[[Rows], str], rows: Rows) -> str:
    """A table, and below it whether its rows were judged by other bounds than today's."""
    found = find_outdated(rows.values())
    if not found:
        return make(rows)
    rules = "; ".join(dict.fromkeys(rule for each in found.values() for rule in each))
    remark = f"**Recorded under other bounds than the code's: {len(found)} of {len(rows)} rows**"
    return f"{make(rows)}\n\n{remark} ({rules})."
