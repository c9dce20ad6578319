"""One optimizer step over a window of micro-batches, in the order of every AMP recipe.

Each stage is a method of `Trainer`. `accumulate` runs `micro_batch` in a `lax.scan`:
micro_batch_loss, backward, unscale, update. `update` calls `optax.MultiSteps`, which clips and
steps AdamW on the last micro-batch (optim.py). Then update_scale, metrics and report run once.

Under float16 the whole window is skipped if any micro-batch has a non-finite gradient: parameters,
moments and schedule do not change, and the loss scale shrinks. Other policies have no such check;
there `lockstep/train/loop.py` stops the run.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from jax import Array

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.model.params import decays
from lockstep.model.stacked import in_first_layer, is_stacked, tensor_names
from lockstep.train.schedule import learning_rates
from lockstep.twin import StepResult

from .dropout import Dropout
from .loss import mean_count, mean_loss
from .model import GPT
from .optim import optimizer, update_count
from .precision import compiler_options, loss_scale
from .pure import Metrics, Params, PureGPT, State, scan_window

# Trained parameters, the optimizer's state, and which of P tensors had finite gradients so far.
Carry = tuple[Params, Any, Array]


class Trainer:
    """Holds the training state and takes optimizer steps."""

    state: State

    def __init__(self, config: Config, model: PureGPT, device: jax.Device, platform: str) -> None:
        """Creates the optimizer and the compiler's options; `io/bridge.py:load` sets `state`.

        Args:
            platform: the device's kind, as `--device` names it.
        """
        self.config, self.model, self.device = config, model, device
        trained = set(config.trained)
        self.trained = [name for name in model.shapes if in_first_layer(name) in trained]
        # The P tensors whose gradient norms are logged.
        self.names = tensor_names({name: model.shapes[name] for name in self.trained})
        mask = {n: decays(in_first_layer(n), config.optim.decay) for n in self.trained}
        norms = partial(self.by_tensor, optax.tree.norm)
        self.optimizer = optimizer(config.optim, mask, config.precision.roles.param, norms)
        self.rates = learning_rates(config.optim)
        options = compiler_options(config.precision, platform, bias=config.model.biased)
        self.jit: Callable[..., Any] = partial(jax.jit, compiler_options=options)
        self.compiled: dict[str, Any] = {}
        # Slots, which `extra/rules.py:make_trainer` fills with features.
        self.program: Callable[[State, Batch], tuple[State, Metrics]] = self.step_function
        self.batch_loss: Callable[..., Array] = batch_loss
        self.evaluation_model: Callable[[State], GPT] = self.training_model
        self.delayed: Any = None  # extra/formats/delayed.py:Delayed
        self.mesh: Any = None  # jax.sharding.Mesh

    def compile(self, window: Batch) -> None:
        """Compiles the step ahead of time, for windows of this shape."""
        self.compiled["step"] = self.jitted_step().lower(self.state, window).compile()

    def jitted_step(self) -> Any:
        """Jits the step, which donates the state's buffers to the next state; compiles nothing."""
        return self.jit(self.program, donate_argnums=0)

    def step(self, window: Batch) -> Callable[[], StepResult]:
        """Starts one step on a window (N, B, T); the returned call waits for its result."""
        if "step" not in self.compiled:
            self.compiled["step"] = self.jitted_step()
        self.state, metrics = self.compiled["step"](self.state, window)
        return self.report(metrics)

    def step_function(self, state: State, window: Batch) -> tuple[State, Metrics]:
        """Computes the whole step: a pure function, which `jax.jit` compiles."""
        scale = self.scale(state)
        state = replace(state, step=state.step + 1)
        (trained, opt_state, finite), (losses, seen) = self.accumulate(state, window, scale)
        next_scale, good_steps = self.update_scale(state, scale, finite)
        after = replace(
            state, params=state.params | trained, optimizer=opt_state, loss_scale=next_scale,
            good_steps=good_steps, amaxes=self.update_amaxes(state, scale, finite, seen),
        )  # fmt: skip
        return after, self.metrics(state, after, losses.sum(), finite)

    def accumulate(
        self, state: State, window: Batch, scale: jmp.LossScale
    ) -> tuple[Carry, tuple[Array, Params]]:
        """Runs `micro_batch` over the window; the last one updates the parameters.

        Returns the last carry; the losses (N,), each divided by N; and the amaxes seen (N, 3).
        """
        trained = {name: state.params[name] for name in self.trained}
        carry = (trained, state.optimizer, jnp.ones(len(self.names), bool))
        body = partial(self.micro_batch, state, scale, mean_count(window))
        return scan_window(body, carry, window)

    def micro_batch(
        self, state: State, scale: jmp.LossScale, target_count: Array | None,
        carry: Carry, numbered: tuple[Array, Batch],
    ) -> tuple[Carry, tuple[Array, Params]]:  # fmt: skip
        """Computes the gradient of one micro-batch and passes it to the optimizer; a scan's body.

        Args:
            scale: the loss scale of the whole step.
            target_count: divides the sum of the losses that count; None: all count, for a mean.
            numbered: the micro-step, from 0, and its batch (B, T).
        """
        (trained, opt_state, finite), (micro_step, batch) = carry, numbered
        dropout, scales = self.dropout(state.step, micro_step), self.scales(state)

        def loss(variables: Params) -> Array:
            return self.micro_batch_loss(state.params | variables, batch, dropout, target_count)

        value, grads = self.backward(loss, trained | scales, scale)
        seen = {name: grads.pop(name) for name in scales}
        grads, finite = self.unscale(grads, finite, scale)
        do_step = finite.all() & (micro_step == self.config.optim.accum - 1)
        trained, opt_state = self.update(grads, opt_state, trained, do_step)
        return (trained, opt_state, finite), (value, seen)

    def micro_batch_loss(
        self, params: Params, batch: Batch, dropout: Dropout, target_count: Array | None
    ) -> Array:
        """Computes one micro-batch's part of the window's mean loss."""
        loss = self.batch_loss(self.model(params), batch, dropout, target_count)
        return loss / self.config.optim.accum

    def backward(
        self, loss: Callable[[Params], Array], params: Params, scale: jmp.LossScale
    ) -> tuple[Array, Params]:
        """Returns the loss and the scaled gradients."""

        def scaled_loss(params: Params) -> tuple[Array, Array]:
            value = loss(params)
            return scale.scale(value), value

        grads, value = jax.grad(scaled_loss, has_aux=True)(params)
        return value, grads

    def unscale(self, grads: Params, finite: Array, scale: jmp.LossScale) -> tuple[Params, Array]:
        """Divides the gradients by the loss scale, and records which tensors are finite."""
        grads = scale.unscale(grads)
        if self.config.precision.roles.loss_scaling:
            # Zeros from the first non-finite micro-batch on: NaN would stay in the accumulator.
            finite &= self.by_tensor(jmp.all_finite, grads)
            grads = jax.tree.map(lambda g: jnp.where(finite.all(), g, 0), grads)
        return grads, finite

    def update(
        self, grads: Params, opt_state: Any, params: Params, do_step: Array
    ) -> tuple[Params, Any]:
        """Calls MultiSteps; if `do_step`, it clips the accumulated gradient and steps AdamW."""
        updates, opt_state = self.optimizer.update(grads, opt_state, params, do_step=do_step)
        return optax.apply_updates(params, updates), opt_state

    def update_scale(
        self, state: State, scale: jmp.LossScale, finite: Array
    ) -> tuple[Array, Array]:
        """Returns the next loss scale, and the number of good steps since it last changed."""
        if not self.config.precision.roles.loss_scaling:
            return state.loss_scale, state.good_steps
        scale = scale.adjust(finite.all())
        return scale.loss_scale, scale.counter

    def scale(self, state: State) -> jmp.LossScale:
        """Wraps the loss scale in jmp's object."""
        return loss_scale(self.config.precision, state.loss_scale, state.good_steps)

    def dropout(self, step: Array, micro_step: Array) -> Dropout:
        rate, seed = self.config.model.dropout, self.config.optim.seed
        return Dropout(rate, seed=seed, step=step, micro_step=micro_step)

    def metrics(self, before: State, after: State, loss: Array, finite: Array) -> Metrics:
        norm, norms = (optax.tree.get(after.optimizer, name) for name in ("grad_norm", "norms"))
        skipped = ~finite.all()
        return Metrics(
            loss,
            jnp.where(skipped, jnp.nan, norm),
            update_count(before.optimizer),
            before.loss_scale,
            skipped,
            jnp.where(skipped, jnp.where(finite, 0, jnp.nan), norms),
        )

    def report(self, metrics: Metrics) -> Callable[[], StepResult]:
        """Returns a call that waits for the metrics and copies them to the host."""

        def wait() -> StepResult:
            *scalars, norms = jax.device_get(metrics)
            loss, norm, updates, scale, skipped = (x.item() for x in scalars)
            rate = float(self.rates[updates])
            norms = dict(zip(self.names, norms.tolist(), strict=True))
            return StepResult(loss, norm, rate, scale, skipped, norms)

        return wait

    def evaluate(self, batches: Batch) -> Array:
        """Computes the mean loss of M batches (M, B, T) under the evaluation policy."""
        return self.run("evaluate", self.mean_of_batches, batches)

    def logits(self, batch: Batch) -> Array:
        """Computes logits (B, T, V) of a batch (B, T) under the evaluation policy."""
        return self.run("logits", self.logits_of_batch, batch)

    def run(self, name: str, function: Callable[[State, Batch], Any], batch: Batch) -> Any:
        """Runs a function of the state and a batch, which is compiled once under its name."""
        if name not in self.compiled:
            self.compiled[name] = self.jit(function)
        return self.compiled[name](self.state, batch)

    def mean_of_batches(self, state: State, batches: Batch) -> Array:
        model, target_count = self.evaluation_model(state), mean_count(batches)
        return jax.lax.map(
            lambda each: self.batch_loss(model, each, target_count=target_count), batches
        ).mean()

    def logits_of_batch(self, state: State, batch: Batch) -> Array:
        return self.evaluation_model(state)(batch)

    def training_model(self, state: State) -> GPT:
        return self.model(self.weights(state))

    def weights(self, state: State) -> Params:
        """Returns the model's variables."""
        return state.params | self.scales(state)

    def scales(self, state: State) -> Params:
        """Returns the scales (3,) of products with delayed scaling; {} without."""
        return self.delayed.scales(state, self.scale(state)) if self.delayed else {}

    def update_amaxes(
        self, state: State, scale: jmp.LossScale, finite: Array, seen: Params
    ) -> Params:
        """Records the amaxes that this step has seen: the gradients of the scales."""
        return self.delayed.update_amaxes(state, scale, finite, seen) if self.delayed else {}

    def by_tensor(self, measure: Callable[[Array], Array], tensors: Params) -> Array:
        """Measures each tensor, of a stack each layer's; returns (P,), in the order of `names`."""
        return jnp.concatenate([
            jax.vmap(measure)(x) if is_stacked(name) else measure(x)[None]
            for name, x in sorted(tensors.items())
        ])  # fmt: skip


def batch_loss(
    model: GPT, batch: Batch, dropout: Dropout | None = None, target_count: Array | None = None
) -> Array:
    """Computes the mean loss of a batch (B, T) in nats.

    Args:
        target_count: divides the sum over the targets that count; left out, their number.
    """
    target_count = mean_count(batch.select(None)) if target_count is None else target_count
    return mean_loss(model(batch, dropout), batch, model.output_dtype, target_count)
