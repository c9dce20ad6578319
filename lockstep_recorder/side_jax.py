"""A JAX program, whatever its model is made of: one compiled program gives all of a run."""

from __future__ import annotations

import contextlib
import gc
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep_recorder import tree
from lockstep_recorder.held import Held, NoModel, digests
from lockstep_recorder.jax_conditions import note, watched
from lockstep_recorder.jax_floats import (
    equations,
    formats,
    has_narrower,
    moved_sums,
    narrow_operations,
    note_formats,
    rounded_constants,
    widened,
)
from lockstep_recorder.memory import SMALL, Spilled, is_large
from lockstep_recorder.models import Model, is_float_leaf, model_of
from lockstep_recorder.noise import is_of_float32, narrowest_of
from lockstep_recorder.side import Arrays, Look, ProgramSide
from lockstep_recorder.tape import Tape, level_of
from lockstep_recorder.user import Mistake, User, mistake
from lockstep_recorder.written import Written

# Of XLA; an older JAX takes none. At level 0 each loop may round an expression in another way: no
# element is then the largest, and the gradient of that is NaN.
CONDITION = "conditions"  # among what a run gives
OWN_RULES = ("custom_vjp_call", "custom_vjp_call_jaxpr")  # of which a trace shows the value alone
QUICK = ({"xla_backend_optimization_level": 1}
         if "compiler_options" in signature(jax.jit).parameters else {})  # fmt: skip


