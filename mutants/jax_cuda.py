"""Mutants of the JAX twin that show in a program compiled for CUDA, and nowhere else as surely."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_impl import functional, loss, model, precision, step
from jax_impl.extra.mesh import gather
from lockstep.model.attention import Kernel
from mutants.patch import Plant, assign, both, wrap


def widen(name: str) -> Plant:
    """A place whose matmul is not cast."""

    def wrong(right: Callable, function: Callable, dtypes: Any, **rest: Any) -> Callable:
        cast = right(function, dtypes, **rest)
        plain = lambda x, w, *b: function(x, w[...] if hasattr(w, "value") else w, *b)  # noqa: E731
        return plain if dtypes.path.endswith(name) else cast

    return wrap(model, "matmul", wrong)


def normalize_in_half(right: Callable, x: jax.Array, *rest: Any) -> jax.Array:
    return right(x.astype(jnp.bfloat16), *rest).astype(x.dtype)


def keep_arguments(right: Callable, function: Callable, *args: Any, **rest: Any) -> Any:
    rest.pop("donate_argnums", None)
    return right(function, *args, **rest)


def accumulate_narrowly(right: Callable, *args: Any, accumulator_dtype: Any, **rest: Any) -> Any:
    return right(*args, accumulator_dtype=jnp.bfloat16, **rest)


def with_remat(name: str) -> Plant:
    return wrap(model, "through_blocks", lambda right, *args, remat, **rest: right(
        *args, remat=name, **rest))  # fmt: skip


def with_kernel(fused: bool) -> Plant:
    return assign(step, "attention_kernel", lambda config, dtypes, device: Kernel(fused=fused))


BUGS: dict[str, Plant] = {
    "units-forgotten": assign(precision, "multiplied_natively", lambda device: frozenset()),
    # XLA's Triton kernels take float32 for it
    "tf32-not-on": assign(
        precision, "float32_matmul", lambda config, device: "tensorfloat32"
    ),
    "head-in-float32": widen("head"),
    "norms-in-half": both(
        wrap(functional, "layer_norm", normalize_in_half),
        wrap(functional, "rms_norm", normalize_in_half),
    ),
    "donation-lost": wrap(jax, "jit", keep_arguments),
    "cudnn-lost": with_kernel(False),
    "cudnn-unasked": with_kernel(True),
    "scores-kept": wrap(step, "attention_kernel", lambda right, *args: right(*args)._replace(
        recompute=False)),
    "accumulator-narrowed": wrap(optax, "MultiSteps", accumulate_narrowly),
    "moments-narrowed": wrap(optax, "adamw", lambda right, *args, **rest: right(
        *args, mu_dtype=jnp.bfloat16, **rest)),
    "chunks-kept": assign(loss, "recompute", lambda function: function),
    "recomputed-twice": assign(
        model, "remat_sublayer", lambda sublayer, remat: jax.checkpoint(sublayer)
    ),
    "nothing-recomputed": with_remat("none"),
    "weights-left-divided": assign(gather, "divides_weights", lambda: False),
    "whole-weights-kept": assign(precision, "keep_divided", lambda *primitive, **how: True),
    "devices-summed-in-compute": assign(functional, "divides_rows", lambda: False),
    "rows-left-to-xla": assign(model, "make_whole_table", lambda weight: weight),
    "nondeterministic-strict": wrap(
        step, "compiler_options", lambda right, config, device: {
            k: v for k, v in right(config, device).items() if "deterministic" not in k}
    ),
}  # fmt: skip
