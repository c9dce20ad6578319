"""The three experiments, which `python -m benchmarks.run NAME` makes."""

from benchmarks.experiments import formats, overflow, when_fp32
from benchmarks.experiments.frame import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "overflow": overflow.EXPERIMENT,
    "when-fp32": when_fp32.EXPERIMENT,
    "formats": formats.EXPERIMENT,
}
# The scale of the rows that docs/experiments.md shows.
RECORDED = {name: "full" if name == "formats" else "smoke" for name in EXPERIMENTS}
