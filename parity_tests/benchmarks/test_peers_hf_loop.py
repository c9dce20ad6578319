"""Hugging Face's loops, each in a thread, are driven as ours: read late, and loaded again."""

import tempfile
from pathlib import Path

import pytest

from parity_tests.benchmarks.hf_runners import PEERS, load_runner
from parity_tests.pair import perturbed, run, toy, window


def test_results_may_be_read_late() -> None:
    config = toy("gpt2", policy="fp32", steps=4, accum=2)
    at_once = run(load_runner("hf-trainer", config), config)
    runner = load_runner("hf-trainer", config)
    waiting = [runner.step(runner.place(window(config, step))) for step in range(4)]
    assert runner.state().step == 4  # waits for all that was started
    assert [wait() for wait in waiting] == at_once


def test_a_crash_reaches_who_waits() -> None:
    config = toy("gpt2", policy="fp32")
    runner = load_runner("hf-trainer", config)
    run(runner, config, range(1))
    unknown = window(config, 1).map_arrays(lambda x: x + config.model.vocab)
    with pytest.raises(IndexError, match="out of range"):
        runner.step(runner.place(unknown))()
    for question in (runner.state, runner.step(runner.place(window(config, 1)))):
        with pytest.raises(IndexError, match="out of range"):
            question()
    runner.load(perturbed(config))
    assert len(run(runner, config, range(2))) == 2


def test_no_step_after_the_last() -> None:
    config = toy("gpt2", policy="fp32", steps=2)
    runner = load_runner("hf-trainer", config)
    run(runner, config)
    with pytest.raises(RuntimeError, match="all its steps are taken"):
        run(runner, config, range(1))


def test_the_thread_ends_with_its_runner() -> None:
    config = toy("gpt2", policy="fp32")
    runner = load_runner("hf-trainer", config)
    run(runner, config, range(2))
    runner.state()
    thread = runner.loop.thread
    assert thread.is_alive() and thread.daemon
    del runner
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_the_one_loaded_last_counts() -> None:
    """Accelerate's state is the process's: a step of the other would be under its settings."""
    config = toy("gpt2", policy="fp32", accum=2)
    first, _ = (
        load_runner("accelerate", config),
        load_runner("hf-trainer", config.replace(policy="bf16")),
    )
    with pytest.raises(RuntimeError, match="load this one again"):
        run(first, config, range(1))
    first.load(perturbed(config))
    assert len(run(first, config, range(1))) == 1


@pytest.mark.parametrize("peer", PEERS)
def test_nothing_is_printed_or_written(
    peer: str, capfd: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = toy("gpt2", policy="bf16", accum=2, steps=2)
    runner = load_runner(peer, config)
    run(runner, config)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
