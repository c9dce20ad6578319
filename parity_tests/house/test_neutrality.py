"""Rules say which module may import which."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from lockstep.process import ROOT
from parity_tests.tiers import tier

pytestmark = tier("quick", guard="house rules")

FRAMEWORKS = {"jax", "jaxlib", "flax", "optax", "jmp", "torch"}
TWINS = ("jax_impl", "torch_ref")
RECORDER = "lockstep_recorder"
COMPILER = "lockstep_compiler"
PACKAGES = ("lockstep", RECORDER, COMPILER, *TWINS)

# The core of a twin; the rooms beside it can be ignored, and it imports nothing of them.
CORE = ("model", "precision", "optim", "remat", "loss", "dropout", "step", "train")
ROOMS = ("extra", "inspect", "io")
# What the other framework has in its library.
ALONE = {
    "jax_impl": {
        "functional", "pure", "extra/gpu", "extra/head", "extra/mesh/gather",
        "extra/scan", "inspect/jaxprs",
    },
    "torch_ref": {"extra/compiled", "inspect/live", "io/nanogpt", "io/onnx"},
}  # fmt: skip


def files_of(twin: str) -> set[str]:
    """Names such as `extra/mesh/mesh`, without the packages' own files."""
    found = (file.relative_to(ROOT / twin).with_suffix("") for file in (ROOT / twin).rglob("*.py"))
    return {str(name) for name in found if name.name != "__init__"}


SHARED = files_of("jax_impl") - ALONE["jax_impl"]


def loaded_by(modules: list[str]) -> set[str]:
    """The frameworks in `sys.modules` of a fresh process that imports these modules."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return FRAMEWORKS & set(done.stdout.split())


def modules_of(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def imports_of(source: str, package: str = "") -> set[str]:
    """Full names of the modules a source imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # A twin names its own files alike, and so relatively; nobody else does.
            assert not node.level or package in TWINS, "absolute imports only"
            module = ".".join(filter(None, [package if node.level else None, node.module]))
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


# Who stands above: benchmarks -> all below; nothing imports the tests.
ABOVE = {"mutants": {"benchmarks"}, "benchmarks": set()}


def violations(package: str, name: str, source: str) -> list[str]:
    """The imports of one file that the rules forbid."""
    imports = imports_of(source, package)
    roots = {module.split(".")[0] for module in imports}
    if package in ABOVE:
        return sorted(roots & {"parity_tests", *ABOVE[package]})
    forbidden = {"parity_tests", "benchmarks", "mutants", "examples"}
    if package == COMPILER:  # one framework a process
        other = (
            {"torch", "torch_ref"} if name == "side_jax" else {*FRAMEWORKS, "jax_impl"} - {"torch"}
        )
        return sorted(roots & (forbidden | other))
    forbidden |= {COMPILER}
    if package == RECORDER:  # it runs where nothing else of ours is
        return sorted(roots & {"lockstep", *forbidden, *TWINS})
    if package == "lockstep":
        forbidden |= FRAMEWORKS | set(TWINS)
    else:
        forbidden |= set(TWINS) - {package}
        forbidden |= {"torch"} if package == "jax_impl" else FRAMEWORKS - {"torch"}
    found = sorted(roots & forbidden)
    if package in TWINS and name in (*CORE, "functional", "pure"):
        own = {m.split(".")[1] for m in imports if m.startswith(f"{package}.")}
        found += sorted(own & {*ROOMS, "twin"})
    return found


def test_the_core_loads_no_framework() -> None:
    assert loaded_by(modules_of("lockstep")) == set()


def test_each_twin_loads_only_its_own_framework() -> None:
    assert loaded_by(["jax_impl.twin"]) == FRAMEWORKS - {"torch"}
    assert loaded_by(["torch_ref.twin"]) == {"torch"}


@pytest.mark.parametrize("package", [*PACKAGES, *ABOVE])
def test_imports_follow_the_plan(package: str) -> None:
    for file in (ROOT / package).rglob("*.py"):
        assert violations(package, file.stem, file.read_text()) == [], file


