"""The table of public ports: what `check` says, beside what a person found."""

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks import tables
from benchmarks.public_ports.pairs import PAIRS
from benchmarks.public_ports.programs import Pair, Source
from lockstep.results import Row

HEAD = ["pair", "`check` says", "where", "by hand", "their own tests"]
SHOWN = 2  # roots of a pair


def markdown(rows: Iterable[Row]) -> str:
    """A summary, and a line for each pair; of a row whose pair is gone, nothing."""
    listed = [row for row in rows if row["pair"] in PAIRS]
    found = [(PAIRS[row["pair"]], row) for row in listed]
    lines = [[_name(pair, row), _verdict(pair, row), _where(row), _by_hand(pair), pair.own_tests]
             for pair, row in found]  # fmt: skip
    return f"{summarise(found)}\n\n{tables.markdown(HEAD, lines)}"


def summarise(found: Sequence[tuple[Pair, Row]]) -> str:
    """How many pairs differ, and how often `check` and a person agree."""
    looked = [(pair, row) for pair, row in found if pair.differs is not None]
    differ = sum(bool(pair.differs) for pair, _ in looked)
    said = Counter(_word(row) for _, row in found)
    called = ", ".join(f"{said[verdict]} {verdict}" for verdict in sorted(said))
    missed = [pair.name for pair, row in looked if pair.differs and _word(row) == "equal"]
    false = [pair.name for pair, row in looked
             if pair.differs is False and _word(row) == "different"]  # fmt: skip
    return (
        f"Of {len(found)} public pairs, {len(looked)} are verified by hand, and {differ} of these "
        f"differ. `check` calls {called}. Differ by hand and are called equal: {_names(missed)}. "
        f"Are equal by hand and are called different: {_names(false)}."
    )


def _word(row: Row) -> str:
    """The verdict; of a pair that has none, that it does not run."""
    return row.get("verdict", "does not run")


def _names(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _name(pair: Pair, row: Row) -> str:
    links = " → ".join(
        f"[{side}]({_address(source, at)})" if not source.package else f"{source.package} {at}"
        for side, source, at in zip(("reference", "port"), pair.sources, row["at"])
    )
    return f"{pair.name}: {links}"


def _address(source: Source, commit: str) -> str:
    return f"https://github.com/{source.repository}/blob/{commit}/{source.path}"


def _verdict(pair: Pair, row: Row) -> str:
    if "verdict" not in row:
        return _word(row)
    roots = len(row["roots"])
    more = f", {roots} root{'s' * (roots != 1)}" if roots else ""
    drawn = f"; initial values differ ({row['initial']})" if row["initial"] and pair.draws else ""
    return f"{_word(row)}{more}{drawn}"


def _where(row: Row) -> str:
    if "verdict" not in row:
        return _escape(row["why"])
    shown = [_root(root) for root in row["roots"][:SHOWN]]
    left = len(row["roots"]) - SHOWN
    return "; ".join([*shown, *([f"{left} more"] if left > 0 else [])])


def _root(root: Row) -> str:
    """The first of its places; of its cause, what stands before any list."""
    first, *others = root["where"].split(", ")
    size = "" if root["figure"] is None else f" {root['figure']:.2g}"
    text = f"{first}{f' and {len(others)} more' if others else ''}, {root['direction']}{size}"
    if root["cause"]:
        text += f": {root['cause'].split(': ')[0]}"
    if root["lines"]:
        text += f" ({' and '.join(root['lines'])})"
    return _escape(text)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def _by_hand(pair: Pair) -> str:
    if pair.differs is None:
        return "nobody looked"
    return f"{pair.why or 'equal'} ({pair.by_hand})" if pair.by_hand else pair.why or "equal"
