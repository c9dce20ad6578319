"""What a user gets wrong: exit status 2, one line with field, value and remedy, nothing written."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import checkpoint, cli, loop, rundir
from lockstep.config import from_flags
from lockstep.corpus import load

ROOT = Path(__file__).parent.parent
HUGE = "1" + 400 * "0"  # more than a float can be
LONG = 300 * "x"  # more than a file's name can have
TEXT = "to be or not to be, that is the question. " * 40

# flags -> what the line must say: field, value, and a word of the remedy
FLAGS: list[tuple[str, list[str]]] = [
    ("--model huge", ["--model", "huge", "tiny"]),
    ("--policy bf17", ["--policy", "bf17", "fp32"]),
    ("--policy params=float32", ["--policy", "compute="]),
    ("--policy params=float32,compute=int8,output=float32", ["--policy", "int8", "bfloat16"]),
    ("--policy params=float32,compute=float16,compute=float16", ["--policy", "once"]),
    ("--policy params=float32,weights=float16,output=float32", ["--policy", "weights"]),
    ("--policy params=float64,compute=bfloat16,output=float32", ["--policy", "fp64"]),
    ("--policy params=float16,compute=float16,output=float32", ["--policy", "GradScaler"]),
    ("--policy params=float32,compute=bfloat16,output=bfloat16", ["--policy", "output=float32"]),
    ("--policy params=bfloat16,compute=float16,output=float32", ["--policy", "bfloat16"]),
    ("--policy =", ["--policy", "give"]),
    ("--eval-policy fp8", ["--eval-policy", "fp8"]),
    ("--fp32-islands mlp.down", ["--fp32-islands", "mlp.down", "blocks.*.mlp.down"]),
    ("--fp32-islands blocks.0 --layers scan", ["--layers", "scan", "blocks.0", "unroll"]),
    ("--polcy bf16", ["--polcy", "--policy"]),
    ("--nonsense", ["--nonsense", "unknown", "--"]),
    ("stray", ["stray", "--help"]),
    ("--steps", ["--steps", "expected one argument"]),
    ("--steps ten", ["--steps", "'ten'", "whole number"]),
    ("--steps 1.5", ["--steps", "'1.5'", "whole number"]),
    ("--lr fast", ["--lr", "'fast'", "number"]),
    ("--d-model 100 --n-head 3", ["--d-model", "100", "--n-head", "99 or 102"]),
    ("--d-model 12 --n-head 4", ["--n-head", "4", "even"]),
    ("--n-layer 0", ["--n-layer", "0", "from 1"]),
    ("--n-head -1", ["--n-head", "-1", "from 1"]),
    ("--context 0", ["--context", "0", "from 1"]),
    ("--vocab 1", ["--vocab", "1", "from 2"]),
    ("--vocab 100", ["--vocab", "100", "--vocab"]),
    ("--context 100000", ["--context", "100000", "tokens"]),
    ("--dropout 1", ["--dropout", "1", "below 1"]),
    ("--dropout nan", ["--dropout", "nan"]),
    ("--dropout -0.1", ["--dropout", "-0.1"]),
    ("--batch-size 0", ["--batch-size", "0", "from 1"]),
    ("--accum 0", ["--accum", "0", "from 1"]),
    ("--steps 0", ["--steps", "0", "from 1"]),
    ("--lr 0", ["--lr", "0", "above 0"]),
    ("--lr nan", ["--lr", "nan"]),
    ("--lr inf", ["--lr", "inf"]),
    ("--min-lr 1", ["--min-lr", "1", "--lr"]),
    ("--clip 0", ["--clip", "0", "above 0"]),
    ("--clip nan", ["--clip", "nan"]),
    ("--warmup 501", ["--warmup", "501", "500"]),
    ("--warmup -1", ["--warmup", "-1"]),
    ("--weight-decay -1", ["--weight-decay", "-1", "at least 0"]),
    ("--weight-decay inf", ["--weight-decay", "inf"]),
    ("--beta1 1", ["--beta1", "1", "below 1"]),
    ("--beta2 nan", ["--beta2", "nan"]),
    ("--seed -1", ["--seed", "-1"]),
    ("--seed 4294967296", ["--seed", "4294967296"]),
    ("--eval-every -1", ["--eval-every", "-1"]),
    ("--eval-batches 0", ["--eval-batches", "0"]),
    ("--save-every -5", ["--save-every", "-5"]),
    ("--keep 0", ["--keep", "0"]),
    ("--loss-scale-init 0", ["--loss-scale-init", "0"]),
    ("--loss-scale-init 1000", ["--loss-scale-init", "1000", "power of two"]),
    ("--loss-scale-factor 1", ["--loss-scale-factor", "1", "above 1"]),
    ("--loss-scale-factor 3", ["--loss-scale-factor", "3", "power of two"]),
    ("--loss-scale-interval 0", ["--loss-scale-interval", "0"]),
    ("--remat everything", ["--remat", "everything", "block"]),
    ("--layers both", ["--layers", "both", "scan"]),
    ("--numerics exact", ["--numerics", "exact", "strict"]),
    ("--attention sparse", ["--attention", "sparse", "fused"]),
    ("--device tpu", ["--device", "tpu", "cuda"]),
    ("--numerics strict --attention fused", ["--attention", "fused", "reference"]),
    ("--numerics strict --compile --dropout 0.1", ["--compile", "dropout"]),
    ("--n-head 7", ["--d-model", "128", "--n-head 7", "126 or 133"]),
    (f"--steps {HUGE}", ["--steps", HUGE, "from 1 to 10000000"]),
    (f"--batch-size {HUGE}", ["--batch-size", HUGE, "from 1"]),
    (f"--loss-scale-interval {HUGE}", ["--loss-scale-interval", HUGE, "from 1"]),
    ("--loss-scale-init 1e300", ["--loss-scale-init", "1e+300", "2**127"]),
    ("--lr -1e-3", ["--lr"]),
    ("--lr 1e-400", ["--lr", "0.0", "above 0"]),
    (f"--data {LONG}.txt", ["--data", LONG, "use other data"]),
    ("--data loop.txt", ["--data", "loop.txt", "no such file"]),
    ("--data pipe.txt", ["--data", "pipe.txt", "not a regular file"]),
    ("--data stranger", ["--data", "stranger", "train.bin"]),
    ("--data missing.txt", ["--data", "missing.txt", "stdlib"]),
    ("--data empty.txt", ["--data", "empty.txt", "empty"]),
    ("--data notes.md", ["--data", "notes.md", ".txt"]),
    ("--data odd", ["--data", "odd", "uint16"]),
    ("--data half", ["--data", "half", "val.bin"]),
    ("--data big", ["--vocab", "256", "1001"]),
    ("--out notes.md", ["--out", "notes.md", "name another"]),
    ("--out notes.md/run", ["--out", "notes.md", "name another"]),
    ("--out half", ["--out", "half", "name another"]),
    ("--out half --overwrite", ["--out", "half", "name another"]),
    (f"--out {LONG}", ["--out", LONG, "name another"]),
    ("--out stranger --overwrite", ["--out", "stranger", "not a run", "leaves it"]),
    ("--out run", ["--out", "run", "--resume", "--overwrite"]),
    ("--resume", ["--resume", "--out"]),
    ("--resume --overwrite --out run", ["--resume", "--overwrite", "drop one"]),
    ("--resume --out nowhere", ["nowhere", "not a run"]),
    ("--resume --out half", ["half", "not a run"]),
    ("--resume --out unsaved", ["unsaved", "no checkpoint", "--overwrite"]),
    ("--resume --out run --lr 1", ["--lr", "1", "may not change"]),
    ("--resume --out run --policy fp32", ["--policy", "fp32", "may not change"]),
    ("--resume --out run", ["--steps", "3", "more than 3"]),
    ("--resume --out changed --steps 9", ["--data", "changed", "SHA-256"]),
    ("--resume --out notes.md", ["notes.md", "not a run"]),
    (f"--resume --out {LONG}", [LONG, "name another"]),
    ("--resume --out torn --steps 9", ["torn", "none of its 1 checkpoints", "--overwrite"]),
    ("--resume --out edited --steps 9", ["config.json", "not that of the run's checkpoints"]),
    ("--resume --out run --steps 9 --data text.txt", ["--data", "text.txt", "may not change"]),
    ("--resume --out run --steps 9 --keep 0", ["--keep", "0", "from 1"]),
    ("--resume --out typed", ["config.json", "n_layer", "restore"]),
    ("--resume --out nan", ["config.json", "--lr", "nan", "restore"]),
    ("--resume --out older", ["config.json", "seed", "restore"]),
    ("--resume --out future", ["config.json", "format 1", "name another"]),
    ("--resume --out list", ["config.json", "name another"]),
    ("--resume --out binary", ["config.json", "name another"]),
    ("--resume --out huge", ["config.json", "too large"]),
    ("--resume --out garbage", ["config.json", "name another"]),
    ("--resume --out deep", ["config.json", "name another"]),
    ("--resume --out foreign", ["config.json"]),
]  # fmt: skip


def make_run(path: Path, data: Path, *, saved: bool) -> None:
    config = from_flags({"model": "tiny", "n_layer": 1, "d_model": 8, "n_head": 1, "context": 8,
                         "steps": 3, "data": str(data)}, accelerator=False)  # fmt: skip
    rundir.make(path)
    sha = load(str(data)).sha256
    record = rundir.Record(config=config, framework="torch", data_sha256=sha, details={})
    rundir.write_record(path, record)
    if saved:
        state = loop.initial_state(config)
        checkpoint.save(path, type(state)(**{**vars(state), "step": 3}), keep=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and runs, good and bad."""
    here = tmp_path_factory.mktemp("place")
    (here / "text.txt").write_text(TEXT)
    (here / "empty.txt").write_text("")
    (here / "notes.md").write_text("notes")
    for name in ("odd", "half", "big"):
        (here / name).mkdir()
        (here / name / "train.bin").write_bytes(np.arange(1000, 1500, dtype="<u2").tobytes())
    (here / "odd" / "train.bin").write_bytes(b"abc")
    (here / "odd" / "val.bin").write_bytes(b"abcd")
    (here / "big" / "val.bin").write_bytes(np.full(500, 1000, dtype="<u2").tobytes())
    (here / "big" / "train.bin").write_bytes(np.full(500, 1000, dtype="<u2").tobytes())
    make_run(here / "run", here / "text.txt", saved=True)
    make_run(here / "unsaved", here / "text.txt", saved=False)
    make_run(here / "changed", here / "text.txt", saved=True)
    record = json.loads((here / "changed" / "config.json").read_text())
    record["data_sha256"] = "0" * 64
    (here / "changed" / "config.json").write_text(json.dumps(record))
    make_run(here / "torn", here / "text.txt", saved=True)
    with next((here / "torn").rglob("mu.safetensors")).open("r+b") as file:
        file.truncate(100)
    edits: dict[str, Callable[[dict[str, Any]], object]] = {
        "edited": lambda record: record["config"]["model"].update(n_layer=2),
        "typed": lambda record: record["config"]["model"].update(n_layer=1.0),
        "nan": lambda record: record["config"]["optim"].update(lr=float("nan")),
        "older": lambda record: record["config"]["optim"].pop("seed"),
        "future": lambda record: record.update(format=2),
        "tokens": lambda record: record["config"]["data"].update(data="big"),
    }
    for name, edit in edits.items():
        make_run(here / name, here / "text.txt", saved=True)
        record = json.loads((here / name / "config.json").read_text())
        edit(record)
        (here / name / "config.json").write_text(json.dumps(record))
    texts = {
        "garbage": "{",
        "deep": "[" * 100_000,
        "foreign": '{"format": 1, "model": "llama"}',
        "list": "[]",
        "huge": "[" + " " * 1_000_001 + "]",
        "stranger": '{"architectures": ["LlamaForCausalLM"]}',  # a model of another tool
    }
    for name, text in texts.items():
        (here / name).mkdir()
        (here / name / "config.json").write_text(text)
    (here / "stranger" / "checkpoints").mkdir()
    (here / "stranger" / "checkpoints" / "precious.bin").write_bytes(b"1")
    (here / "binary").mkdir()
    (here / "binary" / "config.json").write_bytes(b"\xff\xfe\0")
    (here / "loop.txt").symlink_to("loop.txt")
    os.mkfifo(here / "pipe.txt")
    return here


