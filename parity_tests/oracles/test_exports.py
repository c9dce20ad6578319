"""Exports: transformers' own model with the weights merged by hand; int8 by the formula of affine
quantization."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from peft import PeftModel
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from lockstep.config import Config
from lockstep.config.rope import parse_rope
from lockstep.data import batches, corpus
from lockstep.data.batch import Batch
from lockstep.judge.compare import norm_gap
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState, initial_state
from lockstep.run import checkpoint
from lockstep.weights import onnx_export
from lockstep.weights.export import export
from lockstep.weights.huggingface import INDEX, SINGLE
from lockstep.weights.onnx_export import export_onnx
from parity_tests import hf_model
from parity_tests.pair import start, toy
from parity_tests.tiers import tier
from parity_tests.weights.folders import config_of, make, run_of

pytestmark = pytest.mark.usefixtures("kept_exporter")

BOUND = 2e-6  # of the logits' norm, in float32
T = 12
SMALL: dict[str, Any] = {"n_layer": 2, "n_head": 4, "d_model": 32, "context": T, "vocab": 256}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "norm_eps": 1e-3, "mlp": "gelu-erf", "tied": False, "mlp_dim": 80},
    "gpt2-lora": {"family": "gpt2", "lora_rank": 3, "lora_alpha": 2.5},
    "llama-lora": {"family": "tiny", "n_kv_head": 2, "lora_rank": 3, "tied": True,
                   "lora_targets": "*.qkv,blocks.1",
                   "rope": "base=500,factor=4,low=1,high=4,original=16"},
    "qwen2": {"family": "tiny", "n_kv_head": 1, "qkv_bias": True, "rope": "base=700"},
    "qwen3": {"family": "tiny", "n_kv_head": 2, "qk_norm": True, "head_dim": 10, "norm_eps": 1e-3,
              "padded_vocab": 264},
}  # fmt: skip
FORMS = {"safetensors": [*MODELS], "onnx": [*MODELS]}
EXPORTED = [(form, name) for form, names in FORMS.items() for name in names]


def is_dear(form: str, name: str) -> bool:
    return form == "onnx" and name != "llama-lora"


def trained(run: Path, name: str) -> tuple[Config, TrainState]:
    """A run whose weights at step 1, adapters too, are far from where they began, and from those of
    step 2."""
    config = toy(**{**SMALL, **MODELS[name]}, policy="fp32")
    run_of(run, "torch", config)
    random = np.random.Generator(np.random.Philox(1))
    state = initial_state(config)
    noise = {n: x + random.normal(0, 0.1, x.shape).astype("f4") for n, x in state.params.items()}
    state = start("torch", config, replace(state, params=noise, step=1)).state()
    other = {name: 2 * x for name, x in state.params.items()}
    for each in (state, replace(state, params=other, step=2)):
        checkpoint.save(run, each, keep=2)
    return config, state


def merged_by_hand(config: Config, params: Arrays) -> Arrays:
    """W + alpha / rank B A (Hu et al. 2021), without the rows that pad the vocabulary."""
    found = {}
    for name, x in params.items():
        module, _, kind = name.rpartition(".")
        if kind.startswith("lora"):
            continue
        if kind == "weight" and f"{module}.lora_a" in params:
            a, b = (params[f"{module}.lora_{each}"].astype(float) for each in "ab")
            x = x + config.model.lora_alpha / config.model.lora_rank * (b @ a)
        found[name] = x[:256] if name in ("embed.weight", "head.weight") else x
    return found


TOKENS = np.random.default_rng(5).integers(256, size=(2, T))  # the whole context


@torch.no_grad()
def expected_logits(config: Config, params: Arrays) -> np.ndarray:
    model = replace(config.model, lora_rank=0, lora_targets="", padded_vocab=0)
    net = hf_model.build(model).double()
    hf_model.load(net, model, merged_by_hand(config, params))
    return net(torch.from_numpy(TOKENS)).logits.numpy()


def load(graph: onnx.ModelProto) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Load a graph: tokens (B, T) -> its outputs."""
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=providers)
    return lambda tokens: session.run(None, {"tokens": tokens.astype(np.int64)})


def exported_logits(form: str, run: Path, to: Path) -> np.ndarray:
    """Returns the logits that a user of the format gets."""
    if form == "onnx":
        export_onnx(run, to, step=1, int8=False, warn=pytest.fail)
        return load(onnx.load(to / onnx_export.FILE))(TOKENS)[0]
    export(run, to, step=1, warn=pytest.fail)
    with torch.no_grad():
        net = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32)
        return net(torch.from_numpy(TOKENS)).logits.numpy()


