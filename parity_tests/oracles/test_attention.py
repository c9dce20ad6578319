"""Attention in each of its forms, and its gradients: numpy's, by the formula of a softmax over what
each query may see."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.extra.attention
import jax_impl.extra.packed
import torch_ref.extra.attention
import torch_ref.extra.packed
from jax_impl.precision import make_policy
from lockstep.config.policy import resolve
from lockstep.data.batch import Batch
from lockstep.judge.compare import norm_gap

ROWS, HEADS, GROUPS = 2, 4, 2
SIZES = 136, 6  # T and K: long enough for two blocks of queries
OF_KERNEL = 128, 16  # which the float32 kernel takes
POLICY = make_policy(resolve("fp32"))
FORMS = {
    "jax": ("reference", "blocks", "blocks again", "cudnn", "flash"),
    "torch": ("reference", "blocks", "sdpa"),
}
CASES = [
    (framework, form, rows)
    for framework, forms in FORMS.items()
    for form in forms
    for rows in ("plain", "packed")
    if (form, rows) != ("flash", "packed")
]


def operands(rows: str, t: int, k: int) -> tuple[list[np.ndarray], Batch]:
    """Queries, keys, values and the gradient that comes back; documents of uneven lengths, padding
    among them."""
    random = np.random.default_rng(4)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    given = [random.normal(size=(ROWS, t, h, k)).astype(np.float32) for h in heads]
    cuts = np.sort(random.integers(t, size=(ROWS, 3)), axis=1)
    segments = (np.arange(t) >= cuts[..., None]).sum(1).astype(np.int32)
    tokens = np.zeros((ROWS, t), np.int32)
    return given, Batch(tokens, tokens, None, segments if rows == "packed" else None)


def attend_by_hand(given: list[np.ndarray], batch: Batch) -> list[np.ndarray]:
    """Returns the values, and the gradients of queries, keys and values."""
    q, k, v, dy = (x.astype(float) for x in given)
    y, dq, dk, dv = (np.zeros(x.shape) for x in (q, q, k, v))
    t, scale = q.shape[1], q.shape[-1] ** -0.5
    seen = np.arange(t)[:, None] >= np.arange(t)
    for row in range(ROWS):
        same = np.ones((t, t), bool)
        if batch.segments is not None:
            same = batch.segments[row][:, None] == batch.segments[row]
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)  # neighbours share keys
            of_head, of_group = np.s_[row, :, head], np.s_[row, :, group]
            scores = np.exp(q[of_head] @ k[of_group].T * scale) * (seen & same)
            weights = scores / scores.sum(1, keepdims=True)
            y[of_head] = weights @ v[of_group]
            dv[of_group] += weights.T @ dy[of_head]
            of_weights = dy[of_head] @ v[of_group].T
            mean = (of_weights * weights).sum(1, keepdims=True)
            of_scores = weights * (of_weights - mean) * scale
            dq[of_head] = of_scores @ k[of_group]
            dk[of_group] += of_scores.T @ q[of_head]
    return [y, dq, dk, dv]


def refuse(*given: Any) -> Any:
    raise AssertionError("the kernel does not take these sizes")


def run_jax(form: str, given: list[np.ndarray], batch: Batch) -> list[np.ndarray]:
    """XLA's attention stands where cuDNN's would, under the same arguments; the kernel in Triton is
    interpreted."""
    ours = jax_impl.extra.attention
    places = jax_impl.extra.packed.make_positions(batch.map_arrays(jnp.asarray))
    forms: dict[str, Any] = {
        "reference": partial(jax_impl.model.attend, policy=POLICY),
        "blocks": partial(ours.attend_in_blocks, policy=POLICY, blocks=2, keep=True),
        "blocks again": partial(ours.attend_in_blocks, policy=POLICY, blocks=2, keep=False),
        "cudnn": partial(ours.attend_fused, policy=POLICY),
        "flash": partial(ours.attend_flash, policy=POLICY, otherwise=refuse),
    }
    interpreted = partial(ours.flash_attention, interpret=True)
    kernel = partial(jax.nn.dot_product_attention, implementation="xla")
    # Interpreted, JAX's kernel divides int32 by what is int64 otherwise.
    with jax.enable_x64(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "flash_attention", interpreted)
        patch.setattr(
            jax_impl.extra.attention.jax.nn,
            "dot_product_attention",
            lambda *given, implementation, **how: kernel(*given, **how),
        )
        q, k, v, dy = map(jnp.asarray, given)
        y, backward = jax.vjp(lambda *qkv: forms[form](*qkv, places), q, k, v)
        return [*map(np.asarray, (y, *backward(dy)))]


def run_torch(form: str, given: list[np.ndarray], batch: Batch) -> list[np.ndarray]:
    ours = torch_ref.extra.attention
    places = torch_ref.extra.packed.make_positions(batch.map_arrays(torch.from_numpy))
    forms: dict[str, Any] = {
        "reference": partial(torch_ref.model.attend, dtype=torch.float32),
        "blocks": ours.attend_in_blocks,
        "sdpa": ours.attend_fused,
    }
    *qkv, dy = map(torch.from_numpy, given)
    qkv = [x.requires_grad_() for x in qkv]
    y = forms[form](*qkv, places)
    return [x.detach().numpy() for x in (y, *torch.autograd.grad(y, qkv, dy))]


@pytest.mark.parametrize(("framework", "form", "rows"), CASES)
def test_attention_matches_numpy(framework: str, form: str, rows: str) -> None:
    """Grouped queries see what comes before them, and of packed rows their own document alone."""
    given, batch = operands(rows, *(OF_KERNEL if form == "flash" else SIZES))
    found = (run_jax if framework == "jax" else run_torch)(form, given, batch)
    gaps = [*map(norm_gap, found, attend_by_hand(given, batch))]
    assert max(gaps) < 1e-5
