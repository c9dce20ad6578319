"""The user's cache folder: what can be made again, and is not made twice."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """LOCKSTEP_CACHE, or `lockstep` in the folder that the system has for caches."""
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lockstep")
