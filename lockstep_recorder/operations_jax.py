"""A JAX program's tape: its jaxpr, the inner ones put in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep_recorder import tree
from lockstep_recorder.jax_numpy import function_of
from lockstep_recorder.operations import Operations, Player, TapeValue, lines_of, lines_through
from lockstep_recorder.tape import Tape, is_float

INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")  # where a primitive keeps its program
INLINED = ("pjit", "jit", "closed_call", "core_call", "core_closed_call", "remat", "remat2",
           "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
           "custom_vmap_call", "xla_call", "named_call")  # fmt: skip
LONGEST = 4_000  # equations that a scan may become; a longer one is one operation
LEGIBLE = 80  # characters of an attribute; longer ones, such as a convolution's axes, are not told
Function = Callable[..., Any]
PLAIN = (bool, int, float, str)


class Flat:
    """Adds the equations of a jaxpr to a tape."""

    def __init__(self) -> None:
        self.tape = Operations("jax")
        self.around: list[tuple[str, int]] = []  # frames of what calls the equations
        # What is differentiated as one: (function, inputs, outputs). A custom derivative is one,
        # the operations inside of it are not.
        self.parts: list[tuple[Function, list[int], list[int]]] = []

    def walk(self, jaxpr: Any, consts: list[int], args: list[int]) -> list[int]:
        """Returns the numbers of the results."""
        numbers = dict(zip(jaxpr.constvars, consts))
        numbers.update(zip(jaxpr.invars, args))

        def number(v: Any) -> int:
            return self.tape.begin(v.val, "constant") if hasattr(v, "val") else numbers[v]

        for eqn in jaxpr.eqns:
            made = self.equation(eqn, [number(v) for v in eqn.invars])
            numbers.update(zip(eqn.outvars, made))
        return [number(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, inputs: list[int]) -> list[int]:
        name = eqn.primitive.name
        inner = next((eqn.params[key] for key in INNER if key in eqn.params), None)
        bound = eqn.primitive.get_bind_params(eqn.params)
        # With the inner functions apart before JAX 0.9.
        functions, params = bound if isinstance(bound, tuple) else ((), bound)

        def compute(*values: Any) -> list[Any]:
            y = eqn.primitive.bind(*functions, *values, **params)
            return list(y) if eqn.primitive.multiple_results else [y]

        if inner is not None and name in INLINED:
            body, consts = self.opened(inner)
            if len(body.invars) == len(inputs):
                before = len(self.parts)
                with self.inside(eqn):
                    outputs = self.walk(body, consts, inputs)
                if name.startswith("custom_"):
                    outputs = [self.copied(n) if n in inputs else n for n in outputs]
                    self.parts[before:] = [(compute, inputs, outputs)]
                return outputs
        if name == "scan" and eqn.params["length"] * len(_eqns(inner)) <= LONGEST:
            return self.scan(eqn, inputs)
        on_host = function_of(eqn)

        def apply(values: list[Any], alone: bool) -> list[Any]:
            return [on_host(*values)] if on_host else compute(*values)

        attributes = {key: repr(x) for key, x in eqn.params.items() if _is_plain(x)}
        attributes = {key: x for key, x in attributes.items() if len(x) <= LEGIBLE}
        shapes = [v.aval for v in eqn.outvars]
        lines = self.lines(eqn)
        outputs = self.tape.add(name, inputs, shapes, apply, attributes, lines)
        self.parts.append((compute, inputs, outputs))
        return outputs

    @contextlib.contextmanager
    def inside(self, eqn: Any) -> Iterator[None]:
        """Equations of what one calls have frames of their own alone, from JAX 0.5 on."""
        former, self.around = self.around, [*frames(eqn), *self.around]
        try:
            yield
        finally:
            self.around = former

    def lines(self, eqn: Any) -> list[str]:
        """Returns an equation's line and its callers'; none of a stop that a library calls."""
        own = [*frames(eqn)]
        if eqn.primitive.name == "stop_gradient" and not any(lines_of(own)):
            return []
        return [*lines_through([*own, *self.around])]

    def copied(self, number: int) -> int:
        """Adds a value of its own for what a custom derivative passes on unchanged."""
        (copy,) = self.tape.add("copy", [number], [self.tape.values[number]], _first, {})
        return copy

    def opened(self, inner: Any) -> tuple[Any, list[int]]:
        """A jaxpr, closed or not, and the numbers of its constants."""
        body = getattr(inner, "jaxpr", inner)
        return body, [self.tape.begin(x, "constant") for x in getattr(inner, "consts", ())]

    def scan(self, eqn: Any, inputs: list[int]) -> list[int]:
        """Each turn's equations, one after the other."""
        params, lines = eqn.params, self.lines(eqn)
        body, consts = self.opened(params["jaxpr"])
        fixed, carried = params["num_consts"], params["num_carry"]
        carry = inputs[fixed : fixed + carried]
        given: list[list[int]] = [[] for _ in eqn.outvars[carried:]]
        turns = range(params["length"])
        for turn in reversed(turns) if params["reverse"] else turns:
            parts = [self._part(n, turn, lines) for n in inputs[fixed + carried :]]
            with self.inside(eqn):
                made = self.walk(body, consts, [*inputs[:fixed], *carry, *parts])
            carry = made[:carried]
            for list_, number in zip(given, made[carried:]):
                list_.append(number)
        if params["reverse"]:
            given = [list_[::-1] for list_ in given]
        stacks = []
        for list_, v in zip(given, eqn.outvars[carried:]):
            stacks += self.tape.add("stack", list_, [v.aval], _stack, {}, lines)
            self.parts.append((lambda *values: [jnp.stack(values)], list_, stacks[-1:]))
        return [*carry, *stacks]

    def _part(self, number: int, turn: int, lines: list[str]) -> int:
        whole = self.tape.values[number]
        shape = jax.ShapeDtypeStruct(whole.shape[1:], jnp.dtype(whole.dtype))

        def apply(values: list[Any], alone: bool) -> list[Any]:
            return [values[0][turn]]

        made = self.tape.add("index", [number], [shape], apply, {"at": str(turn)}, lines)
        self.parts.append((lambda x: [x[turn]], [number], made))
        return made[0]

    def cotangents(self, values: dict[int, Any]) -> dict[int, Any]:
        """Returns the gradient of the loss with respect to each value that has one, by number.

        Args:
            values: with which the tape begins, by number.
        """
        values = dict(values)
        pulls = []
        for function, inputs, outputs in self.parts:
            made, pull = _differentiate(function, [values[n] for n in inputs])
            values |= dict(zip(outputs, made))
            pulls.append((pull, inputs, outputs))
        found: dict[int, Any] = {self.tape.loss: jnp.ones_like(values[self.tape.loss])}
        for pull, inputs, outputs in reversed(pulls):
            if found.keys() & set(outputs):
                given = [found.get(n, _zeros(values[n])) for n in outputs]
                for n, g in zip(inputs, pull(given)):
                    if g is not None:
                        found[n] = found[n] + g if n in found else g
        return found


