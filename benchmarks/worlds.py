"""What several processes cost on one machine, in ms of a step by the clock and of CPU time, which
other programs hardly change.

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
from typing import Any

from benchmarks.tables import markdown
from lockstep import twin
from lockstep.config import from_flags
from lockstep.exits import DONE
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start
from lockstep.process import start_module
from lockstep.results import Row

ROWS, DEVICES = 8, (1, 2, 4, 8)
MODEL = {"model": "tiny", "policy": "fp32", "device": "cpu", "steps": 10_000}
NAMES = ("torch", *(f"jax {count}" for count in DEVICES))
STEPS, ROUNDS = 40, 2  # of each, in each of two rounds of processes
Times = list[Any]  # (ms by the clock, ms of CPU time) of each step


def measure_step(framework: str, devices: int) -> dict[str, Times]:
    """The times of each of our steps, and of a bare loop's; this process may be one of several."""
    flags = {**MODEL, "mesh": f"data={devices}", "batch_size": ROWS // devices}
    config = from_flags(flags, accelerator=False)
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
    times: dict[str, Times] = {name: [] for name in loops}
    for number in range(STEPS + 3):  # those that go first go second the next time
        for name in sorted(loops, reverse=bool(number % 2)):
            built.agree(False)  # they begin together
            began, used = time.perf_counter(), time.process_time()
            loops[name]()
            taken = time.perf_counter() - began, time.process_time() - used
            times[name].append([1e3 * seconds for seconds in taken])
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


def measure_apart(framework: str, devices: int, threads: int) -> dict[str, Times]:
    """The times of the first of some processes: torch has one a device, JAX one."""
    processes = devices if framework == "torch" else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    changes = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes),
               "OMP_NUM_THREADS": str(threads)}  # fmt: skip
    started = [
        start_module("benchmarks.worlds", framework, str(devices),
                     changes={**changes, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in started]
    assert not any(process.returncode for process in started), said
    return json.loads(said[0].splitlines()[-1])


def quartiles(times: Times) -> dict[str, list[float]]:
    return {kind: statistics.quantiles(each) for kind, each in zip(("ms", "cpu_ms"), zip(*times))}


def measure(world: str) -> dict[str, Any]:
    """The quartiles of one of `NAMES`."""
    found: dict[str, Times] = {"ours": [], "bare": [], "alone": []}
    if world != "torch":
        for _ in range(ROUNDS):
            found["ours"] += measure_apart("jax", int(world.split()[1]), threads=1)["ours"]
        return {"ours": quartiles(found["ours"]), "pairs": len(found["ours"])}
    for _ in range(ROUNDS):
        for name, times in measure_apart("torch", 2, threads=1).items():
            found[name] += times
        found["alone"] += measure_apart("torch", 1, threads=2)["ours"]
    ratios = [[a / b for a, b in zip(*pair)] for pair in zip(found["ours"], found["bare"])]
    figures = {name: quartiles(times) for name, times in found.items()}
    return {**figures, "ratio": quartiles(ratios), "pairs": len(ratios)}


def table(found: dict[str, Row]) -> str:
    """Medians, and their quartiles."""
    lines = []
    for name, row in found.items():
        if name != "torch":
            lines.append([f"JAX, {name.split()[1]} devices", *_figures(row["ours"])])
            continue
        lines += [
            ["PyTorch, two processes: our step", *_figures(row["ours"])],
            ["a bare DDP loop", *_figures(row["bare"])],
            ["ours over bare, pair by pair", *_figures(row["ratio"], "{:.3f} times")],
            ["PyTorch, one process, the same rows", *_figures(row["alone"])],
        ]
    return markdown(["step", "median", "quartiles", "CPU time, median", "quartiles"], lines)


def _figures(quartiles: dict[str, list[float]], unit: str = "{:.1f} ms") -> list[str]:
    found = [[unit.format(each) for each in quartiles[kind]] for kind in ("ms", "cpu_ms")]
    return [text for low, middle, high in found for text in (middle, f"{low} to {high}")]


if __name__ == "__main__":
    print(json.dumps(measure_step(sys.argv[1], int(sys.argv[2]))), flush=True)
    twin.end(sys.argv[1], DONE)
