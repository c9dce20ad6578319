"""`check` compares all that it calls equal."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lockstep.check import align, check, ends, excuses, judge, layout, notes
from lockstep.check.causes import statistics
from lockstep.check.pairing import by_names, entries
from lockstep.check.pairing.by_values import turns_window
from lockstep.check.pairing.tensors import Tensors
from lockstep.check.prove import Prover, Trial
from lockstep.check.recorded import RecordedPort, require_same_batches
from lockstep.check.roots.lines import Follower
from lockstep.check.roots.locate import find_roots
from lockstep.check.rungs import Stage
from lockstep.check.sides.modules import Calls, make_pairing, masked_positions, pair_calls
from lockstep.check.sides.port import Port
from lockstep.errors import UserError
from lockstep.judge.compare import norm_gap
from parity_tests.check.inside import START, Inside, check_inside, check_pair, record
from parity_tests.check.small import ATTENTION, CELL

PLAIN = START + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(4, 6))}
"""  # fmt: skip


def compare(text: str, *changes: tuple[str, str], **options: Any) -> check.Result:
    return check_pair(text, text, *changes, again=False, **options)


def test_a_buffer_of_another_value_is_no_constant_of_the_reference() -> None:
    """It was overwritten with the reference's, and the port was equal."""
    result = compare(CELL, ("torch.sin(torch.ar", "torch.cos(torch.ar"))
    assert result.verdict == "different"
    assert any("each side keeps its own" in note for note in result.mapping.notes)


NORMED = PLAIN.replace("nn.Linear(6, 6), nn.Linear(6, 6)", "nn.Linear(6, 6), nn.BatchNorm1d(6)")
FROZEN = """
        super().__init__()
        for name in ("running_mean", "running_var"):
            self.register_parameter(name, nn.Parameter(torch.ones(6), requires_grad=False))
"""


@pytest.mark.parametrize("side", ["port", "reference"])
def test_statistics_that_one_side_takes_for_parameters_are_compared(side: str) -> None:
    """A running mean that one side holds as a parameter is compared with the updated one."""
    frozen = NORMED.replace("\n        super().__init__()\n", FROZEN)
    frozen = frozen.replace("nn.BatchNorm1d(6)", "nn.BatchNorm1d(6, track_running_stats=False)")
    texts = (NORMED, frozen) if side == "port" else (frozen, NORMED)
    pairs = [{"reference": {"name": a}, "port": {"name": b}} for a, b in
             ((f"second.{name}", name)[:: 1 if side == "port" else -1]
              for name in ("running_mean", "running_var"))]  # fmt: skip
    result = check_pair(*texts, again=False, overrides={"tensors": pairs})
    assert {root.where.rpartition(".")[2] for root in result.roots} >= {"running_mean"}
    rungs = {rung.number: rung for rung in result.rungs}
    assert len([spot for spot in rungs["5"].spots if "running" in spot.where]) == 2


CHOSEN = START + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.none, self.no, self.yes = (nn.Embedding(1, 6) for _ in range(3))

    def forward(self, x, label):
        e = torch.where(label == -1, self.none.weight, self.first(x))
        e = torch.where(label == 0, e + self.no.weight, e)
        e = torch.where(label == 1, e + self.yes.weight, e)
        return self.last(F.gelu(e))


def loss(model, batch):
    return model(batch["x"], batch["label"]).square().mean()


def batch(step):
    label = np.array([0, 1, -1, 1])[:, None]
    return {"x": np.random.default_rng(step).normal(size=(4, 6)), "label": label}
"""  # fmt: skip
TABLE = CHOSEN[:CHOSEN.index("        self.none,")] + """\
        self.table = nn.Parameter(torch.randn(3, 6))

    def forward(self, x, label):
        e = torch.where(label < 0, torch.zeros(6), self.first(x))
        e = e + self.table[torch.where(label < 0, 2, label)[:, 0]]
        return self.last(F.gelu(e, approximate="tanh"))
