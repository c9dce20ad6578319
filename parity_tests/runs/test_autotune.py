"""`--autotune`: which way is taken, what is kept of it, and that a run has it again.

No test measures: a turn takes the seconds that the test says.
"""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep import provenance, twin
from lockstep.cli import trainers
from lockstep.config import Config, from_flags
from lockstep.errors import UserError
from lockstep.files import durable
from lockstep.run import directory
from lockstep.train import autotune
from lockstep.train.autotune import KEPT, MARGIN, ROUNDS

Patch = pytest.MonkeyPatch
CPU = {"model": "A", "family": "1/2", "flags": [], "cores": 2}
HERE = ["attention=reference", "attention=blocks", "matmul=onednn"]
ENTERED = [("none", "attention"), (HERE[0], "attention"), (HERE[1], "attention"),
           ("none", "matmul"), (HERE[2], "matmul")]  # fmt: skip
FAST = {"none": 1.0, "attention=reference": 0.9, "attention=blocks": 0.8, "matmul=onednn": 0.99}


class Course:
    """Contestants that take the seconds they are given, and who was asked to enter by what."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds, self.entered = seconds or FAST, list[tuple[str, str]]()

    def enter(self, framework: str, config: Config, name: str) -> Callable[[], float]:
        way = config.run.autotune
        self.entered.append((way, name))
        return lambda: self.seconds[way]


def has_ways(ways: list[str]) -> Callable[[str], Any]:
    """Returns what stands for `twin.module` where every framework has these ways."""
    return lambda framework: SimpleNamespace(ways=lambda config: ways)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(provenance, "cpu", lambda: CPU)
    monkeypatch.setattr(twin, "module", has_ways(HERE))


def config(**flags: Any) -> Config:
    return from_flags({"autotune": "auto", "device": "cpu", **flags}, accelerator=False)


def taken(course: Course, framework: str = "torch", **flags: Any) -> str:
    return autotune.resolve(framework, config(**flags), course.enter).run.autotune


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "autotune").iterdir())


def test_the_fastest_is_taken() -> None:
    """Checks that one way of each name is taken, and none that is hardly faster."""
    assert taken(Course()) == "attention=blocks"
    slower = {way: 1.1 for way in HERE}
    assert taken(Course({"none": 1.0, **slower}), policy="fp32") == "none"
    both = {"none": 1.0, "attention=reference": 0.7, "attention=blocks": 0.8, "matmul=onednn": 0.5}
    assert taken(Course(both), policy="fp16") == "attention=reference,matmul=onednn"


def test_a_burst_decides_nothing() -> None:
    """A way that is as fast but for a burst of other work in a few turns of the framework's own."""
    bursts = iter([1.0, 1.0, 5.0, 1.0, 5.0, 1.0, 5.0, 1.0, 5.0, 5.0, *[1.0] * 999])
    speeds = autotune.race({"none": lambda: next(bursts), "attention=blocks": lambda: 0.99})
    assert speeds["attention=blocks"]["speed"] < MARGIN or autotune.choose(speeds) == "none"
    assert autotune.choose({"attention=blocks": {"speed": 1.4, "low": 1.0, "high": 2.0}}) == "none"


def test_noise_takes_nothing() -> None:
    """Where turns vary by a fifth, the framework's own way stays unless another is much faster.

    Of a thousand races, a way that is no faster wins at most twenty.
    """
    generator = random.Random(0)

    def count(speed: float) -> int:
        def turn(seconds: float) -> Callable[[], float]:
            return lambda: seconds * generator.lognormvariate(0, 0.2)

        return sum(
            autotune.choose(autotune.race({"none": turn(1.0), HERE[0]: turn(1 / speed)})) != "none"
            for _ in range(1000)
        )

    assert count(0.98) <= count(1.0) <= 20
    assert count(MARGIN) <= 35
    assert count(1.5) >= 800


def test_a_race_ends_when_it_is_known() -> None:
    """Two rounds are enough to leave a way out, and none is taken that has lost two of all."""
    for lost, rounds, taken in (((), ROUNDS, True), ((0, 1), 2, False), ((3,), ROUNDS, True),
                                ((2, 4), 5, False), ((7, 8), ROUNDS, False)):  # fmt: skip
        seconds = [1.0, *(1.0 if number in lost else 0.5 for number in range(ROUNDS))]
        own, way = Mock(return_value=1.0), Mock(side_effect=seconds)
        speeds = autotune.race({"none": own, HERE[0]: way, HERE[1]: lambda: 2.0})
        assert own.call_count == way.call_count == 1 + rounds, lost
        assert (autotune.choose(speeds) == HERE[0]) == taken, lost


