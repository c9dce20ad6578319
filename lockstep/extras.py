"""Packages that the base installation does not bring, and the extra that does."""

import sys
from importlib.util import find_spec

from lockstep.errors import UserError

# What each twin imports. The extra `train` brings all of it.
FRAMEWORKS = {"jax": ("jax", "flax", "optax", "jmp"), "torch": ("torch",)}


def is_installed(package: str) -> bool:
    """Says whether `import package` finds a module in this interpreter; imports nothing."""
    try:
        return package in sys.modules or find_spec(package) is not None
    except ModuleNotFoundError:  # the package around a submodule is missing
        return False


def require_package(field: str, package: str, extra: str) -> None:
    """Raises UserError unless a package is installed.

    Args:
        field: what needs it, as the user wrote it, such as "--track mlflow".
        package: the name that is imported.
        extra: the extra of `lockstep-gpt` that brings it.
    """
    if not is_installed(package):
        remedy = f"pip install 'lockstep-gpt[{extra}]'"
        raise UserError(f"{field}: needs the package {package}; {remedy}")


def require_framework(name: str) -> None:
    """Raises UserError unless all that a twin imports is installed."""
    for package in FRAMEWORKS.get(name, ()):
        require_package(name, package, "train")
