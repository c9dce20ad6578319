"""Every bound of the ladder, with its reason and the figure measured when it was set.

Measured on a CPU, jax 0.10.2 and torch 2.13.0. `lockstep specificity` measures the worst figure
over many seeds and harmless rewrites; its result, in docs/results, stands in the README, and
`test_tolerances.py` holds these bounds to it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    bound: float
    reason: str
    measured: str


NORM = Tolerance(
    bound=1e-12,
    reason="float64 rounds at 1.1e-16; a few thousand roundings in a row, at random, reach 1e-14. "
    "Not elementwise: elements near zero have no relative accuracy in any correct program.",
    measured="1.1e-13, where 16 is added to what a norm takes in; else 1.3e-14",
)

CURVE = Tolerance(
    bound=1e-12,
    reason="nats, over a whole float64 run: rounding of 1e-15 a step, which a run that learns "
    "smoothly damps rather than amplifies.",
    measured="1.8e-15 over 300 steps",
)

CURVE_NORM = Tolerance(
    bound=1e-10,
    reason="the gradient's norm follows the weights, not the loss's minimum: an error in them "
    "shows in it to first order, in the loss to second.",
    measured="8.2e-14 over 20 steps",
)

ENVELOPE = Tolerance(
    bound=3.0,
    reason="two correct programs part as far as one program parts from itself when its weights are "
    "moved by one ulp; the largest of eight such runs is itself uncertain by a factor of 2.",
    measured="2.63 (bf16), 1.65 (fp16) over 50 seeds; 1.25 by a harmless rewrite",
)

# By the compute dtype: r or 1/r, whichever is larger, of one tensor and of the median tensor.
RATIO = {
    "float32": Tolerance(
        bound=3.0,
        reason="XLA sums the rows of a small reduction one after the other, torch in a tree: a "
        "norm's gain or a head's gradient, both sums over rows, are twice as far off there.",
        measured="1.76; 2.6 in an earlier program",
    ),
    "bfloat16": Tolerance(
        bound=1.3,
        reason="both round at the same places; what is left is chance in tensors of some 32 "
        "elements. A model that rounds each bias twice is far outside.",
        measured="1.04; 1.16 by a harmless rewrite",
    ),
    "float16": Tolerance(
        bound=1.5,
        reason="as in bfloat16; but its rounding is nearer to float32's, whose sums part",
        measured="1.17",
    ),
}
# A relative error below this is float32's, whatever the policy: bfloat16 rounds at 4e-3, float16 at
# 5e-4, float32 at 6e-8.
FLOAT32_ERROR = 1e-5
MEDIAN = {
    "float32": Tolerance(
        bound=1.5,
        reason="over all tensors chance averages out, but for what all inherit from a few numbers "
        "near the loss: hence the pooled batches. XLA's plain sums leave it farther off as a whole "
        "with some weights: by 1.14 over 64 batches with the worst of 20 seeds.",
        measured="1.23; 1.36 by a harmless rewrite",
    ),
    "bfloat16": Tolerance(
        bound=1.02,
        reason="both round alike, and often. A softmax or GELU in bfloat16 is beyond it, and "
        "nothing else here sees that.",
        measured="1.002; 1.005 by a harmless rewrite",
    ),
    "float16": Tolerance(bound=1.05, reason="as in bfloat16", measured="1.014"),
}

# Gradients of the program that shows its intermediates against those of the one that trains, and
# of one that recomputes against one that keeps: relative gaps. XLA may sum in another order where
# another thing is kept or shown (torch never does). A redrawn mask is a gap of order one.
SAME = {
    "float64": NORM,
    "float32": Tolerance(
        bound=1e-5, reason="some hundred ulps of float32: another order of sums", measured="3.5e-7"
    ),
    "bfloat16": Tolerance(
        bound=0.02,
        reason="a number near a rounding boundary goes the other way: some bfloat16 ulps (0.008) "
        "of the largest element",
        measured="0.0039; 0.0031 by a harmless rewrite",
    ),
    "float16": Tolerance(
        bound=0.003, reason="as in bfloat16, whose ulp is eight times wider", measured="9.7e-4"
    ),
}

# Bytes of one step over those of the next wider remat mode, 16 layers.
MEMORY = {
    "sublayer": Tolerance(bound=0.5, reason="two residuals a layer for some forty", measured="0.2"),
    "block": Tolerance(bound=0.95, reason="one residual a layer for two", measured="0.78"),
    "sqrt": Tolerance(bound=0.95, reason="8 of 16 residuals, beside one block", measured="0.89"),
    "dots": Tolerance(bound=0.75, reason="the matmuls' outputs alone", measured="0.63"),
}

# Beyond this width of the envelope (in nats) a configuration has become chaotic and can tell
# nothing; by the compute dtype of the policy.
ENVELOPE_CAP = {"float32": 5e-6, "bfloat16": 5e-3, "float16": 5e-3}

# The smallest gap that counts: two units in the last place of a float32 loss.
LOSS_ULPS = 2

# Steps that the envelope is taken ahead: in half precision a flip that every run meets sooner or
# later, one of them meets first (docs/decisions/0013).
LAG = 5
