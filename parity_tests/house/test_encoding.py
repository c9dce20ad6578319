"""We read and write UTF-8, whatever the user's locale: files go from machine to machine."""

import ast

import pytest

from lockstep.process import ROOT
from parity_tests.tiers import tier

pytestmark = tier("quick", guard="house rules")

PACKAGES = ("lockstep", "lockstep_recorder", "lockstep_compiler", "jax_impl", "torch_ref",
            "mutants", "benchmarks", "examples")  # fmt: skip


def unsaid(source: str) -> list[str]:
    """The calls that take the locale's encoding; os.open and what is binary have none."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and not any(word.arg == "encoding" for word in node.keywords):
            name = ast.unparse(node.func)
            values = [*node.args, *(word.value for word in node.keywords)]
            modes = [value.value for value in values if isinstance(value, ast.Constant)]
            opens = name.split(".")[-1] == "open" and name != "os.open"
            binary = any(isinstance(mode, str) and "b" in mode for mode in modes)
            if name.endswith((".read_text", ".write_text")) or (opens and not binary):
                found.append(f"{node.lineno}: {name}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_text_file_is_utf_8(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    assert {file.name: found for file in files if (found := unsaid(file.read_text("utf-8")))} == {}


@pytest.mark.parametrize("source", [
    "path.read_text()", "(a / 'b').write_text(text)", "open(name)", "open(name, 'w')",
    "path.open()", "path.open('x')", "(a / 'b').open(mode='a')", "Path('a').read_text(errors='x')",
])  # fmt: skip
def test_a_locale_s_encoding_is_seen(source: str) -> None:
    assert unsaid(source)


@pytest.mark.parametrize("source", [
    "path.read_text(encoding='utf-8')", "open(name, 'rb')", "path.open('xb')", "os.open(name, 0)",
    "open(name, mode='wb')", "path.read_bytes()", "path.open('x', encoding='utf-8')",
])  # fmt: skip
def test_what_has_none_or_says_it_is_not(source: str) -> None:
    assert not unsaid(source)
