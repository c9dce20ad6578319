"""`record FILE -o OUT`, or `serve FILE`, which answers the questions of a connection on stdin."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lockstep_recorder import questions, recording, wire
from lockstep_recorder.memory import give_back, is_large
from lockstep_recorder.user import Mistake, User

FORMAT = 3
ARRAYS, ABOUT = "arrays.safetensors", "trace.json"
SERIES = ("losses", "envelope", "accumulated")  # null in JSON where a number is not finite

# The questions by which it is settled in which precision a program runs.
SETTLING = ("facts", "batches", "widen", "write", "record")
WATCHED = ("accumulate", "alone", "update", "train")  # while these run, conditions are noted
RUNNING = ("run", "evaluate", "noise", "tape", "tape of a batch")  # with the variables as built
FORMATS = dict.fromkeys(("float32", "float16", "bfloat16"), "float32")

# Of a kind that its framework has not, a program runs on the CPU, beside another's that has it.
LACKING = {"jax": ("mps", "xpu"), "torch": ("tpu",)}


def place(framework: str, device: str) -> str:
    return "cpu" if device in LACKING[framework] else device


def open_side(name: str, seed: int, device: str, own: bool = False) -> Any:
    """The program's side; which framework it is of is seen by what `build` gives.

    Args:
        own: it runs in the precision in which it is written, not in float64.
    """
    text = "jax"  # of a module, which is not looked at: perhaps
    if os.path.isfile(name):
        with open(name, encoding="utf-8", errors="replace") as file:
            text = file.read()
    if "jax" in text or "flax" in text:
        if not own:
            os.environ.setdefault("JAX_ENABLE_X64", "1")  # before the file makes arrays
        with contextlib.suppress(ImportError):
            from lockstep_recorder import side_jax

            side_jax.configure(place("jax", device), own)
    user = User(name)
    if "torch" in sys.modules:
        from lockstep_recorder.side_torch import TorchSide
        from lockstep_recorder.torch_modes import NothingNarrower

        # Such as a table of positions, made in float32 by name; but what runs the model may not.
        wide = NothingNarrower()
        try:
            with contextlib.nullcontext() if own else wide:
                built = user.call("build", seed)
        except Mistake:
            built = user.call("build", seed)
        if isinstance(built, sys.modules["torch"].nn.Module):
            side = TorchSide(user, built, place("torch", device), own)
            side.note_weights(wide.asked)
            side.seed = seed
            return side
    else:
        built = _build_by_jax(user, seed) if "jax" in sys.modules else user.call("build", seed)
    if "jax" not in sys.modules:
        kind = type(built).__name__
        kind += " without a JAX array" * isinstance(built, dict | list | tuple)
        raise Mistake(f"{user.name}: build gives {kind}; return a torch module or a JAX model")
    from lockstep_recorder.side_jax import JaxSide, configure

    configure(place("jax", device), own)
    of_jax = JaxSide(user, built, own)
    of_jax.seed = seed
    return of_jax


def _build_by_jax(user: User, seed: int) -> Any:
    """Returns what `build` gives; it runs without 64 bits where it does not with them, such as a
    cell whose carry is float32: weights are widened afterwards."""
    import jax

    try:
        return user.call("build", seed)
    except Mistake:
        if not jax.config.read("jax_enable_x64"):
            raise
        jax.config.update("jax_enable_x64", False)
        try:
            return user.call("build", seed)
        finally:
            jax.config.update("jax_enable_x64", True)


def write(out: str, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """A trace's folder. What is cut short leaves the former trace: files are renamed when whole.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    os.makedirs(out, exist_ok=True)
    arrays, same = _once(arrays)
    digest, files = hashlib.sha256(), [os.path.join(out, name) for name in (ARRAYS, ABOUT)]
    partial = [f"{file}.tmp" for file in files]
    try:
        with open(partial[0], "wb") as file:
            for part in wire.chunks(as_floats(arrays)):
                digest.update(part)
                file.write(part)
        whole = {"format": FORMAT, **about, "same": same, "sha256": digest.hexdigest()}
        whole |= {
            n: [x if np.isfinite(x) else None for x in about[n]] for n in SERIES if n in about
        }
        with open(partial[1], "w", encoding="utf-8") as text:
            json.dump(whole, text)
        for pair in zip(partial, files):  # cut short between the two, the checksum is wrong
            os.replace(*pair)
    except OSError:
        for name in partial:
            with contextlib.suppress(OSError):
                os.remove(name)
        with contextlib.suppress(OSError):  # a new folder, which would be taken for the user's
            os.rmdir(out)
        raise