@tier("rest", guard="GPT-2, or a Llama with adapters", where=is_dear)
@pytest.mark.parametrize(("form", "name"), EXPORTED)
def test_exported_logits(form: str, name: str, folder: Path) -> None:
    """In float32 the exported program has the logits of transformers' model, at each place."""
    config, state = trained(folder / "run", name)
    expected = expected_logits(config, state.params)
    found = exported_logits(form, folder / "run", folder / "to")
    assert found.shape == expected.shape == (2, T, 256)
    assert max(norm_gap(found[:, t], expected[:, t]) for t in range(T)) < BOUND


@pytest.mark.parametrize("name", ["gpt2-lora", "llama-lora"])
def test_exported_adapters_in_peft(name: str, folder: Path) -> None:
    """PEFT, with transformers' model of the weights alone, has the logits of both together."""
    config, state = trained(folder / "run", name)
    export(folder / "run", folder / "to", step=1, warn=pytest.fail, only_adapters=True)
    base = config.model.base
    net = hf_model.build(base)
    alone = {name: x for name, x in state.params.items() if ".lora_" not in name}
    hf_model.load(net, base, alone)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, which PEFT asks
        found = PeftModel.from_pretrained(net, str(folder / "to"))(torch.from_numpy(TOKENS)).logits
    assert norm_gap(found.numpy(), expected_logits(config, state.params)) < BOUND


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_index_matches_transformers(dtype: str, folder: Path) -> None:
    """The index of several files is transformers' own: where each tensor is, and all bytes; also
    where the first two tensors are just as large as a file may be."""
    whole = make(folder / "whole", "gpt2", getattr(torch, dtype))
    tables = load_file(whole / SINGLE)
    first, second = (tables[f"transformer.{name}.weight"] for name in ("wte", "wpe"))
    for number, most in enumerate((10_000, first.nbytes + second.nbytes)):
        there, run, to = (folder / f"{name}{number}" for name in ("there", "run", "to"))
        make(there, "gpt2", getattr(torch, dtype), max_shard_size=most)
        run_of(run, "torch", config_of(there, policy="fp32"))
        export(run, to, dtype=dtype, warn=pytest.fail, shard_bytes=most)
        ours, theirs = (json.loads((each / INDEX).read_text()) for each in (to, there))
        assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
        assert ours["weight_map"] == theirs["weight_map"]


ROPE = {"rope_type": "llama3", "rope_theta": 3580165449.0, "factor": 8.123456789012345,
        "low_freq_factor": 1.000000123456789, "high_freq_factor": 4.123456789012345,
        "original_max_position_embeddings": 8_192_003}  # fmt: skip
