"""Rules are derived from small models, and hold for models of other sizes."""

import json

import numpy as np
import pytest

from lockstep.check.pairing.tensors import Tensors
from lockstep.check.saved import _constants
from lockstep.convert.axes import Unfit, axes_text, parse_axes
from lockstep.convert.derive import derive_rules
from lockstep.convert.map import KEY, Map, map_json, map_text, parse_map
from lockstep.convert.plan import Shape, TensorRule, make_plan
from lockstep.convert.proof import unproved_rules
from parity_tests.convert.proofs import PROOFS, Proof, convert_arrays, pair, random_arrays

EVERY = pytest.mark.parametrize("proof", PROOFS.values(), ids=[*PROOFS])


@EVERY
def test_the_rule_is_the_one_that_a_person_would_write(proof: Proof) -> None:
    derived = proof.derive()
    assert derived.without == {}
    assert [(rule.reference, rule.port) for rule in derived.rules] == [*proof.rules]


@EVERY
def test_rules_give_what_was_proved_and_back(proof: Proof) -> None:
    source, map_ = random_arrays(proof.reference), parse_map(json.loads(map_text(proof.map())))
    how = {"sizes": {name: size for name, size in map_.sizes.items()}} if proof.sizes else {}
    _, port = convert_arrays(map_, source, wanted=proof.port, **how)
    expected = proof.to_port(source)
    assert port.keys() == expected.keys()
    assert all(np.array_equal(port[name], x) for name, x in expected.items())
    _, back = convert_arrays(map_, port, back=True, wanted=proof.reference, **how)
    assert all(np.array_equal(back[name], x) for name, x in source.items())


@EVERY
def test_rules_hold_at_another_size(proof: Proof) -> None:
    """Without the target's shapes: what the source's do not tell is given by name."""
    shapes, wanted = proof.large
    source, sizes = random_arrays(shapes), dict(proof.sizes)
    _, port = convert_arrays(proof.map(), source, sizes=sizes)
    assert {name: x.shape for name, x in port.items()} == wanted
    _, back = convert_arrays(proof.map(), port, back=True, sizes=sizes)
    assert back.keys() == source.keys()
    assert all(np.array_equal(back[name], x) for name, x in source.items())


@EVERY
def test_a_tensor_less_is_named(proof: Proof) -> None:
    shapes, wanted = proof.large
    for left_out in [*shapes][::3]:
        source = {name: shape for name, shape in shapes.items() if name != left_out}
        with pytest.raises(Unfit, match="no such tensor|does not fill|list no|give|has no"):
            make_plan(proof.map().rules, source, wanted=wanted, sizes=dict(proof.sizes))


@EVERY
def test_what_shapes_do_not_tell_is_asked_for(proof: Proof) -> None:
    shapes, wanted = proof.large
    if proof.sizes:
        with pytest.raises(Unfit, match="--size"):
            for source, back in ((shapes, False), (wanted, True)):
                make_plan(proof.map().rules, source, back=back)


def test_a_map_is_read_as_it_was_written() -> None:
    rules = tuple(rule for proof in PROOFS.values() for rule in proof.derive().rules)
    map_ = Map(
        rules, {"n4": 4}, {"reference": {"lm_head": "wte"}}, {"port": ("*.rngs.*",)}, ("a",),
        "equal", {"port": {"program": "port.py", "framework": "jax"}}, {"tensors": []},
    )  # fmt: skip
    assert parse_map(json.loads(map_text(map_))) == map_


@pytest.mark.parametrize("text", ["a b", "q+k+v a", "(n4 q+k+v) b", "[q] a n4 n2", "-a b", "1 a",
                                  "q:(a b)+k:(c b) d", "(f gate:1+up:1) d", ""])  # fmt: skip
def test_axes_are_written_as_they_are_read(text: str) -> None:
    assert axes_text(parse_axes(text)) == text


@pytest.mark.parametrize(
    "text", ["a a", "a+", "(a", "a)", "[a b", "a b]", "()", "a:", "2 a", "é", "a+a", "q:a+q:b",
             "--a", "(a b)+c", "-", "+a", "a:b:c"])  # fmt: skip
def test_malformed_axes_are_refused(text: str) -> None:
    with pytest.raises(Unfit, match="axes"):
        parse_axes(text)


GOOD = {KEY: 1, "rules": [{"reference": {"a.{i}": "x y"}, "port": {"b.{i}": "y x"}}]}
RULE = GOOD["rules"][0]  # type: ignore[index]


