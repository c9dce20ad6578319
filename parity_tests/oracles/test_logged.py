"""A run's log and words agree with a given clock, formulas and the true gradient."""

import json
import math
import resource
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from jax_impl.twin import JaxTwin
from lockstep.cli import trainers
from lockstep.config import Config, from_flags
from lockstep.data import corpus
from lockstep.data.batch import Batch
from lockstep.exits import DONE
from lockstep.flags import flag_name
from lockstep.model import flops, params
from lockstep.monitor import listing
from lockstep.plan import roofline, shape
from lockstep.run import directory, lock
from lockstep.run.runlog import Display
from lockstep.run.saver import Saver
from lockstep.train import closing, loop, memory, track
from lockstep.twin import StepResult, trainer_module
from lockstep.weights import onnx_export
from parity_tests.fake import FakeTwin
from parity_tests.pair import FRAMEWORKS, perturbed, start, toy, window
from parity_tests.plan.plans import setting
from parity_tests.runs import fake_runs
from parity_tests.weights.folders import config_of, make
from torch_ref.twin import TorchTwin

STEP, EVALUATION, SAVE, COMPILE = 2.0, 100.0, 30.0, 1000.0  # seconds
MESH = "--mesh data=2,fsdp=2"
SHAPE = f"{MESH} --batch-size 3 --accum 5 --context 8 --n-layer 1 --d-model 8 --n-head 1"
TOKENS = 4 * 3 * 5 * 8  # of a step
BYTES = 123_456_789


class Clock:
    """Time passes where the fake twin, its evaluation or a save takes some."""

    def __init__(self, patch: pytest.MonkeyPatch, mode: str) -> None:
        self.now, self.free, self.mode = 0.0, 0.0, mode
        read = {name: lambda: self.now for name in ("perf_counter", "monotonic")}
        patch.setattr(loop, "time", SimpleNamespace(**read))
        patch.setattr(FakeTwin, "synchronous", mode == "synchronous")
        patch.setattr(FakeTwin, "step", self.step(FakeTwin.step))
        for owner, name, seconds in ((FakeTwin, "evaluate", EVALUATION), (Saver, "save", SAVE),
                                     (FakeTwin, "prepare", COMPILE)):  # fmt: skip
            patch.setattr(owner, name, self.slow(getattr(owner, name), seconds))

    def slow(self, right: Callable, seconds: float) -> Callable:
        def run(*given: Any) -> Any:
            self.now += seconds
            return right(*given)

        return run

    def step(self, right: Callable) -> Callable:
        """The device is busy for a step; the host waits for it at once, or in the result ("late").

        Or the host is, and the device is done by then ("slow host").
        """

        def run(twin: FakeTwin, window: Batch) -> Callable[[], StepResult]:
            finish = right(twin, window)
            if self.mode == "slow host":
                self.now += STEP
                return finish
            self.free = ready = max(self.free, self.now) + STEP

            def wait() -> StepResult:
                self.now = max(self.now, ready)
                return finish()

            if self.mode == "synchronous":
                self.now = ready
            return wait

        return run


