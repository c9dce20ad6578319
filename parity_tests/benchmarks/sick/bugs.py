"""Lists the bugs that can be planted in the peers of this package."""

from benchmarks.peers.bare_bugs import BUGS

__all__ = ["BUGS"]