def _once(arrays: wire.Arrays) -> tuple[wire.Arrays, dict[str, str]]:
    """Leaves out an array that stands under an earlier name, too; also returns that name for it."""
    first: dict[int, str] = {}
    same = {name: first[id(x)] for name, x in arrays.items()
            if first.setdefault(id(x), name) != name}  # fmt: skip
    return {name: x for name, x in arrays.items() if name not in same}, same


def as_floats(arrays: wire.Arrays) -> wire.Arrays:
    """Casts what is no float to float64, exact below 2**53, and narrower floats to float32."""
    return {
        name: np.asarray(x, FORMATS.get(np.asarray(x).dtype.name, "float64"))
        for name, x in arrays.items()
    }


def _write(out: str, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Raises Mistake if it cannot be written."""
    try:
        write(out, about, arrays)
    except OSError as error:
        raise Mistake(f"{out}: cannot be written ({error.strerror}); make room there") from None


def record(
    side: Any, seed: int, curve: int, spec: Any = None, given: wire.Arrays | None = None,
    mends: bool = False,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:  # fmt: skip
    """A program's recording, on its own batches or on those that are given."""
    if not (spec or side.user.has("batch")):
        raise Mistake(f"{side.user.name}: has no function batch(step); the reference needs one")
    if is_large(side.initial()):
        give_back()
    about, arrays = recording.record(
        side, curve=curve, seed=seed + 7, given=given, spec=spec, batches=side.drawn, mends=mends
    )
    return {"program": side.user.name, "seed": seed, **about}, arrays


def answer(side: Any, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    """One question's answer."""
    ask, weights = header["ask"], wire.group(arrays, "weights")
    if ask == "facts":
        return side.facts(), side.initial()
    if ask == "build":
        return {}, side.build(header["seed"])
    spec, batch = header.get("batch"), wire.group(arrays, "batch")
    if ask == "batches":
        if not side.user.has("batch"):
            return {"batch": None}, {}
        side.drawn = [side.batch(step) for step in range(max(header["steps"], recording.STEPS))]
        told = side.drawn[:1] if header.get("first") else side.drawn
        found = {f"batch/{step}/{name}": x for step, (_, each) in enumerate(told)
                 for name, x in each.items()}  # fmt: skip
        return {"batch": told[0][0]}, found
    if ask == "prepare":
        side.prepare(side.initial(), spec, batch)
        return {}, {}
    if ask == "widen":
        if is_large(weights):
            give_back()
        side.widen(weights, spec, batch)
        facts = ("precision", "narrow", "widened", "rounded", "narrowest", "hooked",
                 "differentiates", "weights_format", "written", "constants", "refused",
                 "unseen")  # fmt: skip
        return {name: side.facts()[name] for name in facts}, side.exact_constants
    if ask in RUNNING:
        side.restore()
    if ask == "run":
        return side.run(weights, spec, batch, wire.group(arrays, "forced"))
    if ask == "evaluate":
        return {}, recording.evaluated_of(side, weights, (spec, batch))
    if ask == "record":
        return recording.record(side, curve=header["steps"], given=arrays, spec=spec, mends=True)
    batches = [(spec, wire.group(batch, str(step))) for step in range(header.get("steps", 0))]
    if ask == "limits":
        return side.limits(), {}
    side.user.conditions.on = ask in WATCHED and not header.get("mends")
    if ask == "accumulate":
        losses, sums = recording.accumulate(side, weights, batches, arrays.get(recording.SHARE))
        return {"losses": losses}, sums
    if ask == "noise":
        return {"noise": recording.noise(side, weights, batches)}, {}
    if ask.startswith("tape"):
        return questions.answer(side, header, arrays)
    side.mends_clip = header.get("mends", False)
    if ask == "mended":
        return recording.mended_steps(side, weights, batches, arrays, header["steps"])
    if ask == "begin":
        missing = side.lacks_optimizer()
        if not missing:
            side.begin(weights)
        return {"lacks": missing}, {}
    if ask == "alone":
        given = wire.group(arrays, "grad"), header["steps"], header.get("names", ())
        moved, ended = recording.alone(side, weights, *given)
        told = {"widened_state": side.widened_state, "scales": side.scales, "ended": ended}
        return told, moved
    if ask == "kept":
        return {}, side.kept_values(header["names"])
    if ask == "update":
        return {}, side.update(weights, wire.group(arrays, "grad"), header["step"])
    assert ask == "train", ask
    return {"losses": side.train(weights, batches)}, side.kept_values(header.get("names", ()))


def _open(given: argparse.Namespace) -> Any:
    own = given.own_precision or given.forward
    side = open_side(given.program, given.seed, given.device, own)
    side.forward, side.refused = given.forward, given.refused
    return side


def begin(given: argparse.Namespace) -> Callable[[dict[str, Any], wire.Arrays], wire.Message]:
    """Builds a program; returns what answers questions of it."""
    with noting_refusal(given):
        side = _open(given)

    def answer_or_write(header: dict[str, Any], arrays: wire.Arrays) -> wire.Message:
        with noting_refusal(given) if header["ask"] in SETTLING else contextlib.nullcontext():
            return answer_each(header, arrays)

    def answer_each(header: dict[str, Any], arrays: wire.Arrays) -> wire.Message:
        if header["ask"] == "write":
            spec, mends = header.get("batch"), header.get("mends", False)
            made = record(side, given.seed, header["steps"], spec, arrays, mends)
            _write(header["out"], *made)
            return {}, {}
        told, found = answer(side, header, arrays)
        return told, as_floats(found)

    return answer_or_write


@contextlib.contextmanager
def noting_refusal(given: argparse.Namespace) -> Iterator[None]:
    """Notes that what a program raises it may raise because it runs in float64."""
    try:
        yield
    except Mistake as error:
        error.refuses = "" if given.own_precision or given.forward else error.raised
        raise


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recorder")
    parser.add_argument("what", choices=["record", "serve"])
    parser.add_argument("program", help="a .py file or a module")
    parser.add_argument("-o", "--out", default="ref.trace", help="where the trace is written")
    parser.add_argument("--seed", type=int, default=0, help="given to build")
    parser.add_argument("--steps", type=int, default=20, help="of the loss curve")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--own-precision", action="store_true", help="not in float64")
    parser.add_argument("--refused", default="", help="what the program raised in float64")
    parser.add_argument("--forward", action="store_true", help="the forward pass alone")
    parser.add_argument("--quiet", action="store_true", help="do not say what was written")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    if given.what == "serve":  # the program is built for the first question
        wire.serve(wire.take_connection(), functools.partial(begin, given), told=Mistake)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # to take a framework apart takes as long as a recording
    try:
        with noting_refusal(given):
            side = _open(given)
            about, arrays = record(side, given.seed, given.steps, mends=True)
        _write(given.out, about, arrays)
    except Mistake as error:
        if error.refuses and argv is None:  # this process is the program's alone
            own = ["--own-precision", "--refused", error.refuses]
            os.environ.pop("JAX_ENABLE_X64", None)
            os.execv(sys.executable, [*sys.orig_argv, *own])
        for line in error.frames:
            print("  " + line, file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not given.quiet:
        print(f"{given.out}: {about['program']}, {about['framework']} on {about['device']}")
    return 0
