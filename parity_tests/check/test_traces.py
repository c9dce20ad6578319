"""Traces are untrusted input, and one that is cut short costs nothing."""

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.check.rungs import labels_of
from lockstep.check.sides import trace
from lockstep.errors import UserError
from lockstep.files import stream
from lockstep_recorder import memory, wire
from lockstep_recorder.main import main, write
from parity_tests.check.inside import check_inside, record_inside
from parity_tests.check.small_program import small


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def apply(folder: Path) -> None:
        about = json.loads((folder / trace.ABOUT).read_text())
        change(about)
        (folder / trace.ABOUT).write_text(json.dumps(about))

    return apply


def rewrite(name: str, value: np.ndarray) -> Callable[[Path], Any]:
    """With a checksum made good."""

    def apply(folder: Path) -> None:
        about = json.loads((folder / trace.ABOUT).read_text())
        arrays = wire.parse((folder / trace.ARRAYS).read_bytes())
        arrays |= {name: arrays[first] for name, first in about["same"].items()}
        about.pop("sha256"), about.pop("format")
        write(str(folder), about, {**arrays, name: value})

    return apply


def link(folder: Path) -> None:
    (folder / trace.ABOUT).rename(folder / "elsewhere")
    (folder / trace.ABOUT).symlink_to(folder / "elsewhere")


HOSTILE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("cut short", lambda f: (f / trace.ARRAYS).write_bytes((f / trace.ARRAYS).read_bytes()[:-8]),
     "damaged or cut short"),
    ("no arrays", lambda f: (f / trace.ARRAYS).unlink(), f"has no {trace.ARRAYS}"),
    ("no json", lambda f: (f / trace.ABOUT).unlink(), f"has no {trace.ABOUT}"),
    ("not json", lambda f: (f / trace.ABOUT).write_text("{"), "invalid JSON"),
    ("a link", link, "symbolic link"),
    ("slots", rewrite("slot/SGD.mean/0.weight", np.zeros(3)), "slots of an optimizer that are no"),
    ("asked", rewrite("asked/0.weight", np.zeros((3, 1))), "asked is no row of steps"),
    ("shares", rewrite("batches/share", np.zeros(1)), "shares or noises of other batches"),
    ("another format", edit(lambda a: a.update(format=1)), "format 1 is not 3"),
    ("no loss", edit(lambda a: a.pop("loss")), "loss is no float"),
    ("an event", edit(lambda a: a["events"].append(3)), "events holds more than names"),
    ("nested events", edit(lambda a: a.update(events=["+a"])), "events do not nest"),
    ("a parameter", edit(lambda a: a["parameters"].append("x")), "no grad/x"),
    ("a tied name", edit(lambda a: a["tied"].append(["0.weight", ""])), "a weight without a name"),
    ("a weight's name", lambda f: (
        rewrite("weights/0/.", np.zeros(4))(f),
        edit(lambda a: a["initial"].update({".": a["initial"]["0.bias"]}))(f),
    ), "a weight without a name"),
    ("moments", edit(lambda a: a["initial"].update({"0.weight": 3})), "has no moments"),
    ("a curve", edit(lambda a: a["losses"].append("x")), "losses holds more than numbers"),
    ("curves", edit(lambda a: a["losses"].append(1.0)), "differ in length"),
    ("a checksum", edit(lambda a: a.update(sha256="0")), "damaged or cut short"),
    ("a batch", edit(lambda a: a.update(batch={"dict": {"x": {"array": "y", "dtype": "int8"}}})),
     "the batch of step 0 is not as described"),
    ("a dtype", edit(lambda a: a["batch"]["dict"]["x"].update(dtype="object")), "not as described"),
    ("a missing step", rewrite("fed/1/5/grad/0.bias", np.zeros(4)), "no fed/1/3/"),
    ("an array twice", edit(lambda a: a["same"].update({"fed/1/0/weights/0.bias": "x"})),
     "same names no array"),
    ("an array's number", edit(lambda a: a["same"].update(x=3)), "same holds more than names"),
    ("NaN weights", rewrite("weights/0/0.bias", np.full(4, np.nan)), "not finite"),
    ("a tape", edit(lambda a: a.update(tape=[])), "tape is no dict"),
    ("a tape's order", edit(lambda a: a["tape"]["values"][-1]["inputs"].append(10**6)),
     "values of later ones"),
    ("a tape's loss", edit(lambda a: a["tape"].update(loss=10**6)), "the tape has no loss"),
    ("a tape's weight", edit(lambda a: a["tape"]["values"][0].update(name="x")),
     "parameters are not the weights"),
    ("a tape's elements", edit(lambda a: a["tape"]["values"][0].update(elements=[9, 9, 9])),
     "elements of no parameter"),
    ("a tape's gradients", rewrite("tape/cotangents", np.full((1, 10), 1e6)),
     "the tape has gradients of no value"),
    ("a tape's rows", rewrite("tape/rows", np.zeros((2, 9))), "the tape has no rows"),
    ("a gradient", rewrite("grad/0.bias", np.zeros(5)), "grad/0.bias has another shape"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "said"), HOSTILE, ids=[name for name, _, _ in HOSTILE])