def test_each_name_has_an_operation(monkeypatch: Patch) -> None:
    """A way races against the framework's own by the operation that it replaces, and all enter
    before any races: an operation may be compiled meanwhile."""
    course, raced = Course(), list[list[tuple[str, str]]]()
    right = autotune.race

    def race(turns: Any) -> Any:
        raced.append([*course.entered])
        return right(turns)

    monkeypatch.setattr(autotune, "race", race)
    assert taken(course) == "attention=blocks"
    assert raced == [ENTERED, ENTERED]


def test_memory_is_raced_first(monkeypatch: Patch) -> None:
    """By buffers, and the others run in what is taken of it."""
    monkeypatch.setattr(twin, "module", has_ways([*HERE, KEPT]))
    told = list[bool]()
    monkeypatch.setattr(autotune, "keep_freed_memory", told.append)
    mapped = Mock(side_effect=autotune.mmap.mmap)
    monkeypatch.setattr(autotune.mmap, "mmap", mapped)
    for kept in (True, False):
        turn, known = autotune.take_pages(kept=kept), mapped.call_count
        assert turn() > 0 and turn() > 0
        assert mapped.call_count - known == (0 if kept else 2)
    for seconds, kept in ((0.5, True), (1.0, False)):
        pages = {True: seconds, False: 1.0}
        monkeypatch.setattr(autotune, "take_pages", lambda kept, of=pages: lambda: of[kept])
        course = Course()
        expected = f"attention=blocks,{KEPT}" if kept else "attention=blocks"
        assert taken(course, d_model=256 * (1 + kept)) == expected
        assert course.entered == ENTERED and told.pop() == kept
    monkeypatch.setattr(twin, "module", has_ways([KEPT]))
    course = Course()
    assert taken(course, context=256) == "none" and course.entered == []


def test_turns_alternate() -> None:
    """A machine that grows slower with each turn makes nobody the winner."""
    clock = iter(range(100, 100_000))
    speeds = autotune.race({way: lambda: float(next(clock)) for way in ("none", *HERE[:1])})
    assert autotune.choose(speeds) == "none"
    assert speeds[HERE[0]]["low"] < 1 < speeds[HERE[0]]["high"]


def test_an_answer_is_kept(tmp_path: Path) -> None:
    first, again = Course(), Course()
    assert taken(first) == taken(again) == "attention=blocks"
    assert first.entered == ENTERED and again.entered == []
    assert len(files(tmp_path)) == 1
    # What the answer does not hang on
    assert taken(again, steps=7, seed=3, n_layer=2, lr=1.0, dropout=0.1) == "attention=blocks"
    assert again.entered == []


def test_another_question_is_asked_anew() -> None:
    """Another shape, policy, framework, version, CPU or limit."""
    taken(Course())
    changes: dict[str, Callable[[Patch], Any]] = {
        "version": lambda m: m.setattr(provenance, "versions", lambda: {"torch": "0"}),
        "cpu": lambda m: m.setattr(provenance, "cpu", lambda: CPU | {"family": "1/3"}),
        "limit": lambda m: m.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
        "threads": lambda m: m.setenv("OMP_NUM_THREADS", "7"),
        "ways": lambda m: m.setattr(twin, "module", has_ways(HERE[1:])),
    }
    other = {"none": 1.0, **{way: 2.0 for way in HERE}}
    for name, change in changes.items():
        with pytest.MonkeyPatch.context() as patched:
            change(patched)
            assert taken(Course(other)) == "none", name
    for flags in (
        {"policy": "fp32"}, {"d_model": 256}, {"context": 256}, {"batch_size": 8},
        {"framework": "jax"},
    ):  # fmt: skip
        assert taken(Course(other), **flags) == "none", flags
    assert taken(Course(other)) == "attention=blocks"


DAMAGED = [
    "",
    "[]",
    '{"of": 3, "speeds": {}}',
    '{"of": {}, "speeds": {"attention=blocks": {"speed": "9", "low": "9", "high": "9"}}}',
]


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    taken(Course())
    (path,) = files(tmp_path)
    whole = path.read_text()
    other = whole.replace('"torch"', '"jax"')  # the answer to another question
    for text in (*DAMAGED, whole[:-9], other, whole.replace("attention=blocks", "memory=more")):
        path.write_text(text)
        course = Course()
        assert autotune.answers() == [] or text == other
        assert taken(course) == "attention=blocks" and course.entered, text
        assert path.read_text() == whole, text
    path.write_bytes(b"\xff\xfe")
    assert taken(Course()) == "attention=blocks" and path.read_text() == whole


