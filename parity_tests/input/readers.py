"""Each reader of files, with what is tried on it: see `parity_tests.input.fuzz`."""

import contextlib
import functools
import io
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from benchmarks import report
from lockstep import exits, results
from lockstep.cli import commands
from lockstep.config import Config, from_flags
from lockstep.data import corpus
from lockstep.data.corpus import Corpus
from lockstep.data.documents import Documents
from lockstep.errors import UserError
from lockstep.files import stream
from lockstep.model import params
from lockstep.model.state import TrainState, initial_state
from lockstep.monitor import gaps
from lockstep.process import ROOT
from lockstep.run import checkpoint, directory, runlog
from lockstep.run.record import write_record
from lockstep.train import loss_scale, trainer
from parity_tests.input import hostile_checkpoints, references, weights
from parity_tests.input import tokens as tokens_of
from parity_tests.input.mutations import Files, damage, files
from parity_tests.runs.checkpoints import assert_same

CONFIG = from_flags(
    {"model": "tiny", "n_layer": 1, "n_head": 1, "d_model": 2, "vocab": 3, "context": 4,
     "policy": "fp16", "fp32_islands": "blocks.*.mlp.down,head", "steps": 9, "data": "a.txt"},
    accelerator=False,
)  # fmt: skip
RECORD = {
    "format": 1, "lockstep": "0.1", "framework": "jax", "data_sha256": 64 * "0",
    "config": CONFIG.to_json(), "device": "cpu",
}  # fmt: skip
TRAIN = {"kind": "train", "loss": 5.5, "grad_norm": None, "lr": 1e-3, "loss_scale": 4.0,
         "skipped": True, "tokens": 64, "mfu": None}  # fmt: skip
LOG = [
    {**TRAIN, "step": 1}, {"kind": "eval", "step": 1, "val_loss": 5.0, "val_loss.code": None},
    {**TRAIN, "step": 2}, {"kind": "norms", "step": 2, "embed": 1.5},
]  # fmt: skip
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
         "max_position_embeddings": 128, "tie_word_embeddings": False}  # fmt: skip
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_inner": None, "vocab_size": 256,
        "n_positions": 128}  # fmt: skip
CURVES = {
    "compared": ["a", "b"], "envelope": [0.1, 0.2],
    **{name: {"framework": "jax", "config": CONFIG.to_json()} for name in "ab"},
}  # fmt: skip
POWER = {
    "name": "no-clip", "verdicts": {"4": "different"},
    "measured": dict.fromkeys(results.MEASURED) | {"device": "cpu"},
}  # fmt: skip


class Reader(NamedTuple):
    name: str
    tried: str  # what its cases are, for the table
    cases: st.SearchStrategy[Files]
    read: Callable[[Path], Any]  # from the folder with the files
    again: Callable[[Any, Path], bool]  # whether what was read, written anew or not, reads the same


