"""transformers' folders in and out: bit for bit, in little memory, and every mistake by name."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.cli import commands, trainers
from lockstep.config import huggingface
from lockstep.errors import UserError
from lockstep.run import checkpoint, directory
from lockstep.train import sampling
from lockstep.weights import init
from lockstep.weights.export import export
from parity_tests.pair import FRAMEWORKS, start, toy
from parity_tests.weights.folders import FAMILIES, config_of, make, run_of, tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "dtype", "framework"),
    [("gpt2", "float32", "jax"), ("llama3", "float32", "torch"), ("qwen3", "bfloat16", "jax"),
     ("gpt2", "bfloat16", "torch")],
)  # fmt: skip
def test_there_and_back_is_the_same_bits(
    name: str, dtype: str, framework: str, tmp_path: Path
) -> None:
    """Sharded or not; bfloat16 through a run that keeps its weights in float32."""
    shards = {"max_shard_size": "10KB"} if name == "qwen3" else {}
    there = make(tmp_path / "there", name, DTYPES[dtype], **shards)
    assert (there / "model.safetensors.index.json").exists() == bool(shards)
    config = config_of(there, policy="bf16")
    run_of(tmp_path / "run", framework, config)
    back = tmp_path / "back"
    most = 10_000 if shards else None
    export(tmp_path / "run", back, step=None, dtype=dtype, warn=pytest.fail, shard_bytes=most)
    assert tensors(back) == tensors(there)
    files = [sorted(path.name for path in folder.glob("model*")) for folder in (back, there)]
    assert files[0] == files[1]
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder).config.to_dict() for folder in (back, there)
    )
    assert ours | {"_name_or_path": ""} == theirs | {"_name_or_path": ""}


def test_a_run_is_trained_exported_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers writes greedily what both twins write: 64 tokens."""
    there, run, back = (tmp_path / each for each in ("there", "run", "back"))
    make(there, "qwen3")
    (there / "tokenizer.json").write_text("{}")
    words = f"--init {there} --policy fp32 --steps 2 --context 8 --batch-size 2 --out {run}"
    assert trainers.train("torch", [*words.split(), "--eval-batches", "1"]) == 0
    assert f"--init {there} --context 8" in capsys.readouterr().out  # the same run in JAX
    assert commands.main(["export", str(run), "--to", str(back)]) == 0
    assert (back / "tokenizer.json").read_text() == "{}"
    config = directory.read_record(run).config
    state = checkpoint.latest(run, pytest.fail)
    prompt, longest = b"def ", FAMILIES["qwen3"][1]["context"]
    # A context in which all of the text fits: RoPE has no table of its own among the weights.
    config = config.replace(context=80)
    written = {
        framework: sampling.sample(
            start(framework, config, state), prompt, length=64, context=80, temperature=0
        )
        for framework in FRAMEWORKS
    }
    net: Any = AutoModelForCausalLM.from_pretrained(back)
    assert net.config.max_position_embeddings == longest
    ids = torch.tensor([list(prompt)])
    text = net.generate(ids, do_sample=False, max_new_tokens=64, pad_token_id=0)
    assert written == dict.fromkeys(FRAMEWORKS, text[0, len(prompt) :].tolist())
    assert len(set(written["jax"])) > 1


def test_little_memory_is_needed(tmp_path: Path) -> None:
    """Reading takes 1.2 of the model's bytes at most, with the result; writing takes 0.2."""
    there = tmp_path / "there"
    flags = dict(n_layer=24, n_head=4, d_model=96, context=12, vocab=256)
    FAMILIES["deep"] = ("gpt2", flags)
    make(there, "deep")
    config = config_of(there, policy="fp32")
    tracemalloc.start()
    weights = init.weights(config)
    read = tracemalloc.get_traced_memory()[1]
    assert weights
    size = sum(array.nbytes for array in weights.values())
    run_of(tmp_path / "run", "torch", config)
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    export(tmp_path / "run", tmp_path / "back", step=0, dtype="", warn=pytest.fail)
    written = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    assert size < read < 1.2 * size and written < 0.2 * size
    assert tensors(tmp_path / "back") == tensors(there)


