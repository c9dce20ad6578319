"""What came of an experiment's arms, and how its tables and its sentence put it."""

from collections.abc import Iterable

from benchmarks.experiments.arm import FRAMEWORKS
from benchmarks.measure import Result


class Arms:
    """The results of an experiment's arms, each a dict with its `label` and `framework`."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.all = list(results)

    @property
    def good(self) -> list[Result]:
        """Of those that could run."""
        return [result for result in self.all if result["status"] == "ok"]

    def complete(self, *labels: str) -> dict[str, list[Result]]:
        """Framework -> the results of these arms, in this order, where all of them could run."""
        found = {(result["framework"], result["label"]): result for result in self.good}
        return {
            framework: [found[framework, label] for label in labels]
            for framework in FRAMEWORKS
            if all((framework, label) in found for label in labels)
        }

    def failures(self) -> list[str]:
        return [
            f"{result['framework']} {result['label']}: {result['status']} ({result['why']})"
            for result in self.all
            if result["status"] != "ok"
        ]


def closing(parts: Iterable[str], arms: Arms) -> str:
    """The closing words: a part for each framework, and whatever could not run."""
    said = "; ".join([*parts, *(f"not measured: {failure}" for failure in arms.failures())])
    return f"{said[:1].upper()}{said[1:]}." if said else "Nothing was measured."


def memory(result: Result) -> int | None:
    """Bytes that training needs: the allocator's peak on CUDA; on a CPU, where the resident set
    holds what libraries keep for later too, the framework's account of a step, weights, moments."""
    if result["about"]["platform"] != "cpu":
        return result["peak_bytes"]
    needed = result["predicted_bytes"]
    return None if needed is None else needed + result["state_bytes"]


def milliseconds(result: Result) -> float:
    """Of a step, in the median window."""
    return 1e3 * result["tokens_per_step"] / result["tokens_per_second"]


def failure_row(result: Result, head: list[str], told: int) -> list[str] | None:
    """The row of an arm that could not run, after its first cells; None if it could."""
    if result["status"] == "ok":
        return None
    return [f"{result['status']}: {result['why']}", *[""] * (len(head) - told - 1)]


def mebibytes(count: int | None) -> str:
    return "n/a" if count is None else f"{count / 2**20:,.1f}"


def share(result: Result, whole: Result) -> str:
    part, of = memory(result), memory(whole)
    return "an unknown part" if part is None or not of else f"{part / of:.2f}"
