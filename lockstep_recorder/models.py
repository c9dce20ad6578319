"""Kinds of JAX models: a tree of arrays, Flax Linen variables, or a Flax NNX module."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from lockstep_recorder.tree import to_complex
from lockstep_recorder.user import Mistake, User

METHODS = ("__call__", "attend")  # of modules; attend is the tied head of an embedding


def model_of(user: User, built: Any) -> Model:
    if "flax" in sys.modules:
        from flax import nnx

        if isinstance(built, nnx.Module):
            return NnxModel(user, built)
    return Model(user, built)


class Model:
    """Any tree; Flax Linen's modules are intercepted, and `taps` of the user's are called.

    A dict with "params" and other collections is Linen's variables: the others are state.
    """

    def __init__(self, user: User, built: Any) -> None:
        self.user = user
        self.drops: dict[str, float] = {}  # the modules that would drop out, and their rates
        self.moved: dict[str, Any] = {}  # parameters that the last forward pass changed
        self.sets: set[str] = set()  # what a forward pass sets that is no array of the model
        self.variables = _is_variables(built)
        whole = built if self.variables else {"params": built}
        # Such as an activation function or a count, which an Equinox module has for a leaf.
        self.constants = jax.tree.map(lambda x: None if is_float_leaf(x) else x, whole["params"])
        self.params = jax.tree.map(lambda x: x if is_float_leaf(x) else None, whole["params"])
        self.state = {name: x for name, x in whole.items() if name != "params"}

    def path_name(self, path: Any) -> str:
        """The keys of a path, joined by dots; "params" of a tree that is one array."""
        parts = []
        for key in path:
            for attribute in ("key", "name", "idx"):
                if hasattr(key, attribute):
                    parts.append(str(getattr(key, attribute)).lstrip("."))
                    break
        name = ".".join(parts)
        return name if name.strip("./") else f"params{name}"

    def flat(self, *trees: Any) -> dict[str, Any]:
        """Float leaves by path.

        Raises:
            Mistake: two of them have one name.
        """
        found: dict[str, Any] = {}
        for path, x in chain(*(jax.tree_util.tree_leaves_with_path(tree) for tree in trees)):
            if is_float_leaf(x):
                name = self.path_name(path)
                if name in found:
                    raise Mistake(f"{self.user.name}: two tensors of the model are called {name} "
                                  "by their keys; give one another key")  # fmt: skip
                found[name] = x
        return found

    def rebuild(self, tree: Any, arrays: Mapping[str, np.ndarray], dtype: str | None) -> Any:
        """The tree with other values: floats in a format, or in their own."""

        def leaf(path: Any, x: Any) -> Any:
            if not is_float_leaf(x):
                return x
            values = arrays[self.path_name(path)]
            if is_complex := jax.numpy.iscomplexobj(x):
                values = to_complex(values)
            wide = "complex128" if is_complex and dtype else dtype
            return jax.numpy.asarray(values, wide or x.dtype).reshape(x.shape)

        return jax.tree_util.tree_map_with_path(leaf, tree)

    def carried(self, params: Any, arrays: Mapping[str, Any]) -> Any:
        """The parameters after a forward pass, which may have changed some: its `state/NAME`."""

        def leaf(path: Any, x: Any) -> Any:
            return arrays.get(f"state/{self.path_name(path)}", x)

        return jax.tree_util.tree_map_with_path(leaf, params)

    def given(self, params: Any) -> Any:
        """The arguments that the user's functions get."""
        return jax.tree.map(lambda c, x: x if c is None else c, self.constants, params,
                            is_leaf=lambda c: c is None)  # fmt: skip

    def transformation(self, made: Any) -> Any:
        """Returns what the user's `optimizer` made as an optax transformation of the parameters."""
        return made

    def loss(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        params = self.given(params)
        model = {"params": params, **state} if self.variables else params
        loss = self.user.call("loss", model, batch)
        if not isinstance(loss, tuple):
            return loss, state
        new = loss[1] if isinstance(loss[1], dict) else {}
        if not self.variables:
            self._require_params(new, params)
        return loss[0], {**state, **{k: v for k, v in new.items() if k in state}}

    def _require_params(self, new: dict[str, Any], tree: Any) -> None:
        """Raises a Mistake where a loss returns new values of a part of its model, for then what is
        trained must be told from what is not."""
        shapes = {name: jax.tree.map(np.shape, x) for name, x in new.items()}
        own = [f'"{name}"' for name, x in shapes.items() if isinstance(tree, dict)
               and name in tree and jax.tree.map(np.shape, tree[name]) == x]  # fmt: skip
        if own:
            raise Mistake(f"{self.user.name}: loss returns new values of the model's "
                          f"{', '.join(own)}; call what is trained \"params\", beside "
                          f"{', '.join(own)}, and they are kept and compared as state")  # fmt: skip

    def modules(self) -> dict[str, str]:
        """Path -> class: known from the calls alone."""
        return {}

    @contextlib.contextmanager
    def listening(self, tape: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.user.has("taps"):
                self.user.call("taps", tape.tap)
            if "flax.linen" in sys.modules:
                from flax import linen

                def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
                    module, method = context.module, context.method_name
                    if isinstance(module, linen.Dropout):
                        off = kwargs.get("deterministic", module.deterministic)
                        self._note_dropout(module.path, 0.0 if off else module.rate)
                        return args[0]
                    if _drops(module, linen):
                        off = getattr(module, "deterministic", False)
                        self._note_dropout(module.path, 0.0 if off else module.dropout_rate)
                        object.__setattr__(module, "dropout_rate", 0.0)  # as in attention
                    if method not in METHODS or module.scope is None:
                        return call(*args, **kwargs)
                    name = ".".join(module.path) or "(root)"
                    name += "" if method == "__call__" else f".{method}"
                    args, kwargs = tape.begin(name, type(module).__name__, (args, kwargs))
                    return tape.end(call(*args, **kwargs))

                stack.enter_context(linen.intercept_methods(intercept))
            yield

    def _note_dropout(self, path: Any, rate: float) -> None:
        if rate:
            self.drops.setdefault(".".join(map(str, path)) or "(root)", float(rate))

    def outputs(self, params: Any, state: Any, batch: Any) -> Any:
        """Returns what the program's function `outputs` gives."""
        params = self.given(params)
        model = {"params": params, **state} if self.variables else params
        return self.user.call("outputs", model, batch)


class NnxModel(Model):
    """The module is taken apart into its graph, parameters and the rest."""

    def __init__(self, user: User, built: Any) -> None:
        from flax import nnx

        # A method of the module before flax 0.11.
        inside: Any = nnx.iter_modules if hasattr(nnx, "iter_modules") else type(built).iter_modules
        self.user, self.variables, self.drops = user, False, {}
        self.moved, self.sets = {}, set()
        self.graph: Any
        self.named: dict[str, str] = {}
        for path, module in inside(built):
            off = getattr(module, "deterministic", False)
            if isinstance(module, nnx.Dropout):  # a call's own argument would go before
                self._note_dropout(path, 0.0 if off else module.rate)
                module.deterministic, module.rate = True, 0.0
            elif _drops(module, nnx):
                self._note_dropout(path, 0.0 if off else module.dropout_rate)
                module.dropout_rate = 0.0
            name = ".".join(map(str, path)) or "(root)"
            module.lockstep_name = name  # static, so it stays with it
            self.named[name] = type(module).__name__
        self.classes = {type(module) for _, module in inside(built)}
        parts: Any = nnx.split(built, nnx.Param, ...)
        self.graph, self.params, self.state = parts

    def path_name(self, path: Any) -> str:
        """Without what a variable's array is called inside it, which Flax 0.8 does otherwise."""
        return super().path_name(path).removesuffix(".value").removesuffix(".raw_value")

    def given(self, params: Any) -> Any:
        """An `nnx.Optimizer` is made of a module, an optax transformation of anything."""
        from flax import nnx

        return nnx.merge(self.graph, params, self.state)

    def transformation(self, made: Any) -> Any:
        """Returns the optax transformation of an `nnx.Optimizer`: it moves the variables that its
        `wrt` selects, and no others.

        Raises:
            Mistake: `wrt` selects variables that are no `nnx.Param`.
        """
        from flax import nnx

        wrt = getattr(made, "wrt", nnx.Param)
        if wrt is nnx.Param:
            return getattr(made, "tx", made)
        # A method of the state in an older flax.
        select: Any = getattr(nnx, "filter_state", lambda state, filters: state.filter(filters))
        if self.flat(select(self.state, wrt)):
            raise Mistake(f"{self.user.name}: the optimizer's wrt selects variables that are no "
                          "nnx.Param; make nnx.Param of what is trained")  # fmt: skip

        def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            moved, state = made.tx.update(select(grads, wrt), state, select(params, wrt))
            by_name = self.flat(moved)

            def leaf(path: Any, x: Any) -> Any:
                return by_name.get(self.path_name(path), jax.numpy.zeros_like(x))

            return jax.tree_util.tree_map_with_path(leaf, params), state

        return SimpleNamespace(init=lambda params: made.tx.init(select(params, wrt)), update=update)

    def loss(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        from flax import nnx

        # Made anew, for variables may be changed only at the level of tracing that made them.
        params, state = jax.tree_util.tree_map(lambda x: x, (params, state))
        former = self.flat(params)  # now, for the module may have the same variables
        model = nnx.merge(self.graph, params, state)
        loss = self.user.call("loss", model, batch)
        parts: Any = nnx.split(model, nnx.Param, ...)
        self.moved = {n: x for n, x in self.flat(parts[1]).items() if x is not former[n]}
        if parts[0] != self.graph:
            self.sets.add("an attribute of the model")
        return (loss[0] if isinstance(loss, tuple) else loss), parts[2]

    def outputs(self, params: Any, state: Any, batch: Any) -> Any:
        from flax import nnx

        params, state = jax.tree_util.tree_map(lambda x: x, (params, state))
        return self.user.call("outputs", nnx.merge(self.graph, params, state), batch)

    def modules(self) -> dict[str, str]:
        return self.named

    @contextlib.contextmanager
    def listening(self, tape: Any) -> Iterator[None]:
        former: list[tuple[type, str, Any]] = []
        for cls in self.classes:
            for method in METHODS:
                if method in vars(cls):
                    former.append((cls, method, vars(cls)[method]))
                    setattr(cls, method, wrapped(vars(cls)[method], method, tape))
        if self.user.has("taps"):
            self.user.call("taps", tape.tap)
        try:
            yield
        finally:
            for cls, method, function in former:
                setattr(cls, method, function)


def wrapped(function: Callable[..., Any], method: str, tape: Any) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = vars(self).get("lockstep_name")
        if name is None:
            return function(self, *args, **kwargs)
        name += "" if method == "__call__" else f".{method}"
        args, kwargs = tape.begin(name, type(self).__name__, (args, kwargs))
        return tape.end(function(self, *args, **kwargs))

    return call


def _drops(module: Any, flax: Any) -> bool:
    """Says if a module is one of Flax's that drop out by a rate of their own: its attention. In
    another module a `dropout_rate` may be anything, such as a factor, and what drops out by it is a
    module of its own."""
    names = ("MultiHeadDotProductAttention", "MultiHeadAttention")
    kinds = tuple(getattr(flax, name) for name in names if hasattr(flax, name))
    return isinstance(module, kinds) and isinstance(module.dropout_rate, float)


def is_float_leaf(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


def _is_variables(built: Any) -> bool:
    try:
        return "params" in built and hasattr(built, "items")
    except TypeError:
        return False
