"""Small models with the mappings that `lockstep check` proves of them, and the rule of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.convert.derive import Derived, derive_rules
from lockstep.convert.map import Map
from lockstep.convert.plan import Plan, make_plan

Shapes = Mapping[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Proof:
    """Pairs of tensors at one size; the model's shapes at another, `large`."""

    tensors: list[dict[str, Any]]
    reference: Shapes
    port: Shapes
    rules: tuple[tuple[dict[str, str], dict[str, str]], ...]
    large: tuple[Shapes, Shapes]
    sizes: tuple[tuple[str, Any], ...] = ()  # what shapes do not tell in one of the directions

    def derive(self) -> Derived:
        return derive_rules(self.tensors, (self.reference, self.port))

    def map(self) -> Map:
        derived = self.derive()
        return Map(tuple(derived.rules), derived.sizes)

    def to_port(self, reference: Arrays) -> Arrays:
        """Converts as the proof says, without rules."""
        port = {name: np.zeros(shape, np.int64) for name, shape in self.port.items()}
        for each in self.tensors:
            values, target = (
                _cut(x[each[side]["name"]], each[side].get("cuts", []))
                for x, side in ((reference, "reference"), (port, "port"))
            )
            target[...] = values.transpose(each["axes"]).reshape(target.shape)
        return port


def _cut(x: np.ndarray, cuts: list[list[Any]]) -> np.ndarray:
    for axis, start, stop, one, *step in cuts:
        place = slice(start, start + 1) if one else slice(start, stop, *(step or [1]))
        x = x[(*[slice(None)] * axis, place)]
        x = x.reshape(x.shape[:axis] + x.shape[axis + 1 :]) if one else x
    return x


def pair(reference: str, port: str, axes: list[int], r: Any = (), p: Any = ()) -> dict[str, Any]:
    return {
        "reference": {"name": reference, "cuts": [*r]},
        "port": {"name": port, "cuts": [*p]},
        "axes": axes,
    }


def random_arrays(shapes: Shapes) -> Arrays:
    return {
        name: np.random.default_rng(at).integers(0, 2**40, shape)
        for at, (name, shape) in enumerate(shapes.items())
    }


def convert_arrays(map_: Map, source: Arrays, **how: Any) -> tuple[Plan, Arrays]:
    plan = make_plan(
        map_.rules,
        {name: x.shape for name, x in source.items()},
        shared=[*map_.sizes],
        tied=map_.tied,
        unused=map_.unused,
        **how,
    )
    target = {name: np.full(shape, -1) for name, shape in plan.shapes.items()}
    for name, copies in plan.copies.items():
        for copy in copies:
            values, place = copy.views(source[copy.source], target[name])
            place[...] = values
    return plan, target


