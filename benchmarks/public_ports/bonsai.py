"""Bonsai's models in NNX, beside those of transformers, which their tests compare them to."""

from collections.abc import Callable
from typing import Any

from benchmarks.public_ports import programs
from benchmarks.public_ports.programs import (
    Pair,
    Program,
    Source,
    import_package,
    integers,
    normal,
    of_transformers,
    to_nhwc,
    weighted,
)

REPOSITORY = "jax-ml/bonsai"


def modeling(name: str) -> Any:
    return import_package(REPOSITORY, f"bonsai.models.{name}.modeling")


def in_torch(name: str, config: str, sizes: dict[str, Any], call: Callable[[Any, Any], Any],
             batch: Callable[[int], Any]) -> Program:  # fmt: skip
    return programs.in_torch(lambda: of_transformers(name, config, sizes), call, batch)


def in_nnx(make: Callable[[Any], Any], call: Callable[[Any, Any], Any]) -> Program:
    """A module of NNX, of which `make` gets the random numbers."""

    from flax import nnx

    def build(seed: int) -> Any:
        model = make(nnx.Rngs(seed))
        model.eval()
        return model

    return Program(build, lambda model, inputs: weighted(call(model, inputs)))


def pictures(step: int) -> Any:
    return normal(step, 2, 3, 16, 16)


# --- Vision Transformer


def vit_in_torch() -> Program:
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 7,
             "layer_norm_eps": 1e-12}  # fmt: skip
    return in_torch("ViTForImageClassification", "ViTConfig", sizes,
                    lambda model, x: model(x).logits, pictures)  # fmt: skip


def vit_in_nnx() -> Program:
    made = modeling("vit")
    config = made.ModelConfig(
        image_size=(16, 16), patch_size=(4, 4), num_channels=3, hidden_dim=16,
        attn_dropout_prob=0.0, dropout_prob=0.0, num_heads=2, mlp_dim=24, eps=1e-12,
        num_layers=2, num_labels=7,
    )  # fmt: skip
    return in_nnx(lambda rngs: made.ViTClassificationModel(config, rngs=rngs),
                  lambda model, x: model(to_nhwc(x), rngs=None))  # fmt: skip


# --- Whisper

WHISPER = {"d_model": 16, "decoder_attention_heads": 2, "decoder_ffn_dim": 24,
           "decoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
           "encoder_layers": 2, "max_source_positions": 10, "max_target_positions": 8,
           "num_mel_bins": 6, "vocab_size": 19}  # fmt: skip


def speech(step: int) -> list[Any]:
    return [normal(step, 2, 6, 20), integers(step, 19, 2, 8)]


def whisper_in_torch() -> Program:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return in_torch(
        "WhisperModel", "WhisperConfig", WHISPER | tokens,
        lambda model, x: model(x[0], decoder_input_ids=x[1]).last_hidden_state, speech,
    )  # fmt: skip


def whisper_in_nnx() -> Program:
    import dataclasses

    import jax.numpy as jnp
    from flax import nnx

    made = modeling("whisper")
    preset = next(
        value
        for name in vars(made.ModelConfig)
        if name.startswith("whisper")
        and isinstance(value := getattr(made.ModelConfig, name)(), made.ModelConfig)
    )
    config = dataclasses.replace(preset, **WHISPER)
    causal = nnx.make_causal_mask(jnp.zeros((2, 8)))

    def call(model: Any, batch: Any) -> Any:
        hidden = model.encoder(batch[0].transpose(0, 2, 1))
        return model.decoder(batch[1], causal, hidden, None, False)

    return in_nnx(lambda rngs: made.Whisper(config, rngs=rngs), call)


# --- Mamba 2


def tokens(step: int) -> Any:
    return integers(step, 19, 2, 12)


def mamba_in_torch() -> Program:
    sizes = {"vocab_size": 19, "hidden_size": 16, "state_size": 6, "head_dim": 4, "num_heads": 8,
             "n_groups": 1, "chunk_size": 4, "expand": 2, "num_hidden_layers": 2,
             "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 0,
             "eos_token_id": 0}  # fmt: skip
    return in_torch("Mamba2ForCausalLM", "Mamba2Config", sizes,
                    lambda model, x: model(x, use_cache=False).logits, tokens)  # fmt: skip


def mamba_in_nnx() -> Program:
    made = modeling("mamba2")
    config = made.ModelConfig(vocab_size=19, hidden_size=16, state_size=6, head_dim=4,
                              chunk_size=4, num_hidden_layers=2)  # fmt: skip
    return in_nnx(lambda rngs: made.Mamba2ForCausalLM(config, rngs=rngs),
                  lambda model, x: model(x)["logits"])  # fmt: skip


# --- ConvNeXt