EPS = 1.234567890123456e-6
WHOLE: dict[str, dict[str, Any]] = {
    "gpt2": {"layer_norm_epsilon": EPS},
    "llama": {"rms_norm_eps": EPS, "rope_parameters": ROPE},
    "qwen2": {"rms_norm_eps": EPS, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000003.141592653}},
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
def test_config_keeps_every_digit(kind: str, folder: Path) -> None:
    """Every digit of a number of transformers' config reaches the model, and comes back: rates of
    RoPE of 7 and more digits, an epsilon."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
             "hidden_size": 16, "intermediate_size": 24, "vocab_size": 40,
             "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    theirs = AutoConfig.for_model(kind, **sizes, **WHOLE[kind])
    AutoModelForCausalLM.from_config(theirs).save_pretrained(folder / "there")
    config = config_of(folder / "there", policy="fp32")
    run_of(folder / "run", "torch", config)
    export(folder / "run", folder / "to", warn=pytest.fail)
    found = AutoConfig.from_pretrained(folder / "to")
    assert {name: getattr(found, name) for name in WHOLE[kind]} == WHOLE[kind]
    assert config.model.norm_eps == EPS
    if rope := WHOLE[kind].get("rope_parameters"):
        rope = {name: x for name, x in rope.items() if name != "rope_type"}
        assert [*parse_rope(config.model.rope)][: len(rope)] == [*rope.values()]


TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{% endfor %}"


def test_files_beside_the_weights(folder: Path) -> None:
    """transformers finds in an export what its own folder had: how a chat is written, where a text
    ends, and how one is generated."""
    there = make(folder / "there", "gpt2")
    inner = Tokenizer(WordLevel({"<s>": 0, "user:": 1, "yes": 2, "</s>": 3}, unk_token="</s>"))
    inner.pre_tokenizer = WhitespaceSplit()
    words = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    words.save_pretrained(there)
    GenerationConfig(max_length=77, eos_token_id=3).save_pretrained(there)
    run_of(folder / "run", "torch", config_of(there, policy="fp32"))
    export(folder / "run", folder / "to", warn=pytest.fail)
    found = AutoTokenizer.from_pretrained(folder / "to")
    chat = [{"role": "user", "content": "yes"}]
    assert found.chat_template == TEMPLATE
    assert found.apply_chat_template(chat, tokenize=False) == "<s>user: yes"
    assert (found.eos_token, found("user: yes </s>")["input_ids"]) == ("</s>", [1, 2, 3])
    assert (folder / "to" / "generation_config.json").exists()
    generation = GenerationConfig.from_pretrained(folder / "to")
    assert (generation.max_length, generation.eos_token_id) == (77, 3)


LONGEST = {"gpt2": 8, "llama3": 12}  # RoPE has no table of places among the weights


@pytest.mark.parametrize("name", LONGEST)
def test_shorter_context(name: str, folder: Path) -> None:
    """After a run of 8 tokens of 12, in another dtype: transformers loads what the run has, and
    keeps what else its start said."""
    there, to, short = make(folder / "there", name), folder / "to", torch.from_numpy(TOKENS[:, :8])
    content = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(content | {"eos_token_id": 7}))
    run_of(folder / "run", "torch", config_of(there, policy="fp32").replace(context=8))
    export(folder / "run", to, dtype="bfloat16", warn=pytest.fail)
    found = AutoConfig.from_pretrained(to)
    assert found.max_position_embeddings == LONGEST[name]
    assert (found.eos_token_id, found.dtype) == (7, torch.bfloat16)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16).float()
        for each in (to, there)
    )
    assert torch.equal(ours(short).logits, theirs(short).logits)


# --- int8


def initializers(graph: onnx.ModelProto) -> Arrays:
    return {x.name: numpy_helper.to_array(x) for x in graph.graph.initializer}


@tier("rest", guard="the export in float32")
def test_int8_matches_its_formula(folder: Path) -> None:
    """Each activation's scale and zero point are of the least and the largest number that any of
    the first eight steps' windows makes, as onnxruntime computes them in float32; a weight's scale
    is of its row. The file loses little, by its logits and by its stated losses."""
    config, state = trained(folder / "run", "gpt2")
    export_onnx(folder / "run", folder / "whole", step=1, int8=False, warn=pytest.fail)
    told = export_onnx(folder / "run", folder / "int8", step=1, int8=True, warn=pytest.fail)
    whole, int8 = (onnx.load(folder / name / onnx_export.FILE) for name in ("whole", "int8"))
    constants = initializers(whole)
    products = [node for node in whole.graph.node
                if node.op_type == "Gemm" and node.input[1] in constants]  # fmt: skip
    assert len(products) == 2 * 4 + 1
    seen = sorted({node.input[0] for node in products})
    watched = onnx.ModelProto()
    watched.CopyFrom(whole)
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in seen)
    data, run_watched = corpus.load(**vars(config.data)), load(watched)
    low, high = dict.fromkeys(seen, 0.0), dict.fromkeys(seen, 0.0)
    for step in range(8):
        for tokens in batches.of_step(config, data.train, step).tokens:
            for name, x in zip(seen, run_watched(tokens)[1:]):
                low[name] = min(low[name], float(x.min()))
                high[name] = max(high[name], float(x.max()))
    found = initializers(int8)
    for name in seen:
        scale = (high[name] - low[name]) / 255
        assert np.isclose(found[f"{name}_scale"], scale, rtol=1e-5), name
        assert found[f"{name}_zero_point"] == np.rint(-low[name] / scale), name
    for node in products:
        name, weight = node.input[1], constants[node.input[1]]
        scale = np.abs(weight).max(1) / 127
        assert np.allclose(found[f"{name}_scale"], scale, rtol=1e-5)
        assert not found[f"{name}_zero_point"].any()
        assert np.abs(found[f"{name}_quantized"] - np.rint(weight / scale[:, None])).max() <= 1
    expected = expected_logits(config, state.params)
    assert norm_gap(load(int8)(TOKENS)[0], expected) < 0.1
    held_out = batches.validation(config, data.val)
    for loss, graph in ((told.float32_loss, whole), (told.loss, int8)):
        run = load(graph)
        scores = np.stack([run(x)[0] for x in held_out.tokens]).astype(float)
        logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        hand = -np.take_along_axis(logs, held_out.targets[..., None], -1).mean()
        assert abs(loss - hand) < 1e-6


def test_masked_loss() -> None:
    """The stated loss is the mean over what counts, however many count in each batch."""
    random = np.random.default_rng(2)
    scores, targets = random.normal(size=(7, 7)), random.integers(7, size=(3, 2, T))
    counts = random.random(targets.shape) < np.array([0.1, 0.5, 0.9])[:, None, None]
    tokens = random.integers(7, size=targets.shape)
    window = Batch(tokens, np.where(counts, targets, 0), counts)
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    hand = -logs[tokens[counts], targets[counts]].mean()
    assert abs(onnx_export.mean_loss(lambda given: scores[given], window) - hand) < 1e-12
