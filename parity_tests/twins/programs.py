"""Both twins' programs as lists of operations: JAX's jaxpr, and what torch dispatches.

Read, not assumed: what is here is what one optimizer step does, with the dtypes of everything that
goes in and comes out.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import torch
from jax.extend import core
from torch.utils._python_dispatch import TorchDispatchMode

from jax_impl.extra.rules import make_model
from jax_impl.inspect.jaxprs import inner_jaxprs
from jax_impl.inspect.trace import trace as trace_twin
from jax_impl.step import batch_loss
from jax_impl.twin import JaxTwin
from lockstep.config import Config
from lockstep.config.policy import BYTES
from lockstep.data.batch import Batch, split_tokens
from parity_tests.pair import start
from torch_ref.twin import TorchTwin


class Value(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    parameter: str = ""  # its name, where it is one


class Op(NamedTuple):
    name: str
    inputs: list[Value]
    outputs: list[Value]


class Program(NamedTuple):
    """Floating-point values alone: tokens, masks and counters have no role."""

    ops: list[Op]  # of one optimizer step
    saved: list[Value]  # what the forward pass of one loss keeps for the backward pass
    state: dict[str, set[str]]  # parameters, moments, accumulators, gradients -> dtypes
    intermediates: dict[str, str]  # name -> dtype


def read(framework: str, config: Config) -> Program:
    return {"jax": read_jax, "torch": read_torch}[framework](config)


def window(config: Config) -> Batch:
    """(N, B, T)"""
    shape = (config.optim.accum, config.optim.batch_size, config.model.context + 1)
    return split_tokens(
        np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % config.model.vocab
    )


def floats(values: Iterable[Value]) -> list[Value]:
    return [value for value in values if value.dtype in BYTES]


# --- JAX


def read_jax(config: Config) -> Program:
    twin = start("jax", config)
    assert isinstance(twin, JaxTwin)
    trainer, given = twin.trainer, window(config)
    one, gradients = given.select(0), list[Any]()
    update = trainer.optimizer.update

    def listening(grads: Any, *args: Any, **kwargs: Any) -> Any:
        gradients.append(grads)
        return update(grads, *args, **kwargs)

    trainer.optimizer = trainer.optimizer._replace(update=listening)
    trace = jax.make_jaxpr(trainer.program, return_shape=True)
    jaxpr, (state, _) = trace(trainer.state, given)
    paths, _ = jax.tree_util.tree_flatten_with_path((trainer.state, given))
    names = [
        path[-1].key if ".params" in jax.tree_util.keystr(path[:2]) else "" for path, _ in paths
    ]

    def loss(params: Any) -> jax.Array:
        return batch_loss(trainer.model(params), one)

    _, vjp = jax.eval_shape(lambda params: jax.vjp(loss, params), state.params)
    plain = make_model(config, config.dtypes, twin.capabilities, plain=True)
    _, seen, _, _ = jax.eval_shape(partial(trace_twin, trainer, plain), state, one)
    roles = {
        "parameters": state.params,
        "first moments": optax.tree.get(state.optimizer, "mu"),
        "second moments": optax.tree.get(state.optimizer, "nu"),
        "gradients": gradients,
        "accumulators": optax.tree.get(state.optimizer, "acc_grads", gradients),
    }
    return Program(
        ops=list(equations(jaxpr.jaxpr, names)),
        saved=floats(Value(str(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(vjp)),
        state={role: {str(x.dtype) for x in jax.tree.leaves(tree)} for role, tree in roles.items()},
        intermediates={name: str(leaf.dtype) for name, leaf in seen.items()},
    )


def equations(jaxpr: core.Jaxpr, names: list[str]) -> Iterator[Op]:
    """Every equation, those of inner programs too; `names` are the inputs', "" where none."""
    named = dict(zip(jaxpr.invars, names, strict=True))
    users: dict[Any, list[core.JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        for variable in eqn.invars:
            if not isinstance(variable, core.Literal):
                users.setdefault(variable, []).append(eqn)

    def name(variable: Any) -> str:
        return "" if isinstance(variable, core.Literal) else named.get(variable, "")

    def read_values(variables: Iterable[Any]) -> list[Value]:
        return floats(Value(str(v.aval.dtype), v.aval.shape, name(v)) for v in variables)

    def only_use(variable: Any, primitive: str) -> Any:
        """Its result, if nothing else uses the variable."""
        uses = users.get(variable, [])
        fits = len(uses) == 1 and uses[0].primitive.name == primitive
        return uses[0].outvars[0] if fits else None

    for eqn in jaxpr.eqns:
        primitive, outputs = eqn.primitive.name, eqn.outvars
        dtypes = {value.dtype for value in read_values([*eqn.invars, *outputs])}
        if primitive == "dot_general" and len(dtypes) > 1:
            # A wider sum, perhaps with `affine`'s bias added, rounded once: one GEMM, as in torch.
            biased = only_use(outputs[0], "add")
            once = only_use(outputs[0] if biased is None else biased, "convert_element_type")
            if once is not None:
                primitive, outputs = primitive if biased is None else "affine", [once]
        yield Op(primitive, read_values(eqn.invars), read_values(outputs))
        for inner in inner_jaxprs(eqn):
            arguments = eqn.invars[len(eqn.invars) - len(inner.invars) :]
            yield from equations(inner, [name(variable) for variable in arguments])


# --- torch


class Recorder(TorchDispatchMode):
    """Writes down every operation, below autocast and autograd; `aten.add.Tensor` is "add"."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.parameters = {id(p): name for name, p in model.named_parameters()}

    def values(self, tree: Any) -> list[Value]:
        return [self.value(x) for x in jax.tree.leaves(tree) if isinstance(x, torch.Tensor)]

    def value(self, x: torch.Tensor) -> Value:
        dtype = str(x.dtype).removeprefix("torch.")
        return Value(dtype, tuple(x.shape), self.parameters.get(id(x), ""))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = floats(self.values((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        self.ops.append(Op(name, before, floats(self.values(result))))
        return result


def read_torch(config: Config) -> Program:
    twin = start("torch", config)
    assert isinstance(twin, TorchTwin)
    trainer, given = twin.trainer, window(config)
    one = given.select(0)
    recorder = Recorder(trainer.model)
    gradients: list[torch.Tensor] = []

    def keep(parameter: torch.Tensor) -> None:  # after each micro-batch, so the accumulator, too
        assert parameter.grad is not None
        gradients.append(parameter.grad)

    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(keep)
    with recorder:
        twin.step(twin.place(given))()
    saved: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        trainer.batch_loss(trainer.model, twin.place(one), trainer.roles)
    moments = trainer.optimizer.state.values()
    roles = {
        "parameters": list(trainer.model.parameters()),
        "first moments": [moment["exp_avg"] for moment in moments],
        "second moments": [moment["exp_avg_sq"] for moment in moments],
        "gradients": gradients,
        "accumulators": gradients,
    }
    return Program(
        ops=recorder.ops,
        saved=floats(recorder.values(saved)),
        state={role: {x.dtype for x in recorder.values(tree)} for role, tree in roles.items()},
        intermediates={name: x.dtype.name for name, x in twin.trace(one).activations.items()},
    )
