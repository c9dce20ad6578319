"""Public ports between PyTorch and JAX, each beside its reference, for `lockstep check`.

Nothing of theirs is here: a module of this package says for each of its pairs how both sides are
built, in a small size, and what loss they get. The sources are read from a folder of checkouts.
"""
