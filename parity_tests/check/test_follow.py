"""Tensors are paired by the values that they meet, and the two lines at which values part named."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lockstep.check import report
from lockstep.check.check import Result
from lockstep.check.follower import Follower
from lockstep.check.following.apart import PartedAt, part_at
from lockstep.check.following.fit import Fits, _each_once
from lockstep.check.following.follow import (
    OPEN,
    ROUNDED,
    Followed,
    Parted,
    follow,
    follow_mapped,
)
from lockstep.check.following.tapes import EQUAL, Asked, LiveTape, RecordedTape, SideTape
from lockstep.check.following.turns import turns
from lockstep.check.sides import trace
from lockstep.check.sides.program import UserProgram
from lockstep.check.sides.trace import Trace
from lockstep.model.params import Arrays
from lockstep.process import ROOT
from lockstep_recorder import questions, tree
from lockstep_recorder.noise import perturb
from lockstep_recorder.operations import fingerprint
from lockstep_recorder.operations_jax import Flat
from lockstep_recorder.questions import describe_run
from lockstep_recorder.recording import prefixed
from parity_tests.check.follow_pairs import PAIRS, Pair
from parity_tests.check.inside import START, Inside, check_inside, check_pair, record_inside
from parity_tests.check.mutants import BY_NAME, changed, port_of
from parity_tests.check.small_program import small
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

GPT = ROOT / "examples" / "gpt"
TOKENS = np.random.default_rng(0).integers(0, 61, (4, 13))


def follow_programs(reference: Inside, port: Asked, batch: object) -> Followed:
    theirs, ours, weights, _, buffers = begin(reference, port, batch)
    return follow(theirs, ours, weights, buffers)


def part_programs(
    reference: Inside, port: Asked, batch: object, tolerance: float = EQUAL
) -> Parted:
    """Finds where values part under the mapping that following them finds."""
    theirs, ours, weights, own, buffers = begin(reference, port, batch)
    partners = follow(theirs, ours, weights, buffers).source
    return follow_mapped(theirs, ours, weights, partners, own, tolerance)


def begin(
    reference: Inside, port: Asked, batch: object
) -> tuple[RecordedTape, LiveTape, Arrays, Arrays, Arrays]:
    """Returns both tapes, the weights of both sides, and the port's buffers."""
    spec, arrays = tree.take_apart(batch)
    about, initial = reference.ask("facts")
    weights = dict(perturb(initial, 7, set(about["parameters"])))
    given = prefixed("batch", arrays)
    facts, own = port.ask("facts")
    buffers = {name: x for name, x in own.items() if name not in facts["parameters"]}
    port.ask("widen", prefixed("weights", own) | given, batch=spec)
    side = reference.side
    side.widen(weights, spec, arrays)
    about, tape = describe_run(side, weights, spec, arrays, side.run(weights, spec, arrays)[1])
    recorded = RecordedTape(about, prefixed("tape", tape) | side.run(weights, spec, arrays)[1])
    parameters = reference.ask("facts")[0]["parameters"]
    recorded.add_buffers({name: x for name, x in weights.items() if name not in parameters})
    return recorded, LiveTape(port, own, given, spec), weights, own, buffers


Sides = tuple[Inside, Inside, object]


def followed_pair(pair: Pair, folder: Path, changes: tuple[str, str] = ("", "")) -> Followed:
    return follow_programs(*programs_of(pair, folder, changes))


def parts_of_pair(
    pair: Pair, folder: Path, changes: tuple[str, str] = ("", ""), tolerance: float = ROUNDED
) -> list[PartedAt]:
    return part_programs(*programs_of(pair, folder, changes), tolerance).parts


def programs_of(pair: Pair, folder: Path, changes: tuple[str, str]) -> Sides:
    sides: list[Inside] = []
    for name in ("reference", "port"):
        path = folder / f"{name}.py"
        text = pair.program(name == "port")
        path.write_text(text.replace(*changes) if name == "port" and changes[0] else text)
        sides.append(Inside(path))
    return sides[0], sides[1], sides[0].side.user.call("batch", 0)