def contents(folder: Path) -> dict[str, Any]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def check_line(status: int, err: str, out: str, words: list[str]) -> None:
    assert status == 2, (status, err)
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert "Traceback" not in out + err
    for word in words:
        assert word in err, (word, err)


@pytest.mark.parametrize(("flags", "words"), FLAGS, ids=[flags for flags, _ in FLAGS])
def test_trainer(flags: str, words: list[str], place: Path, monkeypatch: pytest.MonkeyPatch,
                 capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    before = contents(place)
    argv = flags.split()
    if "--data" not in flags and "--resume" not in flags:
        argv += ["--data", "text.txt"]
    status = cli.train("torch", argv)
    streams = capsys.readouterr()
    check_line(status, streams.err, streams.out, words)
    assert contents(place) == before


COMMANDS: list[tuple[list[str], list[str]]] = [
    ([], ["COMMAND"]),
    (["train"], ["train", "sample"]),
    (["sample"], ["RUN"]),
    (["sample", "nowhere"], ["nowhere", "not a run"]),
    (["sample", "unsaved"], ["unsaved", "no checkpoint"]),
    (["sample", "run", "--prompt", ""], ["--prompt", "empty"]),
    (["sample", "run", "--length", "0"], ["--length", "0"]),
    (["sample", "run", "--temperature", "-1"], ["--temperature", "-1"]),
    (["sample", "run", "--temperature", "nan"], ["--temperature", "nan"]),
    (["sample", "run", "--top-k", "-1"], ["--top-k", "-1"]),
    (["sample", "run", "--seed", "-1"], ["--seed", "-1"]),
    (["sample", "run", "--framework", "mxnet"], ["--framework", "mxnet", "torch"]),
    (["sample", "run", "--device", "tpu"], ["--device", "tpu", "cuda"]),
    (["sample", "run", "--temprature", "1"], ["--temprature", "did you mean --temperature?"]),
    (["sample", "run", "--length", HUGE[:200] + "x"], ["--length", "whole number"]),
    (["sample", "run", "--seed", HUGE], ["--seed", "from 0 to"]),
    (["sample", "tokens"], ["RUN", "tokens", "name a run on text"]),
    (["sample", "torn"], ["torn", "none of its 1 checkpoints"]),
    (["sample", "edited"], ["config.json", "not that of the run's checkpoints"]),
    (["sample", "notes.md"], ["notes.md", "not a run"]),
    (["curves", "jax:bf16"], ["B"]),
    (["curves", "jax", "torch:bf16"], ["jax", "policy"]),
    (["curves", "jax:bf16", "nothing"], ["nothing", "FRAMEWORK:POLICY"]),
    (["curves", "jax:bf16", "torch:bf16", "--lr", "nan"], ["--lr", "nan"]),
    (["curves", "jax:bf16", "torch:bf16", "--data", "no.txt"], ["--data", "no.txt"]),
    (["curves", "jax:bf16", "torch:bf16", "--remat", "all"], ["--remat", "all", "sqrt"]),
    (["curves", "jax:bf16", "torch:bf16", "--device", "tpu"], ["--device", "tpu", "cuda"]),
    (["curves", "jax:bf16", "torch:bf16", "--bug", "none"], ["--bug", "none", "--list"]),
    (["curves", "jax:bf16", "jax:fp32", "--bug", "erf-gelu"], ["--bug", "erf-gelu", "torch"]),
    (["curves", "jax:bf16", "torch:bf16", "--bug", "erf-gelu=2"], ["--bug", "no size"]),
    (["power", "none"], ["--bug", "none", "--list"]),
    (["power", "--device", "tpu"], ["--device", "tpu"]),
    (["specificity", "--seeds", "0"], ["--seeds", "0"]),
]


@pytest.mark.parametrize(("argv", "words"), COMMANDS, ids=lambda value: " ".join(value))
def test_lockstep(argv: list[str], words: list[str], place: Path, monkeypatch: pytest.MonkeyPatch,
                  capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    before = contents(place)
    status = cli.main(argv)
    streams = capsys.readouterr()
    check_line(status, streams.err, streams.out, words)
    assert contents(place) == before


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--data", "a\nb.txt"], ["--data a\\nb.txt", "no such file"]),
        (["--policy", "\x1b[31mred"], ["--policy \\x1b[31mred", "fp32"]),
        (["--policy", "\udcff"], ["--policy \\udcff", "fp32"]),  # not UTF-8
        (["--out", "", "--data", "text.txt"], ["--out", "''", "name a directory"]),
        (["--model", ""], ["--model", "tiny"]),
    ],
)
def test_text_that_would_break_the_line(
    argv: list[str], words: list[str], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(place)
    status = cli.train("torch", argv)
    streams = capsys.readouterr()
    check_line(status, streams.err, streams.out, words)


@contextlib.contextmanager
def powerless() -> Iterator[None]:
    """Without root's right to pass over permissions."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model tiny --data closed/text.txt", ["--data", "closed/text.txt", "Permission denied"]),
        ("--data text.txt --out closed/run", ["--out", "closed/run", "Permission denied"]),
        ("--data text.txt --out sealed/run", ["--out", "sealed/run", "sealed cannot be written"]),
        ("--data text.txt --out sealed", ["--out", "sealed", "cannot be written"]),
        ("--resume --out closed/run", ["closed/run", "Permission denied"]),
    ],
)
def test_without_permission(
    flags: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others than root
        here = Path(folder)
        here.chmod(0o777)
        (here / "text.txt").write_text(TEXT)
        for name, mode in (("closed", 0o000), ("sealed", 0o555)):
            (here / name).mkdir(mode)
        monkeypatch.chdir(here)
        with powerless():
            status = cli.train("torch", flags.split())
        streams = capsys.readouterr()
        check_line(status, streams.err, streams.out, words)
        assert sorted(path.name for path in here.rglob("*")) == ["closed", "sealed", "text.txt"]
        monkeypatch.undo()


@pytest.mark.parametrize("module", ["jax_impl.train", "torch_ref.train"])
@pytest.mark.parametrize(
    ("flags", "words", "environment"),
    [
        ("--device cuda", ["--device", "cuda", "--device cpu"], {}),
        ("--device cuda", ["--device", "cuda", "--device cpu"], {"JAX_PLATFORMS": "cuda"}),
        ("--policy bf17", ["--policy", "bf17"], {}),
    ],
)
def test_as_a_process(
    module: str, flags: str, words: list[str], environment: dict[str, str], place: Path
) -> None:
    before = contents(place)
    done = subprocess.run(
        [sys.executable, "-m", module, *flags.split(), "--data", "text.txt", "--context", "8"],
        cwd=place, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "",
             **environment},
    )  # fmt: skip
    check_line(done.returncode, done.stderr, done.stdout, words)
    assert contents(place) == before


def test_a_mistake_is_found_before_the_framework_is_loaded(place: Path) -> None:
    """So that the answer comes at once."""
    code = (
        "import sys; from lockstep import cli; cli.train('jax', ['--lr', '0']); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert "jax" not in done.stdout.split()


def test_the_check_can_fail() -> None:
    wrong: list[Callable[[], None]] = [
        lambda: check_line(1, "error: --lr 0: must be above 0\n", "", ["--lr"]),
        lambda: check_line(2, "error: a\nerror: b\n", "", []),
        lambda: check_line(2, "error: must be above 0\n", "", ["--lr"]),
        lambda: check_line(2, "", "", []),
    ]
    for check in wrong:
        with pytest.raises(AssertionError):
            check()
