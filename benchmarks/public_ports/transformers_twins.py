"""transformers' own models in Linen, beside those in PyTorch, of the last releases that have both.

`--python` names an interpreter with such a release. Its Linen models work with jax 0.4.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.public_ports.programs import (
    Pair,
    Program,
    Source,
    in_torch,
    integers,
    normal,
    of_transformers,
    weighted,
)

REPOSITORY = "huggingface/transformers"
V, T = 19, 9  # tokens known, and in a text
WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 24}  # fmt: skip
BERT = {"vocab_size": V, "max_position_embeddings": 16, "type_vocab_size": 2, **WIDTHS,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0}  # fmt: skip
BART = {"vocab_size": V, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24, "max_position_embeddings": 16, "dropout": 0.0,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2,
        "decoder_start_token_id": 1}  # fmt: skip
T5 = {"vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
      "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1,
      "decoder_start_token_id": 0}  # fmt: skip
GPT = {"vocab_size": V, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2,
       "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
       "eos_token_id": 2}  # fmt: skip
LLAMA = {"vocab_size": V, **WIDTHS, "num_key_value_heads": 1, "max_position_embeddings": 16,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
VIT = {**WIDTHS, "image_size": 16, "patch_size": 4, "num_labels": 7,
       "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip

Inputs = dict[str, Any]


def text(step: int) -> Inputs:
    """Two texts, the first of which is padded on the right."""
    mask = (integers(0, 1, 2, T) + 1).astype("int64")
    mask[0, 6:] = 0
    return {"input_ids": integers(step, V - 3, 2, T) + 3, "attention_mask": mask}


def texts(step: int) -> Inputs:
    return {**text(step), "decoder_input_ids": integers(step + 1000, V - 3, 2, 7) + 3}


def picture(step: int) -> Inputs:
    return {"pixel_values": normal(step, 2, 3, 16, 16)}


def speech(step: int) -> Inputs:
    return {"input_features": normal(step, 2, 6, 20),
            "decoder_input_ids": integers(step, V - 3, 2, 7) + 3}  # fmt: skip


class Twin(NamedTuple):
    """A model, its configuration, and what it takes."""

    model: str
    config: str
    folder: str
    sizes: dict[str, Any]
    inputs: Callable[[int], Inputs]
    why: str = ""
    differs: bool | None = None
    by_hand: str = ""


TWINS = (
    Twin("BertForMaskedLM", "BertConfig", "bert", BERT, text),
    Twin("RobertaForMaskedLM", "RobertaConfig", "roberta", BERT, text),
    Twin("XLMRobertaForMaskedLM", "XLMRobertaConfig", "xlm_roberta", BERT, text),
    Twin("RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig", "roberta_prelayernorm",
         BERT, text),
    Twin("ElectraForMaskedLM", "ElectraConfig", "electra", BERT | {"embedding_size": 12}, text),
    Twin("AlbertForMaskedLM", "AlbertConfig", "albert", BERT | {"embedding_size": 12}, text),
    Twin("BigBirdForMaskedLM", "BigBirdConfig", "big_bird",
         BERT | {"attention_type": "original_full"}, text),
    Twin("DistilBertForMaskedLM", "DistilBertConfig", "distilbert",
         {"vocab_size": V, "max_position_embeddings": 16, "dim": 16, "n_layers": 2, "n_heads": 2,
          "hidden_dim": 24, "dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0}, text),
    Twin("GPT2LMHeadModel", "GPT2Config", "gpt2", GPT, text),
    Twin("GPTJForCausalLM", "GPTJConfig", "gptj", GPT | {"rotary_dim": 4}, text),
    Twin("GPTNeoForCausalLM", "GPTNeoConfig", "gpt_neo",
         {"vocab_size": V, "max_position_embeddings": 16, "hidden_size": 16, "num_layers": 2,
          "num_heads": 2, "intermediate_size": 24, "attention_types": [[["global", "local"], 1]],
          "window_size": 4, "embed_dropout": 0.0, "attention_dropout": 0.0,
          "resid_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}, text),
    Twin("BloomForCausalLM", "BloomConfig", "bloom",
         {"vocab_size": V, "hidden_size": 16, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0,
          "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}, text),
    Twin("OPTForCausalLM", "OPTConfig", "opt",
         {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
          "ffn_dim": 24, "max_position_embeddings": 16, "dropout": 0.0, "word_embed_proj_dim": 16,
          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, text),
    Twin("XGLMForCausalLM", "XGLMConfig", "xglm",
         {"vocab_size": V, "d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 24,
          "max_position_embeddings": 16, "dropout": 0.0, "attention_dropout": 0.0,
          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, text),
    Twin("LlamaForCausalLM", "LlamaConfig", "llama", LLAMA, text),
    Twin("MistralForCausalLM", "MistralConfig", "mistral", LLAMA | {"sliding_window": 4}, text),
    Twin("GemmaForCausalLM", "GemmaConfig", "gemma", LLAMA | {"head_dim": 8}, text),
    Twin("T5ForConditionalGeneration", "T5Config", "t5", T5, texts),
    Twin("MT5ForConditionalGeneration", "MT5Config", "mt5", T5, texts),
    Twin("LongT5ForConditionalGeneration", "LongT5Config", "longt5",
         T5 | {"local_radius": 2}, texts),
    Twin("BartForConditionalGeneration", "BartConfig", "bart", BART, texts),
    Twin("MBartForConditionalGeneration", "MBartConfig", "mbart", BART, texts),
    Twin("PegasusForConditionalGeneration", "PegasusConfig", "pegasus", BART, texts),
    Twin("MarianMTModel", "MarianConfig", "marian", BART, texts),
    Twin("BlenderbotForConditionalGeneration", "BlenderbotConfig", "blenderbot", BART, texts),
    Twin("WhisperForConditionalGeneration", "WhisperConfig", "whisper",
         BART | {"max_source_positions": 10, "max_target_positions": 8, "num_mel_bins": 6}, speech),
    Twin("ViTForImageClassification", "ViTConfig", "vit", VIT, picture),
    Twin("BeitForImageClassification", "BeitConfig", "beit",
         VIT | {"layer_scale_init_value": 0.5, "drop_path_rate": 0.0,
                "use_relative_position_bias": True}, picture),
    Twin("Dinov2ForImageClassification", "Dinov2Config", "dinov2",
         VIT | {"mlp_ratio": 2, "layerscale_value": 0.5}, picture),
    Twin("ResNetForImageClassification", "ResNetConfig", "resnet",
         {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2], "num_labels": 7,
          "layer_type": "basic"}, picture),
    Twin("RegNetForImageClassification", "RegNetConfig", "regnet",
         {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2], "groups_width": 4,
          "num_labels": 7}, picture),
)  # fmt: skip


def output_of(found: Any, batch: Inputs) -> Any:
    """Logits; of a text, those of positions that are no padding."""
    logits = found["logits"]
    if "attention_mask" in batch and logits.shape[:2] == batch["attention_mask"].shape:
        return logits * batch["attention_mask"][..., None]
    return logits


def of_torch(twin: Twin) -> Program:
    def call(model: Any, batch: Inputs) -> Any:
        takes = inspect.signature(model.forward).parameters
        cached = {"use_cache": False} if "use_cache" in takes else {}
        return output_of(model(**batch, **cached), batch)

    return in_torch(lambda: of_transformers(twin.model, twin.config, twin.sizes), call, twin.inputs)


def in_linen(twin: Twin) -> Program:
    import jax
    import transformers

    config = getattr(transformers, twin.config)(**twin.sizes)
    shape = {} if "input_features" not in twin.inputs(0) else {"input_shape": (1, 6, 20)}
    model = getattr(transformers, f"Flax{twin.model}")(config, seed=0, **shape)
    stateful = "batch_stats" in model.params

    def build(seed: int) -> Any:
        made = model.init_weights(jax.random.PRNGKey(seed), model.input_shape)
        return dict(made) if stateful else {"params": made}

    def loss(variables: Any, batch: Inputs) -> Any:
        params = variables if stateful else variables["params"]
        return weighted(output_of(model(**batch, params=params), batch))

    return Program(build, loss)


def pair(twin: Twin) -> Pair:
    folder = f"src/transformers/models/{twin.folder}"
    return Pair(
        f"transformers {twin.model}",
        Source(REPOSITORY, f"{folder}/modeling_{twin.folder}.py", "transformers"),
        Source(REPOSITORY, f"{folder}/modeling_flax_{twin.folder}.py", "transformers"),
        (lambda: of_torch(twin), lambda: in_linen(twin)),
        own_tests="outputs within 1e-4 (at 00c60e4)",
        why=twin.why, differs=twin.differs, by_hand=twin.by_hand,
    )  # fmt: skip


PAIRS = [pair(twin) for twin in TWINS]
