# ruff: noqa: E501  (programs in lines)
"""JAX's operations in numpy give what JAX gives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lockstep_recorder import operations_jax
from lockstep_recorder.operations import Player
from lockstep_recorder.operations_jax import Flat, make

X = np.random.default_rng(0).normal(size=(2, 3, 4))
N = np.arange(24).reshape(2, 3, 4)
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "elementwise": lambda x, n: jnp.exp(x) + jnp.log(x * x) - jnp.tanh(-x) / jnp.sqrt(abs(x)),
    "more": lambda x, n: lax.rsqrt(x * x) * jnp.sin(x) ** 3 + x**-2 + jnp.sign(x) * jnp.maximum(x, 0.1),
    "choices": lambda x, n: jnp.where((x > 0) & (x < 1) | (n == 3), x, lax.stop_gradient(-x)),
    "many choices": lambda x, n: lax.select_n((n % 3).astype("int32"), x, 2 * x, 3 * x),
    "integers": lambda x, n: (n & 3) + n // 2 + (n > 5).astype("int64"),
    "shapes": lambda x, n: jnp.concatenate([x.T[:, ::-1], x.T[1:3, :, None, 0:1].squeeze(2).repeat(2, 2)]),
    "sums": lambda x, n: x.sum((0, 2)) + x.max(0)[:, 0] + x.min((0, 2)) + jnp.expand_dims(x[0, :, 1], 0),
    "matrices": lambda x, n: jnp.einsum("abc,dbc->bad", x, x) @ x.mean(1)[:, :3],
    "several axes": lambda x, n: jnp.einsum("abc,cbd->da", x, jnp.swapaxes(x, 0, 2)),
}  # fmt: skip


def values_of(name: str) -> dict[int, Any]:
    """The values of a program's tape, by number."""
    closed = jax.make_jaxpr(PROGRAMS[name])(X, N)
    flat = Flat()
    numbers = [flat.tape.begin(x, "batch") for x in (X, N)]
    consts = [flat.tape.begin(x, "constant") for x in closed.consts]
    flat.walk(closed.jaxpr, consts, numbers)
    player = Player(flat.tape, make)
    player.start({})
    player.play({}, list(range(len(flat.tape.values))))
    return player.known


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_operation_is_computed_as_jax_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        ours = values_of(name)
        monkeypatch.setattr(operations_jax, "function_of", lambda eqn: None)
        theirs = values_of(name)
        assert sum(type(x) is np.ndarray for x in ours.values()) > 3
        for number in theirs:
            x, y = np.asarray(ours[number]), np.asarray(theirs[number])
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-13)