def test_a_module_used_twice_on_the_same_data_is_no_two_parts_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.check.following.follow.RETURNS", 1)
    pair = PAIRS["learned queries that meet the same keys twice"]
    found = followed_pair(pair, tmp_path)
    assert found.equal
    assert {name: found.partners(name) for name in pair.partners} == pair.partners


def test_a_buffer_that_the_reference_computes_is_a_constant(tmp_path: Path) -> None:
    forward = "y = x + (torch.arange(T * D).double() / 7).sin().view(T, D)\nreturn y @ self.w"
    table = "torch.sin(torch.arange(72) / 7).view(T, D)"  # float32
    init = f"self.v = P(D, D)\nself.register_buffer('table', {table})"
    pair = Pair(("self.w = P(D, D)", forward), (init, "return (x + self.table) @ self.v.T"), {})
    right = parts_of_pair(pair, tmp_path)
    (part,) = parts_of_pair(pair, tmp_path, ("@ self.v.T", "@ self.v.T.sin()"))
    assert not right and "@ self.v" in part.port and "@ self.w" in part.reference


def test_the_constant_that_one_side_keeps_in_a_buffer_is_named_where_the_other_makes_it(
    tmp_path: Path,
) -> None:
    table = "(torch.arange(T * D).double() / 7).float()"
    init = f"self.register_buffer('table', {table}.sin().view(T, D).double())"
    made = f"t = {table}.sin()\nt = t.view(T, D).double()\nreturn (x + t).tanh()"
    pair = Pair((init, "return (x + self.table).tanh()"), ("pass", made), {})
    for changes in (("/ 7).float()", "/ 8).float()"), ("(x + t)", "(x - t)")):
        (part,) = parts_of_pair(pair, tmp_path, changes)
        assert changes[1] in part.port and "x + self.table" in part.reference, part
        assert part.near == ("float" in changes[1])


def test_a_table_that_numpy_makes_is_told_where_it_is_used(tmp_path: Path) -> None:
    init = "self.register_buffer('rate', torch.linspace(1, 2, D // 2, dtype=torch.float64))"
    theirs = (
        "t = torch.arange(T)[:, None] * self.rate.repeat(2)\nt = t.sin()\nreturn (x * t).tanh()"
    )
    made = ("t = torch.from_numpy(np.arange(T)[:, None] * np.linspace(1, 2, D // 2))\n"
            "return (x * t.sin().repeat(1, 2)).tanh()")  # fmt: skip
    pair = Pair((init, theirs), ("pass", made), {})
    (part,) = parts_of_pair(pair, tmp_path, ("(1, 2, D // 2)", "(1, 3, D // 2)"))
    assert "t.sin()" in part.reference and "t.sin()" in part.port and not part.near
    assert "the port has a constant of (6, 6) here" in part.hints[0]
    (part,) = parts_of_pair(pair, tmp_path, ("(x * t", "(2 * x * t"))
    assert "x * t" in part.reference and "2 * x" in part.port and not part.hints


def test_a_line_of_a_helper_is_told_with_its_call(tmp_path: Path) -> None:
    text = "f = lambda z: z.tanh() + z\nx = f(x)\nx = f(2 * x).sin()\nreturn f(x)"
    (part,) = parts_of_pair(Pair(("", text), ("", text), {}), tmp_path, ("(2 * x)", "(x - 2)"))
    assert "f(x - 2)" in part.port and part.callers == ((), ())
    wrong = "g = lambda z: z.tanh() - z\n" + text.replace("f(2", "g(2")
    (part,) = parts_of_pair(Pair(("", text), ("", wrong), {}), tmp_path)
    assert "z.tanh() - z" in part.port and "z.tanh() + z" in part.reference
    assert [[line.partition("  ")[2] for line in lines] for lines in part.callers] == [
        ["x = f(2 * x).sin()"], []]  # fmt: skip


