"""The guess by names and shapes, before values decide."""

from collections.abc import Mapping

import numpy as np
import pytest

from lockstep.check.following.follow import OPEN, Followed
from lockstep.check.layout import Shape, fitting_permutations
from lockstep.check.pairing import by_names
from lockstep.check.pairing.by_values import entries_of
from lockstep_recorder.noise import is_statistic
from parity_tests.check.test_comparisons import tensors

D, F = 16, 32
Shapes = Mapping[str, Shape]


def found(reference: Shapes, port: Shapes) -> set[tuple[str, str]]:
    """(module of the port, tensor of the reference)"""
    made = by_names.propose(tensors(reference, "torch"), tensors(port, "jax"))
    assert not made.only_port and not made.only_reference
    return {(e.port.name.rpartition(".")[0], str(e.reference)) for e in made.entries}


@pytest.mark.parametrize("order", ["ifgo", "rzn"])
def test_gates_of_a_cell_stand_in_torch_s_order(order: str) -> None:
    n = len(order)
    sizes = {"i": D, "h": F}
    reference: dict[str, Shape] = {}
    port: dict[str, Shape] = {}
    for layer in (0, 1):
        for side, size in sizes.items():
            size = F if layer else size
            reference |= {f"rnn.weight_{side}h_l{layer}": (n * F, size),
                          f"rnn.bias_{side}h_l{layer}": (n * F,)}  # fmt: skip
            port |= {f"cells_{layer}.{side}{gate}.{leaf}": shape for gate in order
                     for leaf, shape in (("kernel", (size, F)), ("bias", (F,)))}  # fmt: skip
    made = {
        (f"cells_{layer}.{side}{gate}", f"rnn.{leaf}_{side}h_l{layer}[{at * F}:{(at + 1) * F}]")
        for layer in (0, 1) for side in sizes for at, gate in enumerate(order)
        for leaf in ("weight", "bias")
    }  # fmt: skip
    assert found(reference, port) == made
    back = by_names.propose(tensors(port, "jax"), tensors(reference, "torch"))
    assert {(e.reference.name.rpartition(".")[0], str(e.port)) for e in back.entries} == made


@pytest.mark.parametrize("outer", ["", "layers.{}.moe."])
def test_lists_of_an_expert_s_layers_are_the_parts_of_one_tensor(outer: str) -> None:
    lists = {f"{outer.format(i)}w{k}.{e}.weight": (D, F) if k == 2 else (F, D)
             for i in range(2 if outer else 1) for k in (1, 3, 2) for e in range(3)}  # fmt: skip
    one = {f"{outer.format(i)}{name}": shape for i in range(2 if outer else 1)
           for name, shape in (("w13", (3, D, 2 * F)), ("w2", (3, F, D)))}  # fmt: skip
    made = by_names.propose(tensors(lists, "torch"), tensors(one, "jax"), joined="blocks")
    pairs = {str(entry.reference): str(entry.port) for entry in made.entries}
    last = outer.format(1)
    assert len(pairs) == len(lists) and not made.only_port
    assert pairs[f"{last}w3.2.weight"] == f"{last}w13[2][:, {F}:{2 * F}]"
    assert pairs[f"{last}w2.1.weight"] == f"{last}w2[1]"


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_gates_of_a_cell_are_parted_along_what_its_layers_give(framework: str) -> None:
    """NNX's OptimizedLSTMCell beside Linen's; values that are zero at first tell no gates apart."""
    last = framework == "jax"
    kernels = {"i": (D, 4 * F), "h": (F, 4 * F)}
    fused: dict[str, Shape] = {f"rnn.cell.dense_{side}.kernel": shape if last else shape[::-1]
                               for side, shape in kernels.items()}  # fmt: skip
    fused["rnn.cell.dense_h.bias"] = (4 * F,)
    gates: dict[str, Shape] = {f"cell.{side}{gate}.kernel": (D if side == "i" else F, F)
                               for gate in "fgio" for side in "ih"}  # fmt: skip
    gates |= {f"cell.h{gate}.bias": (F,) for gate in "fgio"}
    made = by_names.propose(tensors(gates, "jax"), tensors(fused, framework))
    before = ":, " if last else ""
    kernels_of = {str(e.reference): str(e.port) for e in made.entries if "kernel" in str(e.port)}
    assert kernels_of == {
        f"cell.{side}{gate}.kernel": f"rnn.cell.dense_{side}.kernel[{before}{at * F}:{at * F + F}]"
        for at, gate in enumerate("ifgo") for side in "ih"
    }  # fmt: skip
    assert not made.only_reference and not made.only_port


