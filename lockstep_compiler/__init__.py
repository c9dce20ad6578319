"""Compiles or traces a training step for a device that is not here, in a process of its own.

`side_jax` compiles our JAX step for a GPU or a TPU; `side_torch` traces our PyTorch step on fake
CUDA tensors. `main` answers one request after the other, each in a fork that has done nothing yet:
a mutant, a switch or a compiler's memory ends with its program.
"""