def _differentiate(function: Function, values: list[Any]) -> tuple[list[Any], Function]:
    """Returns what a function makes of values, and what gives their cotangents, of those of its
    results; none of what is no float."""
    floats = [at for at, x in enumerate(values) if is_float(x)]

    def of_floats(*xs: Any) -> list[Any]:
        given = list(values)
        for at, x in zip(floats, xs):
            given[at] = x
        made: list[Any] = function(*given)
        return made

    made, pull = jax.vjp(of_floats, *[values[at] for at in floats])

    def pull_all(cotangents: list[Any]) -> list[Any]:
        found = dict(zip(floats, pull(cotangents)))
        return [found.get(at) for at in range(len(values))]

    return made, pull_all


def _zeros(x: Any) -> Any:
    """Returns the cotangent of a value that nothing uses."""
    return jnp.zeros_like(x) if is_float(x) else np.zeros(jnp.shape(x), jax.dtypes.float0)


def _first(values: list[Any], alone: bool) -> list[Any]:
    return values[:1]


def _stack(values: list[Any], alone: bool) -> list[Any]:
    return [jnp.stack(values)]


def _eqns(inner: Any) -> list[Any]:
    return getattr(inner, "jaxpr", inner).eqns


def _is_plain(x: Any) -> bool:
    return isinstance(x, PLAIN) or (isinstance(x, tuple) and all(map(_is_plain, x)))


def frames(eqn: Any) -> Iterator[tuple[str, int]]:
    """Yields the frames of the call that made an equation, the innermost first."""
    stack = getattr(eqn.source_info, "traceback", None)
    for frame in stack.frames if stack is not None else ():
        yield frame.file_name, frame.line_num


def make_tape(
    side: Any, weights: Any, spec: Any, batch: Any, gradients: bool = False,
    forced: dict[str, np.ndarray] | None = None,
) -> Operations:  # fmt: skip
    """Traces the forward pass of a `JaxSide`; see `operations_torch.make_tape`."""
    params, state = side._trees(weights)
    given = side._batch(spec, batch)
    points = side.forcing(params, state, given, forced) if forced else ()
    trace = jax.make_jaxpr(lambda p, s, b: side._loss(Tape(*points), p, s, b)[0])
    closed = side._traced(lambda: trace(params, state, given))
    flat, numbers, values = Flat(), [], {}
    for path, x in jax.tree_util.tree_leaves_with_path(params) + (
        jax.tree_util.tree_leaves_with_path(state)
    ):
        name = side.model.path_name(path)
        known = name in weights and hasattr(x, "dtype")
        numbers.append(flat.tape.begin_parameter(x, name, _of_pairs) if known
                       else flat.tape.begin(x, "constant"))  # fmt: skip
        values[numbers[-1]] = x
    numbers += [flat.tape.begin(x, "batch") for x in jax.tree.leaves(given)]
    consts = [flat.tape.begin(x, "constant") for x in closed.consts]
    (flat.tape.loss,) = flat.walk(closed.jaxpr, consts, numbers)
    if gradients:
        values |= {n: v.kept for n, v in enumerate(flat.tape.values) if v.kept is not None}
        found = evaluate(flat.cotangents, values)
        flat.tape.cotangents = {n: jnp.conj(x) if jnp.iscomplexobj(x) else x
                                for n, x in found.items()}  # fmt: skip
    return flat.tape


def _of_pairs(x: Any) -> Any:
    return jax.lax.complex(x[..., 0], x[..., 1])


def evaluate(program: Function, values: dict[int, Any]) -> dict[int, Any]:
    """Computes what a program makes of values, one operation at a time: it is not compiled."""
    closed, shapes = jax.make_jaxpr(program, return_shape=True)(values)
    flat = Flat()
    numbers = [flat.tape.begin(x, "constant") for x in jax.tree.leaves(values)]
    consts = [flat.tape.begin(x, "constant") for x in closed.consts]
    outputs = flat.walk(closed.jaxpr, consts, numbers)
    player = Player(flat.tape, make)
    player.start({})
    player.play({}, outputs)
    return {name: player.known[n] for name, n in zip(sorted(shapes), outputs)}


def make(x: np.ndarray, value: TapeValue) -> Any:
    given = tree.to_complex(x) if "complex" in value.dtype else x
    return jnp.asarray(given, value.dtype).reshape(value.shape)
