"""`python -m benchmarks.overhead`: ms of CPU time that a step's own host code costs.

jax: our step less a bare call of the compiled program, from a window on the host to its metrics
there. torch: our step less a tutorial's loop on the same model. batches: drawing a tiny step's
window. bar: what a terminal's bar takes of a row of the log, and to be drawn. On
a narrow model of twelve layers, where the arithmetic is nothing. It is the calling thread's time:
what others do to the clock is left out.
"""

import contextlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks.worlds import bare_loop
from lockstep import twin
from lockstep.config import from_flags
from lockstep.errors import require_range
from lockstep.exits import exit_status
from lockstep.flags import Parser, reader
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start
from lockstep.run.runlog import Display

NARROW = {"model": "gpt2", "n_layer": 12, "n_head": 1, "d_model": 16, "context": 8, "vocab": 256,
          "batch_size": 1, "policy": "fp32", "device": "cpu", "steps": 10_000}  # fmt: skip
CONFIG = from_flags(NARROW, accelerator=False)
TINY = from_flags({"model": "tiny", "device": "cpu"}, accelerator=False)


def milliseconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - began)


def jax_step() -> Callable[[], float]:
    import jax

    built, window = _load("jax"), GPT.window(CONFIG, 0)
    trainer = built.trainer  # type: ignore[attr-defined]

    def bare() -> Callable[[], object]:
        placed = jax.device_put(window, trainer.device)
        trainer.state, metrics = trainer.compiled["step"](trainer.state, placed)
        return lambda: jax.device_get(metrics)

    def cost(step: Callable[[], Callable[[], object]]) -> float:
        """To dispatch it, and to read its result once that is there."""
        began = time.thread_time()
        result = step()
        dispatched = time.thread_time() - began
        jax.block_until_ready(trainer.state)
        return 1e3 * dispatched + milliseconds(result)

    return lambda: cost(lambda: built.step(built.place(window))) - cost(bare)


def torch_step() -> Callable[[], float]:
    import torch

    torch.set_num_threads(1)  # so that the calling thread does all of the work
    built, window = _load("torch"), GPT.window(CONFIG, 0)
    trainer = built.trainer  # type: ignore[attr-defined]
    batch = window.select(0).map_arrays(lambda x: torch.from_numpy(x).long())
    bare = bare_loop(trainer.model, trainer.optimizer, batch)
    return lambda: milliseconds(lambda: built.step(built.place(window))()) - milliseconds(bare)


def batches() -> Callable[[], float]:
    return lambda: milliseconds(lambda: GPT.window(TINY, 1))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROW = {"kind": "train", "step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "loss_scale": 1.0,
       "skipped": False, "tokens_per_second": 12345.6, "mfu": 0.3, "peak_bytes": 2.5e9}  # fmt: skip


def showing(*, drawn: bool) -> Callable[[], float]:
    """Time a row, or a drawing after a thousand rows; a bar draws ten times a second."""
    with contextlib.redirect_stdout(Terminal()), contextlib.redirect_stderr(sys.stderr):
        display = Display(10_000, 0).__enter__()  # takes both streams

    def take() -> None:
        display.train(ROW, 1.0)

    for _ in range(1000):
        take()
    return lambda: milliseconds(display.progress.refresh if drawn else take)


def _load(framework: str) -> twin.Twin:
    built = start(framework, CONFIG)
    built.prepare()
    return built


PARTS: dict[str, Callable[[], Callable[[], float]]] = {
    "jax": jax_step,
    "torch": torch_step,
    "batches": batches,
    "bar, a row": partial(showing, drawn=False),
    "bar, a drawing": partial(showing, drawn=True),
}


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--steps", metavar="N", type=reader(int), default=200,
                        help="measured of each (default: 200)")  # fmt: skip
    steps = parser.parse_args(argv).steps
    require_range("--steps", steps, 4)
    for name, prepare in PARTS.items():
        once = prepare()
        times = [once() for _ in range(steps + 2)][2:]
        low, middle, high = statistics.quantiles(times)
        print(json.dumps({"part": name, "ms": middle, "quartiles": [low, high]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