def test_what_jax_compiles_of_its_own_has_the_lines_of_its_call() -> None:
    """But for a stop, which its user did not write."""
    library = eval(compile("jax.jit(lambda x: jax.lax.stop_gradient(x) + x)", "<library>", "eval"))

    def helper(x: jax.Array) -> jax.Array:
        return x.var() * library(x)

    flat = Flat()
    jaxpr = jax.make_jaxpr(lambda x: helper(helper(x)).sum())(np.ones(3, np.float32)).jaxpr
    (flat.tape.loss,) = flat.walk(jaxpr, [], [flat.tape.begin(np.ones(3), "batch")])
    told = flat.tape.describe()["values"]
    lines = {v["op"]: v["line"].partition("  ")[2] for v in told if v["line"]}
    assert {lines[op] for op in ("square", "mul", "add")} == {"return x.var() * library(x)"}
    assert "stop_gradient" not in lines and "stop_gradient" in {v["op"] for v in told}


def test_a_convolution_is_told_without_what_is_usual(tmp_path: Path) -> None:
    text = "return F.conv1d(x, self.w, padding=1, dilation={}).tanh()"
    pair = Pair(
        ("self.w = P(T, T, 3)", text.format(1)), ("self.w = P(T, T, 3)", text.format(1)), {}
    )
    changes = ("padding=1, dilation=1", "padding=2, dilation=2")
    (part,) = parts_of_pair(pair, tmp_path, changes)
    told = [operation.partition("; ")[2] for operation in part.operations]
    assert told == ["stride=[1], padding=[1]", "stride=[1], padding=[2], dilation=[2]"]


def test_a_tensor_that_nothing_has_stays_open(tmp_path: Path) -> None:
    pair = PAIRS["the gain first"]
    found = followed_pair(
        pair, tmp_path, ("return y @ self.w + self.b", "return y @ self.w * 3 + self.b")
    )
    assert not found.equal and found.partners("w") == ["head.weight"]
    (part,) = parts_of_pair(
        pair, tmp_path, ("return y @ self.w + self.b", "return y @ self.w * 3 + self.b")
    )
    assert part.port.endswith("return y @ self.w * 3 + self.b")
    assert part.reference.endswith("return self.head(self.norm(x))")


# By what stands before a difference: lines of the reference, and what is changed in the port, first
# in the line that is to be named.
BEHIND = {
    "parts joined the other way round": (
        "y = torch.cat([x, torch.tanh(x)], -1)\nreturn F.group_norm(y.mT, 3).mT @ self.w",
        [("[x, torch.tanh(x)]", "[torch.tanh(x), x]")]),
    "a copy that the reference does not make": (
        "v = torch.tanh(x)\ns = (x @ x.mT).tril()\nreturn 2 * (s @ v)",
        [(".tril()", ".tril(-1)"), ("torch.tanh(x)", "torch.tanh(x).repeat_interleave(2, -1)"),
         ("2 * (s @ v)", "(s @ v).view(B, T, D, 2).sum(-1)")]),
    "a shift the other way": (
        "y = F.pad(x, (0, 0, 1, -1))\nreturn torch.tanh(x) * y.sin()",
        [("F.pad(x, (0, 0, 1, -1))", "F.pad(x, (0, 0, -1, 1))")]),
    "a table in float32": (
        "x = x + torch.arange(T).div(7).double().sin()[:, None]\nreturn 3 * x.tanh()",
        [("3 * x.tanh()", "3 * x.sin()"), (".div(7).double()", ".double().div(7)")]),
    "a value of which zeros alone are alike": (
        "y = (3 * x).sin()\nz = F.relu(y - 9)\nreturn y.exp() + z", [("(3 * x)", "(4 * x)")]),
    "a value of which signs alone are alike": (
        "y = 3 * x\nreturn torch.where(y > 0, y.sin(), x)", [("3 * x", "4 * x")]),
    "a value of which the largest alone is alike": (
        "y = torch.where(x > -0.5, x, 2 * x)\nreturn (y - y.amax(-1, keepdim=True)).exp()",
        [("x > -0.5", "x > -0.6")]),
    "another time of a step": (
        "t = torch.full((), 0.25).double()\nfor k in range(3):\n"
        "    x = x + (x * (t + k).expand(T, 1)).sin()\nreturn x",
        [("(t + k)", "(t + min(k, 1))")]),
    "constants of a first state": (
        "c = torch.zeros(T, D).double().softmax(-1)\nreturn (c * x).tanh()",
        [("softmax(-1)", "softmax(0)")]),
    "another part of a value": (
        "a, b, c = x.chunk(3, -1)\nreturn (a.tanh() * b).repeat(1, 1, 3) + c.sum()",
        [("a, b, c = ", "b, c, a = ")]),
    "members of an ensemble in one value": (
        "a, b = (2 * x).sin(), (3 * x).sin()\nreturn a.tanh() + b.tanh()",
        [("a.tanh() + b.tanh()", "y.tanh().mean(0)"),
         ("a, b = (2 * x).sin(), (3 * x).sin()", "y = torch.stack([2 * x, 3 * x]).sin()")]),
    "an input that one side leaves out": (
        "y = x * ids.unsqueeze(-1)\nreturn y.tanh()",
        [("ids.unsqueeze(-1)", "x.argmax(-1, True)")]),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHIND)