def changed(**fields: object) -> dict[str, object]:
    return GOOD | {"rules": [RULE | fields]}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "no map: it has no lockstep_map"),
        ({"tensors": []}, "no map"),
        (GOOD | {KEY: 2}, "a map of version 2"),
        (GOOD | {KEY: True}, "no map"),
        (GOOD | {"rule": 1}, "'rule' is no field"),
        (GOOD | {"rules": []}, "an empty one"),
        (GOOD | {"rules": [3]}, r"rules\[0\]: no object"),
        (GOOD | {"sizes": {"a": 0}}, "positive whole"),
        (GOOD | {"sizes": {"a": 1.5}}, "positive whole"),
        (GOOD | {"tied": {"other": {}}}, "sides other than"),
        (GOOD | {"unused": {"port": "a"}}, "unused: not made of short texts"),
        (changed(port={}), "no tensor of the port"),
        (changed(port={"b.{i}": "y"}), "the reference has the block of x y, the port has not"),
        (changed(port={"b.{i}": "y z"}), "has the block of"),
        (changed(port={"b": "y x"}), "has the block of i x y"),
        (changed(port={"b.{j}": "y x"}), "has the block of"),
        (changed(port={"b.{i": "y x"}), "a brace without its other"),
        (changed(port={"b.{i-1}": "y x"}), "is no index"),
        (changed(port={"b.{0*i}": "y x"}), "is no index"),
        (changed(reference={"a.{i}": "i"}, port={"b.{i}": "i"}), "is also its index"),
        (changed(port={"b.{i}": 3}), "not made of short texts"),
        (changed(to={}), "the field 'to'"),
        (changed(equal=["x", "y"]), "equal: not made of short texts"),
        (changed(equal=[[]]), "empty list"),
        (changed(equal=[["x", "z"]]), "equal has z, which is no size and no part"),
        (changed(some=1), "neither true nor false"),
    ],
)
def test_a_malformed_map_is_refused(content: dict[str, object], problem: str) -> None:
    with pytest.raises(Unfit, match=problem):
        parse_map(content)


RULES = parse_map(GOOD).rules


