"""`lockstep oracle`: a debug state as llm.c makes it, of transformers in float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lockstep.cli import commands
from lockstep.exits import DONE, FAILED, MISTAKE
from lockstep.judge.verdict import Finding, Verdict
from lockstep.parity import oracle
from lockstep.parity.side import Side
from lockstep.weights import llmc, llmc_state
from parity_tests.weights.test_other_formats import linear_weights, net_of, write_bin, write_ordered

B, T, STEPS = 3, 8, 10  # fewer tokens than the model's longest sequence, which is 12


class Files(NamedTuple):
    weights: Path
    narrow: Path  # the same in bfloat16
    state: Path
    losses: str


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """As llm.c's train_gpt2.py writes them, and what it prints: AdamW on one batch, clipped."""
    folder, net = tmp_path_factory.mktemp("llmc"), net_of()
    weights = write_bin(folder / "model.bin", net, torch.float32)
    narrow = write_bin(folder / "narrow.bin", net, torch.bfloat16)
    random = torch.Generator().manual_seed(3)
    x, y = (torch.randint(50, (B, T), generator=random) for _ in "xy")
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, (0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = net(x).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        if step == 0:
            state = write_state(folder / "state.bin", net, x, y, logits, loss)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(f"{loss.item():.6f}")
    return Files(weights, narrow, state, ",".join(losses))


def write_state(path: Path, net: Any, x: Any, y: Any, logits: Any, loss: Any) -> Path:
    header = np.zeros(256, "<i4")
    header[:4] = 20240327, 2, *x.shape
    with path.open("wb") as file:
        for ints in (header, x.int().numpy(), y.int().numpy()):
            file.write(ints.tobytes())
        for floats in (logits, loss):
            file.write(floats.detach().numpy().tobytes())
        write_ordered(file, linear_weights(net, "grad"), torch.float32)
    return path


def run(*words: Any) -> int:
    return commands.main(["oracle", *map(str, words)])


def test_a_float32_program_is_within_what_is_derived(files: Files, capsys: Any) -> None:
    assert run(files.weights, files.state, "--losses", files.losses) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("equal:") for line in lines) == 3, lines
    assert not any(line.startswith("different") for line in lines)


class Held(NamedTuple):
    truth: oracle.Truth
    state: llmc_state.DebugState
    losses: list[str]

    def wrong(self, **changes: Any) -> list[Finding]:
        found = oracle.judge(self.truth, self.state._replace(**changes), self.losses)
        return [finding for finding in found if finding.verdict is not Verdict.EQUAL]


def hold(files: Files, weights: Path, *, rounded: bool = False, variant: str = "") -> Held:
    source = llmc.open_file(weights)
    state = llmc_state.read(files.state, source.model)
    config = oracle.config_of(source.model, (B, T), STEPS, "cpu")
    stored = {name: x.astype(np.float64) for name, x in source.weights(config.model).items()}
    side = Side("torch", "torch_ref.twin", small=True, variant=variant)
    try:
        truth = oracle.derive(side, config, stored, state, rounded=rounded)
    finally:
        side.close()
    return Held(truth, state, files.losses.split(","))


@pytest.fixture(scope="module")
def held(files: Files) -> Iterator[Held]:
    yield hold(files, files.weights)


def test_each_wrong_number_is_seen(held: Held) -> None:
    """One element off by 1e-3 of the largest, in each tensor in turn; no other is called wrong."""
    assert held.wrong() == []
    for name, right in held.state.numbers.items():
        off = right.copy()
        off.reshape(-1)[0] += 1e-3 * np.abs(right).max()
        (found,) = held.wrong(numbers={**held.state.numbers, name: off})
        assert found.where == name
    wrong = held._replace(losses=[*held.losses[:4], "3.91", *held.losses[5:]]).wrong()
    assert [finding.where for finding in wrong] == ["the loss of step 5"]


def test_a_gradient_of_what_no_token_reaches_is_seen(held: Held) -> None:
    for name, row in (("position.weight", T), ("embed.weight", 50)):
        off = held.state.numbers[f"gradient of {name}"].copy()
        off[row] = 1e-3
        numbers = {**held.state.numbers, f"gradient of {name}": off}
        assert len(held.wrong(numbers=numbers)) == 1


def test_a_wrong_twin_is_seen(files: Files) -> None:
    """Its norms' epsilon is 1e-6, and not 1e-5."""
    wrong = {
        finding.where for finding in hold(files, files.weights, variant="norm-eps=1e-6").wrong()
    }
    assert {"logits", "gradient of blocks.0.attn.qkv.weight"} <= wrong


def test_the_bounds_follow_the_sums(held: Held, files: Files) -> None:
    """Weights that were rounded to bfloat16 need wider bounds: by its unit roundoff over that of
    float32 times the root of the longest sums (100 and more), as the noise has it."""
    narrow = hold(files, files.narrow, rounded=True)
    assert narrow.wrong() == []
    ratio = np.median([narrow.truth.noise[n] / held.truth.noise[n] for n in held.truth.noise])
    longest = 4 * 24  # of most weights' sums, the MLP's width
    expected = 1 + 2.0**-8 / (longest**0.5 * 2.0**-24)
    assert expected / 3 < ratio < expected * 3
    unaware = narrow._replace(truth=narrow.truth._replace(noise=held.truth.noise))
    assert len(unaware.wrong()) > len(held.state.numbers) / 2


def test_another_token_is_seen(files: Files, tmp_path: Path, capsys: Any) -> None:
    content = bytearray(files.state.read_bytes())
    at = 1024 + 4 * 5  # the sixth token
    content[at] = (content[at] + 1) % 50
    (tmp_path / "state.bin").write_bytes(content)
    assert run(files.weights, tmp_path / "state.bin") == FAILED
    out = capsys.readouterr().out
    assert "different: gap over derived rounding at torch: loss" in out
    assert "at jax: gradient of blocks.0.attn.qkv.weight" in out


def test_a_missing_device_is_said_before_the_work(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(oracle, "derive", None)  # the work would be a crash
    assert run(files.weights, files.state, "--device", "cuda") == MISTAKE
    streams = capsys.readouterr()
    assert "--device cuda: JAX" in streams.err and not streams.out


def test_files_that_are_none_are_one_line(files: Files, tmp_path: Path, capsys: Any) -> None:
    good = files.state.read_bytes()
    bad = {
        "short": (good[:-4], "bytes, not the"), "long": (good + b"\0", "bytes, not the"),
        "magic": (b"\0" + good[1:], "is no debug state of llm.c"),
        "header": (good[:901], "has 901 bytes"),
        "rows": (good[:8] + b"\xff\xff\xff\x7f" + good[12:], "bytes, not the"),
        "none": (good[:8] + bytes(4) + good[12:], "0 rows of 8 tokens"),
        "wide": (good[:12] + b"\x0d" + good[13:], "the model takes 1 to 12"),
        "token": (good[:1024] + b"\x32" + good[1025:], "beyond the vocabulary of 50"),
    }  # fmt: skip
    for name, (content, line) in bad.items():
        (tmp_path / name).write_bytes(content)
        assert run(files.weights, tmp_path / name) == MISTAKE
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"STATE {tmp_path / name}: " in said and line in said
