"""Rounded formats round every operand of every matmul, and nothing else."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import core
from torch.utils._python_dispatch import TorchDispatchMode

from jax_impl.inspect.gradients import gradients_of_batch
from jax_impl.twin import JaxTwin
from lockstep.config import Config
from lockstep.config.policy import POLICIES
from lockstep.data.batch import split_tokens
from lockstep.errors import UserError
from lockstep.formats import rounding
from lockstep.formats.table import E4M3, E5M2, TF32
from lockstep.twin import Twin
from parity_tests.pair import FRAMEWORKS, perturbed, start, toy
from parity_tests.twins import reference
from torch_ref.twin import TorchTwin


def differ(one: np.ndarray, other: np.ndarray) -> int:
    return int((one.view(np.uint32) != other.view(np.uint32)).sum())


# --- what is multiplied

FLAGS: dict[str, Any] = {
    "policy": "tf32",
    "n_layer": 2,
    "layers": "unroll",
    "context": 16,
    "loss_scale_init": 1.0,
}
BATCH = split_tokens(np.random.default_rng(1).integers(256, size=(2, 17)).astype(np.int32))
Operands = tuple[np.ndarray, np.ndarray]


def multiplied(framework: str, config: Config) -> list[Operands]:
    """The operands of every matmul of one loss and its gradients."""
    twin = start(framework, config, perturbed(config))
    return {"jax": multiplied_in_jax, "torch": multiplied_in_torch}[framework](twin)


def multiplied_in_jax(twin: Twin) -> list[Operands]:
    """Its program over again, equation by equation, with them as its results."""
    assert isinstance(twin, JaxTwin)
    function = partial(gradients_of_batch, twin.trainer)
    given = (twin.trainer.state, BATCH)
    program = jax.make_jaxpr(function)(*given)

    def operands(*args: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        found: list[tuple[jax.Array, jax.Array]] = []

        def run(jaxpr: core.Jaxpr, consts: Any, args: Any) -> list[Any]:
            known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

            def read(variable: Any) -> Any:
                return variable.val if isinstance(variable, core.Literal) else known[variable]

            for eqn in jaxpr.eqns:
                values = [*map(read, eqn.invars)]
                inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
                assert eqn.primitive.name not in ("scan", "while")
                if eqn.primitive.name == "cond":  # by platform, of the loss's sums
                    assert "dot_general" not in str(eqn.params["branches"])
                if isinstance(inner, core.ClosedJaxpr):
                    made = run(inner.jaxpr, inner.consts, values)
                elif inner is not None:
                    made = run(inner, [], values)
                else:
                    made = eqn.primitive.bind(*values, **eqn.params)
                    made = made if eqn.primitive.multiple_results else [made]
                if eqn.primitive.name == "dot_general":
                    found.append((values[0], values[1]))
                known |= zip(eqn.outvars, made, strict=True)
            return [*map(read, jaxpr.outvars)]

        run(program.jaxpr, program.consts, args)
        return found

    return jax.device_get(jax.jit(operands)(*jax.tree.leaves(given)))


class Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operands] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert "scaled_dot_product" not in name
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            self.found.append(tuple(x.detach().numpy().copy() for x in args[-2:]))
        return func(*args, **(kwargs or {}))


def multiplied_in_torch(twin: Twin) -> list[Operands]:
    assert isinstance(twin, TorchTwin)
    with Listener() as listener:
        twin.loss_and_grads(BATCH)
    return listener.found


def count_rounded(found: list[Operands]) -> int:
    """How many have operands that are both TF32 numbers."""
    return sum(
        all(differ(x, reference.round_to(x, TF32)) == 0 for x in operands) for operands in found
    )


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("tiny", {"remat": "dots"}),
        ("gpt2", {"remat": "block", "numerics": "fast"}),
        ("tiny", {"fp32_islands": "blocks.1,*.attend,head"}),
    ],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_operand_of_every_matmul_is_rounded(
    framework: str, family: str, flags: dict[str, Any]
) -> None:
    config = toy(family, **(FLAGS | flags))
    found = multiplied(framework, config)
    linears, layers = (5 if family == "tiny" else 4), config.model.n_layer
    if "fp32_islands" in flags:  # one layer's linear ones, but for the head
        assert count_rounded(found) == 3 * linears
        assert len(found) == layers * (3 * linears + 6) + 3
    else:
        recomputed = {"none": 0, "block": layers * (linears + 2), "dots": layers * 2}
        expected = layers * (3 * linears + 6) + 3 + recomputed[config.execution.remat]
        assert len(found) == count_rounded(found)
        assert expected - layers <= len(found) <= expected  # the last one's need not be made again
    assert (
        count_rounded(multiplied(framework, config.replace(policy="fp32", numerics="strict"))) == 0
    )


def kinds(operands: Operands) -> list[str]:
    """Names each operand's format: e4m3 or e5m2 under a tensor's one scale, empty for neither."""
    known = {"e5m2": E5M2, "e4m3": E4M3}  # the former may fit the latter, which has more digits
    return [
        next((k for k, to in known.items() if not differ(x, reference.quantize(x, to))), "")
        for x in operands
    ]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fp8_is_e4m3_forward_and_e5m2_backward(framework: str) -> None:
    """In the one layer of three that is not the first or the last."""
    found = multiplied(framework, toy("gpt2", **FLAGS | {"policy": "fp8", "n_layer": 3}))
    pairs = Counter(tuple(sorted(kinds(x))) for x in found if x[0].ndim == 2)
    assert (pairs["e4m3", "e4m3"], pairs["e4m3", "e5m2"]) == (4, 8)
    assert pairs["", ""] == 2 * 4 * 3 + 3


@pytest.mark.parametrize(("wide", "narrow"), [("fp32", "fp8"), ("fp64", "fp8")])
@pytest.mark.parametrize(("framework", "family"), [("jax", "tiny"), ("torch", "gpt2")])
def test_with_nothing_rounded_it_is_wide(
    framework: str, family: str, wide: str, narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the emulation changes nothing but the operands, of torch's own product."""
    monkeypatch.setitem(POLICIES, narrow, replace(POLICIES[wide], recipe=narrow))

    def gradients(policy: str) -> tuple[float, dict[str, np.ndarray]]:
        config = toy(family, **FLAGS | {"policy": policy, "remat": "dots", "n_layer": 3})
        return start(framework, config, perturbed(config)).loss_and_grads(BATCH)

    loss, grads = gradients(wide)
    if wide == "fp32":
        rounded, others = gradients(narrow)
        assert loss != rounded
        assert all(differ(grads[name], others[name]) for name in grads)
    monkeypatch.setattr(rounding.NeutralRounding, "quantize", lambda self, x, *how: x)
    same, others = gradients(narrow)
    assert same == loss
    assert [name for name in grads if differ(grads[name], others[name])] == []


# --- what is said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"policy": "tf32", "fp32_islands": "head"}, "--fp32-islands head: TF32 is one switch"),
        ({"policy": "tf32", "eval_policy": "fp32"}, "--eval-policy fp32: TF32 .* use tf32"),
        ({"policy": "fp32", "eval_policy": "tf32"}, "--eval-policy tf32: TF32 .* use fp32"),
        ({"policy": "tf32"}, ""),
        ({"policy": "tf32", "eval_policy": "bf16"}, ""),
        ({"policy": "tf32", "eval_policy": "tf32"}, ""),
        ({"policy": "bf16", "eval_policy": "fp32", "fp32_islands": "head"}, ""),
    ],
)
def test_on_cuda_float32_is_one_thing(flags: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said) if said else nullcontext():
        toy(**flags).precision.require_one_float32()
