"""The loop of a run: its output, its directory, what stops it, and what it fails of."""

import json
import math
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep import exits, twin
from lockstep.cli import commands, trainers
from lockstep.run import directory, runlog
from lockstep.train import closing
from lockstep.twin import StepResult
from parity_tests.fake import FakeTwin
from parity_tests.runs.fake_runs import SMALL, STEPS, at_step, resume, rows, saved_steps, train

pytestmark = pytest.mark.usefixtures("place")


def terminal_output(start: Callable[..., subprocess.Popen], **environment: str) -> str:
    controller, terminal = pty.openpty()
    child = start("--steps 30", stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    while True:
        try:
            piece = os.read(controller, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(controller)
    assert child.wait() == exits.DONE
    return shown.decode()


def test_a_terminal_gets_a_bar_with_an_eta_and_the_log_stays_clean(
    process: Callable[..., Any],
) -> None:
    shown = terminal_output(process, TERM="xterm", COLUMNS="120")
    for part in ("\x1b[", "━", "ETA", "30/30", "\x1b[?25h"):  # the last shows the cursor again
        assert part in shown
    assert "tokens/s" not in shown  # no lines besides
    assert b"\x1b" not in Path("run/log.jsonl").read_bytes()
    assert len(rows()) == 30


def test_a_terminal_that_cannot_draw_gets_lines(process: Callable[..., Any]) -> None:
    shown = terminal_output(process, TERM="dumb")
    assert "\x1b" not in shown
    assert "step 30/30  loss" in shown


def test_a_pipe_gets_plain_lines_whatever_the_environment(process: Callable[..., Any]) -> None:
    child = process("--out naïve", env={"FORCE_COLOR": "1", "PYTHONIOENCODING": "ascii"})
    out, err = child.communicate()
    assert (child.returncode, err) == (exits.DONE, "")
    assert not [c for c in out if c != "\n" and not " " <= c <= "~"]
    assert "step  1/12  loss 1.0000" in out
    assert "the run is in 'na\\xefve'" in out
    assert "ETA" in out


def test_a_locale_of_ascii_ends_no_run(place: Path, process: Callable[..., Any]) -> None:
    """A model may write what is no UTF-8: it is kept as U+FFFD, and shown as the terminal can."""
    (place / "text.txt").write_bytes(b"\xff" * 2000)
    child = process(env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    out, err = child.communicate()
    assert (child.returncode, err) == (exits.DONE, "")
    assert "  | \\ufffd" in out
    assert Path("run/sample.txt").read_text("utf-8").startswith("\ufffd")


def test_what_a_sample_writes_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Not as rich's markup or emoji."""
    monkeypatch.setattr(closing, "sample", lambda *_: ":cat: [red]x[/red] [/]")
    assert train() == exits.DONE
    assert "  | :cat: [red]x[/red] [/]\n" in capsys.readouterr().out


# --- a run's directory: its log without torn rows, and what is in the way or does not belong there


def test_floats_are_whole_and_what_is_not_finite_is_null(place: Path) -> None:
    with runlog.RunLog(place / "log.jsonl", last_step=0) as log:
        log.write({"step": 1, "loss": 0.1 + 0.2, "grad_norm": math.nan, "lr": math.inf, "n": 7})
    text = (place / "log.jsonl").read_text()
    assert text == (
        '{"step": 1, "loss": 0.30000000000000004, "grad_norm": null, "lr": null, "n": 7}\n'
    )


@pytest.mark.parametrize(
    "end", ['{"kind": "tr', "\0\0\0", '"a text"\n', '{"step": "9"}\n', "[" * 9999]
)
def test_rows_past_the_checkpoint_and_torn_ones_are_dropped(end: str, place: Path) -> None:
    rest = {"grad_norm": None, "lr": 0.1, "loss_scale": 1.0, "skipped": False, "mfu": None}
    good = [{"kind": "train", "step": step, "loss": 1 / step, **rest} for step in range(1, 6)]
    text = "".join(json.dumps(row) + "\n" for row in good)
    (place / "log.jsonl").write_text(text + end)
    with runlog.RunLog(place / "log.jsonl", last_step=3) as log:
        log.write(good[3])
    assert list(runlog.rows(place / "log.jsonl")) == good[:4]


# --- directories


def test_runs_that_start_together_get_a_directory_each() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: directory.make_new("stem"), range(24)))
    assert sorted(path.name for path in made) == sorted(
        ["stem", *(f"stem-{n}" for n in range(2, 25))]
    )


def test_runs_that_cannot_be_a_folder(capsys: Any) -> None:
    Path("runs").write_text("mine")
    assert trainers.train("fake", SMALL.split()) == exits.MISTAKE
    assert capsys.readouterr().err == (
        "error: --out runs: runs is a file; name another directory\n"
    )


def test_a_damaged_newest_checkpoint_is_passed_over(capsys: Any) -> None:
    assert train("--save-every 5") == exits.DONE
    assert saved_steps() == [10, STEPS]
    weights = Path("run", "checkpoints", f"step_{STEPS:08d}", "weights.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    capsys.readouterr()
    assert commands.main(["sample", "run", "--length", "3"]) == exits.DONE
    good = Path("run", "checkpoints", "step_00000010")
    notice = (
        f"{weights}: damaged, its checksum is not that in state.json; use another checkpoint"
        f"; the last good one is {good}"
    )
    assert capsys.readouterr().err == notice + "\n"
    assert resume() == exits.DONE
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == [notice, "resuming run after step 10"]
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))
    assert saved_steps() == [10, STEPS]