""" + CHOSEN[CHOSEN.index("\n\ndef loss"):]  # fmt: skip


def test_lines_are_sought_with_what_is_paired_by_hand() -> None:
    pairs = [{"reference": {"name": f"{name}.weight"},
              "port": {"name": "table", "cuts": [[0, row, row + 1, False]]}}
             for row, name in enumerate(("no", "yes", "none"))]  # fmt: skip
    (root,) = check_pair(CHOSEN, TABLE, again=False, overrides={"tensors": pairs}).roots
    assert "F.gelu(e)" in root.lines[0] and 'approximate="tanh"' in root.lines[1]


@pytest.mark.parametrize(("figure", "far", "noise", "left"), [
    (3e-12, 0.0, 2e-12, 0),  # the port's own rounding is as large
    (3e-12, 0.0, 1e-12, 1),
    (3e-12, 1e-3, 2e-12, 2),  # what is far apart is no rounding, and nothing is asked
    (3e-10, 0.0, 2e-9, 1),  # too far for rounding
])  # fmt: skip
def test_a_gradient_whose_terms_cancel_is_judged_by_its_own_rounding(
    figure: float, far: float, noise: float, left: int
) -> None:
    stages = {number: Stage(number=number, name="gradients") for number in ("3", "3i", "5")}
    rung = stages["3"]
    rung.add("gradient", "first.bias", figure, 1e-12, "first.bias[0:3]", np.ones(3), np.ones(3))
    rung.add("gradient", "first.weight", far, 1e-12, "first.weight", np.ones(3), np.ones(3))
    port = mock.Mock(**{"noise.return_value": {"grad/first.bias": noise}})
    excused = excuses.cancelling(stages, mock.Mock(), port, mock.Mock(), [])
    assert len(rung.spots) == left and (excused is None) == (left > 0)
    assert port.noise.called == (figure < 1e-10 and not far)


def test_noise_in_float64_is_of_float64(tmp_path: Path) -> None:
    """Weights and sums, such as the loss's mean, move by ulps of float64, not float32."""
    (tmp_path / "port.py").write_text(PLAIN)
    recorded, port = record(PLAIN, tmp_path), Inside(tmp_path / "port.py")
    found = Port(port, recorded).noise(recorded.weights, 1)  # type: ignore[arg-type]
    assert 1e-17 < found["loss"] < 1e-14 and max(found.values()) < 1e-13


CANCELLING = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 1, bias=False)

    def forward(self, x):
        return self.first(x * 3) / 3


def loss(model, batch):
    return model(batch["x"]).mean()


def batch(step):
    draw = np.random.default_rng
    x = draw(0).normal(size=(4, 6)) * (-1) ** step
    return {"x": x + 1e-7 * draw(step + 1).normal(size=(4, 6))}
"""
)


@pytest.mark.parametrize(("other", "verdict"), [("7", "equal"), ("7.000001", "different")])
def test_gradients_that_cancel_are_as_exact_as_each_is(other: str, verdict: str) -> None:
    """The sum of those of four batches is a ten millionth of each."""
    change = ("* 3) / 3", f"* {other}) / 7")
    assert check_pair(CANCELLING, CANCELLING, change).verdict == verdict


def test_an_accepted_difference_hides_no_other_of_a_free_run(tmp_path: Path) -> None:
    """A rule of initial values says nothing of batches after the first."""
    trace = record(ATTENTION, tmp_path)
    first = int(trace.group("batch/0")["tokens"][0, 0])
    assert any(trace.group(f"batch/{s}")["tokens"][0, 0] != first for s in (1, 2, 3))
    later = ("    return (rows * kept", f"    if batch['tokens'][0, 0] != {first}:\n"
             "        rows = rows * 1.01\n    return (rows * kept")  # fmt: skip
    result = compare(ATTENTION, ("torch.rand(D) + 1", "torch.rand(D) + 3"), later, initial=True,
                     accept=["a_gain=initial values", "b_gain=initial values"])  # fmt: skip
    assert result.verdict == "different" and [root.rung for root in result.roots] == ["5"]


def test_another_value_at_padding_is_one_of_the_model_s_output() -> None:
    """Inside it is no difference, but said; at the output it is one, where no loss looks."""
    change = ("        return self.out(", "        y = y + 3 * (1 - mask[:, None, :, None])\n"
              "        return self.out(")  # fmt: skip
    (root,) = compare(ATTENTION, change).roots
    assert root.where == "between attention.v and attention.out"
    assert root.hints[0].startswith("it shows where no loss looks")
    masked = ("self.head(x + self.mlp(self.norm2(x)) * self.b_gain)",
              "self.head(x + self.mlp(self.norm2(x)) * self.b_gain) * mask[..., None]")  # fmt: skip
    result = check_pair(ATTENTION.replace(*masked), ATTENTION, masked, change, again=False)
    assert result.verdict == "equal", [root.name for root in result.roots]
    assert any("positions that reach no loss" in note for note in result.notes)
    wrong = (change[0], change[1].replace("1 - mask", "1 + mask"))
    assert compare(ATTENTION, wrong).verdict == "different"


def test_statistics_without_a_partner_hide_no_difference_of_the_optimizer() -> None:
    """They have no part in the norm that gradients are clipped by; parameters have."""
    statistics_of = (
        "nn.Linear(6, 6)\n",
        "nn.Linear(6, 6)\n        self.norm = nn.BatchNorm1d(6)\n",
    )
    used = ("self.first(x))", "self.norm(self.first(x)))")
    reference = PLAIN.replace(*statistics_of).replace(*used) + RMSPROP
    bare = (statistics_of[1], statistics_of[1].replace("(6)\n", "(6, track_running_stats=False)\n"))
    result = compare(reference, bare, ("eps=1e-3", "eps=1e-2"))
    assert [root.direction for root in result.roots] == ["mapping", "update"]
    result = compare(PLAIN + RMSPROP, ("self.first(x)", "self.first.weight.new_ones(4, 6)"),
                     ("eps=1e-3", "eps=1e-2"), ("nn.Linear(6, 6), nn", "nn.Identity(), nn"),
                     (".first.weight", ".second.weight"))  # fmt: skip
    assert "update" not in [root.direction for root in result.roots]


RMSPROP = """

