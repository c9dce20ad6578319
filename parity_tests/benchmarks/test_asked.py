"""Compilers are asked what today's code has not asked them, and nothing twice."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import cuda_grid, estimators
from lockstep import results


class Closing:
    def __init__(self, framework: str) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("module", [cuda_grid, estimators])
def test_what_is_stale_is_asked_again(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(cell: tuple[str, str], compilers: dict[str, Closing]) -> dict[str, Any]:
        asked.append(cell[1])
        return {"wrong": []}

    names = ["current", "stale", "unknown"]
    monkeypatch.setattr(module, "FILE", tmp_path / "rows.jsonl")
    monkeypatch.setattr(module, "Compiler", Closing)
    monkeypatch.setattr(module, "names", lambda: {name: ("h100", name) for name in names})
    monkeypatch.setattr(module, "markdown", str)
    monkeypatch.setattr(module, "measure", measure)
    rows = {name: results.row(name, "h100", wrong=[]) for name in names[:2]}
    rows["stale"]["measured"]["versions"] = {"jax": "0.1"}
    results.put(module.FILE, rows.values())
    assert module.main([]) == 0 and asked == ["stale", "unknown"]
    assert module.main([]) == 0 and asked == ["stale", "unknown"]
