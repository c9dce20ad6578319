"""The gate for a change that must not change results: `python -m parity_tests.gate COMMIT`.

It trains four small configurations with both trainers, in float64 and in float32 under strict
numerics, once with the code of COMMIT and once with the working tree, on this machine. Every logged
number and every tensor of the last checkpoint must have the same bits. It also compares the lists
of planted bugs: a bug that CI caught at COMMIT must still be caught by CI. What COMMIT gave is kept
in the user's cache folder, so that the next comparison with it takes half the time.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from lockstep.errors import UserError
from lockstep.exits import exit_status
from lockstep.files.cache import cache_folder
from lockstep.flags import Parser
from lockstep.process import ROOT

SMALL = "--n-head 2 --d-model 32 --context 32 --batch-size 4"
PLAIN = "--accum 1 --remat none"
CONFIGS = {
    "tiny": f"--model tiny --n-layer 2 {SMALL} {PLAIN}",
    "gpt2": f"--model gpt2 --n-layer 4 {SMALL} --vocab 256 --accum 4 --remat sqrt --dropout 0.1",
    "packed rows with LoRA": f"--model tiny --n-layer 2 {SMALL} {PLAIN} --context 64 --lora-rank 2 "
    "--data chat.jsonl",
    "data=2": f"--model tiny --n-layer 2 {SMALL} {PLAIN} --mesh data=2",
}
POLICIES = ("fp64", "fp32")
RUN = "--numerics strict --steps 8 --eval-every 4 --eval-batches 2 --device cpu --out"
FRAMEWORKS = {"jax": "jax_impl.train", "torch": "torch_ref.train"}
# What a log says about time and memory, which are no results.
COSTS = {"tokens_per_second", "mfu", "peak_bytes", "seconds"}
# Planted bugs that went with the code in which they were planted, or have another name.
RETIRED = {
    "bare peer: blocks-of-queries-alone",
    "bare peer: norms-in-bfloat16",  # 2.9 to 3.8 times the noise, by CPU; now params-in-bfloat16
    "peer: default-groups",  # these four are planted in the bare peer now
    "peer: default-schedule",
    "peer: divided-twice",
    "peer: last-target-dropped",
    # The same text, beside the same tensors fused in two, is caught under that layer's name.
    "fused tensor: values and gates of two factors, in turns: no gate",
    # The same text is caught by the place of the reference's module, "net.0".
    "unlike pair: an activation before a module that does nothing: between first and net.0",
    # Scales of blocks and stochastic rounding went with nvfp4. Dropout without the micro-step is
    # mask-without-micro-step in both twins.
    *(
        f"twin: {name}{twin}"
        for name in ("block-rounded-to-zero", "drawn-without-micro-step", "draws-of-zero")
        for twin in ("", "-in-jax")
    ),
    "twin: draws-of-one-rank",
    # Of how data is drawn and which parameters train: their oracles compare each element with its
    # formula or each name with a list, and stay.
    "oracle: adapters-of-seed-0-beside-given-weights",
    "oracle: fitting-document-left-out",
    "oracle: last-window-never-drawn",
    "oracle: micro-batches-alike-in-data",
    "oracle: no-document-after-the-last",
    "oracle: own-rows-are-the-first",
    "oracle: seed-reaches-no-window",
    "oracle: token-counts-for-its-target",
    "oracle: trained-adapters-though-frozen",
    "oracle: trained-beside-adapters",
    "oracle: trained-but-for-one-a",
    "oracle: trained-though-frozen",
    "oracle: validation-draws-as-training",
    "oracle: windows-repeat-after-1000",
}
# Tables that went: bugs in files, logs, sampling, export and readers. "oracle" has the others of
# "shared", bugs of training semantics.
RETIRED_TABLES = {"shared", "autotune", "reader"}
NOT_CI = {"no test", "--full", "lockstep power alone"}


class Record(NamedTuple):
    """The numbers and tensors that one run computed."""

    numbers: dict[str, float]  # logged number -> value, such as "train 3 loss"
    tensors: dict[str, np.ndarray]  # of the last checkpoint, such as "mu/blocks.0.norm1.weight"


def differences(before: Record, after: Record) -> Iterator[str]:
    """Yields one line for each number and tensor of which two runs have other bits."""
    for kind, old, new in (
        ("number", before.numbers, after.numbers),
        ("tensor", before.tensors, after.tensors),
    ):
        for name in sorted({*old, *new}):
            if name not in old or name not in new:
                yield f"{kind} {name}: only {'after' if name in new else 'before'}"
                continue
            one, other = np.asarray(old[name]), np.asarray(new[name])
            if one.shape != other.shape or one.tobytes() != other.tobytes():
                yield f"{kind} {name}: {describe_gap(one, other)}"


def describe_gap(one: np.ndarray, other: np.ndarray) -> str:
    """The largest difference, as a share of the largest number."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype}{one.shape} became {other.dtype}{other.shape}"
    wide, also = one.astype(np.float64), other.astype(np.float64)
    return f"relative gap {np.abs(wide - also).max() / np.abs(wide).max():.3g}"


