"""A JAX program, whatever its model is made of: one compiled program gives all of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep_recorder import tree
from lockstep_recorder.calls import Calls
from lockstep_recorder.models import Model, model_of
from lockstep_recorder.user import Mistake, User, mistake

Arrays = dict[str, np.ndarray]


def configure() -> None:
    """Before the user's file is imported: float64, exact matmuls, and nothing hidden by remat."""
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")

    def checkpoint(fun: Any = None, **options: Any) -> Any:
        return fun if fun is not None else lambda f: f

    jax.checkpoint = jax.remat = checkpoint


class Tape:
    """Records what passes the points of a program, or forces it; see `TorchSide.run`.

    Args:
        slots: call -> zeros, whose gradient is what arrives at the output.
        given: `in/CALL`, `act/CALL`, `dact/CALL` -> (value, 1 where it is forced and 0 where not).
    """

    def __init__(self, slots: Any = None, given: Any = None) -> None:
        self.calls = Calls()
        self.slots, self.given = slots or {}, given or {}
        self.traces: set[int] = set()  # of the values that may be returned: not those of a vmap
        self.hidden: list[str] = []

    def begin(self, module: str, kind: str, inputs: Any) -> Any:
        """The inputs, the first float of them forced where it is given."""
        leaves, nest = jax.tree.flatten(inputs)
        at = next((i for i, x in enumerate(leaves) if is_float(x)), None)
        if at is not None and not self._is_ours(leaves[at]):
            self.calls.open.append("")  # such as flax's look at a scan's body before it runs
            return inputs
        call = self.calls.begin(module, kind)
        if at is None:
            return inputs
        x = self.calls.arrays[f"in/{call}"] = leaves[at]
        if f"in/{call}" in self.given:
            leaves[at] = replace(x, *self.given[f"in/{call}"])
        return jax.tree.unflatten(nest, leaves)

    def end(self, y: Any) -> Any:
        call = self.calls.end()
        if not call:
            return y
        leaves, nest = jax.tree.flatten(y)
        at = next((i for i, x in enumerate(leaves) if is_float(x)), None)
        if at is None or not self._is_ours(leaves[at]):
            if at is not None:
                self.hidden.append(call)
            return y
        leaves[at] = self.point(call, leaves[at])
        return jax.tree.unflatten(nest, leaves)

    def tap(self, name: str, x: Any) -> Any:
        """The user's own point."""
        if not is_float(x):
            return x
        self.begin(name, "tap", ())
        return self.end(x)

    def point(self, call: str, y: Any) -> Any:
        self.calls.arrays[f"act/{call}"] = y
        if call not in self.slots:
            return y
        act, dact = (self.given[f"{kind}/{call}"] for kind in ("act", "dact"))
        return force(y, self.slots[call], *act, *dact)

    def _is_ours(self, x: Any) -> bool:
        trace = getattr(x, "_trace", None)
        return trace is None or not self.traces or level_of(trace) in self.traces


def level_of(trace: Any) -> int:
    """JAX before 0.4.36 makes a new trace for each operation, of one `main`."""
    return id(getattr(trace, "main", trace))


@jax.custom_vjp
def replace(x: Any, value: Any, forced: Any) -> Any:
    """Forward the given value, where it is forced; the cotangent passes."""
    return jnp.where(forced > 0, value, x)


def _replace_forward(x: Any, value: Any, forced: Any) -> Any:
    return replace(x, value, forced), None


def _replace_backward(_: Any, g: Any) -> Any:
    return g, jnp.zeros_like(g), jnp.zeros(())


replace.defvjp(_replace_forward, _replace_backward)


@jax.custom_vjp
def force(y: Any, slot: Any, value: Any, forced: Any, cotangent: Any, turned: Any) -> Any:
    """Forward and backward the given values, where they are forced; the slot gets what arrives."""
    return jnp.where(forced > 0, value, y)


def _force_forward(y: Any, slot: Any, value: Any, forced: Any, cotangent: Any, turned: Any) -> Any:
    return force(y, slot, value, forced, cotangent, turned), (cotangent, turned)


def _force_backward(kept: Any, g: Any) -> Any:
    cotangent, turned = kept
    zero, none = jnp.zeros_like(g), jnp.zeros(())
    return jnp.where(turned > 0, cotangent, g), g, zero, none, zero, none


force.defvjp(_force_forward, _force_backward)


