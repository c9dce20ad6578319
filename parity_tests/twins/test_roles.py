"""The dtype of every role is the one in the table of `lockstep.config.policy`, in both programs.

One set of rules judges both twins. The planted bugs show that each rule can be broken.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F

import jax_impl.functional
import jax_impl.model
import jax_impl.pure
import torch_ref.model
import torch_ref.step
from lockstep.config import Config
from lockstep.model.params import intermediates, shapes
from mutants.patch import Plant, assign, planted, wrap
from parity_tests.pair import begin, toy
from parity_tests.tiers import tier
from parity_tests.twins.programs import Op, Program, Value, read
from torch_ref.precision import autocast, dtype

POLICIES = (
    "fp64",
    "fp32",
    "bf16",
    "fp16",
    "bf16-stream",
    "params=bfloat16,compute=bfloat16,output=float32",
)
B, T, D, H, V = 3, 5, 24, 2, 13  # a shape says what a tensor is

RESIDUAL = {(B, T, D), (B * T, D)}  # as embedded, and as rows
MATMULS = {"dot_general", "affine", "mm", "bmm", "addmm", "_linear_pointwise"}
# Norms, softmax, the activations' inside, the loss. (jnp.sum of bfloat16 sums in float32.)
WIDE = {
    *("exp", "log", "rsqrt", "tanh", "logistic", "erf", "reduce_sum", "reduce_max", "mean"),
    *("native_layer_norm", "native_layer_norm_backward"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("nll_loss_forward", "nll_loss_backward"),
}
ARITHMETIC = {"add", "add_", "add_any", "sub", "mul"}
LOOK_UPS = {"gather", "embedding"}
LOOK_UP_GRADIENTS = {"scatter-add", "embedding_dense_backward"}
CASTS = {"convert_element_type", "_to_copy"}
# torch counts Adam's steps in float32, and inverts the loss scale in float64.
TORCH_SCALARS = {"_fused_adamw_", "_foreach_add_", "reciprocal", "_to_copy"}
NORM = re.compile(r"norm\d?\.(weight|scale|bias)$")


def small(family: str, policy: str, accum: int) -> Config:
    """In JAX one family's layers are unrolled, the other's scanned."""
    layers = (
        {"n_layer": 1, "layers": "unroll"} if family == "gpt2" else {"n_layer": 2, "layers": "scan"}
    )
    shape = dict(d_model=D, n_head=H, context=T, vocab=V, batch_size=B, accum=accum)
    return toy(family, policy=policy, **shape, **layers)


# --- the rules


def is_wrong(op: Op, config: Config) -> bool:
    roles = config.precision.roles
    param, compute, output = {roles.param}, {roles.compute}, {roles.output}
    into, out = ({value.dtype for value in values} for values in (op.inputs, op.outputs))
    if op.name in MATMULS:
        return into | out != compute
    if op.name in WIDE:
        return into | out != output
    if op.name in ARITHMETIC and op.outputs and op.outputs[0].shape in RESIDUAL:
        # the residual stream, the norms' inside, and their gradients
        return not out <= output | {roles.residual}
    if op.name in LOOK_UPS and op.inputs[0].shape == (V, D):
        return into != param or not op.inputs[0].parameter
    if op.name in LOOK_UP_GRADIENTS and op.outputs[0].shape == (V, D):
        return out != param
    if op.name in CASTS and op.inputs and NORM.search(op.inputs[0].parameter):
        return not out <= param | output
    values = [*op.inputs, *op.outputs]
    if op.name in TORCH_SCALARS:
        values = [value for value in values if value.shape]
    return not {value.dtype for value in values} <= param | compute | output


def saved_roles(framework: str, config: Config) -> dict[tuple[int, ...], set[str]]:
    """Shape -> dtypes of what may be kept for the backward pass."""
    roles, k, f = config.precision.roles, D // H, config.model.d_mlp
    compute, output = {roles.compute}, {roles.output}
    table = dict.fromkeys([(B, T, D), (B * T, 1), (T, k // 2), (T, 1, k // 2)], output)
    table |= dict.fromkeys([(B, H, T, 1), (B, T, V), (B * T, V), (B, T), ()], output)
    table |= dict.fromkeys([(B * T, f), (B, T, H, k)], compute)
    table |= dict.fromkeys([(B * H, T, k), (B * H, k, T), (B * H, T, T)], compute)
    if framework == "jax":  # whose loss reads the logits again, as the head gave them
        table[B, T, V] = compute
        table[(0,)] = compute | {roles.param}  # none of a bias: its dtype, which its gradient has
    table[B, H, T, T] = output | compute  # probabilities: softmax's own, and the next matmul's
    table[B * T, D] = output | compute | {roles.residual}  # how many of each is counted
    for name, shape in shapes(config.model).items():
        if len(shape) == 2 and name != "position.weight":
            table |= {shape: compute, shape[::-1]: compute}
        if NORM.search(name):
            table[shape] = output | {roles.param}
    return table


def intermediate_roles(config: Config) -> dict[str, str]:
    roles = config.precision.roles
    matmuls = dict.fromkeys(["attn", "mlp", "logits"], roles.compute)
    norms = dict.fromkeys(["norm1", "norm2", "norm"], roles.output)
    table = {"embed": roles.param, **matmuls, **norms}  # the rest is residual stream
    return {
        name: table.get(name.split(".")[-1], roles.residual) for name in intermediates(config.model)
    }


def violations(framework: str, program: Program, config: Config) -> set[str]:
    """Every dtype that is not its role's."""
    param, table = config.precision.roles.param, saved_roles(framework, config)

    def misplaced(value: Value) -> bool:  # scanned layers' have a leading axis L
        stacked = value.shape[1:] if value.shape[:1] == (config.model.n_layer,) else None
        allowed = table.get(value.shape, table.get(stacked, set()) if stacked else set())
        return value.dtype not in allowed

    wanted = intermediate_roles(config)
    return {
        *(str(op) for op in program.ops if is_wrong(op, config)),
        *(f"saved {value}" for value in program.saved if misplaced(value)),
        *(f"{role} {found}" for role, found in program.state.items() if found != {param}),
        *(
            f"intermediate {name} {found}"
            for name, found in program.intermediates.items()
            if found != wanted[name]
        ),
    }


