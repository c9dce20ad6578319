"""How far the final losses of one table's cells may part, in nats, by compute dtype."""

from lockstep.parity.tolerances import Tolerance

_HALF = Tolerance(
    bound=0.02,
    reason="some forty steps from the same weights, each framework rounding half-precision matmuls "
    "in its own order, and peers rounding at other places: an epsilon of 1e-2 to 1e-3 a number, "
    "which the mean over thousands of tokens brings down. Another loss or optimizer parts by "
    "tenths.",
    measured="4.1e-3 over 17 cells of one workload (bf16, `benchmarks.run cpu`)",
)
FINAL_LOSS = {
    "float64": Tolerance(bound=1e-9, reason="rounding alone", measured="1.8e-15"),
    "float32": Tolerance(
        bound=2e-3, reason="another order of sums, amplified by the steps", measured="2.1e-6"
    ),
    "bfloat16": _HALF,
    "float16": _HALF,
}