def test_a_difference_behind_others_that_are_none_is_named_by_its_lines(
    name: str, tmp_path: Path
) -> None:
    reference, changes = BEHIND[name]
    init, port = "self.w = P(2 * D, D)" * ("self.w" in reference), reference
    for old, new in changes:
        port = port.replace(old, new)
    part = parts_of_pair(Pair((init, reference), (init, port), {}), tmp_path)[0]
    assert changes[0][0] in part.reference and changes[0][1] in part.port, part


NEAR = [
    ("return x.norm(dim=-1, keepdim=True) + x", "return x.sum(-1, keepdim=True) + x", False),
    ("return (x.exp() * x.norm(dim=-1, keepdim=True)).sin()", "return x.exp().sin()", True),
    ("a, b = x.chunk(2, -1)\nreturn (a.tanh() * b.sin()).repeat(1, 1, 2)",
     "b, a = x.chunk(2, -1)\nreturn (b.sin() * a.tanh()).repeat(1, 1, 2)", True),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "near"), NEAR)
def test_lines_are_near_where_the_operations_are_not_given_the_same(
    right: str, wrong: str, near: bool, tmp_path: Path
) -> None:
    (part,) = parts_of_pair(Pair(("", right), ("", wrong), {}), tmp_path)
    assert part.near is near, part


def test_what_jax_does_to_an_index_is_told_by_what_reads_there() -> None:
    """Nobody wrote its comparison with zero, which comes first."""
    made = [("parameter", [], 9, "float64"), ("batch", [], 3, "int64"), ("lt", [1], 3, "bool"),
            ("add", [1], 3, "int64"), ("select_n", [2, 1, 3], 3, "int64"),
            ("gather", [0, 4], 3, "float64")]  # fmt: skip
    values = [{"op": op, "name": "", "inputs": i, "shape": [n], "dtype": kind, "line": "port.py:1"}
              for op, i, n, kind in made]  # fmt: skip
    side = SideTape({"values": values, "loss": 5}, {})
    assert part_at(side, 2, side, 5).operations == ("gather of (9,), (3,)",) * 2


def test_tensors_that_meet_data_as_one_value_are_paired_together(tmp_path: Path) -> None:
    """Their names say nothing, and their shapes little."""
    pair = Pair(
        ("self.z, self.norm, self.q = P(T, D), nn.LayerNorm(D), nn.Linear(D, D)",
         "return (self.q(self.norm(self.z)) @ x.mT).softmax(-1) @ x"),
        ("self.a, self.g, self.h, self.w, self.b = P(T, D), P(D), P(D), P(D, D), P(D)",
         "z = F.layer_norm(self.a, (D,)) * self.g + self.h\n"
         "return (x @ (z @ self.w + self.b).T).mT.softmax(-1) @ x"), {},
    )  # fmt: skip
    found = followed_pair(pair, tmp_path)
    partners = {name: found.partners(name) for name in found.source}
    assert found.equal
    assert partners == {"a": ["z"], "g": ["norm.weight"], "h": ["norm.bias"], "w": ["q.weight"],
                        "b": ["q.bias"]}  # fmt: skip