def test_a_cell_without_a_bias_lacks_that_of_its_kernel() -> None:
    """Its kernels say which: biases of one size fit each other."""
    reference: dict[str, Shape] = {}
    for side, size in (("i", D), ("h", F)):
        reference |= {f"rnn.weight_{side}h_l0": (3 * F, size), f"rnn.bias_{side}h_l0": (3 * F,)}
    for without, other in ("hi", "ih"):
        port: dict[str, Shape] = {
            f"cell.dense_{side}.kernel": (size, 3 * F) for side, size in (("i", D), ("h", F))
        }
        port[f"cell.dense_{other}.bias"] = (3 * F,)
        made = by_names.propose(tensors(reference, "torch"), tensors(port, "jax"))
        assert (made.only_reference, made.only_port) == ([f"rnn.bias_{without}h_l0"], [])


@pytest.mark.parametrize(("shape", "turned"), [((D, F), True), ((F, D), False)])
def test_a_square_kernel_is_turned_as_others_of_its_kind(shape: Shape, turned: bool) -> None:
    """Flax's kernels are turned, not Equinox's; values that say otherwise are the port's bug."""
    sides = (tensors({"a.weight": (F, D), "b.weight": (D, D)}, "torch"),
             tensors({"a.weight": shape, "b.weight": (D, D)}, "jax"))  # fmt: skip
    for found in ([], by_names.propose(*sides).entries):
        for entry in found:
            entry.chosen = len(entry.choices) - 1
        made = by_names.propose(*sides, found=found)
        assert {str(entry.reference): entry.turned for entry in made.entries} == {
            "a.weight": turned, "b.weight": turned}  # fmt: skip


def test_what_no_order_of_axes_fits_is_not_joined() -> None:
    """A kernel of keys and values by groups and heads is no two of a linear layer's, joined."""
    parts: dict[str, Shape] = {"k_proj.weight": (8, 12), "v_proj.weight": (8, 12)}
    sides = tensors(parts, "torch"), tensors({"kv_einsum.kernel": (2, 2, 12, 4)}, "jax")
    for pair in (sides, sides[::-1]):
        made = by_names.propose(*pair, joined="blocks")
        assert all(entry.choices for entry in made.entries)


