"""The table of `python -m benchmarks.run emulation`: a step that rounds to a format, over fp32's.

On a CPU, which has no units for these formats: what is timed is the emulation.
"""

from benchmarks.measure import Result, tokens_per_step
from benchmarks.report import merge_rounds, refusal
from benchmarks.suites import NARROW
from benchmarks.tables import markdown
from lockstep.config import Config

HEAD = ["policy", "JAX, ms", "over fp32's", "PyTorch, ms", "over fp32's"]


def table(measured: dict[str, Result]) -> str:
    """One row for each policy that has been measured; why there is none otherwise."""
    rows = merge_rounds(row for row in measured.values() if "cell" in row)
    if why := refusal(rows):
        return f"Refused: {why}."
    found = {
        (row["cell"]["contender"], row["config"]["precision"]["policy"]): milliseconds(row)
        for row in rows
        if row["status"] == "ok"
    }
    policies = [
        policy
        for policy in ("fp32", "tf32", *NARROW)
        if all((framework, policy) in found for framework in ("jax", "torch"))
    ]
    return markdown(HEAD, [
        [f"`{policy}`", *(cell for framework in ("jax", "torch") for cell in (
            f"{found[framework, policy]:,.0f}",
            f"{found[framework, policy] / found[framework, 'fp32']:.2f}",
        ))]
        for policy in policies
    ])  # fmt: skip


def milliseconds(row: Result) -> float:
    """Of a step, in the median window."""
    return 1e3 * tokens_per_step(Config.from_json(row["config"])) / row["tokens_per_second"]
