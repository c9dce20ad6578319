"""`benchmarks.peers.nanogpt`, to be changed before it is built."""

from benchmarks.peers.nanogpt import build

__all__ = ["build"]
