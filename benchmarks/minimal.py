"""The trainers of examples/minimal on the weights and windows of our twins, on a CPU.

`benchmarks/speed.py` races the twins against them, and `parity_tests/benchmarks/test_minimal.py`
holds that their curves are the twins'. Each framework is imported when a trainer is built.
"""

from functools import partial
from typing import Any, Protocol

import numpy as np

from lockstep.config import Config
from lockstep.data.batch import Batch, join_tokens
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.train.schedule import learning_rates
from lockstep.twin import StepResult


class Trainer(Protocol):
    """A minimal trainer; its learning rates are the config's."""

    def __init__(self, config: Config) -> None: ...

    def load(self, state: TrainState) -> None:
        """Begins at step 0 with the state's weights and loss scale."""
        ...

    def step(self, window: Batch) -> StepResult:
        """Takes one optimizer step on a window (N, B, T), and waits for its result."""
        ...

    def weights(self) -> Arrays:
        """Returns the weights by their canonical names."""
        ...


def options(config: Config) -> dict[str, Any]:
    """The fields of a file's own Config."""
    optim, model = config.optim, config.model
    return {
        "policy": config.precision.policy,
        "accum": optim.accum,
        "batch_size": optim.batch_size,
        "remat": config.execution.remat == "block",
        "vocab": model.vocab,
        "context": model.context,
        "layers": model.n_layer,
        "heads": model.n_head,
        "width": model.d_model,
        "clip": optim.clip,
    }


class MinimalTorch:
    """`train_torch.train_step`, as its `main` calls it."""

    def __init__(self, config: Config) -> None:
        import torch

        from examples.minimal import train_torch as file

        self.torch, self.file = torch, file
        self.given, self.config = config, file.Config(**options(config))
        self.rates = learning_rates(config.optim)
        self.model = file.GPT(self.config).to(file.POLICIES[self.config.policy][0])
        compiled = config.execution.compile
        self.called: Any = torch.compile(self.model) if compiled else self.model

    def load(self, state: TrainState) -> None:
        with self.torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.torch.tensor(state.params[canonical_name(name)]))
        self.optimizer, self.updates = self.file.make_optimizer(self.model), 0
        self.scaler = self.torch.amp.GradScaler(
            "cpu",
            init_scale=state.loss_scale,
            growth_interval=self.given.precision.loss_scale_interval,
            enabled=self.config.policy == "fp16",
        )

    def step(self, window: Batch) -> StepResult:
        scale, rate = self.scaler.get_scale(), float(self.rates[self.updates])
        tokens = self.torch.tensor(join_tokens(window), dtype=self.torch.int64)
        metrics = self.file.train_step(
            self.config, self.called, self.optimizer, self.scaler, tokens, rate
        )
        skipped = self.scaler.get_scale() < scale
        self.updates += not skipped
        loss, norm = metrics.tolist()
        return StepResult(loss, norm, rate, scale, skipped)

    def weights(self) -> Arrays:
        named = self.model.named_parameters()
        return {canonical_name(name): p.detach().numpy().copy() for name, p in named}


class MinimalJax:
    """`train_jax.train_step`, jitted as its `main` does it; clips by norm + 1e-6, as torch."""

    def __init__(self, config: Config) -> None:
        import jax
        from flax import nnx
        from jax import numpy

        from examples.minimal import train_jax as file

        self.numpy, self.given, self.config = numpy, config, file.Config(**options(config))
        jax.config.update("jax_enable_x64", self.config.policy == "fp64")
        graph, self.like = nnx.split(file.GPT(self.config, nnx.Rngs(0)))
        self.rates = learning_rates(config.optim)
        table = numpy.asarray(self.rates)
        clip = clip_by_global_norm(self.config.clip)
        self.optimizer = file.make_optimizer(self.config, lambda update: table[update], clip)
        train_step = partial(file.train_step, self.config, graph, self.optimizer)
        self.train_step = jax.jit(train_step, donate_argnums=0)

    def load(self, state: TrainState) -> None:
        import jmp
        from flax import nnx

        self.names: dict[Any, str] = {place_of(name): name for name in state.params}

        def load(path: Any, p: Any) -> Any:
            array = transpose(path, state.params[self.names[path]])
            # A copy: the step donates its state, and must not give away numpy's memory.
            return p.replace(self.numpy.array(array, p.dtype, copy=True))

        params, loss_scale = nnx.map_state(load, self.like), jmp.NoOpLossScale()
        if self.config.policy == "fp16":
            scale, period = state.loss_scale, self.given.precision.loss_scale_interval
            loss_scale = jmp.DynamicLossScale(self.numpy.float32(scale), period=period)
        self.state, self.updates = (params, self.optimizer.init(params), loss_scale), 0

    def step(self, window: Batch) -> StepResult:
        scale, rate = float(self.state[2].loss_scale), float(self.rates[self.updates])
        self.state, metrics = self.train_step(self.state, join_tokens(window))
        loss, norm = np.asarray(metrics).tolist()
        skipped = self.config.policy == "fp16" and not np.isfinite(norm)
        self.updates += not skipped
        return StepResult(loss, norm, rate, scale, skipped)

    def weights(self) -> Arrays:
        from flax import nnx

        flat = nnx.to_flat_state(self.state[0])
        return {self.names[path]: transpose(path, np.array(p[...])) for path, p in flat}


def canonical_name(name: str) -> str:
    """The name in our twins of a parameter of train_torch.py: attention and MLP are modules."""
    for owner, layers in (("attn", ("qkv", "proj")), ("mlp", ("up", "down"))):
        for layer in layers:
            name = name.replace(f".{layer}.", f".{owner}.{layer}.")
    return name


def place_of(name: str) -> tuple[str | int, ...]:
    """The path in the model of train_jax.py of a parameter of our twins."""
    *path, last = name.replace(".attn.", ".").replace(".mlp.", ".").split(".")
    if last == "weight":
        embeds, norms = path[0] in ("embed", "position"), "norm" in path[-1]
        last = "embedding" if embeds else "scale" if norms else "kernel"
    return *(int(key) if key.isdigit() else key for key in path), last


def transpose(path: Any, array: np.ndarray) -> np.ndarray:
    """Turns a kernel, in x out in Flax and out x in in our twins."""
    return array.T if path[-1] == "kernel" else array


def clip_by_global_norm(clip: float) -> Any:
    """Makes torch's clipping for optax, whose own lacks the 1e-6, which float64 would show."""
    import jax
    import jax.numpy as jnp
    import optax

    def update(grads: Any, params: Any) -> Any:
        factor = jnp.minimum(1.0, clip / (optax.tree.norm(grads) + 1e-6))
        return jax.tree.map(lambda g: g * factor, grads)

    return optax.stateless(update)


TRAINERS: dict[str, type[Trainer]] = {"torch": MinimalTorch, "jax": MinimalJax}
