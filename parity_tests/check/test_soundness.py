"""Wrong ports at the places where a difference could be forgiven are different; the right ports
beside them are equal."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.check import causes, check, report
from lockstep.check.roots import backward
from lockstep.check.sides import trace
from lockstep.check.sides.port import Port
from lockstep.check.sides.program import UserProgram
from lockstep.check.sides.trace import Trace
from lockstep_recorder.recording import VARIED
from parity_tests.check import unsound_programs as programs
from parity_tests.check.inside import ALONE, Inside, check_inside, check_pair, record, record_inside
from parity_tests.check.unsound_programs import KINDS, Row
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

STEPS = 4


@pytest.fixture(autouse=True)
def _no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out causes and lines, which take most of the time: no verdict hangs on them, but for
    an acceptance by cause."""
    monkeypatch.setattr(causes, "explain", lambda roots, evidence: None)
    monkeypatch.setattr(check, "name_lines", lambda *given: [])
    monkeypatch.setattr(backward, "name_and_join", lambda *given: [])


def by_id(rows: Iterable[Row], kind: str = "") -> list[Any]:
    return [pytest.param(row, id=f"{kind}{row.id}") for row in rows]


def write_port(row: Row, folder: Path) -> Path:
    text = row.port or row.reference
    for old, new in row.changes:
        assert old in text, old
        text = text.replace(old, new)
    (folder / "port.py").write_text(text)
    return folder / "port.py"


def require(result: check.Result, row: Row) -> None:
    assert result.verdict == row.verdict, [root.name for root in result.roots]
    assert row.told in report.headline(result)


@pytest.mark.parametrize("row", [each for kind, rows in KINDS.items()
                                 for each in by_id(rows, f"{kind}: ")])  # fmt: skip
def test_torch(row: Row) -> None:
    options = {"again": False, **row.options}
    require(check_pair(row.reference, row.port or row.reference, *row.changes, **options), row)


@pytest.fixture(scope="module")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A reference in JAX, whose clip has no epsilon."""
    folder = tmp_path_factory.mktemp("clipped")
    (folder / "ref.py").write_text(programs.JAX_CLIP)
    program = UserProgram(str(folder / "ref.py"))
    try:
        program.record(folder / "trace", STEPS)
    finally:
        program.close()
    found = trace.read(folder / "trace")
    few = {
        name: x[: 2 * ALONE * STEPS]
        for name, x in found.arrays.items()
        if name.startswith(tuple(VARIED))
    }
    return replace(found, arrays={**found.arrays, **few})


@pytest.mark.parametrize("row", by_id(programs.CLIPS))
def test_behind_a_clip_s_epsilon(row: Row, clipped: Trace, tmp_path: Path) -> None:
    port = write_port(row._replace(port=programs.TORCH_CLIP), tmp_path)
    require(check_inside(clipped, port, **row.options), row)


@pytest.mark.parametrize("row", by_id(programs.OWN_PRECISION))
def test_own_precision(row: Row, tmp_path: Path) -> None:
    (tmp_path / "ref.py").write_text(row.reference)
    recorded = record_inside(tmp_path / "ref.py", tmp_path / "trace", STEPS, own=True)
    require(check_inside(recorded, write_port(row, tmp_path), own=True, **row.options), row)


@tier("rest", guard="the same kinds between torch and torch, and behind a clip's epsilon")
@pytest.mark.parametrize("row", by_id(programs.IN_JAX))
def test_jax(row: Row, tmp_path: Path) -> None:
    recorded = record(row.reference, tmp_path)
    file = write_port(row._replace(port=programs.OF_JAX), tmp_path)
    program = UserProgram(str(file))
    try:
        port = Port(program, recorded)
        again = lambda: Inside(tmp_path / "ref.py")  # noqa: E731
        require(check.run(recorded, port, again=again, **row.options), row)
    finally:
        program.close()