class JaxSide:
    framework = "jax"

    def __init__(self, user: User, built: Any, device: str = "cpu") -> None:
        self.user, self.precision, self.wide = user, "float64", False
        self.narrow: list[str] = []
        self.model: Model = model_of(user, built)
        self.programs: dict[Any, Any] = {}
        self.transform: Any = None
        self.optimizer_state: Any = None

    def facts(self) -> dict[str, Any]:
        versions = {m.__name__: m.__version__ for m in (jax, np)}
        return {
            "framework": self.framework, "versions": versions,
            "device": jax.devices()[0].platform, "precision": self.precision,
            "narrow": self.narrow, "widened": self.wide,
            "modules": self.model.modules(), "settings": {},
            "parameters": list(self.model.flat(self.model.params)), "tied": [],
        }  # fmt: skip

    def initial(self) -> Arrays:
        trees = {**self.model.flat(self.model.params), **self.model.flat(self.model.state)}
        return {name: np.asarray(x, np.float64) for name, x in trees.items()}

    def batch(self, step: int) -> tuple[Any, Arrays]:
        return tree.take_apart(self.user.call("batch", step))

    def lacks_optimizer(self) -> str:
        return "" if self.user.has("optimizer") else f"no optimizer(model) in {self.user.name}"

    def widen(self, weights: Arrays, spec: Any, batch: Arrays) -> None:
        """float64 where nothing in the program is narrower."""
        params, state = self._trees(weights)
        given = self._batch(spec, batch)
        for self.wide in (False, True):
            trace = jax.make_jaxpr(lambda p, s, b: self._loss(Tape(), p, s, b)[0])
            jaxpr = self._traced(partial(trace, params, state, given))
            self.narrow = sorted(set(narrow_operations(jaxpr.jaxpr)))
            if not self.narrow:
                return
        self.wide, self.precision = False, "float32"

    def _trees(self, weights: Arrays) -> tuple[Any, Any]:
        return self.model.rebuild(self.model.params, weights), self.model.rebuild(
            self.model.state, weights
        )

    def _batch(self, spec: Any, batch: Arrays) -> Any:
        def leaf(x: np.ndarray) -> Any:
            return jnp.asarray(x.astype(np.float64) if x.dtype.kind == "f" else x)

        return tree.put_together(spec, batch, leaf)

    def _loss(self, tape: Tape, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        """Traced with jit off, so that scans are unrolled and inner programs show their modules."""
        for leaf in jax.tree.leaves((params, state, batch, tape.slots)):
            if hasattr(leaf, "_trace"):
                tape.traces.add(level_of(leaf._trace))
        wide = nothing_narrower() if self.wide else contextlib.nullcontext()
        with jax.disable_jit(), self.model.listening(tape), wide:
            loss, new = self.model.loss(params, state, batch)
        if getattr(loss, "size", 0) != 1:
            kind = f"{type(loss).__name__} of shape {getattr(loss, 'shape', '?')}"
            raise Mistake(f"{self.user.name}: loss gives {kind}; return a scalar")
        return loss.reshape(()), new

    def _traced(self, program: Callable[[], Any]) -> Any:
        try:
            return program()
        except Mistake:
            raise
        except Exception as error:
            raise mistake(self.user.name, "loss", error) from error

    def run(
        self, weights: Arrays, spec: Any, batch: Arrays, forced: Arrays | None = None
    ) -> tuple[dict[str, Any], Arrays]:
        """See `TorchSide.run`."""
        params, state = self._trees(weights)
        answer = self._run(params, state, self._batch(spec, batch), forced or {})
        (loss, (arrays, new)), (grads, cotangents) = answer
        seen = {name: np.asarray(x) for name, x in arrays.items()}
        seen.update({f"dact/{call}": np.asarray(x) for call, x in cotangents.items()})
        seen.update({f"grad/{n}": np.asarray(x) for n, x in self.model.flat(grads).items()})
        seen.update({f"state/{n}": np.asarray(x) for n, x in self.model.flat(new).items()})
        about = {"loss": float(loss), "events": self.tape.calls.events,
                 "kinds": self.tape.calls.kinds, "hidden": self.tape.hidden}  # fmt: skip
        return about, seen

    def _run(self, params: Any, state: Any, batch: Any, forced: Arrays) -> Any:
        """By the compiled program of these shapes, which is the same whatever is forced."""
        key = str(jax.tree.map(jnp.shape, batch))
        if key not in self.programs:
            self.programs[key] = self._traced(lambda: self._compile(params, state, batch))
        program, self.tape, slots, empty = self.programs[key]
        given = {
            name: (jnp.asarray(forced[name], zeros.dtype).reshape(zeros.shape), jnp.ones(()))
            if name in forced else (zeros, no)
            for name, (zeros, no) in empty.items()
        }  # fmt: skip
        return program(params, slots, state, given, batch)

    def _compile(self, params: Any, state: Any, batch: Any) -> Any:
        """(program, the tape of its calls, slots of zeros by call, what is given: nothing)."""
        tape = Tape()

        def look(p: Any, s: Any, b: Any) -> Any:
            self._loss(tape, p, s, b)
            return tape.calls.arrays

        shapes = jax.eval_shape(look, params, state, batch)
        zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
        slots = {name[4:]: x for name, x in zeros.items() if name.startswith("act/")}
        zeros.update({f"dact/{call}": x for call, x in slots.items()})
        empty = {name: (x, jnp.zeros(())) for name, x in zeros.items()}

        def both(p: Any, slots: Any, s: Any, given: Any, b: Any) -> Any:
            recorder = Tape(slots, given)
            loss, new = self._loss(recorder, p, s, b)
            return loss, (recorder.calls.arrays, new)

        program = jax.jit(jax.value_and_grad(both, argnums=(0, 1), has_aux=True))
        compiled = program.lower(params, slots, state, empty, batch).compile()
        tape.calls.arrays = {}
        return compiled, tape, slots, empty

    def begin(self, weights: Arrays) -> None:
        """A fresh optimizer, on given weights."""
        params, _ = self._trees(weights)
        if self.transform is None:
            made = self.user.call("optimizer", self.model.given(params))
            self.transform = getattr(made, "tx", made)  # an nnx.Optimizer holds one

            def step(params: Any, grads: Any, state: Any) -> Any:
                updates, state = self.transform.update(grads, state, params)
                return jax.tree.map(jnp.add, params, updates), state

            self.apply = jax.jit(step)
        self.optimizer_state = self.transform.init(params)

    def update(self, weights: Arrays, grads: Arrays, step: int) -> Arrays:
        """One optimizer step from given weights and gradients; the weights after it."""
        params, _ = self._trees(weights)
        given = self.model.rebuild(self.model.params, grads)
        params, self.optimizer_state = self.apply(params, given, self.optimizer_state)
        after = {n: np.asarray(x, np.float64) for n, x in self.model.flat(params).items()}
        return {**weights, **after}

    def train(self, weights: Arrays, batches: list[Any]) -> list[float]:
        """The losses of a run from given weights."""
        self.begin(weights)
        params, state = self._trees(weights)
        losses = []
        for spec, batch in batches:
            (loss, (_, state)), (grads, _) = self._run(params, state, self._batch(spec, batch), {})
            losses.append(float(loss))
            params, self.optimizer_state = self.apply(params, grads, self.optimizer_state)
        return losses


def narrow_operations(jaxpr: Any) -> Iterator[str]:
    """The operations that make a narrower float of a float64, in inner programs too."""
    for eqn in jaxpr.eqns:
        wide = any(getattr(v.aval, "dtype", None) == jnp.float64 for v in eqn.invars)
        for out in eqn.outvars:
            dtype = getattr(out.aval, "dtype", None)
            narrower = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
            if wide and narrower and dtype != jnp.float64 and out.aval.size > 1:
                yield f"{eqn.primitive.name} gives {dtype}"
        for value in eqn.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from narrow_operations(inner)


def is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) and hasattr(x, "reshape")


def first_float(nest: Any) -> Any:
    return next((x for x in jax.tree.leaves(nest) if is_float(x)), None)


@contextlib.contextmanager
def nothing_narrower() -> Iterator[None]:
    """What would make a narrower float of a float64 makes a float64, however it is written."""
    changed = ((lax.convert_element_type_p, "new_dtype"), (lax.iota_p, "dtype"),
               (lax.dot_general_p, "preferred_element_type"))  # fmt: skip

    def widened(primitive: Any, option: str) -> Callable[..., Any]:
        bind = type(primitive).bind

        def widened_bind(*args: Any, **params: Any) -> Any:
            wide = all(getattr(x, "dtype", None) == jnp.float64 for x in args)
            if wide and params[option] is not None and jnp.issubdtype(params[option], jnp.floating):
                params[option] = np.dtype(np.float64)
            return bind(primitive, *args, **params)

        return widened_bind

    for primitive, option in changed:
        primitive.bind = widened(primitive, option)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for primitive, _ in changed:
            del primitive.bind
