"""A twin: the same files, names and flags in `jax_impl` (Flax) and in `torch_ref` (PyTorch)."""
