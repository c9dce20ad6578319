"""Every table of planted bugs is in the list that `python -m parity_tests.bugs` prints."""

import re

from lockstep.process import ROOT
from parity_tests import bugs
from parity_tests.tiers import tier

pytestmark = tier("quick", guard="house rules")


MERGED = re.compile(r"mutants/(torch|jax|module)_(bugs|formats|step|world)\.py")  # in catalogue's
PLANTS_OTHERS = {"parity_tests/cuda/test_power.py", "parity_tests/tpu/test_step.py"}


def test_every_table_of_bugs_is_read() -> None:
    """A file that declares bugs is known to the list, or its bugs are in a table that is."""
    rooms = ("lockstep", "mutants", "benchmarks", "parity_tests")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    declared = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if re.search(r"^BUGS\b.*=", path.read_text(), re.MULTILINE)
    }
    read = {f"{table.module.replace('.', '/')}.py" for table in bugs.TABLES.values()}
    assert {path for path in declared if not MERGED.match(path)} - PLANTS_OTHERS == read
