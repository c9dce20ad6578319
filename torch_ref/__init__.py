"""The PyTorch twin: the same files, names and flags as `jax_impl`."""
