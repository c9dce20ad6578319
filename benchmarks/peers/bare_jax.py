"""`examples/minimal/train_jax.py` as a `Runner`: the same weights, batches and rates as ours."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import jmp
import numpy as np
import optax
from flax import nnx

from benchmarks.peers.minimal import Minimal
from examples.minimal import train_jax
from lockstep.config import Config, ModelConfig
from lockstep.data.batch import Batch, join_tokens
from lockstep.errors import UserError
from lockstep.model.params import Arrays, shapes
from lockstep.model.state import TrainState
from lockstep.train.memory import resident_peak
from lockstep.twin import StepResult


def clip_by_global_norm(clip: float) -> optax.GradientTransformation:
    """torch's factor. optax's has no 1e-6 in it, and float64 would show that."""

    def update(grads: Any, params: Any) -> Any:
        factor = jnp.minimum(1.0, clip / (optax.tree.norm(grads) + 1e-6))
        return jax.tree.map(lambda g: g * factor, grads)

    return optax.stateless(update)


class BareJax(Minimal):
    """`lockstep.twin.Runner`: `train_jax.train_step`, jitted."""

    framework = "bare-jax"

    def __init__(self, config: Config) -> None:
        self.device = find_device(config.run.device)
        self.synchronous = self.device.platform == "cpu"
        super().__init__(config, on_cpu=self.synchronous)
        self.configure()
        self.minimal = train_jax.Config(**self.options)
        table = jnp.asarray(self.rates, self.roles.param)
        clip = clip_by_global_norm(config.optim.clip)
        self.optimizer = train_jax.make_optimizer(self.minimal, lambda u: table[u], clip)
        make = partial(train_jax.GPT, self.minimal)
        self.graph, self.like = nnx.split(nnx.eval_shape(make, nnx.Rngs(0)))
        self.compiled: Any = jax.jit(
            self.step_leaves,
            donate_argnums=0,
            compiler_options=self.compiler_options(),
        )

    def step_leaves(self, leaves: list[jax.Array], window: jax.Array) -> Any:
        """Steps from the leaves of the state: `lower` cannot rebuild jmp's loss scale."""
        state = jax.tree.unflatten(jax.tree.structure(self.current), leaves)
        return train_jax.train_step(self.minimal, self.graph, self.optimizer, state, window)

    def compiler_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        on_cpu = self.device.platform == "cpu"
        if on_cpu and self.roles.compute == "bfloat16" and jax.__version_info__ >= (0, 11):
            options["xla_cpu_experimental_ynn_fusion_type"] = ""  # as our step: decision 25
        if self.config.precision.strict:
            options["xla_allow_excess_precision"] = False
            if self.device.platform == "gpu":
                options["xla_gpu_deterministic_ops"] = True
        return options

    def configure(self) -> None:
        """Sets the process's switches, which another JAX may have set before."""
        jax.config.update("jax_enable_x64", self.roles.param == "float64")
        float32 = "tensorfloat32" if self.roles.tf32 else "highest"
        jax.config.update("jax_default_matmul_precision", float32)

    def describe(self) -> dict[str, Any]:
        platform = self.device.platform
        return {
            "device": self.device.device_kind,
            "platform": "cuda" if platform == "gpu" else platform,
            "attention": "reference", "emulated": "",
            "versions": {module.__name__: module.__version__ for module in (jax, jaxlib)},
        }  # fmt: skip

    def load(self, state: TrainState) -> None:
        self.begin(state)
        self.configure()
        params = from_canonical(state.params, self.like)
        loss_scale = jmp.NoOpLossScale()
        if self.roles.loss_scaling:
            scale, good = jnp.float32(state.loss_scale), jnp.int32(state.good_steps)
            period = self.config.precision.loss_scale_interval
            loss_scale = jmp.DynamicLossScale(scale, good, period)
        self.current = jax.device_put(
            (params, self.optimizer.init(params), loss_scale), self.device
        )

    @property
    def scale(self) -> tuple[Any, Any]:
        """The loss scale, and the good steps since it last changed."""
        scale = self.current[2]
        return (scale.loss_scale, scale.counter) if self.roles.loss_scaling else (1.0, 0)

    def state(self) -> TrainState:
        params, opt_state, _ = self.current
        trees = params, *(optax.tree.get(opt_state, name) for name in ("mu", "nu"))
        params, mu, nu = (to_canonical(tree, self.config.model) for tree in trees)
        scale, good_steps = self.scale
        return TrainState(
            params=params,
            mu=mu,
            nu=nu,
            step=self.taken,
            updates=int(optax.tree.get_all_with_path(opt_state, "count")[0][1]),
            loss_scale=float(scale),
            good_steps=int(good_steps),
        )

    def prepare(self) -> None:
        optim, context = self.config.optim, self.config.model.context
        shape = (optim.accum, optim.batch_size, context + 1)
        window = jax.ShapeDtypeStruct(shape, jnp.int32)
        self.compiled = self.compiled.lower(jax.tree.leaves(self.current), window).compile()

    def place(self, window: Batch) -> jax.Array:
        return jax.device_put(join_tokens(window), self.device)

    def step(self, window: jax.Array) -> Callable[[], StepResult]:
        # The step takes the state's memory, this number's too.
        scale = jnp.copy(self.scale[0]) if self.roles.loss_scaling else 1.0
        self.current, metrics = self.compiled(jax.tree.leaves(self.current), window)
        self.taken += 1

        def wait() -> StepResult:
            loss, norm = jax.device_get(metrics).tolist()
            skipped = self.roles.loss_scaling and not np.isfinite(norm)
            rate = float(self.rates[self.updates])
            self.updates += not skipped
            return StepResult(loss, norm, rate, float(scale), skipped)

        return wait

    def peak_bytes(self) -> int:
        stats = self.device.memory_stats() or {}
        return stats.get("peak_bytes_in_use") or resident_peak()


