"""How far the final losses of one table's cells may part, in nats.

`python -m benchmarks.run drift` measures how far they do.
"""

from lockstep.config.policy import Roles
from lockstep.judge.tolerances import Tolerance

EXACT = Tolerance(bound=1e-9, reason="rounding alone")
SINGLE = Tolerance(
    bound=1e-4,
    reason="another order of sums, amplified by 45 steps; another optimizer parts by tenths",
)
HALF = Tolerance(
    bound=0.02,
    reason="each framework rounds half-precision and TF32 matmuls in its own order, and others at "
    "other places: 1e-2 to 1e-3 a number, which the mean over thousands of tokens brings down",
)


def final_loss(roles: Roles) -> Tolerance:
    if roles.compute == "float64":
        return EXACT
    return HALF if roles.mixed or roles.tf32 or roles.recipe else SINGLE
