"""The conv net and its optimizer step in plain JAX with optax, and no Flax.

`flax.nnx.BatchNorm` would not do: its running variance is the biased one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jax_impl.extra.device import configure
from jax_impl.optim import adamw
from jax_impl.precision import compiler_options, make_policy
from lockstep.config import Config
from lockstep.config.policy import Dtypes
from lockstep.data.batch import Batch
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.train.schedule import learning_rates
from lockstep.twin import BatchTrace, StepResult
from parity_tests.ladder.conv import (
    ACTIVATIONS,
    CORRECTION,
    DECAYED,
    EPS,
    GROUP,
    MOMENTUM,
    SHAPES,
    STATISTICS,
    WEIGHTS,
    examples,
)

Params = dict[str, Array]  # canonical names; convolutions (H, W, in, out), matrices (in, out)
Examples = tuple[Array, Array]  # images (..., B, 8, 8) float32, labels (..., B) int32
Tap = Callable[[str, Array], Array]
LAYOUTS = ("NHWC", "HWIO", "NHWC")


class Net:
    """Images (B, 8, 8) -> logits (B, 16) in the compute dtype, and the new running statistics."""

    def __init__(self, roles: Dtypes, *, train: bool = True, tap: Tap = lambda _, x: x) -> None:
        self.policy, self.train, self.tap = make_policy(roles.policy), train, tap

    def __call__(self, params: Params, images_BHW: Array) -> tuple[Array, Params]:
        x_BHWC, moved1 = self.block("1", params, images_BHW[..., None], stride=1)
        x_BHWC, moved2 = self.block("2", params, x_BHWC, stride=2)
        pool_BC = self.tap("pool", x_BHWC.mean((1, 2)))
        logits_BC = self.linear(pool_BC, params["logits.weight"], params["logits.bias"])
        return self.tap("logits", logits_BC), moved1 | moved2

    def block(self, n: str, params: Params, x_BHWC: Array, stride: int) -> tuple[Array, Params]:
        x_BHWC = self.tap(f"conv{n}", self.conv(x_BHWC, params[f"conv{n}.weight"], stride))
        x_BHWC, moved = self.ghost_norm(f"bn{n}", params, x_BHWC)
        return jax.nn.relu(self.tap(f"bn{n}", x_BHWC)), moved

    def conv(self, x_BHWC: Array, kernel: Array, stride: int) -> Array:
        """Convolves in the compute dtype, sums in the output dtype and rounds once."""
        x, kernel = self.policy.cast_to_compute((x_BHWC, kernel))
        # Left alone, XLA's CPU backend sums float16 in float16: twice torch's error.
        x, kernel = self.policy.cast_to_output((x, kernel))
        # Not "SAME", which pads the far sides alone where the stride is 2.
        y = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), [(1, 1), (1, 1)], dimension_numbers=LAYOUTS
        )
        return self.policy.cast_to_compute(y)

    def ghost_norm(self, name: str, params: Params, x_BHWC: Array) -> tuple[Array, Params]:
        """BatchNorm in the output dtype: of G groups of GROUP rows, which are R pixels."""
        weight, bias, mean, var = (
            params[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        rows = GROUP if GROUP and self.train else len(x_BHWC)
        shape = (len(x_BHWC) // rows, -1, x_BHWC.shape[-1])
        x_GRC = self.policy.cast_to_output(x_BHWC).reshape(shape)
        means_GC, vars_GC = moments(x_GRC) if self.train else (mean[None], var[None])
        scales_GC = weight * jax.lax.rsqrt(vars_GC + EPS)
        y_GRC = x_GRC * scales_GC[:, None] + (bias - means_GC * scales_GC)[:, None]
        unbias = x_GRC.shape[1] / (x_GRC.shape[1] - CORRECTION)
        for group_mean, group_var in zip(means_GC, vars_GC):
            mean = (1 - MOMENTUM) * mean + MOMENTUM * group_mean
            var = (1 - MOMENTUM) * var + MOMENTUM * group_var * unbias
        moved = {f"{name}.running_mean": mean, f"{name}.running_var": var}
        return y_GRC.reshape(x_BHWC.shape), moved

    def linear(self, x_BC: Array, kernel: Array, bias: Array) -> Array:
        """Summed, bias included, in the output dtype and rounded once: a GEMM with an epilogue."""
        x, kernel, bias = self.policy.cast_to_compute((x_BC, kernel, bias))
        y = jnp.matmul(x, kernel, preferred_element_type=self.policy.output_dtype)
        return self.policy.cast_to_compute(y + self.policy.cast_to_output(bias))


def moments(x_GRC: Array) -> tuple[Array, Array]:
    """Mean and biased variance of each group, (G, C)."""
    means_GC = exact_mean(x_GRC)
    return means_GC, exact_mean(jnp.square(x_GRC - means_GC[:, None]))


def exact_mean(x_GRC: Array) -> Array:
    """torch sums float32 in float64 here, on a CPU; to average what is left comes to the same."""
    means_GC = x_GRC.mean(1)
    return means_GC + jax.lax.stop_gradient((x_GRC - means_GC[:, None]).mean(1))


def mean_loss(net: Net, params: Params, batch: Examples) -> tuple[Array, Params]:
    """Mean cross-entropy in nats, in the output dtype; and the new running statistics."""
    images, labels = batch
    logits, moved = net(params, images)
    logits = net.policy.cast_to_output(logits)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), moved


def norms(grads: Params) -> Array:
    """Returns the norm of each tensor, (P,)."""
    return jnp.stack([optax.tree.norm(x) for x in jax.tree.leaves(grads)])


class State(NamedTuple):
    """The state that a step changes on the device."""

    weights: Params
    optimizer: Any
    statistics: Params


class JaxTwin:
    """`lockstep.twin.Twin`, as far as these rungs ask."""

    framework = "jax"
    synchronous = True

    def __init__(self, config: Config) -> None:
        self.config, self.roles, self.device = config, config.dtypes, configure(config)
        decay = {name: name in DECAYED for name in WEIGHTS}
        self.adamw = adamw(config.optim, decay, self.roles.param, norms)
        self.rates = learning_rates(config.optim)
        options = compiler_options(config.precision, self.device.platform)
        jit = partial(jax.jit, compiler_options=options)
        self.stepped, self.graded = jit(self.step_function), jit(self.grads_function)
        self.evaluated, self.traced = jit(self.evaluate_function), jit(self.trace_function)

    def describe(self) -> dict[str, Any]:
        return {"device": "cpu", "versions": {"jax": jax.__version__, "optax": optax.__version__}}

    def load(self, state: TrainState) -> None:
        configure(self.config)  # of the process, in which another twin may have been built since
        self.steps, self.updates = state.step, state.updates
        params, mu, nu = (self.from_canonical(x) for x in (state.params, state.mu, state.nu))
        weights = {name: params[name] for name in WEIGHTS}
        moved = {"mu": mu, "nu": nu, "count": jnp.int32(state.updates)}
        loaded = State(
            weights=weights,
            optimizer=optax.tree.set(self.adamw.init(weights), **moved),
            statistics={name: params[name] for name in STATISTICS},
        )
        # To where a step leaves its results, or the second step would be compiled anew.
        self.current = jax.device_put(loaded, self.device)

    def from_canonical(self, arrays: Arrays) -> Params:
        return {
            name: jnp.array(x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T, self.roles.param)
            for name, x in arrays.items()
        }

    def state(self) -> TrainState:
        weights, optimizer, statistics = self.current
        return TrainState(
            params=to_canonical(weights | statistics, list(SHAPES)),
            mu=to_canonical(optax.tree.get(optimizer, "mu")),
            nu=to_canonical(optax.tree.get(optimizer, "nu")),
            step=self.steps,
            updates=self.updates,
            loss_scale=1.0,
            good_steps=0,
        )

    def place(self, window: Batch) -> Examples:
        return jax.device_put(examples(window), self.device)

    def step(self, window: Examples) -> Callable[[], StepResult]:
        rate = float(self.rates[self.updates])
        self.current, loss, norm = self.stepped(self.current, window)
        self.steps, self.updates = self.steps + 1, self.updates + 1
        result = StepResult(loss.item(), norm.item(), rate, 1.0, False)
        return lambda: result

    def step_function(self, state: State, window: Examples) -> tuple[State, Array, Array]:
        """The new state, the loss, and the gradient's norm."""
        net, accum = Net(self.roles), len(window[0])

        def micro_batch(carry: Any, batch: Examples) -> tuple[Any, Array]:
            total, statistics = carry

            def share(weights: Params) -> tuple[Array, Params]:
                loss, moved = mean_loss(net, weights | statistics, batch)
                return loss / accum, moved

            (loss, moved), grads = jax.value_and_grad(share, has_aux=True)(state.weights)
            return (jax.tree.map(jnp.add, total, grads), moved), loss

        carry = jax.tree.map(jnp.zeros_like, state.weights), state.statistics
        (grads, statistics), losses = jax.lax.scan(micro_batch, carry, window)
        updates, optimizer = self.adamw.update(grads, state.optimizer, state.weights)
        new = State(optax.apply_updates(state.weights, updates), optimizer, statistics)
        return new, losses.sum(), optax.tree.get(optimizer, "grad_norm")

    def loss_and_grads(self, batch: Batch) -> tuple[float, Arrays]:
        loss, grads = self.graded(self.current, self.place(batch))
        return loss.item(), to_canonical(grads)

    def grads_function(self, state: State, batch: Examples) -> tuple[Array, Params]:
        loss, _, _, grads = self.trace_function(state, batch, {})
        return loss, grads

    def evaluate(self, batches: Batch) -> float:
        """With the running statistics."""
        params = self.current.weights | self.current.statistics
        return self.evaluated(params, self.place(batches)).item()

    def evaluate_function(self, params: Params, batches: Examples) -> Array:
        roles = self.config.eval_dtypes
        net = Net(roles, train=False)
        params = {name: x.astype(roles.param) for name, x in params.items()}
        return jax.lax.map(lambda batch: mean_loss(net, params, batch)[0], batches).mean()

    def trace(self, batch: Batch) -> BatchTrace:
        placed = self.place(batch)
        _, shapes, _, _ = jax.eval_shape(self.trace_function, self.current, placed, {})
        slots = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
        loss, seen, seen_grads, grads = self.traced(self.current, placed, slots)
        # Channels first, as in torch; and in order, for jit has sorted the names.
        seen, seen_grads = (
            {name: np.moveaxis(np.asarray(x[name]), -1, 1) for name in ACTIVATIONS}
            for x in (seen, seen_grads)
        )
        return BatchTrace(loss.item(), seen, seen_grads, to_canonical(grads))

    def trace_function(
        self, state: State, batch: Examples, slots: Params
    ) -> tuple[Array, Params, Params, Params]:
        """Loss, activations, their gradients, the weights'.

        `slots` are zeros added to the activations, to have their gradients; or none.
        """

        def tapped(weights: Params, slots: Params) -> tuple[Array, Params]:
            seen: Params = {}

            def tap(name: str, x: Array) -> Array:
                seen[name] = x
                return x + slots[name] if slots else x

            loss, _ = mean_loss(Net(self.roles, tap=tap), weights | state.statistics, batch)
            return loss, seen

        both = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)
        (loss, seen), (grads, seen_grads) = both(state.weights, slots)
        return loss, seen, make_policy(self.roles.policy).cast_to_output(seen_grads), grads


def to_canonical(params: Params, names: list[str] = WEIGHTS) -> Arrays:
    host = {name: np.asarray(params[name]) for name in names}
    return {name: x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T for name, x in host.items()}


def build(config: Config) -> JaxTwin:
    return JaxTwin(config)
