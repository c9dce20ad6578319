"""Declares planted bugs: the facts of a bug stand with the change that it makes.

    @bug(rung=2, **GPT2)
    @wraps(F, "gelu")
    def erf_gelu(right, x, approximate):
        \"\"\"GELU has its erf form, not the tanh form.\"\"\"
        return right(x)

    @bug(rung=2)
    def norm_eps(size: float = 1e-6) -> Plant:
        \"\"\"The norms' epsilon is 1e-6 for 1e-5.\"\"\"
        return with_norm_eps(size)

The function's name is the bug's, `erf-gelu`, and its docstring says what it is. The function stands
in place of one of the product, under `wraps` and its like, or returns what plants the bug. A graded
bug has a parameter `size` with a default. `lockstep.parity.catalogue` collects the facts of all
bugs and imports no framework: what a bug needs of one is imported when it is planted (`Later`).
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

from lockstep.parity.bug import Bug
from mutants.patch import Plant, after, assign, before, wrap

Make = Callable[..., Plant]


def _decorator(change: Callable[[Any, str, Any], Plant]) -> Callable:
    def at(owner: Any, path: str) -> Callable[[Callable], Make]:
        """Changes `owner.path`, such as a module's "Trainer.step", by the decorated function."""

        def decorate(function: Callable) -> Make:
            def make() -> Plant:
                *parents, name = path.split(".")
                return change(reduce(getattr, parents, owner), name, function)

            make.__name__, make.__doc__ = function.__name__, function.__doc__
            return make

        return decorate

    return at


wraps = _decorator(wrap)  # stands around it, and is given it as the first argument
replaces = _decorator(assign)
before_each, after_each = _decorator(before), _decorator(after)  # is called, too


class Declare:
    """The decorator of one twin's bugs.

    Args:
        bugs: where they are put, by name.
        given: arguments of each bug's function.
    """

    def __init__(self, framework: str, bugs: dict[str, Bug], *given: Any) -> None:
        self.framework, self.bugs, self.given = framework, bugs, given

    def __call__(self, *, rung: int, **flags: Any) -> Callable[[Make], Make]:
        """Declares a bug under its function's name.

        Args:
            rung: the one that must catch it.
            flags: the smallest config in which it shows, over `matrix.SMALL`.
        """

        def register(make: Make) -> Make:
            size = inspect.signature(make).parameters.get("size")
            what = inspect.cleandoc(make.__doc__ or "").partition("\n\n")[0]
            assert what.endswith("."), f"{make.__name__}: say what it is"
            self.add(
                Bug(
                    name=_name(make),
                    framework=self.framework,
                    what=what.replace("\n", " ")[:-1],
                    rung=rung,
                    flags=flags,
                    size=size.default if size else None,
                    make=partial(make, *self.given),
                )
            )
            return make

        return register

    def same(
        self, bugs: Mapping[str, Bug], suffix: str = "-in-jax", **flags: Any
    ) -> Callable[[Make], Make]:
        """Declares the same mistake as the other twin's of the function's name.

        Args:
            bugs: the other twin's.
            suffix: of the name, which is another one than the other twin's.
            flags: what the other's config does not say.
        """

        def register(make: Make) -> Make:
            other = bugs[_name(make)]
            self.add(
                Bug(
                    name=other.name + suffix,
                    framework=self.framework,
                    what=other.what,
                    rung=other.rung,
                    flags={**flags, **other.flags},
                    make=partial(make, *self.given),
                )
            )
            return make

        return register

    def add(self, bug: Bug) -> None:
        assert bug.name not in self.bugs, f"two bugs are {bug.name}"
        self.bugs[bug.name] = bug


def _name(make: Make) -> str:
    return make.__name__.replace("_", "-")
