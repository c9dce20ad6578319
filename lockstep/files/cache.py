"""The user's cache folder: files that can be made again."""

import errno
import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns LOCKSTEP_CACHE, or `lockstep` in the system's folder for caches.

    Raises:
        OSError: none is named, and this user has no home.
    """
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lockstep")
    except RuntimeError:
        problem = "this user has no home; set LOCKSTEP_CACHE"
        raise FileNotFoundError(errno.ENOENT, problem, "~/.cache") from None