def test_a_spoilt_trace_is_one_line(
    name: str, spoil: Callable[[Path], Any], said: str, reference: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "trace"
    shutil.copytree(reference, folder)
    trace.read(folder)
    spoil(folder)
    with pytest.raises(UserError, match=f"^{tmp_path}.*lockstep record") as caught:
        trace.read(folder)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["former", "new"])
def test_a_trace_that_is_cut_short_leaves_the_former_one(
    name: str, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copytree(reference, tmp_path / "former")
    before = trace.read(tmp_path / "former").about

    def chunks(arrays: dict[str, np.ndarray]) -> Iterator[bytes]:
        yield b"the first"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(wire, "chunks", chunks)
    out = tmp_path / name
    assert main(["record", str(small(tmp_path)), "-o", str(out), "--steps", "3"]) == 2
    line = f"error: {out}: cannot be written (No space left on device); make room there\n"
    assert capsys.readouterr().err == line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["former", "small.py"]
    assert {path.name for path in (tmp_path / "former").iterdir()} == {trace.ABOUT, trace.ARRAYS}
    assert trace.read(tmp_path / "former").about == before


def test_a_large_program_is_recorded_through_a_file_at_one_scale_of_gradients(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, file = trace.read(reference), small(tmp_path)
    monkeypatch.setattr(memory, "LARGE", 1)
    monkeypatch.setattr(memory, "LEAST", 1)
    monkeypatch.setattr(stream, "MAPPED", 1)
    large = record_inside(file, tmp_path / "trace")
    assert labels_of(large) == {"1": 3} and labels_of(plain).keys() == {"1", "100", "1e-6"}
    assert all(isinstance(x, np.memmap) for x in large.arrays.values())
    assert plain.arrays.keys() >= large.arrays.keys()
    for name, x in large.arrays.items():
        assert np.array_equal(x, plain.arrays[name]), name
    result = check_inside(large, file)
    assert result.verdict == "equal"
    assert any("gradients of one scale" in note for note in result.notes)
    doubled = "def optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=0.2)"
    (root,) = check_inside(large, small(tmp_path, "port.py", optimizer=doubled)).roots
    assert root.entry == "learning rate"


def test_an_array_under_two_names_is_written_once(reference: Path) -> None:
    found = trace.read(reference).arrays
    written = wire.parse((reference / trace.ARRAYS).read_bytes())
    twice = {name for name in found if name not in written}
    assert {f"fed/1/0/{kind}/0.bias" for kind in ("grad", "weights")} <= twice
    assert np.array_equal(found["fed/1/0/grad/0.bias"], written["grad/0.bias"])


@pytest.mark.parametrize("large", [1, 1 << 26])
def test_a_message_arrives_as_it_was_sent(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is held in a file; what is not aligned in it can be changed, too."""
    monkeypatch.setattr(wire, "LARGE", large)
    sent: dict[str, np.ndarray] = {
        "one": np.array(True),
        "x": np.arange(6.0).reshape(2, 3),
        "none": np.zeros((0, 2)),
    }
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("wb") as out, theirs.makefile("rb") as given:
        wire.send(out, {"ask": "run"}, sent)
        message = wire.receive(given)
        assert message
        header, arrays = message
        out.close()
        ours.shutdown(socket.SHUT_RDWR)
        assert wire.receive(given) is None
    assert header == {"ask": "run"} and arrays.keys() == sent.keys()
    for name, x in sent.items():
        assert np.array_equal(arrays[name], x) and arrays[name].dtype == x.dtype
        arrays[name][...] = 0
        assert arrays[name].flags.aligned


def test_what_is_sent_leaves_memory_where_a_file_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A received message and spilled arrays; not what a trace maps, whose changes no file has."""
    kept: list[Any] = []
    monkeypatch.setattr(wire, "_let_go", kept.append)
    monkeypatch.setattr(wire, "LARGE", 1)
    spilled = memory.Spilled()
    spilled["x"] = np.arange(2.0**18)
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rwb") as out, theirs.makefile("rwb") as given:
        wire.send(out, {}, {"x": np.arange(6.0)})
        message = wire.receive(given)
        assert message
        (body,) = kept  # as it arrives
        received = message[1]["x"]
        copied = np.memmap(spilled.file, float, "c", 0, (6,))
        wire.send(given, {}, {"x": received[2:], "spilled": spilled["x"][:9], "copied": copied})
    assert [each is body for each in kept] == [True, True, False]
    del kept[:]
    received[3], spilled["x"][3] = 7, 8
    monkeypatch.undo()
    for x in (received, spilled["x"]):
        file = wire._file_of(x)
        assert file
        wire._let_go(file)
    assert (received[3], spilled["x"][3]) == (7, 8)  # what was changed comes back


def test_a_folder_that_is_no_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no trace, for it has no trace\.json; record it again"):
        trace.read(tmp_path)