def test_siblings_stand_as_the_walk_finds_them_and_not_as_they_are_listed(tmp_path: Path) -> None:
    """A choice that a later value refutes is taken back."""
    pair = PAIRS["siblings of one shape"]
    swapped = followed_pair(pair, tmp_path, ("up * F.silu(self.b(x))", "F.silu(up) * self.b(x)"))
    assert swapped.equal
    assert swapped.partners("a.weight") == ["gate.weight"]
    assert swapped.partners("b.bias") == ["up.bias"]


@tier(
    "rest",
    guard="test_by_values.py",
    where=lambda port: port != "gpt_linen.py",
)
@pytest.mark.parametrize("port", ["gpt_jax.py", "gpt_nnx.py", "gpt_linen.py", "gpt_lockstep.py"])
def test_an_example_in_jax_is_paired_whole_without_taps(port: str, tmp_path: Path) -> None:
    text = (GPT / port).read_text()
    path = tmp_path / port
    path.write_text(text.replace("def taps(", "def no_taps("))
    with closing(UserProgram(str(path))) as running:
        found = follow_programs(Inside(port_of("gpt")), running, TOKENS)
    assert found.equal and not found.open
    assert not any((places == OPEN).any() for places in found.source.values())
    theirs = {partner for name in found.source for partner in found.partners(name)}
    assert theirs == set(found.starts)


