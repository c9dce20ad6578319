"""Every bound of the ladder, with its reason and the figure measured when it was set.

Measured on a CPU, jax 0.10.2 and torch 2.13.0, with the tests named in `source`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    bound: float
    reason: str
    measured: str
    source: str


NORM = Tolerance(
    bound=1e-12,
    reason="float64 rounds at 1.1e-16; a few thousand roundings in a row, at random, reach 1e-14. "
    "Not elementwise: elements near zero have no relative accuracy in any correct program.",
    measured="1.1e-15 over gradients, activations and logits of both families",
    source="parity_tests/test_twin_methods.py",
)

ENVELOPE = Tolerance(
    bound=3.0,
    reason="two correct programs part as far as one program parts from itself when its weights are "
    "moved by one ulp; the largest of eight such runs is itself uncertain by a factor of 2.",
    measured="1.0 (fp32), 1.75 (bf16), 1.37 (fp16) with the defaults of `lockstep curves`",
    source="lockstep curves jax:POLICY torch:POLICY",
)

# Beyond this width of the envelope (in nats) a configuration has become chaotic and can tell
# nothing; by the compute dtype of the policy.
ENVELOPE_CAP = {"float32": 5e-6, "bfloat16": 5e-3, "float16": 5e-3}

# The smallest gap that counts: two units in the last place of a float32 loss.
LOSS_ULPS = 2
