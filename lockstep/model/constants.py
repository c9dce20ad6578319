"""Numbers that are the same in both twins."""

ADAM_EPS = 1e-8
DROPOUT_SITES = {"embedding": 0, "attention": 1, "mlp": 2}  # folded into the mask's key
