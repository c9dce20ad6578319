"""One optimizer step over a window of micro-batches, in the order every AMP recipe gives.

A stage is a method of `Trainer`. `accumulate` runs `micro_batch` in a `lax.scan`: micro_batch_loss,
backward, unscale, update. `update` feeds `optax.MultiSteps`, which clips and steps AdamW with the
last micro-batch (optim.py). Then follow, once a window, update_scale, metrics and report.

Under float16 the whole window is one decision: if a gradient of any micro-batch is not finite,
parameters, moments and schedule stay, and the loss scale shrinks. Other policies make no such
check; there `lockstep/train/loop.py` stops the run.
"""

import math
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
from lockstep.model.params import decays, first_nonfinite
from lockstep.train.schedule import learning_rates
from lockstep.twin import StepResult

from .dropout import Dropout
from .loss import mean_count, mean_loss
from .model import GPT
from .optim import optimizer, update_count
from .precision import compiler_options, loss_scale
from .pure import Metrics, Params, PureGPT, State, jit_method, scan_window

# Trained parameters, the optimizer's state, and which of the P tensors were finite so far.
Carry = tuple[Params, Any, Array]


class Trainer:
    """Holds the training state and takes optimizer steps. Features of `extra/` are subclasses."""

    state: State

    def __init__(self, config: Config, model: PureGPT, device: jax.Device, platform: str) -> None:
        """Makes the optimizer and the compiler's options; `state` is set when one is loaded.

        Args:
            platform: the device's kind, as `--device` names it.
        """
        self.config, self.model, self.device = config, model, device
        trained = set(config.trained)
        self.trained = [name for name in model.shapes if self.canonical(name) in trained]
        self.names = self.tensor_names()
        mask = {n: decays(self.canonical(n), config.optim.decay) for n in self.trained}
        norms = partial(self.by_tensor, optax.tree.norm)
        self.optimizer = optimizer(config.optim, mask, config.precision.roles.param, norms)
        self.rates = learning_rates(config.optim)
        options = compiler_options(config.precision, platform)
        self.jit: Callable[..., Any] = partial(jax.jit, compiler_options=options)
        self.compiled: dict[str, Any] = {}

    def compile(self, window: Batch) -> None:
        """Compiles the step ahead of time, for windows like this one."""
        self.compiled["step"] = self.jitted_step().lower(self.state, window).compile()

    def jitted_step(self) -> Any:
        """The jitted step, not yet compiled; it donates the state's buffers to the next state."""
        return self.jit(self.step_function, donate_argnums=0)

    def step(self, window: Batch) -> Callable[[], StepResult]:
        """Starts one step on a window (N, B, T); the returned call waits for its result."""
        if "step" not in self.compiled:
            self.compiled["step"] = self.jitted_step()
        self.state, metrics = self.compiled["step"](self.state, window)
        return self.report(metrics)

    def step_function(self, state: State, window: Batch) -> tuple[State, Metrics]:
        """The whole step, which `jax.jit` compiles."""
        scale = self.scale(state)
        state = replace(state, step=state.step + 1)
        (trained, opt_state, finite), losses = self.accumulate(state, window, scale)
        next_scale, good_steps = self.update_scale(state, scale, finite)
        after = replace(
            state, params=state.params | trained, optimizer=opt_state, loss_scale=next_scale,
            good_steps=good_steps,
        )  # fmt: skip
        return after, self.metrics(state, after, losses.sum(), finite)

    def accumulate(self, state: State, window: Batch, scale: jmp.LossScale) -> tuple[Carry, Array]:
        """Runs `micro_batch` over the window; the last one updates the parameters.

        Returns the last carry, and the losses (N,), each divided by N.
        """
        trained = {name: state.params[name] for name in self.trained}
        carry = (trained, state.optimizer, jnp.ones(len(self.names), bool))
        body = partial(self.micro_batch, state, scale, mean_count(window))
        return scan_window(body, carry, window)

    def micro_batch(
        self, state: State, scale: jmp.LossScale, over: Array | None,
        carry: Carry, numbered: tuple[Array, Batch],
    ) -> tuple[Carry, Array]:  # fmt: skip
        """The loop's body: the gradient of one micro-batch, handed to the optimizer.

        Args:
            scale: the loss scale of the whole step.
            over: the sum of the losses that count is divided by it; None: all count, take the mean.
            numbered: the micro-step, from 0, and its batch (B, T).
        """
        (trained, opt_state, finite), (micro_step, batch) = carry, numbered
        dropout = self.dropout(state.step, micro_step)
        weights = self.weights(state, dropout)

        def loss(trained: Params) -> Array:
            return self.micro_batch_loss(weights | trained, batch, dropout, over)

        value, grads = self.backward(loss, trained, scale)
        grads, finite = self.unscale(grads, finite, scale)
        do_step = finite.all() & (micro_step == self.config.optim.accum - 1)
        trained, opt_state = self.update(grads, opt_state, trained, do_step)
        return (trained, opt_state, finite), value

    def micro_batch_loss(
        self, params: Params, batch: Batch, dropout: Dropout, over: Array | None
    ) -> Array:
        """One micro-batch's part of the window's mean loss."""
        loss = self.batch_loss(self.model(params), batch, dropout, over)
        return loss / self.config.optim.accum

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
        """Divides by the loss scale, and looks for gradients that are not finite."""
        grads = scale.unscale(grads)
        if self.config.precision.roles.loss_scaling:
            # From the first non-finite micro-batch on, zeros: NaN would stay in the accumulator.
            finite &= self.by_tensor(jmp.all_finite, grads)
            grads = jax.tree.map(lambda g: jnp.where(finite.all(), g, 0), grads)
        return grads, finite

    def update(
        self, grads: Params, opt_state: Any, params: Params, do_step: Array
    ) -> tuple[Params, Any]:
        """Feeds MultiSteps; where `do_step`, it clips the accumulated gradient and steps AdamW."""
        updates, opt_state = self.optimizer.update(grads, opt_state, params, do_step=do_step)
        return optax.apply_updates(params, updates), opt_state

    def update_scale(
        self, state: State, scale: jmp.LossScale, finite: Array
    ) -> tuple[Array, Array]:
        """The next loss scale, and the good steps since it last changed."""
        if not self.config.precision.roles.loss_scaling:
            return state.loss_scale, state.good_steps
        scale = scale.adjust(finite.all())
        return scale.loss_scale, scale.counter

    def scale(self, state: State) -> jmp.LossScale:
        """The loss scale, as jmp's object."""
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
        """The returned call copies the metrics to the host, and waits for them."""

        def wait() -> StepResult:
            *scalars, norms = jax.device_get(metrics)
            loss, norm, updates, scale, skipped = (x.item() for x in scalars)
            rate = float(self.rates[updates])
            norms = dict(zip(self.names, norms.tolist(), strict=True))
            if math.isfinite(norm):
                return StepResult(loss, norm, rate, scale, skipped, norms=norms)
            finite = {name: math.isfinite(norm) for name, norm in norms.items()}
            nonfinite = first_nonfinite(finite.items(), self.config.model)
            return StepResult(loss, norm, rate, scale, skipped, nonfinite)

        return wait

    @jit_method
    def evaluate(self, state: State, batches: Batch) -> Array:
        """Mean loss of M batches (M, B, T) under the evaluation policy."""
        model, over = self.evaluation_model(state), mean_count(batches)
        return jax.lax.map(lambda each: self.batch_loss(model, each, over=over), batches).mean()

    @jit_method
    def logits(self, state: State, batch: Batch) -> Array:
        """A batch of tokens (B, T) -> logits (B, T, V) under the evaluation policy."""
        return self.evaluation_model(state)(batch)

    def evaluation_model(self, state: State) -> GPT:
        return self.model(self.weights(state, Dropout.off()))

    # What features of extra/ override.

    def canonical(self, name: str) -> str:
        """A parameter's name among the canonical ones (`lockstep.model.params`)."""
        return name

    def tensor_names(self) -> list[str]:
        """The P tensors that get a gradient norm in the log."""
        return sorted(self.trained)

    def by_tensor(self, measure: Callable[[Array], Array], tensors: Params) -> Array:
        """(P,): one number for each of `tensor_names`."""
        return jnp.stack([measure(x) for _, x in sorted(tensors.items())])

    def weights(self, state: State, dropout: Dropout) -> Params:
        """The model's variables. `extra/formats` adds scales, and keys drawn from dropout's."""
        return state.params

    def batch_loss(
        self, model: GPT, batch: Batch, dropout: Dropout | None = None, over: Array | None = None
    ) -> Array:
        return batch_loss(model, batch, dropout, over)


def batch_loss(
    model: GPT, batch: Batch, dropout: Dropout | None = None, over: Array | None = None
) -> Array:
    """Mean loss of a batch (B, T) in nats.

    Args:
        over: what the sum over the targets that count is divided by; left out, their number.
    """
    over = mean_count(batch.select(None)) if over is None else over
    return mean_loss(model(batch, dropout), batch, model.wide, over)
