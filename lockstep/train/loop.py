"""The training loop: from the loaded state to the last step, or to a signal."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lockstep import devices
from lockstep.config import Config
from lockstep.data import batches
from lockstep.data.corpus import Corpus
from lockstep.exits import DONE, STOPPED
from lockstep.model import flops, params
from lockstep.model.state import TrainState
from lockstep.run.runlog import Display, RunLog
from lockstep.run.saver import Saver
from lockstep.train import lints, loss_scale
from lockstep.train.nonfinite import first_nonfinite
from lockstep.train.options import Watching
from lockstep.train.stopping import StopSignal
from lockstep.twin import StepResult, Twin

Rows = list[dict[str, Any]]

NORMS_A_ROW = 100
PACE = 10  # steps whose mean time is logged
LOWER = "start again with a lower --lr or a wider --policy"


class Diverged(Exception):
    """The loss or the gradient became non-finite where no loss scale can help."""

    def __init__(self, problem: str, *, good: int, remedy: str) -> None:
        """
        Args:
            good: the last step after which the weights gave a finite loss.
        """
        super().__init__(problem)
        self.good, self.remedy = good, remedy


class Pace:
    """The seconds of a step: the mean of the last ten.

    Where the host is slower than a GPU, one step's end is seen a step late, or, before a pause, two
    ends are seen at once.
    """

    def __init__(self) -> None:
        self.ends = deque([time.perf_counter()], PACE + 1)

    @property
    def last(self) -> float:
        """When the last step or pause ended, by `time.perf_counter`."""
        return self.ends[-1]

    def step(self) -> float:
        """Notes the end of a step; returns seconds a step."""
        self.ends.append(time.perf_counter())
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)

    def pause(self) -> None:
        """Counts what passed since the last step to no step."""
        passed = time.perf_counter() - self.last
        self.ends = deque((end + passed for end in self.ends), PACE + 1)


class Loop:
    """The steps of one rank, and their common state; rank 0 alone has a log and a saver."""

    def __init__(
        self,
        config: Config,
        twin: Twin,
        data: Corpus,
        display: Display,
        start: TrainState,
        kept: Rows,
        watching: Watching,
    ) -> None:
        """
        Args:
            kept: the rows that a resumed run has logged so far.
        """
        self.config, self.twin, self.data = config, twin, data
        self.display, self.watching = display, watching
        self.log: RunLog | None = None
        self.saver: Saver | None = None
        self.status = DONE
        self.local_rows = twin.local_rows(config.global_batch_size)
        self.done = self.first = start.step
        self.losses = {  # validation losses by step
            row["step"]: math.nan if row["val_loss"] is None else row["val_loss"]
            for row in kept
            if row["kind"] == "eval"
        }
        self.scale = loss_scale.ScaleWatch(config, start.loss_scale, kept)
        self.log_problem = ""
        self.pace = Pace()
        self.began = self.pace.last
        peak = devices.peak(twin.describe()["device"], config.precision.all_roles)
        self.peak = peak and peak * config.mesh.size

    def run(self) -> None:
        """Takes the steps up to the last one, or until a signal; then `status` says which.

        Results are read one step late: the host does not wait for the step just started.
        """
        total, every = self.config.optim.steps, self.config.run
        late: Callable[[], StepResult] | None = None
        with StopSignal(self.display.show_cursor) as stop:  # the progress bar hides it
            if self.done == 0:
                self.evaluate()
            window = self.draw(self.done)
            self.pace.pause()
            self.began = self.pace.last
            for step in range(self.done + 1, total + 1):
                result = self.twin.step(window)
                if step < total:  # while the device computes
                    window = self.draw(step)
                if late:
                    self.report(late())
                late = result
                wanted = step < total and (stop.received or self.display.abandoned)
                stopping = self.twin.any_rank(wanted)  # all ranks stop after the same step
                evaluate = step == total or _due(step, every.eval_every)
                save = step == total or stopping or _due(step, every.save_every)
                if evaluate or save or self.twin.synchronous:
                    self.report(late())
                    late = None
                if evaluate:
                    self.evaluate()
                if save:
                    self.save(last=step == total or stopping)
                if evaluate or save:
                    self.pace.pause()
                if stopping:
                    self.status = STOPPED
                    return

    def draw(self, step: int) -> Any:
        """Draws the window of one step (from 0), and starts its copy to the device."""
        return self.twin.place(batches.of_step(self.config, self.data.train, step, self.local_rows))

    def report(self, result: StepResult) -> None:
        optim, model = self.config.optim, self.config.model
        self.done += 1
        tokens = optim.accum * self.config.global_batch_size * model.context
        rate = tokens / self.pace.step()
        now = self.pace.last
        row = {
            "kind": "train", "step": self.done,
            "loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr,
            "loss_scale": result.loss_scale, "skipped": result.skipped,
            "tokens": self.done * tokens, "tokens_per_second": rate,
            "mfu": rate * flops.of_run(self.config) / self.peak if self.peak else None,
            "peak_bytes": self.twin.peak_bytes(), "seconds": now - self.began,
        }  # fmt: skip
        self.write(row)
        if self.saver:
            self.saver.report()
        seen = lints.after_a_step(self.config, self.twin) if self.done == self.first + 1 else []
        for line in (*self.scale.lines(self.done, result), *seen):
            self.display.say(line)
        if _due(self.done, self.watching.norms) and math.isfinite(result.grad_norm):
            self.write_norms(result)
        self.require_finite(result)
        steps_a_second = (self.done - self.first) / (now - self.began)
        self.display.train(row, (optim.steps - self.done) / steps_a_second)

    def save(self, *, last: bool) -> None:
        """Saves the state, which all ranks gather and rank 0 writes."""
        state = self.twin.state()
        if self.saver and last:
            self.saver.finish(state, self.losses)
        elif self.saver:
            self.saver.save(state, self.losses)

    def write(self, row: dict[str, Any]) -> None:
        if self.log is None:
            return
        self.log.write(row)
        if self.log.problem and not self.log_problem:
            self.display.say(f"{self.log.problem}; until then rows are kept in memory")
        self.log_problem = self.log.problem

    def write_norms(self, result: StepResult) -> None:
        """Log the norms by module; in several rows for a deep model, because lines have a limit."""
        norms = list(params.norms_by_module(result.norms, self.config.model).items())
        for start in range(0, len(norms), NORMS_A_ROW):
            part = dict(norms[start : start + NORMS_A_ROW])
            self.write({"kind": "norms", "step": self.done, **part})

    def require_finite(self, result: StepResult) -> None:
        """Raises Diverged if continuing is useless."""
        if self.scale.hopeless:
            raise Diverged(self.scale.problem(), good=self.scale.before, remedy=loss_scale.REMEDY)
        # A loss scale has no floor: too low, it becomes 0.
        scale_helps = self.config.precision.roles.loss_scaling and result.loss_scale > 0
        if not scale_helps and not math.isfinite(result.loss + result.grad_norm):
            raise Diverged(
                f"step {self.done}: loss {result.loss}, grad norm {result.grad_norm}; "
                f"first non-finite: the {first_nonfinite(result, self.config.model)}",
                good=self.done - 2,
                remedy=LOWER,
            )

    def evaluate(self) -> None:
        held_out = batches.validation(self.config, self.data.val, self.local_rows)
        loss = self.twin.evaluate(held_out)
        self.losses[self.done] = loss
        self.write({"kind": "eval", "step": self.done, "val_loss": loss})
        self.display.say(f"step {self.done}: validation loss {loss:.4f}")
        precision = self.config.precision
        scaled = precision.roles.loss_scaling or precision.eval_roles.loss_scaling
        if not scaled and not math.isfinite(loss):
            raise Diverged(
                f"step {self.done}: validation loss {loss}", good=self.done - 1, remedy=LOWER
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
