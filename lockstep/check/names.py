"""Reads the name of a tensor or a module: words with one spelling, and the layer's index."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache

WORDS = {
    "attn": "attention attn selfattention selfattn self_attn sa mha mixer",
    "self": "self selfattention selfattn self_attn sa",
    "mlp": "mlp ffn ffw ff feedforward feed_forward",
    "norm": "norm ln layernorm rmsnorm layer_norm batchnorm bn groupnorm normalization qn kn qnorm "
    "knorm",
    "query": "q query wq qn qnorm", "key": "k key wk kn knorm", "value": "v value wv",
    "qkv": "qkv cattn wqkv inproj",
    "out": "o out output proj cproj wo dense",
    "up": "up fc cfc fc1 wi w1 intermediate in linear1 expand",
    "down": "down fc2 w2 linear2 contract proj cproj",
    "gate": "gate",
    "embed": "embed embedding embeddings wte tok token tokens word words",
    "pos": "wpe pos position positions positional",
    "head": "head lmhead classifier unembed logits attend decoder",
    "final": "f final last",
    "forward": "forward fwd fw", "reverse": "reverse reversed rev backward bwd bw",
    "ih": "ih i2h x2h wx", "hh": "hh h2h wh rec recurrent recurrentkernel",  # of recurrent cells
    "conv": "conv convolution", "shortcut": "shortcut downsample skip",
    "mean": "mean runningmean mu", "var": "var variance runningvar",
    "logvar": "logvar logvariance",
}  # fmt: skip
ROLES = {"query", "key", "value", "gate", "up"}  # of the parts of what is fused
MEANING: dict[str, set[str]] = {}
for _meaning, _words in WORDS.items():
    for _word in _words.split():
        MEANING.setdefault(_word, set()).add(_meaning)
# A block's two norms, whose names in use mislead word by word.
NORMS = {
    "first norm": "input_layernorm input_norm attention_norm attn_norm pre_attention_norm "
    "norm_1 norm1 ln_1 ln1",
    "second norm": "post_attention_layernorm post_attention_norm mlp_norm ffn_norm pre_mlp_norm "
    "norm_2 norm2 ln_2 ln2",
}  # fmt: skip
PHRASES = sorted(
    (
        (phrase, name.replace(" ", "."))
        for name, phrases in NORMS.items()
        for phrase in phrases.split()
    ),
    key=lambda pair: -len(pair[0]),
)
# The number of a norm that Linen names by its class: counted from zero, it tells no first norm.
LINEN_COUNT = re.compile(r"(?<=[a-zA-Z]Norm)_\d+")
JOINED = ("self_attn", "feed_forward", "layer_norm", "c_attn", "c_proj", "c_fc", "lm_head",
          "running_mean", "running_var", "log_var", "in_proj", "recurrent_kernel")  # fmt: skip
STATISTICS = {"mean", "var", "running_mean", "running_var"}
BIASES = {"bias", "b", "beta", "offset", "shift"}
GAINS = {"weight", "kernel", "scale", "gamma", "embedding", "w", "g"}
LEAVES = BIASES | GAINS
# One name for what a layer multiplies by, and one for what it adds, where a path is compared.
SAME_LEAF = dict.fromkeys(("kernel", "w", "embedding", "scale", "gamma"), "weight")
SAME_LEAF |= dict.fromkeys(("b", "beta"), "bias")
# A tensor of torch's recurrent cells.
CELL = re.compile(r"(weight|bias)_((?P<gate>[ih]h)(?:_l(?P<layer>\d+)(?P<reverse>_reverse)?)?)$")


def segments(name: str) -> list[str]:
    return [part for part in re.split(r"[./]", name) if part]


@cache
def words(name: str) -> frozenset[str]:
    """Splits a name into words of one spelling, without those that say only that it is a tensor."""
    found: set[str] = set()
    text = LINEN_COUNT.sub("", name)
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text).lower()
    for phrase, meaning in PHRASES:
        text = re.sub(rf"(?<![a-z]){phrase}(?![a-z\d])", meaning, text)
    for joined in JOINED:
        text = text.replace(joined, joined.replace("_", ""))
    if ".embedding." in f".{text}":  # a module, and no leaf
        found.add("embed")
    for word in re.split(r"[._/#]", text):
        if (short := without_prefix(word)) is not None:
            word = f"w{short}" if f"w{short}" in MEANING else short
        stem = word if word in MEANING else word.rstrip("0123456789")
        if stem and stem not in LEAVES:
            found |= MEANING.get(stem, {stem})
    return frozenset(found)


Path = tuple[tuple[str, ...], tuple[int, ...]]  # the words of a name, and its numbers


def exact_paths(names_of: Collection[str]) -> dict[str, Path]:
    """Maps names to their paths, in one spelling of separators, numbers and leaves: those of
    layers_0.Attn.kernel and layers.0.attn.weight are equal. What all names begin with is left out,
    and a leaf that would make two tensors one keeps its own name."""
    every = [segments(name) for name in names_of]
    shared = 0
    while every and all(len(path) > shared + 1 and path[shared] == every[0][shared]
                        for path in every):  # fmt: skip
        shared += 1
    made = {".".join(path): _path(path[shared:], SAME_LEAF) for path in every}
    counts = Counter(made.values())
    found = {}
    for name, path in zip(names_of, every):
        usual = made[".".join(path)]
        found[name] = usual if counts[usual] == 1 else _path(path[shared:], {})
    return found


def _path(path: list[str], leaves: dict[str, str]) -> Path:
    *outer, leaf = path
    tokens = [token for segment in [*outer, leaves.get(leaf.lower(), leaf)]
              for token in re.findall(r"[a-z]+|\d+", _snake(segment))]  # fmt: skip
    return (tuple(token for token in tokens if not token.isdigit()),
            tuple(int(token) for token in tokens if token.isdigit()))  # fmt: skip


def _snake(segment: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", segment).lower()


def roles(name: str, count: int) -> tuple[str, ...]:
    """Returns the roles of a fused tensor's parts, in order; () where its name tells none."""
    found = words(name)
    if count == 3 and ("qkv" in found or found >= {"query", "key", "value"}):
        return "query", "key", "value"
    if count == 2 and found >= {"gate", "up"}:
        return (
            ("gate", "up")
            if name.lower().rfind("gate") < name.lower().rfind("up")
            else ("up", "gate")
        )
    return ()


