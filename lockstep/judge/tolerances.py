"""Every tolerance of the ladder, with its reason. None is fitted to a machine.

In float64 a tolerance follows from the format and the number of roundings. Below it, a gap is held
against noise that is measured where the test runs (`lockstep.judge.noise`): what stays constant is
a factor on that noise, and a floor that follows from the formats.
`lockstep specificity` measures the largest figure over seeds and rewrites.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from lockstep.config.policy import Roles


def epsilon(dtype: str) -> float:
    """Returns the distance from 1 to the next larger number of a format."""
    if dtype == "tf32":
        return 2.0**-10
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    bound: float
    reason: str


NORM = Tolerance(
    bound=1e-12,
    reason="float64 rounds at 1.1e-16; a few thousand roundings in a row, at random, reach 1e-14. "
    "Not elementwise: elements near zero have no relative accuracy in any correct program.",
)

# In the ladder's matrix the longest sum has 256 terms: the vocabulary, or the targets of the batch
# with which micro-batches are compared. Random roundings grow with the root: 16 epsilons a sum.
# Forward and back there are some 32 such sums behind one another.
SUMS = 16 * 32 * epsilon("float64")

PASS = Tolerance(
    bound=SUMS,
    reason="a tensor of one pass, forward or back: 1.1e-13. Of means that cancel, and of what Adam "
    "divides, it is not true: those have NORM.",
)

RUN = Tolerance(
    bound=SUMS,
    reason="nats, over the 40 steps of the ladder's runs: a loss of 5.5 nats has the roundings of "
    "a pass, and the steps before it add in second order.",
)

RUN_NORM = Tolerance(
    bound=2 * SUMS,
    reason="over the same steps, of norms up to 4: the weights' error shows in first order.",
)

END = Tolerance(
    bound=1e-11,
    reason="the state after such a run: a gradient that is nothing but rounding, 1e-18, moves a "
    "weight by its size over Adam's 1e-8, times the rate: 1e-13 a step, of weights of 0.1.",
)

CURVE = Tolerance(
    bound=1e-12,
    reason="nats, over a whole float64 run of any length and size: rounding of 1e-15 a step, which "
    "a run that learns smoothly damps rather than amplifies.",
)

CURVE_NORM = Tolerance(
    bound=1e-10,
    reason="the gradient's norm follows the weights, not the loss's minimum: an error in them "
    "shows in it to first order, in the loss to second.",
)

ENVELOPE = Tolerance(
    bound=3.0,
    reason="two correct programs part as far as one program parts from itself when its weights "
    "move by one ulp; the largest of twelve such runs is itself uncertain by a factor of 2.",
)

NOISE = Tolerance(
    bound=2.0,
    reason="the gap of two programs has the roundings of both, and so has the gap of one program "
    "to itself from weights an ulp away, which adds the ulp: the ratio is at most 1. Over the "
    "elements of a tensor chance averages out; 2 is for small tensors.",
)

SENSITIVITY = Tolerance(
    bound=2.0,
    reason="the two programs are one function, whose answer to an ulp is one, and it is most of "
    "the noise. A wrong program must not hide its gap in noise of its own.",
)

# The gap that no perturbation need show, in ulps of float32: a logarithm of a sum is rounded alike
# in all runs of one program, and otherwise in another.
FLOOR_ULPS = 2
FLOOR = FLOOR_ULPS * epsilon("float32")  # of a tensor, relative

# Bytes of one step over those of the next wider remat mode, 16 layers: by the residuals kept, two a
# layer for some forty, one for two, 8 in all for 16 beside one block's; the matmuls' outputs alone.
MEMORY = {
    "sublayer": Tolerance(bound=0.5, reason="two residuals a layer for some forty"),
    "block": Tolerance(bound=0.95, reason="one residual a layer for two"),
    "sqrt": Tolerance(bound=0.95, reason="8 of 16 residuals, beside one block"),
    "dots": Tolerance(bound=0.75, reason="the matmuls' outputs alone"),
}

# Beyond this width of the envelope (in nats) a configuration is chaotic and can tell nothing, and
# the verdict is inconclusive from that step on; by whether the policy rounds operands.
ENVELOPE_CAP = {"float64": 0.0, "float32": 5e-6, "rounded": 5e-3}


def envelope_cap(roles: Roles) -> float:
    rounded = roles.mixed or roles.tf32 or roles.recipe or roles.grads not in ("", roles.compute)
    return ENVELOPE_CAP["rounded" if rounded else roles.compute]


# The share of a run's steps that must lie before the horizon for "equal": of a run whose first step
# alone counts, nothing is known.
LEAST_SHARE = 0.5

# Steps that the envelope is taken ahead: in half precision a flip that every run meets sooner or
# later, one of them meets first (docs/decisions/0009).
LAG = 5