Q, K, V = "qkv"
PROOFS = {
    "a transposed kernel in each layer": Proof(
        [pair(f"h.{i}.fc.weight", f"blocks_{i}.mlp.fc.kernel", [1, 0]) for i in range(2)],
        {f"h.{i}.fc.weight": (3, 5) for i in range(2)},
        {f"blocks_{i}.mlp.fc.kernel": (5, 3) for i in range(2)},
        (({"h.{layer}.fc.weight": "a b"}, {"blocks_{layer}.mlp.fc.kernel": "b a"}),),
        ({f"h.{i}.fc.weight": (4, 2) for i in range(11)},
         {f"blocks_{i}.mlp.fc.kernel": (2, 4) for i in range(11)}),
    ),
    "layers that are stacked": Proof(
        [pair(f"h.{i}.fc.weight", "blocks.fc", [0, 1], p=[[0, i, i + 1, True]]) for i in range(3)],
        {f"h.{i}.fc.weight": (3, 5) for i in range(3)},
        {"blocks.fc": (3, 3, 5)},
        (({"h.{layer}.fc.weight": "a b"}, {"blocks.fc": "layer a b"}),),
        ({f"h.{i}.fc.weight": (2, 2) for i in range(5)}, {"blocks.fc": (5, 2, 2)}),
    ),
    "experts in layers": Proof(
        [pair(f"l.{i}.experts.{e}.w", "moe.w", [1, 0], p=[[0, i, i + 1, True], [0, e, e + 1, True]])
         for i in range(3) for e in range(2)],
        {f"l.{i}.experts.{e}.w": (4, 6) for i in range(3) for e in range(2)},
        {"moe.w": (3, 2, 6, 4)},
        (({"l.{l}.experts.{expert}.w": "a b"}, {"moe.w": "l expert b a"}),),
        ({f"l.{i}.experts.{e}.w": (3, 2) for i in range(2) for e in range(8)},
         {"moe.w": (2, 8, 2, 3)}),
    ),
    "a fused projection": Proof(
        [pair("c.weight", f"{n}.kernel", [1, 0], [[0, 4 * at, 4 * at + 4, False]])
         for at, n in enumerate("qkv")],
        {"c.weight": (12, 5)},
        {f"{n}.kernel": (5, 4) for n in "qkv"},
        (({"c.weight": "q+k+v a"}, {f"{n}.kernel": f"a {n}" for n in "qkv"}),),
        ({"c.weight": (6, 3)}, {f"{n}.kernel": (3, 2) for n in "qkv"}),
    ),
    "a fused projection with fewer keys": Proof(
        [pair("c.weight", f"{n}.kernel", [1, 0], [[0, start, stop, False]])
         for n, start, stop in (("q", 0, 12), ("k", 12, 18), ("v", 18, 24))],
        {"c.weight": (24, 5)},
        {"q.kernel": (5, 4, 3), "k.kernel": (5, 2, 3), "v.kernel": (5, 2, 3)},
        (({"c.weight": "q:(n4 n3)+k:(n2 n3)+v:(n2 n3) a"},
          {"q.kernel": "[q] a n4 n3", "k.kernel": "[k] a n2 n3", "v.kernel": "[v] a n2 n3"}),),
        ({"c.weight": (40, 3)},
         {"q.kernel": (3, 8, 4), "k.kernel": (3, 1, 4), "v.kernel": (3, 1, 4)}),
        sizes=(("n4", 8), ("n3", 4)),
    ),
    "a fused projection within each head": Proof(
        [pair("c.weight", f"{n}.kernel", [1, 0], [[0, start := h * 9 + at * 3, start + 3, False]],
              [[1, h * 3, h * 3 + 3, False]])
         for h in range(4) for at, n in enumerate("qkv")],
        {"c.weight": (36, 5)},
        {f"{n}.kernel": (5, 12) for n in "qkv"},
        (({"c.weight": "(n4 q+k+v) a"}, {f"{n}.kernel": f"a (n4 {n})" for n in "qkv"}),),
        ({"c.weight": (12, 2)}, {f"{n}.kernel": (2, 4) for n in "qkv"}),
        sizes=(("n4", 2),),
    ),
    "columns of two in turns": Proof(
        [pair("up.weight", n, [1, 0], [[0, at, 12, False, 2]])
         for at, n in enumerate(("gate", "up"))],
        {"up.weight": (12, 5)},
        {"gate": (5, 6), "up": (5, 6)},
        (({"up.weight": "(n6 gate:1+up:1) a"}, {"gate": "[gate] a n6", "up": "[up] a n6"}),),
        ({"up.weight": (8, 2)}, {"gate": (2, 4), "up": (2, 4)}),
    ),
    "a rotated kernel": Proof(
        [pair("c.weight", "c.kernel", [1, 0], [[2, i, i + 1, True], [2, j, j + 1, True]],
              [[0, 2 - i, 3 - i, True], [0, 4 - j, 5 - j, True]])
         for i in range(3) for j in range(5)],
        {"c.weight": (7, 6, 3, 5)},
        {"c.kernel": (3, 5, 6, 7)},
        (({"c.weight": "a b c d"}, {"c.kernel": "-c -d b a"}),),
        ({"c.weight": (2, 3, 1, 4)}, {"c.kernel": (1, 4, 3, 2)}),
    ),
    "rows after a flattening of other axes": Proof(
        [pair("f.weight", "f.kernel", [0], [[1, c * 4 + p, c * 4 + p + 1, True]],
              [[0, p * 3 + c, p * 3 + c + 1, True]])
         for c in range(3) for p in range(4)],
        {"f.weight": (6, 12)},
        {"f.kernel": (12, 6)},
        (({"f.weight": "a (n3 n4)"}, {"f.kernel": "(n4 n3) a"}),),
        ({"f.weight": (2, 35)}, {"f.kernel": (35, 2)}),
        sizes=(("n3", 5),),
    ),
    "kernels of single heads, and a table in pieces": Proof(
        [pair("o.weight", f"heads.{h}.o", [1, 0], [[1, 3 * h, 3 * h + 3, False]]) for h in range(3)]
        + [pair("t.weight", f"table_{i}", [0, 1], [[0, 4 * i, 4 * i + 4, False]])
           for i in range(3)],
        {"o.weight": (5, 9), "t.weight": (12, 2)},
        {f"heads.{h}.o": (3, 5) for h in range(3)} | {f"table_{i}": (4, 2) for i in range(3)},
        (({"o.weight": "a (head n3)"}, {"heads.{head}.o": "n3 a"}),
         ({"t.weight": "(table n4) a"}, {"table_{table}": "n4 a"})),
        ({"o.weight": (2, 8), "t.weight": (10, 2)},
         {f"heads.{h}.o": (4, 2) for h in range(2)} | {f"table_{i}": (2, 2) for i in range(5)}),
        sizes=(("head", 2), ("table", 5)),
    ),
    "gates in another order": Proof(
        [pair("cell.weight", "cell.kernel", [1, 0], [[0, 4 * i, 4 * i + 4, False]],
              [[1, 4 * j, 4 * j + 4, False]])
         for i, j in enumerate((0, 2, 1, 3))],
        {"cell.weight": (16, 3)},
        {"cell.kernel": (3, 16)},
        (({"cell.weight": "part0+part1+part2+part3 a"},
          {"cell.kernel": "a part0+part2+part1+part3"}),),
        ({"cell.weight": (8, 5)}, {"cell.kernel": (5, 8)}),
    ),
    "other numbers of the same layers": Proof(
        [pair(f"net.{2 * i}.weight", f"layers.{i}.kernel", [1, 0]) for i in range(3)]
        + [pair(f"layer{i + 1}.{j}.conv1.weight", f"stages.{i}.{j}.conv1", [0])
           for i in range(3) for j in range(2)],
        {f"net.{2 * i}.weight": (3 + i, i + 2) for i in range(3)}
        | {f"layer{i + 1}.{j}.conv1.weight": (i + 2,) for i in range(3) for j in range(2)},
        {f"layers.{i}.kernel": (i + 2, i + 3) for i in range(3)}
        | {f"stages.{i}.{j}.conv1": (i + 2,) for i in range(3) for j in range(2)},
        (({"net.{2*layer}.weight": "a b"}, {"layers.{layer}.kernel": "b a"}),
         ({"layer{stage+1}.{layer2}.conv1.weight": "a"}, {"stages.{stage}.{layer2}.conv1": "a"})),
        ({"net.0.weight": (2, 1)} | {f"layer{i + 1}.{j}.conv1.weight": (2,)
                                     for i in range(4) for j in range(3)},
         {"layers.0.kernel": (1, 2)} | {f"stages.{i}.{j}.conv1": (2,)
                                        for i in range(4) for j in range(3)}),
    ),
    "blocks that count through the stages": Proof(
        [pair(f"s.{s}.l.{i}.conv.weight", f"blocks.{s + i}.conv.kernel", [0])
         for s, i in ((0, 0), (1, 0), (1, 1))]
        + [pair(f"s.{s}.l.0.short.weight", f"blocks.{s}.short.kernel", [0]) for s in range(2)],
        {"s.0.l.0.conv.weight": (3,), "s.1.l.0.conv.weight": (4,), "s.1.l.1.conv.weight": (5,),
         "s.0.l.0.short.weight": (6,), "s.1.l.0.short.weight": (7,)},
        {"blocks.0.conv.kernel": (3,), "blocks.1.conv.kernel": (4,), "blocks.2.conv.kernel": (5,),
         "blocks.0.short.kernel": (6,), "blocks.1.short.kernel": (7,)},
        (({"s.{s}.l.{l}.conv.weight": "a"}, {"blocks.{s,l}.conv.kernel": "a"}),
         ({"s.{s}.l.0.short.weight": "a"}, {"blocks.{s,0}.short.kernel": "a"})),
        ({f"s.{s}.l.{i}.conv.weight": (2,) for s in range(2) for i in range(3)}
         | {f"s.{s}.l.0.short.weight": (3,) for s in range(2)},
         {f"blocks.{i}.conv.kernel": (2,) for i in range(6)}
         | {f"blocks.{i}.short.kernel": (3,) for i in (0, 3)}),
        sizes=(("l", [3, 3]),),
    ),
    "one tensor twice": Proof(
        [pair("wte", "embed", [0, 1]), pair("wte", "head", [1, 0])],
        {"wte": (5, 3)},
        {"embed": (5, 3), "head": (3, 5)},
        (({"wte": "a b"}, {"embed": "a b", "head": "b a"}),),
        ({"wte": (2, 4)}, {"embed": (2, 4), "head": (4, 2)}),
    ),
    "one layer that is built otherwise": Proof(
        [pair(f"h.{i}.w.weight", f"b.{i}.w.kernel", [1, 0] if i else [0, 1]) for i in range(3)],
        {f"h.{i}.w.weight": (3, 5) for i in range(3)},
        {f"b.{i}.w.kernel": (5, 3) if i else (3, 5) for i in range(3)},
        (({"h.{layer}.w.weight": "a b"}, {"b.{layer}.w.kernel": "b a"}),
         ({"h.0.w.weight": "a b"}, {"b.0.w.kernel": "a b"})),
        ({f"h.{i}.w.weight": (2, 4) for i in range(6)},
         {f"b.{i}.w.kernel": (4, 2) if i else (2, 4) for i in range(6)}),
    ),
}  # fmt: skip
