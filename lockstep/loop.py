"""THE training loop, for every twin: resume, evaluate, save, log, signals, exit status."""

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import batches, checkpoint, corpus, flops, params, rundir, sampling
from lockstep.config import Config
from lockstep.corpus import Corpus
from lockstep.errors import UserError
from lockstep.runlog import Display, RunLog, clock
from lockstep.twin import StepResult, TrainState, Twin

DONE, DIVERGED, STOPPED = 0, 3, 130


class Diverged(Exception):
    """The loss or the gradient became non-finite where no loss scale can help."""


def train(config: Config, build: Callable[[Config], Twin], out: Path, *, resume: bool) -> int:
    """Trains to `config.optim.steps`; returns the exit status.

    Args:
        build: makes the twin; called once everything else is known to be in order.
        out: the run's directory, free or (for `resume`) a run.

    Raises:
        UserError: the data, the device, the directory or the checkpoint is not usable; nothing
            has been written then.
    """
    data, state, notices = _start(config, out, resume=resume)
    twin = build(config)
    twin.load(state)
    compile_seconds = twin.prepare()
    if not resume:
        rundir.create(out)
    about = twin.describe()
    rundir.write_record(
        out,
        rundir.Record(
            config=config,
            framework=twin.framework,
            data_sha256=data.sha256,
            details={**about, "compile_seconds": compile_seconds},
        ),
    )
    log = RunLog(out / "log.jsonl", last_step=state.step)
    with Display(config.optim.steps, state.step) as display:
        for notice in notices:
            display.say(notice)
        display.say(_headline(config, twin, data, about, compile_seconds))
        run = Run(config, twin, data, out, log, display, state.step)
        try:
            status = run.steps()
        except Diverged as error:
            found = checkpoint.listing(out)
            good = (
                f"the last good checkpoint is {found[-1]}" if found else "no checkpoint was saved"
            )
            display.say(f"stopped: {error}; {good}; try a lower --lr or a wider --policy")
            status = DIVERGED
        finally:
            log.close()
    if status == DONE:
        print(run.closing())
    return status


def initial_state(config: Config) -> TrainState:
    """Step 0: seeded weights, zero moments."""
    roles = config.precision.roles
    weights = params.initial(config.model, config.optim.seed)
    return TrainState(
        params=weights,
        mu={name: np.zeros_like(w) for name, w in weights.items()},
        nu={name: np.zeros_like(w) for name, w in weights.items()},
        step=0,
        updates=0,
        loss_scale=config.precision.loss_scale_init if roles.loss_scaling else 1.0,
        good_steps=0,
    )


def _start(config: Config, out: Path, *, resume: bool) -> tuple[Corpus, TrainState, list[str]]:
    """The data and the state to go on from, and what the user should know about them."""
    data = corpus.load(config.data.data)
    if not resume:
        corpus.check(data, config.model.vocab, config.model.context)
        return data, initial_state(config), []
    expected = rundir.read_record(out).data_sha256
    if data.sha256 != expected:
        data = corpus.cached(expected) or data
    if data.sha256 != expected:
        raise UserError(
            f"--data {config.data.data}: its tokens have changed since {out} began "
            f"(SHA-256 {expected[:12]}, now {data.sha256[:12]}); restore the data or "
            "start a new run"
        )
    notices: list[str] = []
    state = checkpoint.latest(out, notices.append)
    if state.step >= config.optim.steps:
        raise UserError(
            f"--steps {config.optim.steps}: {out} is at step {state.step} already; "
            f"give --steps more than {state.step}"
        )
    return data, state, [*notices, f"resuming {out} after step {state.step}"]


def _headline(
    config: Config, twin: Twin, data: Corpus, about: dict[str, Any], compile_seconds: float
) -> str:
    model, precision = config.model, config.precision
    lines = (
        f"{twin.framework} on {about['device']}: {model.model}, {params.count(model):,} parameters",
        f"policy {precision.policy}, numerics {precision.numerics}, attention {about['attention']}",
        f"data: {data.source}, {len(data.train):,} training tokens",
        f"compiled in {compile_seconds:.1f} s",
    )
    return "\n".join(lines)


