"""`lockstep compile`, the whole command: what it prints, and what it writes."""

import json
from pathlib import Path

import pytest

from lockstep.cli import commands
from lockstep.compile.ask import Compiler
from lockstep.exits import DONE
from parity_tests.cuda.cells import SMALL

WORDS = ["compile", "--device", "h100", "--policy", "bf16", *(
    word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))
)]  # fmt: skip


def test_both_programs_are_asked(
    compilers: dict[str, Compiler], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compilers["torch"]  # else skipped
    assert commands.main(WORDS) == DONE
    lines = capsys.readouterr().out.splitlines()
    heads = [line.partition(" for h100")[0] for line in lines if "nothing was run" in line]
    assert heads == ["jax: compiled", "torch: traced"]


def test_one_program_is_json_and_its_hlo_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "step.hlo"
    assert commands.main([*WORDS, "--framework", "jax", "--json", "--hlo", str(text)]) == DONE
    (program,) = json.loads(capsys.readouterr().out)
    assert (program["how"], program["device"], program["framework"]) == (
        "compiled for", "h100", "jax",
    )  # fmt: skip
    assert {each["units"] for each in program["matmuls"]} == {"bfloat16"}
    assert text.read_text().startswith("HloModule") and "cudnn" in text.read_text()
