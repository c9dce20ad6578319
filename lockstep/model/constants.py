"""Numbers that are the same in both twins."""

ADAM_EPS = 1e-8
# Folded into the key of what is drawn there: a mask, or how a gradient is rounded.
SITES = {name: i for i, name in enumerate((
    "embedding", "attention", "mlp", "qkv", "proj", "gate", "up", "down",
))}  # fmt: skip
