"""RecurrentGemma's Griffin, in PyTorch and in Linen, in one repository."""

from typing import Any

from benchmarks.public_ports.programs import (
    Pair,
    Program,
    Source,
    import_package,
    in_linen,
    in_torch,
    integers,
)

REPOSITORY = "google-deepmind/recurrentgemma"


def make_config(kind: str) -> Any:
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


def of_torch(kind: str) -> Program:
    import torch

    config, module = make_config(kind), import_package(REPOSITORY, "recurrentgemma.torch.griffin")

    def call(model: Any, tokens: Any) -> Any:
        positions = torch.arange(tokens.shape[1]).expand(*tokens.shape)
        return model(tokens, positions, return_cache=False)[0]

    return in_torch(lambda: module.Griffin(config, gradient_checkpointing=False), call, texts)


def of_linen(kind: str) -> Program:
    import jax.numpy as jnp

    module = import_package(REPOSITORY, "recurrentgemma.jax.griffin")
    model = module.Griffin(make_config(kind), gradient_checkpointing=False)

    def arguments(tokens: Any) -> tuple[Any, Any]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return jnp.asarray(tokens), positions

    return in_linen(model, texts, arguments, lambda output, tokens: output[0], return_cache=False)


def pair(kind: str) -> Pair:
    return Pair(
        f"recurrentgemma {kind}", Source(REPOSITORY, "recurrentgemma/torch/griffin.py"),
        Source(REPOSITORY, "recurrentgemma/jax/griffin.py"),
        (lambda: of_torch(kind), lambda: of_linen(kind)),
        own_tests="none that compares the two",
        differs=False, by_hand="read; some initial values have another scale",
    )  # fmt: skip


PAIRS = [pair("griffin"), pair("hawk")]
