"""The loop alone, on a twin of numpy: signals, logs, divergence, memory, pipes and terminals."""

import json
import math
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import checkpoint, cli, loop, rundir, runlog, sampling, twin
from lockstep.config import from_flags, to_flags
from lockstep.errors import UserError
from lockstep.twin import StepResult
from parity_tests import fake
from parity_tests.fake import FakeTwin

ROOT = Path(__file__).parent.parent
STEPS = 12
SHAPE = "--model tiny --n-layer 1 --d-model 8 --n-head 1 --context 8"
SMALL = f"{SHAPE} --batch-size 2 --eval-batches 1 --policy fp32 --data text.txt --steps {STEPS}"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, where "fake" is a framework."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(twin.MODULES, "fake", fake.__name__)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    return tmp_path


def train(extra: str = "", out: str = "run") -> int:
    return cli.train("fake", [*SMALL.split(), "--out", out, *extra.split()])


def resume(extra: str = "", out: str = "run") -> int:
    return cli.train("fake", ["--resume", "--out", out, *extra.split()])


def rows(kind: str = "train", out: str = "run") -> list[dict[str, Any]]:
    return [row for row in runlog.rows(Path(out, "log.jsonl")) if row["kind"] == kind]


def saved(out: str = "run") -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoint.listing(Path(out))]


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """`act` is called within the twin's step of this number."""
    usual = FakeTwin.step

    def step(self: FakeTwin, window: np.ndarray) -> Callable[[], StepResult]:
        if self.now.step + 1 == number:
            act()
        return usual(self, window)

    monkeypatch.setattr(FakeTwin, "step", step)


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


# --- the log ---


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
    good = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 6)]
    text = "".join(json.dumps(row) + "\n" for row in good)
    (place / "log.jsonl").write_text(text + end)
    with runlog.RunLog(place / "log.jsonl", last_step=3) as log:
        log.write({"kind": "train", "step": 4, "loss": 0.5})
    assert runlog.rows(place / "log.jsonl") == [
        *good[:3],
        {"kind": "train", "step": 4, "loss": 0.5},
    ]


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def full(text: str) -> int:
        raise OSError(28, "No space left on device")

    usual = runlog.RunLog.__init__

    class Full:
        write = staticmethod(full)

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    def opened(self: runlog.RunLog, path: Path, *, last_step: int) -> None:
        usual(self, path, last_step=last_step)
        self.file.close()
        self.file = Full()  # type: ignore[assignment]

    monkeypatch.setattr(runlog.RunLog, "__init__", opened)
    assert train() == cli.MISTAKE
    assert capsys.readouterr().err == (
        "error: run/log.jsonl: cannot be written (No space left on device); make room there\n"
    )


# --- stopping ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_and_saves_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    before = signal.getsignal(number)
    at_step(monkeypatch, 5, send(number))
    assert train() == loop.STOPPED
    assert (
        "stopped after step 5, which is saved; go on with --resume --out run"
        in capsys.readouterr().out
    )
    assert saved() == [5]
    assert signal.getsignal(number) is before
    assert resume() == loop.DONE
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))


def test_a_signal_during_an_evaluation_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when it is decided already that this step is not saved."""
    monkeypatch.setattr(FakeTwin, "evaluate", lambda self, _: (send(signal.SIGTERM)(), 1.0)[1])
    assert train() == loop.STOPPED
    assert saved() == [1]  # the evaluation before step 1 was the first


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup, or behind `&` in a script."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        at_step(monkeypatch, 5, send(signal.SIGINT))
        assert train() == loop.DONE
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_signal_in_the_last_step_ends_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, STEPS, send(signal.SIGTERM))
    assert train() == loop.DONE
    assert saved() == [STEPS]


@pytest.fixture
def process(place: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts the fake trainer as a process of its own, 20 ms a step."""
    started: list[subprocess.Popen] = []

    def start(extra: str = "", **options: Any) -> subprocess.Popen:
        command = [sys.executable, "-m", fake.__name__, *SMALL.split(), "--out", "run"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), **options.pop("env", {})}
        piped = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(
            subprocess.Popen([*command, *extra.split()], env=environment, **{**piped, **options})
        )
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.communicate()


