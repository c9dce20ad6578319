"""What is rounded to which format: the numbers of each format, and the operands of every matmul.

Both twins round to the same bits as `reference`, which is held to `ml_dtypes` and to a search.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.extend import core
from torch.utils._python_dispatch import TorchDispatchMode

from jax_impl.extra.formats.rounding import ROUNDING
from jax_impl.inspect.gradients import gradients_of_batch
from jax_impl.twin import JaxTwin
from lockstep.config import Config
from lockstep.config.policy import POLICIES
from lockstep.data.batch import split_tokens
from lockstep.errors import UserError
from lockstep.formats import rounding
from lockstep.formats.table import E4M3, E5M2, TF32, Format
from lockstep.twin import Twin
from parity_tests.pair import FRAMEWORKS, perturbed, start, toy
from parity_tests.tiers import tier
from parity_tests.twins import reference
from torch_ref.extra.formats.rounding import Rounding
from torch_ref.io.bridge import to_numpy
from torch_ref.twin import TorchTwin

# --- the numbers of each format

FLOAT8 = {"e4m3": E4M3, "e5m2": E5M2}
FORMATS = {"tf32": TF32, **FLOAT8}
HALF: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
ORACLES: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, **HALF}


def bits(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def differ(one: np.ndarray, other: np.ndarray) -> int:
    return int((bits(one) != bits(other)).sum())


def exact(x: np.ndarray, name: str) -> np.ndarray:
    """Rounds by another library; TF32 by adding half of its last place to the bits."""
    if name == "tf32":
        rounded = (bits(x) + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(np.float32)
        return np.where(np.isfinite(x), rounded, x)
    if name in FLOAT8:  # ml_dtypes does not saturate
        x = np.where(np.isfinite(x), np.clip(x, -FLOAT8[name].largest, FLOAT8[name].largest), x)
    with np.errstate(over="ignore"):
        return x.astype(ORACLES[name]).astype(np.float32)


def in_jax(x: np.ndarray, name: str, scale: Any = None) -> np.ndarray:
    if name in HALF:
        return np.asarray(jax.jit(lambda x: x.astype(HALF[name]).astype(jnp.float32))(x))
    to = FORMATS[name]
    return np.asarray(jax.jit(lambda x, scale: ROUNDING.quantize(x, to, scale))(x, scale))


def in_torch(x: np.ndarray, name: str, scale: Any = None) -> np.ndarray:
    if name in HALF:
        return torch.from_numpy(x).to(getattr(torch, HALF[name].__name__)).float().numpy()
    known = None if scale is None else torch.as_tensor(scale)
    # As the twin gives it a weight: transposed.
    columns = torch.from_numpy(np.array(x.T, order="C")).mT
    same = Rounding().quantize(torch.from_numpy(x), FORMATS[name], known).numpy()
    assert not differ(Rounding().quantize(columns, FORMATS[name], known).numpy(), same)
    return same


ROUNDINGS: dict[str, Callable] = {"jax": in_jax, "torch": in_torch}


def patterns(to: Format) -> np.ndarray:
    """Every float16 and bfloat16, random bits of float32, its smallest and largest numbers, and the
    ties of a format and what is next to them, of all its exponents and beyond its largest number.
    """
    halves = np.arange(2**16, dtype=np.uint16)
    known = [halves.view(kind).astype(np.float32) for kind in (np.float16, ml_dtypes.bfloat16)]
    random = np.random.default_rng(0).integers(2**32, size=2**14, dtype=np.uint32)
    places = np.array([0, 0x007FE000, 0x7F000000, 0x7F7FE000], np.uint32)
    last = np.array([1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)
    known += [(places[:, None] | last | sign).ravel().view(np.float32) for sign in (0, 1 << 31)]
    exponents = np.arange(max(to.lowest, -120) - 3, min(-to.lowest, 120) + 3)
    steps = np.arange(2 ** (to.mantissa + 3)) if to.mantissa < 7 else np.arange(64)
    ties = np.ldexp(steps / 2 ** (to.mantissa + 2), exponents[:, None]).ravel().astype(np.float32)
    near = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    signed = [part * sign for part in near for sign in (np.float32(1), np.float32(-1))]
    return np.concatenate([*known, random.view(np.float32), *signed])


def sheet(seed: int = 0) -> np.ndarray:
    """(64, 96): many sizes, zeros, and one number that dwarfs the rest."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((64, 96)) * np.exp(random.normal(0, 3, (64, 96)))
    x[:, :32] *= 1e-6
    x[0], x[32:, 40], x[5, 6] = 0, 0, 3e4
    return x.astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_reference_numbers(name: str) -> None:
    """Finite numbers saturate in float8, and may become infinite in TF32."""
    x, to = patterns(FORMATS[name]), FORMATS[name]
    x = x[~np.isnan(x) & (np.isfinite(x) | (name == "tf32"))]
    rounded = reference.round_to(x, to)
    assert not differ(rounded, exact(x, name)) and (rounded != 0).sum() > 1000
    past = np.isfinite(x) & (np.abs(x) > to.largest)
    assert past.any() and (np.isinf(rounded[past]) | (np.abs(rounded[past]) == to.largest)).all()


