"""--eval-data and --norms: what the log gets, and that nothing else of the run changes."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.config import from_flags
from lockstep.data import batches, corpus
from lockstep.errors import UserError
from lockstep.exits import DONE
from lockstep.model import params
from lockstep.monitor import history
from lockstep.run import directory
from lockstep.train import loop
from lockstep.train.options import Watching
from parity_tests.fake import FakeTwin
from parity_tests.runs.fake_runs import resume, rows, train

TINY = from_flags({"model": "tiny", "n_layer": 1}, accelerator=False).model


def test_every_set_is_evaluated_and_logged_by_its_name(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(FakeTwin, "evaluate", lambda self, batches: float(batches.tokens.mean()))
    for name, letter in (("a", "x"), ("b", "y")):
        (place / f"{name}.txt").write_text(letter * 500)
    sets = "--eval-data first=a.txt --eval-data second=b.txt"
    assert train(f"--eval-every 6 --eval-batches 2 {sets} --steps 6") == DONE
    assert resume("--steps 9") == DONE  # a set is no part of the config: it is given again, or not
    found = rows("eval")
    config = directory.read_record(Path("run")).config
    own = float(batches.validation(config, corpus.load("text.txt").val).tokens.mean())
    first = {"val_loss": own, "val_loss.first": float(ord("x")), "val_loss.second": float(ord("y"))}
    assert found[0] == {"kind": "eval", "step": 0, **first}
    assert [row["step"] for row in found if "val_loss.first" in row] == [0, 6]
    assert found[-1] == {"kind": "eval", "step": 9, "val_loss": own}
    assert f"step 6: validation loss {own:.4f}, first 120.0000" in capsys.readouterr().out
    assert set(history.read(Path("run")).evaluations) == {"", "first", "second"}


def test_a_run_goes_on_without_the_tokenizer_of_a_set_of_tokens(place: Path) -> None:
    Path("tokens").mkdir()
    for split in ("train", "val"):
        (place / "tokens" / f"{split}.bin").write_bytes(bytes(2000))
    given = {"model": "tiny", "n_layer": 1, "context": 32, "tokenizer": "gone"}
    config, watching = from_flags(given, accelerator=False), Watching(files={"a": "tokens"})
    assert len(watching.load(config, resume=True).sets["a"]) == 1000
    with pytest.raises(UserError, match="--tokenizer gone"):
        watching.load(config, resume=False)


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
