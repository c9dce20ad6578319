"""`benchmarks.peers.bare_jax`, to be changed before it is built."""

from benchmarks.peers.bare_jax import build

__all__ = ["build"]
