"""Spilled registers are counted in kernels that a later XLA wrote, too."""

from pathlib import Path

import pytest

from lockstep_compiler import registers

KERNEL = "{head}\n.version {version}\n.target sm_90a\n.entry attend()\n// 9.4 {text}"


@pytest.mark.parametrize("version", ["8.8", "9.4"])
def test_ptx_of_a_later_version_is_assembled_as_the_assemblers_own(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assemble(program: Path, ptx: str, target: str) -> str:
        assert target == "sm_90a" and "// 9.4 x" in ptx
        if ".version 8.8" not in ptx:
            return (
                "ptxas k.ptx, line 5; fatal   : Unsupported .version 9.4; current version is '8.8'"
            )
        return "ptxas info    : 8 bytes stack frame, 12 bytes spill stores, 30 bytes spill loads"

    monkeypatch.setattr(registers, "assemble", assemble)
    monkeypatch.setattr(registers, "find_ptxas", lambda: Path("ptxas"))
    text = "x" * registers.LONG
    ptx = KERNEL.format(head=registers.HEAD, version=version, text=text)
    assert registers.find_spills(ptx) == {"attend": 42}
