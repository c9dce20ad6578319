"""The points of a JAX program: what passes them is recorded, or replaced by what is given."""

from __future__ import annotations

from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp

from lockstep_recorder import tree
from lockstep_recorder.calls import MOST, CallLog, slot


class Tape:
    """Records what passes the points of a program, or forces it; see `TorchSide.run`.

    Args:
        slots: call -> zeros, whose gradient is what arrives at the output.
        given: `in/CALL`, `act/CALL`, `dact/CALL` -> (value, 1 where it is forced and 0 where not).
    """

    def __init__(self, slots: Any = None, given: Any = None) -> None:
        self.calls = CallLog()
        self.slots, self.given = slots or {}, given or {}
        self.conditions: Any = None  # gets what `jax_conditions` finds, where it is a dict
        self.traces: set[int] = set()  # of the values that may be returned: not those of a vmap

    def begin(self, module: str, kind: str, inputs: Any) -> Any:
        """The inputs, those floats of them forced that are given."""
        leaves, nest = jax.tree.flatten(inputs)
        places = [i for i, x in enumerate(leaves) if is_float(x)]
        if places and not self._is_ours(leaves[places[0]]):
            self.calls.open.append("")  # such as flax's look at a scan's body before it runs
            return inputs
        call = self.calls.begin(module, kind)
        for at, place in enumerate(places[:MOST]):
            key = f"in/{slot(call, at)}"
            x = self.calls.arrays[key] = leaves[place]
            if key in self.given:
                leaves[place] = replace(x, *self.given[key])
        return jax.tree.unflatten(nest, leaves)

    def end(self, y: Any) -> Any:
        call = self.calls.end()
        if not call:
            return y
        named, nest = jax.tree_util.tree_flatten_with_path(y)
        leaves = [x for _, x in named]
        places = [i for i, x in enumerate(leaves) if is_float(x)]
        if places and not self._is_ours(leaves[places[0]]):
            self.calls.drop(call)  # such a look, at what takes nothing of the scan's
            return y
        if not self.calls.open:
            self._ship(call, [path_of(path) for path, _ in named], leaves, places[:MOST])
        for at, place in enumerate(places[:MOST]):
            leaves[place] = self.point(slot(call, at), leaves[place])
        return jax.tree.unflatten(nest, leaves)

    def _ship(self, call: str, paths: list[str], leaves: list[Any], places: list[int]) -> None:
        """Notes the places of what an outermost call gives, and records what no slot has."""
        for at, place in enumerate(places):
            self.calls.paths[f"act/{slot(call, at)}"] = paths[place]
        others = [
            found
            for at, (path, x) in enumerate(zip(paths, leaves))
            if at not in places
            for found in tree.leaves(x, path)
        ]
        for at, (path, x) in enumerate(others, len(places)):
            key = f"more/{slot(call, at)}"
            self.calls.arrays[key] = jnp.asarray(x)
            self.calls.paths[key] = path

    def tap(self, name: str, x: Any) -> Any:
        """The user's own point; under `jax.vmap` it sees all of the batch, its axis first."""
        if not is_float(x):
            return x
        if type(getattr(x, "_trace", None)).__name__ == "BatchTrace":
            return self._tap_batch(name)(x)
        self.begin(name, "tap", ())
        return self.end(x)

    def _tap_batch(self, name: str) -> Any:
        point = jax.custom_batching.custom_vmap(lambda x: x)

        @point.def_vmap
        def outside(size: int, batched: Any, x: Any) -> Any:
            return self.tap(name, x), True

        return point

    def point(self, name: str, y: Any) -> Any:
        self.calls.arrays[f"act/{name}"] = y
        if name not in self.slots:
            given = self.given.get(f"act/{name}")
            return replace(y, *given) if given else y
        act, dact = (self.given[f"{kind}/{name}"] for kind in ("act", "dact"))
        return force(y, self.slots[name], *act, *dact)

    def is_own(self, x: Any) -> bool:
        """Says if a value may be returned: it is none of an inner program's, such as a vmap's."""
        trace = getattr(x, "_trace", None)
        return trace is None or level_of(trace) in self.traces

    def _is_ours(self, x: Any) -> bool:
        trace = getattr(x, "_trace", None)
        return trace is None or not self.traces or level_of(trace) in self.traces


def path_of(keys: tuple[Any, ...]) -> str:
    """The path of a leaf, as `tree.leaves` has it."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
                    for key in keys)  # fmt: skip


def level_of(trace: Any) -> int:
    """JAX before 0.4.36 makes a new trace for each operation, of one `main`."""
    return id(getattr(trace, "main", None) or trace)


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


def is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact) and hasattr(x, "reshape")