def convnext_in_torch() -> Program:
    sizes = {"depths": [1, 2], "hidden_sizes": [8, 12], "num_stages": 2, "num_labels": 7,
             "layer_scale_init_value": 0.5}  # fmt: skip
    return in_torch("ConvNextForImageClassification", "ConvNextConfig", sizes,
                    lambda model, x: model(x).logits, pictures)  # fmt: skip


def convnext_in_nnx() -> Program:
    made = modeling("convnext")
    config = made.ModelConfig(stage_depths=[1, 2], stage_dims=[8, 12], drop_path_rate=0.0,
                              num_classes=7, layer_scale_init_value=0.5)  # fmt: skip
    return in_nnx(lambda rngs: made.ConvNeXt(config, rngs=rngs),
                  lambda model, x: model(to_nhwc(x), rngs=None))  # fmt: skip


# --- DINOv3

DINO = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 16, "num_register_tokens": 2}  # fmt: skip


def dino_in_torch(gated: bool) -> Program:
    return in_torch(
        "DINOv3ViTModel", "DINOv3ViTConfig", DINO | {"patch_size": 4, "use_gated_mlp": gated},
        lambda model, x: model(x).last_hidden_state, pictures,
    )  # fmt: skip


def dino_in_nnx(gated: bool) -> Program:
    made = modeling("dinov3")
    config = made.ModelConfig(**DINO, patch_size=(4, 4), use_gated_mlp=gated)
    return in_nnx(lambda rngs: made.Dinov3ViTModel(config, rngs=rngs),
                  lambda model, x: model(x)["last_hidden_state"])  # fmt: skip


# --- UMT5

UMT5 = {"vocab_size": 19, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
        "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1,
        "decoder_start_token_id": 0}  # fmt: skip


def translations(step: int) -> list[Any]:
    return [1 + integers(step, 18, 2, 9), 1 + integers(step + 1000, 18, 2, 7)]


def umt5_in_torch() -> Program:
    return in_torch(
        "UMT5Model", "UMT5Config", UMT5 | {"feed_forward_proj": "gated-gelu"},
        lambda model, x: model(x[0], decoder_input_ids=x[1]).last_hidden_state, translations,
    )  # fmt: skip


def umt5_in_nnx() -> Program:
    made = modeling("umt5")

    def call(model: Any, batch: Any) -> Any:
        found = model(input_ids=batch[0], decoder_input_ids=batch[1])
        return found if hasattr(found, "shape") else found[0]

    return in_nnx(lambda rngs: made.UMT5Model(made.ModelConfig(**UMT5), rngs=rngs), call)


def pair(name: str, port: str, reference: str, torch_side: Callable[[], Program],
         nnx_side: Callable[[], Program], own_tests: str, **known: Any) -> Pair:  # fmt: skip
    """A model of Bonsai.

    Args:
        port: its folder.
        reference: the module of transformers.
    """
    return Pair(
        f"bonsai {name}",
        Source("huggingface/transformers",
               f"src/transformers/models/{reference}/modeling_{reference}.py", "transformers"),
        Source(REPOSITORY, f"bonsai/models/{port}/modeling.py"),
        (torch_side, nnx_side), own_tests=own_tests, **known,
    )  # fmt: skip


DINO_TESTS = "absolute 2e-2 for the output"
DINO_KNOWN: dict[str, Any] = {
    "differs": True,
    "why": "GELU by tanh, for GELU by erf; rotary positions in bfloat16",
    "by_hand": "run in float32 with the weights converted and the GELU mended",
}
PAIRS = [
    pair("vit", "vit", "vit", vit_in_torch, vit_in_nnx, "absolute 1e-1 for the logits",
         differs=True, why="GELU by tanh, for GELU by erf", by_hand="read"),
    pair("whisper", "whisper", "whisper", whisper_in_torch, whisper_in_nnx,
         "absolute 5e-2 for the decoder", differs=True, by_hand="read",
         why="two GELUs of the encoder by tanh, for erf; keys have a bias; the encoder's positions "
         "train"),
    pair("mamba 2", "mamba2", "mamba2", mamba_in_torch, mamba_in_nnx, "relative 1e-5",
         differs=False, by_hand="read"),
    pair("convnext", "convnext", "convnext", convnext_in_torch, convnext_in_nnx,
         "absolute 2e-5 for the logits", differs=True, by_hand="read",
         why="norms have eps 1e-12, for 1e-6 in all but the last"),
    pair("dino v3", "dinov3", "dinov3_vit", lambda: dino_in_torch(False),
         lambda: dino_in_nnx(False), DINO_TESTS, **DINO_KNOWN),
    pair("dino v3, gated", "dinov3", "dinov3_vit", lambda: dino_in_torch(True),
         lambda: dino_in_nnx(True), DINO_TESTS, **DINO_KNOWN),
    pair("umt5", "umt5", "umt5", umt5_in_torch, umt5_in_nnx, "a given tolerance for each part",
         differs=True, by_hand="read", why="two embeddings, for one that both halves share: they "
         "part in training"),
]  # fmt: skip
