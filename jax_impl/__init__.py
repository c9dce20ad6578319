"""The JAX/Flax twin: the same files, names and flags as `torch_ref`."""
