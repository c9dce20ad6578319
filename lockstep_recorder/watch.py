"""Watches what a recording depends on: files and folders by content, and what cannot be seen."""

from __future__ import annotations

import ast
import hashlib
import os
import site
import sys
import sysconfig
import time
from typing import Any

Facts = dict[str, dict[str, Any]]  # kind -> path -> what it was

# Events of the interpreter by which a program depends on more than files.
BEYOND = {
    "subprocess.Popen": "it starts a process", "os.system": "it starts a process",
    "os.posix_spawn": "it starts a process", "os.fork": "it starts a process",
    "socket.connect": "it opens a connection", "sqlite3.connect": "it opens a database",
}  # fmt: skip
# Libraries that read no file behind Python's back, but by these words.
KNOWN = {
    "chex", "distrax", "dm_haiku", "einops", "equinox", "flax", "haiku", "jax", "jaxtyping", "jmp",
    "keras", "ml_dtypes", "numpy", "optax", "scipy", "timm", "torch", "torchvision", "transformers",
}  # fmt: skip
BEHIND = ("pretrained", "from_file", "jit.load", "load_library", "cpp_extension", "__import__",
          "importlib")  # fmt: skip
WHOLE = 1 << 26  # bytes of a file that is read whole; of a larger one size and time are seen
INSTALLED = tuple({
    os.path.realpath(path) + os.sep
    for path in (*(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib")),
                 sysconfig.get_path("platlib"), *site.getsitepackages(), site.getusersitepackages())
})  # fmt: skip
NO_FILES = ("/proc/", "/sys/", "/dev/")


class Audit:
    """Hears what the interpreter opens, from its making on; see PEP 578."""

    def __init__(self) -> None:
        self.began = time.time_ns()
        self.opened: set[str] = set()
        self.listed: set[str] = set()
        self.lacks = ""
        self.recorder = {file for _, file in _files() if not _is_installed(file)}
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in BEYOND:
            self.lacks = self.lacks or BEYOND[event]
        elif event == "open" and isinstance(args[0], (str, bytes)):
            self.opened.add(os.path.abspath(os.fsdecode(args[0])))
        elif event in ("os.listdir", "os.scandir") and isinstance(args[0], (str, bytes)):
            caller = sys._getframe(1).f_code.co_filename
            if not any(name in caller for name in ("importlib", "pkgutil")):  # look for modules
                self.listed.add(os.path.abspath(os.fsdecode(args[0])))

    def tell(self) -> tuple[Facts, str]:
        """Returns what the recording has depended on so far, and why it cannot be kept, or ""."""
        others = (*NO_FILES, os.path.dirname(__file__), os.path.abspath(sys.argv[0]))
        files = {file for file in (*self.opened, *(file for _, file in _files()))
                 if not file.startswith(others) and "__pycache__" not in file}  # fmt: skip
        own = {file for file in files if not _is_installed(file)} - self.recorder
        names = sorted({name.partition(".")[0] for name, _ in _files()})
        folders = [os.path.abspath(entry) for entry in sys.path if os.path.isdir(entry or ".")]
        asked: Facts = {
            "content": dict.fromkeys(own),
            "stamp": dict.fromkeys([sys.executable, *(files - own - self.recorder)]),
            "listing": dict.fromkeys(f for f in self.listed if not _is_installed(f)),
            "modules": {f: dict.fromkeys(names) for f in folders if not _is_installed(f)},
        }
        lacks = self.lacks or next(filter(None, map(_unseen, sorted(own))), "")
        if any(os.path.isfile(file) and os.stat(file).st_mtime_ns > self.began for file in own):
            lacks = lacks or "a file was changed while it ran"
        return look(asked), lacks


def _files() -> list[tuple[str, str]]:
    """Returns the modules that are imported, and their files."""
    found = ((name, getattr(x, "__file__", None)) for name, x in list(sys.modules.items()))
    return [(name, file) for name, file in found if file]


def look(facts: Facts) -> Facts:
    """Returns what these paths are now: equal to `facts` where nothing has changed."""
    return {
        "content": {path: digest(path) for path in facts["content"]},
        "stamp": {path: _stamp(path) for path in facts["stamp"]},
        "listing": {path: _listing(path) for path in facts["listing"]},
        "modules": {  # one that begins to stand in a folder hides a namesake behind it
            path: {name: _has_module(path, name) for name in names}
            for path, names in facts["modules"].items()
        },
    }


def digest(path: str) -> Any:
    """Returns a file's digest, size and time of a large one, None where there is none."""
    if not os.path.isfile(path) or os.path.getsize(path) > WHOLE:
        return _stamp(path)
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _stamp(path: str) -> list[int] | None:
    if not os.path.isfile(path):
        return None
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def _listing(path: str) -> list[str] | None:
    return sorted(os.listdir(path)) if os.path.isdir(path) else None


def _has_module(folder: str, name: str) -> bool:
    path = os.path.join(folder, name)
    return os.path.isdir(path) or os.path.isfile(f"{path}.py")


def _is_installed(path: str) -> bool:
    return os.path.realpath(path).startswith(INSTALLED)


def _unseen(path: str) -> str:
    """Says what of a user's module may read files unseen, or ""."""
    if not path.endswith(".py") or not os.path.isfile(path):
        return ""
    here = os.path.basename(path)
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    if word := next((word for word in BEHIND if word in text), ""):
        return f"{here} has {word}, which may read files unseen"
    foreign = sorted(name for name in _imports(text) if not _is_known(name))
    return f"{here} imports {foreign[0]}, which may read files unseen" if foreign else ""


def _imports(text: str) -> set[str]:
    """Returns the first names of the modules that a text imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _is_known(name: str) -> bool:
    """Says if a module reads files through Python alone, or is another one of the user's."""
    file = getattr(sys.modules.get(name), "__file__", None)
    standard = name in getattr(sys, "stdlib_module_names", ()) and name != "ctypes"  # since 3.10
    return standard or name in KNOWN or bool(file and not _is_installed(file))
