"""`python -m benchmarks.worlds`: what several processes cost on one machine, in ms of a step by the
clock and of CPU time, which other programs hardly change.

torch: two processes of one thread each, our step beside a tutorial's DDP loop on the same model, in
turns; and one process of two threads with twice the batch. jax: one process and 1, 2, 4 and 8 fake
devices, the same global batch: its cores are as many as before, so that what grows is the cost of
dividing.
"""

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from lockstep import results, twin
from lockstep.config import Config, from_flags
from lockstep.errors import require_range
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser, reader
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start
from lockstep.process import start_module
from lockstep.results import Row
from lockstep.run.directory import require_writable_file

ROWS, DEVICES = 8, (1, 2, 4, 8)
MODEL = {"model": "tiny", "policy": "fp32", "device": "cpu", "steps": 10_000}
NAMES = ("torch", *(f"jax {count}" for count in DEVICES))
ROUNDS = 2  # of processes, in turns


def make_config(devices: int) -> Config:
    flags = {**MODEL, "mesh": f"data={devices}", "batch_size": ROWS // devices}
    return from_flags(flags, accelerator=False)


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of this process's CPU time."""
    began, used = time.perf_counter(), time.process_time()
    call()
    return 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - used)


def measure(framework: str, devices: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """ms of each of our steps, and of a bare loop's; this process may be one of several."""
    config = make_config(devices)
    built, window = start(framework, config), GPT.window(config, 0)
    built.prepare()

    def ours() -> None:
        built.step(built.place(window))()
        built.agree(False)  # as the loop asks after each step

    loops = {"ours": ours}
    if framework == "torch" and devices > 1:
        trainer = built.trainer  # type: ignore[attr-defined]
        batch = built.place(window).select(0)
        loops["bare"] = bare_loop(trainer.parallel, trainer.optimizer, batch)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for number in range(steps + 3):  # those that go first go second the next time
        for name in sorted(loops, reverse=bool(number % 2)):
            built.agree(False)  # they begin together
            times[name].append(milliseconds(loops[name]))
    return {name: each[3:] for name, each in times.items()}


def bare_loop(model: Any, optimizer: Any, batch: Any) -> Callable[[], None]:
    """A step of a tutorial's loop."""
    import torch

    def bare() -> None:
        logits = model(batch.tokens).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return bare


def measure_apart(framework: str, devices: int, steps: int, threads: int) -> dict[str, list[Any]]:
    """In processes of their own: torch one a device, JAX one. That of the first."""
    processes = devices if framework == "torch" else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    changes = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes),
               "OMP_NUM_THREADS": str(threads)}  # fmt: skip
    words = ["--inside", framework, "--devices", str(devices), "--steps", str(steps)]
    started = [
        start_module("benchmarks.worlds", *words, changes={**changes, "RANK": str(rank)},
                     stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in started]
    assert not any(process.returncode for process in started), said
    return json.loads(said[0].splitlines()[-1])


def quartiles(times: list[Any]) -> dict[str, list[float]]:
    return {kind: statistics.quantiles(each) for kind, each in zip(("ms", "cpu_ms"), zip(*times))}


def rows(steps: int) -> list[Row]:
    world: dict[str, list[Any]] = {"ours": [], "bare": [], "alone": []}
    for _ in range(ROUNDS):
        for name, times in measure_apart("torch", 2, steps, threads=1).items():
            world[name] += times
        world["alone"] += measure_apart("torch", 1, steps, threads=2)["ours"]
    ratios = [
        tuple(a / b for a, b in zip(*pair))
        for pair in zip(world["ours"], world["bare"], strict=True)
    ]
    figures = {name: quartiles(times) for name, times in world.items()}
    found = [results.row("torch", "cpu", **figures, ratio=quartiles(ratios), pairs=len(ratios))]
    grown: dict[int, list[Any]] = {count: [] for count in DEVICES}
    for _ in range(ROUNDS):
        for count in DEVICES:
            grown[count] += measure_apart("jax", count, steps, threads=1)["ours"]
    found += [
        results.row(f"jax {count}", "cpu", ours=quartiles(times), pairs=len(times))
        for count, times in grown.items()
    ]
    return found


def table(found: dict[str, Row]) -> str:
    """Medians, and their quartiles."""
    torch = found["torch"]
    lines = [
        ["PyTorch, two processes: our step", *_figures(torch["ours"])],
        ["a bare DDP loop", *_figures(torch["bare"])],
        ["ours over bare, pair by pair", *_figures(torch["ratio"], "{:.3f} times")],
        ["PyTorch, one process, the same rows", *_figures(torch["alone"])],
        *([f"JAX, {name.split()[1]} devices", *_figures(row["ours"])]
          for name, row in found.items() if name != "torch"),
    ]  # fmt: skip
    return markdown(["step", "median", "quartiles", "CPU time, median", "quartiles"], lines)


def _figures(quartiles: dict[str, list[float]], unit: str = "{:.1f} ms") -> list[str]:
    found = [[unit.format(each) for each in quartiles[kind]] for kind in ("ms", "cpu_ms")]
    return [text for low, middle, high in found for text in (middle, f"{low} to {high}")]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.worlds", description=__doc__)
    parser.add_argument("--steps", metavar="N", type=reader(int), default=40,
                        help="measured of each, in each of two rounds (default: 40)")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", type=Path, help="where rows go, as lines of JSON")
    parser.add_argument("--inside", metavar="FRAMEWORK", help="what the processes are told")
    parser.add_argument("--devices", metavar="N", type=reader(int), help="too")
    given = parser.parse_args(argv)
    require_range("--steps", given.steps, 4)
    if given.inside:
        print(json.dumps(measure(given.inside, given.devices, given.steps)), flush=True)
        twin.end(given.inside, DONE)
        return DONE
    if given.out:
        require_writable_file(given.out)
    found = rows(given.steps)
    for row in found:
        print(json.dumps({name: value for name, value in row.items() if name != "measured"}))
    if given.out:
        results.put(given.out, found)
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