def share_of_words(a: str, b: str) -> float:
    """Divides the words that two names have in common by all; half a word of pool and pooler."""
    ours, theirs = words(a), words(b)
    begun = sum(any(_begins(one, other) for other in theirs - ours) for one in ours - theirs)
    return (len(ours & theirs) + begun / 2) / max(len(ours | theirs), 1)


def _begins(a: str, b: str) -> bool:
    """Says if one word of at least three letters is the beginning of another."""
    short, long = sorted((a, b), key=len)
    return len(short) > 2 and long.startswith(short)


def without_prefix(leaf: str) -> str | None:
    """o of wo and b_o, 1 of w1 and b1: a tree without modules; None where it is no such name."""
    rest = leaf[1:].removeprefix("_")
    return rest if leaf[:1] in ("w", "b") and (rest.isdigit() or rest in MEANING) else None


def _is_of_biases(name: str) -> bool:
    """Says if a weight's module is named a bias, such as a table of one for each item."""
    return bool(re.search(r"bias(es)?$", owner(name)))


def is_bias(name: str) -> bool | None:
    """Says if a name is a bias's; None where it does not say."""
    leaf = segments(name)[-1].lower()
    if cell := CELL.match(leaf):
        return cell[1] == "bias"
    kind = re.sub(r"_?\d+$", "", leaf).rpartition("_")[2]
    if kind in LEAVES:
        return kind in BIASES or (None if _is_of_biases(name) else False)
    return None if without_prefix(leaf) is None else leaf[0] == "b"


def may_be_alike(a: str, b: str) -> bool:
    """Says if two may be partners: not where one is a bias by its name and the other is none."""
    return None in (is_bias(a), is_bias(b)) or is_bias(a) == is_bias(b)


def owner(name: str) -> str:
    """Names the module that holds a tensor; without modules, what kernel and bias share."""
    *outer, leaf = segments(name)
    low = leaf.lower()
    if low in LEAVES | STATISTICS:
        return ".".join(outer)
    if cell := CELL.match(low):
        return ".".join([*outer, cell[2]])
    stem, _, kind = low.rpartition("_")
    short = without_prefix(low)
    return ".".join([*outer, stem if stem and kind in LEAVES else low if short is None else short])


def outer(name: str) -> str:
    """Names the module around the one that holds a tensor."""
    return owner(name).rpartition(".")[0]


def numbered(segment: str) -> tuple[str, int] | None:
    """("h", 3) of h_3, ("", 3) of 3."""
    found = re.fullmatch(r"(.*?)_?(\d+)", segment)
    return (found[1], int(found[2])) if found else None