def optimizer(model):
    return torch.optim.RMSprop(model.parameters(), eps=1e-3)
"""
TWO_MASKS = START + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, first):
        second = 1 - first
        return self.a(x) * first + self.b(x) * second


def loss(model, batch):
    return model(batch["x"], batch["first"][..., None]).square().mean()


def batch(step):
    draw = np.random.default_rng(step)
    first = np.arange(5) < draw.integers(1, 4, 2)[:, None]
    return {"x": draw.normal(size=(2, 5, 3)), "first": first.astype("float64")}
"""  # fmt: skip


def test_each_module_has_padding_of_its_own() -> None:
    """Masks of a source and of its translation have one shape, and no position is in both."""
    for change, verdict in (("(1 - first)", "equal"), ("first", "different")):
        assert compare(TWO_MASKS, ("self.a(x)", f"self.a(x + 3 * {change})")).verdict == verdict


def test_time_steps_are_no_layers() -> None:
    doubled = (
        "type('GRU', (nn.GRUCell,), {'forward': lambda *given: 2 * nn.GRUCell.forward(*given)})"
    )
    first = compare(CELL, ("nn.GRUCell", doubled)).roots[0]
    assert (first.where, first.everywhere) == ("cell", "all calls")


def test_a_dropout_that_is_off_is_no_hint() -> None:
    first, *_ = compare(ATTENTION, (", self.drop =", ", _ ="), ("self.drop(", "(2 * ")).roots
    assert not first.hints, first.hints


@pytest.mark.parametrize(("a", "b", "alike"), [
    ([1.0, -np.inf], [1.0, -np.inf], True), ([1.0, -np.inf], [2.0, -np.inf], False),
    ([1.0, np.inf], [1.0, -np.inf], False), ([np.nan, 1.0], [1.0, 1.0], False),
    ([1.0, 1.0], [np.nan, 1.0], False), ([], [], True), ([1.0], [1.0, 1.0], False),
])  # fmt: skip
def test_values_that_are_not_finite(a: list[float], b: list[float], alike: bool) -> None:
    assert (norm_gap(np.array(a), np.array(b)) == 0) is alike


def test_a_statistic_that_stays_is_said_to_be_never_updated() -> None:
    old = np.array([1.0, 2.0])
    assert statistics._weights(np.ones((3, 2)), old, old, "bn.running_mean") == statistics.OLD


