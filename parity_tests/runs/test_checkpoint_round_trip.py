"""A saved state comes back bit for bit; rules say which checkpoints are kept and resumed."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from lockstep.errors import UserError
from lockstep.model.state import TrainState
from lockstep.run.checkpoint import is_whole, latest, listing, load, open_state, save
from lockstep.run.record import FILES, RECORD, own_checksum
from parity_tests.runs.checkpoints import (
    DTYPES,
    assert_same,
    hidden,
    part_of,
    save_parts,
    silent,
    state,
)
from parity_tests.tiers import tier


def save_alone(run: Path, whole: TrainState) -> Path:
    return save(run, whole, keep=1)


@tier("quick", guard="a checkpoint round trip", where=lambda save: save is save_alone)
@pytest.mark.parametrize("save", [save_alone, save_parts])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back(
    tmp_path: Path, dtype: str, save: Callable[[Path, TrainState], Path]
) -> None:
    """One process saves all, or three write a part each."""
    saved = state(dtype=dtype)
    path = save(tmp_path, saved)
    assert path == tmp_path / "checkpoints/step_00001000"
    parts = [f"-{rank}" for rank in range(3)] if save is save_parts else [""]
    stems = (f"{stem}{part}.safetensors" for stem in ("weights", "mu", "nu") for part in parts)
    assert {file.name for file in path.iterdir()} == {RECORD, *stems}
    assert_same(load(path), saved)
    assert hidden(tmp_path) == [] and is_whole(path)


def test_a_frozen_weight_has_no_moments(tmp_path: Path) -> None:
    whole = state()
    mu, nu = ({n: x for n, x in y.items() if n != "plain"} for y in (whole.mu, whole.nu))
    saved = replace(whole, mu=mu, nu=nu)
    path = save_alone(tmp_path, saved)
    assert_same(load(path), saved)
    assert json.loads((path / RECORD).read_text())["frozen"] == ["plain"]


def test_format_2_is_read_and_its_damage_seen(tmp_path: Path) -> None:
    """Its checksum of a file is that of the header, which has those of its tensors."""
    path = save_alone(tmp_path, state())
    record = json.loads((path / RECORD).read_text()) | {"format": 2}
    for name in FILES.values():
        tensors = load_file(path / name)
        sums = {key: hashlib.sha256(x.tobytes()).hexdigest() for key, x in tensors.items()}
        save_file(tensors, path / name, metadata=sums)
        content = (path / name).read_bytes()
        header = content[: 8 + int.from_bytes(content[:8], "little")]
        record["sha256"][name] = hashlib.sha256(header).hexdigest()
    record["sha256"][RECORD] = own_checksum(record)
    (path / RECORD).write_text(json.dumps(record))
    assert_same(load(path), state())
    (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=f"{name}: damaged"):
        load(path)


def test_any_place_is_that_of_the_array(tmp_path: Path) -> None:
    found, whole = open_state(save_parts(tmp_path, state())).nu, state().nu
    assert found["scalar"][...].tobytes() == whole["scalar"].tobytes()
    for place in (..., slice(1, 2), (slice(2), slice(1, 3)), (slice(None), slice(2, 9)), slice(0)):
        for name in ("plain", "transposed", "permuted"):
            part = whole[name][place]
            assert found[name][place].shape == part.shape
            assert found[name][place].tobytes() == part.tobytes()


def test_bfloat16_loads_in_a_process_that_knows_no_framework(tmp_path: Path) -> None:
    path = save_alone(tmp_path, state(dtype="bfloat16"))
    code = (
        "import sys; from pathlib import Path; from lockstep.run import checkpoint; "
        "print(checkpoint.load(Path(sys.argv[1])).params['plain'].dtype)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(path)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"bfloat16\n"


def test_nothing_has_its_name_before_all_parts_are_there(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(save, tmp_path, part_of(state(), 0), keep=1)
        save(tmp_path, part_of(state(), 2), keep=1)
        assert not first.done() and listing(tmp_path) == []
        save(tmp_path, part_of(state(), 1), keep=1)
        assert [first.result()] == listing(tmp_path)


# --- which there are, and which one a run goes on from


def names(run: Path) -> list[str]:
    return [path.name for path in listing(run)]


def test_listing_is_by_step_and_skips_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert listing(tmp_path) == []
    folder = tmp_path / "checkpoints"
    wanted = ["step_00000002", "step_00000010.old", "step_00000010", "step_100000000"]
    others = ["step_1", "step_000000001", "step_00000003.bak", ".tmp-step_00000004"]
    for name in [*wanted[::-1], *others]:
        (folder / name).mkdir(parents=True)
    (folder / "step_00000005").write_text("a file")
    assert names(tmp_path) == wanted


def test_the_newest_are_kept_and_what_is_of_a_later_step(tmp_path: Path) -> None:
    """A run that went back because step 20 was damaged must not lose step 12 to `keep`."""
    for step, keep, kept in ((8, 2, [8]), (20, 2, [8, 20]), (10, 2, [8, 10, 20]),
                             (11, 2, [10, 11, 20]), (12, 1, [12, 20])):  # fmt: skip
        save(tmp_path, state(step), keep=keep)
        assert names(tmp_path) == [f"step_{each:08d}" for each in kept]
    assert hidden(tmp_path) == []


def test_latest_passes_over_the_damaged_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it has no checkpoint; use --overwrite to start again"):
        latest(tmp_path, silent)
    for step in (1, 2, 3):
        save(tmp_path, state(step), keep=3)
    newest, newer, good = reversed(listing(tmp_path))
    (newest / RECORD).unlink()
    os.truncate(newer / "mu.safetensors", 10)
    spoilt = [newest / RECORD, newer / "mu.safetensors", good / RECORD]
    for in_parts in (False, True):
        lines: list[str] = []
        found = latest(tmp_path, lines.append, in_parts=in_parts)
        assert found.step == 1
        assert [line.split(": ")[0] for line in lines] == [*map(str, spoilt[:2])]
    (good / RECORD).unlink()
    lines = []
    with pytest.raises(UserError, match="none of its 3 checkpoints loads; use --overwrite"):
        latest(tmp_path, lines.append)
    assert [line.split(": ")[0] for line in lines] == [*map(str, spoilt)]
