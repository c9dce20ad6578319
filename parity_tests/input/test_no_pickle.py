"""Nothing we ship runs what a file says: no pickle, no eval; each rule is also shown to fire."""

import ast

import pytest

from lockstep.process import ROOT

PACKAGES = ("lockstep", "lockstep_recorder", "lockstep_compiler", "jax_impl", "torch_ref",
            "mutants", "benchmarks")  # fmt: skip
# Modules that unpickle, or keep pickles; and some that load what runs.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve",
           "yaml", "code", "codeop", "runpy"}  # fmt: skip
# Functions by their last name, of whatever module; np.load's own default is to refuse pickles.
CALLS = {"eval", "exec", "torch.load", "numpy.load", "np.load"}
# With this written out; torch then takes tensors and plain values, and runs nothing.
ALLOWED = {"np.load": ("allow_pickle", False), "numpy.load": ("allow_pickle", False),
           "torch.load": ("weights_only", True)}  # fmt: skip


def name_of(node: ast.expr) -> str:
    """`a.b` of a name or an attribute."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def violations(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{name}" for name in modules]
            found += [name for name in modules if name.split(".")[0] in MODULES]
            found += [name for name in modules if name == "torch.load"]
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            refuses = any(
                isinstance(word.value, ast.Constant)
                and (word.arg, word.value.value) == ALLOWED.get(name)
                for word in node.keywords
            )
            forbidden = name in CALLS or name.split(".")[-1] == "read_pickle"
            found += [name] if forbidden and not refuses else []
            found += [name] if name == "__import__" else []
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_runs_what_a_file_says(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        assert violations(file.read_text()) == [], file


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import os, pickle as p", "import marshal",
        "import shelve", "import yaml", "import torch\ntorch.load('x')", "from torch import load",
        "import numpy as np\nnp.load('x')", "import numpy as np\nnp.load('x', allow_pickle=True)",
        "torch.load('x', weights_only=False)", "torch.load('x', allow_pickle=False)",
        "eval('1')", "def f():\n    exec(text)", "pandas.read_pickle('x')", "__import__(name)",
    ],
)  # fmt: skip
def test_each_rule_fires(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize(
    "source", ["model.eval()", "np.load(file, allow_pickle=False)", "json.load(file)"]
)
def test_what_is_harmless_is_allowed(source: str) -> None:
    assert not violations(source)