WAYS = {"forward": "", "backward": "_reverse"}
GRU = {"weight_ih": (3 * D, D), "weight_hh": (3 * D, D), "bias_ih": (3 * D,), "bias_hh": (3 * D,)}
LEAVES = {"kernel": (D, D), "bias": (D,)}
# What names tell together, or with shapes: reference, port, and some partners by the port's tensor.
TOLD: dict[str, tuple[Shapes, Shapes, dict[str, str]]] = {
    "w1 is the gate beside w2 and w3": (
        {"mlp.gate.weight": (F, D), "mlp.up.weight": (F, D), "mlp.down.weight": (D, F)},
        {"ff.w1.kernel": (D, F), "ff.w2.kernel": (F, D), "ff.w3.kernel": (D, F)},
        {"ff.w1.kernel": "mlp.gate.weight", "ff.w3.kernel": "mlp.up.weight"},
    ),
    "w1 goes up beside w2 alone": (
        {"mlp.gate.weight": (F, F), "mlp.up.weight": (F, F), "mlp.down.weight": (F, F)},
        {"ff.gate.kernel": (F, F), "ff.w1.kernel": (F, F), "ff.w2.kernel": (F, F)},
        {"ff.gate.kernel": "mlp.gate.weight", "ff.w1.kernel": "mlp.up.weight"},
    ),
    "cells of gates, in both directions": (
        {f"rnn.{leaf}_l0{way}": shape for way in WAYS.values() for leaf, shape in GRU.items()},
        {f"{way}_cell.{side}{gate}.{leaf}": shape for way in sorted(WAYS)
         for side in "ih" for gate in "rzn" for leaf, shape in LEAVES.items()},
        {"forward_cell.ir.kernel": f"rnn.weight_ih_l0[0:{D}]",
         "backward_cell.hz.bias": f"rnn.bias_hh_l0_reverse[{D}:{2 * D}]"},
    ),
    "cells of gates, in the order of calls": (
        {f"{rnn}.{leaf}_l0": shape for rnn in ("x", "y") for leaf, shape in GRU.items()},
        {f"{cell}.{side}{gate}.{leaf}": shape for cell in "ba"
         for side in "ih" for gate in "rzn" for leaf, shape in LEAVES.items()},
        {"b.hr.bias": f"x.bias_hh_l0[0:{D}]", "a.hr.bias": f"y.bias_hh_l0[0:{D}]"},
    ),
    "fused cells, in both directions and two layers": (
        {f"rnn.{leaf}_l{layer}{way}": shape for layer in "01" for way in WAYS.values()
         for leaf, shape in GRU.items()},
        {f"rnn{layer}.{way}.{kind}_{side}": shape for layer in "12" for way in ("bw", "fw")
         for side in ("rec", "in") for kind, shape in (("w", (D, 3 * D)), ("b", (3 * D,)))},
        {"rnn1.fw.w_in": "rnn.weight_ih_l0", "rnn2.bw.w_rec": "rnn.weight_hh_l1_reverse",
         "rnn2.fw.b_rec": "rnn.bias_hh_l1"},
    ),
    "a cell's kernels": (
        {"rnn.kernel": (D, 3 * D), "rnn.recurrent_kernel": (D, 3 * D)},
        {"cell.h.weight": (3 * D, D), "cell.x.weight": (3 * D, D)},
        {"cell.x.weight": "rnn.kernel"},
    ),
    "attention to itself beside that to a memory": (
        {f"layers.0.{name}.out_proj.weight": (D, F) for name in ("self_attn", "multihead_attn")},
        {f"layers.0.{name}.o.w": (F, D) for name in ("cross", "self")},
        {"layers.0.self.o.w": "layers.0.self_attn.out_proj.weight"},
    ),
    "an embedding that is a module": (
        {"emb": (D, F), "pi.w": (F, D)}, {"actor.kernel": (D, F), "embedding.kernel": (D, F)},
        {"embedding.kernel": "emb"},
    ),
    "kernels that stand as their framework has them": (
        {"q.lora_A": (4, D), "q.lora_B": (D, 4)}, {"query.down": (D, 4), "query.up": (4, D)},
        {"query.down": "q.lora_A", "query.up": "q.lora_B"},
    ),
    "words that begin others": (
        {"transform.weight": (D, D), "pooler.weight": (D, D)},
        {"pool.kernel": (D, D), "dense.kernel": (D, D)}, {"pool.kernel": "pooler.weight"},
    ),
    "a mean and the logarithm of a variance": (
        {"fc_mean.weight": (D, D), "fc_logvar.weight": (D, D)},
        {"log_var.kernel": (D, D), "mu.kernel": (D, D)}, {"mu.kernel": "fc_mean.weight"},
    ),
    "an offset is a bias": (
        {"out.weight": (F, D), "out.bias": (F,), "norm.weight": (F,), "norm.bias": (F,)},
        {"ln_out.offset": (F,), "ln_out.scale": (F,), "fc.w": (D, F), "fc.b": (F,)},
        {"ln_out.offset": "norm.bias", "fc.b": "out.bias"},
    ),
    "experts in each layer": (
        {f"layers.{i}.experts.{e}.{leaf}.weight": shape for i in range(2) for e in range(2)
         for leaf, shape in (("w1", (F, D)), ("w2", (D, F)), ("w3", (F, D)))},
        {f"block{i}.{leaf}": shape for i in range(2) for leaf, shape in (
            ("wi_gate", (2, D, F)), ("wi_up", (2, D, F)), ("wo", (2, F, D)))},
        {"block1.wi_gate[0]": "layers.1.experts.0.w1.weight",
         "block0.wi_up[1]": "layers.0.experts.1.w3.weight"},
    ),
    "a stack is no tensor of one layer": (
        {f"layers.{i}.{leaf}": shape for i in range(2) for leaf, shape in (
            ("gain", (2 * D,)), ("norm.weight", (D,)), ("in.weight", (4 * D, D)),
            ("out.weight", (D, 2 * D)))},
        {"blocks.ln": (2, D), "blocks.skip": (2, 2 * D), "blocks.w_out": (2, 2 * D, D),
         "blocks.w_x": (2, D, 2 * D), "blocks.w_z": (2, D, 2 * D)},
        {"blocks.ln[1]": "layers.1.norm.weight", "blocks.w_out[0]": "layers.0.out.weight",
         "blocks.w_z[1]": f"layers.1.in.weight[{2 * D}:{4 * D}]"},
    ),
    "norms before and behind two parts": (
        {f"{norm}.weight": (D,) for norm in (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
            "post_feedforward_layernorm")},
        {"post_ffw": (D,), "pre_ffw": (D,), "post_attn": (D,), "pre_attn": (D,)},
        {"pre_attn": "input_layernorm.weight", "post_attn": "post_attention_layernorm.weight",
         "pre_ffw": "pre_feedforward_layernorm.weight"},
    ),
    "a weight's length and direction": (
        {f"{block}.{conv}.{leaf}": shape for block in ("enc", "dec")
         for conv, n in (("conv3", 3), ("conv1", 1))
         for leaf, shape in (("bias", (F,)), ("parametrizations.weight.original0", (F, 1, 1, 1)),
                             ("parametrizations.weight.original1", (F, F, n, n)))},
        {f"res{i}.{conv}.{leaf}": shape for i in "12" for conv, n in (("a", 3), ("b", 1))
         for leaf, shape in (("bias", (F,)), ("g", (F,)), ("v", (n, n, F, F)))},
        {"res1.a.v": "enc.conv3.parametrizations.weight.original1", "res2.a.bias": "dec.conv3.bias",
         "res2.b.g": "dec.conv1.parametrizations.weight.original0"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOLD)
def test_what_names_tell_together(kind: str) -> None:
    reference, port, partners = TOLD[kind]
    made = by_names.propose(tensors(reference, "torch"), tensors(port, "jax"), joined="blocks")
    assert not made.only_port and not made.only_reference
    assert partners.items() <= {str(e.port): str(e.reference) for e in made.entries}.items()
    back = by_names.propose(tensors(port, "jax"), tensors(reference, "torch"), joined="blocks")
    assert partners.items() <= {str(e.reference): str(e.port) for e in back.entries}.items()


def test_heads_in_a_stack_of_the_reference_are_turned() -> None:
    """A port's matrix is made of them; the other way round no order of axes makes heads of it."""
    stack = tensors({"blocks.q": (2, 4, F, D)}, "jax")
    single = tensors({f"layers.{i}.q.weight": (4 * D, F) for i in range(2)}, "torch")
    made = by_names.propose(stack, single, joined="blocks")
    assert [str(e) for e in made.entries] == [
        f"layers.{i}.q.weight <- blocks.q[{i}], axes [0, 2, 1]" for i in range(2)
    ]
    assert not by_names.propose(single, stack, joined="blocks").entries


def test_copies_of_a_structure_are_paired_alike() -> None:
    """Shapes and names fit both; the order of one copy's tensors would pair them across."""
    reference = {f"{net}.{leaf}": (F, F) for net in ("policy", "anchor") for leaf in "ab"}
    port = {f"{net}.{leaf}.weight": (F, F) for net, leaves in (("policy", "yx"), ("anchor", "xy"))
            for leaf in leaves}  # fmt: skip
    for theirs, ours in ((reference, port), (port, reference)):
        made = by_names.propose(tensors(theirs, "torch"), tensors(ours, "torch")).entries
        nets = [{e.port.name.replace(net, ""): e.reference.name.replace(net, "") for e in made
                 if net in e.port.name} for net in ("policy", "anchor")]  # fmt: skip
        assert nets[0] == nets[1]


def test_a_number_in_both_names_goes_before_the_order_of_calls() -> None:
    """Without modules a tree's order, such as Haiku's, is that of the alphabet."""
    reference = {f"{part}.lin{at}.w": (D, D) for part in ("dyn", "repr") for at in (1, 2)}
    port = {f"{part}.fc{at}.kernel": (D, D) for part in ("represent", "dynamics") for at in (0, 1)}
    assert found(reference, port) == {
        ("represent.fc0", "repr.lin1.w"), ("represent.fc1", "repr.lin2.w"),
        ("dynamics.fc0", "dyn.lin1.w"), ("dynamics.fc1", "dyn.lin2.w"),
    }  # fmt: skip


def test_the_order_of_calls_counts_within_a_module_first() -> None:
    """An extra kernel of the port moves the places of all that are called behind it."""
    reference = {f"{part}.{lin}.w": (D, D) for part in ("repr", "dyn") for lin in ("lin1", "lin2")}
    port = {"extra.kernel": (D, D)}
    port |= {
        f"{part}.{x}.kernel": (D, D) for part in ("represent", "dynamics") for x in ("ffa", "ffb")
    }
    made = by_names.propose(tensors(reference, "jax"), tensors(port, "jax"))
    pairs = {entry.port.name: entry.reference.name for entry in made.entries}
    for part, own in (("repr", "represent"), ("dyn", "dynamics")):
        assert pairs[f"{own}.ffa.kernel"] == f"{part}.lin1.w"
        assert pairs[f"{own}.ffb.kernel"] == f"{part}.lin2.w"


@pytest.mark.parametrize(("layer", "whole", "idle", "equal", "kept"), [
    (0, False, "", False, True),  # a query and a key of its own layer, fused
    (1, False, "", False, False),  # of another layer
    (0, True, "", False, False),  # while a whole tensor fits
    (0, True, "one side", False, False),
    (0, True, "both sides", False, True),  # that is another's, as neither reaches the loss
    (1, True, "", True, True),  # values are the proof, where the loss is right
])  # fmt: skip
def test_what_is_met_behind_a_difference_tears_no_tensor(
    layer: int, whole: bool, idle: str, equal: bool, kept: bool
) -> None:
    shapes: dict[str, Shape] = {f"layer.{i}.attn.{n}.weight": (D, D) for i in (0, 1) for n in "qk"}
    shapes |= {"layer.0.up.weight": (2 * D, D)} if whole else {}
    starts = {name: at * D * D for at, name in enumerate(shapes)}
    q, k = (
        np.arange(D * D).reshape(D, D).T + starts[f"layer.{layer}.attn.{n}.weight"] for n in "qk"
    )
    fused = np.concatenate([q, k], 1)
    others = {"layers.0.x.kernel": (D, D), "layers.1.x.kernel": (D, D)}
    unused = {"layers.0.up.kernel": (D, 2 * D)} if idle == "both sides" else {}
    source = {"layers.0.fc.kernel": fused} | {n: np.full(s, OPEN) for n, s in unused.items()}
    walked = Followed(source, starts, {**shapes}, [], [*unused], equal,
                      idle=["layer.0.up.weight"] if idle else [])  # fmt: skip
    port = tensors({"layers.0.fc.kernel": (D, 2 * D), **unused, **others}, "jax")
    made = entries_of(walked, tensors(shapes, "torch"), port)
    assert bool(made) is kept


@pytest.mark.parametrize(
    ("names", "is_one"),
    [(["bn.running_mean", "bn.running_var"], True), (["mean", "var"], True),
     (["cell.x_mean", "cell.x_std"], False), (["enc.logvar", "enc.logmean"], False)],
)  # fmt: skip
def test_a_running_statistic_has_the_other_beside_it(names: list[str], *, is_one: bool) -> None:
    """A constant buffer whose name ends so is the port's own, as any constant."""
    assert is_statistic(names[0], names) is is_one


def test_axes_are_split_otherwise_beside_an_axis_of_one() -> None:
    """A convolution of width one, whose channels are pairs of two fields, is an einsum's kernel."""
    assert (1, 2, 0) in fitting_permutations((8, 16, 1), (4, 4, 8))
    assert fitting_permutations((8, 1), (1, 8)) == [(1, 0)]
    assert not fitting_permutations((8, 16, 1), (4, 8, 5))


def test_a_bias_of_each_item_may_be_a_table() -> None:
    """An embedding of one column, which its module calls a bias, is a vector beside it."""
    reference = {"items.weight": (40, 12), "out_bias.weight": (40, 1)}
    assert found(reference, {"E.x": (40, 12), "own.B": (40,)}) == {
        ("E", "items.weight"), ("own", "out_bias.weight")
    }  # fmt: skip


def test_norms_that_linen_counts_from_zero_keep_their_order() -> None:
    """`BatchNorm_1` is the second, and `norm1` the first."""
    linen = {f"Layer_0.BatchNorm_{n}.{leaf}": (D,) for n in (0, 1) for leaf in ("scale", "bias")}
    nnx = {f"units.0.norm{n}.{leaf}": (D,) for n in (1, 2) for leaf in ("scale", "bias")}
    made = by_names.propose(tensors(linen, "jax"), tensors(nnx, "jax"))
    pairs = {str(entry.port): str(entry.reference) for entry in made.entries}
    assert pairs == {f"units.0.norm{n}.{leaf}": f"Layer_0.BatchNorm_{n - 1}.{leaf}"
                     for n in (1, 2) for leaf in ("scale", "bias")}  # fmt: skip
