"""`bare_step` as a `Runner`: the same weights, batches and rates, the same report."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from benchmarks.peers.bare_step import Attend, Params, State, attend, attend_cudnn, make_step
from benchmarks.peers.refusals import refuse, require_start
from lockstep.config import Config, ModelConfig
from lockstep.data.batch import Batch, join_tokens
from lockstep.errors import UserError, require
from lockstep.model.params import Arrays, decays, shapes
from lockstep.model.state import TrainState
from lockstep.train.memory import resident_peak
from lockstep.train.schedule import learning_rates
from lockstep.twin import StepResult

BLOCKS, ROWS = 4, 64  # of queries, in written-out attention: so many at most, so long at least
EMBEDDINGS = ("embed.weight", "position.weight")


class BareJax:
    """`lockstep.twin.Runner`: one jitted function over a dict of arrays."""

    framework = "bare-jax"
    synchronous = False

    def __init__(self, config: Config) -> None:
        self.config, self.roles = config, config.precision.roles
        self.device = find_device(config.run.device)
        tf32 = [] if self.device.platform == "cpu" else ["tf32"]
        refuse(config, self.framework, ["fp64", "fp32", *tf32, "bf16"])
        remedy = f"{self.framework} unrolls; use unroll"
        require(config.execution.layers != "scan", "--layers", "scan", remedy)
        self.attention, attention = self.choose_attention()
        self.configure()
        optim = config.optim
        self.rates = learning_rates(optim)
        self.compiled: Any = make_step(
            layers=config.model.n_layer,
            heads=config.model.n_head,
            compute=self.roles.compute,
            attend=attention,
            rates=jnp.asarray(self.rates, self.roles.param),
            betas=(optim.beta1, optim.beta2),
            decay={n: optim.weight_decay * decays(n, optim.decay) for n in shapes(config.model)},
            clip=optim.clip,
            compiler_options=self.compiler_options(),
        )

    def choose_attention(self) -> tuple[str, Attend]:
        """Strict numerics and "reference" leave out nothing, as `jax_impl` does."""
        precision, context = self.config.precision, self.config.model.context
        fused = self.device.platform == "gpu" and self.roles.mixed
        remedy = f"{self.framework} has it in bf16 on CUDA alone; use auto"
        require(fused or precision.attention != "fused", "--attention", "fused", remedy)
        if precision.strict or precision.attention == "reference":
            return "reference", attend
        if fused:
            return "cudnn", attend_cudnn
        blocks = max(1, min(BLOCKS, context // ROWS))
        return f"written out in {blocks} causal blocks", partial(attend, blocks=blocks)

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
        """Of the process, in which another JAX may have been set up before."""
        jax.config.update("jax_enable_x64", self.roles.param == "float64")
        float32 = "tensorfloat32" if self.roles.tf32 else "highest"
        jax.config.update("jax_default_matmul_precision", float32)

    def describe(self) -> dict[str, Any]:
        platform = self.device.platform
        return {
            "device": self.device.device_kind,
            "platform": "cuda" if platform == "gpu" else platform,
            "attention": self.attention,
            "emulated": "",
            "versions": {module.__name__: module.__version__ for module in (jax, jaxlib)},
        }

    def load(self, state: TrainState) -> None:
        require_start(state, self.framework)
        self.configure()
        params = from_canonical(state.params, self.roles.param)
        mu, nu = ({name: jnp.zeros_like(p) for name, p in params.items()} for _ in range(2))
        self.current = jax.device_put(State(params, mu, nu, jnp.int32(0)), self.device)
        self.taken = 0

    def state(self) -> TrainState:
        *trees, updates = self.current
        params, mu, nu = (to_canonical(tree, self.config.model) for tree in trees)
        return TrainState(
            params=params,
            mu=mu,
            nu=nu,
            step=self.taken,
            updates=int(updates),
            loss_scale=1.0,
            good_steps=0,
        )

    def prepare(self) -> None:
        optim, context = self.config.optim, self.config.model.context
        shape = (optim.accum, optim.batch_size, context + 1)
        window = jax.ShapeDtypeStruct(shape, jnp.int32)
        self.compiled = self.compiled.lower(self.current, window).compile()

    def place(self, window: Batch) -> jax.Array:
        return jax.device_put(join_tokens(window), self.device)

    def step(self, window: jax.Array) -> Callable[[], StepResult]:
        rate = float(self.rates[self.taken])
        self.current, metrics = self.compiled(self.current, window)
        self.taken += 1

        def wait() -> StepResult:
            loss, norm = jax.device_get(metrics)
            return StepResult(loss.item(), norm.item(), rate, 1.0, False)

        return wait

    def peak_bytes(self) -> int:
        stats = self.device.memory_stats() or {}
        return stats.get("peak_bytes_in_use") or resident_peak()


def transpose(name: str, array: np.ndarray) -> np.ndarray:
    """Between canonical matrices, out x in, and ours, in x out."""
    return array if name in EMBEDDINGS else array.T


def from_canonical(arrays: Arrays, dtype: str) -> Params:
    # A copy: the step donates its state, and must not give away numpy's memory.
    return {n: jnp.array(transpose(n, a), dtype, copy=True) for n, a in arrays.items()}


def to_canonical(params: Params, model: ModelConfig) -> Arrays:
    host = jax.device_get(params)  # whose names a jitted function has sorted
    return {name: np.array(transpose(name, host[name]), order="C") for name in shapes(model)}


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