@pytest.mark.parametrize("mode", ["synchronous", "late", "slow host"])
def test_log_of_a_given_clock(mode: str, folder: Path) -> None:
    """Each of 12 steps takes two seconds, beside evaluations and saves, which do not count.

    Of a slow host, one step's end is seen too early or too late.
    """
    about = FakeTwin.describe
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch, mode)
        patch.setattr(FakeTwin, "peak_bytes", lambda self: BYTES)
        patch.setattr(FakeTwin, "describe", lambda self: {**about(self), "device": "NVIDIA H200"})
        flags = "--policy bf16 --steps 12 --warmup 2 --eval-every 4 --save-every 3"
        assert fake_runs.train(f"{SHAPE} {flags}") == DONE
    rows = fake_runs.rows()
    assert [row["step"] for row in rows] == [*range(1, 13)]
    for step, row in enumerate(rows, 1):
        counted = min(step, 10)
        seconds = counted * TOKENS / row["tokens_per_second"]
        if mode == "slow host":
            assert abs(seconds - counted * STEP) <= 1.001 * STEP, step
            continue
        assert row["tokens_per_second"] == TOKENS / STEP, step
        assert row["tokens"] == step * TOKENS
        # Weights: embedding and head of 256 x 8; in the layer qkv, proj, gate, up and down, where
        # 8/3 x 8 is rounded up to 64; three norms; no embedding. NVIDIA: 989 TFLOP/s in bfloat16.
        weights = 256 * 8 + 8 * (3 * 8 + 8 + 3 * 64) + 3 * 8
        share = TOKENS / STEP * (6 * weights + 12 * 1 * 8 * 8) / (4 * 989e12)
        assert math.isclose(row["mfu"], share, rel_tol=1e-12), step
        assert row["peak_bytes"] == BYTES
        assert (row["loss"], row["lr"]) == (1 / step, 1e-3)
        pauses = EVALUATION * ((step - 1) // 4) + SAVE * ((step - 1) // 3)
        assert row["seconds"] == step * STEP + pauses  # on the wall, from the first step on


def test_time_left(folder: Path) -> None:
    """A resumed run needs two seconds for each step that is left."""
    found = list[tuple[int, float]]()
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch, "synchronous")
        patch.setattr(Display, "train", lambda self, row, eta: found.append((row["step"], eta)))
        still = "--eval-every 0 --save-every 0"
        assert fake_runs.train(f"--steps 7 --warmup 2 {still}") == DONE
        assert fake_runs.resume("--steps 10") == DONE
    assert found == [(step, 2.0 * (7 - step)) for step in range(1, 8)] + [
        (step, 2.0 * (10 - step)) for step in range(8, 11)]  # fmt: skip


DIGITS = {"lr": 0.0012345678901234567, "min_lr": 1.2345678901234567e-05, "clip": 1.2345678901234567,
          "beta1": 0.8987654321098765, "beta2": 0.9876543210987654,
          "weight_decay": 0.09876543210987654}  # fmt: skip


def test_records_keep_every_digit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's record, and the command that it tells for the other framework, have every digit."""
    flags = " ".join(f"{flag_name(name)} {x!r}" for name, x in DIGITS.items())
    assert fake_runs.train(f"--steps 3 --warmup 1 {flags}") == DONE
    told = capsys.readouterr().out.partition("# the same run in the other framework:\n")[2]
    words = told.partition(".train ")[2].split()
    parsed = vars(trainers.trainer_parser("jax").parse_args(words))
    for found in (directory.read_record(Path("run")).config, from_flags(parsed, accelerator=False)):
        assert {name: getattr(found.optim, name) for name in DIGITS} == DIGITS


