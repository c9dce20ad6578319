"""Every public pair, by name."""

from benchmarks.public_ports import algoperf, bonsai, griffin, jaxbench
from benchmarks.public_ports.programs import Pair

FAMILIES = (jaxbench, algoperf, griffin, bonsai)
PAIRS: dict[str, Pair] = {pair.name: pair for family in FAMILIES for pair in family.PAIRS}
