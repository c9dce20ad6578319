"""One cell, measured: its speed, its memory, and what it computed."""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.cells import CONTENDERS, Cell
from lockstep import devices, nvidia
from lockstep.config import Config
from lockstep.model import flops
from lockstep.model.state import initial_state
from lockstep.parity.pair import GPT
from lockstep.plan import memory, shape
from lockstep.plan.timing import LARGEST_SPREAD
from lockstep.train.memory import ResidentGrowth
from lockstep.twin import StepResult, Twin

Result = dict[str, Any]
UNSTEADY = "unsteady"  # the status of a row whose windows spread too far


def measure(cell: Cell) -> Result:
    """Everything that a report wants to know of a cell that could run."""
    config, clock = cell.config, Clock()
    twin = CONTENDERS[cell.contender].build(config)
    state = initial_state(config)
    twin.load(state)
    clock.lap("start")
    twin.prepare()
    clock.lap("compile")
    about = twin.describe()
    growth = ResidentGrowth()
    windows = (GPT.window(config, step) for step in range(cell.total))
    results = [twin.step(twin.place(next(windows)))()]
    clock.lap("first step")
    results += take(twin, [next(windows) for _ in range(cell.warmup - 1)])
    on_cpu = about["platform"] == "cpu"
    seconds, clocks = [], []
    for _ in range(cell.windows):
        drawn = [next(windows) for _ in range(cell.steps)]
        began = time.perf_counter()
        results += take(twin, drawn)
        seconds.append((time.perf_counter() - began) / cell.steps)
        clocks += [] if on_cpu else nvidia.query_gpus("clocks.sm", "power.draw")[0][:1]
    peak = growth.bytes() if on_cpu else twin.peak_bytes()
    needed = twin.step_bytes(GPT.window(config, 0))  # beside the state
    model = shape.of_model(config.model)
    held = 0 if on_cpu else memory.state_bytes(model, config.precision.roles)
    return {
        "about": about, "seconds": clock.laps, "seconds_per_step": seconds,
        "sm_mhz_and_watts": clocks,
        "peak_bytes": peak, "reserved_bytes": None if on_cpu else reserved_bytes(),
        "predicted_bytes": needed + held,
        **throughput(config, seconds, about["device"]), **outcome(results),
        **({} if on_cpu else reject_unsteady(seconds)),
    }  # fmt: skip


class Clock:
    """Seconds between one thing and the next."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now


def take(twin: Twin, windows: list[Any]) -> list[StepResult]:
    """All are started before the first is waited for, but for one: as the loop does it."""
    results, pending = [], list[Callable[[], StepResult]]()
    for window in windows:
        pending.append(twin.step(twin.place(window)))
        if len(pending) > 1:
            results.append(pending.pop(0)())
    return results + [wait() for wait in pending]


def throughput(config: Config, seconds: list[float], device: str) -> Result:
    """Gives tokens/s of the median window with quartiles, and MFU where the peak is known."""
    rates = [tokens_per_step(config) / s for s in seconds]
    # "inclusive": no quartile beyond what was seen
    several = len(rates) > 1
    low, middle, high = statistics.quantiles(rates, method="inclusive") if several else rates * 3
    peak = devices.peak(device, config.precision.all_roles)
    mfu = middle * flops.per_token(config.model) / peak if peak else None
    return {"tokens_per_second": middle, "quartiles": [low, high], "mfu": mfu}


FEW_WINDOWS = 4


def reject_unsteady(seconds: list[float]) -> Result:
    """Returns the status of a GPU's row whose windows were disturbed; nothing for a good one.

    A CPU's clocks and other processes move by more than that, so its rows have quartiles alone. So
    have rows of few windows: their quartiles are single windows.
    """
    if len(seconds) < FEW_WINDOWS:
        return {}
    low, middle, high = statistics.quantiles(seconds, method="inclusive")
    spread = (high - low) / middle
    if spread <= LARGEST_SPREAD:
        return {}
    why = f"its windows spread by {spread:.0%}, over {LARGEST_SPREAD:.0%}; something else ran"
    return {"status": UNSTEADY, "why": why}


def tokens_per_step(config: Config) -> int:
    return config.optim.accum * config.optim.batch_size * config.model.context


def outcome(results: list[StepResult]) -> Result:
    """Says what was computed, for a faster cell that computes something else is void."""
    return {
        "losses": [result.loss for result in results], "final_loss": results[-1].loss,
        "skipped": sum(result.skipped for result in results),
        "loss_scale": results[-1].loss_scale,
    }  # fmt: skip


def reserved_bytes() -> int | None:
    """torch's allocator holds more than it has handed out; JAX's is asked not to preallocate."""
    torch = sys.modules.get("torch")
    return torch.cuda.max_memory_reserved() if torch and torch.cuda.is_available() else None


def about(cell: Cell) -> Result:
    """Says of a cell what its row has, measured or not."""
    return {"cell": vars(cell), "config": cell.config.to_json()}


def measure_cell(cell: Result, config: Result) -> Result:
    """The result of a cell that is given as `about` has it."""
    return measure(Cell(**cell))