@pytest.mark.parametrize(
    ("source", "how", "problem"),
    [
        ({"a.0": (2, 3), "z": (1,)}, {}, "z: the map does not say where it goes"),
        ({}, {}, r"a.\{i\}: the source has no such tensor"),
        ({"a.0": (2,)}, {}, "a.0: has 1 axes, the map says 2"),
        ({"a.0": (2, 3)}, {"wanted": {"b.0": (2, 3)}}, "b.0"),
        ({"a.0": (2, 3)}, {"wanted": {"b.0": (3, 2), "b.1": (3, 2)}}, "b.1: the target has it"),
        ({"a.0": (2, 3), "a.1": (2, 3)}, {"wanted": {"b.0": (3, 2)}}, "b.1: the target has no"),
        ({"a.00": (2, 3), "a.0": (2, 3)}, {}, "a.00: the map does not say"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    source: dict[str, tuple[int, ...]], how: dict[str, object], problem: str
) -> None:
    with pytest.raises(Unfit, match=problem):
        make_plan(RULES, source, **how)  # type: ignore[arg-type]


def test_sizes_proved_for_equal_numbers_hold_for_no_others() -> None:
    proof = PROOFS["a fused projection"]
    rules, source = proof.map().rules, {"c.weight": (16, 5)}
    wanted = {"q.kernel": (5, 8), "k.kernel": (5, 4), "v.kernel": (5, 4)}
    with pytest.raises(Unfit, match="cannot be 16|cannot be 8|cannot be 4"):
        make_plan(rules, source, wanted=wanted)
    unequal = [TensorRule(rule.reference, rule.port) for rule in rules]
    assert make_plan(unequal, source, wanted=wanted).shapes == wanted
    assert make_plan(unequal, source, sizes={"q": 8, "k": 4}).shapes == wanted
    assert proof.map().warnings == ["q = k = v was proved for equal numbers alone"]


def test_a_fused_projection_of_fewer_keys_is_no_three_equal_parts() -> None:
    """It was proved with query, key and value as wide as the model; 16 is no 8 + 4 + 4 then."""
    parts = [pair("c.weight", n, [1, 0], [[0, 6 * at, 6 * at + 6, False]])
             for at, n in enumerate("qkv")]  # fmt: skip
    derived = derive_rules(parts, ({"c.weight": (18, 6)}, {n: (6, 6) for n in "qkv"}))
    assert derived.rules[0].equal == (("q", "k", "v", "a"),)
    assert make_plan(derived.rules, {"c.weight": (24, 8)}).shapes == {n: (8, 8) for n in "qkv"}
    with pytest.raises(Unfit, match="q = k = v = a was proved for equal numbers alone"):
        make_plan(derived.rules, {"c.weight": (18, 9)})


def test_parts_of_several_axes_are_proved_for_equal_numbers_alone() -> None:
    """Two heads of three; 8 heads of 4 with two groups of keys are 48 rows, no three times 16."""
    parts = [pair("c.weight", n, [1, 0], [[0, 6 * at, 6 * at + 6, False]])
             for at, n in enumerate("qkv")]  # fmt: skip
    for width, equal in ((6, ("q", "k", "v", "a")), (5, ("q", "k", "v"))):
        shapes = {"c.weight": (18, width)}, {n: (width, 2, 3) for n in "qkv"}
        derived = derive_rules(parts, shapes)
        assert derived.rules[0].equal == (equal,)
        said = Map(tuple(derived.rules), derived.sizes).warnings
        assert said == [f"{' = '.join(equal)} was proved for equal numbers alone"]
    derived = derive_rules(parts, ({"c.weight": (18, 6)}, {n: (6, 2, 3) for n in "qkv"}))
    made = make_plan(derived.rules, {"c.weight": (96, 32)}, sizes={"n3": 4})
    assert made.shapes == {n: (32, 8, 4) for n in "qkv"}
    with pytest.raises(Unfit, match="q=16, k=16, v=16, a=32, but q = k = v = a was proved for"):
        make_plan(derived.rules, {"c.weight": (48, 32)}, sizes={"n3": 4})


def test_a_width_of_equal_number_tells_no_size() -> None:
    """The parts are within heads, of two of four channels; the width was four by chance."""
    parts = [pair(f"{n}.weight", "c", [1, 0], [[0, 4 * h, 4 * h + 4, False]],
                  [[1, h, h + 1, True], [1, 4 * at, 4 * at + 4, False]])
             for h in range(2) for at, n in enumerate("qkv")]  # fmt: skip
    derived = derive_rules(parts, ({f"{n}.weight": (8, 4) for n in "qkv"}, {"c": (4, 2, 12)}))
    assert derived.rules[0].port == {"c": "a n2 q+k+v"}
    source = {f"{n}.weight": (96, 48) for n in "qkv"}
    with pytest.raises(Unfit, match="do not tell n2, q; give one or more of"):
        make_plan(derived.rules, source)
    with pytest.raises(Unfit, match="q=16, k=16, v=16, a=48, but"):
        make_plan(derived.rules, source, sizes={"n2": 6})


def test_two_sizes_of_one_number_are_told() -> None:
    """Heads of two channels, and two groups of keys: which is which is not proved."""
    fused = [pair("c", n, [0], [[0, start, stop, False]])
             for n, start, stop in (("q", 0, 8), ("k", 8, 12))]  # fmt: skip
    derived = derive_rules(fused, ({"c": (12,)}, {"q": (4, 2), "k": (2, 2)}))
    assert "had one number" in " ".join(Map(tuple(derived.rules), derived.sizes).warnings)


def test_a_size_that_a_number_alone_joins_is_told() -> None:
    """Two heads, and gate and up as an axis of two: one given number would be taken for both."""
    pairs = [pair("q", "q", [1, 0]), pair("o", "o", [0, 1]), pair("up", "up", [1, 0])]
    shapes = ({"q": (8, 5), "o": (5, 8), "up": (12, 5)},
              {"q": (5, 2, 4), "o": (5, 2, 4), "up": (5, 2, 6)})  # fmt: skip
    derived = derive_rules(pairs, shapes)
    assert [rule.reference for rule in derived.rules] == [
        {"q": "(n2 n4) a"}, {"o": "a (n2 n4)"}, {"up": "(n2 n6) a"}
    ]  # fmt: skip
    (said,) = Map(tuple(derived.rules), derived.sizes).warnings
    assert said.startswith("n2 is one size in q and up, because both were 2 when the map was")


def test_an_axis_of_one_place_is_told() -> None:
    """One group of keys in the proof: the rule makes one of any number of groups."""
    derived = derive_rules([pair("k", "k", [1, 0])], ({"k": (8, 5)}, {"k": (5, 1, 8)}))
    assert derived.rules[0].port == {"k": "b 1 a"}
    said = ["an axis of one place was proved for one alone: k"]
    assert Map(tuple(derived.rules)).warnings == said
    assert PROOFS["columns of two in turns"].map().warnings == []


def test_a_layer_with_a_rule_of_its_own_is_told() -> None:
    said = PROOFS["one layer that is built otherwise"].map().warnings
    assert said == ["rules of their own have h.0.w.weight; numbers that the proof had not are "
                    "taken to follow the common rule"]  # fmt: skip


def test_pieces_of_unlike_shapes_have_names_of_their_own() -> None:
    """Two clusters of a table, of which the second has an axis of one place more."""
    pairs = [
        pair("t", "c.0", [0, 1], [[0, 0, 4, False]]),
        pair("t", "c.1", [0, 1], [[0, 4, 7, False]]),
    ]
    derived = derive_rules(pairs, ({"t": (7, 5)}, {"c.0": (4, 5), "c.1": (3, 1, 5)}))
    (rule,) = derived.rules
    assert rule.reference == {"t": "part0+part1 a"}
    assert rule.port == {"c.0": "part0 a", "c.1": "part1 1 a"}


def test_other_names_of_a_tensor_stand_for_it() -> None:
    map_ = Map((TensorRule({"wte": "v d"}, {"embed": "v d"}),),
               tied={"reference": {"head": "wte"}})  # fmt: skip
    for source in ({"wte": (3, 2)}, {"head": (3, 2)}, {"wte": (3, 2), "head": (3, 2)}):
        plan = make_plan(map_.rules, source, tied=map_.tied)
        assert plan.shapes == {"embed": (3, 2)}
    back = make_plan(map_.rules, {"embed": (3, 2)}, back=True, tied=map_.tied)
    assert (back.shapes, back.tied) == ({"wte": (3, 2)}, {"head": "wte"})


def test_irregular_orders_have_no_rule() -> None:
    shuffled = [3, 17, 4, 1, 9, 12, 6, 0, 19, 2, 11, 5, 14, 8, 7, 16, 13, 10, 18, 15]
    rows = [pair("a", "b", [0], [[0, i, i + 1, True]], [[0, j, j + 1, True]])
            for i, j in enumerate(shuffled)]  # fmt: skip
    derived = derive_rules(rows, ({"a": (20, 2)}, {"b": (20, 2)}))
    assert derived.rules == [] and derived.without == {"a": "its parts stand in no regular order"}
    part = derive_rules([pair("a", "b", [0], [[0, 0, 3, False]])], ({"a": (4,)}, {"b": (3,)}))
    assert "no partner" in part.without["a"]


def proved_map(proof: Proof) -> Map:
    """The map as it is read from its file, with what was proved."""
    shapes = {"reference": proof.reference, "port": proof.port}
    made = proof.map()
    proved = {"tensors": proof.tensors, "shapes": shapes}
    return parse_map(json.loads(map_text(Map(made.rules, made.sizes, proved=proved))))


@EVERY
def test_rules_as_they_were_saved_are_proved(proof: Proof) -> None:
    assert unproved_rules(proved_map(proof)) == []


@pytest.mark.parametrize(
    ("former", "new", "count"),
    [
        ("n4", "heads", 0),  # of all rules, and of the sizes
        ("[q] a n4 n3", "[q] n4 a n3", 1),
        (',\n   "equal": [["k", "v"]]', "", 1),
        ("q:(n4 n3)+k:(n2 n3)", "k:(n2 n3)+q:(n4 n3)", 1),
        (',\n  "n2": 2', "", 1),  # no size of the whole model any more
        ('"axes": [1, 0]', '"axes": [0, 1]', 1),
        ('"proved"', '"programs"', None),
    ],
)
def test_an_edited_rule_is_told(former: str, new: str, count: int | None) -> None:
    text = map_text(proved_map(PROOFS["a fused projection with fewer keys"]))
    assert former in text
    if count is None:
        content = {name: x for name, x in json.loads(text).items() if name != "proved"}
        assert unproved_rules(parse_map(content)) == [*parse_map(content).rules]
    else:
        assert len(unproved_rules(parse_map(json.loads(text.replace(former, new))))) == count


def test_a_name_with_braces_has_no_rule() -> None:
    pairs = [pair("a", "b{layer}", [0]), pair("c{", "d", [0]), pair("e", "f", [0])]
    shapes = {n: (n_,) for n_, n in enumerate(("a", "c{", "e"), 2)}, {"b{layer}": (2,), "d": (3,),
                                                                      "f": (4,)}  # fmt: skip
    derived = derive_rules(pairs, shapes)
    assert [rule.reference for rule in derived.rules] == [{"e": "a"}]
    assert derived.without.keys() == {"a", "c{"}
    assert "the name b{layer} has a brace, which marks an index" in derived.without["a"]


def test_constants_are_unused_under_any_number() -> None:
    shapes: dict[str, Shape] = dict.fromkeys(("h.0.mask", "h.1.mask", "w{a}3", "w"), (1,))
    side = Tensors(shapes, {}, [*shapes], "jax", {"w"})
    assert _constants(side, {"w"}) == ("h.{i0}.mask", "w*a*")
    source = {"a.0": (2, 3), "h.7.mask": (1,), "w{a}31": (2,)}
    plan = make_plan(RULES, source, unused={"reference": _constants(side, {"w"})})
    assert plan.unused == ["h.7.mask", "w{a}31"]


def test_the_file_is_json_with_a_line_for_each_side_of_a_rule() -> None:
    map_ = PROOFS["a fused projection"].map()
    assert json.loads(map_text(map_)) == map_json(map_)
    assert '{"reference": {"c.weight": "q+k+v a"},\n' in map_text(map_)