def rooms(sources: dict[str, str], package: str = "lockstep") -> dict[str, set[str]]:
    """Maps each room of `PACKAGE.ROOM.NAME` to the rooms it imports from, wherever in a source."""
    at = package.count(".") + 1
    found: dict[str, set[str]] = {name.split(".")[at]: set() for name in sources}
    for name, source in sources.items():
        room = name.split(".")[at]
        inside = (each for each in imports_of(source) if each.startswith(f"{package}."))
        found[room] |= {each.split(".")[at] for each in inside} & found.keys() - {room}
    return found


@pytest.mark.parametrize("package", ["lockstep", "lockstep.check"])
def test_rooms_are_in_no_cycle(package: str) -> None:
    sources = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text()
        for file in (ROOT / package.replace(".", "/")).rglob("*.py")
    }
    TopologicalSorter(rooms(sources, package)).prepare()  # raises CycleError, which names the rooms


def repeated_classes(sources: dict[str, str]) -> dict[str, set[str]]:
    """Public classes that several files define, by name; a twin's file and its mirror are one."""
    found: dict[str, set[str]] = {}
    for path, source in sources.items():
        package, _, rest = path.partition("/")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(rest if package in TWINS else path)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_a_class_name_means_one_thing() -> None:
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    sources = {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}
    assert repeated_classes(sources) == {}


def test_the_twins_have_the_same_files() -> None:
    for twin in TWINS:
        assert files_of(twin) == SHARED | ALONE[twin]


def public_names(file: Path) -> list[str]:
    """Functions, classes, and their methods as `Trainer.step`."""
    kinds = (ast.FunctionDef, ast.ClassDef)

    def names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, kinds) and not node.name.startswith("_"):
                yield prefix + node.name
                if isinstance(node, ast.ClassDef):
                    yield from names(node.body, f"{node.name}.")

    return list(names(ast.parse(file.read_text()).body))


MIRRORED = sorted(SHARED)


@pytest.mark.parametrize("name", MIRRORED)
def test_common_names_come_in_the_same_order(name: str) -> None:
    """So that a diff of the two folders reads as a phrasebook."""
    jax, torch = (public_names(ROOT / twin / f"{name}.py") for twin in TWINS)
    assert [n for n in jax if n in torch] == [n for n in torch if n in jax]
    assert set(jax) & set(torch), "the twins share no name here"


def test_the_stages_of_the_step_are_the_same() -> None:
    """But for clipping, which in JAX is a part of the optimizer."""
    stages = ["step", "accumulate", "micro_batch_loss", "backward", "unscale", "clip", "update",
              "update_scale", "report"]  # fmt: skip
    jax, torch = (public_names(ROOT / twin / "step.py") for twin in TWINS)
    assert [n for n in torch if n.removeprefix("Trainer.") in stages] == [
        f"Trainer.{stage}" for stage in stages
    ]
    assert {f"Trainer.{stage}" for stage in stages if stage != "clip"} <= {*jax}


def lines_of(twin: str, name: str) -> list[str]:
    path = ROOT / twin / f"{name}.py"
    return path.read_text().splitlines() if path.exists() else []


# Lines of a twin's core. More is a sign that a feature has entered it.
MOST_LINES = {"jax_impl": 1_170, "torch_ref": 800}


@pytest.mark.parametrize("twin", TWINS)
def test_the_core_stays_small(twin: str) -> None:
    names = (*CORE, "functional", "pure")
    assert sum(len(lines_of(twin, name)) for name in names) <= MOST_LINES[twin]


# The rungs, their rules and what carries their questions: any pair of twins can stand there.
INSTRUMENTS = {
    "judge": ("compare", "envelope", "noise", "verdict"),
    "parity": ("automaton", "case", "ladder", "matrix", "rungs", "side", "trajectories", "wire",
               "worker"),
}  # fmt: skip


def names_and_strings(source: str) -> str:
    """Returns a source without its comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def named_in(source: str) -> set[str]:
    """The frameworks, twins and parts of our model that a source names."""
    model = {"attn", "mlp.", "embed", "qkv"}
    text = names_and_strings(source).lower()
    return {word for word in (*FRAMEWORKS, *TWINS, *model) if word in text}


@pytest.mark.parametrize("room", INSTRUMENTS)
def test_instruments_name_no_framework_and_no_model(room: str) -> None:
    for name in INSTRUMENTS[room]:
        assert named_in((ROOT / "lockstep" / room / f"{name}.py").read_text()) == set(), name