# --- mistakes


def change(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Returns an edit of a folder's tensors."""

    def act(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        edit(held)
        save_file({n: np.ascontiguousarray(x) for n, x in held.items()},
                  folder / "model.safetensors")  # fmt: skip

    return act


def configure(**changes: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return act


NORM = "model.layers.1.self_attn.q_norm.weight"
MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (change(lambda x: x.pop(NORM)), f"{NORM} is missing"),
    "unused": (change(lambda x: x.update(extra=x[NORM])), "extra is unused"),
    "shape": (change(lambda x: x.update({NORM: x[NORM][:5]})), r"q_norm.* shape \(5,\), not \(10"),
    "dtype": (change(lambda x: x.update({NORM: x[NORM].astype(np.float16)})), "is float16, the o"),
    "integers": (change(lambda x: x.update({NORM: x[NORM].astype(np.int32)})), "is int32; only"),
    "model": (configure(model_type="gemma"), "model_type \"gemma\"; use one of gpt2"),
    "act": (configure(hidden_act="gelu"), "hidden_act \"gelu\" is not here"),
    "rope": (configure(rope_parameters={"rope_type": "yarn"}), "rope_type is \"yarn\""),
    "heads": (configure(num_key_value_heads=3), "n_kv_head 3: is no divisor"),
    "width": (configure(hidden_size="32"), "hidden_size is \"32\"; use an integer"),
    "cut": (lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:-8]), "cut short or damaged"),
    "none": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "no config": (lambda f: (f / "config.json").unlink(), "No such file"),
    "window": (configure(use_sliding_window=True, sliding_window=4), ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("good") / "qwen3", "qwen3")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(
    mistake: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    act, line = MISTAKES[mistake]
    folder, run = tmp_path / "bad", tmp_path / "run"
    folder.mkdir()
    for path in good.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    act(folder)
    words = ["--init", str(folder), "--out", str(run), "--device", "cpu"]
    if mistake == "window":
        words, line = [*words, "--context", "8"], "--context 8: .*at most 4"
    assert trainers.train("jax", words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(UserError, match=line):
        raise UserError(error)
    assert not run.exists()


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_a_window_that_is_not_given_is_transformers_own(kind: str) -> None:
    sizes = dict.fromkeys(
        ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size",
         "num_key_value_heads", "intermediate_size", "max_position_embeddings"), 8,
    )  # fmt: skip
    given = sizes | ({} if kind == "mistral" else {"use_sliding_window": True})
    theirs: Any = AutoConfig.for_model(kind, **given)
    for content, window in ((given, theirs.sliding_window), (given | {"sliding_window": None}, 0)):
        found = huggingface.fields_of({"model_type": kind} | content, Path("a"), "--init")
        assert found["window"] == window


def test_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    there = make(tmp_path / "there", "qwen3", max_shard_size="10KB")
    index = there / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][NORM] = "../there/model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match="--init .*, which is no file of weights beside it"):
        init.weights(config_of(there))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--n-layer", "3"], "--n-layer 3: the model is that of --init; drop it"),
        (["--context", "13"], "--context 13: the model has 12 positions; use at most 12"),
    ],
)
def test_the_model_is_that_of_init(
    words: list[str], line: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainers.train("torch", ["--init", str(good), *words]) == 2
    assert line in capsys.readouterr().err


def test_what_transformers_has_not_is_not_exported(tmp_path: Path) -> None:
    config = toy("gpt2", bias=False)
    (tmp_path / "run").mkdir()
    record = directory.Record(config=config, framework="jax", data_tokens=(90, 10), details={})
    directory.write_record(tmp_path / "run", record)
    with pytest.raises(UserError, match="none of gpt2, .* has .*bias False"):
        export(tmp_path / "run", tmp_path / "back", step=None, dtype="", warn=pytest.fail)
    assert not (tmp_path / "back").exists()