@pytest.mark.parametrize("name", FLOAT8)
def test_table_of_formats(name: str) -> None:
    about, to = ml_dtypes.finfo(ORACLES[name]), FLOAT8[name]
    assert (to.largest, to.lowest, to.mantissa) == (float(about.max), about.minexp, about.nmant)
    assert 2.0 ** (to.lowest - to.mantissa) == float(about.smallest_subnormal)


@pytest.mark.parametrize("name", [*FORMATS, *HALF])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numbers(framework: str, name: str) -> None:
    x = patterns(FORMATS.get(name, TF32))
    if name != "tf32":  # XLA's CPU backend may flush those that no format here has
        x = np.where(np.abs(x) < 2.0**-126, 0, x).astype(np.float32)
    x = x[np.isfinite(x) if name in FLOAT8 else ~np.isnan(x)]
    found = ROUNDINGS[framework](x[None], name, np.float32(1))[0]
    assert not differ(found, exact(x, name))
    if name == "tf32":
        assert np.isnan(ROUNDINGS[framework](np.full((2, 2), np.nan, np.float32), name)).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scaled_numbers(framework: str, name: str) -> None:
    """By the tensor's own scale, and by one that knows nothing of it: then numbers saturate."""
    to, quantize = FORMATS[name], ROUNDINGS[framework]
    assert not differ(quantize(sheet(), name), reference.quantize(sheet(), to))
    for scale in (2.0**-12, 1.0, 2.0**10) if name in FLOAT8 else ():
        found = quantize(sheet(), name, np.float32(scale))
        assert not differ(found, reference.round_to(sheet(), to, scale))
        assert np.abs(found).max() <= to.largest * scale
    spoilt = sheet()
    spoilt[3, 4] = np.inf
    assert not np.isfinite(quantize(spoilt, name)[3, 4])


@pytest.mark.parametrize("name", FLOAT8)
def test_scale_is_the_least_that_fits(name: str) -> None:
    """By search over all powers of two: nothing saturates, and half of it would not do."""
    to = FLOAT8[name]
    for size in np.abs(np.random.default_rng(2).standard_normal(200)).astype(np.float32):
        for largest in (size, np.float32(to.largest), np.nextafter(np.float32(to.largest), 1e9)):
            scale = reference.power_of_two(largest, to.largest)
            powers = np.exp2(np.arange(-60.0, 60))
            assert scale == powers[powers * to.largest >= largest].min()


# --- the operands of every matmul

