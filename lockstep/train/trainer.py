"""A training run of any twin: what is prepared before its loop, and said after it."""

import contextlib
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.config import Config, formats
from lockstep.config.autotune import NONE
from lockstep.data import batches, corpus, tokenizer
from lockstep.data.corpus import Corpus
from lockstep.errors import UserError, is_out_of_memory
from lockstep.exits import DIVERGED, DONE, STOPPED
from lockstep.model import params
from lockstep.model.state import TrainState, initial_state
from lockstep.run import checkpoint, directory, lock, runlog
from lockstep.run.runlog import Display, RunLog
from lockstep.run.saver import Saver
from lockstep.train import closing, lints, loss_scale
from lockstep.train.loop import Diverged, Loop
from lockstep.train.options import Watching
from lockstep.train.track import Tracker
from lockstep.twin import Twin
from lockstep.weights import about as beside
from lockstep.weights import init

UNWATCHED = Watching()


@contextlib.contextmanager
def open_loop(
    config: Config, build: Callable[[Config], Twin], out: Path | None, *, resume: bool,
    watching: Watching = UNWATCHED,
) -> Iterator[Loop]:  # fmt: skip
    """Loads data and state, builds and compiles the twin, and opens the run, for its loop to run.

    Args:
        build: makes the twin; called once everything else is known to be in order.
        out: the run's directory, free or (for `resume`) a run; None for a new one in runs/.
        watching: what is shown of it, not yet loaded.

    Raises:
        UserError: the data, the device, the directory or the checkpoint is not usable, and
            nothing has been written then; or memory or disk space ran out.
    """
    with _explain_out_of_memory(config), contextlib.ExitStack() as locked:
        found: list[Path] = []
        if resume and out:
            # It is locked only when all is in order and the first file is written. If another
            # trainer has gone on with it until then, these are not its checkpoints any more.
            lock.require_free(out)
            found = checkpoint.listing(out)
        data, state, notices = _load_start(config, out if resume else None)
        twin = build(config)
        # Read before the ranks meet in `_load`: after that rank 0 writes a new log.
        kept = runlog.up_to(out / "log.jsonl", state.step) if out and resume else []
        _load(twin, state)
        began = time.perf_counter()
        window = batches.of_step(config, data.train, state.step)
        twin.prepare(window)
        compile_seconds = time.perf_counter() - began
        about = twin.describe()
        if twin.rank:  # it takes the same steps, and writes nothing
            out = None
        else:
            notices.append(_headline(config, twin, data, about, compile_seconds))
            notices += lints.before_training(config, twin, window)
            details = {**about, "compile_seconds": compile_seconds}
            record = directory.Record(
                config=config, framework=twin.framework, data_tokens=data.sizes, details=details
            )
            out = _claim(out, record, found, locked, resume=resume)
        display = Display(config.optim.steps, state.step, quiet=out is None)
        loop = Loop(config, twin, data, display, state, kept, watching)
        try:
            with contextlib.ExitStack() as files:
                _open_files(loop, out, files)
                for notice in notices:
                    display.say(notice)
                yield loop
        except Diverged as error:
            loop.status = DIVERGED
            if out:
                good = checkpoint.newest(out, up_to=error.good)
                print(f"error: {error}; {good}; {error.remedy}", file=sys.stderr)
        _say_the_end(loop, out)


@contextlib.contextmanager
def _explain_out_of_memory(config: Config) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        size = config.optim.batch_size
        remedy = "use a smaller one with more --accum, --remat block, or a smaller --model"
        raise UserError(f"--batch-size {size}: out of memory; {remedy}") from None


def _load(twin: Twin, state: TrainState) -> None:
    """Load this rank's shards of the state.

    Raises:
        UserError: on all ranks, if the newest checkpoint that one can read is not rank 0's.
    """
    first = twin.broadcast(state.step)
    if twin.any_rank(first != state.step):
        problem = f"the ranks found different newest checkpoints (rank {twin.rank}: {state.step})"
        raise UserError(f"--resume: {problem}; check that all ranks see the same folder")
    twin.load(state)


def _claim(
    out: Path | None, record: directory.Record, found: list[Path],
    locked: contextlib.ExitStack, *, resume: bool,
) -> Path:  # fmt: skip
    """Locks the run's directory, for as long as `locked` is open, and writes its record.

    Args:
        found: the checkpoints from which a resumed run continues.
    """
    config = record.config
    if not (resume and out):
        policy = config.precision.policy.replace("=", "-").replace(",", "-")
        stem = f"{record.framework}-{config.model.model}-{policy}"
        out = directory.make(out) if out else directory.make_new(stem)
    locked.enter_context(lock.hold_lock(out))
    if resume and found != checkpoint.listing(out):
        raise UserError(f"{out}: another trainer continued it meanwhile; try again")
    if not resume:
        directory.empty(out)
    directory.write_record(out, record)
    if not resume:
        beside.keep(config, out)
    return out


def _open_files(loop: Loop, out: Path | None, files: contextlib.ExitStack) -> None:
    """Opens log, display, trackers and saver; only the display on ranks that write nothing."""
    say = loop.display.say
    if out:
        log = files.enter_context(RunLog(out / "log.jsonl", last_step=loop.first))
    files.enter_context(loop.display)
    if out:
        for name in loop.watching.track:
            tracker = Tracker(name, out, loop.config, say)
            log.listeners.append(files.enter_context(tracker).put)
        loop.log = log
        loop.saver = files.enter_context(Saver(out, loop.config.run.keep, log, say))