def place_of(name: str) -> tuple[str | int, ...]:
    """Where a canonical parameter lies in the file's model."""
    *path, last = name.replace(".attn.", ".").replace(".mlp.", ".").split(".")
    if last == "weight":
        embeds, norms = path[0] in ("embed", "position"), "norm" in path[-1]
        last = "embedding" if embeds else "scale" if norms else "kernel"
    return *(int(key) if key.isdigit() else key for key in path), last


def transpose(name: str, array: Any) -> Any:
    """A matrix is out x in in the canonical form, and in x out here; an embedding is V x D."""
    return array.T if place_of(name)[-1] == "kernel" else array


def from_canonical(arrays: Arrays, like: nnx.State) -> nnx.State:
    """Returns the parameters, with the shapes and dtypes of `like`."""
    named = {place_of(name): transpose(name, array) for name, array in arrays.items()}

    def convert(path: Any, p: Any) -> Any:
        # A copy: the step donates its state, and must not give away numpy's memory.
        return p.replace(jnp.array(named[path], p.dtype, copy=True))

    return nnx.map_state(convert, like)


def to_canonical(state: nnx.State, model: ModelConfig) -> Arrays:
    host = nnx.to_flat_state(jax.device_get(state))
    tensors = {path: p[...] for path, p in host}
    return Arrays(
        (name, np.array(transpose(name, tensors[place_of(name)]), order="C"))
        for name in shapes(model)
    )


def find_device(asked: str) -> jax.Device:
    """The device of `--device auto|cpu|cuda`.

    Raises:
        UserError: cuda was asked for and there is none.
    """
    if asked == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        return jax.devices("cuda" if asked == "cuda" else None)[0]
    except RuntimeError:
        remedy = f"JAX {jax.__version__} sees no CUDA device; use --device cpu"
        raise UserError(f"--device cuda: {remedy}") from None


def build(config: Config) -> BareJax:
    return BareJax(config)
