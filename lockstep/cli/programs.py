"""Caches of compiled programs: JAX's is switched on here, PyTorch's is on by default."""

import hashlib
import os
import sys
import warnings
from pathlib import Path

from lockstep.files.cache import cache_folder
from lockstep.flags import Parser, add_switch

FLAG = "no_compile_cache"
LIMIT = 500 * 2**20  # bytes; what was not used for longest goes first
ANY_TIME = "0"  # seconds of compilation from which a program is kept
OFF = {"JAX_ENABLE_COMPILATION_CACHE": "false", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


def add_flag(parser: Parser) -> None:
    about = "compile every program anew, and keep none in the user's cache"
    add_switch(parser, "--no-compile-cache", about)


def keep(framework: str, *, anew: bool) -> None:
    """Sets the cache folder of JAX's programs; call it before JAX is imported. `anew`: no cache."""
    if anew:
        os.environ |= OFF
    if anew or framework != "jax" or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        folder = cache_folder() / f"xla-{digest_cpu()}"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a run needs none
        return
    warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation cache")
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(LIMIT),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": ANY_TIME,
    }


def digest_cpu() -> str:
    """Digests the CPU's features: a cached program has the instructions of one CPU."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = sys.platform
    features = {line for line in info.splitlines() if line.startswith(("flags", "Features"))}
    return hashlib.sha256("\n".join(sorted(features)).encode()).hexdigest()[:12]