def test_two_processes_do_no_harm(tmp_path: Path, monkeypatch: Patch) -> None:
    """An answer takes its place whole, and while nobody else writes one there."""
    events = list[str]()
    lock, replace = durable.fcntl.flock, durable.os.replace

    def record(event: str, right: Callable) -> Callable:
        def call(*given: Any) -> Any:
            events.append(event)
            return right(*given)

        return call

    monkeypatch.setattr(durable.fcntl, "flock", record("waits for the others", lock))
    monkeypatch.setattr(durable.os, "replace", record("is whole", replace))
    monkeypatch.setattr(durable.os, "close", record("lets others in", durable.os.close))
    taken(Course())
    assert events[0] == "waits for the others" and events.count("is whole") == 1
    assert events[-1] == "lets others in"
    assert len(files(tmp_path)) == 1


def test_a_run_needs_no_cache(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file"))
    assert taken(Course()) == "attention=blocks"
    assert autotune.answers() == []
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "replace", full)
    assert taken(Course()) == "attention=blocks"


def test_strict_numerics_take_nothing() -> None:
    for flags in ({"numerics": "strict"}, {"mesh": "data=2"}):
        course = Course()
        assert taken(course, **flags) == "none" and course.entered == []
    with pytest.raises(UserError, match="--autotune matmul=onednn: strict numerics"):
        config(numerics="strict", autotune="matmul=onednn")


def test_what_is_asked_for_is_not_measured() -> None:
    course = Course()
    for text in ("none", "attention=reference", "matmul=onednn,attention=blocks"):
        assert taken(course, autotune=text) == text
    with pytest.raises(UserError, match="--autotune memory=kept: memory=kept is not here; use"):
        taken(course, autotune="memory=kept")
    assert course.entered == []


def test_it_is_measured_on_one_layer() -> None:
    """Checks that any configuration with ways shrinks to a layer on few rows."""
    for flags in (
        {"model": "gpt2", "batch_size": 64, "accum": 4, "fp32_islands": "blocks.3"},
        {"model": "1b", "formats": "blocks.9=fp32", "policy": "bf16"},
        {"n_layer": 9, "remat": "sqrt", "lora_rank": 4, "eval_policy": "fp64", "init": "x"},
    ):
        small = autotune.shrink(config(**flags))
        model = small.model
        assert model.n_layer == 1 and model.lora_rank == 0 and model.vocab <= 256
        assert model.context * small.optim.batch_size <= 2048
        assert model.d_model == config(**flags).model.d_model
    assert autotune.shrink(config(policy="fp32", attention="reference")).precision.policy == "fp32"


def test_a_run_goes_on_as_it_began(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its config.json has the way, and --resume does not measure, unless another may be faster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCKSTEP_AUTOTUNE", raising=False)
    course, seen = Course(), list[Config]()
    monkeypatch.setattr(trainers.autotune, "enter_operation", course.enter)

    def way(framework: str, words: list[str]) -> str:
        seen.append(trainers.read_flags(framework, words)[0])
        return seen[-1].run.autotune

    def read_record(run: Path) -> directory.Record:
        return directory.Record(config=seen[0], framework="torch", data_tokens=None, details={})

    monkeypatch.setattr(directory, "read_record", read_record)
    begin = ["--out", "run", "--model", "tiny", "--mesh", "data=1", "--device", "cpu"]
    assert way("torch", begin) == "attention=blocks"
    course.seconds = {"none": 1.0, **{way: 2.0 for way in HERE}}
    (path,) = files(tmp_path)
    path.unlink()  # as on another day, when another would have won
    resume = ["--out", "run", "--resume"]
    for words, expected in {
        "": "attention=blocks",
        "--steps 900": "attention=blocks",
        "--autotune attention=reference": "attention=reference",
        "--autotune auto": "none",
    }.items():
        assert way("torch", [*resume, *words.split()]) == expected, words
    for framework, words in (("torch", "--policy fp32"), ("torch", "--device cpu"), ("jax", "")):
        assert way(framework, [*resume, *words.split()]) == "none", words
    monkeypatch.setenv("LOCKSTEP_AUTOTUNE", "matmul=onednn")
    assert way("torch", [*begin[2:], "--out", "other"]) == "matmul=onednn"


def test_a_turn_is_an_operation(monkeypatch: Patch) -> None:
    clock, run = iter([10.0, 12.0]), Mock()
    monkeypatch.setattr(twin, "module", framework := Mock())
    framework.return_value.operation.return_value = run
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: next(clock))
    turn = autotune.enter_operation("torch", small := config(), "matmul")
    framework.assert_called_once_with("torch")
    framework.return_value.operation.assert_called_once_with(small, "matmul")
    assert turn() == 2.0
    run.assert_called_once_with()