def wait_for_row(number: int) -> None:
    deadline = time.monotonic() + 60
    while len(rows()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_signal_ends_the_process_at_once(process: Callable[..., Any]) -> None:
    """Within a long step, and without a traceback."""
    child = process("--steps 1000 --save-every 0", env={"FAKE_STEP": "5"})
    while "step 0" not in child.stdout.readline():
        pass
    for _ in range(2):
        time.sleep(0.3)  # within the first step
        child.send_signal(signal.SIGINT)
    child.wait(timeout=60)
    assert child.returncode == -signal.SIGINT
    assert child.communicate()[1] == ""
    assert saved() == []


def test_ctrl_c_before_the_loop_ends_the_process_at_once(process: Callable[..., Any]) -> None:
    """A shell calls that status 130; nothing is written."""
    child = process(env={"FAKE_PREPARE": "60"})
    assert child.stderr.readline() == "preparing\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert (child.returncode, err) == (-signal.SIGINT, "")
    assert not Path("run").exists()


def test_a_reader_that_goes_away_stops_the_run_and_saves(process: Callable[..., Any]) -> None:
    """As in `python -m jax_impl.train | head`."""
    child = process("--steps 1000")
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(timeout=60) == loop.STOPPED
    assert child.stderr.read() == ""
    assert saved() == [rows()[-1]["step"]]


# --- what a person sees ---


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
    assert child.wait() == loop.DONE
    return shown.decode()


def test_a_terminal_gets_a_bar_with_an_eta_and_the_log_stays_clean(
    process: Callable[..., Any],
) -> None:
    shown = terminal_output(process, TERM="xterm", COLUMNS="100")
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
    assert (child.returncode, err) == (loop.DONE, "")
    assert not [c for c in out if c != "\n" and not " " <= c <= "~"]
    assert "step  1/12  loss 1.0000" in out
    assert "the run is in 'na\\xefve'" in out
    assert "ETA" in out


def test_what_a_sample_writes_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Not as rich's markup or emoji."""
    monkeypatch.setattr(loop.Run, "sample", lambda self: ":cat: [red]x[/red] [/]")
    assert train() == loop.DONE
    assert "  | :cat: [red]x[/red] [/]\n" in capsys.readouterr().out


def test_the_closing_command_is_the_same_run(capsys: Any) -> None:
    flags = "--policy params=float32,compute=bfloat16,output=float32 --lr 0.1 --accum 3 --compile"
    assert train(flags) == loop.DONE
    line = capsys.readouterr().out.splitlines()[-1]
    python, module, name, *command = shlex.split(line)
    assert (python, module, name) == ("python", "-m", "jax_impl.train")
    given = vars(cli.trainer_parser(name).parse_args(command))
    assert from_flags(given, accelerator=True) == rundir.read_record(Path("run")).config


def test_the_closing_starts_from_the_first_evaluation(capsys: Any) -> None:
    assert train("--steps 4") == loop.DONE
    assert resume("--steps 9") == loop.DONE
    assert "validation loss 1.0000 -> 0.1000 nats a token after 9 steps" in capsys.readouterr().out


# --- divergence and memory ---


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
    assert train(f"--save-every {every} --keep 9") == loop.DIVERGED
    line = capsys.readouterr().err
    told = f"the last good checkpoint is run/checkpoints/{good}" if good else "no good checkpoint"
    assert line.startswith(f"error: step {bad}: loss ")
    assert f"; {told}" in line
    assert "--lr" in line
    assert len(line.splitlines()) == 1
    assert rows()[-1]["step"] == bad
    assert rows()[-1][field] is None


def test_an_evaluation_that_is_not_finite_is_found_before_it_is_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    usual = FakeTwin.evaluate
    monkeypatch.setattr(
        FakeTwin, "evaluate", lambda self, b: usual(self, b) if self.now.step < STEPS else math.nan
    )
    assert train() == loop.DIVERGED
    assert "error: step 12: validation loss nan; no good" in capsys.readouterr().err
    assert saved() == []


def test_a_loss_scale_helps_until_it_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    losses(monkeypatch, 3, grad_norm=math.inf, skipped=True)
    assert train("--policy fp16") == loop.DONE
    losses(monkeypatch, 5, loss_scale=0.0)
    assert train("--policy fp16 --overwrite") == loop.DIVERGED
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
    assert train() == cli.MISTAKE
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


def test_a_framework_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(twin.MODULES, "fake", "no_such_framework.train")
    assert train() == cli.MISTAKE
    line = capsys.readouterr().err
    assert line.startswith("error: --framework fake: cannot be imported (No module named")
    assert line.endswith("; install it\n")


# --- directories ---


def test_runs_that_start_together_get_a_directory_each() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: rundir.create_new("stem"), range(24)))
    assert sorted(path.name for path in made) == sorted(
        ["stem", *(f"stem-{n}" for n in range(2, 25))]
    )