def test_held_out_windows(folder: Path) -> None:
    """Every evaluation takes the same windows of the held-out tenth."""
    asked = list[np.ndarray]()

    def evaluate(self: FakeTwin, batches: Batch) -> float:
        asked.append(batches.tokens)
        return 1.0

    Path("mine.txt").write_bytes(bytes(i // 100 for i in range(1000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTwin, "evaluate", evaluate)
        flags = "--data mine.txt --eval-batches 5 --eval-every 4"
        assert fake_runs.train(f"{flags} --steps 8 --warmup 1") == DONE
    assert len(asked) == 3 and all(tokens.shape == (5, 2, 8) for tokens in asked)
    assert [np.unique(tokens).tolist() for tokens in asked] == 3 * [[9]]


WORDS = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


@pytest.mark.parametrize("rows", ["stream", "pack", "pad"])
def test_held_out_rows(rows: str, folder: Path) -> None:
    """An evaluation's rows have words of the held-out text, and masks; packed ones several
    documents."""
    inner = Tokenizer(WordLevel({"user": 0, "assistant": 1, "a": 2, "b": 3}))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.save("tokenizer.json")
    Path("tokenizer_config.json").write_text(json.dumps({"chat_template": WORDS}))
    said = [[("user", "a b"), ("assistant", "b " * (1 + i % 3))] for i in range(180)]
    chats = [[{"role": role, "content": text} for role, text in chat] for chat in said]
    Path("rows.jsonl").write_text("".join(f"{json.dumps({'messages': m})}\n" for m in chats))
    asked = list[Batch]()

    def evaluate(self: FakeTwin, batches: Batch) -> float:
        asked.append(batches)
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", "cache")
        patch.setattr(FakeTwin, "evaluate", evaluate)
        flags = "--data rows.jsonl --tokenizer . --context 24"
        assert fake_runs.train(f"{flags} --rows {rows} --steps 1 --warmup 0") == DONE
        config = directory.read_record(Path("run")).config
        told = onnx_export.read_held_out(config, corpus.load(**vars(config.data)))
    own = asked[0]
    assert own.tokens.max() < 4 and not own.counts.all()
    documents = 0 if own.segments is None else own.segments.max()
    assert min(documents, 2) == {"stream": 0, "pad": 1, "pack": 2}[rows]
    # An exported program knows no documents; its loss is of rows that hold one each.
    assert not told.counts.all() and (documents == 0 or told.segments.max() == 1)


# --- commands and states of runs

# Flags of a run; each number needs all of its digits.
COMMANDS: dict[str, dict[str, Any]] = {
    "usual": {"model": "tiny"},
    "numbers": {"model": "gpt2", "lr": 1 / 3000, "min_lr": 0.0, "weight_decay": 1 / 7,
                "beta1": 1 - 1 / 30, "beta2": 1 - 1 / 3000, "clip": 1 / 3, "dropout": 1 / 30,
                "steps": 1_234_567, "loss_scale_init": 2.0**30, "seed": 2**31 - 1,
                "lora_rank": 3, "lora_alpha": 20 / 3},
    "texts": {"model": "10m", "data": r"texts\all.txt", "tokenizer": "'words'",
              "decay": "blocks.*.mlp,head", "freeze": "embed,*.norm1", "formats": "head=fp32",
              "policy": "params=float32,compute=bfloat16,output=float32", "compile": True},
    "mesh": {"model": "tiny", "mesh": "data=2,fsdp=2", "batch_size": 3},
    "init": {"context": 8},
}  # fmt: skip
LAUNCHER = "-m torch.distributed.run --nproc-per-node 4"


@pytest.mark.parametrize("name", COMMANDS)
def test_command_for_the_other_framework(name: str, folder: Path) -> None:
    """Checks that the other framework's command, read by a shell, trains by the same config, on a
    machine of eight devices, too; PyTorch's is started with a process for each device."""
    flags = COMMANDS[name]
    if name == "init":
        config = config_of(make(folder / "its weights", "gpt2")).replace(**flags)
    else:
        config = from_flags(flags, accelerator=False)
    for framework in FRAMEWORKS:
        module = trainer_module(framework)
        line = closing.command(module, config)
        started, _, words = line.partition(f" -m {module} ")
        several = framework == "torch" and name == "mesh"
        assert started.partition(" ")[2] == (LAUNCHER if several else "")
        given = vars(trainers.trainer_parser(module).parse_args(shlex.split(words)))
        with pytest.MonkeyPatch.context() as patch:
            own = trainers.twin.module(framework)
            patch.setattr(own, "device_count", lambda device: 8)
            assert trainers.resolve_config(framework, given) == config


# The newest checkpoint and the last row's step, of 12 -> what `lockstep runs` calls a run.
STATES = {
    (12, 12): "finished", (8, 12): "dead", (8, 8): "stopped", (8, 7): "stopped", (8, 9): "dead",
    (0, 12): "dead", (0, 3): "dead", (0, 0): "dead",
}  # fmt: skip


def test_states_of_runs(folder: Path) -> None:
    """A run is finished when its last step is saved, whatever its log has; what is half written
    is not saved."""
    for number, ((saved, logged), state) in enumerate(STATES.items()):
        kept = Path(f"{number}", "checkpoints")
        for name in (".tmp-step_00000012", *[f"step_{saved:08d}"] * bool(saved)):
            (kept / name).mkdir(parents=True)
        assert listing.state_of(kept.parent, logged, 12) == state, (saved, logged)
    with lock.hold_lock(Path("0")):
        assert listing.state_of(Path("0"), 12, 12) == "running"


# --- FLOPs

SMALL: dict[str, Any] = {"n_layer": 2, "n_head": 4, "d_model": 32, "context": 16, "vocab": 100,
                         "mlp_dim": 48}  # fmt: skip
LORA = {"lora_rank": 3, "lora_targets": "*.qkv,*.down"}


def layer(keys: int, linears: int) -> int:
    """Weights of attention and MLP: queries and output 32 wide, keys and values as given."""
    return 32 * (32 + 2 * keys) + 32 * 32 + linears * 32 * 48


ADAPTERS = 3 * (32 + 3 * 32) + 3 * (48 + 32)
GPT2_BIASES = 3 * 32 + 32 + 48 + 32 + 2 * 2 * 32
# Family, flags -> weights that train, weights that do not. Embeddings that are only looked
# up count in neither.
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "plain": ("tiny", {}, 3200 + 2 * (layer(32, 3) + 64) + 32, 0),
    "grouped": ("tiny", {"n_kv_head": 2}, 3200 + 2 * (layer(16, 3) + 64) + 32, 0),
    "wide-heads": ("tiny", {"head_dim": 12}, 3200
                   + 2 * (32 * 3 * 48 + 48 * 32 + 3 * 32 * 48 + 64) + 32, 0),
    "tied": ("tiny", {"tied": True}, 3200 + 2 * (layer(32, 3) + 64) + 32, 0),
    "positions": ("gpt2", {}, 3200 + 2 * (layer(32, 2) + GPT2_BIASES) + 64, 0),
    "lora": ("tiny", LORA, 2 * ADAPTERS, 3200 + 2 * (layer(32, 3) + 64) + 32),
    "lora-positions": ("gpt2", LORA, 2 * ADAPTERS,
                       3200 + 2 * (layer(32, 2) + GPT2_BIASES) + 64),
    "frozen": ("tiny", {"freeze": "embed,blocks.0"},
               3200 + layer(32, 3) + 64 + 32, layer(32, 3) + 64),
    "frozen-positions": ("gpt2", {"freeze": "position,embed"},
                         2 * (layer(32, 2) + GPT2_BIASES) + 64, 3200),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_flops(case: str) -> None:
    """6 P + 12 L Q T (Chowdhery et al. 2022), where a weight that does not train has 4."""
    family, flags, trained, frozen = CASES[case]
    config = toy(family, **{"model": family, **SMALL, **flags})
    found = flops.of_run(config)
    attention = 12 * 2 * 4 * flags.get("head_dim", 8) * 16  # 12 L Q T
    assert found == 6 * trained + 4 * frozen + attention, (case, found)
    if not frozen:
        assert flops.per_token(config.model) == found


@pytest.mark.parametrize("case", ["plain", "grouped", "positions"])
def test_planned_flops_of_attention(case: str) -> None:
    """Scores and values are two products of 2 T Q FLOPs a token; the backward pass has four. A
    fused kernel leaves out the half that is masked and makes the scores again."""
    family, flags, _, _ = CASES[case]
    model = toy(family, **{"model": family, **SMALL, **flags}).model
    tokens, forward = 4 * 8 * 16, 2 * 2 * 16 * 32
    for framework, ampere, times in (("torch", True, 3.5 / 2), ("jax", True, 3.5 / 2),
                                     ("torch", False, 3.5 / 2), ("jax", False, 3)):  # fmt: skip
        how = setting(framework=framework, ampere=ampere, rows=8, accum=4)
        weights, attention = roofline.by_kind(shape.of_model(model), how)
        assert attention == tokens * 2 * forward * times, (framework, ampere)
        products = 2 * layer(16 if case == "grouped" else 32, 3 if family == "tiny" else 2)
        assert 1 <= weights / (6 * tokens * (products + 3200)) < 1.05  # norms and biases, too


def test_tracked_numbers() -> None:
    """A tracker gets each finite number under its own name; a module's norm is none of a row's."""
    row = {"kind": "train", "step": 3, "loss": 2, "grad_norm": None, "skipped": True, "mfu": 0.5,
           "tokens_per_second": math.inf, "seconds": 7.0}  # fmt: skip
    assert track.finite_numbers(row) == {"loss": 2.0, "skipped": 1.0, "mfu": 0.5}
    norms = {"kind": "norms", "step": 3, "norm": 1.0, "embed": 4.0, "blocks.0.mlp.up": math.nan}
    assert track.finite_numbers(norms) == {"norm.norm": 1.0, "norm.embed": 4.0}
    assert track.finite_numbers({"kind": "eval", "step": 0, "val_loss": None}) == {}
    assert track.finite_numbers({"kind": "eval", "step": 0, "val_loss": 5}) == {"val_loss": 5.0}


# --- norms and memory


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_norm_under_a_loss_scale(framework: str) -> None:
    """The logged norm is that of the true gradient, of float64, under any loss scale; the logged
    scale is the step's; tensors' and modules' norms add up to it."""
    small: dict[str, Any] = {"n_layer": 1, "d_model": 16, "context": 8, "accum": 2}

    def first(by: str, policy: str, scale: float = 1.0) -> tuple[Config, StepResult]:
        config = toy(**small, policy=policy, loss_scale_init=scale)
        twin = start(by, config, perturbed(config))
        return config, twin.step(twin.place(window(config, 0)))()

    _, true = first("torch", "fp64")
    for policy, scale in (("fp16", 2.0**4), ("fp16", 2.0**10), ("bf16", 1.0)):
        config, found = first(framework, policy, scale)
        assert math.isclose(found.grad_norm, true.grad_norm, rel_tol=0.02), (policy, scale)
        assert math.isclose(found.loss, true.loss, rel_tol=0.01)
        assert (found.loss_scale, found.skipped) == (scale, False)
        assert found.norms.keys() == set(config.trained)
        for norms in (found.norms, params.norms_by_module(found.norms, config.model)):
            total = math.sqrt(sum(norm**2 for norm in norms.values()))
            assert math.isclose(total, found.grad_norm, rel_tol=1e-3)
        parts = [found.norms[f"blocks.0.norm{i}.weight"] for i in (1, 2)]
        modules = params.norms_by_module(found.norms, config.model)
        assert parts == [modules[f"blocks.0.norm{i}"] for i in (1, 2)]


def test_norms_of_modules() -> None:
    """A module's norm is that of its weight and its bias together."""
    config = toy("gpt2", **SMALL)
    norms = {name: 4.0 if name.endswith("bias") else 3.0 for name in config.trained}
    alone = {"embed": 3.0, "position": 3.0}
    modules = dict.fromkeys((name.rpartition(".")[0] for name in config.trained), 5.0) | alone
    assert params.norms_by_module(norms, config.model) == modules


def test_peak_of_resident_memory() -> None:
    """getrusage(2): the largest resident set of this process, in kilobytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = memory.resident_peak()
    assert before <= found <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_peak_of_a_device(framework: str) -> None:
    """The most that an allocator has given out at once: neither what is out now, nor what it keeps
    for itself."""
    now, most, kept = 2 * BYTES, 5 * BYTES, 7 * BYTES
    stats = {"bytes_in_use": now, "peak_bytes_in_use": most, "peak_bytes_reserved": kept,
             "bytes_reserved": kept, "bytes_limit": 9 * BYTES}  # fmt: skip
    counts = {"memory_allocated": now, "max_memory_allocated": most, "memory_reserved": kept,
              "max_memory_reserved": kept}  # fmt: skip
    twin: Any = SimpleNamespace(device=SimpleNamespace(type="cuda", memory_stats=lambda: stats))
    with pytest.MonkeyPatch.context() as patch:
        for name, count in counts.items():
            patch.setattr(torch.accelerator, name, lambda count=count: count, raising=False)
        kinds: dict[str, Any] = {"jax": JaxTwin, "torch": TorchTwin}
        assert kinds[framework].peak_bytes(twin) == most
