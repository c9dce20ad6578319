"""The points of a JAX program: what passes them is recorded, or replaced by what is given."""

from __future__ import annotations

from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp

from lockstep_recorder.calls import Calls


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
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) and hasattr(x, "reshape")


def first_float(nest: Any) -> Any:
    return next((x for x in jax.tree.leaves(nest) if is_float(x)), None)