def alone(name: str, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[Files]:
    return contents.map(lambda content: {name: content})


# --- config.json, and with a checkpoint as a run


def read_config(folder: Path) -> Config:
    return directory.read_record(folder).config


def same_config(config: Config, _: Path) -> bool:
    return Config.from_json(json.loads(json.dumps(config.to_json(), allow_nan=False))) == config


@functools.cache
def run_files() -> Files:
    """A whole checkpoint of `CONFIG`."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(Path(folder), replace(initial_state(CONFIG), step=3), keep=1)
        return {
            f"checkpoints/{path.name}/{file.name}": file.read_bytes() for file in path.iterdir()
        }


def read_run(folder: Path) -> tuple[Config, TrainState]:
    config = read_config(folder)
    return config, trainer.restore(config, folder, lambda line: None)


def same_run(run: tuple[Config, TrainState], folder: Path) -> bool:
    config, state = run
    shapes = {name: x.shape for name, x in state.params.items()}
    return same_config(config, folder) and shapes == params.shapes(config.model)


# --- the rest


def same_checkpoint(state: TrainState, folder: Path) -> bool:
    path = folder / "given" / "again"
    with (
        mock.patch.object(checkpoint, "sync"),
        mock.patch.object(stream, "sync"),
    ):  # the disk may keep it for itself
        write_record(path, state, checkpoint._write_arrays(path, state))
    assert_same(checkpoint.load(path), state)
    return True


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Also as a resumed run does, whose readers look into the rows."""
    path = folder / "log.jsonl"
    rows = list(runlog.rows(path))
    with mock.patch("lockstep.files.durable.sync"), runlog.RunLog(path, last_step=2) as log:
        loss_scale.ScaleWatch(CONFIG, 1.0, log.kept)
    assert list(runlog.rows(path)) == [row for row in rows if row["step"] <= 2]
    return rows


def same_log(rows: list[dict[str, Any]], folder: Path) -> bool:
    path = folder / "given" / "again"
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    return list(runlog.rows(path)) == rows


def logs() -> st.SearchStrategy[Files]:
    good = "\n".join(map(json.dumps, LOG)).encode()
    lines = st.lists(st.sampled_from(LOG).flatmap(files), max_size=5).map(b"\n".join)
    return alone("log.jsonl", lines | damage(good))


def tokens() -> st.SearchStrategy[Files]:
    good = [b"to be or not to be, that is the question", 20 * b"a\0", 20 * b"\1\0", 40 * b"\xff"]
    some = st.sampled_from([*good, b"", b"\0", b"odd"]) | st.binary(max_size=60)
    some |= st.binary(min_size=40, max_size=200)
    split = st.fixed_dictionaries({}, optional={"train.bin": some, "val.bin": some})
    return (
        alone("a.txt", some) | split | st.fixed_dictionaries({"train.bin": some, "val.bin": some})
    )


def read_data(folder: Path) -> Corpus:
    text = folder / "a.txt"
    data = corpus.load(str(text if text.exists() else folder))
    corpus.check(data, 256, 2)
    corpus.bigram_entropy(data)
    return data


def same_data(data: Corpus, folder: Path) -> bool:
    return data.sha256 == read_data(folder / "given").sha256


ROWS = [
    {"messages": tokens_of.TURNS},
    {"text": "to be or not to be"},
    {"messages": 2 * tokens_of.TURNS},
]


def jsonl() -> st.SearchStrategy[Files]:
    good = "\n".join(map(json.dumps, 2 * ROWS)).encode()
    lines = st.lists(st.sampled_from(ROWS).flatmap(files), max_size=5).map(b"\n".join)
    return alone("a.jsonl", lines.map(lambda some: good + b"\n" + some) | damage(good))


def read_rows(folder: Path) -> Corpus:
    """By its bytes; and a draw from it."""
    kept = {"LOCKSTEP_CACHE": str(folder / "cache")}
    with mock.patch.dict(os.environ, kept), mock.patch("lockstep.files.durable.sync"):
        data = corpus.load(str(folder / "a.jsonl"), rows="pack")
    corpus.check(data, 256, 64)
    drawn = data.train.draw(np.arange(8, dtype=np.uint64), 64)
    assert {x.shape for x in drawn} == {(8, 64)} and drawn.tokens.min() >= 0
    return data


# fmt: off
MANIFEST = {"version": 1, "key": "0", "sha256": "0", "source": "a.jsonl", "tokenizer": "bytes",
            "dtype": "<u1", "vocab": 256, "masked": True, "train": 20, "val": 8,
            "train_documents": 2, "val_documents": 1, "bad": 1, "named": ["a.jsonl:3 odd"]}
# fmt: on
ENDS = {
    "train.ends": np.array([9, 20], "<u8").tobytes(),
    "val.ends": np.array([8], "<u8").tobytes(),
}


def prepared_files() -> st.SearchStrategy[Files]:
    rest = {"train.bin": 20 * b"a", "val.bin": 8 * b"b", "train.counts": 20 * b"\1",
            "val.counts": 8 * b"\1"}  # fmt: skip
    whole = st.fixed_dictionaries({"data.json": files(MANIFEST)} | {
        name: st.just(content) | damage(content) for name, content in ENDS.items()
    })  # fmt: skip
    return whole.map(lambda some: {**rest, **some})


def read_prepared(folder: Path) -> Corpus:
    data = corpus.load(str(folder))
    corpus.check(data, 256, 4)
    if isinstance(data.train, Documents):
        assert data.train.draw(np.arange(8, dtype=np.uint64), 8).tokens.shape == (8, 8)
    return data


def read_plan(folder: Path) -> str:
    """By the command, for it is the shape that its loops run over."""
    out, err = io.StringIO(), io.StringIO()
    words = ["plan", "--model", str(folder / "config.json"), "--device", "t4"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = commands.main(words)
    if status == exits.MISTAKE:
        raise UserError(err.getvalue().strip())
    return out.getvalue()


def read_islands(folder: Path) -> Config:
    text = (folder / "patterns").read_bytes().decode("utf-8", "surrogateescape")
    return CONFIG.replace(fp32_islands=text)


def patterns() -> st.SearchStrategy[Files]:
    good = st.sampled_from(["head", "blocks.*", "*.down", "blocks.0.attn", "*", "b[!x]ocks.?"])
    parts = ["blocks", ".", "0", "*", "?", "[", "]", "!", "-", "^", "mlp", "head", "[!", "[a-",
             "(?", "\\", "&&", "~~", "||", 2000 * "a", 50 * "*a"]  # fmt: skip
    part = st.sampled_from(parts) | st.text(max_size=3)
    odd = st.lists(part, max_size=8).map("".join)
    texts = st.lists(good | good | odd, max_size=6).map(",".join)
    return alone("patterns", texts.map(lambda text: text.encode("utf-8", "surrogatepass")))


@functools.cache
def result_row() -> dict[str, Any]:
    rows = results.read(ROOT / "benchmarks" / "results" / "cpu.jsonl").items()
    return next(row for name, row in rows if name.startswith("frameworks-jax-"))


RUN = st.builds(lambda config: {"config.json": config, **run_files()}, files(RECORD))
READERS = [
    Reader("checkpoint", "state.json, safetensors headers and bytes, checksums made good",
           hostile_checkpoints.cases(), checkpoint.load, same_checkpoint),
    Reader("config", "a run's config.json", alone("config.json", files(RECORD)), read_config,
           same_config),
    Reader("run", "a config.json beside a whole checkpoint", RUN, read_run, same_run),
    Reader("log", "lines of log.jsonl, read and resumed from", logs(), read_log, same_log),
    Reader("data", "a text, a folder of tokens", tokens(), read_data, same_data),
    Reader("rows", "lines of .jsonl, tokenized", jsonl(), read_rows,
           lambda data, folder: data.sha256 == read_rows(folder / "given").sha256),
    Reader("parquet", "rows of .parquet", alone("a.parquet", tokens_of.parquets()),
           tokens_of.read_parquet, lambda found, _: len(found) <= 40),
    Reader("bin", "tokens with llm.c's header", alone("a.bin", tokens_of.bins()),
           tokens_of.read_bin,
           lambda data, folder: data.sha256 == tokens_of.read_bin(folder / "given").sha256),
    Reader("tokenizer", "tokenizer.json, and its config with a chat template",
           tokens_of.folders(), tokens_of.read_tokenizer,
           lambda found, folder: found.vocab == tokens_of.read_tokenizer(folder / "given").vocab),
    Reader("curves", "what `lockstep curves` wrote, by `lockstep report`",
           alone("curves.json", files(CURVES)), gaps.read, lambda found, _: found.noise.ndim == 1),
    Reader("prepared", "a folder that `lockstep data` wrote", prepared_files(), read_prepared,
           lambda data, folder: data.sha256 == read_prepared(folder / "given").sha256),
    Reader("plan", "a Hugging Face config.json, by `lockstep plan`",
           alone("config.json", files(LLAMA) | files(GPT2)), read_plan,
           lambda text, _: "recommended" in text or "nothing fits" in text),
    Reader("weights", "a folder for `--init`: config.json, index and safetensors",
           weights.folders(), weights.read_folder, weights.are_floats),
    Reader("llmc", "a checkpoint of llm.c", alone("a.bin", weights.bins()),
           weights.read_bin, weights.are_floats),
    Reader("ckpt", "a checkpoint of nanoGPT", alone("ckpt.pt", weights.ckpts()),
           weights.read_ckpt, weights.are_floats),
    Reader("islands", "patterns of `--fp32-islands`", patterns(), read_islands, same_config),
    Reader("result", "a result that `--out` adds to", alone("power.json", files(POWER)),
           lambda folder: results.read(folder / "power.json"),
           lambda found, _: type(found) is dict),
    Reader("trace", "a recorded reference's JSON, and its arrays", references.traces(),
           references.read_trace, references.same_trace),
    Reader("map", "a mapping of tensors, by `lockstep check --map`",
           alone("map.json", files(references.MAP)), references.read_map,
           lambda found, _: found > 0),
    Reader("report", "a cell of a benchmark's report",
           alone("a.jsonl", st.deferred(lambda: files(result_row()))),
           lambda folder: report.write(folder / "a.jsonl"),
           lambda found, _: all(type(text) is str for text in found.values())),
]  # fmt: skip