def test_axes_in_another_order_are_found_by_values() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 4))
    sides = [Calls(["+a", "-a"], {"a": "tap"}, {"act/a": each, "in/a": each}, {})
             for each in (x, x.transpose(0, 2, 1, 3))]  # fmt: skip
    pairing = make_pairing({"a": "a"}, *sides)
    assert pairing.reordered and np.array_equal(pairing.value("act/a", sides[1].arrays), x)  # type: ignore[arg-type,unused-ignore]
    assert np.array_equal(pairing.forced(sides[0])["act/a"], sides[1].arrays["act/a"])


def test_a_wrong_tap_is_beside_the_nearest_of_its_module_s_outputs() -> None:
    v, h, wrong = np.random.default_rng(0).normal(size=(3, 4, 5))
    reference = Calls(["+a", "-a"], {"a": "Pair"}, {"act/a": v, "act/a:1": h}, {})
    port = Calls(["+a", "-a"], {"a": "tap"}, {"act/a": h + 0.1 * wrong}, {})
    assert make_pairing({"a": "a"}, reference, port).slots == {"a": {"act/a": "act/a:1"}}


@pytest.mark.parametrize(("wrong", "taken"), [(4, False), (1, True)])
def test_modules_of_tensors_without_a_partner_count_as_wrong(wrong: int, taken: bool) -> None:
    """A layer norm of the wrong operand: with all pairs in disorder fewer modules were seen."""
    sides: Any = (None, None)
    prover = object.__new__(Prover)
    prover.mapping = entries.Mapping([], [], [], [], sides)
    other = entries.Mapping([], ["v"], ["w"], [], sides)

    def trial(n: int) -> Trial:
        return Trial({}, None, None, None, {(str(at), "input") for at in range(n)})  # type: ignore[arg-type]

    prover.best, prover.apart, later = trial(5), set(), trial(wrong)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prover, "trial", lambda self: later)
        patch.setattr(Prover, "_part_boundaries", lambda self: None)
        assert (prover.try_other(other) is later) == taken


@pytest.mark.parametrize(("axes", "told"), [((0, 1, 3, 2), ["rec"]), ((0, 1, 2, 3), [])])
def test_square_axes_of_a_recurrent_tensor_that_are_exchanged_are_told(
    axes: tuple[int, ...], told: list[str]
) -> None:
    shape = (4, 2, 8, 8)
    entry = layout.Entry(layout.Piece("rec"), layout.Piece("r"), shape, shape, [axes])
    assert notes.shuffled_tensors([entry]) == told


def test_what_reaches_no_loss_in_all_modules_is_masked() -> None:
    a, b = np.ones((2, 3, 4)), np.ones((2, 3, 4))
    a[0, 2] = b[0, 2] = a[1, 1] = 0
    calls = Calls([], {}, {"dact/a": a, "dact/b": b}, {})
    (mask,) = masked_positions(calls).values()
    assert mask.tolist() == [[False, False, True], [False, False, False]]


def test_a_tap_under_a_module_s_name_is_paired_with_no_other() -> None:
    """The model's holds all tensors, as its only layer does; it gives another size."""
    wide, narrow = np.ones((5, 6)), np.ones((5, 1))
    reference = Calls(["+(root)", "+lin", "-lin", "-(root)"], {"(root)": "Model", "lin": "Linear"},
                      {"act/lin": wide, "act/(root)": narrow}, {})  # fmt: skip
    port = Calls(["+lin", "-lin", "+(root)", "-(root)"], {"lin": "tap", "(root)": "tap"},
                 {"act/lin": 2 * wide, "act/(root)": 3 * wide}, {})  # fmt: skip
    shape = (6,)
    entry = layout.Entry(layout.Piece("lin.bias"), layout.Piece("bias"), shape, shape, [(0,)])
    assert pair_calls([entry], reference, port) == {"lin": "lin"}


def test_a_module_without_a_partner_is_told_with_the_sizes_of_its_namesake() -> None:
    events = ["+(root)", "+frames", "-frames", "+proj", "-proj", "-(root)"]
    kinds = {"(root)": "Model", "frames": "Frames", "proj": "Linear"}
    calls = [Calls(events, kinds, {"in/frames": np.ones(9), "act/frames": np.ones((2, length))}, {})
             for length in (5, 6)]  # fmt: skip
    stages = [Stage(number=number, name="") for number in ("1", "2", "3", "5", "8")]
    stages.append(Stage(number="2i", name=""))
    stages[-1].add("input", "proj", 1.0, 0.0)
    (root,) = find_roots(stages, calls[0], calls[1], ["frames"], set())
    assert root.hints == ["the reference's frames (Frames) gives [2, 5], and its namesake in the "
                          "port [2, 6]"]  # fmt: skip
    (root,) = find_roots(stages, calls[0], calls[0], ["frames"], set())
    assert root.hints == ["the reference's frames (Frames) has no partner"]


