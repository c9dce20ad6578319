"""One optimizer step over a window of micro-batches, as one pure compiled function.

A stage is a method of `Trainer`: micro_batch_loss, backward, unscale, update; update_scale, report.
The optimizer clips, and updates with the last micro-batch. One decision per optimizer step: if any
gradient of any micro-batch was not finite, nothing moves but the scale.
"""

import math
import re
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax
from flax import nnx, traverse_util

from jax_impl.dropout import Dropout
from jax_impl.model import GPT, Tap, add_slot, mean_loss, no_tap
from jax_impl.optim import by_tensor, optimizer, tensor_names, unstack
from jax_impl.precision import compiler_options, fused_attention, loss_scale, query_blocks
from lockstep.config import Config
from lockstep.config.policy import Dtypes
from lockstep.model.params import decays, first_backward
from lockstep.train.schedule import learning_rates
from lockstep.twin import StepResult

Params = dict[str, jax.Array]  # flat, so that dispatch costs no walk through a tree in Python
Metrics = dict[str, jax.Array]


class State(NamedTuple):
    params: Params
    optimizer: Any
    loss_scale: jax.Array
    good_steps: jax.Array
    step: jax.Array


class Model:
    """The NNX module as a pure function of a flat dict of parameters."""

    def __init__(self, config: Config, dtypes: Dtypes, device: jax.Device, *, plain: bool = False):
        """Abstract: no parameter is allocated. `plain` is unrolled and keeps everything."""
        fused, blocks = fused_attention(config, dtypes, device), query_blocks(config)
        remat = "none" if plain else config.execution.remat
        self.scan = not plain and scans_layers(config)
        make = partial(
            GPT, config.model, dtypes, fused=fused, blocks=blocks, remat=remat, scan=self.scan
        )
        self.dtypes = dtypes
        self.graph, shapes = nnx.split(nnx.eval_shape(make))
        self.abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtypes.param), shapes)
        flat = traverse_util.flatten_dict(nnx.to_pure_dict(self.abstract))
        self.paths = {".".join(map(str, path)): path for path in flat}
        self.shapes = {".".join(map(str, path)): leaf for path, leaf in flat.items()}

    def __call__(
        self, params: Params, tokens: jax.Array, dropout: Dropout | None = None, tap: Tap = no_tap
    ) -> jax.Array:
        tree = traverse_util.unflatten_dict({self.paths[name]: a for name, a in params.items()})
        state = jax.tree.map(lambda x: x, self.abstract)  # a copy: replacing is in place
        nnx.replace_by_pure_dict(state, tree)
        return nnx.merge(self.graph, state)(tokens, dropout, tap)

    def loss(
        self, params: Params, batch: jax.Array, dropout: Dropout | None = None, tap: Tap = no_tap
    ) -> jax.Array:
        """Mean loss of (B, T+1) tokens."""
        return mean_loss(self(params, batch[:, :-1], dropout, tap), batch[:, 1:], self.dtypes)


def scans_layers(config: Config) -> bool:
    layers = config.execution.layers
    return layers == "scan" or (layers == "auto" and config.model.n_layer >= 24 and config.alike)


def jit_method(function: Callable) -> Callable:
    """A method of the state and tokens, compiled; it is called with the tokens alone."""

    def method(self: Any, tokens: jax.Array) -> Any:
        name = function.__name__
        if name not in self.compiled:
            self.compiled[name] = self.jit(partial(function, self))
        return self.compiled[name](self.state, tokens)

    return wraps(function)(method)


