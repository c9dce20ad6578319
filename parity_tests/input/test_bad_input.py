"""A user's mistake ends with exit status 2, one line (field, value, remedy), nothing written.

Each command of the project, with the invocations of `parity_tests.input.wrong`.
"""

import argparse
import contextlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import commands, trainers
from lockstep.exits import exit_status
from lockstep.process import ROOT
from parity_tests.input import wrong
from parity_tests.input.wrong_place import TEXT, check_line, contents
from parity_tests.input.wrong_place import place as place
from parity_tests.tiers import tier

TRAINERS = {"jax_impl.train": "jax", "torch_ref.train": "torch"}
# What another of our processes starts and speaks to, examples to copy, the tests' own trainer.
NOT_FOR_USERS = {
    "lockstep.worker",
    "jax_impl.inspect.probe",
    "torch_ref.inspect.probe",
    "examples.finetune.finetune",
    "examples.minimal.train_jax",
    "examples.minimal.train_torch",
    "benchmarks.jobs",
    "parity_tests.cuda.resnet",
    "parity_tests.cuda.float8",
    "lockstep.convert.script",  # the text of a converter, which has such a line
    "parity_tests.fake",
    "parity_tests.runs.exchanges",
}

Case = tuple[str, list[str], list[str]]  # a command, its words, what the line must say


def trainer_words(flags: str) -> list[str]:
    given = "--data" in flags or "--resume" in flags
    return flags.split() + ([] if given else ["--data", "text.txt"])


# Integers that may be below 1, or must be above it, and their lowest values.
LOWEST = {"--vocab": 2} | dict.fromkeys(
    ("--lora-rank", "--warmup", "--seed", "--eval-every", "--save-every", "--norms"), 0
)


def wrong_values(action: argparse.Action) -> list[tuple[str, list[str]]]:
    """Values that a flag of a trainer refuses by its definition, and what the line must say."""
    flag, choices = action.option_strings[-1], str(action.metavar).split("|")
    if action.metavar == "N":
        below = str(LOWEST.get(flag, 1) - 1)
        return [("1.5", ["'1.5'", "whole number"]), (below, [below, "must be"])]
    if action.metavar == "X" and flag != "--error":
        refused = [(text, [text, "must be"]) for text in ("nan", "inf", "-1")]
        return [("fast", ["'fast'", "number"]), *refused]
    if len(choices) > 1 and choices[-1].islower() and not choices[0].isupper():
        return [("no-such", ["no-such", "use", *choices])]
    return []


def generated_cases(trainer: str) -> Iterator[Case]:
    for action in trainers.trainer_parser(trainer)._actions:
        flag = action.option_strings[-1]
        if action.nargs != 0:
            yield trainer, [flag], [flag, "expected one argument"]
        if flag not in ("--processes", "--process-id"):  # which need --coordinator
            for value, said in wrong_values(action):
                yield trainer, trainer_words(f"{flag} {value}"), [flag, *said]


def test_each_kind_of_flag_has_generated_cases() -> None:
    """The cases are read off the parser: here are some of what they must contain."""
    tried = {" ".join(words[:2]) for _, words, _ in generated_cases("jax_impl.train")}
    assert tried >= {
        "--n-layer 0", "--vocab 1", "--seed -1", "--lr nan", "--beta2 -1", "--steps 1.5",
        "--clip fast", "--remat no-such", "--device no-such", "--track no-such",
    }  # fmt: skip


CASES: list[Case] = [
    *(case for name in TRAINERS for case in generated_cases(name)),
    *((name, trainer_words(flags), said) for name in TRAINERS for flags, said in wrong.TRAINER),
    *(("torch_ref.train", words, said) for words, said in wrong.ODD_TEXT),
    *(("lockstep", words, said) for words, said in wrong.LOCKSTEP),
    *(
        (name, words.split(), said)
        for name, wrongs in wrong.MODULES.items()
        for words, said in wrongs
    ),
    *(("python", words.split(), said) for words, said in wrong.PROCESSES),
]


def status_of(command: str, words: list[str]) -> int:
    """In this process, where that is possible: frameworks take seconds to import."""
    if command in TRAINERS:
        return trainers.train(TRAINERS[command], words)
    if command == "lockstep":
        return commands.main(words)
    if command == "python":
        done = subprocess.run(
            [sys.executable, *words], env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True,
        )  # fmt: skip
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        return done.returncode
    module = importlib.import_module(command)
    return exit_status(partial(module.main, words))


@pytest.fixture(scope="module")
def untouched(place: Path) -> dict[str, Any]:
    """Read once: of hundreds of cases none may change it."""
    return contents(place)


