"""Packages that the base installation does not bring, and the extra that does."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lockstep.errors import UserError

# What each twin imports. The extra `train` brings all of it.
FRAMEWORKS = {"jax": ("jax", "flax", "optax", "jmp"), "torch": ("torch",)}


def is_installed(package: str) -> bool:
    """Says whether `import package` finds a module in this interpreter; imports nothing."""
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package around a submodule is missing
        return False


def import_package(field: str, package: str, extra: str) -> Any:
    """Imports a package of an extra.

    Args:
        field, package, extra: as in `require_package`.

    Raises:
        UserError: it is not installed.
    """
    require_package(field, package, extra)
    return import_module(package)


def require_package(field: str, package: str, extra: str) -> None:
    """Raises UserError unless a package is installed.

    Args:
        field: what needs it, as the user wrote it, such as "--track wandb".
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
