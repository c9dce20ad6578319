"""What a person sees of a run, in a terminal and through a pipe."""

import os
import pty
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import exits
from lockstep.cli import trainers
from lockstep.config import from_flags
from lockstep.run import directory
from lockstep.train import closing
from parity_tests.runs.fake_runs import resume, rows, train

pytestmark = pytest.mark.usefixtures("place")


def terminal_output(
    start: Callable[..., subprocess.Popen], flags: str = "", **environment: str
) -> str:
    controller, terminal = pty.openpty()
    child = start(f"--steps 30 {flags}", stdout=terminal, stderr=terminal, env=environment)
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


@pytest.mark.parametrize("flags", ["", "--live"])
def test_a_terminal_gets_a_bar_with_an_eta_and_the_log_stays_clean(
    flags: str, process: Callable[..., Any]
) -> None:
    shown = terminal_output(process, flags, TERM="xterm", COLUMNS="120")
    for part in ("\x1b[", "━", "ETA", "30/30", "\x1b[?25h"):  # the last shows the cursor again
        assert part in shown
    assert ("tokens/s" in shown) is (flags == "--live")  # without it no lines besides
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


def test_the_closing_command_is_the_same_run(capsys: Any) -> None:
    flags = "--policy params=float32,compute=bfloat16,output=float32 --lr 0.1 --accum 3 --compile"
    assert train(flags) == exits.DONE
    line = capsys.readouterr().out.splitlines()[-1]
    python, module, name, *command = shlex.split(line)
    assert (python, module, name) == ("python", "-m", "jax_impl.train")
    given = vars(trainers.trainer_parser(name).parse_args(command))
    assert from_flags(given, accelerator=True) == directory.read_record(Path("run")).config


def test_the_closing_starts_from_the_first_evaluation(capsys: Any) -> None:
    assert train("--steps 4") == exits.DONE
    assert resume("--steps 9") == exits.DONE
    assert "validation loss 1.0000 -> 0.1000 nats a token after 9 steps" in capsys.readouterr().out