# --- the twins


@tier("rest", guard="bf16; accum 2", where=lambda policy, accum: accum == 1 and policy != "bf16")
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("framework", "family"), [("jax", "tiny"), ("torch", "tiny"), ("torch", "gpt2")]
)
def test_every_dtype_is_its_role_s(framework: str, family: str, policy: str, accum: int) -> None:
    config = small(family, policy, accum)
    program = read(framework, config)
    assert violations(framework, program, config) == set()
    # And nothing was overlooked: three matmuls for each one forward, looked-up weights, norms.
    names = [op.name for op in program.ops]
    n, layers = (accum, config.model.n_layer) if framework == "torch" else (1, 1)  # JAX's loops
    linears = 5 if family == "tiny" else 4
    assert sum(name in MATMULS for name in names) == n * (layers * (3 * linears + 6) + 3)
    if family == "gpt2" and config.precision.roles.mixed:  # biases go in before the rounding
        assert sum(name in ("affine", "addmm") for name in names) == n * layers * linears
    assert {*LOOK_UPS} & {*names} and {*LOOK_UP_GRADIENTS} & {*names} and {*WIDE} & {*names}
    assert program.intermediates.keys() == intermediate_roles(config).keys()
    assert all(program.state.values())
    kept = [(*value.shape, value.dtype)[-3:] for value in program.saved]
    roles = config.precision.roles
    assert {(B * T, D, roles.output), (B * T, config.model.d_mlp, roles.compute)} <= {*kept}
    if (
        roles.mixed
    ):  # the norms' inputs; torch's RMSNorm is several operations on a CPU, which keep 3
        inputs = 3 if framework == "torch" and family == "tiny" else 1
        assert kept.count((B * T, D, roles.output)) == inputs * (2 * layers + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_works_in_float32_where_the_dispatcher_does_not_show_it(dtype: torch.dtype) -> None:
    """Activations, bit for bit over every value of the type; and sums of products."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    for activation in (partial(F.gelu, approximate="tanh"), F.silu):
        leaf, wide = x.clone().requires_grad_(), x.float().requires_grad_()
        narrow, exact = activation(leaf), activation(wide)
        narrow.backward(torch.ones_like(narrow))
        exact.backward(torch.ones_like(exact))
        same(narrow, exact.to(dtype))
        assert leaf.grad is not None and wide.grad is not None
        same(leaf.grad, wide.grad.to(dtype))
    ones = torch.ones(1, 4099, dtype=dtype)  # in either type, 2048 + 1 and 256 + 1 are no numbers
    assert (ones @ ones.T).item() == ones.sum().item() == torch.tensor(4099.0).to(dtype).item()


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_heads_are_normalized_in_float32_and_rounded_once(framework: str, policy: str) -> None:
    """At most one number in a hundred may fall to the other side of a rounding: float32 is 2^13
    times finer than float16. Computed in half precision, a third of them do."""
    twin: Any = begin(framework, "tiny", policy=policy, n_layer=1, qk_norm=True)
    config, trainer = twin.config, twin.trainer
    half = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[policy]
    x = np.random.default_rng(0).normal(size=(5, 50, 2, config.model.d_head)).astype(half)
    if framework == "jax":
        attention = trainer.model(trainer.state.params).blocks[0].attn
        found = np.asarray(attention.q_norm(jnp.asarray(x)).astype(half), "float64")
    else:
        attention, given = trainer.model.blocks[0].attn, torch.tensor(x.astype("float32"))
        with autocast(config.precision.roles, torch.device("cpu")):
            given = given.to(dtype(config.precision.roles.compute))
            found = attention.q_norm(given).to(given.dtype).detach().double().numpy()
    wide = x.astype("float64")
    exact = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + config.model.norm_eps)
    wanted = exact * twin.state().params["blocks.0.attn.q_norm.weight"]
    assert (found != wanted.astype(half).astype("float64")).mean() < 0.01


# --- planted bugs


class Bug(NamedTuple):
    name: str
    plants: dict[str, Plant]  # by framework
    family: str
    policy: str
    shows: str  # in the violations, as a regular expression


JAX, TORCH = jax_impl.model, torch_ref.model


def round_weights(right: Callable, model: Any, *rest: Any) -> Any:
    weights = {name: p.bfloat16() for name, p in model.named_parameters()}
    return right(lambda *given: torch.func.functional_call(model, weights, given), *rest)


def round_input(right: Callable, self: Any, x: Any, *rest: Any) -> Any:
    return right(self, x.astype("bfloat16") if isinstance(x, jax.Array) else x.bfloat16(), *rest)


BUGS = [
    Bug("whole_tree_cast", {
        "jax": wrap(jax_impl.pure.PureGPT, "__call__", lambda right, self, params: right(
            self, {name: x.astype("bfloat16") for name, x in params.items()})),
        "torch": wrap(torch_ref.step, "batch_loss", round_weights),
    }, "tiny", "bf16", r"name='(gather|embedding)'"),
    Bug("norms_cast", {
        "jax": wrap(jax_impl.functional, "layer_norm", lambda right, x, weight, *rest: right(
            x, weight.astype("bfloat16").astype(x.dtype), *rest)),
        "torch": wrap(F, "layer_norm", lambda right, x, shape, weight, *rest: right(
            x, shape, weight.bfloat16().to(x.dtype), *rest)),
    }, "gpt2", "bf16", r"name='(convert_element_type|_to_copy)'.*norm2"),
    Bug("layer_norm_in_bfloat16", {
        "jax": wrap(jax_impl.functional, "layer_norm", lambda right, x, *rest: right(
            x.astype("bfloat16"), *rest)),
        "torch": wrap(F, "layer_norm", lambda right, x, *rest: right(x.bfloat16(), *rest)),
    }, "gpt2", "bf16", r"name='(rsqrt|native_layer_norm)'"),
    Bug("softmax_in_compute", {
        "jax": wrap(JAX, "attend", lambda right, *given, policy, **how: right(
            *given, policy=replace(policy, output_dtype=policy.compute_dtype), **how)),
        "torch": wrap(TORCH, "attend", lambda right, q, *given, dtype, **how: right(
            q, *given, dtype=q.dtype, **how)),
    }, "gpt2", "bf16", r"name='(exp|_softmax)'"),
    Bug("nothing_cast", {
        "jax": assign(jmp.Policy, "cast_to_compute", lambda self, tree: tree),
        "torch": assign(torch_ref.step, "autocast", lambda roles, device: nullcontext()),
    }, "gpt2", "bf16", r"name='(dot_general|mm)'"),
    Bug("rotation_in_float32", {
        "jax": wrap(JAX, "rotate", lambda right, x, *tables: right(
            x, *(table.astype("float32") for table in tables))),
        "torch": wrap(TORCH, "rotate", lambda right, x, *tables: right(
            x, *(table.float() for table in tables))),
    }, "tiny", "fp64", r"name='mul'.*float32"),
    Bug("residual_in_bfloat16", {
        "jax": wrap(JAX.Block, "__call__", round_input),
        "torch": wrap(TORCH.Block, "forward", round_input),
    }, "gpt2", "bf16", r"name='add'.*outputs=.*bfloat16', shape=\((3, 5|15), 24\)"),
    Bug("default_accumulator", {  # float32; in torch the gradient itself is the accumulator
        "jax": wrap(optax, "MultiSteps", lambda right, *given, accumulator_dtype, **how: right(
            *given, **how)),
    }, "gpt2", "fp64", r"^accumulators {'float32'}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bug", "framework"),
    [
        pytest.param(bug, framework, id=f"{bug.name}-{framework}")
        for bug in BUGS
        for framework in bug.plants
    ],
)
def test_a_planted_bug_is_seen(bug: Bug, framework: str) -> None:
    config = small(bug.family, bug.policy, 2)
    with planted(bug.plants[framework]):
        found = violations(framework, read(framework, config), config)
    assert any(re.search(bug.shows, violation) for violation in found), found
