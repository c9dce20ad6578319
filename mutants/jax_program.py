"""The JAX twin, healthy or a mutant, as `lockstep check` takes a program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jax_impl import optim, step
from jax_impl.model import GPT
from jax_impl.twin import JaxTwin
from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.model.params import decays
from lockstep.model.state import initial_state


def functions(config: Config) -> dict[str, Callable[..., Any]]:
    twin = JaxTwin(config)
    trainer = twin.trainer

    def build(seed: int) -> GPT:
        twin.load(initial_state(config.replace(seed=seed)))
        return trainer.model(trainer.state.params)

    def loss(model: GPT, batch: dict[str, Array]) -> Array:
        return step.batch_loss(model, Batch(**batch))

    def optimizer(model: GPT) -> Any:
        def mask(params: Any) -> Any:
            def decayed(path: Any, x: Array) -> bool:
                return decays(_name(path), config.optim.decay)

            return jax.tree_util.tree_map_with_path(decayed, params)

        def norms(grads: Any) -> Array:
            return jnp.stack(list(map(optax.tree.norm, jax.tree.leaves(grads))))

        return optim.adamw(config.optim, mask, config.dtypes.param, norms)

    def _name(path: Any) -> str:
        return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")

    return {"build": build, "loss": loss, "optimizer": optimizer}