@tier("rest", guard="test_each_of_several_roots_is_told_with_its_own_lines")
@pytest.mark.parametrize(
    "old, new, lines",
    [
        ("approximate=True", "approximate=False", ("gpt_torch.py:34 ", "gpt_nnx.py:42 ")),
        ("epsilon=1e-5", "epsilon=1e-6", ("gpt_torch.py:46 ", "gpt_nnx.py:53 ")),
    ],
)
def test_a_difference_of_a_port_in_jax_is_named_by_the_two_lines(
    old: str, new: str, lines: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "gpt_nnx.py"
    path.write_text((GPT / "gpt_nnx.py").read_text().replace(old, new))
    with closing(UserProgram(str(path))) as running:
        first = part_programs(Inside(port_of("gpt")), running, TOKENS).parts[0]
    assert first.reference.startswith(lines[0]) and first.port.startswith(lines[1])


def check_with_lines(torch_folder: Path, file: Path) -> Result:
    return check_inside(trace.read(torch_folder), file)


def test_a_root_is_told_with_the_two_lines(torch_folder: Path, tmp_path: Path) -> None:
    result = check_with_lines(torch_folder, changed(BY_NAME["gelu-erf"], tmp_path))
    (root,) = [root for root in result.roots if root.direction == "forward"]
    assert root.cause and root.lines == [
        "gpt_torch.py:34  return self.c_proj(self.gelu(self.c_fc(x)))",
        "gelu_erf.py:34  return self.c_proj(self.gelu(self.c_fc(x)))",
    ]
    assert root.operations == ["gelu of (4, 12, 96); approximate='tanh'", "gelu of (4, 12, 96)"]
    told = report.text(result)
    for side, line, operation in zip(("reference", "port"), root.lines, root.operations):
        assert f"  {side}: {line}  [{operation}]" in told
    found = report.to_json(result)["roots"][0]
    assert (found["lines"], found["operations"]) == (root.lines, root.operations)


def test_a_root_of_the_backward_pass_is_told_with_the_lines_that_use_its_value(
    torch_folder: Path, tmp_path: Path
) -> None:
    """First with the line that stops its gradient."""
    result = check_with_lines(torch_folder, changed(BY_NAME["embedding-detached"], tmp_path))
    (root,) = result.roots
    line = "x = self.wte(tokens){} + self.wpe(torch.arange(tokens.shape[1]))"
    assert root.direction == "backward" and root.lines == [
        f"gpt_torch.py:67  {line.format('')}",
        f"embedding_detached.py:67  {line.format('.detach()')}",
    ]
    assert [each.split()[0] for each in root.operations] == ["add", "detach"]


def test_each_of_several_roots_is_told_with_its_own_lines(
    torch_folder: Path, tmp_path: Path
) -> None:
    """Behind a difference the reference's value is put in, and the next one is found."""
    file = changed(BY_NAME["gelu-erf"], tmp_path)
    for name in ("ln-f-eps", "sum-for-mean", "scale-width"):
        old, new = BY_NAME[name].old, BY_NAME[name].new
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    roots = [r for r in check_with_lines(torch_folder, file).roots if r.direction == "forward"]
    texts = ["scaled_dot_product_attention", "self.gelu(", "self.ln_f(", "F.cross_entropy"]
    assert len(roots) == len(texts)
    for root, text in zip(roots, texts):
        assert all(text in line for line in root.lines), (root.name, root.lines)


# One module, whose parts a check cannot feed.
ONE_MODULE = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        x = F.gelu(x @ self.a)
        x = torch.tanh(x) + 0.5
        return x @ self.b


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(4, 6))}
"""
)
IN_ONE_MODULE = [
    ("x - x.mean(-1, keepdim=True)", "x - x.mean(0, keepdim=True)"),
    ("F.gelu(x @ self.a)", "F.silu(x @ self.a)"),
    ("+ 0.5", "+ 0.25"),
    ("return x @ self.b", "return 2 * (x @ self.b)"),
]


def test_each_place_of_one_module_is_a_root_of_its_own() -> None:
    """Also of two between which no parameter is met, so that no module and no tensor parts them."""
    roots = check_pair(ONE_MODULE, ONE_MODULE, *IN_ONE_MODULE, again=False).roots
    forward = [root for root in roots if root.direction == "forward"]
    assert len(forward) == len(IN_ONE_MODULE) == len({root.where for root in forward})
    for root, changes in zip(forward, IN_ONE_MODULE):
        assert changes[1] in root.lines[1], root.lines
    assert [root.cause for root in forward] == [
        "mean dim=[0], for dim=[-1]", "silu, for gelu", "add 0.25, for 0.5",
        "mul 2, which the reference has not"]  # fmt: skip


def test_a_place_of_one_module_is_accepted_by_its_own_name() -> None:
    accept = ["(root), at port.py:23=another number"]
    result = check_pair(ONE_MODULE, ONE_MODULE, *IN_ONE_MODULE[1:3], again=False, accept=accept)
    assert [root.where for root in result.accepted] == ["(root), at port.py:23"]
    assert [root.where for root in result.roots] == ["(root)"]


IN_MODULES = START + """
class Bend(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 0.9


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bend, self.b = nn.Linear(6, 6), Bend(), nn.Linear(6, 6)

    def forward(self, x):
        return self.b(F.gelu(self.bend(self.a(x))))
""" + ONE_MODULE[ONE_MODULE.index("\n\ndef loss"):]  # fmt: skip


@pytest.mark.parametrize("factor", ["0.91", "0.9 * (1 + 3e-11)"])
def test_a_difference_that_the_next_one_follows_at_once_stays_a_root(factor: str) -> None:
    """No value between them is right; the second gap is one that the walk cannot see."""
    changes = ("torch.tanh(x) * 0.9", f"torch.tanh(x) * {factor}"), ("F.gelu(", "F.silu(")
    roots = check_pair(IN_MODULES, IN_MODULES, *changes, again=False).roots
    assert [root.where for root in roots] == ["bend", "between bend and b"]
    assert [root.cause[:10] for root in roots] == ["mul 0.91, ", "SiLU for G"] or "+" in factor


def test_a_difference_that_another_hides_from_the_walk_stays_a_root() -> None:
    """Means along another axis have another size, so the walk goes on further below."""
    centred = IN_MODULES.replace(
        "class Model",
        "class Centre(nn.Module):\n"
        "    def forward(self, x):\n        return x - x.mean(-1, keepdim=True)\n\n\nclass Model",
    )
    centred = centred.replace(
        "self.a, self.bend", "self.centre = Centre()\n        self.a, self.bend"
    )
    centred = centred.replace("self.bend(self.a(x))", "self.bend(self.centre(self.a(x)))")
    changes = ("mean(-1,", "mean(0,"), ("torch.tanh(x) * 0.9", "torch.tanh(x) * 0.91")
    roots = check_pair(centred, centred, *changes, again=False).roots
    assert [root.where for root in roots] == ["centre", "bend"]


def test_a_difference_that_is_on_no_way_to_the_loss_stays_a_root() -> None:
    aside = IN_MODULES.replace("return self.b(F.gelu(self.bend(self.a(x))))",
                               "return self.b(F.gelu(self.a(x))), self.bend(x)")  # fmt: skip
    aside = aside.replace('model(batch["x"])', 'model(batch["x"])[0]')
    changes = ("torch.tanh(x) * 0.9", "torch.tanh(x) * 0.91"), ("F.gelu(", "F.silu(")
    roots = check_pair(aside, aside, *changes, again=False).roots
    assert {root.where for root in roots} == {"bend", "between a and b"}


def test_without_tapes_the_verdict_and_the_roots_are_as_before(
    torch_folder: Path, tmp_path: Path
) -> None:
    file = changed(BY_NAME["gelu-erf"], tmp_path)
    recorded = trace.read(torch_folder)
    about = recorded.about | {"tape": {"lacks": "ref.py: runs in float32; a tape needs float64"}}
    with_, without = (check_inside(replace(recorded, about=each), file)
                      for each in (recorded.about, about))  # fmt: skip
    assert with_.verdict == without.verdict == "different"
    assert [root.name for root in with_.roots] == [root.name for root in without.roots]
    assert not any(root.lines for root in without.roots)
    assert "no lines are named: ref.py: runs in float32; a tape needs float64" in without.notes


def test_a_large_model_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MOST", 10)
    recorded = record_inside(small(tmp_path), tmp_path / "trace")
    bug = "def loss(model, batch):\n    return model(batch['x']).pow(2).sum()"
    result = check_inside(recorded, small(tmp_path, "port.py", loss=bug))
    assert result.verdict == "different" and not any(root.lines for root in result.roots)
    assert any("more than 10 take too long" in note for note in result.notes)


def test_nothing_is_followed_where_the_programs_are_equal(
    torch_folder: Path, jax_reference: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where one tensor of the port stands for a query, a key and a value."""

    followed: list[int] = []
    monkeypatch.setattr(Follower, "_live", lambda _, step: followed.append(step))
    assert check_with_lines(torch_folder, port_of("gpt")).verdict == "equal"
    assert check_inside(jax_reference, port_of("gpt")).verdict == "equal"
    assert not followed


def test_a_fingerprint_sees_elements_and_their_order_apart() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4))
    assert np.allclose(fingerprint(x)[:7], fingerprint(x.T)[:7], rtol=1e-12)
    assert not np.allclose(fingerprint(x)[7:], fingerprint(x.T)[7:], rtol=1e-3)
    assert not np.allclose(fingerprint(x)[:7], fingerprint(x + 1e-3 * (x > 1))[:7], rtol=1e-9)


