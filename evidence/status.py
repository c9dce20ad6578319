"""`python -m evidence status`: how old the rows are, and what has changed since."""

from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

from evidence import bounds
from evidence.parts import Part
from lockstep import provenance
from lockstep.results import Row

FOLDERS = 3  # that a line names, those with most changes first


def lines(parts: list[Part]) -> Iterator[str]:
    """A line or two for each part."""
    for part in parts:
        found = part.found()
        rows = [row for each in found.values() for row in each]
        measured = sum(map(bool, found.values()))
        yield f"{part.name}: {measured} of {len(found)} measured; {age(part, rows)}"
        if other := bounds.outdated(rows):
            rules = sorted({rule for each in other.values() for rule in each})
            yield f"  recorded under other bounds: {len(other)} rows ({'; '.join(rules)})"


def age(part: Part, rows: list[Row]) -> str:
    """How many commits ago, and whether anything that the figures depend on has changed since."""
    if not rows:
        return "nothing to be stale"
    ages, changed, unknown, stale = set[int](), Counter[str](), 0, 0
    for row in rows:
        commit = row["measured"]["commit"]
        files = provenance.changed_files(commit, part.paths)
        ago = provenance.commits_since(commit)
        unknown += files is None
        stale += bool(files)
        ages |= set() if ago is None else {ago}
    for commit in {row["measured"]["commit"] for row in rows}:
        for file in provenance.changed_files(commit, part.paths) or ():
            changed[str(PurePath(*PurePath(file).parts[:2]))] += 1
    when = " to ".join(dict.fromkeys((str(min(ages)), str(max(ages))))) if ages else "unknown"
    parts = [f"{when} commits ago"]
    if stale:
        most = ", ".join(folder for folder, _ in changed.most_common(FOLDERS))
        parts.append(f"{stale} of {len(rows)} rows stale: {most} changed since")
    if unknown:
        parts.append(f"{unknown} of {len(rows)} rows at a commit that is not known")
    return "; ".join(parts if stale or unknown else [*parts, "current"])