class Trainer:
    """What a step changes, and the step that changes it."""

    state: State

    def __init__(self, config: Config, device: jax.Device) -> None:
        self.config, self.device = config, device
        self.dtypes, self.eval_dtypes = config.dtypes, config.eval_dtypes
        self.model = Model(config, self.dtypes, device)
        self.eval_model = Model(config, self.eval_dtypes, device)
        mask = {name: decays(name.replace("kernel", "weight")) for name in self.model.shapes}
        self.optimizer = optimizer(config.optim, mask, self.dtypes.param)
        self.rates = learning_rates(config.optim)
        options = compiler_options(config.precision, device)
        self.jit = partial(jax.jit, compiler_options=options)
        self.compiled: dict[str, Any] = {"step": self.jit(self.step_function, donate_argnums=0)}

    def compile(self) -> None:
        """Compiles the step ahead of time, for the shapes it will see."""
        optim, context = self.config.optim, self.config.model.context
        shape = (optim.accum, optim.batch_size, context + 1)
        window = jax.ShapeDtypeStruct(shape, jnp.int32)
        self.compiled["step"] = self.compiled["step"].lower(self.state, window).compile()

    def step(self, window: jax.Array) -> Callable[[], StepResult]:
        """Window (N, B, T+1) -> a call that waits for the result."""
        self.state, metrics = self.compiled["step"](self.state, window)
        return self.report(metrics)

    def step_function(self, state: State, window: jax.Array) -> tuple[State, Metrics]:
        scale = loss_scale(self.config.precision, state.loss_scale, state.good_steps)
        state = state._replace(step=state.step + 1)
        params, opt_state, finite, losses = self.accumulate(state, window, scale)
        new_state = State(params, opt_state, *self.update_scale(state, scale, finite), state.step)
        return new_state, self.metrics(state, new_state, losses.sum(), finite)

    def accumulate(
        self, state: State, window: jax.Array, scale: jmp.LossScale
    ) -> tuple[Params, Any, jax.Array, jax.Array]:
        """Hands each micro-batch's gradient to the optimizer, which updates with the last one.

        Returns the parameters, the optimizer's state, `finite` (P,) by tensor, and the losses (N,).
        """
        accum = len(window)

        def micro_batch(carry, numbered_batch):  # type: ignore[no-untyped-def]
            params, opt_state, finite = carry
            micro_step, batch = numbered_batch
            dropout = self.dropout(state.step, micro_step)
            share = partial(self.micro_batch_loss, batch=batch, accum=accum, dropout=dropout)
            loss, grads = self.backward(share, params, scale)
            grads, finite = self.unscale(grads, finite, scale)
            do_step = finite.all() & (micro_step == accum - 1)
            params, opt_state = self.update(grads, opt_state, params, do_step)
            return (params, opt_state, finite), loss

        carry = (state.params, state.optimizer, jnp.ones(len(tensor_names(state.params)), bool))
        if accum == 1:
            carry, losses = micro_batch(carry, (0, window[0]))
        else:
            carry, losses = jax.lax.scan(micro_batch, carry, (jnp.arange(accum), window))
        return *carry, losses

    def micro_batch_loss(
        self, params: Params, batch: jax.Array, accum: int, dropout: Dropout
    ) -> jax.Array:
        """One micro-batch's part of the window's mean loss."""
        return self.model.loss(params, batch, dropout) / accum

    def backward(
        self, loss: Callable[[Params], jax.Array], params: Params, scale: jmp.LossScale
    ) -> tuple[jax.Array, Params]:
        """The loss, and the scaled gradients."""

        def scaled_loss(params: Params) -> tuple[jax.Array, jax.Array]:
            value = loss(params)
            return scale.scale(value), value

        grads, value = jax.grad(scaled_loss, has_aux=True)(params)
        return value, grads

    def unscale(
        self, grads: Params, finite: jax.Array, scale: jmp.LossScale
    ) -> tuple[Params, jax.Array]:
        """And looks for gradients that are not finite: from the first on, all are zero."""
        grads = scale.unscale(grads)
        if self.dtypes.loss_scaling:
            finite &= by_tensor(jmp.all_finite, grads)
            grads = jax.tree.map(lambda g: jnp.where(finite.all(), g, 0), grads)
        return grads, finite

    def update(
        self, grads: Params, opt_state: Any, params: Params, do_step: jax.Array
    ) -> tuple[Params, Any]:
        """Adds to the accumulator; where `do_step`, clips the sum and takes one step of AdamW."""
        updates, opt_state = self.optimizer.update(grads, opt_state, params, do_step=do_step)
        return optax.apply_updates(params, updates), opt_state

    def update_scale(
        self, state: State, scale: jmp.LossScale, finite: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The next loss scale, and the good steps since it last changed."""
        if not self.dtypes.loss_scaling:
            return state.loss_scale, state.good_steps
        scale = scale.adjust(finite.all())
        return scale.loss_scale, scale.counter

    def dropout(self, step: jax.Array, micro_step: jax.Array) -> Dropout:
        config = self.config
        return Dropout(
            config.model.dropout, seed=config.optim.seed, step=step, micro_step=micro_step
        )

    def metrics(self, before: State, after: State, loss: jax.Array, finite: jax.Array) -> Metrics:
        norm, of_update = (
            optax.tree.get(after.optimizer, name) for name in ("grad_norm", "finite")
        )
        skipped = ~finite.all()
        return {
            "loss": loss,
            "grad_norm": jnp.where(skipped, jnp.nan, norm),
            "finite": jnp.where(skipped, finite, of_update),
            "skipped": skipped,
            "updates": update_count(before.optimizer),
            "loss_scale": before.loss_scale,
        }

    def report(self, metrics: Metrics) -> Callable[[], StepResult]:
        """Copies to the host when called."""
        finite = metrics.pop("finite")

        def wait() -> StepResult:
            host = {name: value.item() for name, value in jax.device_get(metrics).items()}
            nonfinite = "" if math.isfinite(host["grad_norm"]) else self.first_nonfinite(finite)
            rate = float(self.rates[host.pop("updates")])
            return StepResult(lr=rate, nonfinite=nonfinite, **host)

        return wait

    def first_nonfinite(self, finite: jax.Array) -> str:
        """The module whose gradient is the backward pass's first that is not finite."""
        tensors = zip(tensor_names(self.model.shapes), jax.device_get(finite), strict=True)
        modules = {module(name) for name, is_finite in tensors if not is_finite}
        return first_backward(modules, self.config.model)

    @jit_method
    def loss_and_grads(self, state: State, batch: jax.Array) -> tuple[jax.Array, Params]:
        """Mean loss and unscaled gradients of (B, T+1) tokens, as training takes them."""
        scale = loss_scale(self.config.precision, state.loss_scale, state.good_steps)
        loss, grads = self.backward(partial(self.model.loss, batch=batch), state.params, scale)
        return loss, scale.unscale(grads)

    @jit_method
    def evaluate(self, state: State, batches: jax.Array) -> jax.Array:
        """Mean loss of (M, B, T+1) tokens under the evaluation policy."""
        params = jax.tree.map(lambda p: p.astype(self.eval_dtypes.param), state.params)
        return jax.lax.map(partial(self.eval_model.loss, params), batches).mean()

    @jit_method
    def logits(self, state: State, tokens: jax.Array) -> jax.Array:
        """Tokens (B, T) -> logits (B, T, V) under the evaluation policy."""
        params = jax.tree.map(lambda p: p.astype(self.eval_dtypes.param), state.params)
        return self.eval_model(params, tokens)

    @jit_method
    def trace(self, state: State, batch: jax.Array) -> tuple[jax.Array, Params, Params, Params]:
        """(B, T+1) tokens -> loss, activations, their gradients, the parameters' gradients.

        The latter are those of unrolled layers.
        """
        plain = Model(self.config, self.dtypes, self.device, plain=True)
        scale = loss_scale(self.config.precision, state.loss_scale, state.good_steps)

        def scaled_loss(params: Params, slots: Params) -> tuple[jax.Array, Any]:
            seen: Params = {}

            def tap(name: str, x: jax.Array) -> jax.Array:
                seen[name] = x
                return add_slot(x, slots[name]) if slots else x

            loss = plain.loss(params, batch, tap=tap)
            return scale.scale(loss), (loss, seen)

        params = unstack(state.params)
        _, (_, shapes) = jax.eval_shape(scaled_loss, params, {})
        slots = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
        both = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)
        (grads, seen_grads), (loss, seen) = both(params, slots)
        # Widened first: unscaled in float16 they would flush to zero.
        wide = {n: g.astype(jnp.promote_types(g.dtype, jnp.float32)) for n, g in seen_grads.items()}
        return loss, seen, scale.unscale(wide), scale.unscale(grads)


def module(key: str) -> str:
    """blocks.0.mlp.up.kernel -> blocks.0.mlp.up, as the canonical names have it."""
    return re.sub(r"\.(kernel|scale|bias)$", "", key)


def update_count(opt_state: Any) -> jax.Array:
    """Adam's count, which is also the schedule's position."""
    return optax.tree.get_all_with_path(opt_state, "count")[0][1]