def configure(device: str, own: bool = False) -> None:
    """Before the user's file is imported: the device, float64, exact matmuls, and nothing hidden by
    remat."""
    jax.config.update("jax_platforms", device)  # else JAX takes what it finds
    if device != "cpu":
        try:
            jax.devices()
        except (RuntimeError, AssertionError):  # as JAX has it
            raise Mistake(f"--device {device}: JAX {jax.__version__} sees no such device") from None
    if not own:
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_default_matmul_precision", "highest")

    def checkpoint(fun: Any = None, **options: Any) -> Any:
        return fun if fun is not None else lambda f: f

    jax.checkpoint = jax.remat = checkpoint


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A leaf of a batch that is no array, such as a string: a program is traced for each."""

    value: Any


def unwrap(x: Any) -> Any:
    return x.value if isinstance(x, Static) else x


class JaxSide(ProgramSide):
    framework = "jax"

    def __init__(self, user: User, built: Any, own: bool = False) -> None:
        super().__init__(user, own)
        self.precision = self.narrowest = "float32" if own else "float64"
        self.take(user, built)
        leaves = list(self.model.flat(self.model.params).values())
        self.weights_format = narrowest_of(str(x.dtype) for x in leaves)
        self.written = Written(self.weights_format)
        self.written.drops = self.model.drops
        self.left: Any = None  # the state after the last run
        self.cast: list[str] = []  # in the last loss that was widened
        self.transform: Any = None
        self.optimizer_state: Any = None
        self.spilled: Spilled | None = None  # the tensors that `build` made, where they are large
        self.is_small = sum(x.size for x in leaves) < SMALL

    def take(self, user: User, built: Any) -> None:
        self.user, self.built = user, built
        self.model: Model = model_of(user, built)
        self.variables = Held(user.module, NoModel())
        self.programs: dict[Any, Any] = {}

    def put(self, values: Arrays) -> None:
        self.model.params, self.model.state = (
            self.model.rebuild(tree, values, "float64")
            for tree in (self.model.params, self.model.state)
        )

    def make_wide(self) -> Any:
        return widened()

    def wide_context(self) -> Any:
        if hasattr(jax, "enable_x64"):
            return jax.enable_x64(True)
        from jax.experimental import enable_x64  # type: ignore[attr-defined]  # before JAX 0.8

        return enable_x64()

    def again(self) -> ProgramSide:
        return JaxSide(self.user, self.built)

    def facts(self) -> dict[str, Any]:
        versions = {m.__name__: m.__version__ for m in (jax, np)}
        return self.about(
            versions=versions, device=jax.devices()[0].platform, modules=self.model.modules(),
            parameters=list(self.model.flat(self.model.params)), tied=[],
        )  # fmt: skip

    def initial(self) -> Arrays:
        if self.spilled is not None:
            return self.spilled
        found = self.model.flat(self.model.params, self.model.state)
        held = {name: self.held(x) for name, x in found.items()}
        if self.forward and is_large(held):
            return self._let_go(held)
        return held

    def build(self, seed: int) -> Arrays:
        made = model_of(self.user, self.user.call("build", seed))
        return {n: self.held(x) for n, x in made.flat(made.params, made.state).items()}

    def _let_go(self, held: Arrays) -> Arrays:
        """Keeps the built model's tensors in a file alone, for those of a run are as large."""
        self.spilled = Spilled()
        self.spilled.update(held)
        self.built = None
        self.model.params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_float_leaf(x) else x,
            self.model.params,
        )
        gc.collect()  # a module may be known to its own parts
        return self.spilled

    def widen(self, weights: Arrays, spec: Any, batch: Arrays) -> None:
        self.choose_precision(weights, spec, batch)

    def choose_precision(self, weights: Arrays, spec: Any, batch: Arrays) -> None:
        """See `choose`; in its own precision the formats are looked at alone."""
        if self.own:
            found = sorted(set(formats(self._trace(weights, spec, batch))))
            self.narrow, self.narrowest = self.told_refusal() + found, narrowest_of(found)
        elif not self.chosen:
            self.choose(weights, spec, batch)
        self.chosen = True

    def look(self, weights: Arrays, spec: Any, batch: Arrays) -> Look:
        self.cast = []
        try:
            jaxpr = self._trace(weights, spec, batch)
            if not self.wide:
                note_formats(jaxpr, self.written)
            narrow, rounded = sorted(set(narrow_operations(jaxpr))), self.cast
            if not self.wide and has_narrower(jaxpr):
                with rounded_constants() as rounded:
                    self._trace(weights, spec, batch)
        except Mistake as error:
            if not error.raised:
                raise
            return Look([], [], error)
        held = [f"float32 of {name}" for name, x in self.model.flat(self.model.state).items()
                if not jnp.iscomplexobj(x) and is_of_float32(tree.to_numpy(x))]  # fmt: skip
        return Look(narrow, sorted({*rounded, *held}))

    def _trace(self, weights: Arrays, spec: Any, batch: Arrays) -> Any:
        """The loss as a jaxpr, of which what is no float is a constant; with its gradient, where
        a function of the program has a rule of its own for that, which may cast."""
        params, state = self._trees(weights)
        leaves, nest = jax.tree.flatten(self._batch(spec, batch))
        places = [at for at, x in enumerate(leaves) if is_float_leaf(x)]

        def loss(p: Any, s: Any, floats: Any) -> Any:
            given = [*leaves]
            for at, x in zip(places, floats):
                given[at] = x
            return self._loss(Tape(), p, s, jax.tree.unflatten(nest, given))[0]

        given = params, state, [leaves[at] for at in places]
        jaxpr = self._traced(lambda: jax.make_jaxpr(loss)(*given)).jaxpr
        if self.forward or not any(e.primitive.name in OWN_RULES for e in equations(jaxpr)):
            return jaxpr
        return self._traced(lambda: jax.make_jaxpr(jax.value_and_grad(loss))(*given)).jaxpr

    def figures(self, weights: Arrays, spec: Any, batch: Arrays) -> tuple[float, Arrays]:
        """The loss alone of a program whose gradients take long to compile."""
        params, state = self._trees(weights)

        def loss(*given: Any) -> Any:
            return self._loss(Tape(), *given)[0]

        program = jax.value_and_grad(loss) if self.is_small else lambda *xs: (loss(*xs), {})
        given = self._batch(spec, batch)
        value, grads = self._traced(lambda: self._jit(program)(params, state, given))
        flat = self.model.flat(grads).items()
        return float(value), {name: tree.to_numpy(x) for name, x in flat}

    def refuse(self, raised: Mistake) -> None:
        raise raised

    def prepare(self, weights: Arrays, spec: Any, batch: Arrays) -> None:
        """Compiles while the reference runs; what the program raises is told when it is asked."""
        if not self.is_small:
            return  # two large programs at once need too much memory
        with contextlib.suppress(Mistake):
            self.choose_precision(weights, spec, batch)
            self.run(weights, spec, batch)
            if not self.lacks_optimizer():
                grads = {name: weights[name] for name in self.model.flat(self.model.params)}
                self.begin_alone(weights, grads)(0, 1.0)

    def _trees(self, weights: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
        dtype = None if self.own else "float64"
        params = self.model.rebuild(self.model.params, weights, dtype)
        state = self.left if self.keeps else self.model.state
        return params, self.model.rebuild(state, weights, dtype)

    def _batch(self, spec: Any, batch: Arrays) -> Any:
        def leaf(x: np.ndarray) -> Any:
            wide = np.result_type(x, np.float64) if x.dtype.kind in "fc" else x.dtype
            return jnp.asarray(x.astype(wide))

        return tree.put_together(spec, batch, leaf, Static)

    def _loss(self, tape: Tape, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        """Traced with jit off, so that scans are unrolled and inner programs show their modules."""
        for leaf in jax.tree.leaves((params, state, batch, tape.slots)):
            if hasattr(leaf, "_trace"):
                tape.traces.add(level_of(leaf._trace))
        wide: Any = widened() if self.wide else contextlib.nullcontext([])
        given = jax.tree.map(unwrap, batch, is_leaf=lambda x: isinstance(x, Static))
        sums = moved_sums() if self.moves_sums else contextlib.nullcontext()
        looks = tape.conditions is not None
        watch = watched(tape.conditions, tape.is_own) if looks else contextlib.nullcontext()
        listen = self.model.listening(tape)
        with jax.disable_jit(), listen, wide as self.cast, sums, watch:
            loss, new = self.model.loss(params, state, given)
            tape.calls.arrays |= {f"state/{name}": x for name, x in self.model.moved.items()}
        if self.user.has("outputs"):
            again: Any = widened() if self.wide else contextlib.nullcontext()
            with jax.disable_jit(), again:
                made = self.model.outputs(params, state, given)
            tape.calls.arrays |= {
                f"given/{path or '0'}": jnp.asarray(x) for path, x in tree.leaves(made)
            }
        if getattr(loss, "size", 0) != 1:
            shaped = hasattr(loss, "shape")
            kind = f"an array of shape {loss.shape}" if shaped else type(loss).__name__
            raise Mistake(f"{self.user.name}: loss gives {kind}; return a scalar")
        return loss.reshape(()), self._as_before(state, new)

    def _as_before(self, state: Any, new: Any) -> Any:
        """Gives what a loss leaves the nest, the shapes and the formats of the state before, for
        which a program is compiled: a mean of (4,) is one of (1, 1, 4).

        Raises:
            Mistake: one has another size.
        """
        found = {self.model.path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(new)}

        def leaf(path: Any, x: Any) -> Any:
            y = found.get(name := self.model.path_name(path), x)
            if not (is_float_leaf(x) and is_float_leaf(y)):
                return y
            if y.size != x.size:
                raise Mistake(f"{self.user.name}: loss gives the state's {name} the shape {y.shape}"
                              f", and build {x.shape}; keep its size")  # fmt: skip
            return jnp.asarray(y, x.dtype).reshape(x.shape)

        return jax.tree_util.tree_map_with_path(leaf, state)

    def _traced(self, program: Callable[[], Any], function: str = "loss") -> Any:
        wide: Any = contextlib.nullcontext([])
        if self.wide and function == "loss":  # in the backward pass, too
            wide = widened(lowers=True)
        before = digests(self.variables.values())
        try:
            with wide as cast:
                made = program()
            self.cast = self.cast + cast
            after = digests(self.variables.values())
            self.sets |= {name for name, x in after.items() if x != before.get(name)}
            self.sets |= self.model.sets
            return made
        except Mistake:
            raise
        except Exception as error:
            raise mistake(self.user.name, function, error) from error

    def run(
        self, weights: Mapping[str, np.ndarray], spec: Any, batch: Arrays,
        forced: Arrays | None = None,
    ) -> tuple[dict[str, Any], Arrays]:  # fmt: skip
        """See `TorchSide.run`."""
        params, state = self._trees(weights)
        answer = self._run(params, state, self._batch(spec, batch), forced or {})
        (loss, (arrays, new)), (grads, cotangents) = answer
        self.left = new
        seen = arrays | {f"dact/{name}": conjugate(x) for name, x in cotangents.items()}
        seen |= {f"grad/{n}": conjugate(x) for n, x in self.model.flat(grads).items()}
        seen |= {f"state/{n}": x for n, x in self.model.flat(new).items()}
        seen = {name: tree.to_numpy(x) for name, x in seen.items()}
        calls = self.tape.calls
        about = {"loss": float(loss), "events": calls.events, "kinds": calls.kinds}
        return {**about, "paths": calls.paths}, seen

    def limits(self) -> dict[str, Any]:
        """See `ProgramSide.limits`; a program that asks for 64 bits has them."""
        text = "".join(linecache.getlines(getattr(self.user.module, "__file__", None) or ""))
        told = super().limits()
        return {**told, "wraps": []} if "enable_x64" in text else told

    def counted(self) -> Arrays:
        before, after = (
            {self.model.path_name(path): np.asarray(x, float)
             for path, x in jax.tree_util.tree_leaves_with_path(state)
             if jnp.issubdtype(getattr(x, "dtype", object), jnp.integer)}
            for state in (self.model.state, self.left)
        )  # fmt: skip
        return {name: x - before[name] for name, x in after.items() if name in before}

    def _jit(self, function: Any, **options: Any) -> Any:
        """Compiles in haste for a CPU where the program is small, for then this takes longest."""
        if QUICK and self.is_small and jax.devices()[0].platform == "cpu":
            options["compiler_options"] = QUICK
        return jax.jit(function, **options)

    def _run(self, params: Any, state: Any, batch: Any, forced: Arrays) -> Any:
        """Runs the compiled program of these shapes, which is the same whatever is forced."""
        key = str((jax.tree.map(jnp.shape, batch), self.wide, self.moves_sums))
        if key not in self.programs:
            self.programs[key] = self._traced(lambda: self._compile(params, state, batch))
        program, self.tape, slots, empty = self.programs[key]
        answer = program(params, slots, state, _filled(empty, forced), batch)
        note(self.user.conditions, answer[0][1][0].pop(CONDITION))
        return answer

    def forcing(self, params: Any, state: Any, batch: Any, forced: Arrays) -> Any:
        """Returns the slots of a `Tape`, and what it is given."""
        _, slots, empty = self._points(params, state, batch)
        return slots, _filled(empty, forced)

    def _points(self, params: Any, state: Any, batch: Any) -> Any:
        """Returns the tape of the calls, slots of zeros by call, what is given: nothing."""
        tape = Tape()

        def look(p: Any, s: Any, b: Any) -> Any:
            self._loss(tape, p, s, b)
            return tape.calls.arrays

        shapes = jax.eval_shape(look, params, state, batch)
        zeros = {n: jax.device_put(np.zeros(x.shape, x.dtype)) for n, x in shapes.items()}
        slots = {name[4:]: x for name, x in zeros.items() if name.startswith("act/")}
        zeros.update({f"dact/{call}": x for call, x in slots.items() if not self.forward})
        tape.calls.arrays = {}
        return tape, slots, {name: (x, jnp.zeros(())) for name, x in zeros.items()}

    def _compile(self, params: Any, state: Any, batch: Any) -> Any:
        """Returns the program, and what `_points` does."""
        tape, slots, empty = self._points(params, state, batch)

        def both(p: Any, slots: Any, s: Any, given: Any, b: Any) -> Any:
            recorder = Tape(slots, given)
            recorder.conditions = {}
            loss, new = self._loss(recorder, p, s, b)
            return loss, (recorder.calls.arrays | {CONDITION: recorder.conditions}, new)

        def differentiated(*args: Any) -> Any:
            behind: dict[str, Any] = {}  # in functions with a gradient of their own
            levels = {level_of(x._trace) for x in jax.tree.leaves(args) if hasattr(x, "_trace")}
            with jax.disable_jit(), watched(behind, partial(is_of_levels, levels)):
                answer, grads = jax.value_and_grad(both, argnums=(0, 1), has_aux=True)(*args)
            rows = answer[1][0][CONDITION]
            answer[1][0][CONDITION] = {
                n: rows.get(n, []) + behind.get(n, []) for n in rows | behind
            }
            return answer, grads

        if self.forward:
            slots, program = {}, self._jit(lambda *args: (both(*args), ({}, {})))
        else:
            program = self._jit(differentiated)
        return program.lower(params, slots, state, empty, batch).compile(), tape, slots, empty

    def begin(self, weights: Mapping[str, np.ndarray]) -> None:
        """A fresh optimizer, on given weights."""
        params, _ = self._trees(weights)
        if self.transform is None:
            made = self.user.call("optimizer", self.model.given(params))
            self.transform = self.model.transformation(made)
            self._traced(lambda: self._choose_step(params), "optimizer")
        self.optimizer_state = self._traced(lambda: self._first_state(params), "optimizer")

    def _choose_step(self, params: Any) -> None:
        """The step, compiled, and what widens its first state: floats of 32 bits as of 64, such as
        those of MultiSteps, and counts, where optax allows it."""
        both = [lambda x: widen_count(widen_float(x)), widen_float]
        tries = [*((True, widen) for widen in both), (False, widen_count), (False, lambda x: x)]
        for widens, widen in tries[2 * self.own :]:
            self.step, self.widen_state = self._step_of(widens), widen
            state = self._first_state(params)
            with contextlib.suppress(AssertionError, TypeError):
                _, after = jax.eval_shape(self.step, params, params, state)
                if jax.tree.map(dtype_of, after) == jax.tree.map(dtype_of, state):
                    break
        else:
            widens = False
        self.nest = jax.tree.structure(params)
        self.move = self._jit(self._move, donate_argnums=1)
        leaves = jax.tree_util.tree_leaves_with_path(self.transform.init(params))
        names = {_is_float32(path, x) for path, x in leaves} if widens else set()
        self.widened_state = sorted(names - {""})

    def _move(self, leaves: Any, state: Any) -> Any:
        """A step from the leaves of parameters and gradients, for a nest of these takes long.

        Returns:
            The leaves of the parameters, the state, what each tensor is moved by, see
            `recording.alone`, and what `jax_conditions` finds.
        """
        half = len(leaves) // 2
        params, grads = (jax.tree.unflatten(self.nest, x) for x in (leaves[:half], leaves[half:]))
        found: dict[str, Any] = {}
        levels = {level_of(x._trace) for x in leaves if hasattr(x, "_trace")}
        with jax.disable_jit(), watched(found, partial(is_of_levels, levels)):
            after, state = self.step(params, grads, state)
        moved = self.model.flat(jax.tree.map(jnp.subtract, after, params))
        given, before = self.model.flat(grads), self.model.flat(params)
        sizes = [(jnp.linalg.norm(x), inner(conjugate(given[n]), x), inner(before[n], x))
                 for n, x in moved.items()]  # fmt: skip
        return jax.tree.leaves(after), state, jnp.array(sizes), found

    def _apply(self, params: Any, grads: Any) -> Any:
        leaves = jax.tree.leaves((params, grads))
        after, self.optimizer_state, _, found = self.move(leaves, self.optimizer_state)
        note(self.user.conditions, found)
        return jax.tree.unflatten(self.nest, after)

    def _first_state(self, params: Any) -> Any:
        """Its arrays are the optimizer's own: a step writes over them."""
        own = partial(jax.tree.map, lambda x: jnp.array(x) if hasattr(x, "dtype") else x)
        return own(jax.tree.map(self.widen_state, self.transform.init(params)))

    def _step_of(self, wide: bool) -> Any:
        """The step of the optimizer; where `wide`, casts to float32 mean float64."""

        def step(params: Any, grads: Any, state: Any) -> Any:
            same = contextlib.nullcontext()
            with widened(("float32",)) if wide else same:
                updates, state = self.transform.update(grads, state, params)
            return jax.tree.map(jnp.add, params, updates), state

        return step

    def begin_alone(self, weights: Arrays, grads: Arrays) -> Callable[[int, float], np.ndarray]:
        """See `TorchSide.begin_alone`."""
        self.begin(weights)
        params, _ = self._trees(weights)
        order = [list(self.model.flat(params)).index(name) for name in grads]
        leaves_by: dict[float, list[Any]] = {}
        self.measured = self.model.flat(self._given(grads)), self.model.flat(params)

        def take_step(step: int, factor: float) -> np.ndarray:
            if factor not in leaves_by:
                given = self._given({name: factor * g for name, g in grads.items()})
                leaves_by[factor] = jax.tree.leaves((params, given))
            made = self.move(leaves_by[factor], self.optimizer_state)
            _, self.optimizer_state, sizes, found = made
            note(self.user.conditions, found)
            norms, along, toward = np.asarray(sizes).T
            return np.array([norms, along / factor, toward]).T[order]

        return take_step

    def optimizer_slots(self) -> Arrays:
        grads, params = self.measured
        found = {}
        for path, x in jax.tree_util.tree_leaves_with_path(self.optimizer_state):
            place = self.model.path_name(path)
            if not jnp.issubdtype(getattr(x, "dtype", object), jnp.number):
                continue
            ends = (name for name in grads if f".{place}".endswith(f".{name}")
                    and x.shape == grads[name].shape and x.size > 1)  # fmt: skip
            if name := max(ends, key=len, default=""):
                y = jnp.asarray(x, params[name].dtype)
                sides = conjugate(grads[name]), params[name]
                row = [jnp.linalg.norm(y), *(inner(each, y) for each in sides)]
                found[f"{place.removesuffix(name).rstrip('.')}/{name}"] = np.array(row, float)
            else:
                one = x.size == 1 and not jnp.iscomplexobj(x)
                value = x.reshape(()) if one else jnp.linalg.norm(jnp.asarray(x, float))
                found[f"{place}/"] = np.array([value], float)
        return found

    def _given(self, grads: Arrays) -> Any:
        given = self.model.rebuild(self.model.params, grads, None if self.own else "float64")
        return jax.tree.map(conjugate, given)

    def update(self, weights: Arrays, grads: Arrays, step: int) -> Arrays:
        """One optimizer step from given weights and gradients; the weights after it."""
        params, _ = self._trees(weights)
        flat = self.model.flat(self._apply(params, self._given(grads)))
        after = {n: np.asarray(tree.to_numpy(x), np.float64) for n, x in flat.items()}
        return {**weights, **after}

    def train(self, weights: Mapping[str, np.ndarray], batches: list[Any]) -> list[float]:
        """The losses of a run from given weights."""
        self.begin(weights)
        params, state = self._trees(weights)
        losses = []
        for spec, batch in batches:
            answer = self._run(params, state, self._batch(spec, batch), {})
            (loss, (arrays, state)), (grads, _) = answer
            losses.append(float(loss))
            params = self._apply(self.model.carried(params, arrays), grads)
        return losses


def like(x: Any, values: np.ndarray, cotangent: bool) -> Any:
    """Values, of which a complex array's are pairs, in an array's format and shape.

    Args:
        cotangent: torch's, which is the conjugate of JAX's.
    """
    given = tree.to_complex(values) if jnp.iscomplexobj(x) else values
    given = given.conj() if cotangent else given
    return jnp.asarray(given, x.dtype).reshape(x.shape)


def is_of_levels(levels: set[int], x: Any) -> bool:
    """Says if a value is traced at one of some levels, or not at all."""
    return level_of(x._trace) in levels if hasattr(x, "_trace") else True


def _filled(empty: Any, forced: Arrays) -> Any:
    """Puts what is forced in the place of what is given."""
    return {
        name: (like(zeros, forced[name], name.startswith("dact/")), jnp.ones(()))
        if name in forced
        else (zeros, no)
        for name, (zeros, no) in empty.items()
    }


def inner(a: Any, b: Any) -> Any:
    """Returns the real part of the inner product of two arrays of one shape."""
    return jnp.vdot(a, b).real


def conjugate(x: Any) -> Any:
    """Torch's gradient is the conjugate of JAX's."""
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


def _is_float32(path: Any, x: Any) -> str:
    """The name of a state's leaf that has 32 bits; "" of another."""
    inside = ("value", "raw_value")  # of Flax's variables
    names = [key.name for key in path if hasattr(key, "name") and key.name not in inside]
    return names[-1] if names and dtype_of(x) == jnp.float32 else ""


def dtype_of(x: Any) -> Any:
    return getattr(x, "dtype", None)


def widen_float(x: Any) -> Any:
    return jnp.asarray(x, jnp.float64) if dtype_of(x) == jnp.float32 else x


def widen_count(x: Any) -> Any:
    """Widens a count of 32 bits to 64, if there are: what divides it would become float32."""
    wide = jax.config.read("jax_enable_x64") and getattr(x, "dtype", None) == jnp.int32
    return jnp.asarray(x, jnp.int64) if wide else x