def test_kernels_that_are_turned_half_round_are_told() -> None:
    """And no stack of layers, nor what is fused."""

    def entry(r: layout.Piece, p: layout.Piece) -> layout.Entry:
        return layout.Entry(r, p, (2, 3), (2, 3), [(0, 1)])

    up = [entry(layout.Piece("up.weight", (layout.Cut(2, at, at + 1, True),)),
                layout.Piece("up.kernel", (layout.Cut(0, 1 - at, 2 - at, True),)))
          for at in range(2)]  # fmt: skip
    layers = [entry(layout.Piece(f"h.{at}.weight"),
                    layout.Piece("kernel", (layout.Cut(0, at, at + 1, True),)))
              for at in range(2)]  # fmt: skip
    parts = [entry(layout.Piece("qkv", (layout.Cut(0, at, at + 2),)),
                   layout.Piece("kernel", (layout.Cut(0, 4 - at, 6 - at),)))
             for at in range(0, 6, 2)]  # fmt: skip
    assert notes.turned_windows([*layers, *up, *parts]) == ["up.weight"]
    assert notes.shuffled_tensors([*layers, *up, *parts]) == ["qkv"]
    assert notes.shuffled_tensors([*layers, *up]) == []


def test_a_stack_of_kernels_whose_windows_are_turned_is_no_layout() -> None:
    side = replace(tensors({"h.0.weight": (4, 1, 3), "h.1.weight": (4, 1, 3)}, "torch"),
                   kinds={"h.0.weight": "Conv1d", "h.1.weight": "Conv1d"})  # fmt: skip

    def layer(number: int, *cuts: layout.Cut) -> layout.Piece:
        return layout.Piece("kernel", (layout.Cut(0, number, number + 1, True), *cuts))

    whole = [(layout.Piece(f"h.{k}.weight"), layer(k), (2, 0, 1)) for k in range(2)]
    turned = [(layout.Piece(f"h.{k}.weight", (layout.Cut(2, 2 - j, 3 - j, True),)),
               layer(k, layout.Cut(0, j, j + 1, True)), (0, 1))
              for k in range(2) for j in range(3)]  # fmt: skip
    assert not turns_window(whole, side)
    assert turns_window(turned, side)


@pytest.mark.parametrize(("axes", "turned"), [((3, 4, 2, 1), False), ((4, 3, 2, 1), True)])
def test_a_first_axis_of_one_is_no_part_of_a_window(axes: tuple[int, ...], turned: bool) -> None:
    """The kernel (1, out, in, height, width) that each row of a batch modulates."""
    side = replace(tensors({"conv.weight": (1, 6, 5, 3, 3)}, "torch"),
                   kinds={"conv.weight": "ModulatedConv"})  # fmt: skip
    found = [(layout.Piece("conv.weight"), layout.Piece("kernel"), axes)]
    assert turns_window(found, side) == turned


@pytest.mark.parametrize(("steps", "told"), [((8, 1), ["merge"]), ((8, 8), []), ((1, 1), [])])
def test_rows_in_turns_on_one_side_are_told(steps: tuple[int, int], told: list[str]) -> None:
    """Each piece follows the one before on both sides, and yet no row but the first is in place."""

    def piece(name: str, at: int, step: int) -> layout.Piece:
        cut = (at, at + 9, False, 8) if step > 1 else (2 * at, 2 * at + 2)
        return layout.Piece(name, (layout.Cut(0, *cut),))

    theirs, ours = steps
    pieces = [
        layout.Entry(piece("merge", at, theirs), piece("reduce", at, ours), (2,), (2,), [(0,)])
        for at in range(8)
    ]
    assert notes.shuffled_tensors(pieces) == told