@pytest.mark.parametrize(
    ("command", "words", "said"), CASES,
    ids=[ascii(" ".join([command, *words]))[1:80] for command, words, _ in CASES],
)  # fmt: skip
def test_one_line_and_nothing_written(
    command: str, words: list[str], said: list[str], place: Path, untouched: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    status = status_of(command, words)
    streams = capsys.readouterr()
    check_line(status, streams.err, streams.out, said)
    assert contents(place) == untouched


def takes_number(action: Any) -> bool:
    try:
        if action.type:
            action.type("x")
    except argparse.ArgumentTypeError:
        return True
    return False


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_flags_of_a_command_refuse_what_they_cannot_read(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag that takes a value is none without it, and one that takes a number takes no text."""
    parsers = next(a.choices for a in commands.lockstep_parser([command])._actions if a.choices)
    flags = [a for a in dict(parsers)[command]._actions if a.option_strings and a.nargs is None]
    cases = [([a.option_strings[-1]], ["expected one argument"]) for a in flags]
    cases += [([a.option_strings[-1], "x"], ["'x'", "number"]) for a in flags if takes_number(a)]
    assert bool(cases) == (command not in ("mcp", "runs"))
    for words, said in cases:
        status = status_of("lockstep", [command, *words])
        streams = capsys.readouterr()
        check_line(status, streams.err, streams.out, [words[0], *said])


def commands_of(root: Path) -> set[str]:
    """The modules that one can run, as one types them."""
    found = set()
    for file in root.glob("[!.]*/**/*.py"):  # and not what an environment has
        if re.search(r'^if __name__ == "__main__":', file.read_text(), re.M):
            found.add(".".join(file.relative_to(root).with_suffix("").parts))
    return {name.removesuffix(".__main__") for name in found}


def test_no_command_is_left_out() -> None:
    tried = {command for command, _, _ in CASES}
    assert commands_of(ROOT) - NOT_FOR_USERS <= tried
    (subcommands,) = (set(a.choices) for a in commands.lockstep_parser()._actions if a.choices)
    said = {words[0] for command, words, _ in CASES if command == "lockstep" and words}
    assert {"sample", "curves", "plan"} <= subcommands <= said


@pytest.mark.parametrize("form", ["safetensors", "onnx"])
def test_the_folder_that_one_is_in_is_not_replaced(
    form: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    status = commands.main(["export", str(place / "run"), "--to", ".", "--format", form])
    streams = capsys.readouterr()
    check_line(status, streams.err, streams.out, ["--to .", "you are in", "name another"])
    assert not any(tmp_path.iterdir())


@contextlib.contextmanager
def powerless() -> Iterator[None]:
    """Without root's right to pass over permissions."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model tiny --data closed/text.txt", ["--data", "closed/text.txt", "Permission denied"]),
        ("--data text.txt --out closed/run", ["--out", "closed/run", "Permission denied"]),
        ("--data text.txt --out sealed/run", ["--out", "sealed/run", "sealed cannot be written"]),
        ("--data text.txt --out sealed", ["--out", "sealed", "cannot be written"]),
        ("--resume --out closed/run", ["closed/run", "Permission denied"]),
    ],
)
def test_without_permission(
    flags: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others than root
        here = Path(folder)
        here.chmod(0o777)
        (here / "text.txt").write_text(TEXT)
        for name, mode in (("closed", 0o000), ("sealed", 0o555)):
            (here / name).mkdir(mode)
        monkeypatch.chdir(here)
        with powerless():
            status = trainers.train("torch", flags.split())
        streams = capsys.readouterr()
        check_line(status, streams.err, streams.out, words)
        assert sorted(path.name for path in here.rglob("*")) == ["closed", "sealed", "text.txt"]
        monkeypatch.undo()


@tier(
    "rest",
    guard="each name of a device, in test_devices.py",
    where=lambda environment: not environment,
)
@pytest.mark.parametrize(
    ("module", "environment"),
    [
        ("torch_ref.train", {}),
        ("jax_impl.train", {}),
        ("jax_impl.train", {"JAX_PLATFORMS": "cuda"}),
    ],
)
def test_a_device_that_is_not_there(
    module: str, environment: dict[str, str], place: Path, untouched: dict[str, Any]
) -> None:
    flags = ["--device", "cuda", "--data", "text.txt", "--context", "8"]
    done = subprocess.run(
        [sys.executable, "-m", module, *flags],
        cwd=place, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "",
             **environment},
    )  # fmt: skip
    check_line(done.returncode, done.stderr, done.stdout, ["--device cuda", "--device cpu"])
    assert contents(place) == untouched


def test_a_mistake_is_found_before_the_framework_is_loaded(place: Path) -> None:
    """So that the answer comes at once."""
    code = (
        "import sys; from lockstep.cli import trainers; "
        "trainers.train('jax', ['--lr', '0']); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert "jax" not in done.stdout.split()
