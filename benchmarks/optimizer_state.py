"""The bytes that a parameter costs while it is trained, and which dtype the optimizer keeps its
moments in.

Bytes are those of the arrays themselves, in our twins. Dtypes are the libraries' own, AdamW's.
"""

from typing import Any

from benchmarks import tables
from benchmarks.experiments.frame import TOY
from lockstep.config import from_flags
from lockstep.model import params
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start

PURE = "params=bfloat16,compute=bfloat16,output=float32"
POLICIES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "bf16 weights": PURE}


def parts(framework: str, policy: str) -> dict[str, float]:
    """Bytes a parameter, by what they are for, after one step."""
    config = from_flags({**TOY, "policy": policy, "device": "cpu"}, accelerator=False)
    built = start(framework, config)
    window = GPT.window(config, 0)
    built.step(built.place(window))()
    state, count = built.state(), params.count(config.model)
    _, gradients = built.loss_and_grads(window.select(0))
    arrays = {
        "weights": list(state.params.values()),
        "moments": [*state.mu.values(), *state.nu.values()],
        "gradients": list(gradients.values()),
    }
    return {what: sum(array.nbytes for array in of) / count for what, of in arrays.items()}


def moments_in_jax() -> list[dict[str, Any]]:
    import jax.numpy as jnp
    import optax

    def row(made: str, optimizer: Any, kept: str, trained: str) -> dict[str, Any]:
        """Made for parameters of one dtype, which are then of another."""
        state = optimizer.init(jnp.zeros(1, kept))
        weights = jnp.zeros(1, trained)
        _, state = optimizer.update(jnp.ones(1, trained), state, weights)
        moments = [str(optax.tree.get(state, name).dtype) for name in ("mu", "nu")]
        return {"made": made, "parameters": trained, "moments": moments}

    plain, narrow = optax.adamw(1e-3), optax.adamw(1e-3, mu_dtype=jnp.bfloat16)
    return [
        row("optax.adamw", plain, "float32", "float32"),
        row("optax.adamw", plain, "bfloat16", "bfloat16"),
        row("optax.adamw(mu_dtype=bfloat16)", narrow, "float32", "float32"),
        row("optax.adamw, parameters narrowed after init", plain, "float32", "bfloat16"),
    ]


def moments_in_torch() -> list[dict[str, Any]]:
    import torch

    def row(made: str, kept: torch.dtype, trained: torch.dtype) -> dict[str, Any]:
        """A step in one dtype; then the parameters are of another."""
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=kept))
        optimizer = torch.optim.AdamW([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        parameter.data = parameter.data.to(trained)
        state = optimizer.state[parameter]
        moments = [
            str(state[name].dtype).removeprefix("torch.") for name in ("exp_avg", "exp_avg_sq")
        ]
        return {"made": made, "parameters": str(trained).removeprefix("torch."), "moments": moments}

    wide, narrow = torch.float32, torch.bfloat16
    return [
        row("torch.optim.AdamW", wide, wide), row("torch.optim.AdamW", narrow, narrow),
        row("torch.optim.AdamW, model narrowed after a step", wide, narrow),
    ]  # fmt: skip


def measure(framework: str) -> dict[str, Any]:
    moments = {"jax": moments_in_jax, "torch": moments_in_torch}[framework]()
    sizes = {label: parts(framework, policy) for label, policy in POLICIES.items()}
    return {"bytes": sizes, "moments": moments}


def markdown(content: dict[str, Any]) -> str:
    kinds = ("weights", "moments", "gradients")
    sizes = tables.markdown([f"{content['framework']}: bytes a parameter", *kinds, "in all"], [
        [label, *(f"{sizes[kind]:g}" for kind in kinds), f"{sum(sizes.values()):g}"]
        for label, sizes in content["bytes"].items()
    ])  # fmt: skip
    moments = tables.markdown(["optimizer", "parameters", "moments"], [
        [row["made"], row["parameters"], ", ".join(row["moments"])] for row in content["moments"]
    ])  # fmt: skip
    return f"{sizes}\n\n{moments}"
