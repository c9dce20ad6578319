"""RecurrentGemma's Griffin, in PyTorch and in Linen, in one repository."""

from typing import Any

from benchmarks.public_ports.programs import (
    Pair,
    Program,
    Source,
    import_package,
    integers,
    weighted,
)

REPOSITORY = "google-deepmind/recurrentgemma"


def config(kind: str) -> Any:
    """A small Griffin: two recurrent blocks and one of attention; or Hawk, without attention."""
    common = import_package(REPOSITORY, "recurrentgemma.common")
    blocks = common.TemporalBlockType
    attention = blocks.ATTENTION if kind == "griffin" else blocks.RECURRENT
    return common.GriffinConfig(
        vocab_size=19, width=16, mlp_expanded_width=24, num_heads=2,
        block_types=(blocks.RECURRENT, blocks.RECURRENT, attention),
        embeddings_scale_by_sqrt_dim=kind == "griffin", attention_window_size=4,
        logits_soft_cap=30.0 if kind == "griffin" else 0.0, lru_width=16,
        scan_type=common.ScanType.LINEAR_NATIVE,
    )  # fmt: skip


def texts(step: int) -> Any:
    return integers(step, 19, 2, 10)


def in_torch(kind: str) -> Program:
    import torch

    sizes, module = config(kind), import_package(REPOSITORY, "recurrentgemma.torch.griffin")

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        return module.Griffin(sizes, gradient_checkpointing=False)

    def loss(model: Any, tokens: Any) -> Any:
        positions = torch.arange(tokens.shape[1]).expand(*tokens.shape)
        return weighted(model(tokens, positions, return_cache=False)[0])

    return Program(build, loss, texts)


def in_linen(kind: str) -> Program:
    import jax
    import jax.numpy as jnp

    sizes, module = config(kind), import_package(REPOSITORY, "recurrentgemma.jax.griffin")
    model = module.Griffin(sizes, gradient_checkpointing=False)

    def positions(tokens: Any) -> Any:
        return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def build(seed: int) -> Any:
        tokens = jnp.asarray(texts(0), jnp.int32)
        init = jax.jit(lambda key: model.init(key, tokens, positions(tokens)))
        return init(jax.random.PRNGKey(seed))

    def loss(weights: Any, tokens: Any) -> Any:
        output = model.apply(weights, tokens, positions(tokens), return_cache=False)
        return weighted(output[0])

    return Program(build, loss)


def pair(kind: str) -> Pair:
    return Pair(
        f"recurrentgemma {kind}", Source(REPOSITORY, "recurrentgemma/torch/griffin.py"),
        Source(REPOSITORY, "recurrentgemma/jax/griffin.py"),
        (lambda: in_torch(kind), lambda: in_linen(kind)),
        own_tests="none that compares the two",
        differs=False, by_hand="read; some initial values have another scale",
    )  # fmt: skip


PAIRS = [pair("griffin"), pair("hawk")]
