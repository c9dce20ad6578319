"""Bonsai's UMT5 in NNX, beside transformers', which its tests compare it to."""

from typing import Any

from benchmarks.public_ports.programs import (
    Pair,
    Program,
    Source,
    import_package,
    in_torch,
    integers,
    weighted,
)

REPOSITORY = "jax-ml/bonsai"
UMT5: dict[str, Any] = {
    "vocab_size": 19, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
    "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
OWN: dict[str, Any] = {"attn_implementation": "eager", "feed_forward_proj": "gated-gelu"}


def translations(step: int) -> list[Any]:
    return [1 + integers(step, 18, 2, 9), 1 + integers(step + 1000, 18, 2, 7)]


def of_torch() -> Program:
    import transformers

    def make() -> Any:
        return transformers.UMT5Model(transformers.UMT5Config(**UMT5, **OWN)).eval()

    def call(model: Any, batch: Any) -> Any:
        return model(batch[0], decoder_input_ids=batch[1]).last_hidden_state

    return in_torch(make, call, translations)


def of_nnx() -> Program:
    from flax import nnx

    made = import_package(REPOSITORY, "bonsai.models.umt5.modeling")

    def build(seed: int) -> Any:
        model = made.UMT5Model(made.ModelConfig(**UMT5), rngs=nnx.Rngs(seed))
        model.eval()
        return model

    def loss(model: Any, batch: Any) -> Any:
        found = model(input_ids=batch[0], decoder_input_ids=batch[1])
        return weighted(found if hasattr(found, "shape") else found[0])

    return Program(build, loss)


PAIRS = [
    Pair("bonsai umt5",
         Source("huggingface/transformers",
                "src/transformers/models/umt5/modeling_umt5.py", "transformers"),
         Source(REPOSITORY, "bonsai/models/umt5/modeling.py"), (of_torch, of_nnx),
         own_tests="a given tolerance for each part", differs=True, by_hand="read",
         why="two embeddings, for one that both halves share: they part in training"),
]  # fmt: skip
