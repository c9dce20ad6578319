"""The user's own file: loaded, its functions found, its exceptions told with their last frames."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType
from typing import Any, ClassVar

from lockstep_recorder.conditions import NAME, Conditions, watched
from lockstep_recorder.wire import frame_lines

MADE = {"build": "a torch module or a JAX model", "optimizer": "an optimizer"}
SLOW, PATIENCE = 30, 570  # seconds of an import until it is said, and from then until it ends
REMEDY = 'put what runs under if __name__ == "__main__"'
LIBRARIES = [sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")]
INSTALLED = ("site-packages", "dist-packages")  # folders of libraries, wherever they are
FRAMEWORKS = ("numpy", "torch", "jax", "jaxlib", "flax", "optax", "equinox", "haiku")


class Mistake(Exception):
    """The user's mistake, one line; `frames` are lines of the user's own code."""

    def __init__(self, line: str, frames: Sequence[str] = (), raised: str = "") -> None:
        """
        Args:
            raised: what the user's code raised.
        """
        super().__init__(line)
        self.frames, self.raised = list(frames), raised
        self.refuses = ""  # what was raised in float64: in its own precision it may run


COMPILED = ("torch.compile", "jit.script", "numba")  # what takes a function's code apart


class AsWritten(SourceFileLoader):
    """Compiled each time, as `python FILE` does: kept bytecode is taken for that of another
    text of the same length, written in the same second. Its comparisons are watched."""

    def get_code(self, fullname: str) -> CodeType:
        data = self.get_data(self.path)
        text = importlib.util.decode_source(data)
        if any(word in text for word in COMPILED):
            return self.source_to_code(data, self.path)
        return self.source_to_code(watched(text, self.path), self.path)


class User:
    """The functions of a file or a module, each of which may be missing."""

    homes: ClassVar[set[str]] = set()  # folders of programs, which are no libraries

    def __init__(self, name: str) -> None:
        self.given, self.name = name, os.path.basename(name)
        self.conditions = Conditions()
        former = {*sys.modules}
        self.module = self._load(name)
        self.homes.add(os.path.dirname(os.path.abspath(getattr(self.module, "__file__", name))))
        is_users.cache_clear()
        self.brought = [each for each, module in sys.modules.items() if each not in former
                        and is_users(getattr(module, "__file__", None) or "")]  # fmt: skip
        for required in ("build", "loss"):
            if not callable(getattr(self.module, required, None)):
                signature = {"build": "build(seed)", "loss": "loss(model, batch)"}[required]
                raise Mistake(f"{self.name}: has no function {signature}; write one")

    def anew(self) -> User:
        """Loads the program once more, with the modules of its own that it has imported."""
        former = {name: sys.modules.pop(name) for name in self.brought if name in sys.modules}
        try:
            return User(self.given)
        except Mistake:
            sys.modules.update(former)
            raise

    def has(self, function: str) -> bool:
        return callable(getattr(self.module, function, None))

    def call(self, function: str, *args: Any) -> Any:
        """The user's function; what it raises becomes a `Mistake`."""
        try:
            made = getattr(self.module, function)(*args)
        except (Mistake, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            raise mistake(self.name, function, error) from error
        if function in MADE and (made is None or isinstance(made, type)):
            kind = "nothing" if made is None else f"the class {made.__name__}"
            raise Mistake(f"{self.name}: {function} gives {kind}; return {MADE[function]}")
        return made

    def _load(self, name: str) -> Any:
        try:
            if not name.endswith(".py"):
                sys.path.insert(0, os.getcwd())
                with _as_command(name), _watching_import(self.name):
                    return importlib.import_module(name)
            path = os.path.abspath(name)
            if not os.path.isfile(path):
                raise Mistake(f"{name}: no such file; name a file with build and loss")
            sys.path.insert(0, os.path.dirname(path))
            loader = AsWritten(_module_name(path), path)
            spec = importlib.util.spec_from_file_location(loader.name, loader=loader)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look their module up
            vars(module)[NAME] = self.conditions
            with _as_command(path), _watching_import(self.name):
                spec.loader.exec_module(module)
            return module
        except Mistake:
            raise
        except (Exception, SystemExit) as error:
            alone = "no known parent package" in str(error)
            remedy = "; give the module's name, such as package.file, for the file" * alone
            raise mistake(self.name, "", error, remedy) from error


def _module_name(path: str) -> str:
    """The name by which a process that the program starts can import it, where that is free."""
    name = os.path.splitext(os.path.basename(path))[0]
    taken = name in sys.modules or name in sys.builtin_module_names
    return name if name.isidentifier() and not taken else "lockstep_user_program"


@contextlib.contextmanager
def _as_command(name: str) -> Iterator[None]:
    """The program sees a command line without arguments: those of this process are not its own."""
    former, sys.argv = sys.argv, [name]
    try:
        yield
    finally:
        sys.argv = former


@contextlib.contextmanager
def _watching_import(name: str) -> Iterator[None]:
    """Says that an import takes long, and where it is; ends one that takes too long."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return
    said = False

    def wake(number: int, frame: FrameType | None) -> None:
        nonlocal said
        line = _own_line(frame, name)
        if said:
            raise Mistake(f"{name}: importing it takes more than {SLOW + PATIENCE} s ({line}); "
                          f"{REMEDY}")  # fmt: skip
        said = True
        print(f"{name}: importing it takes long ({line}); if it trains there, {REMEDY}",
              file=sys.stderr, flush=True)  # fmt: skip
        signal.alarm(PATIENCE)

    former = signal.signal(signal.SIGALRM, wake)
    signal.alarm(SLOW)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def _own_line(frame: FrameType | None, name: str) -> str:
    """The line of the user's file that is running; the innermost line where none is."""
    here = frame
    while here and os.path.basename(here.f_code.co_filename) != name:
        here = here.f_back
    here = here or frame
    return f"line {here.f_lineno}" if here else "in a library"


def mistake(name: str, function: str, error: BaseException, remedy: str = "") -> Mistake:
    """An exception of the user's code, with its own last frames; a library's where it has none."""
    here = os.path.dirname(__file__)
    stack = traceback.extract_tb(error.__traceback__)
    others = [f for f in stack if not f.filename.startswith((here, "<frozen"))]
    own = [f for f in others if is_users(f.filename)] or others
    frames = frame_lines(own)
    text = " ".join(str(error).split()) or "no message"
    where = f"{name}: {function}" if function else f"{name}: importing it"
    raised = f"{type(error).__name__}: {text[:400]}"
    return Mistake(f"{where} raised {raised}{remedy}", frames, raised)


@functools.cache
def _libraries(*modules: str) -> list[str]:
    """Lists the folders of the interpreter's libraries, and of modules."""
    files = [getattr(sys.modules[name], "__file__", None) for name in modules]
    return [*LIBRARIES, *(os.path.dirname(file) for file in files if file)]


@functools.cache
def is_users(file: str) -> bool:
    """Says if a file is neither a library's nor ours. A library may stand in a program's folder,
    such as in an environment there, and a program in a library's."""
    if not file or file.startswith(("<", os.path.dirname(__file__))):
        return False
    home = max((each for each in User.homes if file.startswith(each + os.sep)), key=len, default="")
    folders = _libraries(*(name for name in FRAMEWORKS if name in sys.modules))
    inside = any(file.startswith(each + os.sep) and len(each) > len(home) for each in folders)
    return not inside and not {*INSTALLED} & {*file[len(home) :].split(os.sep)}


@functools.cache
def path_in_library(file: str) -> str:
    """Returns the path of an installed library's file, from its package on; "" of another file."""
    parts = [] if file.startswith(os.path.dirname(__file__)) else file.split(os.sep)
    installed = [at for at, part in enumerate(parts) if part in INSTALLED]
    return "/".join(parts[installed[-1] + 1 :]) if installed else ""