def lost_bugs(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """The bugs that a command of CI caught before, and that no command of CI catches now.

    Args:
        before, after: bug -> the command that catches it, as `python -m parity_tests.bugs` prints.
    """
    for bug, command in before.items():
        now = after.get(bug, "no test")
        retired = bug in RETIRED or bug.partition(":")[0] in RETIRED_TABLES
        if command not in NOT_CI and now in NOT_CI and not retired:
            yield f"planted bug {bug}: caught by {command} before, by {now} now"


def read_bugs(printed: str) -> dict[str, str]:
    """The table that `python -m parity_tests.bugs` prints, as bug -> command."""
    rows = (re.split(r"\s{2,}", line.strip()) for line in printed.splitlines())
    return {f"{row[1]}: {row[2]}": row[0] for row in rows if len(row) == 3}


def find_bugs(tree: Path) -> dict[str, str]:
    """The planted bugs of the code in a folder, and the command that catches each."""
    return read_bugs(run([sys.executable, "-m", "parity_tests.bugs"], tree, tree))


def train(
    tree: Path, out: Path, config: str, policy: str, framework: str, *, reuse: bool = False
) -> Record:
    """Runs one trainer of the code in `tree`, in the folder `out`.

    Args:
        reuse: take the finished run that is in `out` already.
    """
    done = out / "done"
    if reuse and done.exists():
        return read_run(out / "run")
    launcher = [sys.executable, "-m"]
    if framework == "torch" and "--mesh" in config:
        launcher += ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_chats(out / "chat.jsonl")
    flags = f"{config} --policy {policy} {RUN} run".split()
    run([*launcher, FRAMEWORKS[framework], *flags], tree, out)
    done.touch()
    return read_run(out / "run")


def run(words: list[str], tree: Path, folder: Path) -> str:
    """Runs a command with the code in `tree`; returns what it prints.

    Raises:
        UserError: it fails.
    """
    one_thread = {"OMP_NUM_THREADS": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **one_thread, "PYTHONPATH": str(tree)}
    end = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if end.returncode:
        last = "\n".join((end.stdout + end.stderr).splitlines()[-15:])
        raise UserError(f"{tree}: {' '.join(words[1:])} failed:\n{last}")
    return end.stdout


def read_run(folder: Path) -> Record:
    """Reads the log and the last checkpoint of a run."""
    numbers: dict[str, float] = {}
    for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        where = f"{row.pop('kind')} {row.pop('step', '')}"
        numbers |= {
            f"{where} {name}": value
            for name, value in row.items()
            if name not in COSTS and isinstance(value, int | float)
        }
    (last,) = (folder / "checkpoints").iterdir()
    tensors = {
        # Earlier checkpoints of two ranks had a file for each, and whole tensors in these.
        f"{file.stem.partition('-')[0]}/{name.partition('@')[0]}": tensor
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return Record(numbers, tensors)


def write_chats(path: Path) -> None:
    """Short chats about nothing, the same each time: several fit in a row."""
    draw = random.Random(0)

    def text(most: int) -> str:
        return " ".join(draw.choice("abcdefgh") for _ in range(draw.randint(1, most)))

    rows = (
        {"messages": [{"role": "user", "content": text(3)},
                      {"role": "assistant", "content": text(4)}]}
        for _ in range(200)
    )  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def check_out(commit: str, folder: Path) -> Path:
    """The files of a commit, in a folder of their own.

    Raises:
        UserError: git knows no such commit.
    """
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"],
                           capture_output=True, text=True)  # fmt: skip
    if found.returncode:
        raise UserError(f"COMMIT {commit}: git knows no such commit; give one of `git log`")
    tree = folder / found.stdout.strip()[:12]
    if not tree.exists():
        made = tree.with_suffix(".new")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(made)], input=archive.stdout, check=True)
        made.rename(tree)
    return tree


def compare(commit: str, *, bugs: bool) -> list[str]:
    """Everything that the working tree does otherwise than the commit; prints as it goes."""
    folder = cache_folder() / "gate"
    old = check_out(commit, folder / "trees")
    problems: list[str] = []

    def both(job: tuple[str, str, str]) -> list[str]:
        name, policy, framework = job
        where = f"{name}, {policy}, {framework}".replace(" ", "_").replace(",", "")
        config = CONFIGS[name]
        kept = folder / old.name / where
        before = train(old, kept, config, policy, framework, reuse=True)
        after = train(ROOT, folder / "now" / where, config, policy, framework)
        found = [*differences(before, after)]
        verdict = "DIFFERENT" if found else "same bits"
        print(f"{name:22}{policy:6}{framework:7}{verdict}", flush=True)
        return [f"{name}, {policy}, {framework}: {line}" for line in found]

    jobs = [(n, p, f) for n in CONFIGS for p in POLICIES for f in FRAMEWORKS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(both, jobs):
            problems += found
    if bugs:
        lost = [*lost_bugs(find_bugs(old), find_bugs(ROOT))]
        print(f"planted bugs that CI no longer catches: {len(lost)}", flush=True)
        problems += lost
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parity_tests.gate", description=__doc__)
    parser.add_argument("commit", metavar="COMMIT", help="the code to compare with, such as HEAD")
    parser.add_argument("--curves-alone", action="store_true",
                        help="leave out the planted bugs (default: off)")  # fmt: skip
    given = parser.parse_args(argv)
    problems = compare(given.commit, bugs=not given.curves_alone)
    for problem in problems[:40]:
        print(problem)
    print(f"{len(problems)} differences" if problems else "the gate is green")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(exit_status(main, interruptible=True))
