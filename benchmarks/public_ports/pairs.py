"""Every public pair, by name."""

from benchmarks.public_ports import algoperf, bonsai, griffin, jaxbench, transformers_twins
from benchmarks.public_ports.programs import Pair

FAMILIES = (jaxbench, algoperf, griffin, bonsai, transformers_twins)
PAIRS: dict[str, Pair] = {pair.name: pair for family in FAMILIES for pair in family.PAIRS}