def test_overwrite_replaces_the_run_and_nothing_else(place: Path) -> None:
    """No link is followed; what is not the run's own stays."""
    assert train() == exits.DONE
    elsewhere = place / "elsewhere"
    Path("run/checkpoints").rename(elsewhere)
    Path("run/checkpoints").symlink_to(elsewhere)
    Path("run/notes.txt").write_text("mine")
    assert train("--overwrite --steps 3") == exits.DONE
    assert saved_steps() == [3] and len(rows()) == 3
    assert [path.name for path in elsewhere.iterdir()] == [f"step_{STEPS:08d}"]
    assert Path("run/notes.txt").read_text() == "mine"
    assert resume("--steps 5") == exits.DONE  # a finished run goes on
    assert [row["step"] for row in rows()] == [1, 2, 3, 4, 5]
    assert directory.read_record(Path("run")).config.optim.steps == 5


# --- a signal, or a reader that goes away, stops a run after its step; that step is saved


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_and_saves_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    before = signal.getsignal(number)
    at_step(monkeypatch, 5, send(number))
    assert train() == exits.STOPPED
    assert (
        "stopped after step 5, which is saved; go on with --resume --out run"
        in capsys.readouterr().out
    )
    assert saved_steps() == [5]
    assert signal.getsignal(number) is before
    assert resume() == exits.DONE
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))