FLAGS: dict[str, Any] = {
    "n_layer": 3,
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
            left, right = (to_numpy(x).copy() for x in args[-2:])
            self.found.append((left, right))
        return func(*args, **(kwargs or {}))


def multiplied_in_torch(twin: Twin) -> list[Operands]:
    assert isinstance(twin, TorchTwin)
    with Listener() as listener:
        twin.loss_and_grads(BATCH)
    return listener.found


DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
BY_NUMBERS = ("fp32", "tf32", "fp8", "fp8-delayed")


def name_format(x: np.ndarray, policy: str) -> str:
    """Names the narrowest format that holds an operand: by its numbers, or under half precision, of
    whose numbers most are TF32's too, by its dtype."""
    if policy not in BY_NUMBERS:
        return DTYPES[x.dtype.name]
    rounded = reference.round_to if policy == "fp8-delayed" else reference.quantize
    held = (name for name in ("e5m2", "e4m3", "tf32") if not differ(x, rounded(x, FORMATS[name])))
    return next(held, "fp32")


# Three layers of gpt2: each has four linear layers of three products, and six of attention; and
# there are three of the head. Narrow formats leave the first and the last layer wide.
ALL = 3 * 4 * 3 + 3 * 6 + 3
FP8 = {("e4m3", "e4m3"): 4, ("e4m3", "e5m2"): 8, ("fp32", "fp32"): ALL - 12}
BF16_WEIGHTS = "params=bfloat16,compute=bfloat16,output=float32"


def in_islands(compute: str, wide: int) -> dict[tuple[str, str], int]:
    """The operands where so many matmuls stand in float32."""
    return {(compute, compute): ALL - wide, ("fp32", "fp32"): wide}


OPERANDS: list[tuple[str, dict[str, Any], dict[tuple[str, str], int]]] = [
    ("fp32", {}, {("fp32", "fp32"): ALL}),
    ("tf32", {}, {("tf32", "tf32"): ALL}),
    ("tf32", {"fp32_islands": "blocks.1,*.attend,head"}, in_islands("tf32", ALL - 2 * 4 * 3)),
    ("bf16", {}, {("bf16", "bf16"): ALL}),
    ("bf16", {"fp32_islands": "blocks.1,*.down"}, in_islands("bf16", 4 * 3 + 6 + 2 * 3)),
    (BF16_WEIGHTS, {"fp32_islands": "blocks.*.attn,head"}, in_islands("bf16", 3 * (6 + 6) + 3)),
    ("fp16", {}, {("fp16", "fp16"): ALL}),
    ("fp16", {"fp32_islands": "blocks.*.attn.attend"}, in_islands("fp16", 3 * 6)),
    ("fp8", {}, FP8),
    ("fp8-delayed", {}, FP8),
]


@tier("rest", guard="tf32 and fp8", where=lambda policy: policy not in ("tf32", "fp8"))
@pytest.mark.parametrize(("policy", "flags", "expected"), OPERANDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_operands(
    framework: str, policy: str, flags: dict[str, Any], expected: dict[tuple[str, str], int]
) -> None:
    config = toy("gpt2", **FLAGS, policy=policy, **flags)
    found = multiplied(framework, config)
    pairs = [tuple(sorted(name_format(x, policy) for x in operands)) for operands in found]
    assert Counter(pairs) == expected


@pytest.mark.parametrize("mode", ["dots", "block"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_recomputed_operands_are_rounded(framework: str, mode: str) -> None:
    """The last layer's need not be made again."""
    flags = {"policy": "tf32", "remat": mode, "numerics": "fast"}
    found = multiplied(framework, toy("gpt2", **FLAGS, **flags))
    assert {name_format(x, "tf32") for operands in found for x in operands} == {"tf32"}
    recomputed = {"block": 3 * (4 + 2), "dots": 3 * 2}[mode]
    assert ALL + recomputed - 3 <= len(found) <= ALL + recomputed


@tier("rest", guard="over float32", where=lambda wide: wide == "fp64")
@pytest.mark.parametrize(("wide", "narrow"), [("fp32", "fp8"), ("fp64", "fp8")])
@pytest.mark.parametrize(("framework", "family"), [("jax", "tiny"), ("torch", "gpt2")])
def test_emulation_changes_operands_alone(
    framework: str, family: str, wide: str, narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the emulation changes nothing but the operands, of torch's own product."""
    monkeypatch.setitem(POLICIES, narrow, replace(POLICIES[wide], recipe=narrow))

    def gradients(policy: str) -> tuple[float, dict[str, np.ndarray]]:
        config = toy(family, **FLAGS | {"policy": policy, "remat": "dots"})
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