def test_runs_that_cannot_be_a_folder(capsys: Any) -> None:
    Path("runs").write_text("mine")
    assert cli.train("fake", SMALL.split()) == cli.MISTAKE
    assert capsys.readouterr().err == (
        "error: --out runs: runs is a file; name another directory\n"
    )


def test_a_damaged_newest_checkpoint_is_passed_over(capsys: Any) -> None:
    assert train("--save-every 5") == loop.DONE
    assert saved() == [10, STEPS]
    weights = Path("run", "checkpoints", f"step_{STEPS:08d}", "weights.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    capsys.readouterr()
    assert cli.main(["sample", "run", "--length", "3"]) == loop.DONE
    notice = f"{weights}: damaged, its checksum is not that in state.json; use another checkpoint"
    assert capsys.readouterr().err == notice + "\n"
    assert resume() == loop.DONE
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == [notice, "resuming run after step 10"]
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))
    assert saved() == [10, STEPS]


def test_overwrite_follows_no_link(place: Path) -> None:
    assert train() == loop.DONE
    elsewhere = place / "elsewhere"
    Path("run/checkpoints").rename(elsewhere)
    Path("run/checkpoints").symlink_to(elsewhere)
    assert train("--overwrite --steps 3") == loop.DONE
    assert saved() == [3]
    assert [path.name for path in elsewhere.iterdir()] == [f"step_{STEPS:08d}"]


# --- sampling ---


class Scores:
    """Stands where a twin stands: the same scores for each token."""

    def __init__(self, *scores: float) -> None:
        self.scores = np.array(scores)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return self.scores


def test_a_larger_vocabulary_than_bytes() -> None:
    """125m and gpt2 on text: the tokens from 256 on are never chosen."""
    scores = Scores(*np.arange(1000.0))
    text = sampling.sample(scores, b"x", length=5, context=4, temperature=0)  # type: ignore[arg-type]
    assert text == bytes([255] * 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite(bad: float) -> None:
    with pytest.raises(UserError, match="earlier checkpoint"):
        sampling.sample(Scores(0.0, bad), b"\0", length=1, context=4)  # type: ignore[arg-type]


def test_what_a_model_wrote_does_not_reach_the_terminal_as_a_command() -> None:
    text = b"def f():\n\treturn '\xc3\xa9'\x1b[2J\r\0\x9b\xff"
    assert sampling.shown(text) == "def f():\n\treturn 'é'\\x1b[2J\\r\\x00\ufffd\ufffd"


def test_top_k_of_equal_scores_is_still_k() -> None:
    generator = np.random.Generator(np.random.Philox(0))
    drawn = {sampling.choose(np.ones(9), 1.0, 3, generator) for _ in range(200)}
    assert drawn == {0, 1, 2}


def test_a_tiny_temperature_takes_the_best_without_a_warning() -> None:
    generator = np.random.Generator(np.random.Philox(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampling.choose(np.array([-1e300, 2.0, 1.0]), 1e-320, 0, generator) == 1


def test_a_state_of_another_model_is_refused(capsys: Any) -> None:
    """config.json was edited: the checkpoints are those of one layer."""
    assert train() == loop.DONE
    record = rundir.read_record(Path("run"))
    model = replace(record.config.model, n_layer=2)
    rundir.write_record(Path("run"), replace(record, config=replace(record.config, model=model)))
    for command in (lambda: resume("--steps 20"), lambda: cli.main(["sample", "run"])):
        assert command() == cli.MISTAKE
        assert "config.json: its model is not that of the run's" in capsys.readouterr().err


def test_the_device_decides_which_preset_the_flags_must_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six heads divide 10m's width, which an accelerator takes, and not tiny's."""
    with pytest.raises(UserError, match="--d-model 128: not divisible by --n-head 6"):
        cli._resolved("fake", {"n_head": 6})
    monkeypatch.setattr(fake, "has_accelerator", lambda device: True)
    assert cli._resolved("fake", {"n_head": 6}).model.model == "10m"


def test_flags_of_a_config() -> None:
    for given in (
        {},
        {"model": "gpt2", "compile": True},
        {"steps": 30, "min_lr": 0.0, "remat": "sqrt"},
    ):
        config = from_flags({"model": "tiny", **given}, accelerator=False)
        parsed = vars(cli.trainer_parser("x").parse_args(to_flags(config)))
        assert from_flags(parsed, accelerator=True) == config
