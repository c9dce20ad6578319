"""Attention in each of its forms: numpy's, a softmax over what each query may see."""

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
FORMS = {"jax": ("reference", "blocks", "cudnn", "flash"), "torch": ("reference", "blocks", "sdpa")}
CASES = [
    (framework, form, rows)
    for framework, forms in FORMS.items()
    for form in forms
    for rows in ("plain", "packed")
    if (form, rows) != ("flash", "packed")
]


def operands(rows: str, t: int, k: int) -> tuple[list[np.ndarray], Batch]:
    """Queries, keys and values, and documents of uneven lengths, padding among them."""
    random = np.random.default_rng(4)
    heads = (HEADS, GROUPS, GROUPS)
    qkv = [random.normal(size=(ROWS, t, h, k)).astype(np.float32) for h in heads]
    cuts = np.sort(random.integers(t, size=(ROWS, 3)), axis=1)
    segments = (np.arange(t) >= cuts[..., None]).sum(1).astype(np.int32)
    tokens = np.zeros((ROWS, t), np.int32)
    return qkv, Batch(tokens, tokens, None, segments if rows == "packed" else None)


def attend_by_hand(qkv: list[np.ndarray], batch: Batch) -> np.ndarray:
    q, k, v = qkv
    (_, t, _, d_head), made = q.shape, np.zeros(q.shape)
    seen = np.arange(t)[:, None] >= np.arange(t)
    for row in range(ROWS):
        same = np.ones((t, t), bool)
        if batch.segments is not None:
            same = batch.segments[row][:, None] == batch.segments[row]
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)  # neighbours share keys
            scores = q[row, :, head].astype(float) @ k[row, :, group].T / np.sqrt(d_head)
            weights = np.where(seen & same, np.exp(scores), 0)
            made[row, :, head] = weights / weights.sum(1, keepdims=True) @ v[row, :, group]
    return made


def refuse(*given: Any) -> Any:
    raise AssertionError("the kernel does not take these sizes")


def run_jax(form: str, qkv: list[np.ndarray], batch: Batch) -> np.ndarray:
    """XLA's attention stands where cuDNN's would, under the same arguments; the kernel in Triton is
    interpreted."""
    ours = jax_impl.extra.attention
    places = jax_impl.extra.packed.make_positions(batch.map_arrays(jnp.asarray))
    forms: dict[str, Any] = {
        "reference": partial(jax_impl.model.attend, policy=POLICY),
        "blocks": partial(ours.attend_in_blocks, policy=POLICY, blocks=2, keep=True),
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
        return np.asarray(forms[form](*map(jnp.asarray, qkv), places))


def run_torch(form: str, qkv: list[np.ndarray], batch: Batch) -> np.ndarray:
    ours = torch_ref.extra.attention
    places = torch_ref.extra.packed.make_positions(batch.map_arrays(torch.from_numpy))
    forms: dict[str, Any] = {
        "reference": partial(torch_ref.model.attend, dtype=torch.float32),
        "blocks": ours.attend_in_blocks,
        "sdpa": ours.attend_fused,
    }
    return forms[form](*map(torch.from_numpy, qkv), places).numpy()


@pytest.mark.parametrize(("framework", "form", "rows"), CASES)
def test_attention_matches_numpy(framework: str, form: str, rows: str) -> None:
    """Grouped queries see what comes before them, and of packed rows their own document alone."""
    qkv, batch = operands(rows, *(OF_KERNEL if form == "flash" else SIZES))
    found = (run_jax if framework == "jax" else run_torch)(form, qkv, batch)
    assert norm_gap(found, attend_by_hand(qkv, batch)) < 1e-5
