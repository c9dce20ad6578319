"""THE training loop, for every twin: resume, evaluate, save, log, signals, exit status."""

import math
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import batches, checkpoint, corpus, flops, params, rundir, runlog, sampling
from lockstep.config import Config, to_flags
from lockstep.corpus import Corpus
from lockstep.errors import UserError
from lockstep.runlog import Display, RunLog, clock
from lockstep.twin import MODULES, StepResult, TrainState, Twin

DONE, DIVERGED, STOPPED = 0, 3, 130


class Diverged(Exception):
    """The loss or the gradient became non-finite where no loss scale can help."""

    def __init__(self, problem: str, good: int) -> None:
        """`good`: the last step after which the weights gave a finite loss."""
        super().__init__(problem)
        self.good = good


def train(
    config: Config, build: Callable[[Config], Twin], out: Path | None, *, resume: bool
) -> int:
    """Trains to `config.optim.steps`; returns the exit status.

    Args:
        build: makes the twin; called once everything else is known to be in order.
        out: the run's directory, free or (for `resume`) a run; None for a new one in runs/.

    Raises:
        UserError: the data, the device, the directory or the checkpoint is not usable, and
            nothing has been written then; or memory or disk space ran out.
    """
    try:
        return _train(config, build, out, resume=resume)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        size = config.optim.batch_size
        remedy = "use a smaller one with more --accum, --remat block, or a smaller --model"
        raise UserError(f"--batch-size {size}: out of memory; {remedy}") from None


def _out_of_memory(error: Exception) -> bool:
    """numpy has a class of its own for it; torch and XLA say it."""
    says = ("out of memory", "allocate memory", "RESOURCE_EXHAUSTED")
    return isinstance(error, MemoryError) or any(words in str(error) for words in says)


def _train(
    config: Config, build: Callable[[Config], Twin], out: Path | None, *, resume: bool
) -> int:
    data, state, notices = _start(config, out if resume else None)
    twin = build(config)
    twin.load(state)
    began = time.perf_counter()
    twin.prepare()
    compile_seconds = time.perf_counter() - began
    about = twin.describe()
    if out is None:
        out = rundir.create_new(_stem(config, twin))
    elif not resume:
        rundir.create(out)
    rundir.write_record(
        out,
        rundir.Record(
            config=config,
            framework=twin.framework,
            data_sha256=data.sha256,
            details={**about, "compile_seconds": compile_seconds},
        ),
    )
    display = Display(config.optim.steps, state.step)
    try:
        with RunLog(out / "log.jsonl", last_step=state.step) as log, display:
            for notice in notices:
                display.say(notice)
            display.say(_headline(config, twin, data, about, compile_seconds))
            run = Run(config, twin, data, out, log, display, state.step)
            status = run.steps()
    except Diverged as error:
        good = [path for path in checkpoint.listing(out) if _step(path) <= error.good]
        saved = f"the last good checkpoint is {good[-1]}" if good else "no good checkpoint is saved"
        remedy = "start again with a lower --lr or a wider --policy"
        print(f"error: {error}; {saved}; {remedy}", file=sys.stderr)
        return DIVERGED
    if status == DONE:
        display.say(run.closing())
    return status


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _stem(config: Config, twin: Twin) -> str:
    policy = config.precision.policy.replace("=", "-").replace(",", "-")
    return f"{twin.framework}-{config.model.model}-{policy}"


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


def restore(config: Config, out: Path, warn: Callable[[str], None]) -> TrainState:
    """The newest checkpoint of a run that loads.

    Raises:
        UserError: none does, or its weights are not those of the config's model.
    """
    state = checkpoint.latest(out, warn)
    shapes = {name: array.shape for name, array in state.params.items()}
    if shapes != params.shapes(config.model):
        problem = "its model is not that of the run's checkpoints"
        raise UserError(f"{out / 'config.json'}: {problem}; restore it or start a new run")
    return state


def _start(config: Config, resumed: Path | None) -> tuple[Corpus, TrainState, list[str]]:
    """The data and the state to go on from, and what the user should know about them."""
    data = corpus.load(config.data.data)
    if resumed is None:
        corpus.check(data, config.model.vocab, config.model.context)
        return data, initial_state(config), []
    expected = rundir.read_record(resumed).data_sha256
    if data.sha256 != expected:
        data = corpus.cached(expected) or data
    if data.sha256 != expected:
        raise UserError(
            f"--data {config.data.data}: its tokens have changed since {resumed} began "
            f"(SHA-256 {expected[:12]}, now {data.sha256[:12]}); restore the data or "
            "start a new run"
        )
    notices: list[str] = []
    state = restore(config, resumed, notices.append)
    if state.step >= config.optim.steps:
        raise UserError(
            f"--steps {config.optim.steps}: {resumed} is at step {state.step} already; "
            f"give --steps more than {state.step}"
        )
    return data, state, [*notices, f"resuming {resumed} after step {state.step}"]


