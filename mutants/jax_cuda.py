"""Mutants of the JAX twin that show in a program compiled for CUDA, and nowhere else as surely."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jax_impl import functional, model, precision, step
from jax_impl.extra import chunks, gpu, rules
from jax_impl.extra.attention import CUDNN, REFERENCE
from jax_impl.extra.mesh import gather
from jax_impl.precision import make_policy
from lockstep.config.policy import POLICIES
from lockstep.model.attention import AttentionChoice
from mutants.patch import Plant, assign, both, wrap


def multiply_widely(right: Callable, grads: str, recipe: Any, **how: Any) -> Any:
    """Operands are rounded, and no unit for narrow formats multiplies them."""
    return right(grads, recipe and replace(recipe, native=False), **how)


def widen_biases(right: Callable, *args: Any, bias: str, **how: Any) -> Any:
    return right(*args, **how)


def widen_head(right: Callable, self: rules.FeatureLayers) -> Any:
    head = right(self)
    head.policy = make_policy(POLICIES["fp32"])
    return head


def normalize_in_half(right: Callable, x: Array, *rest: Any) -> Array:
    return right(x.astype(jnp.bfloat16), *rest).astype(x.dtype)


def keep_arguments(right: Callable, function: Callable, *args: Any, **rest: Any) -> Any:
    rest.pop("donate_argnums", None)
    return right(function, *args, **rest)


def accumulate_narrowly(right: Callable, *args: Any, accumulator_dtype: Any, **rest: Any) -> Any:
    return right(*args, accumulator_dtype=jnp.bfloat16, **rest)


def keep_logits(right: Callable, *args: Any) -> Array:
    with patch.object(jax, "checkpoint", lambda function: function):
        return right(*args)


def with_remat(name: str) -> Plant:
    return wrap(
        model,
        "through_blocks",
        lambda right, *args, remat, **rest: right(*args, remat=name, **rest),
    )


def with_attention(name: str) -> Plant:
    return assign(rules, "choose_attention", lambda *args: AttentionChoice(name))


BUGS: dict[str, Plant] = {
    "units-forgotten": wrap(rules, "make_product", multiply_widely),
    # XLA's Triton kernels take float32 for it
    "tf32-not-on": assign(precision, "float32_matmul", lambda config, device: "tensorfloat32"),
    "bias-in-float32": wrap(rules, "make_product", widen_biases),
    "head-in-float32": wrap(rules.FeatureLayers, "head", widen_head),
    "norms-in-half": both(
        wrap(functional, "layer_norm", normalize_in_half),
        wrap(functional, "rms_norm", normalize_in_half),
        wrap(gpu, "layer_norm", normalize_in_half),
    ),
    "donation-lost": wrap(jax, "jit", keep_arguments),
    "cudnn-lost": with_attention(REFERENCE),
    "cudnn-unasked": with_attention(CUDNN),
    "scores-kept": wrap(
        rules, "make_attention", lambda right, *args, on_cpu: right(*args, on_cpu=True)
    ),
    "accumulator-narrowed": wrap(optax, "MultiSteps", accumulate_narrowly),
    "moments-narrowed": wrap(
        optax, "adamw", lambda right, *args, **rest: right(*args, mu_dtype=jnp.bfloat16, **rest)
    ),
    "chunks-kept": wrap(chunks, "mean_loss_in_chunks", keep_logits),
    "recomputed-twice": assign(
        model, "remat_sublayer", lambda sublayer, remat: jax.checkpoint(sublayer)
    ),
    "nothing-recomputed": with_remat("none"),
    "weights-left-divided": assign(gather, "make_whole", lambda weight: weight),
    "whole-weights-kept": assign(gather, "keep_divided", lambda *primitive, **how: True),
    "devices-summed-in-compute": assign(rules, "sum_widely", lambda multiply: multiply),
    "rows-left-to-xla": assign(gather.SharedEmbedding, "__call__", model.Embedding.__call__),
    "nondeterministic-strict": wrap(
        step,
        "compiler_options",
        lambda right, *args, **how: {
            k: v for k, v in right(*args, **how).items() if "deterministic" not in k
        },
    ),
}
