"""The base distribution brings no framework, and works beside another interpreter's frameworks."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lockstep import extras, results
from lockstep.errors import UserError
from lockstep.exits import DONE, FAILED, MISTAKE
from lockstep.process import ROOT
from parity_tests.check.mutants import BY_NAME, changed
from parity_tests.tiers import tier

FRAMEWORKS = {package for packages in extras.FRAMEWORKS.values() for package in packages}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXAMPLES = ROOT / "examples" / "gpt"
installs = tier("rest", guard="test_the_base_requires_no_framework")


def declared(extra: str = "") -> set[str]:
    """Names of the distributions that pyproject.toml declares for the base, or for an extra."""
    project = PROJECT["project"]
    given = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return {Requirement(line).name for line in given}


def closure(names: set[str]) -> set[str]:
    """These distributions, and all that `pip install` installs with them."""
    found, new = set[str](), names
    while new:
        found |= new
        needs = [Requirement(line) for known in new for line in metadata.requires(known) or ()]
        always = {n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})}
        new = always - found
    return found


def test_the_base_requires_no_framework() -> None:
    assert closure(declared()).isdisjoint(FRAMEWORKS | {"jaxlib"})
    assert declared("train") >= FRAMEWORKS
    assert {"jax", "jaxlib", "numpy"} <= closure({"optax"})  # so one would be seen


CUDA = ("cuda12", "cuda13")  # extras; each has a file of constraints
ON_A_GPU = ROOT / "benchmarks" / "results" / "h100.jsonl"


def read_pins(extra: str) -> dict[str, str]:
    """Distribution -> the version that an extra's file of constraints pins."""
    lines = (ROOT / f"constraints-{extra}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def find_refused(pins: dict[str, str], extra: str) -> list[str]:
    """Lists the requirements of an extra, and of the base and `train`, that refuse a pin."""
    project = PROJECT["project"]
    options = project["optional-dependencies"]
    lines = [*project["dependencies"], *options["train"], *options[extra]]
    needs = map(Requirement, lines)
    return [str(n) for n in needs if n.name in pins and not n.specifier.contains(pins[n.name])]


@pytest.mark.parametrize("extra", CUDA)
def test_constraints_fit_their_extra_alone(extra: str) -> None:
    pins = read_pins(extra)
    assert FRAMEWORKS | {"jaxlib", "numpy"} <= pins.keys()
    assert find_refused(pins, extra) == []
    (other,) = {*CUDA} - {extra}
    assert [Requirement(line).name for line in find_refused(pins, other)] == ["torch"]
    parts = ("jax", "jaxlib", f"jax-{extra}-plugin", f"jax-{extra}-pjrt")
    assert len({pins[part] for part in parts}) == 1


def test_constraints_for_cuda_13_are_what_ran_on_a_gpu() -> None:
    pins = read_pins("cuda13")
    for row in results.read(ON_A_GPU).values():
        versions = row["about"]["versions"] | row["measured"]["versions"]
        assert {name: pins[name] for name in versions} == versions


def test_what_is_missing_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(extras.FRAMEWORKS, "jax", ("numpy", "nobody_has_this"))
    with pytest.raises(UserError, match=r"^jax: needs .* nobody_has_this; pip .*-gpt\[train\]'$"):
        extras.require_framework("jax")


def link_distribution(name: str, folder: Path) -> None:
    """Links an installed distribution's modules and its metadata into a folder of packages."""
    found = metadata.distribution(name)
    tops = {file.parts[0] for file in found.files or () if file.parts[0] != ".."}
    for top in tops - {"__pycache__"}:
        (folder / top).symlink_to(str(found.locate_file(top)))


def copy_sources(folder: Path) -> Path:
    """Copies what a wheel is made of: a build leaves files beside its sources."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]:
        for package in ROOT.glob(pattern):
            if (package / "__init__.py").exists():
                shutil.copytree(package, folder / package.name)
    return folder


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with our wheel and the base's requirements, no more.

    No index is asked: the required distributions are linked from the environment of the tests.
    """
    folder = tmp_path_factory.mktemp("light")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    sources = copy_sources(folder / "sources")
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    subprocess.run([*build, folder, sources], check=True)
    (wheel,) = folder.glob("lockstep_gpt-*.whl")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    for name in closure(declared()):
        link_distribution(name, packages)
    programs = environment / "bin"
    install = [*pip, "--python", str(programs / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, wheel], check=True, cwd=folder, env=outside())
    return programs


def outside() -> dict[str, str]:
    """Environment variables of a process that sees no module of the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(light: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment from a folder where no module of ours lies."""
    program, *rest = map(str, words)
    return subprocess.run(
        [light / program, *rest],
        cwd=light,
        env=outside(),
        capture_output=True,
        text=True,
        check=False,
    )


@installs
def test_the_environment_has_our_modules_and_no_framework(light: Path) -> None:
    found = run(light, "python", "-c", "import lockstep; print(lockstep.__file__)")
    assert found.stdout.startswith(str(light.parent))
    for framework in FRAMEWORKS:
        failed = run(light, "python", "-c", f"import {framework}")
        assert "ModuleNotFoundError" in failed.stderr


@installs
def test_check_uses_the_frameworks_of_another_interpreter(light: Path, tmp_path: Path) -> None:
    """It finds the planted bug, and no difference beside it."""
    port = changed(BY_NAME["ln-eps"], tmp_path)
    pythons = ("--reference-python", sys.executable, "--python", sys.executable)
    done = run(light, "lockstep", "check", EXAMPLES / "gpt_torch.py", port, *pythons)
    assert done.returncode == FAILED, done.stdout + done.stderr
    assert re.match(r"DIFFERENT: .*, 1 root\b", done.stdout)
    assert "cause: LayerNorm, eps 1e-06, for eps 1e-05" in done.stdout


@installs
@pytest.mark.parametrize("words", [
    "plan --model gpt2 --device t4", "runs --help", "report --help", "batch --help",
    "export --help", "check --help", "doctor --help",
])  # fmt: skip
def test_what_needs_no_framework_works(light: Path, words: str) -> None:
    done = run(light, "lockstep", *words.split())
    assert (done.returncode, done.stderr) == (DONE, "")


@installs
@pytest.mark.parametrize("words", [
    "python -m jax_impl.train", "python -m torch_ref.train", "lockstep curves jax:fp32 torch:fp32",
    "lockstep power norm-eps", "lockstep specificity", "lockstep sensitivity --policy bf16",
    "lockstep compile --model tiny --device t4",
])  # fmt: skip
def test_what_needs_the_frameworks_says_how_to_install_them(light: Path, words: str) -> None:
    done = run(light, *words.split())
    assert done.returncode == MISTAKE
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "pip install 'lockstep-gpt[" in done.stderr and "Traceback" not in done.stderr