def _headline(
    config: Config, twin: Twin, data: Corpus, about: dict[str, Any], compile_seconds: float
) -> str:
    model, precision = config.model, config.precision
    islands = f" but for {precision.fp32_islands}" if precision.fp32_islands else ""
    lines = (
        f"{twin.framework} on {about['device']}: {model.model}, {params.count(model):,} parameters",
        f"policy {precision.policy}{islands}, numerics {precision.numerics}, "
        f"attention {about['attention']}",
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
        self.began = self.last = time.perf_counter()
        self.peak = flops.peak(twin.describe()["device"], config.precision.roles)

    def steps(self) -> int:
        """Results are read one step late: the host does not wait for the step just started."""
        total, every = self.config.optim.steps, self.config.run
        late: Callable[[], StepResult] | None = None
        with _StopSignal(self.display) as stop:
            if self.done == 0:
                self.evaluate()
            window = self.draw(self.done)
            self.began = self.last = time.perf_counter()
            for step in range(self.done + 1, total + 1):
                result = self.twin.step(window)
                if step < total:  # while the device computes
                    window = self.draw(step)
                if late:
                    self.report(late())
                late = result
                stopping = step < total and (stop.received or self.display.abandoned)
                evaluate = step == total or _due(step, every.eval_every)
                save = step == total or stopping or _due(step, every.save_every)
                if evaluate or save or self.twin.synchronous:
                    self.report(late())
                    late = None
                if evaluate or save:
                    if evaluate:
                        self.evaluate()
                    if save:
                        self.save()
                    self.last = time.perf_counter()
                if stopping:
                    self.display.say(
                        f"stopped after step {step}, which is saved; "
                        f"go on with --resume --out {shlex.quote(str(self.out))}"
                    )
                    return STOPPED
        return DONE

    def draw(self, step: int) -> Any:
        """The window of one step (from 0), on its way to the device."""
        return self.twin.place(batches.of_step(self.config, self.data.train, step))

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
        # A loss scale has no floor: too low, it becomes 0.
        scale_helps = self.config.precision.roles.loss_scaling and result.loss_scale > 0
        if not scale_helps and not math.isfinite(result.loss + result.grad_norm):
            problem = f"step {self.done}: loss {result.loss}, grad norm {result.grad_norm}"
            raise Diverged(problem, good=self.done - 2)
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
        self.log.write({"kind": "eval", "step": self.done, "val_loss": loss})
        self.display.say(f"step {self.done}: validation loss {loss:.4f}")
        precision = self.config.precision
        scaled = precision.roles.loss_scaling or precision.eval_roles.loss_scaling
        if not scaled and not math.isfinite(loss):
            raise Diverged(f"step {self.done}: validation loss {loss}", good=self.done - 1)

    def save(self) -> None:
        checkpoint.save(self.out, self.twin.state(), keep=self.config.run.keep)

    def closing(self) -> str:
        """What was learned, what it writes, where it lies, what to try next."""
        config, out = self.config, shlex.quote(str(self.out))
        rows = runlog.rows(self.log.path)
        losses = [row["val_loss"] for row in rows if row["kind"] == "eval"]
        first, last = (math.nan if loss is None else loss for loss in (losses[0], losses[-1]))
        lines = [
            f"validation loss {first:.4f} -> {last:.4f} nats a token after {config.optim.steps} "
            f"steps, {clock(self.last - self.began)}"
        ]
        unigram, bigram = corpus.unigram_entropy(self.data), corpus.bigram_entropy(self.data)
        if unigram is not None and bigram is not None and math.isfinite(last):
            lines += [
                f"for scale: unigram entropy {unigram:.4f}, bigram entropy {bigram:.4f}",
                "", "a sample:", *_quoted(self.sample()), "",
            ]  # fmt: skip
        others = [module for name, module in MODULES.items() if name != self.twin.framework]
        lines += [
            f"the run is in {out}: config.json, log.jsonl, checkpoints/",
            "next:",
            f"  {_python()} -m lockstep sample {out} --prompt 'class '",
            "  # the same run in the other framework:",
            f"  {_python()} -m {others[0]} {shlex.join(to_flags(config))}",
        ]
        return "\n".join(lines)

    def sample(self) -> str:
        stdlib = self.config.data.data == "stdlib"
        prompt = b"def " if stdlib else bytes(self.data.val[:8])
        context = self.config.model.context
        text = sampling.sample(self.twin, prompt, length=160, context=context)
        return sampling.shown(prompt + text)


def _python() -> str:
    """This interpreter as one would type it here: `make train` activates no environment."""
    path = Path(sys.executable)
    here = path.is_relative_to(Path.cwd())
    return shlex.quote(str(path.relative_to(Path.cwd()))) if here else "python"


def _quoted(text: str) -> list[str]:
    return [f"  | {line}" for line in text.split("\n")]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _StopSignal:
    """Ctrl-C or SIGTERM asks the loop to stop after its step; a second one ends the process.

    Never by an exception, which a framework's native code need not survive.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, display: Display) -> None:
        self.display, self.received = display, False

    def __enter__(self) -> "_StopSignal":
        heeded = [n for n in self.SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]  # nohup, &
        self.former = {number: signal.signal(number, self._receive) for number in heeded}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        if self.received:
            self.display.console.show_cursor()  # the progress bar hides it
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = True
