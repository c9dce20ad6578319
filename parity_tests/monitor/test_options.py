"""--norms: what the log gets, and that nothing else of the run changes."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.config import from_flags
from lockstep.exits import DONE
from lockstep.model import params
from lockstep.train import loop
from parity_tests.fake import FakeTwin
from parity_tests.runs.fake_runs import rows, train

TINY = from_flags({"model": "tiny", "n_layer": 1}, accelerator=False).model


def test_norms_come_every_n_steps_in_rows_that_are_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = FakeTwin.result

    def result(self: FakeTwin, step: int) -> Any:
        names = params.shapes(self.config.model)
        return usual(self, step)._replace(norms=dict.fromkeys(names, 2.0))

    monkeypatch.setattr(FakeTwin, "result", result)
    monkeypatch.setattr(loop, "NORMS_A_ROW", 4)
    assert train("--norms 5") == DONE
    found = rows("norms")
    assert {row["step"] for row in found} == {5, 10} and max(map(len, found)) == 2 + 4
    merged = {k: v for row in found if row["step"] == 5 for k, v in row.items()}
    modules = [name.removesuffix(".weight") for name in params.shapes(TINY)]
    assert list(merged) == ["kind", "step", *modules]
    assert {merged[module] for module in modules} == {2.0}  # a tensor each
    assert train("--overwrite") == DONE and rows("norms") == []
