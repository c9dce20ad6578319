"""Both twins agree with a debug state as llm.c makes it, of transformers in float32."""

from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lockstep.judge.verdict import Verdict
from lockstep.parity.side import Side
from lockstep.weights import llmc
from parity_tests.weights import oracle
from parity_tests.weights.test_other_formats import linear_weights, net_of, write_bin, write_ordered

B, T, STEPS = 3, 8, 10  # fewer tokens than the model's longest sequence, which is 12


class Files(NamedTuple):
    weights: Path
    narrow: Path  # the same in bfloat16
    state: Path
    losses: list[str]


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
    return Files(weights, narrow, state, losses)


def write_state(path: Path, net: Any, x: Any, y: Any, logits: Any, loss: Any) -> Path:
    header = np.zeros(256, "<i4")
    header[:4] = oracle.MAGIC, oracle.VERSION, *x.shape
    with path.open("wb") as file:
        for ints in (header, x.int().numpy(), y.int().numpy()):
            file.write(ints.tobytes())
        for floats in (logits, loss):
            file.write(floats.detach().numpy().tobytes())
        write_ordered(file, linear_weights(net, "grad"), torch.float32)
    return path


class Held(NamedTuple):
    truth: oracle.Truth
    state: oracle.DebugState
    losses: list[str]
    jax: oracle.Answer | None = None

    def wrong(self, numbers: dict[str, np.ndarray] | None = None) -> list[str]:
        """Where the twin calls the other program's numbers different."""
        found = oracle.judge(self.truth, numbers or self.state.numbers, self.losses)
        return [each.where for each in found if each.verdict is not Verdict.EQUAL]


def hold(
    files: Files, *, narrow: bool = False, variant: str = "", token: int | None = None
) -> Held:
    """Hold the torch twin against the state; ask the JAX twin, too, where nothing is changed.

    Args:
        narrow: the weights are those that were rounded to bfloat16.
        token: what the sixth token of the batch becomes.
    """
    source = llmc.open_file(files.narrow if narrow else files.weights)
    state = oracle.read_state(files.state, source.model)
    if token is not None:
        state.batch.tokens[0, 5] = token
    config = oracle.make_config(source.model, state, STEPS)
    stored = {name: x.astype(np.float64) for name, x in source.weights(config.model).items()}
    with closing(Side("torch", "torch_ref.twin", small=True, variant=variant)) as side:
        truth = oracle.derive(side, config, stored, state, rounded=narrow)
    held = Held(truth, state, files.losses)
    if narrow or variant or token is not None:
        return held
    with closing(Side("jax", "jax_impl.twin", small=True)) as side:
        return held._replace(jax=oracle.ask(side, config, stored, state))


@pytest.fixture(scope="module")
def held(files: Files) -> Held:
    return hold(files)


def test_a_float32_program_is_within_what_is_derived(held: Held) -> None:
    assert held.jax and held.wrong() == []
    assert held._replace(truth=held.truth._replace(answer=held.jax)).wrong() == []
    twins = oracle.compare_twins(held.jax, held.truth.answer)
    assert {each.verdict for each in twins} == {Verdict.EQUAL}


def test_each_wrong_number_is_seen(held: Held) -> None:
    """One element off by 1e-3 of the largest, in each tensor in turn; no other is called wrong."""
    for name, right in held.state.numbers.items():
        off = right.copy()
        off.reshape(-1)[0] += 1e-3 * np.abs(right).max()
        assert held.wrong({**held.state.numbers, name: off}) == [name]
    losses = [*held.losses[:4], "3.91", *held.losses[5:]]
    assert held._replace(losses=losses).wrong() == ["the loss of step 5"]


def test_a_gradient_of_what_no_token_reaches_is_seen(held: Held) -> None:
    numbers = held.state.numbers
    for name, row in (("gradient of position.weight", T), ("gradient of embed.weight", 50)):
        off = numbers[name].copy()
        off[row] = 1e-3
        assert held.wrong({**numbers, name: off}) == [name]


@pytest.mark.parametrize("change", [{"variant": "norm-eps=1e-6"}, {"token": 7}])
def test_a_wrong_twin_and_another_token_are_seen(files: Files, change: dict[str, Any]) -> None:
    """A norm's epsilon is 1e-6, and not 1e-5."""
    held = hold(files, **change)
    assert {"logits", "gradient of blocks.0.attn.qkv.weight"} <= {*held.wrong()}


def test_the_bounds_follow_the_sums(held: Held, files: Files) -> None:
    """Weights that were rounded to bfloat16 need wider bounds: by its unit roundoff over that of
    float32 times the root of the longest sums (100 and more), as the noise has it."""
    narrow = hold(files, narrow=True)
    assert narrow.wrong() == []
    ratio = np.median([narrow.truth.noise[n] / held.truth.noise[n] for n in held.truth.noise])
    longest = 4 * 24  # of most weights' sums, the MLP's width
    expected = 1 + 2.0**-8 / (longest**0.5 * 2.0**-24)
    assert expected / 3 < ratio < expected * 3
    unaware = narrow._replace(truth=narrow.truth._replace(noise=held.truth.noise))
    assert len(unaware.wrong()) > len(held.state.numbers) / 2
