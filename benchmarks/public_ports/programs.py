"""A pair of public programs, and the two files that `lockstep check` gets for it."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from lockstep.errors import UserError
from lockstep.process import ROOT

SIDES = ("reference", "port")
FOLDER = "PUBLIC_PORTS"  # the environment variable that names the folder of checkouts


class Program(NamedTuple):
    """The functions of one side."""

    build: Callable[[int], Any]
    loss: Callable[[Any, Any], Any]
    batch: Callable[[int], Any] | None = None  # a port takes the reference's
    taps: Callable[[Any], None] | None = None  # of a program without modules


class Source(NamedTuple):
    """A place of one side: a path in a repository, or in an installed package."""

    repository: str  # owner/name
    path: str
    package: str = ""  # as `import` names it, where it is installed and no checkout


class Pair(NamedTuple):
    """A public port and its reference, with what is known of them."""

    name: str
    reference: Source
    port: Source
    sides: tuple[Callable[[], Program], Callable[[], Program]]
    own_tests: str  # what tests the repositories have of this pair
    by_hand: str = ""  # what a person found, without `check`; empty: nobody looked
    why: str = ""  # the difference, in a few words
    differs: bool | None = None  # by hand; None: nobody looked
    draws: bool = True  # initial values are the port's own, and not ours

    @property
    def sources(self) -> tuple[Source, Source]:
        return self.reference, self.port


def write(pair: Pair, folder: Path) -> tuple[Path, Path]:
    """Writes the two files; each names its pair, so that no trace is taken for another's."""
    files = [folder / f"{side}.py" for side in SIDES]
    for number, file in enumerate(files):
        file.write_text(
            f'"""The {file.stem} of the public pair {pair.name}."""\n\n'
            "import sys\n\n"
            f"sys.path.insert(0, {str(ROOT)!r})\n"
            "from benchmarks.public_ports.pairs import PAIRS\n\n"
            f"build, loss, batch, taps = PAIRS[{pair.name!r}].sides[{number}]()\n",
            encoding="utf-8",
        )
    return files[0], files[1]


def checkout(repository: str) -> Path:
    """The folder of a repository's checkout, OWNER+NAME.

    Raises:
        UserError: it is not there.
    """
    root = os.environ.get(FOLDER)
    folder = Path(root or "DIR") / repository.replace("/", "+")
    if not (root and folder.is_dir()):
        raise UserError(
            f"no checkout of {repository}: git clone https://github.com/{repository} {folder}"
        )
    return folder


def import_file(repository: str, path: str) -> Any:
    """Imports one file of a checkout, under a name of its own."""
    file = checkout(repository) / path
    name = "public_" + file.with_suffix("").as_posix().replace("/", "_").replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, file)
    if not (spec and spec.loader and file.is_file()):
        raise UserError(f"{repository} has no {path} at this commit; check out another")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_package(repository: str, name: str) -> Any:
    """Imports a module of a checkout under its own name, as if the package were installed."""
    folder = str(checkout(repository))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


class Stub(ModuleType):
    """A module that has every name: for packages that are imported and not used here."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # it is a package, too
        self.__spec__ = ModuleSpec(name, None)  # others ask whether it is there

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = sys.modules[f"{self.__name__}.{name}"] = Stub(f"{self.__name__}.{name}")
        return made

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


def stub(*names: str) -> None:
    """Puts a stub in the place of each package that is not installed, and of each module of one
    that only an installation makes, "package.module"."""
    for name in names:
        if name not in sys.modules and ("." in name or importlib.util.find_spec(name) is None):
            sys.modules[name] = Stub(name)


def weighted(output: Any) -> Any:
    """A loss that every element of an output reaches: the mean, with a weight for each.

    Args:
        output: an array of either framework.
    """
    weights = np.random.default_rng(0).normal(size=tuple(output.shape))
    if type(output).__module__.startswith("torch"):
        import torch

        return (output * torch.as_tensor(weights, dtype=output.dtype)).mean()
    return (output * weights.astype(output.dtype)).mean()


def in_torch(make: Callable[[], Any], call: Callable[[Any, Any], Any],
             batch: Callable[[int], Any]) -> Program:  # fmt: skip
    """A torch module, of which `call` gives the output."""
    import torch

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        return make()

    return Program(build, lambda model, inputs: weighted(call(model, inputs)), batch)


def in_linen(module: Any, batch: Callable[[int], Any], arguments: Callable[[Any], tuple[Any, ...]],
             after: Callable[[Any, Any], Any] = lambda output, batch: output,
             **flags: Any) -> Program:  # fmt: skip
    """A Linen module.

    Args:
        arguments: the module's, of a batch.
        after: the output that counts, of the module's output and the batch.
        flags: of the module's call.
    """
    import jax

    def build(seed: int) -> Any:
        init = jax.jit(lambda key: module.init(key, *arguments(batch(0)), **flags))
        return dict(init(jax.random.PRNGKey(seed)))

    def loss(model: Any, inputs: Any) -> Any:
        return weighted(after(module.apply(model, *arguments(inputs), **flags), inputs))

    return Program(build, loss)


def to_nhwc(x: Any) -> Any:
    return x.transpose(0, 2, 3, 1)


class Tap:
    """Shows the output of a program that has no modules, under the name of the reference's."""

    def __init__(self) -> None:
        self.keep: Callable[[str, Any], Any] = lambda name, x: x

    def set(self, keep: Callable[[str, Any], Any]) -> None:
        self.keep = keep

    def __call__(self, output: Any) -> Any:
        return self.keep("(root)", output)


def normal(step: int, *shape: int) -> np.ndarray:
    """Normal numbers in float32, for a batch."""
    return np.random.default_rng(step).normal(size=shape).astype(np.float32)


def integers(step: int, below: int, *shape: int) -> np.ndarray:
    """Whole numbers, for a batch of tokens or labels."""
    return np.random.default_rng(step).integers(0, below, size=shape)
