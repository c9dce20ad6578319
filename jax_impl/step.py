"""One optimizer step over a window of micro-batches, as one pure compiled function.

A stage is a method of `Trainer`: micro_batch_loss, backward; unscale, clip, update, update_scale,
report. One decision per optimizer step: if any gradient of any micro-batch was not finite, nothing
moves but the scale.

To clip is here a part of the update, which comes with the last micro-batch.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from jax import Array

from lockstep.config import Config
from lockstep.config.policy import Dtypes
from lockstep.data.batch import Batch
from lockstep.model.params import decays, first_nonfinite
from lockstep.model.stacked import in_first_layer, scans_layers, tensor_names
from lockstep.train.schedule import learning_rates
from lockstep.twin import StepResult

from .accumulate import optimizer
from .dropout import Dropout
from .extra.formats.delayed import join, record, scales
from .extra.mesh.mesh import everywhere, in_mesh, make_mesh, place_rows, shardings
from .extra.scan import by_tensor
from .loss import mean_loss, mean_loss_in_chunks
from .model import GPT, Tap, no_tap
from .precision import (
    attention_kernel,
    choose_products,
    compiler_options,
    keep_biases,
    loss_scale,
)
from .pure import Params, Pure, State, jit_method


def make_model(config: Config, dtypes: Dtypes, device: jax.Device, *, plain: bool = False) -> Pure:
    """The model of one policy, not yet loaded; `plain` keeps everything."""
    dtypes = keep_biases(choose_products(dtypes, device), config.precision)
    kernel = attention_kernel(config, dtypes, device)
    remat = "none" if plain else config.execution.remat
    scan = not plain and scans_layers(config)  # no tap can leave a scan
    make = partial(GPT, config.model, dtypes, kernel=kernel, remat=remat, scan=scan)
    return Pure(make, dtypes.param)


def batch_loss(
    model: GPT,
    batch: Batch,
    dtypes: Dtypes,
    dropout: Dropout | None = None,
    tap: Tap = no_tap,
    chunks: int = 1,
    over: Array | None = None,
) -> Array:
    """Mean loss of a batch (B, T); the logits of all, or of a chunk of rows at a time. Where some
    targets do not count, it is a sum over `over`: left out, over those that count."""
    tokens, targets, counts, segments = batch
    over = mean_count(batch.select(None)) if over is None else over
    if chunks > 1:
        x_RD = model.rows(tokens, dropout, tap, segments)
        targets_R, counts_R = targets.reshape(-1), None if counts is None else counts.reshape(-1)
        how = (dtypes, chunks, counts_R, over)
        return mean_loss_in_chunks(model.logits, x_RD, targets_R, *how)
    return mean_loss(model(tokens, dropout, tap, segments), targets, dtypes, counts, over)


def mean_count(window: Batch) -> Array | None:
    """How many targets count in a micro-batch of a window, on average; None where all do.

    At least one in the whole window: of one without any the loss and its gradient are 0.
    """
    if window.counts is None:
        return None
    return jnp.maximum(window.counts.sum(), 1) / len(window.counts)


class Trainer:
    """What a step changes, and the step that changes it."""

    state: State

    def __init__(self, config: Config, device: jax.Device) -> None:
        self.config, self.device = config, device
        self.dtypes, self.eval_dtypes = config.dtypes, config.eval_dtypes
        self.mesh = make_mesh(config, device)
        self.model = make_model(config, self.dtypes, device)
        self.eval_model = make_model(config, self.eval_dtypes, device)
        trained = set(config.trained)  # of stacked layers the first stands for all
        self.params = {n: x for n, x in self.model.shapes.items() if in_first_layer(n) in trained}
        self.names = tensor_names(self.params)
        mask = {n: decays(in_first_layer(n), config.optim.decay) for n in self.params}
        self.optimizer = optimizer(config.optim, mask, self.dtypes.param)
        self.rates = learning_rates(config.optim)
        options = compiler_options(config.precision, device)
        self.jit = in_mesh(partial(jax.jit, compiler_options=options), self.mesh)
        self.compiled: dict[str, Any] = {"step": self.jit(self.step_function, donate_argnums=0)}

    def compile(self, window: Batch) -> None:
        """Compiles the step ahead of time, for windows like this one."""
        self.compiled["step"] = self.compiled["step"].lower(self.state, window).compile()

    def place(self, batch: Batch) -> Batch:
        return batch.map_arrays(self.place_array)

    def place_array(self, x: np.ndarray) -> Array:
        """(..., B, T) of all devices."""
        return place_rows(x, self.mesh) if self.mesh else jax.device_put(x, self.device)

    def place_state(self, state: State) -> State:
        return jax.device_put(state, shardings(state, self.mesh) if self.mesh else self.device)

    def step(self, window: Batch) -> Callable[[], StepResult]:
        """Window (N, B, T) -> a call that waits for the result."""
        self.state, metrics = self.compiled["step"](self.state, window)
        return self.report(metrics)

    def step_function(self, state: State, window: Batch) -> tuple[State, tuple[Array, ...]]:
        scale = self.scale(state)
        state = state._replace(step=state.step + 1)
        params, opt_state, finite, losses, found = self.accumulate(state, window, scale)
        scalars = *self.update_scale(state, scale, finite), state.step
        amaxes = self.update_amaxes(state, scale, finite, found)
        new_state = State(params, opt_state, *scalars, state.frozen, amaxes)
        if self.mesh:  # as it came, so that it can be donated
            places = shardings(new_state, self.mesh)
            new_state = jax.lax.with_sharding_constraint(new_state, places)
        return new_state, self.metrics(state, new_state, losses.sum(), finite)

    def accumulate(
        self, state: State, window: Batch, scale: jmp.LossScale
    ) -> tuple[Params, Any, Array, Array, Params]:
        """Hands each micro-batch's gradient to the optimizer, which updates with the last one.

        Returns the trained parameters, the optimizer's state, `finite` (P,) by tensor, the losses
        (N,), and the amaxes of delayed scaling.
        """
        accum, over = len(window.tokens), mean_count(window)
        scales = self.scales(state)

        def micro_batch(carry, numbered_batch):  # type: ignore[no-untyped-def]
            params, opt_state, finite, found = carry
            micro_step, batch = numbered_batch
            dropout = self.dropout(state.step, micro_step)
            how = {"batch": batch, "over": over, "accum": accum, "dropout": dropout}
            share = partial(self.micro_batch_loss, **how)
            loss, grads = self.backward(lambda p: share(p | state.frozen), params | scales, scale)
            found = join(found, {name: grads.pop(name) for name in scales})
            grads, finite = self.unscale(grads, finite, scale)
            do_step = finite.all() & (micro_step == accum - 1)
            params, opt_state = self.update(grads, opt_state, params, do_step)
            return (params, opt_state, finite, found), loss

        finite, none = jnp.ones(len(self.names), bool), jax.tree.map(jnp.zeros_like, scales)
        carry = (state.params, state.optimizer, finite, none)
        if accum == 1:
            carry, losses = micro_batch(carry, (0, window.select(0)))
        else:
            carry, losses = jax.lax.scan(micro_batch, carry, (jnp.arange(accum), window))
        params, opt_state, finite, found = carry
        return params, opt_state, finite, losses, found

    def micro_batch_loss(
        self, params: Params, batch: Batch, over: Array | None, accum: int, dropout: Dropout
    ) -> Array:
        """One micro-batch's part of the window's mean loss."""
        model, chunks = self.model(params), self.config.chunks
        return batch_loss(model, batch, self.dtypes, dropout, chunks=chunks, over=over) / accum

    def backward(
        self, loss: Callable[[Params], Array], params: Params, scale: jmp.LossScale
    ) -> tuple[Array, Params]:
        """The loss, and the scaled gradients."""

        def scaled_loss(params: Params) -> tuple[Array, Array]:
            value = loss(params)
            return scale.scale(value), value

        grads, value = jax.grad(scaled_loss, has_aux=True)(params)
        return value, grads

    def unscale(self, grads: Params, finite: Array, scale: jmp.LossScale) -> tuple[Params, Array]:
        """And looks for gradients that are not finite."""
        grads = scale.unscale(grads)
        if self.dtypes.loss_scaling:  # from the first that is not finite on, all are zero
            finite &= by_tensor(jmp.all_finite, grads)
            grads = jax.tree.map(lambda g: jnp.where(finite.all(), g, 0), grads)
        return grads, finite

    def update(
        self, grads: Params, opt_state: Any, params: Params, do_step: Array
    ) -> tuple[Params, Any]:
        """Adds to the accumulator; where `do_step`, clips the sum and takes one step of AdamW."""
        updates, opt_state = self.optimizer.update(grads, opt_state, params, do_step=do_step)
        return optax.apply_updates(params, updates), opt_state

    def update_scale(
        self, state: State, scale: jmp.LossScale, finite: Array
    ) -> tuple[Array, Array]:
        """The next loss scale, and the good steps since it last changed."""
        if not self.dtypes.loss_scaling:
            return state.loss_scale, state.good_steps
        scale = scale.adjust(finite.all())
        return scale.loss_scale, scale.counter

    def update_amaxes(
        self, state: State, scale: jmp.LossScale, finite: Array, found: Params
    ) -> Params:
        """Of delayed scaling: what this step has seen, unless it was skipped, for the next one's
        scales."""
        recorded = record(state.amaxes, found, scale.loss_scale)
        return jax.tree.map(partial(jnp.where, finite.all()), recorded, state.amaxes)

    def scales(self, state: State) -> Params:
        """Of delayed scaling, which the model takes as parameters; their gradients are amaxes."""
        return scales(state.amaxes, self.scale(state).loss_scale)

    def scale(self, state: State) -> jmp.LossScale:
        return loss_scale(self.config.precision, state.loss_scale, state.good_steps)

    def dropout(self, step: Array, micro_step: Array) -> Dropout:
        config = self.config
        return Dropout(
            config.model.dropout,
            seed=config.optim.seed,
            step=step,
            micro_step=micro_step,
        )

    def metrics(self, before: State, after: State, loss: Array, finite: Array) -> tuple[Array, ...]:
        norm, norms = (optax.tree.get(after.optimizer, name) for name in ("grad_norm", "norms"))
        if self.mesh:
            norms = jax.lax.with_sharding_constraint(norms, everywhere(self.mesh))
        skipped = ~finite.all()
        return (
            loss,
            jnp.where(skipped, jnp.nan, norm),
            update_count(before.optimizer),
            before.loss_scale,
            skipped,
            jnp.where(skipped, jnp.where(finite, 0, jnp.nan), norms),
        )

    def report(self, metrics: tuple[Array, ...]) -> Callable[[], StepResult]:
        """Copies to the host when called."""

        def wait() -> StepResult:
            *scalars, norms = jax.device_get(metrics)
            loss, norm, updates, scale, skipped = (x.item() for x in scalars)
            rate = float(self.rates[updates])
            norms = dict(zip(self.names, norms.tolist(), strict=True))
            if math.isfinite(norm):
                return StepResult(loss, norm, rate, scale, skipped, norms=norms)
            nonfinite = self.first_nonfinite(map(math.isfinite, norms.values()))
            return StepResult(loss, norm, rate, scale, skipped, nonfinite)

        return wait

    def first_nonfinite(self, finite: Iterable[bool]) -> str:
        return first_nonfinite(zip(self.names, finite, strict=True), self.config.model)

    @jit_method
    def loss_and_grads(self, state: State, batch: Batch) -> tuple[Array, Params]:
        """Mean loss and unscaled gradients of one batch, as training takes them."""
        scale = self.scale(state)

        def loss(params: Params) -> Array:
            fixed, chunks = state.frozen | self.scales(state), self.config.chunks
            return batch_loss(self.model(params | fixed), batch, self.dtypes, chunks=chunks)

        value, grads = self.backward(loss, state.params, scale)
        return value, scale.unscale(grads)

    @jit_method
    def evaluate(self, state: State, batches: Batch) -> Array:
        """Mean loss of M batches under the evaluation policy."""
        model, chunks, over = self.evaluation_model(state), self.config.chunks, mean_count(batches)
        loss = partial(batch_loss, model, dtypes=self.eval_dtypes, chunks=chunks, over=over)
        return jax.lax.map(loss, batches).mean()

    @jit_method
    def logits(self, state: State, tokens: Array) -> Array:
        """Tokens (B, T) -> logits (B, T, V) under the evaluation policy."""
        return self.evaluation_model(state)(tokens)

    def evaluation_model(self, state: State) -> GPT:
        """The model's weights in the evaluation policy, which scales by what training recorded."""
        params = state.params | state.frozen
        cast = jax.tree.map(lambda p: p.astype(self.eval_dtypes.param), params)
        known = {name: state.amaxes[name] for name in self.eval_dtypes.histories}
        return self.eval_model(cast | scales(known, self.scale(state).loss_scale))


def update_count(opt_state: Any) -> Array:
    """Adam's count, which is also the schedule's position."""
    return optax.tree.get_all_with_path(opt_state, "count")[0][1]