def test_a_signal_during_an_evaluation_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when it is decided already that this step is not saved."""
    monkeypatch.setattr(FakeTwin, "evaluate", lambda self, _: (send(signal.SIGTERM)(), 1.0)[1])
    assert train() == exits.STOPPED
    assert saved_steps() == [1]  # the evaluation before step 1 was the first


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ignores a signal that nohup, or `&` in a script, ignores."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        at_step(monkeypatch, 5, send(signal.SIGINT))
        assert train() == exits.DONE
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_signal_in_the_last_step_ends_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, STEPS, send(signal.SIGTERM))
    assert train() == exits.DONE
    assert saved_steps() == [STEPS]


def test_a_second_signal_ends_the_process_at_once(process: Callable[..., Any]) -> None:
    """Within a long step, and without a traceback."""
    child = process("--steps 1000 --save-every 0", env={"FAKE_STEP": "600"})
    while "step 0" not in child.stdout.readline():
        pass
    for _ in range(100):  # two, as soon as it has seen them one by one
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            time.sleep(0.1)
    assert child.returncode == -signal.SIGINT
    assert child.communicate()[1] == ""
    assert saved_steps() == []


def test_ctrl_c_before_the_loop_ends_the_process_at_once(process: Callable[..., Any]) -> None:
    """A shell calls that status 130; nothing is written."""
    child = process(env={"FAKE_PREPARE": "600"})
    assert child.stderr.readline() == "preparing\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (-signal.SIGINT, "")
    assert not Path("run").exists()


def test_a_reader_that_goes_away_stops_the_run_and_saves(process: Callable[..., Any]) -> None:
    """A run stops and saves when its reader ends, as in `python -m jax_impl.train | head`."""
    child = process("--steps 100000")
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(timeout=300) == exits.STOPPED
    assert child.stderr.read() == ""
    assert saved_steps() == [rows()[-1]["step"]]


# --- a run that diverges, or for which there is no memory, ends with one line that says what to do


def losses(monkeypatch: pytest.MonkeyPatch, bad: int, **changed: Any) -> None:
    """From step `bad` on, results are changed."""
    usual = FakeTwin.result

    def result(self: FakeTwin, step: int) -> StepResult:
        row = usual(self, step)
        return row._replace(**changed) if step >= bad else row

    monkeypatch.setattr(FakeTwin, "result", result)


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
@pytest.mark.parametrize(
    ("bad", "every", "good"), [(7, 2, "step_00000004"), (8, 2, "step_00000006"), (2, 1, None)]
)
def test_the_last_good_checkpoint_is_named(
    field: str, bad: int, every: int, good: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A loss at step 7 that is not finite is that of the weights after step 6: not a good one."""
    losses(monkeypatch, bad, **{field: math.nan})
    assert train(f"--save-every {every} --keep 9") == exits.DIVERGED
    line = capsys.readouterr().err
    told = f"the last good checkpoint is run/checkpoints/{good}" if good else "no good checkpoint"
    assert line.startswith(f"error: step {bad}: loss ")
    assert f"; {told}" in line
    assert "--lr" in line
    assert len(line.splitlines()) == 1
    assert rows()[-1]["step"] == bad
    assert rows()[-1][field] is None


def test_a_loss_scale_helps_until_it_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    losses(monkeypatch, 3, grad_norm=math.inf, skipped=True)
    assert train("--policy fp16") == exits.DONE
    losses(monkeypatch, 5, loss_scale=0.0)
    assert train("--policy fp16 --overwrite") == exits.DIVERGED
    assert rows()[-1]["step"] == 5


@pytest.mark.parametrize("error", [
    MemoryError("Unable to allocate 7.45 TiB for an array"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
])  # fmt: skip
def test_out_of_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail() -> None:
        raise error

    at_step(monkeypatch, 3, fail)
    assert train() == exits.MISTAKE
    assert capsys.readouterr().err == (
        "error: --batch-size 2: out of memory; use a smaller one with more --accum, "
        "--remat block, or a smaller --model\n"
    )


def test_another_error_is_a_bug_and_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("shapes do not match")

    at_step(monkeypatch, 3, fail)
    with pytest.raises(RuntimeError, match="shapes"):
        train()


def test_ranks_with_different_newest_checkpoints_end(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert train("--steps 6 --warmup 0") == exits.DONE
    monkeypatch.setattr(FakeTwin, "broadcast", lambda self, number: 4)
    assert resume("--steps 9") == exits.MISTAKE
    said = "the ranks found different newest checkpoints (rank 0: 6)"
    assert said in capsys.readouterr().err


def test_a_framework_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(twin.MODULES, "fake", "no_such_framework.train")
    assert train() == exits.MISTAKE
    line = capsys.readouterr().err
    assert line.startswith("error: fake: cannot be imported (No module named")
    assert line.endswith("; lockstep doctor --framework fake says why\n")
