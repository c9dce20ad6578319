"""`examples/minimal/train_jax.py` as a `Runner`: the same weights, batches and rates as ours."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import jmp
import numpy as np
import optax

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
        like = from_canonical(
            {n: np.zeros(s) for n, s in shapes(config.model).items()}, self.roles.param
        )
        clip = clip_by_global_norm(config.optim.clip)
        self.optimizer = train_jax.make_optimizer(self.minimal, like, lambda u: table[u], clip)
        self.compiled: Any = jax.jit(
            self.step_leaves,
            donate_argnums=0,
            compiler_options=self.compiler_options(),
        )

    def step_leaves(self, leaves: list[jax.Array], window: jax.Array) -> Any:
        """Steps from the leaves of the state: `lower` cannot rebuild jmp's loss scale."""
        state = jax.tree.unflatten(jax.tree.structure(self.current), leaves)
        return train_jax.train_step(self.minimal, self.optimizer, state, window)

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
        params = from_canonical(state.params, self.roles.param)
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


def place_of(name: str) -> list[str | int]:
    """Where a canonical parameter lies in the minimal file's tree."""
    if name in ("embed.weight", "position.weight"):
        return [name.removesuffix(".weight")]
    keys = name.replace(".attn.", ".").replace(".mlp.", ".").split(".")
    return [int(key) if key.isdigit() else key for key in keys]


def transpose(name: str, array: Any) -> Any:
    """A matrix is out x in in the canonical form, and in x out here; an embedding is V x D."""
    return array if len(place_of(name)) == 1 else array.T


def from_canonical(arrays: Arrays, dtype: str) -> Any:
    layers = 1 + max(int(name.split(".")[1]) for name in arrays if name.startswith("blocks."))
    tree: Any = {"blocks": [{} for _ in range(layers)]}
    for name, array in arrays.items():
        *path, last = place_of(name)
        node: Any = tree
        for key in path:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        # A copy: the step donates its state, and must not give away numpy's memory.
        node[last] = jnp.array(transpose(name, array), dtype, copy=True)
    return tree


def to_canonical(tree: Any, model: ModelConfig) -> Arrays:
    host, arrays = jax.device_get(tree), Arrays()
    for name in shapes(model):
        node: Any = host
        for key in place_of(name):
            node = node[key]
        arrays[name] = np.array(transpose(name, node), order="C")
    return arrays


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
