"""Compiled PyTorch's bytes, which are counted: beside another compiler's, and beside peaks."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import programs, published
from lockstep.model.segments import recomputed
from lockstep.plan import inductor, roofline, shape
from lockstep.plan.setting import Setting
from lockstep.plan.terms import LOSS, Moments
from parity_tests.plan.plans import setting

# Seconds at the device's rates, of XLA's program: two compilers fuse alike, though not the same.
LEAST, MOST = 0.8, 1.1
TRACED = {known.name: known for known in programs.by_inductor()}  # as Inductor writes them


@pytest.mark.parametrize("name", TRACED)
def test_it_counts_what_inductor_writes(name: str) -> None:
    """A trace of its program, in which every buffer of a kernel counts once."""
    known = TRACED[name]
    assert abs(known.moved_error) < 0.09
    assert abs(known.seconds_error) < 0.03
    assert abs(known.memory_error) < 0.04
    planned = roofline.flops(known.shape, known.setting)
    assert planned == pytest.approx(known.row["flops"], rel=0.005)


def test_each_part_of_what_is_recomputed_is_in_the_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before they were there: a forward pass again, and that of a segment's blocks twice."""
    found = [known for known in TRACED.values() if known.setting.remat != "none"]
    right = {known.name: known.moved_error for known in found}
    monkeypatch.setattr(inductor, "AGAIN_NORMS", dict.fromkeys(inductor.AGAIN_NORMS, (4, 4)))
    for known in found:
        more = known.moved_error - right[known.name]
        assert (more > 0.02) == (known.setting.remat != "sqrt"), known.name
    monkeypatch.undo()
    monkeypatch.setattr(Setting, "count_again", lambda s, shape, layer: recomputed(
        s.remat, shape.n_layer, layer))  # fmt: skip
    for known in found:
        more = roofline.flops(known.shape, known.setting) / known.row["flops"] - 1
        assert (more > 0.05) == (known.setting.remat == "sqrt"), known.name


def test_gradients_of_several_micro_batches_are_added() -> None:
    model = shape.of("gpt2", None)
    once, twice = (setting(compiled=True, rows=8, accum=n) for n in (1, 2))
    tokens = roofline.moved(model, once) - model.weights * (12 + 3 * 4 + 7 * 4)
    more = 2 * tokens + model.weights * (2 * (12 + 3 * 4) + 3 * 4 + 7 * 4)
    assert roofline.moved(model, twice) == pytest.approx(more)


def test_every_array_that_it_keeps_is_in_a_measured_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the activation's result, or with the stream once more, the H200's peaks are missed;
    so are those of recomputed blocks with the logits' gradient beside the logits."""
    points = [p for p in published.comparable() if p.program == "compiled" and p.peak_gb]
    plain = [point for point in points if point.remat == "none"]
    assert len(plain) >= 5 and len(points) > len(plain)
    for point in points:
        assert point.memory_ratio == pytest.approx(1, abs=0.02)
    known, count = inductor._kept, inductor.moments
    for widths in (-8, 4):  # bytes for each of D
        with monkeypatch.context() as patch:
            patch.setattr(inductor, "_kept", lambda x, s, w=widths: known(x, s) + w * x.d_model)
            assert all(abs(point.memory_ratio - 1) > 0.02 for point in plain)

    def twice(model: shape.Shape, s: Setting, *given: Any) -> Moments:
        found = count(model, s, *given)
        found[LOSS]["logits"] *= 2
        return found

    monkeypatch.setattr(inductor, "moments", twice)
    assert all(point.memory_ratio > 1.1 for point in points if point.remat == "block")


def test_grouped_queries_repeat_keys_and_rotation_moves() -> None:
    """What a Llama-like model moves beside a GPT of the same sizes."""
    llama = shape.of("125m", None)
    s = setting(compiled=True)
    few = replace(llama, d_keys=llama.d_queries // 4)
    learned = replace(llama, positions=llama.context)
    tokens = s.tokens(llama) * llama.n_layer
    whole = inductor.moved(llama, s)
    rotation = tokens * 2 * 2 * (llama.d_queries + llama.d_keys)
    assert whole - inductor.moved(learned, s) == rotation
    assert inductor.moved(few, s) > whole - tokens * 2 * 2 * 3 * llama.d_keys