@pytest.mark.parametrize(("order", "told"), [((0, 2, 1, 3), ["fc.weight"]), (range(4), [])])
def test_columns_in_another_order_are_told(order: Iterable[int], told: list[str]) -> None:
    """Values pair each column behind a flattening of other axes, and the verdict is equal."""
    columns = [
        layout.Entry(
            layout.Piece("fc.weight", (layout.Cut(1, theirs, theirs + 1, True),)),
            layout.Piece("fc.kernel", (layout.Cut(0, ours // 2 * 2, ours // 2 * 2 + 2),
                                       layout.Cut(0, ours % 2, ours % 2 + 1, True))),
            (3,), (3,), [(0,)],
        )
        for ours, theirs in enumerate(order)
    ]  # fmt: skip
    assert notes.shuffled_tensors(columns) == told


def test_statistics_among_parameters_are_told() -> None:
    sides = (tensors({"bn.running_mean": (6,)}, "torch"), tensors({"bn_mean": (6,)}, "jax"))
    found = entries.Mapping([], ["bn.running_mean"], ["bn_mean"], [], sides)
    remedies = [root.remedy for root in judge._unmatched(found, ends._mapping_rung(found))]
    assert "give both sides' tensors one shape" in remedies[0]
    assert "running statistics are no parameters" in remedies[1]


def test_what_a_tapped_reference_gives_is_wrong_up_to_there(tmp_path: Path) -> None:
    """It shows no inputs: what stands before may be wrong."""
    trace = record(PLAIN, tmp_path)
    kinds = {call: "tap" for call in trace.about["kinds"]}
    outputs = {name: x for name, x in trace.arrays.items() if not name.startswith("in/")}
    tapped = replace(trace, about=trace.about | {"kinds": kinds}, arrays=outputs)
    file = tmp_path / "port.py"
    file.write_text(PLAIN.replace("torch.tanh", "torch.sigmoid"))
    assert check_inside(trace, file).roots[0].where == "between first and second"
    assert check_inside(tapped, file).roots[0].where == "up to second"


def test_a_mapping_that_leaves_tensors_open_is_not_taken(tmp_path: Path) -> None:
    """Where no less is wrong with it."""
    trace = record(PLAIN, tmp_path)
    file = tmp_path / "port.py"
    file.write_text(PLAIN.replace("self.first(x)", "2 * self.first(x)"))
    made = Port(Inside(file), trace)  # type: ignore[arg-type]
    prover = align.pair_tensors(trace, made, {}, Follower(trace, made))
    whole = [*prover.mapping.entries]
    fewer = entries.Mapping(whole[1:], [whole[0].reference.name], [whole[0].port.name], [],
                            prover.mapping.sides)  # fmt: skip
    prover.best = replace(prover.best, spots={("first", "output"), ("second", "output")})
    prover.try_other(fewer)
    assert prover.mapping.entries == whole and not prover.mapping.only_port


def tensors(shapes: Mapping[str, layout.Shape], framework: str) -> Tensors:
    return Tensors(dict(shapes), {}, list(shapes), framework, set(shapes))


def paired(found: entries.Mapping) -> dict[str, str]:
    assert not found.only_port and not found.only_reference
    return {str(entry.reference): str(entry.port) for entry in found.entries}


def test_fused_tensors_of_stacked_layers_are_mapped() -> None:
    split = {f"h.{i}.attn.{n}.weight": (6, 6) for i in range(3) for n in "qkv"}
    stacked = {"layers.attn.qkv.kernel": (3, 6, 18)}
    for ours, theirs in ((split, stacked), (stacked, split)):
        found = by_names.propose(tensors(theirs, "torch"), tensors(ours, "jax"), joined="blocks")
        names = paired(found) if ours is stacked else {v: k for k, v in paired(found).items()}
        assert names["h.1.attn.k.weight"] == "layers.attn.qkv.kernel[1][:, 6:12]"


def test_a_layer_is_made_of_up_to_five_beside_others_that_fit_nowhere() -> None:
    """The layers of a state space model, and their convolutions, which are parted likewise."""
    fused: dict[str, layout.Shape] = {
        "mixer.in_proj.weight": (21, 6),
        "mixer.conv.weight": (14, 1, 4),
    }
    split: dict[str, layout.Shape] = {f"mixer.to_{n}.kernel": (6, k)
                               for n, k in zip("zxbct", (5, 8, 3, 3, 2))}  # fmt: skip
    split |= {f"mixer.conv_{n}.kernel": (4, 1, k) for n, k in zip("xbc", (8, 3, 3))}
    found = by_names.propose(tensors(fused, "torch"), tensors(split, "jax"), joined="blocks")
    names = {v: k for k, v in paired(found).items()}
    assert names["mixer.to_t.kernel"] == "mixer.in_proj.weight[19:21]"
    assert names["mixer.conv_c.kernel"] == "mixer.conv.weight[11:14]"


def test_numbers_in_names_pair_a_plain_tree() -> None:
    reference = {f"blocks.{i}.{n}": (4,) for i in range(2) for n in
                 ("norm1.weight", "norm1.bias", "ls1.gamma", "norm2.weight", "norm2.bias",
                  "ls2.gamma")}  # fmt: skip
    port = {f"blocks.{i}.{n}": (4,) for i in range(2) for n in
            ("gamma1", "gamma2", "norm1_b", "norm1_g", "norm2_b", "norm2_g")}  # fmt: skip
    names = paired(by_names.propose(tensors(reference, "torch"), tensors(port, "jax")))
    assert names["blocks.1.ls1.gamma"] == "blocks.1.gamma1"
    assert names["blocks.0.norm2.bias"] == "blocks.0.norm2_b"


def test_a_map_must_cover_its_tensors() -> None:
    side = tensors({"a": (4, 2)}, "torch")
    half = {"name": "a", "cuts": [[0, 0, 2, False]]}
    with pytest.raises(UserError, match="4 of its 8 elements are paired"):
        by_names.propose(side, side, {"tensors": [{"port": half, "reference": half}]})


def test_two_traces_of_one_program_are_equal_and_nothing_is_isolated(tmp_path: Path) -> None:
    cell = record(CELL, tmp_path)
    again = record(CELL, tmp_path, "again")
    result = check.run(cell, RecordedPort(again, cell))
    assert result.verdict == "equal"
    assert [rung.number for rung in result.rungs if rung.lacks] == ["2i", "3i"]
    wrong = record(CELL.replace("eps=1e-5", "eps=1e-6"), tmp_path, "wrong")
    first = check.run(cell, RecordedPort(wrong, cell)).roots[0]
    assert first.where == "rms"
    seeded = record(CELL.replace("manual_seed(seed)", "manual_seed(7)"), tmp_path, "seeded")
    with pytest.raises(UserError, match="is not the reference's; record it with .*--like"):
        check.run(cell, RecordedPort(seeded, cell))
    other = record(CELL.replace("default_rng(step)", "default_rng(9)"), tmp_path, "other")
    with pytest.raises(UserError, match="has other batches"):
        require_same_batches(other, cell, "other.trace")


TIED = START + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


def loss(model, batch):
    return model(batch["ids"]).square().mean()


def batch(step):
    return {"ids": np.random.default_rng(step).integers(0, 7, (2, 5))}
"""  # fmt: skip
OPTIMIZER = """

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_a_tensor_of_the_port_s_own_for_a_tied_one_parts_in_training() -> None:
    """Without an optimizer its gradients are right when summed; the verdict says what is unseen."""
    untie = ("        self.head.weight = self.table.weight\n", "")
    result = compare(TIED, untie)
    assert result.verdict == "equal"
    (said,) = result.uncompared
    assert "head.weight, which the reference ties to table.weight" in said
    trained = TIED + OPTIMIZER
    result = compare(trained, untie)
    assert result.verdict == "different" and not result.uncompared


SCALED = START + """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x, y):
        q, k = 4 * self.q(x), self.k(y)
        return self.out((q @ k.mT).softmax(-1) @ y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(4, 4), Attention()

    def forward(self, x, y):
        return self.attention(self.first(x), y)


def loss(model, batch):
    return model(batch["x"], batch["y"]).square().mean()


def batch(step):
    return {name: np.random.default_rng(step).normal(size=(2, 5, 4)) for name in ("x", "y")}
"""  # fmt: skip


def test_a_value_may_be_scaled_before_its_layer_or_behind() -> None:
    behind = "4 * self.q(x)", "self.q(x)"
    for factor, verdict in ((4, "equal"), (3, "different")):
        before = "self.attention(self.first(x), y)", f"self.attention({factor} * self.first(x), y)"
        result = compare(SCALED, behind, before)
        assert result.verdict == verdict, [root.name for root in result.roots]