def _say_the_end(loop: Loop, out: Path | None) -> None:
    """Says where a stopped run goes on, or what a finished one came to."""
    if loop.status == STOPPED and out:
        loop.display.say(
            f"stopped after step {loop.done}, which is saved; "
            f"go on with --resume --out {shlex.quote(str(out))}"
        )
    if loop.status == DONE:
        config, twin = loop.config, loop.twin
        sample = closing.sample_lines(config, twin, loop.data, loop.losses, out)
        if out:
            seconds = loop.pace.last - loop.began
            loop.display.say(closing.text(config, twin, out, loop.losses, seconds, sample))


def restore(
    config: Config, out: Path, warn: Callable[[str], None], *, step: int | None = None
) -> TrainState:
    """Loads a run's checkpoint: that of a step, or the newest sound one.

    On a mesh each rank reads its shards of a tensor when it loads them.

    Raises:
        UserError: there is none, or its weights are not those of the config's model.
    """
    if step is None:
        state = checkpoint.latest(out, warn, lazy=config.mesh.size > 1)
    else:
        state = checkpoint.load(checkpoint.of_step(out, step))
    shapes = {name: array.shape for name, array in state.params.items()}
    problem = ""
    if shapes != params.shapes(config.model):
        problem = "its model differs from the one in the checkpoints"
    elif list(state.mu) != config.trained:
        problem = "its trained parameters are not those that have moments in the checkpoints"
    if problem:
        raise UserError(f"{out / 'config.json'}: {problem}; restore it or start a new run")
    return state


def load_data(config: Config, run: Path) -> Corpus:
    """Load the data that a run began with.

    Raises:
        UserError: it has changed, or the config does not fit it.
    """
    data = corpus.load(**vars(config.data))
    expected = directory.read_record(run).data_tokens
    if expected not in (None, data.sizes):
        raise UserError(
            f"--data {config.data.data}: it has changed since {run} began (tokens of training and "
            f"held out: {expected[0]:,} and {expected[1]:,}, now {data.sizes[0]:,} and "
            f"{data.sizes[1]:,}); restore the data or start a new run"
        )
    # An untrusted config.json may state a smaller vocabulary than its tokens need.
    corpus.check(data, config.model.vocab, config.model.context, config.run.init)
    return data


def _load_start(config: Config, resumed: Path | None) -> tuple[Corpus, TrainState, list[str]]:
    """Load the data and the state from which to start, with notes for the user."""
    if resumed is None:
        data = corpus.load(**vars(config.data))
        tokenizer.load(config.data.tokenizer)  # which the run keeps, whatever made its tokens
        corpus.check(data, config.model.vocab, config.model.context, config.run.init)
        return data, initial_state(config, init.weights(config)), []
    data = load_data(config, resumed)
    notices: list[str] = []
    state = restore(config, resumed, notices.append)
    state = loss_scale.carry(state, config, runlog.rows(resumed / "log.jsonl"))
    if state.step >= config.optim.steps:
        raise UserError(
            f"--steps {config.optim.steps}: {resumed} is at step {state.step} already; "
            f"give --steps more than {state.step}"
        )
    return data, state, [*notices, f"resuming {resumed} after step {state.step}"]


# The calls by which each twin scales the loss, accumulates and recomputes.
CALLS = {
    "jax": ("jmp.DynamicLossScale", "optax.MultiSteps", "jax.checkpoint"),
    "torch": ("torch.amp.GradScaler", "sums in .grad", "torch.utils.checkpoint"),
}


def _describe_step(config: Config, framework: str) -> list[str]:
    """Says which loss scale, accumulation and remat a step has, and by which calls."""
    calls = CALLS.get(framework, ("", "", ""))
    scaling, accumulating, recomputing = (f", {call}" if call else "" for call in calls)
    optim, precision, remat = config.optim, config.precision, config.execution.remat
    where = " a device" if config.mesh.size > 1 else ""
    scale = f"{precision.loss_scale_init:g} at first{scaling}"
    return [
        f"loss scale: {scale if precision.roles.loss_scaling else 'none (float16 has one)'}",
        f"accumulation: {optim.accum} x {optim.batch_size} rows{where}"
        + (accumulating if optim.accum > 1 else ""),
        f"remat: {remat}" + (recomputing if remat != "none" else ""),
    ]


def _headline(
    config: Config, twin: Twin, data: Corpus, about: dict[str, Any], compile_seconds: float
) -> str:
    model, precision, sizes = config.model, config.precision, params.shapes(config.model)
    by_hand = about.get("emulated", "").split()
    say = lambda name: f"{name} (emulated)" if name in by_hand else name  # noqa: E731
    own = [f"{pattern} in {say(name)}" for pattern, name in formats.parse(precision.formats)]
    own += [f"{precision.fp32_islands} in fp32"] if precision.fp32_islands else []
    others = f" but for {', '.join(own)}" if own else ""
    trained = sum(math.prod(sizes[name]) for name in config.trained)
    part = f", {trained:,} of them trained" if len(config.trained) < len(sizes) else ""
    ways = config.run.autotune
    lines = (
        f"{twin.framework} on {about['device']}: {model.model}, {params.count(model):,} parameters"
        f"{part}",
        f"policy {say(precision.policy)}{others}, numerics {precision.numerics}, "
        f"attention {about['attention']}",
        *_describe_step(config, twin.framework),
        *[f"faster here, --autotune {ways}"] * (ways != NONE),
        f"data: {data.source}, {len(data.train):,} training tokens",
        *[f"mesh {config.mesh}: {config.global_batch_size} rows a micro-batch"]
        * (config.mesh.size > 1),
        f"compiled in {compile_seconds:.1f} s",
    )
    return "\n".join(lines)