def test_turns_give_each_layout_once() -> None:
    x = np.arange(6).reshape(2, 3)
    found = [each.tolist() for each in turns(x, (3, 2))]
    assert found[0] == x.T.tolist() and x.reshape(3, 2).tolist() in found
    assert next(turns(x, x.shape)).tolist() == x.tolist()
    assert len(found) == len({str(each) for each in found})


def test_the_axes_in_another_order_come_before_a_regrouping() -> None:
    """Each layout of a memory of zeros gives the same, so the first that is tried is taken."""
    x = np.arange(24).reshape(2, 3, 4)
    assert next(turns(x, (2, 4, 3))).tolist() == x.swapaxes(1, 2).tolist()


def test_fewer_tensors_than_values_are_no_choice() -> None:
    """Thirteen tensors for fourteen values were tried in each order, and a check did not end."""
    layouts = [(number, np.zeros(1)) for number in range(13)]
    assert not [*_each_once([layouts] * 14)]
    assert len([*_each_once([layouts[:3]] * 3)]) == 6


def test_several_values_have_no_part_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors were counted up, one by one, where parts alone were asked for."""
    asked = list[int]()
    monkeypatch.setattr(Fits, "_together", lambda self, meeting, unknown: asked.append(meeting))
    fits = Fits.__new__(Fits)
    assert not [*fits.candidates(7, [1, 2], kinds=("part",))] and not asked
