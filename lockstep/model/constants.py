"""Numbers that are the same in both twins."""

ADAM_EPS = 1e-8
# Folded into the key of a mask of dropout.
SITES = {"embedding": 0, "attention": 1, "mlp": 2}