class Run:
    """The steps of one process: from where the state stands to the last one, or to a signal."""

    def __init__(
        self,
        config: Config,
        twin: Twin,
        data: Corpus,
        out: Path,
        log: RunLog,
        display: Display,
        done: int,
    ) -> None:
        self.config, self.twin, self.data, self.out = config, twin, data, out
        self.log, self.display = log, display
        self.done = self.first = done
        self.val_losses: list[float] = []
        self.began = self.last = time.perf_counter()
        self.peak = flops.peak(twin.describe()["device"], config.precision.roles)

    def steps(self) -> int:
        """Results are read one step late: the host does not wait for the step just started."""
        total = self.config.optim.steps
        stop = _StopSignal()
        if self.done == 0:
            self.evaluate()
        window = self.draw(self.done)
        late: Callable[[], StepResult] | None = None
        with stop:
            self.began = self.last = time.perf_counter()
            for step in range(self.done + 1, total + 1):
                result = self.twin.step(window)
                if step < total:  # while the device computes
                    window = self.draw(step)
                if late:
                    self.report(late())
                late = result
                evaluate = step == total or _due(step, self.config.run.eval_every)
                save = step == total or stop.received or _due(step, self.config.run.save_every)
                if evaluate or save or self.twin.synchronous:
                    self.report(late())
                    late = None
                if evaluate or save:
                    if evaluate:
                        self.evaluate()
                    if save:
                        self.save()
                    self.last = time.perf_counter()
                if stop.received and step < total:
                    self.display.say(
                        f"stopped after step {step}, which is saved; "
                        f"go on with --resume --out {self.out}"
                    )
                    return STOPPED
        return DONE

    def draw(self, step: int) -> Any:
        """The window of one step (from 0), on its way to the device."""
        optim = self.config.optim
        tokens = batches.window(
            self.data.train,
            accum=optim.accum,
            seed=optim.seed,
            split="train",
            step=step,
            batch_size=optim.batch_size,
            context=self.config.model.context,
        )
        return self.twin.place(tokens)

    def report(self, result: StepResult) -> None:
        optim, model = self.config.optim, self.config.model
        self.done += 1
        now = time.perf_counter()
        tokens = optim.accum * optim.batch_size * model.context
        rate = tokens / (now - self.last)
        self.last = now
        row = {
            "kind": "train", "step": self.done, **result._asdict(), "tokens": self.done * tokens,
            "tokens_per_second": rate,
            "mfu": rate * flops.per_token(model) / self.peak if self.peak else None,
            "peak_bytes": self.twin.peak_bytes(), "seconds": now - self.began,
        }  # fmt: skip
        self.log.write(row)
        scaled = self.config.precision.roles.loss_scaling
        if not scaled and not math.isfinite(result.loss + result.grad_norm):
            raise Diverged(f"step {self.done}: loss {result.loss}, grad norm {result.grad_norm}")
        steps_a_second = (self.done - self.first) / (now - self.began)
        self.display.train(row, (optim.steps - self.done) / steps_a_second)

    def evaluate(self) -> None:
        """The same windows of the held-out split every time."""
        optim, count = self.config.optim, self.config.run.eval_batches
        tokens = batches.window(
            self.data.val,
            accum=count,
            seed=optim.seed,
            split="val",
            step=0,
            batch_size=optim.batch_size,
            context=self.config.model.context,
        )
        loss = self.twin.evaluate(tokens)
        self.val_losses.append(loss)
        self.log.write({"kind": "eval", "step": self.done, "val_loss": loss})
        self.display.say(f"step {self.done}: validation loss {loss:.4f}")

    def save(self) -> None:
        checkpoint.save(self.out, self.twin.state(), keep=self.config.run.keep)

    def closing(self) -> str:
        """What was learned, what it writes, where it lies, what to try next."""
        lines = [
            f"validation loss {self.val_losses[0]:.4f} -> {self.val_losses[-1]:.4f} nats a "
            f"token after {self.config.optim.steps} steps, {clock(self.last - self.began)}"
        ]
        unigram, bigram = corpus.unigram_entropy(self.data), corpus.bigram_entropy(self.data)
        if unigram is not None and bigram is not None:
            lines += [
                f"for scale: unigram entropy {unigram:.4f}, bigram entropy {bigram:.4f}",
                "", "a sample:", *_quoted(self.sample()), "",
            ]  # fmt: skip
        module = {"jax": "torch_ref", "torch": "jax_impl"}.get(self.twin.framework)
        lines += [
            f"the run is in {self.out}: config.json, log.jsonl, checkpoints/",
            "next:",
            f"  lockstep sample {self.out} --prompt 'class '",
            f"  python -m {module}.train --policy {self.config.precision.policy}"
            "     # the same run in the other framework",
        ]
        return "\n".join(lines)

    def sample(self) -> str:
        context = self.config.model.context
        text = sampling.sample(self.twin, b"def ", length=160, context=context)
        return "def " + text.decode("utf-8", "replace")


def _quoted(text: str) -> list[str]:
    return [f"  | {line}" for line in text.split("\n")]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _StopSignal:
    """Ctrl-C or SIGTERM asks the loop to stop after its step; a second one interrupts at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    received = False

    def __enter__(self) -> None:
        self.former = {number: signal.signal(number, self._receive) for number in self.SIGNALS}

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True