def layer_indexes(names: list[str]) -> dict[str, tuple[int, ...]]:
    """Maps each name to the ranks of its numbered ancestors that hold modules, as layers do.

    `ln_1` holds a weight and a bias alone: its number is no layer's.
    """
    paths = {name: segments(name) for name in names}
    ends = {name: len(path) - (2 if path[-1].lower() in LEAVES | STATISTICS else 1)
            for name, path in paths.items()}  # fmt: skip
    siblings: dict[tuple[str, ...], dict[str, set[int]]] = {}
    for name, path in paths.items():
        for at, segment in enumerate(path[: ends[name]]):
            if number := numbered(segment):
                stems = siblings.setdefault(tuple(path[:at]), {})
                stems.setdefault(number[0], set()).add(number[1])
    found = {}
    for name, path in paths.items():
        indexes = []
        for at, segment in enumerate(path[: ends[name]]):
            if number := numbered(segment):
                among = sorted(siblings[tuple(path[:at])][number[0]])
                indexes.append(among.index(number[1]))
        found[name] = tuple(indexes)
    return found


def own_numbers(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Maps the tensors of fc1 and fc2 to their module's rank, and how many are numbered with it."""
    found: dict[str, tuple[str, int]] = {}
    siblings: dict[str, set[int]] = {}
    for name in names:
        around, _, own = owner(name).rpartition(".")
        if (number := numbered(own)) and number[0]:
            found[name] = (f"{around}.{number[0]}", number[1])
            siblings.setdefault(found[name][0], set()).add(number[1])
    return {name: (sorted(siblings[stem]).index(number), len(siblings[stem]))
            for name, (stem, number) in found.items()}  # fmt: skip


def wildcard(name: str, whole: Collection[str] = ()) -> str:
    """h.*.mlp of h.3.mlp: the same place in all layers.

    Args:
        whole: modules whose own number is no layer's; see `numbers_of_no_layer`.
    """
    parts = segments(re.sub(r"#\d+", "", name))
    return ".".join(
        re.sub(r"^(.*?_?)\d+(#\d+)?$", r"\1*", part)
        if _is_layer(part) and ".".join(parts[: at + 1]) not in whole
        else part
        for at, part in enumerate(parts)
    )


def numbers_of_no_layer(kinds: dict[str, str]) -> set[str]:
    """head.1 of head.0, a Linear, and head.1, a Tanh: modules of a Sequential, not layers.

    Args:
        kinds: call -> its module's class.
    """
    modules = {re.sub(r"#\d+", "", call): kind for call, kind in kinds.items()}
    outer = {name.rpartition(".")[0] for name in modules}
    groups: dict[str, dict[str, str]] = {}
    for name, kind in modules.items():
        around, _, own = name.rpartition(".")
        if own.isdigit():
            groups.setdefault(around, {})[name] = kind
    return {
        name
        for group in groups.values()
        for name in group
        if not outer >= group.keys() and (len(set(group.values())) > 1 or len(group) == 1)
    }


def places_of(tensors: Iterable[str], whole: Collection[str] = ()) -> dict[str, str]:
    """Maps names to their place in all layers, or to themselves where they are alone there."""
    found = {name: wildcard(name, whole) for name in tensors}
    count = Counter(found.values())
    return {name: place if count[place] > 1 else name for name, place in found.items()}


def across_layers(module: str) -> str:
    """blocks.*.mlp.2 of blocks.3.mlp.2: its own number, as in a Sequential, is no layer's."""
    *outer, own = module.split(".")
    return ".".join([*(f"{n[0]}*" if (n := numbered(each)) else each for each in outer), own])


def _is_layer(segment: str) -> bool:
    return segment.isdigit() or bool(re.fullmatch(r"(h|block|blocks|layer|layers)_?\d+", segment,
                                                  re.I))  # fmt: skip


Indexes = dict[str, tuple[int, ...]]


def align_indexes(ours: Indexes, theirs: Indexes) -> tuple[Indexes, Indexes]:
    """Layers counted alike where one side nests them: `stages.1.layers.0` may be `blocks.3`.

    Of both, the outer numbers that count most layers alike; what is inside is left to the names.
    """
    sides = (ours, theirs)
    depths = [max(map(len, side.values()), default=0) for side in sides]
    if depths[0] == depths[1]:
        return ours, theirs
    best: tuple[int, ...] = (1, 0, 0)
    for a in range(1, depths[0] + 1):
        for b in range(1, depths[1] + 1):
            if len(_layers(ours, a)) == len(_layers(theirs, b)):
                best = max(best, (len(_layers(ours, a)), -a, -b))
    cut = [-depth for depth in best[1:]]
    if not cut[0]:
        return ours, theirs
    made: list[Indexes] = []
    for side, depth in zip(sides, cut):
        rank = {layer: (at,) for at, layer in enumerate(_layers(side, depth))}
        made.append({name: rank.get(index[:depth], ()) for name, index in side.items()})
    return made[0], made[1]


def _layers(indexes: Indexes, depth: int) -> list[tuple[int, ...]]:
    return sorted({index[:depth] for index in indexes.values() if len(index) >= depth})
