"""Names whose meaning their siblings show: w1 beside w2 and w3, or a recurrent cell's kernels."""

from collections import Counter
from collections.abc import Iterator
from math import prod

from lockstep.check import names
from lockstep.check.layout import Shape

GATED = {  # act(gate x) * up x, and down: of Meta's models, and of T5's
    ("w1", "w3", "w2"): ("gate", "up", "down"),
    ("wi_0", "wi_1", "wo"): ("gate", "up", "down"),
}
FUSED = {("w13", "w2"): ("gate_up", "down")}
NORMS = (  # before and behind attention, and the feed-forward part: of Gemma's models
    "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm",
    "pre_attention_norm post_attention_norm pre_ffw_norm post_ffw_norm",
)
SANDWICH = ("pre_attn", "post_attn", "pre_mlp", "post_mlp")
INPUT = {"ih", "i2h", "x2h", "i", "in", "input", "x", "wi", "wx", "w", "kernel", "dense_i"}
HIDDEN = {"hh", "h2h", "h", "rec", "recurrent", "hidden", "wh", "u", "recurrent_kernel", "dense_h"}
NORMED = (("g", "v"), ("weight_g", "weight_v"), ("original0", "original1"))
Shapes = dict[str, Shape]
Children = dict[str, list[str]]  # a child as siblings know it -> the names of its tensors


def spell_out(shapes: Shapes) -> dict[str, str]:
    """Maps tensors to names that say what their siblings show; others to their own."""
    found = {name: _spell_cell(name, shapes) for name in shapes}
    for around, children in _modules(shapes):
        for child, meaning in (*_together(children, shapes), *_recurrent(children, shapes)):
            for name in children[child]:
                path = names.segments(name)
                path[len(around)] = meaning
                found[name] = ".".join(path)
        for name, meaning in _normed(children, shapes):
            outer = around[:-2] if around[-2:-1] == ("parametrizations",) else around
            found[name] = ".".join([*outer, meaning])
    return found


def _modules(shapes: Shapes) -> Iterator[tuple[tuple[str, ...], Children]]:
    """Yields each module's path and its children; w_in and b_in are one child, `in`."""
    modules: dict[tuple[str, ...], Children] = {}
    for name in shapes:
        path = names.segments(name)
        for at, segment in enumerate(path):
            low = segment.lower()
            short = names.without_prefix(low)
            children = modules.setdefault(tuple(path[:at]), {})
            for child in {low} if short is None else {low, short, f"w{short}"}:
                children.setdefault(child, []).append(name)
    yield from modules.items()


def _together(children: Children, shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yields the children of a gated unit, and the norms around two parts, with what they do."""
    for around in map(str.split, NORMS):
        if children.keys() >= {*around}:
            yield from zip(around, SANDWICH)
    for pair, meant in FUSED.items():
        if children.keys() >= {*pair}:
            yield from zip(pair, meant)
    for unit, meanings in GATED.items():
        if not children.keys() >= {*unit}:
            continue
        gate, up, down = (_kernel(children[child], shapes) for child in unit)
        if gate and gate == up and sorted(gate) == sorted(down):
            yield from zip(unit, meanings)


def _recurrent(children: Children, shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yields a cell's two kernels: one for its input, and one for what it was before."""
    for x in sorted(children.keys() & INPUT):
        for h in sorted(children.keys() & HIDDEN):
            inner, outer = _kernel(children[x], shapes), _kernel(children[h], shapes)
            if len(inner) == len(outer) == 2 and max(outer) in inner:
                gates, rest = divmod(max(outer), min(outer))
                if gates in (1, 3, 4) and not rest:
                    yield from ((x, "ih"), (h, "hh"))
                    return


def _normed(children: Children, shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yields a weight in two tensors: g, its length, and v, its direction."""
    for pair in NORMED:
        g, v = ((children.get(child) or [""])[0] for child in pair)
        length, direction = shapes.get(g, ()), shapes.get(v, ())
        if len(direction) > 1 and max(length, default=0) == prod(length) in direction:
            yield from ((g, "g"), (v, "weight"))


def _kernel(tensors: list[str], shapes: Shapes) -> Shape:
    """Returns the shape of a child's only tensor of several axes; () where it has none."""
    kernels = [shapes[name] for name in tensors if len(shapes[name]) > 1]
    return kernels[0] if len(kernels) == 1 else ()


def _spell_cell(name: str, shapes: Shapes) -> str:
    """rnn.l1.reverse.ih.weight of rnn.weight_ih_l1_reverse: layers and directions, if several."""
    *outer, leaf = names.segments(name)
    cell = names.CELL.match(leaf)
    if not cell:
        return name
    beside = {names.segments(n)[-1] for n in shapes if n.rpartition(".")[0] == ".".join(outer)}
    number = cell["layer"]
    layer = [f"l{number}"] if f"{cell[1]}_{cell['gate']}_l1" in beside else []
    both = any(each.endswith("_reverse") for each in beside)
    way = [("forward", "reverse")[bool(cell["reverse"])]] if both else []
    return ".".join([*outer, *layer, *way, cell["gate"], cell[1]])


def mark_copies(shapes: Shapes) -> dict[str, str]:
    """Maps names to *.wi of policy.wi and anchor.wi: modules of one structure have one mark.

    A module of one kernel, such as each of a query, a key and a value, is no copy of another.
    """
    inside: dict[tuple[str, ...], list[tuple[str, Shape]]] = {}
    for name, shape in shapes.items():
        path = names.segments(name)
        for at in range(1, len(path)):
            inside.setdefault(tuple(path[:at]), []).append((".".join(path[at:]), shape))
    structure = {
        module: (module[:-1], frozenset(found)) for module, found in inside.items()
        if sum(len(shape) > 1 for _, shape in found) > 1
    }  # fmt: skip
    count = Counter(structure.values())
    copied = {module for module, key in structure.items() if count[key] > 1}
    marked = {}
    for name in shapes:
        path = names.segments(name)
        outer = [tuple(path[:at]) for at in range(1, len(path))]
        copies = ["*" if each in copied else each[-1] for each in outer]
        marked[name] = ".".join([*copies, path[-1]])
    return marked
